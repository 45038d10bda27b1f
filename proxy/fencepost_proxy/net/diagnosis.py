"""Is it well? And if not: what is wrong, and what to do. Whoever opens the status page at night reads this first.

Pure: `of_process` is found by each process, and `diagnose` once for all that is shown.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import quote

from fencepost_proxy.config import Limits
from fencepost_proxy.net import advice
from fencepost_proxy.net.status import BrokerStatus, ExpansionStatus, Problem, StatusSnapshot, WithheldStatus
from fencepost_proxy.transactions.watched import TransactionsReport

_DAY_SECONDS: Final = 86_400
_CERTIFICATE_DAYS: Final = 14
#: Of a limit: from here on it is told that it will be reached.
_NEARLY: Final = 0.9
#: An expansion takes less than a second where nothing is in its way, and a group some seconds to catch up.
_EXPANSION_SECONDS: Final = 30
_GROUP_SECONDS: Final = 600
_VIOLATION_SECONDS: Final = 3_600
#: Of problems of one kind.
_NAMED_MAX: Final = 5


def of_process(
    limits: Limits,
    *,
    connections: int,
    buffered_bytes: int,
    brokers: Iterable[BrokerStatus],
    certificate_ends: Iterable[tuple[str, float]],
    now: float,
    most_from: tuple[str, int] | None = None,
    sidecar: bool = False,
) -> Iterator[Problem]:
    """What one process finds; another may find the same. `now` – the wall clock's seconds.

    `most_from` – the address that most connections come from, and how many.
    `sidecar` – it has a listener for one broker only, and says itself what is wrong with the others.
    """
    for broker in brokers:
        if broker.problem is not None:
            yield Problem(
                True,
                f"Broker {broker.node_id} ({broker.kafka}) cannot be reached: {broker.problem}",
                "Is that broker up, and can this machine connect to its address? Clients of its partitions wait.",
            )
        elif broker.listener is None and not sidecar:
            yield Problem(
                True,
                f"There is no listener for broker {broker.node_id}",
                "Its port is taken, most likely: the log names it. Free it, or set another in [broker_ports].",
            )
    if connections >= _NEARLY * limits.connections_max:
        yield Problem(
            connections >= limits.connections_max,
            f"{connections:,} of {limits.connections_max:,} client connections are open",
            "One more than that is closed on arrival. Raise limits.connections_max, or start more proxies or workers.",
            "/clients",
        )
    if (
        most_from is not None
        and most_from[1] >= _NEARLY * limits.address_connections_max
        and limits.address_connections_max < limits.connections_max
    ):
        address, count = most_from
        yield Problem(
            count >= limits.address_connections_max,
            f"{count:,} of {limits.address_connections_max:,} client connections from one address, {address}, are open",
            "One more than that is closed on arrival. A gateway with many clients behind it: raise "
            "limits.address_connections_max. A client that opens connections without end: look at it.",
            f"/clients?search={quote(address)}",
        )
    if buffered_bytes >= _NEARLY * limits.buffered_bytes_max:
        yield Problem(
            True,
            f"{buffered_bytes:,} of {limits.buffered_bytes_max:,} bytes for requests that are held are in use",
            "At the limit no client is read. Is a broker slow? If not, raise limits.buffered_bytes_max.",
            "/clients",
        )
    for name, ends in certificate_ends:
        days = (ends - now) / _DAY_SECONDS
        if days < _CERTIFICATE_DAYS:
            yield Problem(
                days < 1,
                f"The certificate of {name} has ended"
                if days <= 0
                else f"The certificate of {name} ends in {days:.0f} d",
                "Put a new one in its place: it is read anew by itself, or at SIGHUP.",
            )


def diagnose(
    snapshot: StatusSnapshot, expansions: Sequence[ExpansionStatus], groups: Sequence[WithheldStatus], now: float
) -> tuple[Problem, ...]:
    """The worst first. `expansions`, `groups` – the first of them, as lists have them. `now` – the wall clock's."""
    found = [
        *(Problem(True, f"Not ready: {reason}", advice.of_not_ready(reason)) for reason in snapshot.not_ready),
        *dict.fromkeys(snapshot.problems),
        *_of_violations(snapshot, now),
        *_of_transactions(snapshot.transactions),
        *_of_expansions(expansions, snapshot.transactions, now),
        *_of_groups(groups),
        *(Problem(False, warning, advice.of_warning(warning)) for warning in snapshot.warnings),
    ]
    return tuple(sorted(found, key=lambda each: not each.bad))


