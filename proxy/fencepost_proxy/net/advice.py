"""What to do about what is said: why a process is not ready, what is to be looked at, why a broker is not reached.

Found by words of what is said, the first that fit: reasons are told where they arise, and what helps stands here, once
for page, terminal and `fencepost check`. A test goes through all that can be said of readiness.
"""

from __future__ import annotations

from typing import Final

_Table = tuple[tuple[str, str], ...]

#: About a connection to a broker.
_CONNECTION: Final[_Table] = (
    ("upstream_tls.ca_file", "give the authority that signed the brokers' certificates, as PEM: upstream_tls.ca_file"),
    (
        "upstream_tls.check_hostname",
        "name the brokers, in upstream and in Kafka's advertised.listeners, as their certificate does; or have it "
        "signed for the name that is used",
    ),
    ("upstream_tls.certificate_file", "give a certificate that the brokers trust: upstream_tls.certificate_file"),
    (
        "upstream_tls.min_version",
        "let both sides speak TLS 1.2 or newer: upstream_tls.min_version, ssl.enabled.protocols",
    ),
    ("it speaks TLS; set upstream_tls", "add the table [upstream_tls]"),
    ("(upstream_tls)?", "does this port speak TLS? If not, take [upstream_tls] away, or name the port that does"),
    ("and upstream_tls is set", "take [upstream_tls] away, or name the port that speaks TLS"),
    ("(control_sasl)?", "add the table [control_sasl] with the proxy's own login"),
    ("(control_sasl.mechanism)", "choose one of those as control_sasl.mechanism"),
    ("control_sasl.", "look at that file: who owns it, and whether the process may read it"),
    ("SASL ", "look at control_sasl.username, and at the first line of the file with the password or token"),
    ("Name or service not known", "no name server here knows this host: is it spelt right?"),
    ("Temporary failure in name resolution", "no name server answers here: look at /etc/resolv.conf"),
    ("Connect call failed", "nobody listens there: does Kafka run, and is this the port of its listener?"),
    ("refused", "nobody listens there: does Kafka run, and is this the port of its listener?"),
    ("no connection within", "nothing answers there: is it the right address, and does a firewall let it through?"),
    ("in time", "it takes connections and does not answer: does it hang, or has it too much to do?"),
    ("is not talking Kafka", "something else listens there"),
    ("needed is v", "is this a broker, not a controller? If so, this Kafka is too old or too new for this proxy"),
)

#: About one to the broker that a sidecar stands before; then what is said of any.
_BESIDE: Final[_Table] = (
    (
        "upstream_tls.check_hostname",
        "the broker's certificate has to be for the host of broker too (127.0.0.1, or localhost and then named so "
        "here); or give that listener a protocol without TLS, and set broker_tls = false",
    ),
    ("(upstream_tls)?", "does this port speak TLS? If not, and others of Kafka do: broker_tls = false"),
    ("it speaks TLS; set upstream_tls", "add the table [upstream_tls], or take broker_tls = false away"),
    ("(control_sasl.mechanism)", "let the broker take the proxy's own login at this listener too"),
    ("this listener takes no logins", "let the broker take the proxy's own login at this listener too"),
)

_DECIDE: Final = (
    "Decide what is to be guarded: whoever switched it on knows it, and a proxy that still runs shows it (fencepost "
    "topics). Then"
)
_RESTART: Final = f"{_DECIDE} restart every proxy, and switch it on again (kafka-configs)."
_ANEW: Final = (
    f"{_DECIDE} stop every proxy, delete the state topic at Kafka itself, start them, and switch it on again "
    "(kafka-configs)."
)

