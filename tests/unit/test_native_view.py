"""Whatever native code remembers cannot change without a report."""

from __future__ import annotations

import re

import pytest

from fencepost_proxy import native_view
from fencepost_proxy.cluster.heartbeats import Heartbeats
from fencepost_proxy.cluster.metadata_cache import MetadataCache
from fencepost_proxy.cluster.pool import ConnectionPool
from fencepost_proxy.cluster.state_topic import StateTopic
from fencepost_proxy.native_view import NativeView, RememberedMap
from fencepost_proxy.services.membership import Membership
from fencepost_proxy.services.session_services import SessionServices
from fencepost_proxy.services.topic_lookups import TopicLookups
from fencepost_proxy.session.relay import native_calls
from fencepost_proxy.topics.state import StateView
from tests.unit.test_sizes import ROOT

PROXY = ROOT / "proxy" / "fencepost_proxy"


class _Leader(NativeView, remembered=("epoch",)):
    def __init__(self) -> None:
        self.epoch = 1
        self.name = "a"


class _Lease(_Leader, remembered=("owner",), until=("ends",)):
    ends = 10.0
    owner = ""


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    reports: list[None] = []
    monkeypatch.setattr(native_view, "changed", lambda: reports.append(None))
    return reports


def test_assignment_of_what_is_remembered_is_reported(reports: list[None]) -> None:
    leader = _Leader()
    reports.clear()
    leader.name = "b"
    assert not reports
    leader.epoch = 2
    assert (len(reports), leader.epoch) == (1, 2)


def test_subclass_remembers_more(reports: list[None]) -> None:
    lease = _Lease()
    reports.clear()
    lease.epoch, lease.owner = 3, "b"
    assert len(reports) == 2
    assert _Leader._remembered == {"epoch"}


def test_only_an_earlier_end_is_a_change(reports: list[None]) -> None:
    lease = _Lease()
    reports.clear()
    for ends, count in ((12.0, 0), (12.0, 0), (11.0, 1), (float("-inf"), 2), (20.0, 2)):
        lease.ends = ends
        assert (lease.ends, len(reports)) == (ends, count)


def test_every_change_of_a_map_is_reported_except_a_first_answer(reports: list[None]) -> None:
    answers = RememberedMap[str, int]()
    answers.add("a", 1)
    assert (dict(answers.view), len(reports)) == ({"a": 1}, 0)
    with pytest.raises(ValueError, match="'a' is remembered already"):
        answers.add("a", 2)
    answers.set("a", 2)
    assert (dict(answers.view), len(reports)) == ({"a": 2}, 1)
    answers.discard("a")
    assert (dict(answers.view), len(reports)) == ({}, 2)
    answers.add("b", 3)
    answers.clear()
    assert (dict(answers.view), len(reports)) == ({}, 3)
    with pytest.raises(TypeError):
        answers.view["c"] = 1  # type: ignore[index]


#: What the answers of `native_calls.Services` are made of.
_MADE_OF: dict[str, list[tuple[type[NativeView], str]]] = {
    "fresh": [(Membership, "state"), (StateTopic, "read_until"), (Heartbeats, "live_until")],
    "alone": [(Membership, "state"), (Heartbeats, "_sending")],
    "taken_over": [(Membership, "takeover_until")],
    "instance_id": [(Membership, "state"), (Heartbeats, "process"), (StateView, "_next_offset")],
    "in_flight_requests_max": [(SessionServices, "in_flight_requests_max")],
    "relayed_versions": [(SessionServices, "relayed_versions")],
    "produce_version_max": [(ConnectionPool, "_version_max")],
    "shared_producer_ids": [(Membership, "state"), (StateView, "_next_offset")],
    "state_topic_marks": [(MetadataCache, "known"), (TopicLookups, "_unverified")],
    "policy": [(Membership, "state"), (StateView, "_next_offset")],  # and a RememberedMap
    "topic_id": [(MetadataCache, "known"), (TopicLookups, "_unverified")],
    "leader_epoch": [(MetadataCache, "known")],
}
#: Read once, or not remembered.
_NOT_REMEMBERED = {"idempotence", "reserve", "release", "frame_bytes_max", "read_here_bytes_max"}


@pytest.mark.parametrize(
    ("answer", "kind", "attribute"), [(answer, *of) for answer, made_of in _MADE_OF.items() for of in made_of]
)
def test_what_an_answer_is_made_of_is_reported(
    answer: str, kind: type[NativeView], attribute: str, reports: list[None]
) -> None:
    owner = object.__new__(kind)
    setattr(owner, attribute, 2.0)
    reports.clear()
    setattr(owner, attribute, 1.0)
    assert reports, answer


def test_each_answer_to_native_code_is_in_the_table() -> None:
    answers = {name for name in vars(native_calls.Services) if not name.startswith("_")}
    assert _MADE_OF.keys() | _NOT_REMEMBERED == answers


def test_no_other_module_reports_changes() -> None:
    by_hand = re.compile(r"native_view import .*\bchanged\b|native_view\.changed|\bmodule\.changed|MODULE\.changed")
    elsewhere = [
        str(path.relative_to(PROXY))
        for path in PROXY.rglob("*.py")
        if path.name != "native_view.py" and by_hand.search(path.read_text("utf-8"))
    ]
    assert not elsewhere, "keep the value in a `NativeView` or a `RememberedMap`, which report its changes"
