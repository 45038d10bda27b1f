"""Stored virtual configs: answers, inherited checks, and warnings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY
from uuid import UUID

import pytest

from fencepost_policies.append import Check
from fencepost_proxy.cluster.configs import Configs, TopicFacts
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.server import Proxy
from fencepost_proxy.services.replaced_topics import ReplacedTopics
from fencepost_proxy.services.topic_configs import TopicConfigs
from fencepost_proxy.services.topic_warnings import TopicWarnings
from fencepost_proxy.topics.state import NotStored, StateView, TopicConfigChange, encode_topic_config
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import Address, Offset


def test_a_change_that_crashes_here_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def store() -> NotStored | None:
        proxy = Proxy(ProxyConfig(upstream=(Address("127.0.0.1", 1),)))
        return (await proxy._requests.configs.store(())).failure  # before there is a state topic: a mistake of our own

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(store()) == NotStored("internal error, see the proxy's log")
    assert "storing virtual configs crashed" in caplog.text


def test_stored_change_has_old_and_new_values() -> None:
    topic_id, check = UUID(int=1), "fencepost.check.expected.offsets"
    view = StateView("cluster")
    view.apply(Offset(0), *encode_topic_config("orders", topic_id, {check: "required"}))
    appended: list[object] = []

    async def nothing(*_: object) -> None:
        pass

    async def append(records: object) -> None:
        appended.append(records)

    cluster: Any = SimpleNamespace(
        membership=SimpleNamespace(joined=SimpleNamespace(view=view, append=append)),
        kafka=SimpleNamespace(refresh_metadata=nothing),
        rights=SimpleNamespace(require=nothing),
        lookups=SimpleNamespace(denied=lambda _: False, topic_id=lambda _: topic_id),
    )
    warnings: Any = SimpleNamespace(changed=lambda _: None, check=lambda _: None)
    configs = TopicConfigs(cluster, warnings, lambda _: {}, lease_seconds=0.0)
    stored = asyncio.run(configs.store((TopicConfigChange("orders", None, {check: "true"}),)))
    assert stored == (None, {"orders": {check: ("required", "true")}})
    assert len(appended) == 1


def test_inherited_checks_are_reported_at_the_second_probe(caplog: pytest.LogCaptureFixture) -> None:
    old, new, view, metrics = UUID(int=1), UUID(int=2), StateView("cluster"), Metrics()
    replaced = ReplacedTopics(lambda topic: new, metrics)
    view.apply(Offset(0), *encode_topic_config("orders", old, {"fencepost.check.expected.offsets": "true"}))
    view.apply(Offset(1), *encode_topic_config("payments", new, {"fencepost.check.expected.offsets": "true"}))
    reported = []
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            replaced.probe(view)
            reported.append((metrics.topics_replaced.value, list(replaced.warnings())))
    assert reported[0] == (0, [])
    assert reported[1] == reported[2] == (1, [ANY])
    assert "orders" in reported[1][1][0].text
    assert len(caplog.records) == 1

    view.apply(Offset(2), *encode_topic_config("orders", new, {"fencepost.check.expected.offsets": "true"}))
    replaced.state_changed(view)
    assert (metrics.topics_replaced.value, list(replaced.warnings())) == (0, [])


def test_one_warning_names_all_weakly_replicated_topics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def facts(_: Configs, topics: Sequence[str]) -> Mapping[str, TopicFacts]:
        return {topic: TopicFacts(min_insync_replicas=1) for topic in topics}

    monkeypatch.setattr(Configs, "facts_of_topics", facts)
    kafka = SimpleNamespace(topic=lambda topic: SimpleNamespace(replication_factor=1))
    spawned: list[Coroutine[Any, Any, None]] = []
    warnings = TopicWarnings(
        kafka,  # type: ignore[arg-type]
        lambda topic: TopicPolicy(check=Check.ON),
        lambda work, name: spawned.append(work),
        shared_ports=False,
    )
    for _ in range(2):
        warnings.check([f"topic-{number}" for number in range(9)])
    with caplog.at_level(logging.WARNING, "fencepost"):
        for work in spawned:
            asyncio.run(work)

    (line,) = caplog.records
    stated = vars(line)["fencepost_fields"]
    assert stated["topics"] == 9
    assert "has 1 replica(s)" in stated["reason"]
    assert "has min.insync.replicas=1" in stated["reason"]
    assert "topic-4 and 4 more" in stated["reason"]


@pytest.mark.parametrize("shared_ports", [True, False])
def test_shared_ports_warn_once_per_true_topic(shared_ports: bool, caplog: pytest.LogCaptureFixture) -> None:
    checks = {"a": Check.ON, "b": Check.REQUIRED, "c": Check.ON, "d": Check.REQUIRED}
    warnings = TopicWarnings(
        SimpleNamespace(),  # type: ignore[arg-type]
        lambda topic: TopicPolicy(check=checks[topic]) if topic in checks else None,
        lambda work, name: work.close(),
        shared_ports=shared_ports,
    )

    def warned_of() -> list[str]:
        caplog.clear()
        warnings.check(["a", "b", "c", "unchecked"])
        warnings.check(["d"])
        return [vars(line)["fencepost_fields"]["names"] for line in caplog.records]

    with caplog.at_level(logging.WARNING, "fencepost"):
        assert warned_of() == (["a, c"] if shared_ports else [])
        assert warned_of() == []
        checks["d"] = Check.ON
        assert warned_of() == (["d"] if shared_ports else [])
        checks["a"] = Check.REQUIRED
        assert warned_of() == []
        checks["a"] = Check.ON
        assert warned_of() == (["a"] if shared_ports else [])
        warnings.keep(["d"])
        assert warned_of() == (["a, c"] if shared_ports else [])
