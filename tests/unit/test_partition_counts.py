"""Dialogues at append barriers: which appends enter, wait or are refused, and when they leave."""

from __future__ import annotations

import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self

import pytest

from fencepost_policies.append import INVALID_TIMESTAMP, Check
from fencepost_policies.partitioners import Partitioner, partition_for
from fencepost_policies.record_age import RecordAge
from fencepost_proxy.expansion.barrier import AppendBarrier
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.session.control.rewriters import Finished, RequestRewriter
from fencepost_proxy.session.dispatcher import Dispatcher, ForConnection, ForControl
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.wire.batch_scan import HeaderNames
from fencepost_proxy.wire.primitives import join_tags
from fencepost_proxy.wire.produce import (
    PartitionResult,
    ProduceRequest,
    encode_produce_request,
    parse_produce_request,
)
from tests.support.batches import batch
from tests.support.sequencer_calls import Call, call
from tests.unit.test_session import (
    COUNT_FIELD,
    HEARTBEAT,
    PolicyTalk,
    ServicesStandIn,
    Unchanged,
    frames,
    produced,
    query,
    read,
    request,
    response,
)

NOT_LEADER, TIMED_OUT, NOT_AUTHORIZED, INVALID_PARTITIONS, INVALID_RECORD = 6, 7, 29, 37, 87
METADATA = 3
_POLICIES = {
    "count-checked": TopicPolicy(count_check=Check.ON),
    "count-checked-2": TopicPolicy(count_check=Check.ON),
    "required": TopicPolicy(count_check=Check.REQUIRED),
    "hashed": TopicPolicy(count_check=Check.ON, partitioner=Partitioner.MURMUR2),
    "ordered": TopicPolicy(ordered=True),
    "both": TopicPolicy(Check.ON, count_check=Check.ON),
    "checked": TopicPolicy(Check.ON),
}


class Barriers(PolicyTalk):
    policies = _POLICIES

    def appends(self, records: memoryview, topic: str = "count-checked", **options: Any) -> Self:
        """The client sends the records for partition 2."""
        self.client(query((topic, 2, records), **options))
        return self

    def stale(self) -> Self:
        """Metadata is older than the client's request."""
        self.services.confirmed_at["count-checked"] = self.now - 1
        return self

    def barrier(self, topic: str = "count-checked") -> AppendBarrier:
        return self.services.barrier(topic)

    def sent_up(self) -> ProduceRequest:
        return parse_produce_request(memoryview(self.upstream())[4:])

    def refusals(self) -> list[str]:
        counts = [c for c in self.commands if isinstance(c, m.Count)]
        self.commands = [c for c in self.commands if not isinstance(c, m.Count)]
        return [count.label for count in counts]

    def refused_and_closed(self, reason: str) -> tuple[int, int, str | None]:
        """What partition 2 gets. The connection is closed, but not at once: some clients would miss the answer."""
        assert self.refusals() == [reason]
        self.next(m.ReadClient)
        [reported] = self.reported().values()
        self.hangs_up()
        return reported

    def hangs_up(self) -> None:
        self.silent()
        assert self.session.needs_ticks
        self.tick(0.15)
        assert self.next(m.CloseClient).hang_up

    def waits(self) -> None:
        self.silent()
        assert self.session.at_barrier


def saying(count: object, *values: bytes) -> memoryview:
    return batch(*(values or (b"v",)), headers=[[("fencepost-partition-count", str(count).encode())]])


V = batch(b"v")
#: A conditional append with a count.
CONDITIONAL = batch(b"v", headers=[[("fencepost-expected-offset", b"41"), ("fencepost-partition-count", b"6")]])


def transactional(producer_id: int, epoch: int = 0) -> memoryview:
    return batch(b"v", producer=(producer_id, epoch, 0), transactional=True)


def _key(partition: int, of: int) -> bytes:
    return next(k for k in (b"%d" % n for n in range(10_000)) if partition_for(Partitioner.MURMUR2, k, of) == partition)


