"""Levels of idempotence: what a topic or a request demands, which batches lose their producer id, and their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kafka.protocol.producer import ProduceResponse

from fencepost_policies.append import INVALID_TIMESTAMP, Append, Check
from fencepost_policies.idempotence_level import MADE_UP_IDS_FROM, Level, check_level
from fencepost_policies.record_age import RecordAge
from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.session.control.rewriters import RequestRewriters
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.topics.idempotence import IdempotenceMemory, make_up_producer_id
from fencepost_proxy.topics.planning import Known
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import INIT_PRODUCER_ID, LIST_OFFSETS
from fencepost_proxy.wire.batch import parse_batch_header, verify_crc
from fencepost_proxy.wire.control import (
    decode_request,
    decode_response,
    encode_request_frame,
    encode_response_frame,
    parse_request_header,
    parse_response_header,
)
from fencepost_proxy.wire.primitives import join_tags
from fencepost_proxy.wire.produce import (
    TO_BE_READ,
    PartitionResult,
    ProduceRequest,
    parse_produce_request,
    peek_produce,
)
from fencepost_proxy.wire.schema import Message
from tests.support.batches import batch, expecting
from tests.unit.test_session import PolicyTalk, frames, produced, query, read

TIMED_OUT, NOT_LEADER, NOT_AUTHORIZED, NOT_PERMITTED, OLD_FORMAT, POLICY_VIOLATION = 7, 6, 29, 31, 43, 44
OUT_OF_ORDER, UNKNOWN_PRODUCER_ID, INVALID_RECORD = 45, 59, 87
_POLICIES = {
    "safe": TopicPolicy(idempotence=Level.SAFE),
    "safe-and-recent": TopicPolicy(idempotence=Level.SAFE, policies=((RecordAge(), 1000),)),
    "required": TopicPolicy(idempotence=Level.REQUIRED),
    "count-checked": TopicPolicy(count_check=Check.ON),
    "count-checked-safe": TopicPolicy(count_check=Check.ON, idempotence=Level.SAFE),
    "checked": TopicPolicy(Check.ON),
    "checked-safe": TopicPolicy(Check.ON, idempotence=Level.SAFE),
    "checked-required": TopicPolicy(Check.ON, idempotence=Level.REQUIRED),
}
MADE_UP = MADE_UP_IDS_FROM + 5


class Levels(PolicyTalk):
    policies = _POLICIES

    def produces(self, *records: tuple[str, int, Any], **options: Any) -> None:
        self.client(query(*records, **options))

    def forwards(self, *records: tuple[str, int, Any], **options: Any) -> ProduceRequest:
        """The client's request goes to Kafka."""
        self.produces(*records, **options)
        return self.up()

    def ups(self) -> Iterator[ProduceRequest]:
        """The requests of one write to Kafka."""
        data = memoryview(self.upstream())
        while data:
            end = 4 + int.from_bytes(data[:4], "big")
            yield parse_produce_request(data[4:end])
            data = data[end:]

    def up(self) -> ProduceRequest:
        (one,) = self.ups()
        return one

    def downgraded(self, topic: str, why: str = "message_format") -> None:
        assert self.next(m.Downgraded) == m.Downgraded(topic, why, 1)


def idempotent(value: bytes = b"v", sequence: int = 0, producer_id: int = 9, **more: Any) -> memoryview:
    return batch(value, producer=(producer_id, 0, sequence), **more)


def producer(request: ProduceRequest, topic: int = 0) -> tuple[int, int, int]:
    (data,) = request.topics[topic].partitions
    assert data.records is not None
    assert verify_crc(data.records)
    header = parse_batch_header(data.records)
    return header.producer_id, header.producer_epoch, header.base_sequence


NO_PRODUCER = (-1, -1, -1)


@pytest.fixture
def talk() -> Levels:
    return Levels()


# --------------------------------------------------------------------------------------------------------- answers


def test_idempotent_and_transactional_batches_pass(talk: Levels) -> None:
    for correlation, records in enumerate([idempotent(), idempotent(sequence=1, transactional=True)]):
        assert producer(talk.forwards(("required", 0, records), correlation=correlation))[0] == 9
        talk.says(("required", 0, 0, correlation), correlation=correlation)
        assert talk.reported() == {("required", 0): (0, correlation, None)}


