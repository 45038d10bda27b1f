"""Writers that bypass the proxy: it cannot stop them, but it detects their appends and never reports a false success.

Each test appends directly to Kafka, then checks the responses to clients of the proxy, its metrics and its log. The
expected state is the partition's log, read from Kafka directly.
"""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.kit.waiting import until
from tests.support.fixtures import proxy_fixture
from tests.support.proxy import CHECKED_WITH_LONG_LEASE, ProxyProcess
from tests.support.raw import Answer, Closed, Connection, Log, Producer, batch, final_answer
from tests.support.transactions import add_request, added, end_request

pytestmark = pytest.mark.kafka

OK, NOT_LEADER, TIMED_OUT, POLICY_VIOLATION = 0, 6, 7, 44
OUT_OF_ORDER_SEQUENCE, INVALID_PRODUCER_EPOCH = 45, 47
#: Other modules start and stop proxies of this cluster. Their left-over fences are not tested here.
CONFIG = f"{CHECKED_WITH_LONG_LEASE}\n[limits]\ntakeover_seconds = 0.5\n"
HUGE_EPOCH, LAST_EPOCH = 32_000, 32_767
SEED = 20_261

NewTopic = Callable[..., str]


#: A proxy for this module only, so that its metrics count no other test.
proxy = proxy_fixture(config=CONFIG, arguments=("--status", "127.0.0.1:0"), unexpected=("crashed", "Traceback"))


@dataclass
class Watch:
    """What the proxy counted and logged about one topic since this object was created."""

    proxy: ProxyProcess
    topic: str

    def __post_init__(self) -> None:
        self._violations = violation_count(self.proxy)
        self._read_up_to = len(self.proxy.log)

    @property
    def new_violations(self) -> int:
        return violation_count(self.proxy) - self._violations

    @property
    def errors(self) -> list[str]:
        lines = self.proxy.log[self._read_up_to :].splitlines()
        return [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE) and self.topic in line]

    def reported(self) -> list[str]:
        return [line for line in self.errors if "OFFSET_VIOLATION" in line]


def violation_count(proxy: ProxyProcess) -> int:
    return int(proxy.metrics()["fencepost_offset_violations_total"])


def assert_violation(answer: Answer, topic: str, *, expected: int, appended_at: int, producer_id: int) -> None:
    """The response states the partition, the expected offset, the actual offset and the producer of the other batch."""
    assert (answer.error_code, answer.base_offset) == (POLICY_VIOLATION, appended_at), answer
    message = answer.message or ""
    start = f"OFFSET_VIOLATION topic={topic} partition=0 expected={expected} appended_at={appended_at}"
    assert message.startswith(f"{start} producer_id={producer_id}:"), message


def shared_producer_id(log: Log, topic: str) -> int:
    """The producer id of the fences: that of the first batch appended through the proxy."""
    return log.batches(topic)[0].producer_id


# --- kinds of bypassing appends ---------------------------------------------------------------------------------------


def _unfenced(direct: Connection, topic: str, values: list[bytes]) -> int:
    """Return the producer id of the first batch, as the other functions do."""
    for value in values:
        assert direct.append(topic, batch(value)).error_code == OK
    return -1


def _idempotent(direct: Connection, topic: str, values: list[bytes]) -> int:
    producer = direct.init_producer_id()
    for sequence, value in enumerate(values):
        assert direct.append(topic, batch(value, producer=producer._replace(sequence=sequence))).error_code == OK
    return producer.id


def _in_one_batch(direct: Connection, topic: str, values: list[bytes]) -> int:
    assert direct.append(topic, batch(*values)).error_code == OK
    return -1


WRITERS = {"unfenced": _unfenced, "idempotent": _idempotent, "in one batch": _in_one_batch}


