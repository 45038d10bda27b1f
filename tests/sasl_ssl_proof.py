"""`python -m tests.sasl_ssl_proof`: does a client of a Kafka with SASL_SSL observe any difference through the proxy?

Prints two tables, from a Kafka of three brokers. The first compares scripts of each client × mechanism at Kafka and
through the proxy. The second has clients whose logins expire every few seconds while they append. Exit status 1: a
result differs, or an append failed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar
from urllib.request import urlopen

from tests.integration.test_equivalence import AT_MS, SCRIPTS, Stage, _addresses
from tests.kit.waiting import until
from tests.support.java_clients import JAVA_SCRIPTS, play_java
from tests.support.kafka import unique_topic
from tests.support.ports import free_port
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log
from tests.support.sasl_ssl import ADMIN, MECHANISMS, Secured, sasl_ssl_kafka
from tests.support.senders import JavaProducers, Sender, open_sender

T = TypeVar("T")
CHECKS = '[topics."required-*"]\n"fencepost.check.expected.offsets" = "required"\n'
CLIENTS = ("Java", "kafka-python", "aiokafka", "confluent-kafka")
#: The lifetime of a login, and the number of logins that a client should make. The proxy stops sending shortly before a
#: login expires; requests in flight must complete by then, also on a busy machine.
_LOGIN_SECONDS, _LOGINS = 6, 3


def both(play: Callable[[str], T], direct: str, proxied: str) -> tuple[T, T]:
    """Run the same script at Kafka and at the proxy, concurrently."""
    with ThreadPoolExecutor(2) as pool:
        observed = list(pool.map(play, [direct, proxied]))
    return observed[0], observed[1]


# --- scripts ----------------------------------------------------------------------------------------------------------


def play(
    scripts: Sequence[str], bootstrap: str, *, brokers: int, secured: Secured, mechanism: str, directory: Path
) -> dict[str, str]:
    """Script → what the client's user observed, with names and addresses made equal."""
    names = _addresses(bootstrap, secured)
    observed = {}
    for script in scripts:
        if script in SCRIPTS:
            stage = Stage(bootstrap, brokers, secured, mechanism)
            observed[script] = stage.plain(SCRIPTS[script](stage), names)
    if java := [each for each in scripts if each in JAVA_SCRIPTS]:
        stage = Stage(bootstrap, brokers, secured, mechanism)
        played = play_java(
            stage.java, java, prefix=stage.name("java"), brokers=brokers, at_ms=AT_MS, directory=directory
        )
        observed |= {script: stage.plain(text, names) for script, text in played.items()}
    return observed


# --- logins that end --------------------------------------------------------------------------------------------------


def opened(client: str, bootstrap: str, secured: Secured, mechanism: str, java: JavaProducers) -> tuple[Sender, int]:
    """A producer of one record per batch, and its number of appends in flight."""
    library = "java" if client == "Java" else client
    alone = {"java": {"batch_size": 0}, "confluent-kafka": {"batch_num_messages": 1}}.get(library, {})
    sender = open_sender(library, java, bootstrap, **alone, **secured.login(library, ADMIN, mechanism))
    return sender, 20 if alone else 1


def append_for_long(
    client: str, bootstrap: str, secured: Secured, mechanism: str, topic: str, *, is_checked: bool
) -> tuple[int, int]:
    """The numbers of accepted and failed appends during several logins."""
    until_time = time.monotonic() + _LOGINS * _LOGIN_SECONDS
    accepted = failed = 0
    with JavaProducers() as java:
        sender, at_once = opened(client, bootstrap, secured, mechanism, java)
        try:
            while time.monotonic() < until_time and not failed:
                at = range(accepted, accepted + at_once)
                sendings = [sender.send(topic, f"{each}", expected=each if is_checked else None) for each in at]
                ended = [each.get() for each in sendings]
                accepted += sum(observed.offset == each for observed, each in zip(ended, at, strict=True))
                failed += sum(observed.offset != each for observed, each in zip(ended, at, strict=True))
                for observed in ended:
                    if observed.error is not None:
                        print(f"  {client}, {mechanism}: append {accepted}: {observed}", flush=True)
        finally:
            sender.close()
    return accepted, failed


@dataclass(frozen=True)
class LoggedIn:
    """Results for one client and mechanism. `logins`, `connections` – of the client, through the proxy."""

    direct: tuple[int, int]
    proxied: tuple[int, int]
    logins: int
    connections: int
    complete: bool

    @property
    def holds(self) -> bool:
        return self.complete and not self.direct[1] and not self.proxied[1] and self.logins >= _LOGINS


def log_in_anew(client: str, secured: Secured, mechanism: str, proxy: ProxyProcess, status: int) -> LoggedIn:
    """At Kafka with the usual configuration; through the proxy, each append also states its expected offset."""
    topics = {prefix: _created(secured, unique_topic(prefix)) for prefix in ("plain", "required")}
    before = _counted(status)

    def append(is_checked: bool) -> tuple[int, int]:
        bootstrap = proxy.bootstrap if is_checked else secured.kafka.bootstrap_of("SHORT")
        topic = topics["required" if is_checked else "plain"]
        return append_for_long(client, bootstrap, secured, mechanism, topic, is_checked=is_checked)

    with ThreadPoolExecutor(2) as pool:
        direct, proxied = pool.map(append, [False, True])
    after = _counted(status)
    values = [[int(each) for each in Log(secured.kafka.bootstrap).values(topics[prefix])] for prefix in topics]
    complete = values == [list(range(direct[0])), list(range(proxied[0]))]
    return LoggedIn(direct, proxied, after[0] - before[0], after[1] - before[1], complete)


