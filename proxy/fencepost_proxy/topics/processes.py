"""Instance: one proxy process, as the others know it from the state topic, by its instance id and its heartbeats.

| key | value | if there are several |
|---|---|---|
| `process/<uuid>` | `{"started_ms", "identity"}` | all count: the n-th process has instance id n mod 255 + 1 |
| `heartbeat/<uuid>` | `{"at_ms", "about"}` | heartbeat, repeated; a tombstone when the process ends normally |

A process whose instance id is about to be reused (127 others have started since) takes a new one. So no two live
processes have the same, unless that many start within `config_lease_seconds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple
from uuid import UUID

from fencepost_proxy.wire.state_records import StateRecord, object_of, record, tombstone, typed

PROCESS: Final = "process"
HEARTBEAT: Final = "heartbeat"
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_INSTANCE_IDS: Final = 255
#: From then on a process should take a new instance id; at twice that another process gets its old one.
INSTANCE_ID_AGE_MAX: Final = 127


def encode_process(process: UUID, started_ms: int, identity: str | None = None) -> StateRecord:
    """A process has started, or needs a new instance id. Written once, never deleted: the number of records counts.

    `identity`: its process identity (`cluster/process_identity.py`).
    """
    return record(
        f"{PROCESS}/{process}", {"started_ms": started_ms, **({} if identity is None else {"identity": identity})}
    )


def encode_heartbeat(process: UUID, at_ms: int, about: Mapping[str, str] = NOTHING) -> StateRecord:
    """Heartbeat: a record which shows that a process is running.

    The time is for processes that start later; the others use the arrival time of the record.

    `about`: for the status pages of the other processes.
    """
    return record(f"{HEARTBEAT}/{process}", {"at_ms": at_ms, **({"about": dict(about)} if about else {})})


def encode_heartbeat_tombstone(process: UUID) -> StateRecord:
    """The process has ended, with none of its requests in progress."""
    return tombstone(f"{HEARTBEAT}/{process}")


class Heartbeat(NamedTuple):
    """`at_ms`: clock of the process itself; None: it has ended. `about`: what the process says of itself."""

    process: UUID
    at_ms: int | None
    about: Mapping[str, str] = NOTHING


def heartbeat(record: StateRecord) -> Heartbeat | None:
    """The heartbeat in a record of the kind `heartbeat`, None for other kinds."""
    kind, _, process = record.key.decode(errors="replace").partition("/")
    if kind != HEARTBEAT:
        return None
    try:
        value = object_of(record.value)
        if value is None:
            return Heartbeat(UUID(process), None)
        about = value.get("about")
        return Heartbeat(UUID(process), typed(value, "at_ms", int), about if isinstance(about, dict) else NOTHING)
    except ValueError:
        return None


class Processes:
    """All that ever started, in order."""

    def __init__(self) -> None:
        self._numbers: dict[UUID, int] = {}
        self._identities: dict[UUID, str] = {}

    def apply(self, key: str, raw: bytes | None) -> None:
        kind, _, name = key.partition("/")
        process = UUID(name)
        if kind == HEARTBEAT:
            return  # `cluster.heartbeats` keeps the time
        self._numbers.setdefault(process, len(self._numbers))
        if raw is not None and isinstance(identity := (object_of(raw) or {}).get("identity"), str):
            self._identities[process] = identity

    def identity(self, process: UUID) -> str | None:
        """Process identity that the process reported."""
        return self._identities.get(process)

    def age(self, process: UUID) -> int:
        """Number of processes started since this one; 0 if it is unknown (yet)."""
        return len(self._numbers) - 1 - self._numbers[process] if process in self._numbers else 0

    def instance_id(self, process: UUID) -> int:
        """Instance id: a number from 1 to 255 in every batch that a process has fenced.

        0 if the process is unknown, or another process may have its id.
        """
        if process not in self._numbers or self.age(process) > 2 * INSTANCE_ID_AGE_MAX - 1:
            return 0
        return self._numbers[process] % _INSTANCE_IDS + 1
