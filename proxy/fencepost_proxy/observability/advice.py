"""Suggested actions for reasons, warnings and connection errors.

Each table maps words of a message to an action; the first match wins. The status page, the terminal and
`fencepost check` share these tables. `tests/unit/test_advice.py` checks that every readiness reason has an action.
"""

from __future__ import annotations

from typing import Final

_Table = tuple[tuple[str, str], ...]

#: For a connection to a broker.
_CONNECTION: Final[_Table] = (
    ("upstream_tls.ca_file", "set upstream_tls.ca_file to the CA that signed the brokers' certificates, as PEM"),
    (
        "upstream_tls.check_hostname",
        "use the names of the brokers' certificates in upstream and in Kafka's advertised.listeners, or issue "
        "certificates for the names in use",
    ),
    ("upstream_tls.certificate_file", "set upstream_tls.certificate_file to a certificate that the brokers trust"),
    (
        "upstream_tls.min_version",
        "enable TLS 1.2 or newer on both sides: upstream_tls.min_version, ssl.enabled.protocols",
    ),
    ("it speaks TLS; set upstream_tls", "add the table [upstream_tls]"),
    ("(upstream_tls)?", "does this port use TLS? If not, remove [upstream_tls], or use the TLS port"),
    ("and upstream_tls is set", "remove [upstream_tls], or use the TLS port"),
    ("(control_sasl)?", "add the table [control_sasl] with the proxy's own login"),
    ("(control_sasl.mechanism)", "set control_sasl.mechanism to one of those"),
    ("control_sasl.", "check the permissions of that file: the process must be able to read it"),
    ("SASL ", "check control_sasl.username and the first line of the password or token file"),
    ("Name or service not known", "no name server knows this host: check the spelling"),
    ("Temporary failure in name resolution", "no name server responds: check /etc/resolv.conf"),
    ("Connect call failed", "nothing listens there: is Kafka running, and is this the port of its listener?"),
    ("refused", "nothing listens there: is Kafka running, and is this the port of its listener?"),
    ("no connection within", "no response: check the address and the firewall"),
    ("in time", "the broker accepts connections but does not respond: is it hanging or overloaded?"),
    ("is not talking Kafka", "another service listens there"),
    ("needed is v", "is this a broker, not a controller? If so, this Kafka is too old or too new for this proxy"),
)

#: For a connection to the broker of a sidecar, before `_CONNECTION`.
_SIDECAR: Final[_Table] = (
    (
        "upstream_tls.check_hostname",
        "the broker's certificate must also be valid for the host in broker (127.0.0.1 or localhost, as set here); or "
        "give that listener a protocol without TLS, and set broker_tls = false",
    ),
    ("(upstream_tls)?", "does this port use TLS? If not, and other listeners of Kafka do: broker_tls = false"),
    ("it speaks TLS; set upstream_tls", "add the table [upstream_tls], or remove broker_tls = false"),
    ("(control_sasl.mechanism)", "enable the proxy's own login at this listener of the broker too"),
    ("this listener takes no logins", "enable the proxy's own login at this listener of the broker too"),
)