def _of_violations(snapshot: StatusSnapshot, now: float) -> Iterator[Problem]:
    last = snapshot.last_violation
    if not snapshot.violations:
        return
    where = "" if last is None else f", the last one at {last.topic}-{last.partition}"
    recent = last is not None and now - last.at_ms / 1000 < _VIOLATION_SECONDS
    yield Problem(
        recent,
        f"Appends to checked partitions that Kafka did not compare; times seen: {snapshot.violations:,}{where}",
        "The log names the cause and the producer id (OFFSET_VIOLATION). Let no writer reach Kafka but through the "
        "proxy, and do not lower producer.id.expiration.ms below two minutes.",
    )


def _of_transactions(seen: TransactionsReport | None) -> Iterator[Problem]:
    if seen is None:
        return
    hanging: Mapping[str, int] = seen.hanging_by_reason
    if any(hanging.values()):
        yield Problem(
            True,
            f"Transactions that hang: {sum(hanging.values()):,}. Committed readers of their partitions stand still",
            "fencepost transactions hanging --status HOST:PORT says by which command each is ended; see "
            "docs/stuck-transactions.md.",
            "#transactions",
        )
    if seen.problem is not None:
        yield Problem(
            False,
            f"Not all transactions can be looked up: {seen.problem}",
            "May the proxy's user DESCRIBE transactional ids and READ topics? Are all brokers there?",
        )


def _of_expansions(
    expansions: Sequence[ExpansionStatus], seen: TransactionsReport | None, now: float
) -> Iterator[Problem]:
    for each in [each for each in expansions if each.state == "pending"][:_NAMED_MAX]:
        seconds = now - each.at_ms / 1000
        if seconds >= _EXPANSION_SECONDS:
            waits = "" if each.waits_for is None else f"It waits: {each.waits_for}. "
            yield Problem(
                True,
                f"Appends to {each.topic} have been held for {seconds:.0f} s: it grows to {each.to_count:,} partitions",
                f"{waits}{_open_at(each.topic, seen)} see docs/partition-expansion.md.",
                "/expansions",
            )


def _open_at(topic: str, seen: TransactionsReport | None) -> str:
    """What holds up an expansion, mostly."""
    open_there = [
        one.transactional_id
        for one in (() if seen is None else seen.open)
        if any(name.rpartition("-")[0] == topic for name in one.first_partitions)
    ]
    if not open_there:
        return "A transaction that stays open there holds it up, or a request that does not come to its end:"
    return f"Open there: transaction {', '.join(open_there[:_NAMED_MAX])}. Let its producer end it, or stop that:"


def _of_groups(groups: Sequence[WithheldStatus]) -> Iterator[Problem]:
    late: dict[str, WithheldStatus] = {}
    for each in groups:
        if each.seconds >= _GROUP_SECONDS:
            late.setdefault(each.group, each)
    for each in list(late.values())[:_NAMED_MAX]:
        yield Problem(
            False,
            f"Group {each.group} has waited for {each.seconds / 60:.0f} min for new partitions of {each.topic}",
            "It lags in the old ones. Let it catch up; or give up the order: "
            f"fencepost expansions open {shlex.quote(each.topic)} {shlex.quote(each.group)} --status HOST:PORT "
            "--token-file FILE",
            "/groups",
        )