def test_malformed_records_are_refused(talk: Levels) -> None:
    two = bytes(idempotent()) + bytes(batch(b"v"))
    talk.produces(("required", 0, two))
    talk.fails(INVALID_RECORD, ("required", 0))


def test_topic_checks_are_hidden_from_unauthorized_clients() -> None:
    talk = Levels(may_write=False)
    for correlation in (1, 2):  # a second request gets the same answer
        talk.produces(("required", 0, batch(b"v")), correlation=correlation)
        talk.metric()
        assert talk.up().topics[0].partitions[0].records == b""
        talk.silent()
        talk.says(("required", 0, NOT_AUTHORIZED, -1), correlation=correlation)
        assert talk.reported() == {("required", 0): (NOT_AUTHORIZED, -1, None)}


# --------------------------------------------------------------------------------------------------- levels of requests


@pytest.mark.parametrize("level", [b"\0", b"\1", b"\2"])
def test_level_field_is_removed_and_others_are_forwarded(level: bytes, talk: Levels) -> None:
    talk.produces(("unchecked", 0, idempotent()), level=level)
    request = talk.up()
    assert request.header_tags == join_tags([(7, b"theirs"), (300, b"later")])
    assert producer(request)[0] == 9


def test_level_is_readable_before_the_request_completes() -> None:
    with_level = query(("unchecked", 0, idempotent()), level=b"\1")
    without = query(("unchecked", 0, idempotent()))
    for frame, count in ((with_level, TO_BE_READ), (without, 1)):
        peek = peek_produce(memoryview(frame)[4:80], len(frame) - 4)
        assert peek is not None
        assert peek.topic_count == count


def test_level_field_affects_only_its_own_request(talk: Levels) -> None:
    """The field is in what a request begins with: the next one without is not taken for one with it, nor the other
    way round."""
    for correlation, level in enumerate([None, b"\2", None, b"\2"]):
        frame = query(("unchecked", 0, batch(b"v")), level=level, correlation=correlation)
        count, out = talk.session.fast_path.take_up(memoryview(frame), talk.now)
        assert (count > 0) == (correlation == 2)
        if count:
            assert b"".join(out) == frame
            continue
        talk.client(frame)
        if level is None:
            assert talk.upstream() == frame
            talk.says(("unchecked", 0, 0, 1), correlation=correlation)
            talk.answer()
        else:
            talk.commands.clear()
        if correlation == 1:
            talk.session._core.proofs.may_write["unchecked"] = float("inf")


# --------------------------------------------------------------------------------------------------- sent without an id


def test_later_batches_omit_the_id_until_expiry(talk: Levels) -> None:
    talk.services.idempotence.refused("safe", talk.now)
    talk.produces(("safe", 1, idempotent(sequence=1)), correlation=1)
    talk.downgraded("safe")
    assert producer(talk.up()) == NO_PRODUCER
    talk.says(("safe", 1, 0, 1), correlation=1)
    talk.answer()
    talk.now += 301
    assert producer(talk.forwards(("safe", 1, idempotent(sequence=2)), correlation=2))[0] == 9
    talk.silent()


def test_refused_batch_waits_for_nothing_and_is_not_sent(talk: Levels) -> None:
    """Its record is too old, an earlier batch is not answered, and Kafka would not accept its producer id."""
    talk.forwards(("safe-and-recent", 0, idempotent(timestamp_ms=100_000)), correlation=1)
    talk.services.idempotence.refused("safe-and-recent", talk.now)
    talk.produces(("safe-and-recent", 0, idempotent(sequence=1, timestamp_ms=1)), correlation=2)
    assert talk.next(m.Count).label == "record_too_old"
    talk.silent()
    talk.says(("safe-and-recent", 0, 0, 1), correlation=1)
    assert [read(each)["safe-and-recent", 0][0] for each in frames(talk.answer())] == [0, INVALID_TIMESTAMP]