_DECIDE: Final = (
    "Decide which topics need checks: a proxy that still runs lists the current ones (fencepost topics). Then"
)
_RESTART: Final = f"{_DECIDE} restart every proxy, and switch the checks on again (kafka-configs)."
_RECREATE: Final = (
    f"{_DECIDE} stop every proxy, delete the state topic directly in Kafka, start the proxies, and switch the checks "
    "on again (kafka-configs)."
)
#: Readiness. Problems of the state topic come before "cannot be used", which precedes them in the same message.
_NOT_READY: Final[_Table] = (
    ("it is shutting down", "Nothing: the proxy was stopped. Clients use another proxy, or reconnect after a restart."),
    ("the primary worker is starting", "Wait a moment. If it persists, the log gives the reason."),
    # The state topic is unusable.
    (
        "it cannot be this proxy's state topic",
        "Check which client created that topic. If nothing uses it, delete it directly in Kafka. The proxy recovers "
        "automatically.",
    ),
    (
        "has cleanup.policy=",
        "kafka-configs --alter --entity-type topics --entity-name TOPIC --add-config cleanup.policy=compact, directly "
        "in Kafka. The proxy recovers automatically.",
    ),
    (
        "requires new producers to begin at sequence 0",
        "Use a Kafka release that this version is tested with. Nothing was lost.",
    ),
    ("was deleted and created again", _RESTART),
    ("lost records (read up to", _RECREATE),
    ("the producer id of this cluster is unknown", _RECREATE),
    (
        "Its compression.type must be",
        f"Another client wrote to it or changed that config: restore the config, and deny WRITE to others. {_RECREATE}",
    ),
    (
        "the state topic belongs to cluster",
        "Check that upstream is the right cluster. If MirrorMaker copied the topic: exclude it there "
        "(topics.exclude), delete the copy while no proxy runs here, then start the proxies.",
    ),
    (
        "Was it set by a newer version of this proxy?",
        "Update this proxy to the newest version in use for this cluster, or delete the config of that topic "
        "with kafka-configs through a proxy of that version.",
    ),
    (
        "following it crashed",
        "Restart this process, and report the stack trace in the log. Meanwhile clients use another proxy.",
    ),
    # The state topic is unreachable or out of date.
    (
        "waiting for the state topic",
        "Wait a minute: a busy broker reports a new topic late. If it persists: are all brokers up, and may the "
        "proxy's user CREATE and DESCRIBE it? Run fencepost check.",
    ),
    (
        "nothing can be stored in",
        "Are at least min.insync.replicas replicas of the state topic in sync? Start the missing brokers. The proxy "
        "recovers automatically.",
    ),
    (
        "leader of the state topic",
        "Enough replicas must respond to confirm the leader. Start the missing brokers, or let this machine reach "
        "them. The proxy recovers automatically.",
    ),
    (
        "the state topic was not read recently enough",
        "Appends to checked topics wait until it is read again. Does the state topic have a leader, can the proxy "
        "reach it, and does this process get CPU time? Broker problems are listed below; the log gives the reason.",
    ),
    (
        "the brokers' settings cannot be read",
        "Does any broker respond? Broker problems are listed below; fencepost check shows details. The proxy recovers "
        "automatically.",
    ),
    (
        "cannot be read: ",
        "Does the state topic have a leader, can this machine reach it, and may the proxy's user READ it? Run "
        "fencepost check.",
    ),
    ("it is closed to clients", "Upstream seems to be a proxy: set it to Kafka's own brokers."),
    (
        "cannot be used: ",
        "May the proxy's user CREATE, READ, WRITE and DESCRIBE the state topic, and get a producer id "
        "(IDEMPOTENT_WRITE)? Run fencepost check. The proxy recovers automatically.",
    ),
    (
        "the heartbeat of this process could not be stored",
        "Appends to checked topics wait. Can the proxy append to the state topic (WRITE, min.insync.replicas)?",
    ),
    (
        "reading the state topic",
        "Wait a moment. If it persists: does the state topic have a leader, and may the proxy's user READ it?",
    ),
    # The broker of a sidecar.
    (
        "is not known yet",
        "Wait a moment. If it persists: is the broker running, and is broker its address?",
    ),
    (
        "cannot read the broker's advertised address",
        "Is the broker running, and is broker the address of its listener for sidecars? fencepost check --running "
        "shows details.",
    ),
    ("upstream is of ", "Set broker and upstream to the same cluster."),
    ("does not listen yet", "Wait a moment. If it persists, its port is in use: the log names it."),
    (
        "does not advertise this sidecar",
        "In the broker's server.properties, set advertised.listeners of the listener that broker names to the "
        "address of this sidecar. Until then clients bypass it.",
    ),
    (
        "each needs its own sidecar",
        "Give every broker its own address in advertised.listeners, served by its own sidecar.",
    ),
    (
        "upstream leads to the sidecars too",
        "Set upstream to a listener that clients do not use, such as the inter-broker listener.",
    ),
)
NOT_READY_ELSE: Final = (
    "The log gives the reason. Appends to checked topics fail with a retriable error until the proxy is ready."
)

_WAITING: Final = "waiting for Kafka"
_CHECK_SAYS_MORE: Final = "fencepost check shows details. The proxy recovers automatically when a broker responds."

#: Warnings while the proxy serves.
_WARNING: Final[_Table] = (
    (
        "keep the checks",
        "Decide for each: set its configs through the proxy (kafka-configs --alter, --add-config or --delete-config), "
        "or delete it through the proxy, which deletes its checks too.",
    ),
    (
        "was expanded without the proxy",
        "The order cannot be restored. Add partitions only through the proxy: docs/partition-expansion.md.",
    ),
    (
        "is starting",
        "Wait a moment: the other workers serve its clients. If it recurs, the log gives the reason.",
    ),
)


def of_connection(stated: str, *, of_sidecar: bool = False) -> str:
    """Action for a broker that is unreachable or refuses the proxy. `of_sidecar`: the broker of a sidecar."""
    for_sidecar = _found(_SIDECAR, stated) if of_sidecar else None
    return for_sidecar or _found(_CONNECTION, stated) or "check the broker's log"


def of_not_ready(reason: str) -> str:
    if reason.startswith(_WAITING):
        remedy = _found(_CONNECTION, reason) or "is Kafka up, and is upstream its address?"
        stop = "" if remedy.endswith("?") else "."
        return f"{remedy[:1].upper()}{remedy[1:]}{stop} {_CHECK_SAYS_MORE}"
    return _found(_NOT_READY, reason) or NOT_READY_ELSE


def of_warning(warning: str) -> str:
    return _found(_WARNING, warning) or ""


def _found(table: _Table, stated: str) -> str | None:
    return next((remedy for words, remedy in table if words in stated), None)
