"""Health and suggested actions, shown first on the status page.

Pure functions. `diagnose` orders the problems for one status page; those of the process itself come from `of_process`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final
from urllib.parse import quote

from fencepost_proxy.cluster import hints
from fencepost_proxy.cluster.metadata import NO_NODE
from fencepost_proxy.config import Limits
from fencepost_proxy.observability.status import (
    BrokerStatus,
    ExpansionStatus,
    GatedStatus,
    Problem,
    RefusalStatus,
    StatusSnapshot,
)
from fencepost_proxy.sequencer.events import TRANSACTION_OPEN
from fencepost_proxy.transactions.watched import TransactionsReport
from fencepost_proxy.types import NodeId, TopicPartition

_DAY_SECONDS: Final = 86_400
_CERTIFICATE_DAYS: Final = 14
#: Share of a limit from which the page warns.
_NEARLY: Final = 0.9
#: Share of the last minute in which the event loop waited for a CPU.
_CPU_WAIT: Final = 0.1
_CPU_WAIT_BAD: Final = 0.4
#: An unobstructed expansion takes less than a second, and a group some seconds to catch up.
_EXPANSION_SECONDS: Final = 30
_GROUP_SECONDS: Final = 600
#: Age from which an open transaction that holds back readers is reported: half of its timeout, within these bounds.
_OLD_SECONDS_MIN: Final = 30
_OLD_SECONDS: Final = 300
#: Age from which a transaction that stops conditional appends is reported; and how long ago it did so at most.
_STOPPING_SECONDS: Final = 10
_STOPPED_SECONDS: Final = 30
_VIOLATION_SECONDS: Final = 3_600
#: Problems of one kind that are listed.
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
    cpu_wait: float = 0.0,
    refused: Mapping[str, int] = MappingProxyType({}),
    led_by: Mapping[NodeId, Sequence[TopicPartition]] = MappingProxyType({}),
) -> Iterator[Problem]:
    """Problems of the process itself. `now`: wall clock, seconds.

    `led_by`: known partitions by leader; those under `NO_NODE` have none.
    `cpu_wait`: share of the last minute in which the event loop waited for a CPU.
    `refused`: brokers that close connections before their first response, and how many in the last minute.
    `most_from`: the address with the most connections, and their number.
    """
    yield from _of_brokers(brokers, led_by)
    for broker, count in list(refused.items())[:_NAMED_MAX]:
        yield Problem(
            True,
            f"{broker} closes new connections before its first response: {count:,} in the last minute",
            f"{hints.LIMITED[0].upper()}{hints.LIMITED[1:]}.",
        )
    yield from _near(
        connections,
        limits.connections_max,
        "client connections are open",
        "Connections above the limit are closed on accept. Raise limits.connections_max, or start more proxies.",
    )
    if most_from is not None and limits.address_connections_max < limits.connections_max:
        address, count = most_from
        yield from _near(
            count,
            limits.address_connections_max,
            f"client connections from one address, {address}, are open",
            "Connections above the limit are closed on accept. If the address is a gateway for many clients, raise "
            "limits.address_connections_max. If it is one client, check why it opens so many.",
            page=f"/clients?search={quote(address)}",
        )
    yield from _near(
        buffered_bytes,
        limits.buffered_bytes_max,
        "bytes for buffered requests are in use",
        "At the limit the proxy pauses reading from all clients. Is a broker slow? If not, raise "
        "limits.buffered_bytes_max.",
        bad_from=_NEARLY,
    )
    yield from _of_cpu(cpu_wait)
    yield from _of_certificates(certificate_ends, now)


def _of_brokers(
    brokers: Iterable[BrokerStatus], led_by: Mapping[NodeId, Sequence[TopicPartition]]
) -> Iterator[Problem]:
    leaderless = led_by.get(NO_NODE, ())
    if leaderless:
        yield Problem(
            True,
            f"Partitions without a leader: {_named(leaderless)}",
            "Their clients wait until a broker with an in-sync replica is back. Start the brokers that are down: "
            "kafka-topics.sh --describe --unavailable-partitions shows their replicas.",
        )
    for broker in brokers:
        if broker.problem is not None:
            led = led_by.get(broker.node_id)
            clients = f"Clients wait for {_named(led)}" if led else "Its partitions have other leaders, or none"
            yield Problem(
                True,
                f"Broker {broker.node_id} ({broker.kafka}) cannot be reached: {broker.problem}",
                f"{clients}. Is that broker up, and can this machine connect to its address?",
            )


def _named(partitions: Sequence[TopicPartition]) -> str:
    more = len(partitions) - _NAMED_MAX
    return ", ".join(map(str, partitions[:_NAMED_MAX])) + (f" and {more:,} more" if more > 0 else "")


def _near(
    used: int, most: int, of: str, do: str, *, page: str = "/clients", bad_from: float = 1.0
) -> Iterator[Problem]:
    """A limit that is nearly reached. `bad_from`: the share of it from which an operator must act."""
    if used >= _NEARLY * most:
        yield Problem(used >= bad_from * most, f"{used:,} of {most:,} {of}", do, page)


def _of_cpu(waited: float) -> Iterator[Problem]:
    if waited >= _CPU_WAIT:
        yield Problem(
            waited >= _CPU_WAIT_BAD,
            f"This process gets no CPU: its event loop waited for one during {waited:.0%} of the last minute",
            "All clients wait meanwhile. Is this machine overloaded, or does a CPU limit (cgroup, container) apply?",
        )


def _of_certificates(ends: Iterable[tuple[str, float]], now: float) -> Iterator[Problem]:
    for name, end in ends:
        days = (end - now) / _DAY_SECONDS
        if days < _CERTIFICATE_DAYS:
            yield Problem(
                days < 1,
                f"The certificate of {name} " + ("has expired" if days <= 0 else f"expires in {days:.0f} d"),
                "Replace the file: the proxy reloads it automatically, or on SIGHUP.",
            )


def diagnose(
    snapshot: StatusSnapshot,
    expansions: Sequence[ExpansionStatus],
    groups: Sequence[GatedStatus],
    now: float,
    refusals: Sequence[RefusalStatus] = (),
) -> tuple[Problem, ...]:
    """Problems, worst first. `expansions`, `groups`, `refusals`: first page of each. `now`: wall clock, seconds."""
    found = [
        *(Problem(True, f"Not ready: {reason}", reason.hint) for reason in snapshot.not_ready),
        *dict.fromkeys(snapshot.problems),
        *_of_violations(snapshot, now),
        *_of_shortened_logs(snapshot, now),
        *_of_transactions(snapshot.transactions),
        *_of_stopped_appends(refusals, snapshot.transactions, now),
        *_of_expansions(expansions, snapshot.transactions, now),
        *_of_groups(groups),
        *(Problem(False, warning.text, warning.hint) for warning in snapshot.warnings),
    ]
    return tuple(sorted(found, key=lambda each: not each.bad))


def state_of(snapshot: StatusSnapshot, problems: Sequence[Problem]) -> str:
    if not snapshot.ready:
        return "not_ready"
    if any(each.bad for each in problems):
        return "degraded"
    return "warning" if problems else "healthy"


def _of_violations(snapshot: StatusSnapshot, now: float) -> Iterator[Problem]:
    last = snapshot.last_violation
    if not snapshot.violations:
        return
    where = "" if last is None else f", the last one at {last.topic}-{last.partition}"
    recent = last is not None and now - last.at_ms / 1000 < _VIOLATION_SECONDS
    yield Problem(
        recent,
        f"Appends to checked topics whose sequence Kafka did not compare: {snapshot.violations:,}{where}",
        "The log names the cause and the producer id (OFFSET_VIOLATION). Let writers reach Kafka only through the "
        "proxy, and keep producer.id.expiration.ms at two minutes or more.",
    )


def _of_shortened_logs(snapshot: StatusSnapshot, now: float) -> Iterator[Problem]:
    last = snapshot.last_shortened_log
    if last is None:
        return
    yield Problem(
        now - last.at_ms / 1000 < _VIOLATION_SECONDS,
        f"Kafka lost acknowledged records: {snapshot.shortened_logs:,} times, last {last.offset} to "
        f"{last.acknowledged_end - 1} of {last.topic}-{last.partition}",
        "Their offsets come again, with other records. Compare what readers of the partition have stored. Set "
        "min.insync.replicas=2 with three replicas, and keep unclean leader election off.",
    )


def of_ignored_offsets(topics: Sequence[str]) -> Iterator[Problem]:
    """Topics that do not check the expected offsets that they get."""
    if topics:
        more = len(topics) - _NAMED_MAX
        named = ", ".join(topics[:_NAMED_MAX]) + (f" and {more:,} more" if more > 0 else "")
        yield Problem(
            False,
            f"Topics that get expected offsets, but do not check them: {named}",
            "Their writers get success at any offset. Set fencepost.check.expected.offsets to true or required, or "
            "remove the header fencepost-expected-offset.",
        )


def _of_transactions(observed: TransactionsReport | None) -> Iterator[Problem]:
    if observed is None:
        return
    hanging: Mapping[str, int] = observed.hanging_by_reason
    if any(hanging.values()):
        yield Problem(
            True,
            f"Hanging transactions: {sum(hanging.values()):,}. read_committed consumers of their partitions are stuck",
            "fencepost transactions hanging --status HOST:PORT shows the command that ends each one; see "
            "docs/stuck-transactions.md.",
            "/transactions",
        )
    yield from _of_old(observed)
    if observed.problem is not None:
        yield Problem(
            False,
            f"Some transactions cannot be read: {observed.problem}",
            "May the proxy's user DESCRIBE transactional ids and READ topics? Are all brokers up?",
        )


def _of_old(observed: TransactionsReport) -> Iterator[Problem]:
    """Open transactions that hold back readers, before their timeout ends them."""
    lagging = {str(TopicPartition(each.topic, each.partition)) for each in observed.lagging}
    found = []
    for one in observed.open:
        delayed = [each for each in one.first_partitions if each in lagging]
        timeout_seconds = (one.timeout_ms or 0) / 1000
        old_seconds = max(_OLD_SECONDS_MIN, min(_OLD_SECONDS, timeout_seconds / 2))
        if delayed and one.stuck is None and (one.age_seconds or 0.0) >= old_seconds:
            found.append((one, delayed, timeout_seconds))
    for one, delayed, timeout_seconds in found[:_NAMED_MAX]:
        yield Problem(
            False,
            f"Transaction {one.transactional_id} has been open for {one.age_seconds:.0f} s and holds back "
            f"read_committed consumers of {', '.join(delayed)}",
            f"Kafka aborts it after {timeout_seconds:.0f} s (transaction.timeout.ms). Is its producer stuck? "
            "Restart or stop it; see docs/stuck-transactions.md.",
            "/transactions",
        )


def _of_stopped_appends(
    refusals: Sequence[RefusalStatus], observed: TransactionsReport | None, now: float
) -> Iterator[Problem]:
    """Open transactions that stop conditional appends, with records in the partition or not."""
    since_ms = (now - _STOPPED_SECONDS) * 1000
    stopped = {
        str(TopicPartition(each.topic, each.partition))
        for each in refusals
        if each.reason == TRANSACTION_OPEN and each.at_ms >= since_ms
    }
    found = []
    for one in () if observed is None or not stopped else observed.open:
        waiting = [each for each in one.first_partitions if each in stopped]
        if waiting and one.stuck is None and (one.age_seconds or 0.0) >= _STOPPING_SECONDS:
            found.append((one, waiting))
    for one, waiting in found[:_NAMED_MAX]:
        yield Problem(
            True,
            f"Transaction {one.transactional_id} has been open for {one.age_seconds:.0f} s and stops conditional "
            f"appends to {', '.join(waiting)}",
            f"Kafka aborts it after {(one.timeout_ms or 0) / 1000:.0f} s (transaction.timeout.ms). To end it now, and "
            f"fence its producer: fencepost transactions abort {shlex.quote(one.transactional_id)} "
            "--bootstrap-server HOST:PORT",
            "/transactions",
        )


def _of_expansions(
    expansions: Sequence[ExpansionStatus], observed: TransactionsReport | None, now: float
) -> Iterator[Problem]:
    for each in [each for each in expansions if each.state == "pending"][:_NAMED_MAX]:
        seconds = now - each.at_ms / 1000
        if seconds >= _EXPANSION_SECONDS:
            waits = "" if each.waits_for is None else f"The expansion waits: {each.waits_for}. "
            yield Problem(
                True,
                f"Appends to {each.topic} blocked for {seconds:.0f} s by its expansion to {each.to_count:,} partitions",
                f"{waits}{_open_at(each.topic, observed)} see docs/partition-expansion.md.",
                "/expansions",
            )


def _open_at(topic: str, observed: TransactionsReport | None) -> str:
    """The usual cause of a delayed expansion."""
    open_there = [
        one.transactional_id
        for one in (() if observed is None else observed.open)
        if any(name.rpartition("-")[0] == topic for name in one.first_partitions)
    ]
    if not open_there:
        return "Usual causes are an open transaction on that topic or a request that does not finish:"
    return f"Open on that topic: transaction {', '.join(open_there[:_NAMED_MAX])}. End it, or stop its producer:"


def _of_groups(groups: Sequence[GatedStatus]) -> Iterator[Problem]:
    late: dict[str, GatedStatus] = {}
    for each in groups:
        if each.seconds >= _GROUP_SECONDS:
            late.setdefault(each.group, each)
    for each in list(late.values())[:_NAMED_MAX]:
        yield Problem(
            False,
            f"Group {each.group} has waited for {each.seconds / 60:.0f} min for new partitions of {each.topic}",
            "It lags in the old partitions. Let it catch up, or give up the order: "
            f"fencepost expansions open {shlex.quote(each.topic)} {shlex.quote(each.group)} --status HOST:PORT "
            "--token-file FILE",
            "/groups",
        )