@pytest.fixture
def talk() -> Barriers:
    return Barriers()


@pytest.fixture
def process() -> InDispatcher:
    return InDispatcher()


# --------------------------------------------------------------------------------------------------- what a batch says


def test_append_is_in_flight_until_kafka_answers() -> None:
    records = saying(6)
    talk = Barriers().appends(records)
    [topic] = talk.sent_up().topics
    assert (topic.name, topic.partitions[0].records) == ("count-checked", records), "as it came"
    assert talk.barrier().in_flight == 1
    talk.kafka(produced(("count-checked", 2, 0, 41)))
    assert talk.reported() == {("count-checked", 2): (0, 41, None)}
    talk.silent()
    assert talk.barrier().empty(talk.now)


def test_partition_count_field_is_removed_and_others_kept() -> None:
    talk = Barriers().appends(V, count=struct.pack(">i", 6))
    assert talk.sent_up().topics[0].tags == join_tags([(7, b"theirs"), (300, b"later")])


def test_topic_that_occurs_twice_ends_the_connection(talk: Barriers) -> None:
    whole, other = (parse_produce_request(memoryview(query(("count-checked", each, V)))[4:]) for each in (2, 3))
    talk.client(b"".join(encode_produce_request(replace(whole, topics=whole.topics + other.topics))))
    assert "names topic count-checked, or a partition of it, twice" in talk.next(m.CloseClient).reason


def test_refused_count_does_not_make_a_transaction_abort_only(talk: Barriers) -> None:
    talk.session._core.proofs.may_use = "app"
    headers = [[("fencepost-partition-count", b"4")]]
    records = batch(b"v", headers=headers, producer=(5, 0, 0), transactional=True)
    whole = parse_produce_request(memoryview(query(("count-checked", 2, records)))[4:])
    talk.client(b"".join(encode_produce_request(replace(whole, transactional_id="app"))))
    assert talk.refusals() == ["invalid_partition_count"]
    assert not [each for each in talk.commands if isinstance(each, m.RecordAbortOnly)]


def test_a_tagged_field_that_occurs_twice_is_refused(talk: Barriers) -> None:
    six = struct.pack(">i", 6)
    whole = parse_produce_request(memoryview(query(("count-checked", 2, V)))[4:])
    tags = join_tags([(COUNT_FIELD, six), (COUNT_FIELD, six)])
    talk.client(b"".join(encode_produce_request(replace(whole, topics=(replace(whole.topics[0], tags=tags),)))))
    assert talk.refusals() == ["partition_count_unreadable"]
    assert talk.reported()[("count-checked", 2)][0] == INVALID_RECORD


def test_ordered_topic_without_count_check_has_a_barrier() -> None:
    talk = Barriers().appends(saying(3), "ordered")
    talk.sent_up()
    assert talk.barrier("ordered").in_flight == 1


# ---------------------------------------------------------------------------------------------- those who say nothing


@pytest.mark.parametrize("codec", [0, 1, 4], ids=["plain", "gzip", "zstd"])
def test_misplaced_key_is_refused_during_grace_period(codec: int, talk: Barriers) -> None:
    talk.services.just_expanded.add("hashed")
    talk.appends(batch(b"v", b"w", key=_key(5, of=6), compression=codec), "hashed")
    assert talk.refused_and_closed("misplaced_key")[2] == (
        "MISPLACED_KEY topic=hashed partition=2 record=0 belongs=5 actual=6: of 6 partitions, its key is placed on "
        "another one by murmur2"
    )


@pytest.mark.parametrize(
    ("grace", "key"),
    [(True, _key(2, of=6)), (True, None), (False, _key(5, of=6))],
    ids=["correct", "no key", "misplaced after the grace period"],
)
def test_other_keys_are_accepted(grace: bool, key: bytes | None, talk: Barriers) -> None:
    if grace:
        talk.services.just_expanded.add("hashed")
    talk.appends(batch(b"v", key=key), "hashed").sent_up()


