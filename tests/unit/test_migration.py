"""A session of another worker than the primary one: what it migrates, when, and how the primary's session continues."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost_policies.append import Check
from fencepost_proxy.session import messages as m
from fencepost_proxy.session.rewriters import Finished, RequestRewriter
from fencepost_proxy.session.session import Session
from fencepost_proxy.topics.planning import Joins
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import (
    ADD_PARTITIONS_TO_TXN,
    ALTER_CONFIGS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    INCREMENTAL_ALTER_CONFIGS,
)
from tests.support.batches import batch, expecting
from tests.unit.test_session import HEARTBEAT, ServicesStandIn, Talk, Unchanged, produce, produced, request, response

CHECKED = produce(("checked", 0, expecting(5, b"a")), correlation=7)
FREE = 1 << 20


class Secondary(Talk):
    """A session of another worker than the primary one."""

    def __init__(self, rewriters: Any = None, **services: Any) -> None:
        super().__init__(**services)
        self.session = Session(1, "proxy.local", self.services, rewriters or Unchanged(), 0.0, primary=False)  # type: ignore[arg-type]

    def migrated(self) -> m.MigratedConnection:
        migrated = self.next(m.Migrate).migrated
        self.silent()
        assert self.session.finished
        assert self.services.free_bytes == FREE, "memory was not given back"
        return migrated

    def migrates(self) -> m.MigratedConnection:
        self.next(m.ReadClient)
        return self.migrated()


class Primary(Talk):
    """Continues a migrated connection."""

    def __init__(self, migrated: m.MigratedConnection, **services: Any) -> None:
        super().__init__(**services)
        self.session = Session.of(migrated, 9, self.services, Unchanged())  # type: ignore[arg-type]
        self.client(migrated.unread)


def test_unchecked_append_does_not_migrate() -> None:
    talk = Secondary()
    talk.client(produce(("unchecked", 0, batch(b"a"))))
    talk.upstream()
    talk.kafka(produced(("unchecked", 0, 0, 3)))
    talk.answer()
    talk.silent()


def test_an_append_to_a_required_topic_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServicesStandIn, "policy", lambda self, topic: TopicPolicy(Check.REQUIRED))
    talk = Secondary()
    talk.client(CHECKED)
    talk.submitted()


@pytest.mark.parametrize("arrived", [30, 60, len(CHECKED) - 1])
def test_partial_frame_migrates_with_its_connection(arrived: int) -> None:
    """The primary's session reads the rest from the socket."""
    talk = Secondary()
    talk.client(CHECKED[:arrived])
    if not talk.commands:  # not even its topic is known yet
        talk.client(CHECKED[arrived : arrived + 40])
        arrived += 40
    migrated = talk.migrates()
    assert migrated.unread == CHECKED[:arrived]

    primary = Primary(migrated)
    primary.silent()
    primary.client(CHECKED[arrived:])
    assert primary.submitted().append.expected_base_offset == 5


def test_migration_waits_for_requests_in_progress() -> None:
    talk = Secondary()
    after = request(HEARTBEAT, 4, 8)
    talk.client(request(HEARTBEAT, 4, 1) + request(HEARTBEAT, 4, 2) + CHECKED + after)
    talk.next(m.ReadClient)
    talk.upstream()
    talk.silent()

    talk.client(request(HEARTBEAT, 4, 9))  # in the receive buffer before reading stopped
    talk.kafka(response(1))
    assert talk.answer() == response(1)
    talk.silent()

    talk.kafka(response(2))
    assert talk.answer() == response(2)
    migrated = talk.migrated()
    assert migrated.unread == CHECKED + after + request(HEARTBEAT, 4, 9)

    primary = Primary(migrated)
    pending = primary.submitted()
    primary.next(m.ReadClient)
    primary.admit(pending)
    primary.sent(pending)