@pytest.mark.parametrize(
    ("code", "transactional"),
    [
        *((code, False) for code in (TIMED_OUT, NOT_LEADER, OUT_OF_ORDER, POLICY_VIOLATION, INVALID_RECORD)),
        (OLD_FORMAT, True),  # a transaction is never sent without its producer
    ],
)
def test_other_errors_do_not_cause_a_resend(code: int, transactional: bool, talk: Levels) -> None:
    talk.forwards(("safe", 0, idempotent(transactional=transactional)))
    talk.says(("safe", 0, code, -1))
    talk.commands = [each for each in talk.commands if not isinstance(each, m.TopicStale)]
    assert talk.reported()["safe", 0][0] == code
    talk.silent()


def test_damaged_batch_keeps_its_wrong_crc() -> None:
    damaged = bytearray(idempotent(b"value"))
    damaged[-1] ^= 1
    talk = Levels()
    talk.services.idempotence.refused("safe", talk.now)
    talk.produces(("safe", 0, bytes(damaged)))
    (data,) = talk.up().topics[0].partitions
    assert data.records == bytes(damaged)


def test_requests_in_progress_keep_their_order(talk: Levels) -> None:
    """A and B are sent with their ids. A is refused; C comes, and would overtake B."""
    for correlation in (1, 2):
        talk.client(
            query(("safe", 0, idempotent((b"first", b"second")[correlation - 1], correlation)), correlation=correlation)
        )
        assert producer(talk.up())[0] == 9
    talk.says(("safe", 0, OLD_FORMAT, -1), correlation=1)
    talk.downgraded("safe")
    assert producer(talk.up()) == NO_PRODUCER
    talk.client(
        query(("safe", 0, idempotent(b"last", 3)), correlation=3) + query(("unchecked", 0, batch(b"v")), correlation=4)
    )
    assert talk.next(m.ReadClient) == m.ReadClient(False)
    talk.silent()
    assert talk.session.needs_ticks

    talk.says(("safe", 0, OLD_FORMAT, -1), correlation=2)
    sent = b"".join(b"".join(each.chunks) for each in talk.commands if isinstance(each, m.ToUpstream))
    assert sent.index(b"second") < sent.index(b"last")
    talk.commands.clear()
    # And the answers keep the order of the requests.
    for correlation, base in ((1, 0), (2, 1), (3, 2)):
        talk.says(("safe", 0, 0, base), correlation=correlation)
    answers = b"".join(b"".join(each.chunks) for each in talk.commands if isinstance(each, m.ToClient))
    lengths = len(answers) // 3
    reported = [read(answers[at : at + lengths])["safe", 0][:2] for at in range(0, len(answers), lengths)]
    assert reported == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("in_socket", [False, True])
def test_append_waiting_on_silent_broker_gets_retriable_error(in_socket: bool, talk: Levels) -> None:
    """So does the next batch if it is in the socket when the first is answered."""
    talk.forwards(("safe", 0, idempotent()), correlation=1)
    talk.services.idempotence.refused("safe", talk.now)
    talk.produces(("safe", 0, idempotent(sequence=1)), correlation=2)
    talk.silent()
    talk.tick(1.1)  # a third of the request's timeout
    talk.metric()
    talk.silent()
    if in_socket:
        talk.produces(("safe", 0, idempotent(sequence=2)), correlation=3)
        talk.metric()
    talk.says(("safe", 0, 0, 0), correlation=1)
    codes = [read(each)["safe", 0][0] for each in frames(talk.answer())]
    assert codes == [0, NOT_LEADER, NOT_LEADER][: 2 + in_socket]
    assert in_socket or not talk.session._core.pipelines.failed  # all that was sent before is read