@pytest.mark.parametrize("how", WRITERS)
@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_bypassing_append_is_reported_at_next_append(  # noqa: PLR0917
    prefix: str, how: str, proxy: ProxyProcess, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    topic = new_topic(prefix, length=3)
    watch = Watch(proxy, topic)
    with log.connect(topic) as direct:
        producer_id = WRITERS[how](direct, topic, [b"around", b"around"])

    answer = client.append(topic, batch(b"mine", expected=3))

    assert_violation(answer, topic, expected=3, appended_at=5, producer_id=producer_id)
    line = until(watch.reported, "the ERROR")[0]
    for stated in ("offset=3", "appended_at=5", f"producer_id={producer_id}"):
        assert re.search(rf"\b{stated}\b", line), line
    assert watch.new_violations == 1
    # and it continues:
    refused = final_answer(client, topic, batch(b"x", expected=5))
    assert (refused.error_code, refused.base_offset) == (POLICY_VIOLATION, 6)
    assert (refused.message or "").startswith("OFFSET_MISMATCH")
    for at in (6, 7, 8):
        assert final_answer(client, topic, batch(b"next", expected=at))[:2] == (OK, at)
    assert watch.new_violations == 1
    assert log.values(topic) == [b"old"] * 3 + [b"around"] * 2 + [b"mine"] + [b"next"] * 3


@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_unexpected_log_end_is_reported_as_bypassing_append(
    prefix: str, proxy: ProxyProcess, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """No append of the proxy is needed: all its appends made three records, and the log has five.

    On a `true` topic this is no violation, since unfenced appends of other instances look the same.
    """
    topic = new_topic(prefix, length=3)
    watch = Watch(proxy, topic)
    with log.connect(topic) as direct:
        producer_id = _idempotent(direct, topic, [b"around", b"around"])

    refused = final_answer(client, topic, batch(b"x", expected=1))

    assert (refused.error_code, refused.base_offset) == (POLICY_VIOLATION, 5)
    assert (refused.message or "").startswith(f"OFFSET_MISMATCH topic={topic} partition=0 expected=1 actual=5")
    if prefix == "required":
        line = until(watch.reported, "the ERROR")[0]
        for stated in ("offset=3", "log_end=5", f"producer_id={producer_id}"):
            assert re.search(rf"\b{stated}\b", line), line
        assert watch.new_violations == 1
    assert final_answer(client, topic, batch(b"next", expected=5))[:2] == (OK, 5)
    assert log.values(topic) == [b"old"] * 3 + [b"around"] * 2 + [b"next"]


@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_an_unconditional_or_failed_append_is_never_one(
    prefix: str, proxy: ProxyProcess, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """The opposite case: an append that passes the proxy is no violation, wherever the log ends."""
    topic = new_topic(prefix, length=2)
    watch = Watch(proxy, topic)
    producer = client.init_producer_id()
    for i in range(3):
        if prefix == "checked":
            client.append(topic, batch(b"said nothing"))
            client.append(topic, batch(b"idempotent", producer=producer._replace(sequence=i)))
        end = log.end(topic)
        assert final_answer(client, topic, batch(b"x", expected=end + 5)).base_offset == end
        assert final_answer(client, topic, batch(b"x", expected=0)).base_offset == end
        assert final_answer(client, topic, batch(b"y", b"y", expected=end))[:2] == (OK, end)
    assert (watch.new_violations, watch.errors) == (0, [])


@pytest.mark.parametrize("known_by", ["fencepost-write-id", "producer and sequence"])
def test_retry_appended_elsewhere_is_not_reported_as_refused(
    known_by: str, proxy: ProxyProcess, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """The first response was lost and the batch is at 4. A success at 3 or a mismatch would both be false."""
    for _ in range(5):
        # Opened before the last acknowledgement: on a later connection the proxy would read the log before it sends.
        with Connection(proxy.bootstrap) as lost:
            lost.api_versions()
            topic = new_topic("required", length=3)
            producer = client.init_producer_id() if known_by == "producer and sequence" else None
            name = b"once" if known_by == "fencepost-write-id" else None
            mine = batch(b"mine", expected=3, producer=producer, write_id=name)
            with log.connect(topic) as direct:
                _unfenced(direct, topic, [b"around"])
            lost.send_produce({topic: {0: mine}})
            until(lambda topic=topic: log.end(topic) == 5, "the append", seconds=60)

        # Immediately, while the first attempt may still be in progress, and later.
        for again in (final_answer(client, topic, mine), final_answer(client, topic, mine)):
            assert again.error_code != OK
            assert again.message is not None
            assert "OFFSET_VIOLATION" in again.message or "POSSIBLY_YOURS" in again.message, again
        assert log.values(topic) == [b"old"] * 3 + [b"around", b"mine"]


def test_pipelined_appends_after_bypassing_writer_report_each_violation(
    client: Connection, proxy: ProxyProcess, log: Log, new_topic: NewTopic
) -> None:
    """Kafka accepts the ten fenced appends in order, each one offset after its expected offset."""
    topic = new_topic("required", length=3)
    watch = Watch(proxy, topic)
    ours = shared_producer_id(log, topic)
    with log.connect(topic) as direct:
        _unfenced(direct, topic, [b"around"])
    answers = list(client.pipeline(topic, [batch(b"c%d" % i, expected=3 + i) for i in range(10)]))

    there = {value: at for at, value in enumerate(log.values(topic))}
    for i, answer in enumerate(answers):
        value = b"c%d" % i
        assert answer.error_code == POLICY_VIOLATION, answer
        if (answer.message or "").startswith("OFFSET_VIOLATION"):
            # Each expected offset holds the previous append.
            assert_violation(
                answer, topic, expected=3 + i, appended_at=there[value], producer_id=-1 if i == 0 else ours
            )
        else:
            assert value not in there, answer
    appended_batch = sum(value[:1] == b"c" for value in there)
    until(lambda: len(watch.reported()) == appended_batch, "the ERRORs")
    assert watch.new_violations == appended_batch
    assert there[b"c0"] == 4
    end = log.end(topic)
    assert final_answer(client, topic, batch(b"next", expected=end))[:2] == (OK, end)


# --- the shared producer id, used by a bypassing writer ---------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_bypassing_fence_with_huge_epoch_is_recovered(
    prefix: str, proxy: ProxyProcess, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """Kafka then refuses the proxy's fences (47). The partition sequencer must use a higher epoch."""
    topic = new_topic(prefix, length=3)
    watch = Watch(proxy, topic)
    liar = Producer(shared_producer_id(log, topic), HUGE_EPOCH)
    with log.connect(topic) as direct:
        assert direct.append(topic, batch(b"lie", producer=liar._replace(sequence=3))).error_code != OK
        assert direct.append(topic, batch(b"lie", producer=liar)).base_offset == 3

        refused = final_answer(client, topic, batch(b"x", expected=3))

        assert (refused.error_code, refused.base_offset) == (POLICY_VIOLATION, 4)
        assert (refused.message or "").startswith("OFFSET_MISMATCH")
        for at in (4, 5):
            assert final_answer(client, topic, batch(b"next", expected=at))[:2] == (OK, at)
        line = until(watch.reported, "the ERROR")[0]
        assert f"producer_id={liar.id} " in line, line
        assert watch.new_violations >= 1
        # Repeat with the new epoch of the partition sequencer, which any client can read.
        epoch = log.batches(topic)[-1].producer_epoch
        assert epoch >= HUGE_EPOCH
        again = direct.append(topic, batch(b"lie", producer=liar._replace(epoch=epoch + 1)))
        assert again.base_offset == 6
        refused = final_answer(client, topic, batch(b"x", expected=6))
        assert (refused.error_code, refused.base_offset) == (POLICY_VIOLATION, 7)
        assert final_answer(client, topic, batch(b"next", expected=7))[:2] == (OK, 7)
    assert log.values(topic) == [b"old"] * 3 + [b"lie", b"next", b"next", b"lie", b"next"]


@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_bypassing_fence_with_last_epoch_is_reported(
    prefix: str, proxy: ProxyProcess, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """There is no higher epoch. The proxy reports nothing false and logs an ERROR."""
    topic = new_topic(prefix, length=3)
    watch = Watch(proxy, topic)
    with log.connect(topic) as direct:
        liar = Producer(shared_producer_id(log, topic), LAST_EPOCH)
        assert direct.append(topic, batch(b"lie", producer=liar)).base_offset == 3

    answers = [client.append(topic, batch(b"x%d" % at, expected=at), timeout_ms=3000) for at in (3, 4)]

    there = log.values(topic)
    for at, answer in zip((3, 4), answers, strict=True):
        if answer.error_code == OK:
            assert there[at] == b"x%d" % at
            assert answer.base_offset == at
        else:
            assert answer.error_code in (NOT_LEADER, POLICY_VIOLATION), answer
            assert b"x%d" % at not in there
    assert answers[0].error_code != OK
    assert until(watch.reported, "the ERROR")


def test_partition_that_knows_the_last_epoch_stays_writable(
    proxy: ProxyProcess, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """Each bypassing append requires a new epoch. The shared producer id has none left: the proxy uses the next id."""
    topic = new_topic("required", length=3)
    first = shared_producer_id(log, topic)
    with log.connect(topic) as direct:
        assert direct.append(topic, batch(b"lie", producer=Producer(first, LAST_EPOCH))).base_offset == 3
        for end in (4, 6, 8):
            refused = final_answer(client, topic, batch(b"stale", expected=0))
            assert (refused.error_code, refused.base_offset) == (POLICY_VIOLATION, end), refused
            assert final_answer(client, topic, batch(b"mine", expected=end))[:2] == (OK, end)
            assert direct.append(topic, batch(b"around")).base_offset == end + 1
        # Use the last epoch of the next id too.
        second = log.batches(topic)[-2].producer_id
        assert second not in (first, -1)
        assert direct.append(topic, batch(b"lie", producer=Producer(second, LAST_EPOCH))).base_offset == 10
    refused = final_answer(client, topic, batch(b"stale", expected=0))
    assert (refused.error_code, refused.base_offset) == (POLICY_VIOLATION, 11), refused
    for end in (11, 12):
        assert final_answer(client, topic, batch(b"mine", expected=end))[:2] == (OK, end)
    assert log.batches(topic)[-1].producer_id not in (first, second, -1)


@pytest.mark.parametrize("topics", [1, 2])
def test_shared_producer_id_is_refused_on_unchecked_topics(
    topics: int, client: Connection, proxy: ProxyProcess, log: Log, new_topic: NewTopic
) -> None:
    shared = shared_producer_id(log, new_topic("required", length=1))
    unchecked = [new_topic("plain", length=1) for _ in range(topics)]
    lie = batch(b"lie", producer=Producer(shared, LAST_EPOCH))
    with Connection(proxy.bootstrap) as liar:
        liar.send_produce({topic: {0: lie} for topic in unchecked})
        with pytest.raises((Closed, OSError)):
            liar.receive_produce()
    for topic in unchecked:
        assert log.values(topic) == [b"old"]
    until(lambda: "PRODUCER_ID_TAKEN" in proxy.log, "the log line", seconds=60)


def test_valid_bypassing_fence_is_an_ordinary_mismatch(
    proxy: ProxyProcess, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """Kafka compares a bypassing writer's valid fence like the proxy's: log and sequence advance together."""
    topic = new_topic("required", length=3)
    watch = Watch(proxy, topic)
    fence = log.batches(topic)[-1]
    with log.connect(topic) as direct:
        fair = Producer(fence.producer_id, fence.producer_epoch, fence.base_sequence + 1)
        assert direct.append(topic, batch(b"late", producer=fair._replace(sequence=77))).error_code == 45
        assert direct.append(topic, batch(b"fair", producer=fair)).base_offset == 3
    for _ in range(2):
        refused = final_answer(client, topic, batch(b"mine", expected=3))
        assert (refused.error_code, refused.base_offset) == (POLICY_VIOLATION, 4), refused
    assert final_answer(client, topic, batch(b"mine", expected=4))[:2] == (OK, 4)
    assert (watch.new_violations, watch.reported()) == (0, [])
    assert log.values(topic) == [b"old"] * 3 + [b"fair", b"mine"]


# --- transactions that bypass the proxy -------------------------------------------------------------------------------


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_bypassing_transaction_moves_the_expected_offset(  # noqa: PLR0917
    prefix: str, commit: bool, client: Connection, log: Log, new_topic: NewTopic, unique_topic: Callable[..., str]
) -> None:
    """The records and the marker move the log end separately. The marker arrives later."""
    topic, name = new_topic(prefix, length=2), unique_topic("around")
    with log.connect(topic) as direct:
        producer = until(lambda: direct.init_producer_id(name), "a producer id")
        begin(direct, topic, name, producer)
        records = batch(b"txn", producer=producer, transactional=True)
        assert direct.append(topic, records, transactional_id=name, version=11).base_offset == 2

        first = client.append(topic, batch(b"first", expected=2), timeout_ms=4500)
        second = client.append(topic, batch(b"second", expected=log.end(topic)), timeout_ms=4500)

        assert first.error_code in (NOT_LEADER, POLICY_VIOLATION), first
        if first.error_code == POLICY_VIOLATION:
            assert_violation(first, topic, expected=2, appended_at=3, producer_id=producer.id)
        # The partition sequencer has read the log: until the marker arrives, the next offset is unknown.
        assert second.error_code == NOT_LEADER, second
        before = log.end(topic)
        end(direct, name, producer, commit=commit)
    until(lambda: log.end(topic) == before + 1, "the marker")
    stale = final_answer(client, topic, batch(b"third", expected=before))
    assert (stale.error_code, stale.base_offset) == (POLICY_VIOLATION, before + 1), stale
    assert final_answer(client, topic, batch(b"fourth", expected=before + 1))[:2] == (OK, before + 1)
    values = log.values(topic)
    assert (values[:3], values[-1]) == ([b"old", b"old", b"txn"], b"fourth")
    assert not {b"second", b"third"} & set(values)


def begin(client: Connection, topic: str, name: str, producer: Producer) -> None:
    request = add_request(name, producer, {topic: [0]})
    until(lambda: added(client.query(request, 3)) == {(topic, 0): OK}, "the transaction to begin")


def end(client: Connection, name: str, producer: Producer, *, commit: bool) -> None:
    assert client.query(end_request(name, producer, commit=commit), 3).error_code == OK


# --- all of these concurrently ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_conditional_and_bypassing_writers_get_true_answers(
    prefix: str, proxy: ProxyProcess, log: Log, new_topic: NewTopic
) -> None:
    """In any order, a success is at its expected offset, a refused value is absent, and violations are reported."""
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    topic = new_topic(prefix, length=1)
    watch = Watch(proxy, topic)
    responses: dict[bytes, Answer] = {}
    bypassed: set[bytes] = set()
    done = threading.Event()

    def conditional(name: str) -> None:
        end = number = 0
        with Connection(proxy.bootstrap) as connection:
            accepted = 0
            while not done.is_set() or accepted < 25:
                number += 1
                value = b"%s/%d" % (name.encode(), number)
                answer = responses[value] = connection.append(topic, batch(value, expected=end))
                accepted += answer.error_code == OK
                if answer.base_offset >= 0:
                    appended_batch = answer.error_code == OK or "OFFSET_VIOLATION" in (answer.message or "")
                    end = answer.base_offset + appended_batch

    def bypassing(pauses: list[float]) -> None:
        try:
            with log.connect(topic) as direct:
                producer = direct.init_producer_id()
                liar = Producer(shared_producer_id(log, topic), 100)
                for number, pause in enumerate(pauses):
                    done.wait(pause)
                    value = b"around/%d" % number
                    how = number % 3
                    if how == 0:
                        records = batch(value)
                    elif how == 1:
                        records = batch(value, producer=producer._replace(sequence=number // 3))
                    else:
                        records = batch(value, producer=liar._replace(epoch=100 + 50 * number))
                    if direct.append(topic, records).error_code == OK:
                        bypassed.add(value)
        finally:
            done.set()

    with ThreadPoolExecutor(3) as pool:
        pauses = [rng.uniform(0.0, 0.1) for _ in range(40)]
        tasks = [pool.submit(bypassing, pauses), pool.submit(conditional, "a"), pool.submit(conditional, "b")]
        for task in tasks:
            task.result()

    there = {value: at for at, value in enumerate(log.values(topic)) if value not in (None, b"old")}
    codes: Counter[str] = Counter()
    for value, answer in responses.items():
        message = answer.message or ""
        if answer.error_code == OK:
            codes["accepted"] += 1
            assert there.get(value) == answer.base_offset, (value, answer)
        elif message.startswith("OFFSET_VIOLATION"):
            codes["violated"] += 1
            assert there.get(value) == answer.base_offset, (value, answer)
            assert f" appended_at={answer.base_offset}" in message
            assert f" expected={answer.base_offset} " not in message, message
        else:
            codes[f"error {answer.error_code}"] += 1
            assert answer.error_code in (NOT_LEADER, POLICY_VIOLATION), answer
            assert value not in there, (value, answer)
    print(f"{prefix}: {dict(codes)}, bypassing the proxy {len(bypassed)}")
    assert bypassed <= there.keys() <= bypassed | responses.keys()
    assert len(bypassed) == 40
    assert codes["accepted"] > 40, "few appends were accepted: the partition sequencer did not recover"
    assert watch.new_violations >= codes["violated"]
    assert len(watch.reported()) >= 1
