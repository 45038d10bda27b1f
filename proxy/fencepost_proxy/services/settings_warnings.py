"""Warnings about settings that are valid, but perhaps not meant."""

from __future__ import annotations

from fencepost_proxy import logs
from fencepost_proxy.config import ProxyConfig

_log = logs.get("services.settings_warnings")


def warn_of_settings(config: ProxyConfig) -> None:
    if config.unsafe_disable_fencing:
        _log.error("unsafe_disable_fencing is set: an append may be accepted at an offset that it did not expect")
    if config.broker is not None and config.mode != "sidecar":
        _log.warning('broker is set and not used: mode is "gateway", not "sidecar"')
    mechanism = None if config.control_sasl is None else config.control_sasl.mechanism
    if mechanism in ("PLAIN", "OAUTHBEARER") and config.upstream_tls is None:
        _log.warning(
            "the proxy sends its password or token to Kafka in plaintext: upstream_tls is not set",
            mechanism=mechanism,
        )
    if (config.listen_tls is None) is not (config.upstream_tls is None):
        plaintext_part = "from clients to the proxy" if config.listen_tls is None else "from the proxy to Kafka"
        _log.warning(
            f"TLS is enabled on one side only: traffic, including SASL passwords, is plaintext {plaintext_part}"
        )
    tls = config.upstream_tls
    if tls is not None and tls.certificate_file is not None and config.control_sasl is None:
        _log.warning(
            "if Kafka maps the certificate of upstream_tls to a principal, every client without a SASL login has "
            "the proxy's permissions"
        )