#: Why it is not ready. What a topic is wrong with comes before "cannot be used", which is said in front of it.
_NOT_READY: Final[_Table] = (
    ("it is shutting down", "Nothing: it was asked to stop. Clients go to another proxy, or come back to the next."),
    ("the owner process is being started", "Wait a moment. Should it last, the log says why it ends."),
    # A state topic that cannot be relied on.
    (
        "it cannot be this proxy's state topic",
        "Who has made it? Delete that topic, if it is nobody's, at Kafka itself. It goes on by itself.",
    ),
    (
        "has cleanup.policy=",
        "kafka-configs --alter --entity-type topics --entity-name TOPIC --add-config cleanup.policy=compact, at Kafka "
        "itself. It goes on by itself.",
    ),
    (
        "wants every producer to begin at sequence 0",
        "Put a Kafka release behind it that this version is tested with. Nothing was lost.",
    ),
    ("was deleted and created again", _RESTART),
    ("lost records (read up to", _ANEW),
    ("the producer id of this cluster is unknown", _ANEW),
    (
        "Its compression.type must be",
        f"Somebody wrote there, or changed that config: put it back, and let nobody else write there. {_ANEW}",
    ),
    (
        "the state topic belongs to cluster",
        "Does upstream lead to the right cluster? If the topic was copied (MirrorMaker): leave it out there "
        "(topics.exclude), delete the copy while no proxy runs here, then start them.",
    ),
    (
        "Was it set by a newer version of this proxy?",
        "Update this proxy to the newest version that runs before this cluster; or delete the config of that topic "
        "with kafka-configs through a proxy of that version.",
    ),
    (
        "following it crashed",
        "Restart this process, and report the log's stack trace. Clients go to another proxy meanwhile.",
    ),
    # One that cannot be reached, or not be relied on at the moment.
    (
        "waiting for the state topic",
        "Wait a minute: a broker that is busy learns late of a new topic. Should it last: are all brokers there, and "
        "may the proxy's user CREATE and DESCRIBE it? fencepost check says so.",
    ),
    (
        "nothing can be stored in",
        "Are as many replicas of the state topic in sync as its min.insync.replicas? Start the brokers that are away. "
        "It goes on by itself.",
    ),
    (
        "who leads the state topic",
        "Enough of its replicas have to answer before its leader is believed. Start the brokers that are away, or "
        "let this machine reach them. It goes on by itself.",
    ),
    (
        "the state topic was not read recently enough",
        "Guarded appends wait until it is read again. Has the state topic a leader, can the proxy reach it, and does "
        "this process get CPU time? Problems with brokers stand below; the log says why.",
    ),
    (
        "the brokers' settings cannot be read",
        "Does any broker answer? Problems with brokers stand below; fencepost check says more. It goes on by itself.",
    ),
    (
        "cannot be read: ",
        "Has the state topic a leader, can this machine reach it, and may the proxy's user READ it? fencepost check "
        "says so.",
    ),
    ("it is closed to clients", "Upstream seems to lead to a proxy: name Kafka's own brokers there."),
    (
        "cannot be used: ",
        "May the proxy's user CREATE, READ, WRITE and DESCRIBE the state topic, and is it given a producer id "
        "(IDEMPOTENT_WRITE)? fencepost check says so. It goes on by itself.",
    ),
    (
        "the other proxy processes cannot be told",
        "Guarded appends wait. Can the proxy append to the state topic (WRITE, min.insync.replicas)?",
    ),
    (
        "reading the state topic",
        "Wait a moment. Should it last: has the state topic a leader, and may the proxy's user READ it?",
    ),
    # A sidecar's broker.
    (
        "was not asked yet what it advertises",
        "Wait a moment. Should it last: does its broker run, and is broker its address?",
    ),
    (
        "cannot be asked what it advertises",
        "Does its broker run, and is broker the address of its listener for sidecars? fencepost check --running says "
        "more.",
    ),
    ("upstream is of ", "Let broker and upstream name the same cluster."),
    ("it does not listen yet", "Wait a moment. Should it last, its port is taken: the log names it."),
    (
        "does not advertise this sidecar",
        "In the broker's server.properties: advertised.listeners of the listener that broker names has to be the "
        "address of this sidecar. Until then clients go past it.",
    ),
    (
        "each needs a sidecar of its own",
        "Give every broker its own address in advertised.listeners, with its own sidecar behind it.",
    ),
    (
        "upstream leads to the sidecars too",
        "Let upstream name a listener that clients do not use, such as the one between brokers.",
    ),
)
NOT_READY_ELSE: Final = "The log says more. Guarded appends are answered with a retriable error until it is ready."

_WAITING: Final = "waiting for Kafka"
_CHECK_SAYS_MORE: Final = "fencepost check says more. It goes on by itself once a broker answers."

#: What an operator should look at although it serves.
_WARNING: Final[_Table] = (
    (
        "keep the checks",
        "Decide for each: set its configs through the proxy (kafka-configs --alter, --add-config or --delete-config), "
        "or delete it through the proxy. Topics that are deleted through the proxy leave no checks behind.",
    ),
    (
        "has grown around the proxy",
        "Nothing brings that order back. Let partitions be added through the proxy only: docs/partition-expansion.md.",
    ),
    (
        "is being started",
        "Wait a moment: its clients are served by the others. Should it come again, the log says why it ends.",
    ),
)


def of_connection(said: str, *, beside: bool = False) -> str:
    """About a broker that cannot be reached, or does not let us in. `beside` – the one that a sidecar stands before."""
    own = _found(_BESIDE, said) if beside else None
    return own or _found(_CONNECTION, said) or "look at the broker's log"


def of_not_ready(reason: str) -> str:
    if reason.startswith(_WAITING):
        remedy = _found(_CONNECTION, reason) or "is Kafka up, and is upstream its address?"
        stop = "" if remedy.endswith("?") else "."
        return f"{remedy[:1].upper()}{remedy[1:]}{stop} {_CHECK_SAYS_MORE}"
    return _found(_NOT_READY, reason) or NOT_READY_ELSE


def of_warning(warning: str) -> str:
    return _found(_WARNING, warning) or ""


def _found(table: _Table, said: str) -> str | None:
    return next((remedy for words, remedy in table if words in said), None)
