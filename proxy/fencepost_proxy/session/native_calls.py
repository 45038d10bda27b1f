"""What native code calls, by name: a Protocol for each struct of `native/src/upward.rs`, with the same members.

A test compares both. `native/fencepost_native.pyi` requires these of what native code gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition

if TYPE_CHECKING:
    from fencepost_native import Pumped

    from fencepost_proxy.session import cutter


class Services(Protocol):
    """Of the process: see `session.services.Services`. Native code compares a policy and a topic id by identity."""

    @property
    def in_flight_requests_max(self) -> int: ...
    @property
    def instance_id(self) -> int: ...
    @property
    def relayed_versions(self) -> Mapping[int, tuple[int, int, bool]]: ...
    @property
    def shared_producer_ids(self) -> frozenset[int]: ...
    @property
    def state_topic_marks(self) -> tuple[bytes, ...]: ...
    @property
    def idempotence(self) -> Idempotence: ...
    def fresh(self, now: float) -> bool: ...
    def alone(self, now: float) -> bool: ...
    def taken_over(self, now: float) -> bool: ...
    def produce_version_max(self) -> int: ...
    def policy(self, topic: str) -> TopicPolicy | None: ...
    def topic_id(self, topic: str) -> UUID | None: ...
    def leader_epoch(self, partition: TopicPartition) -> int: ...
    def reserve(self, byte_count: int) -> bool:
        """Of the memory budget. Native code calls it and `release` where that is no `fencepost_native.MemoryBudget`."""

    def release(self, byte_count: int) -> None: ...


class Idempotence(Protocol):
    """Of the process: see `topics.idempotence.IdempotenceMemory`."""

    def acknowledged(self, partition: TopicPartition, producer_id: int, last_offset: int) -> None: ...


class Issuer(Protocol):
    """Of a permit: see `sequencer.permits.IssuedPermit`."""

    def next_fenced_sequence(self, producer_id: int, producer_epoch: int) -> int | None: ...


class Watches(Protocol):
    """Of a connection: makes the watches of frames that are relayed as they arrive."""

    def request_watch(self, head: bytes, topic_end: int, version: int) -> cutter.Watch | None:
        """`head`: of the request, without its length. `topic_end`: of the topic's name there. None: for Python."""

    def response_watch(self, api_key: int, version: int, frame_bytes: int) -> cutter.Watch: ...


class Watch(Protocol):
    """See `session.cutter.Watch`. `head` are bytes here, not a view into the receive buffer."""

    @property
    def first_at(self) -> int: ...
    @property
    def head_bytes(self) -> int: ...
    @property
    def at_trailer(self) -> bool: ...
    def probe(self, head: memoryview) -> int: ...


class Proxied(Protocol):
    """The sockets of a connection. `read_from_…`: after native code has read; `read_client`, `read_upstream`: in place
    of native code. `keep_time`: an answer is due at some time. `abort`: native code has failed.
    """

    def keep_time(self) -> None: ...
    def read_client(self) -> None: ...
    def read_upstream(self) -> None: ...
    def read_from_client(self, pumped: Pumped) -> None: ...
    def read_from_upstream(self, pumped: Pumped) -> None: ...
    def abort(self) -> None: ...