@pytest.mark.parametrize("producer_id", [9, MADE_UP], ids=["its own id", "an id made up here"])
def test_batch_after_unknown_configs_refusal_is_also_refused(
    producer_id: int,
    talk: Levels,
) -> None:
    """A is refused because the configs are too old. B is sent after A and read when they are fresh. B is refused, too:
    without producer ids, Kafka would append it before the retry of A."""
    talk.services.idempotence.refused("safe", talk.now)
    first, second = (
        query(("safe", 0, idempotent(sequence=n, producer_id=producer_id)), correlation=n + 1) for n in range(2)
    )
    talk.services.is_fresh, talk.services.unread = False, len(second)
    talk.client(first)
    talk.fails(NOT_LEADER, ("safe", 0))

    talk.services.is_fresh, talk.services.unread = True, 0
    talk.client(second)
    talk.metric()
    code, _, message = talk.reported()["safe", 0]
    assert (code, (message or "").split()[0]) == (NOT_LEADER, "PREDECESSOR_FAILED")

    # What is sent knowing it goes its way.
    for frame in (first, second):
        talk.client(frame)
        talk.downgraded("safe", "message_format" if producer_id == 9 else "not_permitted")
        assert producer(talk.up()) == NO_PRODUCER
    assert not talk.session._core.pipelines.failed


def test_another_partition_need_not_wait(talk: Levels) -> None:
    talk.forwards(("safe", 0, idempotent()), correlation=1)
    talk.services.idempotence.refused("safe", talk.now)
    talk.produces(("safe", 1, idempotent()), correlation=2)
    talk.downgraded("safe")
    assert producer(talk.up()) == NO_PRODUCER


def test_resend_waits_for_a_streamed_frames_end(talk: Levels) -> None:
    talk.forwards(("safe", 0, idempotent()), correlation=1)
    streamed = query(("unchecked", 0, batch(b"v" * 500)), correlation=2)
    talk.client(streamed[:200])
    assert talk.upstream() == streamed[:200]
    talk.says(("safe", 0, OLD_FORMAT, -1), correlation=1)
    talk.downgraded("safe")
    talk.silent()
    talk.client(streamed[200:])
    rest = talk.upstream()
    assert rest.startswith(streamed[200:])
    assert producer(parse_produce_request(memoryview(rest[len(streamed) - 200 :])[4:])) == NO_PRODUCER


def test_batch_reported_unknown_is_not_resent(talk: Levels) -> None:
    """Its client may have done so itself."""
    talk.forwards(("safe", 0, idempotent()))
    talk.tick(3)
    talk.fails(TIMED_OUT, ("safe", 0))
    talk.says(("safe", 0, OLD_FORMAT, -1))
    talk.silent()


def test_only_safe_topics_partitions_are_resent(talk: Levels) -> None:
    talk.produces(("safe", 0, idempotent()), ("required", 0, idempotent()), ("unchecked", 0, batch(b"v")))
    assert len(talk.up().topics) == 3
    talk.says(("safe", 0, OLD_FORMAT, -1), ("required", 0, OLD_FORMAT, -1), ("unchecked", 0, 0, 4))
    talk.downgraded("safe")
    again = talk.up()
    assert [topic.name for topic in again.topics] == ["safe"]
    talk.says(("safe", 0, 0, 8))
    reported = talk.reported()
    assert {key: each[:2] for key, each in reported.items()} == {
        ("safe", 0): (0, 8),
        ("required", 0): (OLD_FORMAT, -1),
        ("unchecked", 0): (0, 4),
    }


def test_barrier_is_left_after_the_resend_is_answered(talk: Levels) -> None:
    talk.forwards(("count-checked-safe", 0, idempotent()))
    barrier = talk.services.barrier("count-checked-safe")
    talk.says(("count-checked-safe", 0, OLD_FORMAT, -1))
    talk.downgraded("count-checked-safe")
    talk.upstream()
    assert not barrier.empty(talk.now)
    talk.says(("count-checked-safe", 0, 0, 2))
    assert talk.reported()["count-checked-safe", 0][0] == 0
    assert barrier.empty(talk.now)


def test_acks_0_is_sent_again_too(talk: Levels) -> None:
    talk.forwards(("safe", 0, idempotent()), acks=0)
    talk.says(("safe", 0, OLD_FORMAT, -1))
    talk.downgraded("safe")
    again = talk.up()
    assert (producer(again), again.acks) == (NO_PRODUCER, -1)
    talk.says(("safe", 0, 0, 2))
    talk.silent()
    assert talk.session.drained


