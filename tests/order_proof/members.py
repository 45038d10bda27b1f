"""Consumer groups of real clients: the kinds, and their members as processes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fencepost_dev.process import supervised
from fencepost_dev.tools import compile_java, java_command
from tests.order_proof.observed import NANOS, Assigned, Observed, parse
from tests.support.kafka import kafka_version

_JAVA_SOURCE = Path(__file__).parents[1] / "java" / "OrderMember.java"
_REPOSITORY = Path(__file__).parents[2]
_ASSIGNORS = "org.apache.kafka.clients.consumer."
#: The minimum that brokers allow by default, so that a killed member is detected soon.
_SESSION_MS = 6_000
_HEARTBEAT_MS = 500
_METADATA_MS = 1_000
_LEAVE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class AppendMode:
    """A client with a group protocol. `settings`: in addition to those of every client, by the client's names."""

    client: str
    protocol: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return f"{self.client} {self.protocol}"


_CLASSIC_DOTTED = {"session.timeout.ms": _SESSION_MS, "heartbeat.interval.ms": _HEARTBEAT_MS}
_CLASSIC_PYTHON = {"session_timeout_ms": _SESSION_MS, "heartbeat_interval_ms": _HEARTBEAT_MS}

KINDS = (
    AppendMode("java", "eager", {**_CLASSIC_DOTTED, "partition.assignment.strategy": f"{_ASSIGNORS}RangeAssignor"}),
    AppendMode(
        "java",
        "cooperative",
        {**_CLASSIC_DOTTED, "partition.assignment.strategy": f"{_ASSIGNORS}CooperativeStickyAssignor"},
    ),
    AppendMode("java", "consumer", {"group.protocol": "consumer"}),
    AppendMode("librdkafka", "eager", {**_CLASSIC_DOTTED, "partition.assignment.strategy": "range"}),
    AppendMode("librdkafka", "cooperative", {**_CLASSIC_DOTTED, "partition.assignment.strategy": "cooperative-sticky"}),
    AppendMode("librdkafka", "consumer", {"group.protocol": "consumer"}),
    AppendMode("kafka-python", "eager", _CLASSIC_PYTHON),
    AppendMode("kafka-python", "cooperative", {**_CLASSIC_PYTHON, "assignor": "cooperative"}),
    AppendMode("aiokafka", "eager", _CLASSIC_PYTHON),
)
#: Members of the new protocol join and leave as fast as the others.
BROKER_PROPERTIES = {
    "group.consumer.min.session.timeout.ms": str(_SESSION_MS),
    "group.consumer.session.timeout.ms": str(_SESSION_MS),
    "group.consumer.min.heartbeat.interval.ms": str(_HEARTBEAT_MS),
    "group.consumer.heartbeat.interval.ms": str(_HEARTBEAT_MS),
}


def _command(group: Group, bootstrap: str, commit_seconds: float) -> list[str]:
    dotted = {
        "bootstrap.servers": bootstrap,
        "group.id": group.id,
        "enable.auto.commit": "false",
        "auto.offset.reset": group.reset,
        "isolation.level": "read_committed",
    }
    kind = group.kind
    if kind.client == "java":
        settings = {**dotted, "max.poll.records": 10, "metadata.max.age.ms": _METADATA_MS, **kind.settings}
        classes = compile_java([_JAVA_SOURCE], version=kafka_version())
        words = [group.topic, str(commit_seconds), *(f"{name}={value}" for name, value in settings.items())]
        return java_command("OrderMember", words, classes=classes, version=kafka_version())
    if kind.client == "librdkafka":
        settings = {**dotted, "topic.metadata.refresh.interval.ms": _METADATA_MS, **kind.settings}
    else:
        settings = {
            **{name.replace(".", "_"): value for name, value in dotted.items() if name != "enable.auto.commit"},
            "enable_auto_commit": False,
            "metadata_max_age_ms": _METADATA_MS,
            **kind.settings,
        }
    words = [kind.client, group.topic, str(commit_seconds), json.dumps(settings)]
    return [sys.executable, "-m", "tests.order_proof.python_member", *words]


