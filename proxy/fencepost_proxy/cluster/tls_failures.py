"""Why a TLS handshake failed: OpenSSL's errors as one word and a description."""

from __future__ import annotations

import ssl
from typing import Final, NamedTuple

from fencepost_proxy.cluster import hints

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


#: Why a handshake with a broker failed, by kind of failure, and what to do.
_OF_BROKER: Final = {
    "not_now": ("its certificate is not valid now: {}", ""),
    "untrusted": ("its certificate is not trusted: {} (upstream_tls.ca_file)", hints.CA_FILE),
    "hostname_mismatch": ("its certificate is for another name: {} (upstream_tls.check_hostname)", hints.HOSTNAME),
    "not_tls": ("it does not speak TLS, and upstream_tls is set", hints.NO_TLS),
    "certificate_required": (
        "it requires a certificate that it trusts: {} (upstream_tls.certificate_file)",
        hints.CERTIFICATE,
    ),
    "distrusted": (
        "it does not trust the proxy's certificate: {} (upstream_tls.certificate_file)",
        hints.CERTIFICATE,
    ),
    "no_common": (
        "it has no TLS version or cipher in common with this proxy: {} (upstream_tls.min_version)",
        hints.TLS_VERSION,
    ),
    "left": (
        "it closed the connection during the TLS handshake: {}; does it speak TLS (upstream_tls)?",
        hints.PERHAPS_NO_TLS,
    ),
}


class OfBroker(NamedTuple):
    """Why the handshake with a broker failed. `kind`: a metric label. `words`: for the log. `hint`: what to do."""

    kind: str
    words: str
    hint: str


def of_broker(error: OSError) -> OfBroker:
    kind, stated = failure(error)
    words, hint = _OF_BROKER.get(kind, ("the TLS handshake failed: {}", ""))
    return OfBroker("untrusted" if kind == "not_now" else kind, words.format(stated), hint)
