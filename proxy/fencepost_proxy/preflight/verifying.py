"""`fencepost verify-broker`: whether a cluster behaves as the promises need, by the conformance cases.

It creates topics, one to three at a time, sends a few thousand small requests one after the other, and
deletes the topics after each case.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from traceback import extract_tb
from types import TracebackType
from typing import Final

from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.errors import Error, FencepostError
from fencepost_proxy.preflight.checking import release_of
from fencepost_proxy.preflight.conformance import case as conformance
from fencepost_proxy.preflight.conformance.case import CLAIMS, Case, Deviation, NotAvailable, NotTested, Promise
from fencepost_proxy.preflight.conformance.cases import CASES
from fencepost_proxy.preflight.conformance.cluster import AnyKafka
from fencepost_proxy.preflight.conformance.driver import Kafka
from fencepost_proxy.preflight.conformance.requests import NotDeleted
from fencepost_proxy.preflight.rights import NEEDED
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.apis import api_name
from fencepost_proxy.wire.schema import Message

#: Facts in one line of the report; the list of cases has all.
_FACTS_MAX: Final = 3
_CASES_AT: Final = Path(conformance.__file__).parent
#: What no case covers, besides what `Control` names.
NOT_COVERED: Final = ("retention and compaction", "loss of acknowledged records")


class Outcome(StrEnum):
    """`ABSENT`: the cluster lacks it, and no promise needs it."""

    HOLDS = "holds"
    DIFFERS = "differs"
    ABSENT = "not available"
    UNKNOWN = "not tested"


class Status(StrEnum):
    HOLDS = "holds"
    BROKEN = "does not hold"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Result:
    """`reason`: what differs, or why it was not tested. `where`: the line of the case."""

    case: Case
    outcome: Outcome
    reason: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """`release`: by its features, None if it reports none. `lacking`: APIs that the proxy needs."""

    cluster_id: str | None
    brokers: int
    release: str | None
    lacking: Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    """`left`: why a topic is left, else empty."""

    cluster: Cluster
    results: Sequence[Result]
    seconds: float
    left: str = ""

    def status(self, promise: Promise) -> tuple[Status, str]:
        """With its reason."""
        needed = [each for each in self.results if promise in each.case.promises]
        if self.cluster.lacking:
            return Status.BROKEN, f"the proxy needs APIs that are missing: {', '.join(self.cluster.lacking)}"
        if differing := _of(needed, Outcome.DIFFERS):
            return Status.BROKEN, _facts(differing)
        if unknown := _of(needed, Outcome.UNKNOWN):
            return Status.UNKNOWN, f"not tested: {_facts(unknown)}"
        absent = _of(needed, Outcome.ABSENT)
        return Status.HOLDS, f"cases that this cluster cannot run: {_facts(absent)}" if absent else ""

    @property
    def holds(self) -> bool:
        """Claims are off by default, and not every user may write the markers that they need."""
        unknown = {each for each in Promise if self.status(each)[0] is Status.UNKNOWN}
        broken = any(self.status(each)[0] is Status.BROKEN for each in Promise)
        return not self.left and not broken and unknown <= CLAIMS


def _of(results: Iterable[Result], outcome: Outcome) -> list[Result]:
    return [each for each in results if each.outcome is outcome]


def _facts(results: Sequence[Result]) -> str:
    rest = len(results) - _FACTS_MAX
    return "; ".join(each.case.fact for each in results[:_FACTS_MAX]) + (f"; and {rest} more" if rest > 0 else "")


def verify(kafka: AnyKafka, *, seconds: float) -> Report:
    """Run all cases that disturb no broker, the most important first.

    Raises `UpstreamUnavailable` if no server can be reached. `seconds` bounds the cases, not the cleaning up after it.
    """
    begun = time.monotonic()
    cluster = describe(kafka)
    kafka.shared_id = kafka.new_producer_id() or kafka.shared_id
    kafka.other_id = kafka.new_producer_id() or kafka.other_id
    results: list[Result] = []
    left = ""
    try:
        for case in selected(CASES):
            kafka.until_time = begun + seconds
            results.append(run_twice(kafka, case, cluster.brokers))
    except NotDeleted as error:
        left = str(error)
    except BaseException:
        kafka.clean()
        raise
    return Report(cluster, results, time.monotonic() - begun, left)


def selected(cases: Iterable[Case]) -> list[Case]:
    """Cases without `Control`; those that most promises need first."""
    return sorted((each for each in cases if each.control is None), key=lambda case: -len(case.promises))


def run_twice(kafka: AnyKafka, case: Case, brokers: int) -> Result:
    """A difference counts if it shows twice: leaders may move meanwhile. Cleans up. Raises `NotDeleted`."""
    until_time = kafka.until_time
    first = run_case(kafka, case, brokers)
    kafka.clean()
    if first.outcome is not Outcome.DIFFERS:
        return first
    kafka.until_time = until_time
    second = run_case(kafka, case, brokers)
    kafka.clean()
    if second.outcome is Outcome.HOLDS:
        return replace(second, reason=f"at the second attempt; at first {first.reason}", where=first.where)
    return first


def run_case(kafka: Kafka, case: Case, brokers: int) -> Result:
    if case.brokers > brokers:
        return Result(case, Outcome.ABSENT, f"the cluster has {brokers} broker(s)")
    try:
        case.run(kafka)
    except NotTested as error:
        absent = case.optional and isinstance(error, NotAvailable)
        return Result(case, Outcome.ABSENT if absent else Outcome.UNKNOWN, str(error))
    except PermissionError as error:
        return Result(case, Outcome.UNKNOWN, f"this user lacks READ: {error}")
    except UpstreamUnavailable as error:
        if case.optional and error.error_code == Error.UNSUPPORTED_VERSION:
            return Result(case, Outcome.ABSENT, str(error))
        return Result(case, Outcome.DIFFERS, str(error), _line(error.__traceback__))
    except (Deviation, FencepostError, LookupError, ValueError) as error:
        stated = str(error) if isinstance(error, Deviation) else f"{type(error).__name__}: {error}"
        return Result(case, Outcome.DIFFERS, stated, _line(error.__traceback__))
    return Result(case, Outcome.HOLDS)


def _line(trace: TracebackType | None) -> str:
    """The last line of a case in the trace."""
    names = {f"{name}.py" for name in ("appends", "expiry", "replicas", "transactions")}
    for frame in reversed(extract_tb(trace)):
        path = Path(frame.filename)
        if path.parent == _CASES_AT and path.name in names:
            return f"{path.name}:{frame.lineno}: {frame.line}"
    return ""


def describe(kafka: AnyKafka) -> Cluster:
    answer = kafka.query(apis.METADATA, Message(topics=[]), at_least=4, at_most=12)
    level = kafka.features().get("metadata.version")
    available: Mapping[int, tuple[int, int]] = kafka.api_versions()
    lacking = [
        f"{api_name(key)} v{low}–{high}"
        for key, (low, high) in NEEDED.items()
        if min(available.get(key, (0, -1))[1], high) < max(available.get(key, (0, -1))[0], low)
    ]
    return Cluster(answer.cluster_id, len(answer.brokers), None if level is None else release_of(level), lacking)


def as_json(report: Report) -> dict[str, object]:
    promises = {}
    for promise in Promise:
        status, reason = report.status(promise)
        promises[promise.value] = {"result": status.value, "reason": reason}
    return {
        "cluster_id": report.cluster.cluster_id,
        "brokers": report.cluster.brokers,
        "release": report.cluster.release,
        "lacking_apis": list(report.cluster.lacking),
        "promises": promises,
        "cases": [
            {
                "name": each.case.name,
                "fact": each.case.fact,
                "promises": sorted(each.case.promises),
                "outcome": each.outcome.value,
                "reason": each.reason,
                "where": each.where,
            }
            for each in report.results
        ],
        "not_tested": not_tested(),
        "left_topic": report.left,
        "seconds": round(report.seconds, 1),
    }


def not_tested() -> list[str]:
    return [*sorted({each.control.value for each in CASES if each.control is not None}), *NOT_COVERED]
