"""Counts what native code does in a run, so that a test can require that it does anything."""

from __future__ import annotations

import struct
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest

from fencepost_proxy.sequencer import permits
from fencepost_proxy.wire.apis import PRODUCE

_HEAD = struct.Struct(">ihhi")
#: What many runs of the usual kind do.
EXPECTED = (
    "native: appended",
    "native: completed",
    "native: several in flight",
    "native: adopted",
    "native: adopted completed",
    "native: collected",
    "native: relayed",
    "native: relayed completed",
    "native: relayed in pieces",
    "native: returned",
    "native: several partitions",
    "native: several partitions completed",
)


def count(services: Any, counts: Counter[str]) -> None:
    """Of the connections that these services will make."""
    if services.native is None:
        return
    module, settings = services.native

    def connection(*arguments: Any) -> Any:
        return _Counted(module.Connection(*arguments), counts)

    counted = SimpleNamespace(
        Connection=connection,
        RequestTemplate=module.RequestTemplate,
        TopicSettings=module.TopicSettings,
        Permit=module.Permit,
    )
    services.native = counted, settings


def count_adopted(patch: pytest.MonkeyPatch, counts: Counter[str]) -> None:
    issue, complete = permits.permit_for, permits.IssuedPermit.complete

    def issue_and_count(make: Any, issuer: Any, partition: Any, state: Any) -> Any:
        counts["native: permits"] += 1
        counts["native: adopted"] += len(state.appends.in_flight)
        return issue(make, issuer, partition, state)

    def complete_and_count(self: permits.IssuedPermit, *arguments: Any) -> bool:
        completed = complete(self, *arguments)
        counts["native: adopted completed"] += completed
        return completed

    patch.setattr(permits, "permit_for", issue_and_count)
    patch.setattr(permits.IssuedPermit, "complete", complete_and_count)


class _Counted:
    """A native connection.

    `_sent`: 0 for each request that it relayed, else the number of appends. `_left`: of a frame that it relays as it
    arrives.
    """

    def __init__(self, connection: Any, counts: Counter[str]) -> None:
        self.__dict__.update(_connection=connection, _counts=counts, _sent=deque(), _left=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def __setattr__(self, name: str, given: object) -> None:
        if name in self.__dict__:
            self.__dict__[name] = given
        else:
            setattr(self._connection, name, given)

    def __len__(self) -> int:
        return len(self._connection)

    def take_up(self, data: bytes, *arguments: Any) -> Any:
        collecting = self._connection.collecting_since is not None
        before = len(self)
        taken = self._connection.take_up(data, *arguments)
        made = taken[2] or b""
        frames = _frames(made[self._left :])
        self._left = sum(map(_missing_bytes, frames)) if frames else self._left - len(made)
        assert len(frames) == len(self) - before
        counts = self._counts
        for frame in frames:
            appends = 0 if frame in data else _appends(frame)
            counts["native: relayed in pieces"] += _missing_bytes(frame) > 0
            counts["native: appended" if appends else "native: relayed"] += 1
            counts["native: several partitions"] += appends > 1
            counts["native: several in flight"] += appends > 0 and any(self._sent)
            counts["native: collected"] += appends > 0 and collecting
            collecting = False
            self._sent.append(appends)
        return taken

    def take_down(self, data: bytes, now: float) -> Any:
        taken = self._connection.take_down(data, now)
        for _ in range(len(self._sent) - len(self)):
            appends = self._sent.popleft()
            self._counts["native: completed" if appends else "native: relayed completed"] += 1
            self._counts["native: several partitions completed"] += appends > 1
        return taken

    def return_requests(self) -> Any:
        self._sent.clear()
        self._left = 0
        returned = self._connection.return_requests()
        self._counts["native: returned"] += sum(each[3] is not None for each in returned)
        return returned


def _frames(data: bytes) -> list[bytes]:
    """All but the last one are complete."""
    frames, at = [], 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        frames.append(data[at:end])
        at = end
    return frames


def _missing_bytes(frame: bytes) -> int:
    return 4 + int.from_bytes(frame[:4], "big") - len(frame)


def _appends(frame: bytes) -> int:
    """In a Produce v13 request about one topic, as native code makes it."""
    _, api_key, version, _ = _HEAD.unpack_from(frame)
    assert (api_key, version) == (PRODUCE, 13)
    at = _HEAD.size + 2 + max(0, int.from_bytes(frame[_HEAD.size : _HEAD.size + 2], "big", signed=True))
    # no tagged fields, no transactional id, acks, timeout, one topic and its id
    return frame[at + 1 + 1 + 2 + 4 + 1 + 16] - 1