def test_keys_are_decompressed_under_the_bound() -> None:
    talk = Barriers(decompressed_bytes_max=1000)
    talk.services.just_expanded.add("hashed")
    talk.appends(batch(bytes(5000), key=b"k", compression=1), "hashed").read_elsewhere()
    assert talk.refusals() == ["too_large"]


def test_client_with_older_metadata_is_refused(talk: Barriers) -> None:
    """An append without a count is taken to be placed over the partitions that the client has last seen."""
    talk.services.served[("test", "count-checked")] = 3

    assert talk.appends(V).refused_and_closed("invalid_partition_count")[0] == INVALID_PARTITIONS
    assert talk.services.guesses == [("test", "count-checked")]

    refreshed = Barriers()
    refreshed.services.served[("test", "count-checked")] = 6
    refreshed.appends(V).sent_up()

    stating = Barriers()
    stating.services.served[("test", "count-checked")] = 3
    assert stating.appends(saying(4)).refusals() == ["invalid_partition_count"]
    assert stating.services.guesses == []


def test_reported_partition_counts_are_remembered() -> None:
    """A Metadata response has 3 partitions for each topic."""
    counts = (("count-checked", 3), ("checked", 3), ("unchecked", 3))

    def begin(api_key: int, version: int, frame: memoryview, local_host: str) -> RequestRewriter:
        sent = struct.pack(">i", len(frame)) + bytes(frame)
        return RequestRewriter(
            sent, finish=lambda answer: Finished(bytes(answer), partition_counts=counts, client_id="test")
        )

    talk = Barriers(rewriters=SimpleNamespace(begin=begin))
    talk.client(request(METADATA, 9, 1))
    talk.kafka(response(1))
    assert talk.services.served == {("test", "count-checked"): 3}


# ------------------------------------------------------------------------------------------------------ what is known


def test_differing_count_is_confirmed_before_the_refusal() -> None:
    heartbeat = request(HEARTBEAT, 4, 9)

    # Given a client that knows more than the proxy
    talk = Barriers().stale().appends(saying(8))
    assert talk.next(m.TopicStale) == m.TopicStale("count-checked")
    talk.client(heartbeat)
    talk.next(m.ReadClient)
    talk.silent()

    # When metadata says so, too
    talk.services.partition_counts["count-checked"] = 8
    talk.services.confirmed_at["count-checked"] = talk.now
    talk.report(m.TopicNews())

    # Then it enters, and so do the requests after it
    assert talk.next(m.ReadClient).on
    assert talk.next(m.ToUpstream).chunks[-1] == heartbeat
    assert talk.barrier().in_flight == 1


def test_unanswered_metadata_query_gives_a_retriable_error() -> None:
    talk = Barriers().stale().appends(saying(8), timeout_ms=3000)
    talk.next(m.TopicStale)
    talk.tick(0.9)
    assert talk.next(m.TopicStale) == m.TopicStale("count-checked"), "the one before may have been on its way already"
    talk.silent()
    talk.tick(0.2)
    assert talk.refusals() == ["count_unknown"]
    assert talk.reported()[("count-checked", 2)][0] == NOT_LEADER
    talk.silent()


@pytest.mark.parametrize("exists", [True, False])
def test_unknown_topic_is_looked_up_before_the_answer(exists: bool) -> None:
    talk = Barriers().stale()
    del talk.services.partition_counts["count-checked"]
    talk.appends(saying(6)).next(m.TopicStale)

    if exists:
        talk.services.partition_counts["count-checked"] = 6
    else:
        talk.services.confirmed_at["count-checked"] = talk.now
    talk.report(m.TopicNews())

    if exists:
        talk.sent_up()
    else:
        assert talk.refusals() == ["unknown_topic"]
        assert talk.reported()[("count-checked", 2)][0] == 3
        talk.silent()


def test_count_of_opened_barrier_overrides_old_metadata(talk: Barriers) -> None:
    talk.barrier().open(8)
    talk.appends(saying(8)).sent_up()


# ----------------------------------------------------------------------------------------------------- closed barrier