def _created(secured: Secured, name: str) -> str:
    with Connection(secured.kafka.bootstrap.partition(",")[0]) as admin:
        assert admin.create_topic(name) == (0, None)
    until(lambda: Log(secured.kafka.bootstrap).end(name) == 0, f"the leader of {name}")
    return name


def _counted(status: int) -> tuple[int, int]:
    """Logins and connections of clients so far."""
    with urlopen(f"http://127.0.0.1:{status}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
    logins = re.search(r'^fencepost_requests_total\{api="SaslHandshake".*\} ([\d.]+)', text, re.MULTILINE)
    connections = re.search(r"^fencepost_client_connections_accepted_total ([\d.]+)", text, re.MULTILINE)
    return tuple(0 if each is None else int(float(each[1])) for each in (logins, connections))  # type: ignore[return-value]


# --- the tables -------------------------------------------------------------------------------------------------------


def compared(secured: Secured, brokers: int, mechanism: str, directory: Path, scripts: Sequence[str]) -> dict[str, str]:
    """Script → "equal", or the first difference. The proxy logs in by the same mechanism."""
    upstream = secured.kafka.bootstrap_of("SECURED")
    found = {}
    with ProxyProcess(upstream, directory, config=secured.proxy_config(mechanism)) as proxy:
        # Java's scripts share one JVM. Each of the others runs alone, so that a failure affects only that script.
        java = [each for each in scripts if each in JAVA_SCRIPTS]
        for group in [java] * bool(java) + [[each] for each in scripts if each not in JAVA_SCRIPTS]:
            direct, proxied = both(
                lambda where, group=group: play(  # type: ignore[misc]
                    group, where, brokers=brokers, secured=secured, mechanism=mechanism, directory=directory
                ),
                secured.kafka.bootstrap_of("SECURED"),
                proxy.bootstrap,
            )
            for script in group:
                found[script] = _difference(direct[script], proxied[script])
                print(f"  {mechanism}, {script}: {found[script]}", flush=True)
    return found


def _difference(direct: str, proxied: str) -> str:
    if direct == proxied:
        return "equal"
    at = next((i for i, pair in enumerate(zip(direct, proxied, strict=False)) if pair[0] != pair[1]), 0)
    return f"direct …{direct[max(0, at - 80) : at + 200]} proxied …{proxied[max(0, at - 80) : at + 200]}"


@contextmanager
def short_logins(secured: Secured, directory: Path) -> Iterator[tuple[ProxyProcess, int]]:
    """A proxy at the listener with short logins, which limits the proxy's logins too; and the port of its metrics."""
    status = free_port()
    config = secured.proxy_config("SCRAM-SHA-512", more=f'status = "127.0.0.1:{status}"') + CHECKS
    with ProxyProcess(secured.kafka.bootstrap_of("SHORT"), directory, config=config) as proxy:
        yield proxy, status


def table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sasl_ssl_proof")
    parser.add_argument("--brokers", type=int, default=3)
    parser.add_argument("--mechanisms", default=",".join(MECHANISMS), help="by commas (default: all)")
    parser.add_argument("--clients", default=",".join(CLIENTS), help="by commas (default: all)")
    parser.add_argument("--only", choices=["scripts", "logins"], help="one of the two tables")
    options = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    # Kafka may not respond to a connection's TLS shutdown directly after an append without acknowledgement.
    asyncio.constants.SSL_SHUTDOWN_TIMEOUT = 1.0  # type: ignore[attr-defined]
    mechanisms, clients = options.mechanisms.split(","), options.clients.split(",")
    scripts = [each for each in (*JAVA_SCRIPTS, *SCRIPTS) if each.partition(":")[0] in clients]
    observed: dict[str, dict[str, str]] = {}
    anew: dict[tuple[str, str], LoggedIn] = {}
    directory = Path(tempfile.mkdtemp(prefix="fencepost-sasl-ssl-"))
    started = time.monotonic()
    # No authorizer: its rules apply to the whole cluster, and both setups run concurrently.
    properties = {
        "authorizer.class.name": "",
        "listener.name.short.connections.max.reauth.ms": str(_LOGIN_SECONDS * 1000),
    }
    with sasl_ssl_kafka(directory, options.brokers, properties) as secured:
        if options.only != "logins":
            observed = {each: compared(secured, options.brokers, each, directory, scripts) for each in mechanisms}
        with short_logins(secured, directory) as (proxy, status):
            for client, mechanism in product(clients, mechanisms) if options.only != "scripts" else ():
                anew[client, mechanism] = log_in_anew(client, secured, mechanism, proxy, status)
                print(f"  {client}, {mechanism}: {anew[client, mechanism]}", flush=True)

    def cell(mechanism: str, script: str) -> str:
        return "equal" if observed[mechanism][script] == "equal" else "**differs**"

    if observed:
        print("\n" + table(["client: script", *observed], [[s, *(cell(m, s) for m in observed)] for s in scripts]))
    header = [
        "client",
        "mechanism",
        "appends at Kafka",
        "failed",
        "through the proxy",
        "failed",
        "logins",
        "connections",
    ]
    rows = [[*key, *each.direct, *each.proxied, each.logins, each.connections] for key, each in anew.items()]
    if anew:
        print("\n" + table(header, rows))
    holds = all(each == "equal" for found in observed.values() for each in found.values())
    holds &= all(each.holds for each in anew.values())
    print(f"\n{'holds' if holds else 'DOES NOT HOLD'}; {time.monotonic() - started:.0f} s")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
