"""The audit log: which client changed what, and which one was refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from fencepost_proxy import logs
from fencepost_proxy.observability import audit
from fencepost_proxy.observability.lists import Refusals
from fencepost_proxy.services.session_requests import SessionRequests
from fencepost_proxy.services.topic_configs import StoredConfigs
from fencepost_proxy.session.frames import messages as sessions
from fencepost_proxy.topics.planning import ExpansionOutcome, ExpansionRequest
from fencepost_proxy.topics.state import NotStored, TopicConfigChange
from fencepost_proxy.types import Address, TopicPartition

PEER = Address("10.0.0.7", 51_000)
ALICE = {"peer": PEER, "principal": "alice", "client_id": "billing"}


@pytest.fixture(autouse=True)
def _nothing_is_suppressed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(audit, "_limited_log", logs.RateLimitedLog(logs.get("audit"), interval_seconds=60.0))
    caplog.set_level(logging.INFO, "fencepost")


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, Mapping[str, Any]]]:
    assert {each.name for each in caplog.records} <= {"fencepost.audit"}
    found = [(each.getMessage(), each.__dict__["fencepost_fields"]) for each in caplog.records]
    return [(text, {name: value for name, value in given.items() if value is not None}) for text, given in found]


def connection(*, session: bool = True) -> Any:
    state = SimpleNamespace(principal="alice", client_id="billing")
    return SimpleNamespace(peer=PEER, session=SimpleNamespace(state=state) if session else None)


def run(
    command: sessions.Command,
    proxied: Any,
    *,
    failure: NotStored | None = None,
    code: int = 0,
    effects: Any = MappingProxyType({}),
) -> object:
    class Configs:
        async def store(self, changes: object) -> StoredConfigs:
            proxied.session = None  # the client has left meanwhile
            return StoredConfigs(failure, effects)

    class Expansions:
        async def expand(self, request: ExpansionRequest, timeout_ms: int) -> ExpansionOutcome:
            return ExpansionOutcome(request.topic, code, "no broker" if code else None)

    cluster: Any = SimpleNamespace(expansions=Expansions())
    configs: Any = Configs()
    work = SessionRequests(cluster, configs, lambda _: None, lambda: None).start(7, command, proxied)
    assert work is not None
    return asyncio.run(work)


def test_change_of_virtual_configs_names_the_client(caplog: pytest.LogCaptureFixture) -> None:
    change = TopicConfigChange("orders", None, {"a": "required"}, unset=frozenset({"c", "b"}))
    assert run(sessions.Store(1, (change,)), connection()) == sessions.Stored(1, None)
    assert lines(caplog) == [
        ("virtual configs changed", {**ALICE, "topic": "orders", "set": {"a": "required"}, "unset": ["b", "c"]})
    ]


@pytest.mark.parametrize(
    ("old", "new", "level"),
    [("required", "true", "WARNING"), ("true", "false", "WARNING"), ("true", "required", "INFO")],
)
def test_weakened_check_is_a_warning_with_both_values(
    old: str, new: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    check = "fencepost.check.expected.offsets"
    change, effect = TopicConfigChange("orders", None, unset=frozenset({check})), {check: (old, new)}
    run(sessions.Store(1, (change,)), connection(), effects={"orders": effect})
    values = {"topic": "orders", "unset": [check], "old": {check: old}, "new": {check: new}}
    assert lines(caplog) == [("virtual configs changed", {**ALICE, **values})]
    assert [each.levelname for each in caplog.records] == [level]


def test_failed_change_of_virtual_configs_has_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    run(
        sessions.Store(1, (TopicConfigChange("orders", None, deleted=True),)),
        connection(),
        failure=NotStored("timed out"),
    )
    assert lines(caplog) == [
        ("virtual configs not changed", {**ALICE, "topic": "orders", "topic_deleted": True, "reason": "timed out"})
    ]


@pytest.mark.parametrize(
    ("code", "event", "reason"), [(0, "partitions added", {}), (7, "partitions not added", {"reason": "no broker"})]
)
def test_added_partitions_name_the_client(
    code: int, event: str, reason: Mapping[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    requests = ExpansionRequest("orders", 4, None), ExpansionRequest("clicks", 9, None, validate_only=True)
    run(sessions.Expand(1, requests, 1_000), connection(), code=code)
    assert lines(caplog) == [(event, {**ALICE, "topic": "orders", "partitions": 4, **reason})]


def test_refused_append_names_the_client_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for partition in (3, 3, 4):
        refused = sessions.Count("refusal", "offset_mismatch", TopicPartition("orders", partition), 41, 57)
        refusals.record(refused, connection())
    refusals.record(sessions.Count("refusal", "not_ready", TopicPartition("orders", 3)), connection(session=False))

    first, other = lines(caplog)
    assert first == (
        "append refused",
        {**ALICE, "partition": "orders-3", "reason": "offset_mismatch", "expected": 41, "log_end": 57},
    )
    assert (other[1]["reason"], other[1]["peer"]) == ("not_ready", PEER)
    assert "principal" not in other[1]
    (not_ready, last) = list(refusals.newest_first())[:2]
    assert (last.principal, last.client_id, last.client) == ("alice", "billing", PEER)
    assert (not_ready.principal, not_ready.client) == (None, PEER)