def test_collected_request_migrates_whole() -> None:
    """With several topics, only the whole request shows whether one of them is checked."""
    talk = Secondary()
    both = produce(("unchecked", 0, batch(b"a")), ("checked", 0, expecting(5, b"a")), correlation=7)
    after = request(HEARTBEAT, 4, 8)

    talk.client(both[:100])
    talk.silent()
    talk.client(both[100:] + after)

    migrated = talk.migrates()
    assert migrated.unread == both + after
    assert Primary(migrated).submitted().append.expected_base_offset == 5


@pytest.mark.parametrize(
    "query",
    [
        CHECKED,
        request(CREATE_TOPICS, 5, 3),
        request(DELETE_TOPICS, 4, 3),
        request(ALTER_CONFIGS, 1, 3),
        request(INCREMENTAL_ALTER_CONFIGS, 1, 3),
    ],
    ids=["append to a true topic", "CreateTopics", "DeleteTopics", "AlterConfigs", "IncrementalAlterConfigs"],
)
def test_request_for_primary_worker_migrates_before_processing(query: bytes) -> None:
    talk = Secondary()
    talk.client(query)
    assert talk.next(m.ReadClient) == m.ReadClient(False)
    assert talk.migrated().unread == query


def test_transaction_adding_checked_partitions_migrates() -> None:
    class Joining:
        def begin(self, api_key: int, version: int, frame: memoryview, local_host: str) -> RequestRewriter:
            joins = Joins("tx", (TopicPartition("checked", 0),))
            return RequestRewriter(b"to Kafka", finish=lambda found: Finished(b""), joins=joins)

    talk = Secondary(Joining())
    queried = request(ADD_PARTITIONS_TO_TXN, 3, 3)
    talk.client(queried)
    assert talk.migrates().unread == queried


@pytest.mark.parametrize("end", [m.ClientLost(), m.UpstreamLost("it broke")])
def test_connection_lost_meanwhile_is_not_migrated(end: m.Event) -> None:
    talk = Secondary()
    talk.client(request(HEARTBEAT, 4, 1) + CHECKED)
    talk.next(m.ReadClient)
    talk.upstream()
    talk.report(end)
    talk.next(m.CloseUpstream if isinstance(end, m.ClientLost) else m.CloseClient)
    talk.silent()
    assert talk.session.finished is isinstance(end, m.ClientLost)


def test_a_right_that_was_proved_stays_proved() -> None:
    talk = Secondary()
    talk.session._core.proofs.may_write["checked"] = float("inf")
    talk.client(CHECKED)
    primary = Primary(talk.migrates())
    primary.refused(primary.submitted())
    primary.answer()
    primary.silent()


def test_failed_pipeline_stays_failed_after_migration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fails on a `required` topic; B was sent before that was read, after the append that migrates the connection."""
    policies = {"required": TopicPolicy(Check.REQUIRED), "checked": TopicPolicy(Check.ON)}
    monkeypatch.setattr(ServicesStandIn, "policy", lambda self, topic: policies.get(topic))
    talk = Secondary()
    talk.session._core.proofs.may_write["required"] = float("inf")
    a = produce(("required", 0, expecting(5, b"a")), correlation=1)
    b = produce(("required", 0, expecting(6, b"a")), correlation=2)
    c = produce(("required", 0, expecting(57, b"a")), correlation=3)
    talk.client(a + CHECKED + b)
    pending = talk.submitted()
    talk.next(m.ReadClient)
    talk.refused(pending)
    talk.next(m.ReadClient)
    talk.answer()
    migrated = talk.migrated()
    assert migrated.unread == CHECKED + b

    primary = Primary(migrated)
    is_checked = primary.submitted()
    primary.next(m.ReadClient)
    primary.admit(is_checked)
    primary.sent(is_checked)
    assert primary.next(m.Count).label == "predecessor_failed", "B was submitted"
    primary.next(m.ReadClient)
    primary.upstream()
    primary.kafka(produced(("checked", 0, 0, 5), correlation=7))
    primary.commands.clear()

    primary.client(c)  # its client knows by now
    assert primary.submitted().append.expected_base_offset == 57