def closed(topic: str = "count-checked", **options: Any) -> Barriers:
    """The topic is being expanded."""
    talk = Barriers()
    talk.barrier(topic).close(talk.now, **options)
    return talk


def test_append_waiting_at_closed_barrier_uses_new_count() -> None:
    talk = closed().appends(saying(6), timeout_ms=30_000)
    talk.client(query(("count-checked", 7, saying(8)), correlation=2, timeout_ms=30_000))
    talk.next(m.ReadClient)
    talk.silent()
    assert talk.session.needs_ticks
    assert talk.barrier().empty(talk.now)

    # When it has 8 partitions
    talk.now += 2
    talk.barrier().open(8)
    talk.report(m.TopicNews())

    # Then what was placed over 6 is refused, and no request after it is read on this connection
    assert talk.refusals() == ["invalid_partition_count"]
    message = talk.reported()[("count-checked", 2)][2]
    assert message == "INVALID_PARTITION_COUNT topic=count-checked partition=2 expected=6 actual=8"
    talk.hangs_up()
    talk.silent()
    assert talk.services.waited == [2]


@pytest.mark.parametrize("name", ["count-checked", "both"])
def test_policies_are_checked_again_after_the_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic gets a limit for the age of its records while an old one waits."""
    talk = closed(name).appends(batch(b"v", timestamp_ms=1, headers=[[("fencepost-partition-count", b"6")]]), name)
    talk.waits()
    policy = replace(_POLICIES[name], policies=((RecordAge(), 1000),))
    monkeypatch.setitem(_POLICIES, name, policy)
    talk.barrier(name).open(6)
    talk.report(m.TopicNews())
    assert talk.refusals() == ["record_too_old"]
    assert talk.reported()[(name, 2)][0] == INVALID_TIMESTAMP
    assert talk.barrier(name).in_flight == 0


def test_append_waiting_too_long_gets_a_retriable_error() -> None:
    talk = closed()
    talk.client(query(("count-checked", 2, saying(6)), ("unchecked", 0, V), timeout_ms=3000))
    talk.silent()

    talk.tick(1)

    # Its other topic does not wait with it
    assert talk.refusals() == ["barrier_closed"]
    assert [topic.name for topic in talk.sent_up().topics] == ["unchecked"]
    talk.kafka(produced(("unchecked", 0, 0, 5)))
    reported = talk.reported()
    assert reported[("unchecked", 0)][:2] == (0, 5)
    assert reported[("count-checked", 2)][0] == NOT_LEADER
    assert "is being expanded" in (reported[("count-checked", 2)][2] or "")
    talk.silent()


def test_only_transactions_an_expansion_waits_for_pass() -> None:
    """Each transaction has its own epoch (transactions v2). Otherwise a producer with one transaction after the other
    would always pass, and its topics could never be expanded."""
    closed(but_for=[(77, 0)]).appends(transactional(77)).sent_up()
    closed(but_for=[(77, 0)]).appends(transactional(78)).waits()
    closed(but_for=[(77, 0)]).appends(transactional(77, epoch=1)).waits()


def test_request_enters_all_its_barriers_or_none() -> None:
    talk = closed("count-checked-2")
    talk.client(query(("count-checked", 2, saying(6)), ("count-checked-2", 2, saying(6)), ("unchecked", 0, V)))
    talk.waits()
    assert talk.barrier("count-checked").in_flight == 0, "two expansions would wait for each other"
    talk.barrier("count-checked-2").open(6)
    talk.report(m.TopicNews())
    assert talk.barrier("count-checked").in_flight == talk.barrier("count-checked-2").in_flight == 1


def test_client_lost_at_the_barrier_frees_everything() -> None:
    talk = closed()
    free_bytes = talk.services.free_bytes
    talk.appends(saying(6))
    talk.report(m.ClientLost())
    assert talk.session.finished
    assert talk.services.free_bytes == free_bytes
    talk.barrier().open(6)
    talk.report(m.TopicNews())
    assert talk.barrier().in_flight == 0


def test_append_waiting_with_expired_configs_gets_retriable_error() -> None:
    talk = closed().appends(saying(6))
    talk.services.is_fresh = False
    talk.report(m.Tick())
    assert talk.refusals() == ["not_ready"]
    assert talk.reported()[("count-checked", 2)][0] == NOT_LEADER


# ------------------------------------------------------------------------------------------------------ out again


def test_conditional_append_is_in_flight_until_sequencer_ends() -> None:
    talk = Barriers().appends(CONDITIONAL, "both")
    pending = talk.submitted()
    assert talk.barrier("both").in_flight == 1
    talk.admit(pending)
    talk.sent(pending)
    talk.sent_up()
    talk.report(m.UpstreamLost("it broke"))
    assert talk.next(Call) == call("lost", pending)
    assert talk.barrier("both").empty_at == talk.now + 30


def test_refusal_by_the_sequencer_leaves_the_barrier() -> None:
    talk = Barriers().appends(CONDITIONAL, "both")
    talk.refuse(talk.submitted())
    assert talk.barrier("both").empty(talk.now)


def test_acks_0_is_sent_as_all_and_tracked() -> None:
    talk = Barriers().appends(saying(6), acks=0)
    assert talk.sent_up().acks == -1
    assert talk.barrier().in_flight == 1
    talk.kafka(produced(("count-checked", 2, 0, 41)))
    talk.silent()
    assert talk.barrier().empty(talk.now)


# ---------------------------------------------------------------------------------------------------- hanging up


def test_earlier_requests_are_answered_before_the_refusal(talk: Barriers) -> None:
    # Given answers that are still to come
    talk.client(
        query(("unchecked", 0, saying(6)), correlation=1) + query(("count-checked", 0, saying(6)), correlation=2)
    )
    talk.upstream()

    # When a stale count follows them, and another request follows that
    talk.client(
        query(("count-checked", 2, saying(3)), correlation=3) + query(("count-checked", 2, saying(6)), correlation=4)
    )
    talk.client(request(HEARTBEAT, 4, 5))

    # Then no request after it is sent; the answers come in their order, and only then the end
    assert talk.refusals() == ["invalid_partition_count"]
    talk.next(m.ReadClient)
    talk.silent()
    reply = produced(("unchecked", 0, 0, 7), correlation=1)
    talk.kafka(reply)
    assert talk.answer() == reply
    talk.silent()
    talk.kafka(produced(("count-checked", 0, 0, 7), correlation=2))
    first, second = frames(talk.answer())
    assert read(first) == {("count-checked", 0): (0, 7, None)}
    assert read(second)[("count-checked", 2)][0] == INVALID_PARTITIONS
    talk.hangs_up()
    talk.silent()


def test_silent_broker_does_not_delay_the_close_indefinitely(talk: Barriers) -> None:
    talk.client(query(("unchecked", 0, saying(6)), correlation=1))
    talk.upstream()
    talk.appends(saying(3), correlation=2).refusals()
    talk.next(m.ReadClient)
    assert talk.session.needs_ticks

    talk.tick(29.8)
    talk.silent()
    talk.tick(0.2)

    assert talk.next(m.CloseClient).hang_up


def test_actual_count_is_shown_only_to_authorized_writers() -> None:
    talk = Barriers(may_write=False).appends(saying(3))
    talk.refusals()
    talk.next(m.ReadClient)
    probe = talk.sent_up()
    assert [(t.name, p.partition, bytes(p.records or b"")) for t in probe.topics for p in t.partitions] == [
        ("count-checked", 2, b"")
    ]
    talk.kafka(produced(("count-checked", 2, NOT_AUTHORIZED, -1)))
    assert talk.reported() == {("count-checked", 2): (NOT_AUTHORIZED, -1, None)}


# ---------------------------------------------------------------------------------------------- no way past the barrier


@pytest.mark.parametrize("version", [3, 7, 8, 9, 12])
@pytest.mark.parametrize("topic", ["count-checked", "ordered", "both"])
def test_fast_path_does_not_skip_the_count_check(
    topic: str, version: int, monkeypatch: pytest.MonkeyPatch, talk: Barriers
) -> None:
    # Given a connection that has streamed to the topic before it was counted
    monkeypatch.setitem(_POLICIES, topic, None)  # type: ignore[arg-type]
    first, second = (query((topic, 0, saying(3)), correlation=n, version=version) for n in (1, 2))
    talk.client(first)
    talk.kafka(produced((topic, 0, 0, 1), correlation=1, version=version))
    talk.commands.clear()
    assert talk.session.fast_path.take_up(memoryview(second), talk.now)[0] == len(second)
    talk.kafka(produced((topic, 0, 0, 2), correlation=2, version=version))
    talk.commands.clear()

    # When it becomes one
    monkeypatch.undo()
    talk.barrier(topic).close(talk.now)
    third, fourth = (query((topic, 0, saying(3)), correlation=n, version=version) for n in (3, 4))

    # Then neither its bytes at once nor in pieces go up
    assert talk.session.fast_path.take_up(memoryview(third), talk.now)[0] == 0
    talk.client(third[:20])
    talk.client(third[20:])
    assert not [command for command in talk.commands if isinstance(command, m.ToUpstream)]
    assert talk.session.at_barrier
    assert talk.session.fast_path.take_up(memoryview(fourth), talk.now)[0] == 0


# ---------------------------------------------------------------------------------------------------- in the dispatcher


class InDispatcher(ServicesStandIn):
    """The barriers are the dispatcher's. It has one connection, whose client may write everything."""

    def __init__(self) -> None:
        super().__init__(policies=_POLICIES)
        self.dispatcher = Dispatcher(self, Unchanged(), g.SequencerLimits(), HeaderNames())  # type: ignore[arg-type]
        self.sequencers = self.dispatcher
        self.session = self.dispatcher.open(1, "proxy.local", 0.0)
        self.session._core.proofs.may_write = dict.fromkeys(_POLICIES, float("inf"))

    def barrier(self, topic: str) -> AppendBarrier:
        return self.dispatcher.barrier(topic)

    def client(self, data: bytes, now: float = 100.0) -> list[Any]:
        return self.dispatcher.session_event(1, m.ClientBytes(memoryview(data)), now)

    def append(
        self, topic: str = "unchecked", records: memoryview = V, now: float = 100.0, **options: Any
    ) -> list[Any]:
        return self.client(query((topic, 0, records), **options), now)

    def kafka_appended(self, now: float = 100.0, correlation: int = 1) -> None:
        answer = produced(("unchecked", 0, 0, 1), correlation=correlation)
        self.dispatcher.session_event(1, m.UpstreamBytes(memoryview(answer)), now)

    def breaks(self, now: float) -> list[Any]:
        return self.dispatcher.session_event(1, m.UpstreamLost("it broke"), now)


