"""Why a TLS handshake failed: OpenSSL's errors as one word and a description."""

from __future__ import annotations

import ssl
from typing import Final

_HOSTNAME_MISMATCH: Final = frozenset({62, 64})  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_NOT_NOW: Final = frozenset({9, 10})  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_NOT_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "RECORD_LAYER_FAILURE"})
_NO_CERTIFICATE: Final = frozenset({"PEER_DID_NOT_RETURN_A_CERTIFICATE"})
_CERTIFICATE_REQUIRED: Final = frozenset({"TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_BAD_CERTIFICATE"})
_DISTRUSTED: Final = frozenset(
    {
        "TLSV1_ALERT_UNKNOWN_CA",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
    }
)
_NO_COMMON: Final = frozenset(
    {
        "UNSUPPORTED_PROTOCOL",
        "NO_SHARED_CIPHER",
        "NO_PROTOCOLS_AVAILABLE",
        "TLSV1_ALERT_PROTOCOL_VERSION",
        "SSLV3_ALERT_HANDSHAKE_FAILURE",
        "TLSV1_ALERT_INSUFFICIENT_SECURITY",
    }
)


class NotTls(OSError):
    """The peer does not speak TLS."""


def failure(error: OSError) -> tuple[str, str]:
    """The kind of failure, as one word, and OpenSSL's description."""
    if isinstance(error, ssl.SSLCertVerificationError):
        code = error.verify_code
        kind = "hostname_mismatch" if code in _HOSTNAME_MISMATCH else "not_now" if code in _NOT_NOW else "untrusted"
        return kind, error.verify_message
    if isinstance(error, NotTls):
        return "not_tls", str(error)
    if not isinstance(error, ssl.SSLError):
        return "left", error.strerror or str(error) or "no reason given"
    reason = error.reason or ""
    stated = reason.rpartition("ALERT_")[2].replace("_", " ").lower() or str(error)
    for kind, reasons in (
        ("not_tls", _NOT_TLS),
        ("no_certificate", _NO_CERTIFICATE),
        ("certificate_required", _CERTIFICATE_REQUIRED),
        ("distrusted", _DISTRUSTED),
        ("no_common", _NO_COMMON),
    ):
        if reason in reasons:
            return kind, stated
    return ("left" if "EOF" in reason else "failed"), stated


def of_broker(error: OSError) -> tuple[str, str]:
    """Why the handshake with a broker failed: a metric label, and a description for the log."""
    kind, stated = failure(error)
    match kind:
        case "not_now":
            kind, words = "untrusted", f"its certificate is not valid now: {stated}"
        case "untrusted":
            words = f"its certificate is not trusted: {stated} (upstream_tls.ca_file)"
        case "hostname_mismatch":
            words = f"its certificate is for another name: {stated} (upstream_tls.check_hostname)"
        case "not_tls":
            words = "it does not speak TLS, and upstream_tls is set"
        case "certificate_required":
            words = f"it requires a certificate that it trusts: {stated} (upstream_tls.certificate_file)"
        case "distrusted":
            words = f"it does not trust the proxy's certificate: {stated} (upstream_tls.certificate_file)"
        case "no_common":
            words = f"it has no TLS version or cipher in common with this proxy: {stated} (upstream_tls.min_version)"
        case "left":
            words = f"it closed the connection during the TLS handshake: {stated}; does it speak TLS (upstream_tls)?"
        case _:
            words = f"the TLS handshake failed: {stated}"
    return kind, words
