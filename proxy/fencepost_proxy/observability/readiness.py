"""Why a process is not ready for clients, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from fencepost_proxy.cluster.state_topic import StateTopic
from fencepost_proxy.errors import FencepostError, Reason, StateError
from fencepost_proxy.types import Address

SHUTTING_DOWN: Final = Reason(
    "it is shutting down", "Nothing: the proxy was stopped. Clients use another proxy, or reconnect after a restart."
)
NO_BROKER_SETTINGS: Final = Reason(
    "the brokers' settings cannot be read",
    "Does any broker respond? Broker problems are listed below; fencepost check shows details. The proxy recovers "
    "automatically.",
)
_READING: Final = Reason(
    "reading the state topic",
    "Wait a moment. If it persists: does the state topic have a leader, and may the proxy's user READ it?",
)
_NO_HEARTBEAT: Final = Reason(
    "the heartbeat of this process could not be stored yet: appends are blocked",
    "Appends to checked topics wait. Can the proxy append to the state topic (WRITE, min.insync.replicas)?",
)
_STALE: Final = Reason(
    "the state topic was not read recently enough: appends are blocked",
    "Appends to checked topics wait until it is read again. Does the state topic have a leader, can the proxy reach "
    "it, and does this process get CPU time? Broker problems are listed below; the log gives the reason.",
)


class Sidecar(Protocol):
    """`queried`: `problem` is the result of a check."""

    problem: Reason | None
    queried: bool


def unusable(state_topic: str) -> Reason:
    return Reason(
        f"the state topic {state_topic} cannot be used",
        "May the proxy's user CREATE, READ, WRITE and DESCRIBE the state topic, and get a producer id "
        "(IDEMPOTENT_WRITE)? Run fencepost check. The proxy recovers automatically.",
    )


def starting(step: Reason, error: FencepostError) -> Reason:
    """`step`: what a start cannot do, because of `error`."""
    return Reason(f"{step}: {error}", error.hint if isinstance(error, StateError) else step.hint)


def without_kafka(upstream: Sequence[Address], why: Reason | None) -> Reason:
    """`why`: how the last attempt failed, None before."""
    hint = "is Kafka up, and is upstream its address?" if why is None or not why.hint else why.hint
    stop = "" if hint.endswith("?") else "."
    return Reason(
        f"waiting for Kafka at {', '.join(map(str, upstream))}" + ("" if why is None else f": {why}"),
        f"{hint[:1].upper()}{hint[1:]}{stop} fencepost check shows details. The proxy recovers automatically when a "
        "broker responds.",
    )


def before_serving(sidecar: Sidecar | None, step: Reason | None, state: StateTopic | None) -> list[Reason]:
    """`step`: why the start waits."""
    why = step or (None if state is None else state.waits_because)
    problem = sidecar.problem if sidecar is not None and sidecar.queried else None
    return [each for each in (problem, why) if each is not None] or [_READING]


def while_serving(sidecar: Sidecar | None, state: StateTopic | None, *, fresh: bool) -> list[Reason]:
    """`fresh`: the view of the state topic may be used."""
    if state is not None and state.failure is not None:
        return [state.failure]
    if state is not None and state.heartbeats.unacknowledged:
        return [_NO_HEARTBEAT]
    if sidecar is not None and sidecar.problem is not None:
        return [sidecar.problem]
    if fresh:
        return []
    why = None if state is None else state.waits_because
    return [_STALE if why is None else Reason(f"{_STALE} ({why})", why.hint)]