def _sent(actions: list[Any]) -> int:
    return sum(isinstance(each, ForConnection) and isinstance(each.command, m.ToUpstream) for each in actions)


def test_waiting_appends_continue_when_the_barrier_opens(process: InDispatcher) -> None:
    dispatcher = process.dispatcher
    dispatcher.close_barrier("count-checked", 100.0)
    assert _sent(process.append("count-checked", saying(6), timeout_ms=30_000)) == 0
    assert dispatcher.needs_ticks
    assert _sent(dispatcher.open_barrier("count-checked", 6, 101.0)) == 1
    assert dispatcher.barrier("count-checked").in_flight == 1
    assert process.waited == [1.0]


def test_waiting_transaction_continues_once_it_is_excepted(process: InDispatcher) -> None:
    dispatcher = process.dispatcher
    dispatcher.close_barrier("count-checked", 100.0)
    process.append("count-checked", transactional(77), timeout_ms=30_000)
    assert _sent(dispatcher.close_barrier("count-checked", 101.0, but_for=[(78, 0)])) == 0
    assert _sent(dispatcher.close_barrier("count-checked", 102.0, but_for=[(77, 0)])) == 1


def test_unknown_topic_names_use_bounded_memory() -> None:
    dispatcher = InDispatcher().dispatcher
    dispatcher.close_barrier("expanding", 100.0)
    assert dispatcher.barrier("busy").enter("an append", 100.0)
    for number in range(25_000):
        dispatcher.barrier(f"count-checked-{number}")
    assert len(dispatcher.barriers) <= 10_000
    assert dispatcher.barrier("expanding").closed
    assert dispatcher.barrier("busy").in_flight == 1


