"""Configs of a newer version: what that version stores, and what this one keeps, refuses, reports and deletes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from uuid import UUID

import pytest

from fencepost_policies.append_policy import Choice
from fencepost_proxy.observability.status import Problem
from fencepost_proxy.services import unknown_configs
from fencepost_proxy.topics import state, virtual_configs
from fencepost_proxy.topics.state import StateView, TopicConfigChange, encode_topic_config
from fencepost_proxy.topics.virtual_configs import VIRTUAL_CONFIGS, TopicPolicy
from fencepost_proxy.types import Offset
from fencepost_proxy.wire.state_records import StateRecord

ORDERS, REPLACED = UUID(int=100), UUID(int=101)
CHECK, FUTURE, OTHER = "fencepost.check.expected.offsets", "fencepost.future", "fencepost.hint"


@contextmanager
def newer_version() -> Iterator[None]:
    """It has two more configs. Older versions may ignore the second one."""
    with pytest.MonkeyPatch.context() as patch:
        words = {"off": False, "on": True}
        more = {name: Choice(name=name, default="off", documentation="", settings=words) for name in (FUTURE, OTHER)}
        for module in (virtual_configs, state):
            patch.setattr(module, "VIRTUAL_CONFIGS", {**VIRTUAL_CONFIGS, **more})
        patch.setattr(virtual_configs, "_STORED_UNCHANGED", virtual_configs._STORED_UNCHANGED | {OTHER})
        yield


def stored_by_newer(configs: Mapping[str, str]) -> StateRecord:
    with newer_version():
        return encode_topic_config("orders", ORDERS, configs)


def view_of(*records: StateRecord) -> StateView:
    view = StateView("cluster-1")
    for offset, record in enumerate(records):
        assert view.apply(Offset(offset), *record) is None
    return view


def policy_of(view: StateView, topic_id: UUID = ORDERS) -> TopicPolicy:
    return view.topic_policy("orders", topic_id, lambda topic: {})


@pytest.mark.parametrize(
    ("configs", "unknown", "refused"),
    [
        ({FUTURE: "on"}, (f"!{FUTURE}",), [(FUTURE,)]),
        ({FUTURE: "on", OTHER: "on", CHECK: "true"}, (f"!{FUTURE}", OTHER), [(FUTURE,)]),
        ({FUTURE: "off"}, (FUTURE,), []),  # the default: as before the config existed
        ({OTHER: "on"}, (OTHER,), []),
        ({CHECK: "true"}, None, []),
    ],
)
def test_older_version_refuses_what_must_be_understood(
    configs: dict[str, str], unknown: tuple[str, ...] | None, refused: list[tuple[str, ...]]
) -> None:
    record = stored_by_newer(configs)
    view = view_of(record)
    assert view.unknown_configs.get("orders") == unknown
    policy = policy_of(view)
    assert [setting for _, setting in policy.policies] == refused
    assert policy.read is bool(refused or CHECK in configs)
    with newer_version():
        view = view_of(record)
        assert view.configs_set_on("orders", ORDERS) == configs
        assert view.unknown_configs == {}


def test_only_claims_are_stored_under_another_name() -> None:
    """Records of earlier development versions have no prefix. Those that do not know claims must not append."""
    examples = {config.name: config.example for config in VIRTUAL_CONFIGS.values()}
    value = encode_topic_config("orders", ORDERS, examples).value
    assert value is not None
    assert re.findall(rb'"!([^"]+)"', value) == [b"fencepost.claims"]
    assert view_of(encode_topic_config("orders", ORDERS, examples)).configs_set_on("orders", ORDERS) == examples


def test_older_version_keeps_what_it_does_not_know() -> None:
    view = view_of(stored_by_newer({FUTURE: "on", OTHER: "on"}))
    (changed,) = view.records_of([TopicConfigChange("orders", ORDERS, {CHECK: "true"})])
    with newer_version():
        stored = view_of(changed).configs_set_on("orders", ORDERS)
    assert stored == {FUTURE: "on", OTHER: "on", CHECK: "true"}


def test_replaced_topic_inherits_what_must_be_understood() -> None:
    view = view_of(stored_by_newer({FUTURE: "on"}))
    assert view.inherits("orders", REPLACED)
    assert policy_of(view, REPLACED).policies


@pytest.mark.parametrize("others", [{}, {CHECK: "true"}])
def test_deletion_ends_the_refusal_and_is_reported(others: dict[str, str]) -> None:
    view = view_of(stored_by_newer({FUTURE: "on", **others}))
    change = TopicConfigChange("orders", ORDERS, unset=frozenset({f"!{FUTURE}"}))
    assert view.effect_of(change, lambda topic: {}) == {FUTURE: ("on", "")}
    (record,) = view.records_of([change])
    view.apply(Offset(9), *record)
    assert policy_of(view) == TopicPolicy.of(others)
    assert view.unknown_configs == {}


def test_unknown_configs_are_logged_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    configs = {f"t{number}": (f"!{FUTURE}",) for number in range(7)} | {"u": (OTHER,), "v": (f"!{FUTURE}", OTHER)}

    unknown_configs.log(configs)
    unknown_configs.log(configs)  # limited

    refused, ignored = caplog.records
    assert refused.getMessage().startswith(
        "appends to topics are refused: they have configs that this version does not"
    )
    assert refused.__dict__["fencepost_fields"] == {
        "topics": 8,
        "names": "t0, t1, t2, t3, t4 and 3 more",
        "configs": f"{FUTURE}, {OTHER}",
    }
    assert "does not know, and ignores" in ignored.getMessage()
    assert ignored.__dict__["fencepost_fields"] == {"topics": 1, "names": "u", "configs": OTHER}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    bad, mild = unknown_configs.problems(configs)
    assert (bad.bad, mild.bad) == (True, False)
    assert bad.what.startswith("Appends to t0, t1, t2, t3, t4 and 3 more are refused: this version does not know")
    assert mild.what == f"This version does not know, and ignores, {OTHER} on u; a newer version set that"
    assert "--delete-config" in bad.do
    nothing: list[Problem] = list(unknown_configs.problems({}))
    assert nothing == []