@pytest.mark.parametrize("lost", [m.ClientLost(), m.UpstreamLost("it broke")])
def test_connection_loss_before_resend_frees_all_memory(lost: m.Event, talk: Levels) -> None:
    talk.forwards(("safe", 0, idempotent()))
    if isinstance(lost, m.ClientLost):
        talk.report(lost)
        talk.says(("safe", 0, OLD_FORMAT, -1))
        assert isinstance(talk.commands.pop(), m.CloseUpstream)
    else:
        talk.says(("safe", 0, OLD_FORMAT, -1))
        talk.commands.clear()
        talk.report(lost)
        talk.next(m.CloseClient)
    assert talk.services.free_bytes == 1 << 20
    talk.silent()


# ------------------------------------------------------------------------------------------------ ids of our own making


def test_made_up_ids_are_unique_and_not_kafkas() -> None:
    ids = {make_up_producer_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(MADE_UP_IDS_FROM <= each < 1 << 63 for each in ids)
    assert check_level(Append("t", 3, 1, None, producer_id=MADE_UP_IDS_FROM - 1), Level.OFF) is None


def test_made_up_id_is_removed(talk: Levels) -> None:
    talk.produces(("count-checked-safe", 0, idempotent(producer_id=MADE_UP)))
    talk.downgraded("count-checked-safe", "not_permitted")
    assert producer(talk.up()) == NO_PRODUCER
    # Nor does a sequencer ever get it.
    talk = Levels()
    talk.produces(("checked-safe", 0, expecting(4, b"v", producer=(MADE_UP, 0, 0))))
    talk.downgraded("checked-safe", "not_permitted")
    pending = talk.submitted()
    assert (pending.append.producer_id, pending.append.expected_base_offset) == (-1, 4)


_KNOWN = Known(StateView("cluster"), lambda topic: {}, lambda topic: None, "__state")


def init_producer_id(
    code: int, *, safe: bool = True, transactional_id: str | None = None, version: int = 4
) -> tuple[int, int, int]:
    """The client's answer when Kafka's is `code`: code, id, epoch."""
    rewriters = RequestRewriters(
        AddressBook(1),
        lambda: _KNOWN,
        frozenset[int],
        lambda nodes: None,
        some_are_safe=lambda: safe,
        make_up_producer_id=lambda: MADE_UP,
    )
    talk = Levels(rewriters=rewriters)
    queried = Message(transactional_id=transactional_id, transaction_timeout_ms=1000, producer_id=-1, producer_epoch=-1)
    frame = encode_request_frame(INIT_PRODUCER_ID, version, 1, "app", queried)
    talk.client(frame)
    assert talk.upstream() == frame
    reported = Message(throttle_time_ms=0, error_code=code, producer_id=40 if not code else -1, producer_epoch=0)
    talk.kafka(encode_response_frame(INIT_PRODUCER_ID, version, 1, reported))
    answer = memoryview(talk.answer())[4:]
    body = parse_response_header(answer, INIT_PRODUCER_ID, version).body_offset
    found = decode_response(INIT_PRODUCER_ID, version, answer[body:])
    return found.error_code, found.producer_id, found.producer_epoch


@pytest.mark.parametrize("version", [0, 2, 4, 5])
def test_safe_topic_gives_unauthorized_producers_an_id(version: int) -> None:
    assert init_producer_id(NOT_PERMITTED, version=version) == (0, MADE_UP, 0)
    assert init_producer_id(0, version=version) == (0, 40, 0)
    assert init_producer_id(NOT_PERMITTED, version=version, safe=False)[0] == NOT_PERMITTED


def test_transactional_ids_and_other_errors_are_relayed() -> None:
    assert init_producer_id(NOT_PERMITTED, transactional_id="t")[0] == NOT_PERMITTED
    assert init_producer_id(15)[0] == 15


# ------------------------------------------------------------------------------------------- 45 only where data is lost


def answered(talk: Levels, code: int, base: int, *, correlation: int, topic: str = "required", start: int) -> int:
    """One append of the same producer and Kafka's answer; returns the code that the client gets."""
    talk.forwards((topic, 0, idempotent(sequence=correlation)), correlation=correlation)
    talk.kafka(_with_start(produced((topic, 0, code, base), correlation=correlation), start))
    return talk.reported()[topic, 0][0]


def _with_start(answer: bytes, start: int) -> bytes:
    message = ProduceResponse.decode(answer, version=9, header=True, framed=True)
    message.responses[0].partition_responses[0].log_start_offset = start
    return bytes(message.encode(header=True, framed=True))


@pytest.mark.parametrize(
    ("topic", "start", "code"),
    [
        *((topic, 11, UNKNOWN_PRODUCER_ID) for topic in ("required", "safe", "count-checked")),
        ("required", 0, OUT_OF_ORDER),  # records remain
        ("required", 10, OUT_OF_ORDER),
    ],
)
def test_producer_with_all_records_deleted_may_continue(topic: str, start: int, code: int, talk: Levels) -> None:
    assert answered(talk, 0, 10, correlation=1, topic=topic, start=0) == 0
    assert answered(talk, OUT_OF_ORDER, -1, correlation=2, topic=topic, start=start) == code


def test_unknown_producer_id_is_reported_once_per_batch(talk: Levels) -> None:
    """kafka-python 3 sends the same batch again, at once and without end. Others start again with a new epoch."""
    assert answered(talk, 0, 10, correlation=1, start=0) == 0
    for reported in (UNKNOWN_PRODUCER_ID, OUT_OF_ORDER, OUT_OF_ORDER):
        assert answered(talk, OUT_OF_ORDER, -1, correlation=2, start=11) == reported
    assert answered(talk, OUT_OF_ORDER, -1, correlation=3, start=11) == UNKNOWN_PRODUCER_ID


def test_last_known_log_start_replaces_a_missing_one(talk: Levels) -> None:
    assert answered(talk, 0, 10, correlation=1, start=0) == 0
    talk.services.idempotence.record_log_start(TopicPartition("required", 0), 20, talk.now)
    assert answered(talk, OUT_OF_ORDER, -1, correlation=2, start=-1) == UNKNOWN_PRODUCER_ID


def test_unknown_producers_error_is_relayed() -> None:
    assert answered(Levels(), OUT_OF_ORDER, -1, correlation=1, start=11) == OUT_OF_ORDER


def test_log_start_in_any_result_is_remembered(talk: Levels) -> None:
    talk.produces(("checked", 0, batch(b"v")))
    pending = talk.submitted()
    talk.complete(pending, PartitionResult(0, 44, 57, log_start_offset=3, error_message="OFFSET_MISMATCH"))
    assert talk.services.idempotence.log_start(pending.partition) == 3


def test_idempotence_memory_is_bounded_and_cleared_per_topic() -> None:
    memory = IdempotenceMemory(2)
    at = [TopicPartition("t", index) for index in range(3)]
    for partition in at:
        memory.acknowledged(partition, 1, 5)
        memory.record_log_start(partition, 3, 10.0)
    assert [memory.is_dead(partition, 1, 6) for partition in at] == [False, True, True]
    assert [memory.log_start(partition) for partition in at] == [-1, 3, 3]
    assert [memory.recent_log_start(at[2], now) for now in (14.9, 15.0)] == [3, -1]
    memory.refused("t", 0.0)
    assert memory.drops_id("t", 299.0)
    memory.forget_topic("t")
    assert [memory.log_start(partition) for partition in at] == [-1, -1, -1]
    assert not memory.drops_id("t", 0.0)
    assert not memory.is_dead(at[2], 1, 6)


# ------------------------------------------------------------------------------------------------- where the log starts


def starts(answer: bytes, version: int = 9) -> dict[tuple[str, int], int]:
    message = ProduceResponse.decode(answer, version=version, header=True, framed=True)
    return {
        (topic.name, each.index): each.log_start_offset
        for topic in message.responses
        for each in topic.partition_responses
    }


def queries(data: bytes) -> list[tuple[int, int]]:
    """API and correlation id of what goes to Kafka in one write."""
    found = []
    while data:
        header = parse_request_header(memoryview(data)[4:])
        found.append((header.api_key, header.correlation_id))
        data = data[4 + int.from_bytes(data[:4], "big") :]
    return found


def log_starts(topic: str, partition: int, offset: int, *, code: int = 0, correlation: int = 1) -> bytes:
    each = Message(partition_index=partition, error_code=code, timestamp=-1, offset=offset)
    reported = Message(topics=[Message(name=topic, partitions=[each])])
    return encode_response_frame(LIST_OFFSETS, 1, correlation, reported)


def forgetful(*, may_write: bool = True) -> Levels:
    talk = Levels(may_write=may_write)
    talk.services.idempotence = IdempotenceMemory()
    return talk


def refusing(*, may_write: bool = True, partition: int = 0) -> tuple[Levels, bytes]:
    """It refuses a batch without producer id; and what goes to Kafka before the answer."""
    talk = forgetful(may_write=may_write)
    talk.produces(("required", partition, batch(b"v")))
    talk.metric()
    return talk, talk.upstream()


def test_refusal_includes_log_start_queried_once() -> None:
    talk, up = refusing(partition=3)
    assert queries(up) == [(LIST_OFFSETS, 1)]
    (topic,) = decode_request(LIST_OFFSETS, 1, up[4 + parse_request_header(up[4:]).body_offset :]).topics
    assert (topic.name, [(each.partition_index, each.timestamp) for each in topic.partitions]) == (
        "required",
        [(3, -2)],
    )
    talk.kafka(log_starts("required", 3, 17))
    answer = talk.answer()
    assert starts(answer) == {("required", 3): 17}
    assert read(answer)["required", 3][0] == POLICY_VIOLATION
    talk.produces(("required", 3, batch(b"v")), correlation=2)
    talk.metric()
    assert starts(talk.answer()) == {("required", 3): 17}


@pytest.mark.parametrize(("stated", "start"), [(INVALID_RECORD, 17), (NOT_AUTHORIZED, -1)])
def test_log_start_is_queried_alongside_authorization(stated: int, start: int) -> None:
    """It is hidden from unauthorized clients."""
    talk, up = refusing(may_write=False)
    assert queries(up) == [(0, 1), (LIST_OFFSETS, 1)]
    talk.says(("required", 0, stated, -1))
    talk.silent()
    talk.kafka(log_starts("required", 0, 17))
    assert starts(talk.answer()) == {("required", 0): start}


def test_failed_log_start_query_leaves_it_unset() -> None:
    talk, _ = refusing()
    talk.kafka(log_starts("required", 0, -1, code=NOT_LEADER))
    assert starts(talk.answer()) == {("required", 0): -1}


def test_old_version_refusal_skips_the_log_start() -> None:
    talk = forgetful()
    talk.produces(("required", 0, batch(b"v")), version=4)
    talk.metric()
    assert talk.answer()


def test_silent_broker_delays_a_refusal_only_briefly() -> None:
    talk, _ = refusing()
    talk.tick(3)
    talk.fails(POLICY_VIOLATION, ("required", 0))
    talk.kafka(log_starts("required", 0, 17))
    talk.silent()
    assert talk.session.drained


def test_retriable_refusal_uses_only_known_log_start() -> None:
    talk = forgetful()
    talk.services.is_fresh = False
    talk.services.idempotence.record_log_start(TopicPartition("required", 0), 17, 0.0)
    talk.produces(("required", 0, idempotent()), ("required", 1, idempotent()))
    talk.metric()
    assert starts(talk.answer()) == {("required", 0): 17, ("required", 1): -1}


def test_interleaved_response_reaches_its_own_request() -> None:
    talk, _ = refusing()
    talk.forwards(("unchecked", 0, batch(b"v")), correlation=2)
    talk.kafka(log_starts("required", 0, 17))
    assert starts(talk.answer()) == {("required", 0): 17}
    reply = produced(("unchecked", 0, 0, 5), correlation=2)
    talk.kafka(reply)
    assert talk.answer() == reply


def test_earlier_denial_does_not_count_as_authorization() -> None:
    """The proxy requests authorization for each attempt. The second answer has no log end offset either."""
    talk = Levels(may_write=False)
    for correlation in (1, 2):
        talk.produces(("checked", 0, expecting(9, b"x")), correlation=correlation)
        talk.refuse(talk.submitted())
        talk.metric()
        assert talk.up().topics[0].partitions[0].records == b""
        talk.says(("checked", 0, NOT_AUTHORIZED, -1), correlation=correlation)
        assert talk.reported() == {("checked", 0): (NOT_AUTHORIZED, -1, None)}