def test_process_is_quiet_only_without_appends_in_flight(process: InDispatcher) -> None:
    assert process.dispatcher.quiet

    # Streamed, and not answered yet
    process.append()
    assert not process.dispatcher.quiet
    process.kafka_appended()
    assert process.dispatcher.quiet

    # Half sent
    frame = query(("unchecked", 0, batch(bytes(100))), correlation=2, acks=0)
    process.client(frame[:-5])
    assert not process.dispatcher.quiet
    process.client(frame[-5:])
    assert process.dispatcher.quiet

    # At a partition sequencer
    process.append("checked", correlation=3)
    assert not process.dispatcher.quiet


def test_unanswered_appends_are_recorded() -> None:
    talk = Barriers().appends(V, "unchecked", acks=0)
    assert talk.services.unanswered_at == [100.0]
    talk.appends(V, "unchecked").report(m.UpstreamLost("it broke"))
    assert talk.services.unanswered_at == [100.0, 100.0]


APPENDED = PartitionResult(2, 0, 41)


def test_late_answer_after_lost_outcome_stays_in_doubt() -> None:
    talk = Barriers().appends(CONDITIONAL, "both")
    pending = talk.submitted()
    talk.admit(pending)
    talk.commands.clear()

    # Given a sequencer that answers it after the leader was silent for too long
    talk.tick(2.8)
    talk.complete(pending, APPENDED)
    assert talk.barrier("both").in_flight == 1, "Kafka still has the request"

    # When Kafka answers after all
    talk.kafka(produced(("both", 2, 0, 41), version=9))

    # Then what the sequencer resent meanwhile may still be queued
    assert talk.barrier("both").in_flight == 0
    assert talk.barrier("both").empty_at == talk.now + 30


