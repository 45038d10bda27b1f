"""What an operator can do if a broker is unreachable or refuses the proxy."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from typing import Final

CA_FILE: Final = "set upstream_tls.ca_file to the CA that signed the brokers' certificates, as PEM"
HOSTNAME: Final = (
    "use the names of the brokers' certificates in upstream and in Kafka's advertised.listeners, or issue certificates "
    "for the names in use"
)
CERTIFICATE: Final = "set upstream_tls.certificate_file to a certificate that the brokers trust"
TLS_VERSION: Final = "enable TLS 1.2 or newer on both sides: upstream_tls.min_version, ssl.enabled.protocols"
TLS: Final = "add the table [upstream_tls]"
PERHAPS_NO_TLS: Final = "does this port use TLS? If not, remove [upstream_tls], or use the TLS port"
NO_TLS: Final = "remove [upstream_tls], or use the TLS port"
LOGIN: Final = "add the table [control_sasl] with the proxy's own login"
MECHANISM: Final = "set control_sasl.mechanism to one of those"
SECRET_FILE: Final = "check the permissions of that file: the process must be able to read it"
CREDENTIALS: Final = "check control_sasl.username and the first line of the password or token file"
UNKNOWN_HOST: Final = "no name server knows this host: check the spelling"
NO_NAME_SERVER: Final = "no name server responds: check /etc/resolv.conf"
NOTHING_LISTENS: Final = "nothing listens there: is Kafka running, and is this the port of its listener?"
NO_RESPONSE: Final = "no response: check the address and the firewall"
SLOW: Final = "the broker accepts connections but does not respond: is it hanging or overloaded?"
NOT_KAFKA: Final = "another service listens there"
LIMITED: Final = (
    "does the broker limit connections (max.connections.per.ip, max.connections, connection rates)? All clients of a "
    "proxy share its address: raise the limit, or add that address to max.connections.per.ip.overrides"
)
LISTENER: Final = (
    "Clients cannot reach that broker through this proxy. Free the port, or set another in [broker_ports]; the proxy "
    "tries again automatically."
)
RELEASE: Final = "is this a broker, not a controller? If so, this Kafka is too old or too new for this proxy"

#: For commands that connect as a client, in place of some of the above.
FOR_COMMANDS: Final[Mapping[str, str]] = {
    CA_FILE: "set ssl.truststore.location in --command-config to the CA that signed the certificate, as PEM",
    HOSTNAME: "use a name of the certificate in --bootstrap-server",
    CERTIFICATE: "set ssl.keystore.location in --command-config to a certificate that the server trusts",
    TLS_VERSION: "enable TLS 1.2 or newer on both sides",
    TLS: "set security.protocol to SSL or SASL_SSL in --command-config",
    PERHAPS_NO_TLS: "does this port use TLS? If not, set security.protocol to PLAINTEXT or SASL_PLAINTEXT",
    NO_TLS: "set security.protocol to PLAINTEXT or SASL_PLAINTEXT",
    LOGIN: "set security.protocol to SASL_PLAINTEXT or SASL_SSL, and the login, in --command-config",
    MECHANISM: "set sasl.mechanism to one of those in --command-config",
    CREDENTIALS: "check username and password in --command-config",
    NOTHING_LISTENS: "nothing listens there: check --bootstrap-server, or start the server",
    RELEASE: "is this a proxy or broker, not a controller?",
}
#: Key of a proxy's configuration -> the property of --command-config.
PROPERTIES: Final[Mapping[str, str]] = {
    "upstream_tls.ca_file": "ssl.truststore.location",
    "upstream_tls.check_hostname": "ssl.endpoint.identification.algorithm",
    "upstream_tls.certificate_file": "ssl.keystore.location",
    "upstream_tls.min_version": "ssl.enabled.protocols",
    "upstream_tls": "security.protocol",
    "control_sasl.mechanism": "sasl.mechanism",
    "control_sasl": "sasl.jaas.config",
}

#: For the broker of a sidecar, in place of some of the above.
FOR_SIDECAR: Final[Mapping[str, str]] = {
    HOSTNAME: "the broker's certificate must also be valid for the host in broker (127.0.0.1 or localhost, as set "
    "here); or give that listener a protocol without TLS, and set broker_tls = false",
    PERHAPS_NO_TLS: "does this port use TLS? If not, and other listeners of Kafka do: broker_tls = false",
    TLS: "add the table [upstream_tls], or remove broker_tls = false",
    MECHANISM: "enable the proxy's own login at this listener of the broker too",
}


def of_connect(error: OSError | ValueError) -> str:
    if isinstance(error, socket.gaierror):
        return NO_NAME_SERVER if error.errno == socket.EAI_AGAIN else UNKNOWN_HOST
    if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT):
        return NO_RESPONSE
    return NOTHING_LISTENS
