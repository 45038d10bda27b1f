"""One Kafka release, directly and through the proxy: ApiVersions, and steps that must work.

Uses one broker of the release that `kafka_version()` names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from fencepost_dev.cluster import KafkaCluster
from tests.integration.test_equivalence import AT_MS, SCRIPTS, Stage, _addresses
from tests.kit.waiting import until
from tests.support.expanding import check_log, counted, expand_at_the_end, expansions, writing
from tests.support.java_clients import JAVA_SCRIPTS, play_java
from tests.support.kafka import kafka_version, running_kafka, unique_topic
from tests.support.members import MEMBERS, Member
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log, batch
from tests.support.senders import CLIENTS, Client, JavaProducers, create_topic
from tests.support.transactions import Transactional

Versions = dict[int, tuple[int, int]]
Say = Callable[[str], None]

OK, POLICY_VIOLATION = 0, 44
_CHECK = "fencepost.check.expected.offsets"
_CONFIG = f"""{counted()}
[topics."required-*"]
"{_CHECK}" = "required"

[topics."checked-*"]
"{_CHECK}" = "true"
"""
_READ_SECONDS = 120.0
HOLDS = "yes"
LACKING = "–"
#: Scripts whose output must be the same through the proxy and without it.
PLAYED = (
    "Java: idempotent, large, transactions",
    "Java: group, commit, resume",
    "Java: group.protocol=consumer",
    "Java: admin",
    "kafka-python: transactions",
    "kafka-python: group, commit, resume",
    "aiokafka: idempotent, large, transactions",
    "aiokafka: group, seek, offsets for times",
    "confluent-kafka: idempotent, large, transactions",
    "confluent-kafka: group, commit, resume",
    "confluent-kafka: group.protocol=consumer",
)


@dataclass
class Release:
    """`direct`, `proxied` – API key → supported versions. `observed` – step → `HOLDS`, `LACKING` or the failure."""

    version: str
    direct: Versions
    proxied: Versions
    observed: dict[str, str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return all(each in (HOLDS, LACKING) for each in self.observed.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        ranges = [{int(key): (low, high) for key, (low, high) in found[side].items()} for side in ("direct", "proxied")]
        return cls(found["version"], ranges[0], ranges[1], found["observed"])


@dataclass(frozen=True)
class Front:
    kafka: KafkaCluster
    proxy: ProxyProcess
    directory: Path

    @property
    def log(self) -> Log:
        return Log(self.kafka.bootstrap)


def api_versions(bootstrap: str) -> Versions:
    with Connection(bootstrap) as connection:
        return connection.api_versions()


@contextmanager
def front(directory: Path) -> Iterator[Front]:
    with running_kafka() as kafka, ProxyProcess(kafka.bootstrap, directory, config=_CONFIG) as proxy:
        yield Front(kafka, proxy, directory)


def report(where: Front, *, steps: Sequence[str] = (), say: Say = lambda text: None) -> Release:
    """`steps` – from `STEPS` or `PLAYED`; by default all."""
    release = Release(kafka_version(), api_versions(where.kafka.bootstrap), api_versions(where.proxy.bootstrap))

    def record(step: str, began: float, outcome: str) -> None:
        release.observed[step] = outcome
        say(f"{release.version}  {step}: {outcome} ({time.monotonic() - began:.1f} s)")

    requested = [each for each in (*STEPS, *PLAYED) if not steps or each in steps]
    for step in requested:
        if step in STEPS:
            began = time.monotonic()
            try:
                STEPS[step](where)
            except Exception as failure:
                record(step, began, _reported(failure))
            else:
                record(step, began, HOLDS)
    scripts = [each for each in requested if each in PLAYED]
    java = [each for each in scripts if each in JAVA_SCRIPTS and not _lacks(each)]
    for group in [java] * bool(java) + [[each] for each in scripts if each in SCRIPTS and not _lacks(each)]:
        began = time.monotonic()
        for step, outcome in _compared(where, group).items():
            record(step, began, outcome)
    release.observed |= {each: LACKING for each in scripts if _lacks(each)}
    release.observed = {each: release.observed[each] for each in requested}
    return release


def _lacks(script: str) -> bool:
    """Kafka 3.9 disables the consumer protocol by default."""
    return script.endswith("group.protocol=consumer") and kafka_version().startswith("3.")


# --- client scripts ---------------------------------------------------------------------------------------------------


def _compared(where: Front, scripts: Sequence[str]) -> dict[str, str]:
    """Run the scripts at Kafka and at the proxy, concurrently."""

    def play(bootstrap: str) -> dict[str, str]:
        stage = Stage(bootstrap, brokers=1)
        names = _addresses(bootstrap)
        if scripts[0] in SCRIPTS:
            return {each: stage.plain(SCRIPTS[each](stage), names) for each in scripts}
        prefix = stage.name("java")
        played = play_java(stage.java, scripts, prefix=prefix, brokers=1, at_ms=AT_MS, directory=where.directory)
        return {each: stage.plain(text, names) for each, text in played.items()}

    with ThreadPoolExecutor(2) as pool:
        sides = [pool.submit(play, each) for each in (where.kafka.bootstrap, where.proxy.bootstrap)]
    for name, side in zip(("direct", "proxied"), sides, strict=True):
        if failure := side.exception():
            return dict.fromkeys(scripts, f"{name}: {_reported(failure)}")
    direct, proxied = (side.result() for side in sides)
    return {
        each: HOLDS if direct[each] == proxied[each] else _difference(direct[each], proxied[each]) for each in scripts
    }


def _reported(failure: BaseException) -> str:
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:300]


def _difference(direct: str, proxied: str) -> str:
    pairs = zip(direct, proxied, strict=False)
    at = next((index for index, (one, other) in enumerate(pairs) if one != other), 0)
    return f"differs: direct …{direct[max(0, at - 40) : at + 80]} proxied …{proxied[max(0, at - 40) : at + 80]}"


# --- features of the proxy --------------------------------------------------------------------------------------------


def names_no_broker(where: Front) -> None:
    with Connection(where.proxy.bootstrap) as client:
        named = {f"{each.host}:{each.port}" for each in client.metadata("none").brokers}
    assert named, "Metadata lists no broker"
    assert not named & set(where.kafka.bootstrap.split(",")), named


def conditional_append(client: Client) -> Callable[[Front], None]:
    def query(where: Front) -> None:
        with JavaProducers() as java:
            append_both_ways(client, where, java)

    return query


def append_both_ways(client: Client, where: Front, java: JavaProducers) -> None:
    """Append with a matching expected offset, and refuse another one."""
    topic = create_topic(where.proxy.bootstrap, unique_topic("required"))
    sender = client.open(where.proxy.bootstrap, java)
    try:
        accepted = sender.send(topic, "first", expected=0).get()
        assert accepted.offset == 0, accepted
        refused = sender.send(topic, "refused", expected=7).get()
        assert refused.offset is None, refused
        assert refused.error, refused
    finally:
        sender.close()
    assert where.log.values(topic) == [b"first"]


def virtual_config(where: Front) -> None:
    """Set on an existing topic, described, and enforced."""
    name = create_topic(where.proxy.bootstrap, unique_topic("plain"))
    with Connection(where.proxy.bootstrap) as client:
        assert client.append(name, batch(b"unasked")).error_code == OK
        assert client.alter_topic(name, {_CHECK: "required"})[0] == OK
        until(lambda: client.describe_topic(name)[_CHECK] == "required", f"{_CHECK} of {name}")
        assert client.append(name, batch(b"unasked")).error_code == POLICY_VIOLATION
        assert client.append(name, batch(b"asked", expected=1)).error_code == OK
    assert where.log.values(name) == [b"unasked", b"asked"]


def checked_transaction(where: Front) -> None:
    """A matching transaction commits, another is refused and aborted; with each protocol of the release."""
    protocols = (1, 2) if api_versions(where.proxy.bootstrap)[0][1] >= 12 else (1,)
    for protocol in protocols:
        topic = create_topic(where.proxy.bootstrap, unique_topic("checked"))
        with Transactional(where.proxy.bootstrap, unique_topic("writer"), protocol=protocol) as writer:
            writer.begin(topic)
            assert writer.append(topic, b"first", expected=0).error_code == OK
            assert writer.end(commit=True) == OK
            until(partial(_ends_at, where.log, topic, 2), "the marker of the commit")
            writer.begin(topic)
            assert writer.append(topic, b"second", expected=2).error_code == OK
            refused = writer.append(topic, b"third", expected=99)
            assert refused.error_code != OK, refused
            assert (refused.message or "").startswith("OFFSET_MISMATCH"), refused
            committed = writer.end(commit=True)
            assert committed != OK, committed
            assert writer.end(commit=False) == OK
        assert where.log.values(topic) == [b"first", b"second"]


def _ends_at(log: Log, topic: str, end: int) -> bool:
    return log.end(topic) == end


def expansion(where: Front) -> None:
    """Expand a topic twice during writes. Each record is on the correct side of each threshold; a group gets all."""
    topic = create_topic(where.proxy.bootstrap, unique_topic("expands"))
    group = f"{topic}-group"
    with Member(
        MEMBERS["librdkafka-eager"], where.proxy.bootstrap, topic, group, commit_seconds=0.5, session_ms=45_000
    ) as member:
        with writing([where.proxy.bootstrap], topic) as writers:
            for count in (2, 3):
                writers[0].goes_on()
                expand_at_the_end(where.proxy.bootstrap, topic, count)
            writers[0].goes_on()
        check_log(where.log, topic, expansions(where.proxy.bootstrap, topic), writers)
        requested = set(writers[0].acknowledged)
        until(
            lambda: requested <= {int(each.value.split(":")[1]) for each in member.read},
            lambda: f"the group to read it all: {member.errors[-5:]}",
            seconds=_READ_SECONDS,
            pause_seconds=0.5,
        )


STEPS: dict[str, Callable[[Front], None]] = {
    "no broker address is exposed": names_no_broker,
    **{f"conditional append, accepted and refused: {each.name}": conditional_append(each) for each in CLIENTS},
    "conditional transactions, committed and refused": checked_transaction,
    "a virtual config: set, described, enforced": virtual_config,
    "a topic is expanded during writes, a group reads it": expansion,
}