def test_repeated_resends_keep_the_barrier_until_queued_end(process: InDispatcher) -> None:
    """A connection breaks during an append. The sequencer resends it until it gives up, each time without an answer.
    The barrier is empty only when the last resend, not the first, can no longer be appended."""
    dispatcher = process.dispatcher
    own = batch(b"v", producer=(77, 0, 0), headers=[[("fencepost-partition-count", b"6")]])
    process.append("both", own, timeout_ms=30_000)
    dispatcher.close_barrier("both", 100.0)
    actions, now, sent_at = process.breaks(101.0), 101.0, []
    assert dispatcher.barrier("both").empty(200.0)
    assert not dispatcher.barrier_empty("both", 200.0), "the sequencer has no time limit while it waits for Kafka"
    sequencer = next(iter(dispatcher.sequencers.values()))
    while not sequencer.idle:
        resends = [
            each.effect for each in actions if isinstance(each, ForControl) and isinstance(each.effect, g.Resend)
        ]
        sent_at += [now] * len(resends)
        now += 5.0
        assert not dispatcher.barrier_empty("both", now)
        actions = []
        for resend in resends:
            actions += dispatcher.sequencer_event(sequencer.partition, g.Resent(resend.pending, None), now)
        now += 1.0
        actions += dispatcher.tick(now)

    assert sent_at[0] == 101.0
    assert 10.0 < sent_at[-1] - sent_at[0] <= g.SequencerLimits().resolve_seconds
    assert not dispatcher.barrier_empty("both", sent_at[0] + 30)  # the queued time of ServicesStandIn
    assert not dispatcher.barrier_empty("both", sent_at[-1] + 29.9)
    assert dispatcher.barrier_empty("both", sent_at[-1] + 30)


# ------------------------------------------------------------------- what passed before there was a barrier