class Member:
    """Start it in a thread that lives as long as the member."""

    def __init__(self, group: Group, name: str, bootstrap: str, commit_seconds: float) -> None:
        self.name = name
        self.assigned: frozenset[int] | None = None
        self._group = group
        command = _command(group, bootstrap, commit_seconds)
        with (group.directory / f"{group.id}-{name}.log").open("ab") as errors:
            self._process = subprocess.Popen(
                supervised(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=_REPOSITORY,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def pace(self, seconds: float, below: int) -> None:
        """Set how long the member takes for a record of a partition below `below`."""
        stdin = self._process.stdin
        assert stdin is not None
        if stdin.closed:
            return  # it is leaving
        try:
            stdin.write(f"pace {seconds} {below}\n")
            stdin.flush()
        except OSError:
            if self.running:
                raise

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self.end()

    def stop_reading_orders(self) -> None:
        """The member then leaves its group."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            stdin.close()

    def end(self) -> None:
        """Wait until the member has left; kill it after a timeout."""
        self.stop_reading_orders()
        try:
            self._process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(_LEAVE_SECONDS)
        self._reader.join(_LEAVE_SECONDS)
        self.assigned = None

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                if not line.endswith("\n"):
                    return  # killed during the write
                record = parse(line, self.name)
                if record is not None:
                    self._group.saw(record)
                elif line.startswith("A "):
                    _, nanos, partitions = line.strip("\n").split(" ")
                    with (self._group.directory / f"{self._group.id}.assignments").open("a") as file:
                        file.write(f"{self.name} {line}")
                    self.assigned = frozenset(map(int, partitions.split(","))) if partitions else frozenset()
                    self._group.assigned.append(Assigned(int(nanos), self.name, self.assigned))


class Group:
    """All members of one group, including earlier ones, and what they read. `bootstraps` – the addresses that members
    use in turn."""

    def __init__(self, kind: AppendMode, bootstraps: Sequence[str], topic: str, directory: Path, reset: str) -> None:
        self.kind, self.topic, self.directory, self.reset = kind, topic, directory, reset
        self._bootstraps = bootstraps
        self.id = f"{topic}-{kind.client}-{kind.protocol}"
        self.members: list[Member] = []
        self.observed: list[Observed] = []
        self.assigned: list[Assigned] = []
        self._lock = threading.Lock()
        self._found: dict[str, set[int]] = defaultdict(set)
        self._partitions: set[int] = set()
        self._started = 0

    def join(self, commit_seconds: float) -> Member:
        self._started += 1
        bootstrap = self._bootstraps[self._started % len(self._bootstraps)]
        member = Member(self, f"{self._started}", bootstrap, commit_seconds)
        self.members.append(member)
        return member

    @property
    def running(self) -> list[Member]:
        return [member for member in self.members if member.running]

    def saw(self, record: Observed) -> None:
        with self._lock:
            self.observed.append(record)
            self._found[record.key].add(record.counter)
            self._partitions.add(record.partition)

    def has_observed(self, partitions: Iterable[int]) -> bool:
        """Whether the group read a record of each partition."""
        with self._lock:
            return self._partitions.issuperset(partitions)

    def has_observed_any(self, partitions: range) -> bool:
        with self._lock:
            return not self._partitions.isdisjoint(partitions)

    def has_all(self, written: Mapping[str, int]) -> bool:
        with self._lock:
            return all(len(self._found[key]) >= count for key, count in written.items())

    def holds_partitions(self, count: int) -> bool:
        """Whether all partitions are assigned, by the members' latest reports."""
        assigned: set[int] = set()
        for member in self.members:
            assigned |= member.assigned or frozenset()
        return assigned.issuperset(range(count))

    def standing(self) -> str:
        """For each partition: the highest offset read, and the time since the last read."""
        with self._lock:
            last = {record.partition: record for record in self.observed}
            highest = {p: max(r.offset for r in self.observed if r.partition == p) for p in sorted(last)}
        now = time.monotonic_ns()
        return (
            ", ".join(f"{p}: {at} ({(now - last[p].nanos) / NANOS:.0f} s ago)" for p, at in highest.items())
            or "nothing"
        )

    def end(self) -> None:
        for member in self.members:
            member.stop_reading_orders()
        for member in self.members:
            member.end()
        with (self.directory / f"{self.id}.seen").open("w") as file:
            file.writelines(
                f"{r.nanos} {r.member} {r.partition} {r.offset} {r.key} {r.counter}\n" for r in self.observed
            )


def kinds_named(pattern: str) -> tuple[AppendMode, ...]:
    """Kinds by comma-separated name prefixes; all if empty."""
    requested = [each for each in pattern.split(",") if each]
    return tuple(kind for kind in KINDS if not requested or any(kind.name.startswith(each) for each in requested))
