"""Members of consumer groups of every client, each a process with one interface: records, assignment, commits."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fencepost_dev.tools import compile_java, java_command
from tests.kit.lines import LineProcess
from tests.kit.waiting import until
from tests.support.kafka import kafka_version

WAIT_SECONDS = 90.0
_JAVA = Path(__file__).parents[1] / "java" / "GroupMember.java"
_ASSIGNORS = "org.apache.kafka.clients.consumer."


@dataclass(frozen=True, slots=True)
class Kind:
    """A client with a group protocol. `settings`: in addition to those of every client, by the client's names."""

    client: str
    protocol: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return f"{self.client} {self.protocol}"

    @property
    def is_classic(self) -> bool:
        return self.protocol != "consumer"


def _strategy(name: str) -> dict[str, str]:
    return {"partition.assignment.strategy": name}


KINDS = (
    Kind("java", "eager", _strategy(f"{_ASSIGNORS}RangeAssignor")),
    Kind("java", "cooperative", _strategy(f"{_ASSIGNORS}CooperativeStickyAssignor")),
    Kind("java", "consumer", {"group.protocol": "consumer"}),
    Kind("librdkafka", "eager", _strategy("range")),
    Kind("librdkafka", "cooperative", _strategy("cooperative-sticky")),
    Kind("librdkafka", "consumer", {"group.protocol": "consumer"}),
    Kind("kafka-python", "eager"),
    Kind("kafka-python", "cooperative", {"assignor": "cooperative"}),
    Kind("aiokafka", "eager"),
)
#: By client and protocol: "java-eager".
MEMBERS = {f"{kind.client}-{kind.protocol}": kind for kind in KINDS}


class Read(NamedTuple):
    """A record. `nanos` – when it was handled, by the system's monotonic clock."""

    partition: int
    offset: int
    key: str
    value: str
    nanos: int = 0


class Assigned(NamedTuple):
    """The partitions that a member has from this time on, as reported to it."""

    nanos: int
    partitions: frozenset[int]


class Member(LineProcess):
    """Close it, or use it in `with`; it then leaves its group. `read` has every record in the order received.

    `commit_seconds` – how often it commits; 0: on request. `heartbeat_ms`, `session_ms` – in the classic protocol.
    """

    def __init__(
        self,
        kind: Kind,
        bootstrap: str,
        topic: str,
        group: str,
        reset: str = "earliest",
        *,
        commit_seconds: float = 0.0,
        metadata_ms: int = 500,
        heartbeat_ms: int = 300,
        session_ms: int | None = None,
        log: Path | None = None,
        **settings: Any,
    ) -> None:
        self.read: list[Read] = []
        #: Those of which it read a record.
        self.partitions: set[int] = set()
        self.assigned: frozenset[int] = frozenset()
        self.assignments: list[Assigned] = []
        self.errors: list[str] = []
        self.commits = 0
        settings = {name.replace("_", "."): value for name, value in settings.items()} | {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "client.id": f"{kind.client}-{group}",
            "enable.auto.commit": False,
            "auto.offset.reset": reset,
        }
        if kind.is_classic:
            settings["heartbeat.interval.ms"] = heartbeat_ms
            if session_ms is not None:
                settings["session.timeout.ms"] = session_ms
        age = "topic.metadata.refresh.interval.ms" if kind.client == "librdkafka" else "metadata.max.age.ms"
        settings |= {age: metadata_ms, **kind.settings}
        super().__init__(_command(kind, topic, commit_seconds, settings), self._received, log=log)

    def commit(self) -> None:
        """Commit the records read so far, and wait for that."""
        before = self.commits
        with contextlib.suppress(OSError):  # it has ended
            self.send("commit")
        until(lambda: self.commits > before or not self.running, lambda: f"{self} to commit: {self.errors}")

    def pace(self, seconds: float, below: int) -> None:
        """Set how long the member takes for a record of a partition below `below`."""
        with contextlib.suppress(OSError):  # it is leaving
            self.send(f"pace {seconds} {below}")

    def read_of(self, partition: int) -> list[Read]:
        return [each for each in self.read if each.partition == partition]

    def _received(self, line: str | None) -> None:
        match line and line.split(" "):
            case ["S", nanos, partition, offset, key, value]:
                self.read.append(Read(int(partition), int(offset), key, value, int(nanos)))
                self.partitions.add(int(partition))
            case [("A" | "R") as event, nanos, partitions]:
                self.assigned = frozenset(map(int, partitions.split(","))) if partitions else frozenset()
                if event == "A":
                    self.assignments.append(Assigned(int(nanos), self.assigned))
            case ["C"]:
                self.commits += 1
            case [_, *text]:
                self.errors.append(" ".join(text))
            case _:
                self.assigned = frozenset()


def _command(kind: Kind, topic: str, commit_seconds: float, settings: Mapping[str, Any]) -> list[str]:
    if kind.client == "java":
        shown = [f"{name}={str(value).lower() if value is False else value}" for name, value in settings.items()]
        classes = compile_java([_JAVA], version=kafka_version())
        words = [topic, str(commit_seconds), *shown, "max.poll.records=10"]
        return java_command("GroupMember", words, classes=classes, version=kafka_version())
    if kind.client != "librdkafka":
        settings = {name.replace(".", "_"): value for name, value in settings.items()}
    words = [kind.client, topic, str(commit_seconds), json.dumps(settings)]
    return [sys.executable, "-m", "tests.support.group_member", *words]