@pytest.mark.parametrize("acks", [1, 0])
def test_streamed_request_keeps_newly_checked_topics_barrier_occupied(acks: int, process: InDispatcher) -> None:
    dispatcher, session = process.dispatcher, process.session
    dispatcher.barrier("count-checked")
    frame = query(("unchecked", 0, batch(bytes(100))), acks=acks)
    process.client(frame[:-5])

    dispatcher.past_barriers.remember("count-checked", 101.0)  # the frame may be for this topic

    assert not dispatcher.barrier_empty("count-checked", 1000.0)
    assert dispatcher.past_barriers.streamed_by(session, 1000.0) == "count-checked"
    assert dispatcher.past_barriers.streamed_by(session, 100.9) is None  # not for long enough yet
    process.client(frame[-5:], 1001.0)
    assert dispatcher.past_barriers.streamed_by(session, 1000.0) is None
    assert not dispatcher.barrier_empty("count-checked", 1002.0)
    if acks:  # Kafka's answer ends it
        process.kafka_appended(1003.0)
        assert dispatcher.barrier_empty("count-checked", 1003.0)
    else:  # no answer will come
        assert not dispatcher.barrier_empty("count-checked", 1031.9)
        assert dispatcher.barrier_empty("count-checked", 1032.0)


def test_later_requests_on_connection_occupy_no_barrier(process: InDispatcher) -> None:
    """A producer that never pauses, to other topics."""
    process.append(correlation=1)
    process.dispatcher.past_barriers.remember("count-checked", 100.5)
    for number in range(2, 5):
        assert process.dispatcher.barrier_empty("count-checked", 101.0) is (number > 2)
        process.append(now=101.0, correlation=number)
        process.kafka_appended(101.0, correlation=number - 1)
        assert not process.dispatcher.quiet


def test_tracked_appends_are_forgotten_once_answered(process: InDispatcher) -> None:
    """Hundreds of topics get partition-count checks on a busy process, but none of them is expanded."""
    dispatcher = process.dispatcher
    process.append()
    for number in range(100):
        dispatcher.past_barriers.remember(f"count-checked-{number}", 100.0)
    assert dispatcher.past_barriers.find(101.0)

    process.kafka_appended(101.0)
    assert not dispatcher.past_barriers.find(102.0)
    assert not dispatcher.past_barriers


@pytest.mark.parametrize("lost", [m.ClientLost(), m.UpstreamLost("it broke")], ids=["client", "broker"])
def test_lost_connection_leaves_the_barrier_in_doubt(lost: m.Event, process: InDispatcher) -> None:
    dispatcher = process.dispatcher
    process.append()
    dispatcher.past_barriers.remember("count-checked", 100.5)

    dispatcher.session_event(1, lost, 110.0)
    dispatcher.session_event(1, m.ClientLost(), 110.0)

    assert 1 not in dispatcher.sessions
    assert process.unanswered_at == [110.0]
    assert not dispatcher.barrier_empty("count-checked", 139.9)
    assert dispatcher.barrier_empty("count-checked", 140.0)


def test_append_waiting_at_sequencer_occupies_new_barrier(talk: Barriers) -> None:
    dispatcher = Dispatcher(talk.services, Unchanged(), g.SequencerLimits(), HeaderNames())  # type: ignore[arg-type]
    dispatcher.sessions[1] = talk.session
    pending = talk.appends(V, "checked").submitted()
    dispatcher.past_barriers.remember("count-checked", talk.now)
    assert not dispatcher.barrier_empty("count-checked", 1000.0)

    talk.admit(pending)
    assert not dispatcher.barrier_empty("count-checked", 1000.0)
    talk.commands.clear()
    # Its sequencer found out without an answer.
    talk.complete(pending, APPENDED)
    assert not dispatcher.barrier_empty("count-checked", 1000.0), "Kafka still has the request"
    talk.kafka(produced(("checked", 2, 0, 41), version=9))

    assert dispatcher.barrier_empty("count-checked", 1000.0)
