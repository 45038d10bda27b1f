"""Writers race for the same offsets: through one proxy and two, with fences confirmed or not, with a paused or killed
broker.

Every record states its expected offset in its value. Every check reads the log directly from Kafka.
"""

from __future__ import annotations

import itertools
import random
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.kit import stage as kit
from tests.kit.history import OK as ACCEPTED
from tests.kit.history import REFUSED, TRY_AGAIN, UNKNOWN, VIOLATION, Reported
from tests.kit.waiting import until
from tests.support.fixtures import proxy_fixture
from tests.support.proxy import CHECKED_BY_NAME, CHECKED_WITH_LONG_LEASE, LEASE_SECONDS, ProxyProcess
from tests.support.raw import (
    GZIP,
    Answer,
    Connection,
    Log,
    Producer,
    Record,
    batch,
    final_answer,
)
from tests.support.writers import Ledger, expected_of, offsets, under_load, value_of

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover]

OK, NOT_LEADER, TIMED_OUT, POLICY_VIOLATION = 0, 6, 7, 44
SEQUENCER_WAIT_MAX_SECONDS = 1.0
#: Per run, since some tries fail on a busy machine.
TRIES_MAX = 20
TAKEOVER = "takeover_seconds = 0.5\n"  # tests here start and stop proxies
FENCED = f"{CHECKED_WITH_LONG_LEASE}\n[limits]\nsequencer_wait_max_seconds = {SEQUENCER_WAIT_MAX_SECONDS}\n{TAKEOVER}"
_numbers = itertools.count()
NAIVE = "unsafe_disable_fencing = true\n" + FENCED

Say = Callable[[str], None]


#: Another proxy of the same cluster as `proxy`.
second_proxy = proxy_fixture(config=f"{CHECKED_BY_NAME}\n[limits]\n{TAKEOVER}")


def create(address: str, log: Log, topic: str, partitions: int = 1) -> str:
    with Connection(address) as connection:
        assert connection.create_topic(topic, partitions=partitions) == (OK, None)
    assert log.end(topic) == 0
    return topic


def together(*writers: Callable[[], None]) -> None:
    with ThreadPoolExecutor(len(writers)) as pool:
        for done in [pool.submit(writer) for writer in writers]:
            done.result()


def conditional_writer(
    name: str,
    address: str,
    ledger: Ledger,
    rounds: int,
    *,
    least: int = 0,
    start_line: threading.Barrier | None = None,
) -> Callable[[], None]:
    """Append at the last reported log end until the log has `rounds` records and `least` appends were accepted. With a
    start line, all writers begin each round together. They compete for the same offset, and slower writers get a
    chance."""

    def write() -> None:
        end = number = accepted = 0
        with Connection(address) as connection:
            while end < rounds or accepted < least:
                line_up(start_line)
                number += 1
                answer = ledger.append(connection, value_of(name, number, end))
                accepted += answer.error_code == OK
                if answer.base_offset >= 0:
                    end = answer.base_offset + (answer.error_code == OK)
        if start_line is not None:
            start_line.abort()  # the remaining writers continue without it

    return write


def line_up(start_line: threading.Barrier | None) -> None:
    if start_line is not None:
        try:
            start_line.wait(60)
        except threading.BrokenBarrierError:
            return
        time.sleep(random.random() / 1000)  # no writer is always first


# --- competition for an offset ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writers", "proxies", "rounds"),
    [
        pytest.param(2, 1, 600, id="two connections"),
        pytest.param(2, 2, 600, id="two proxies"),
        pytest.param(5, 2, 500, id="five writers, two proxies"),
        pytest.param(2, 1, 2000, id="two connections for long", marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
        pytest.param(2, 2, 2000, id="two proxies for long", marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
def test_each_offset_has_one_winner(  # noqa: PLR0917
    writers: int,
    proxies: int,
    rounds: int,
    kafka: KafkaCluster,
    proxy: ProxyProcess,
    second_proxy: ProxyProcess,
    unique_topic: Callable[..., str],
    say: Say,
) -> None:
    log = Log(kafka.bootstrap)
    topic = create(proxy.bootstrap, log, unique_topic("required"))
    addresses = [proxy.bootstrap, second_proxy.bootstrap][:proxies]
    ledger, names = Ledger(topic), [f"w{i}" for i in range(writers)]
    start_line = threading.Barrier(writers)
    together(
        *(
            conditional_writer(name, addresses[i % proxies], ledger, rounds, start_line=start_line)
            for i, name in enumerate(names)
        )
    )
    say(f"{proxies} proxies: {ledger}")
    ledger.check(log)
    outcomes = ledger.outcomes()
    assert outcomes.keys() <= {ACCEPTED, REFUSED, TRY_AGAIN}
    assert ledger.misplaced() == 0
    assert log.end(topic) == outcomes[ACCEPTED] >= rounds
    assert all(map(ledger.accepted, names)), "one writer never succeeded: this was no race"
    assert outcomes[REFUSED] > rounds / 2, "too few appends were refused: this was no race"


@pytest.mark.parametrize("proxies", [1, 2])
def test_pipelined_appends_race_without_misplaced_records(  # noqa: PLR0917
    proxies: int,
    kafka: KafkaCluster,
    proxy: ProxyProcess,
    second_proxy: ProxyProcess,
    unique_topic: Callable[..., str],
    say: Say,
) -> None:
    """Two writers each have ten conditional batches in flight. Each batch is appended at its expected offset or
    refused, never with 45. A refusal also fails all later batches of the pipeline, with two proxies too. Otherwise,
    another writer's batch of the same size could take the sequence of the refused one, and Kafka would accept the next
    batch."""
    log = Log(kafka.bootstrap)
    topic = create(proxy.bootstrap, log, unique_topic("required"))
    addresses = [proxy.bootstrap, [proxy, second_proxy][proxies - 1].bootstrap]
    ledger = Ledger(topic)
    won_whole = torn = 0
    start_line = threading.Barrier(2)

    def writer(name: str, address: str) -> Callable[[], None]:
        def write() -> None:
            nonlocal won_whole, torn
            end = number = 0
            with Connection(address) as connection:
                while end < 1000:
                    line_up(start_line)
                    pipeline = [value_of(name, number + i, end + i) for i in range(10)]
                    number += 10
                    for value in pipeline:
                        ledger.sent(value, pipeline_key=f"{name}/{number}")
                    batches = [batch(value, expected=end + i) for i, value in enumerate(pipeline)]
                    answers = list(connection.pipeline(topic, batches))
                    for value, answer in zip(pipeline, answers, strict=True):
                        ledger.note(value, answer)
                    codes = [answer.error_code for answer in answers]
                    assert set(codes) <= {OK, NOT_LEADER, POLICY_VIOLATION}
                    won_whole += codes == [OK] * 10
                    torn += OK in codes[codes.count(OK) :]  # accepted after a refusal
                    end = max(end, *(answer.base_offset + (answer.error_code == OK) for answer in answers))
            start_line.abort()

        return write

    together(*(writer(name, address) for name, address in zip("ab", addresses, strict=True)))
    say(f"pipelines of ten, {proxies} proxies: {ledger}; {won_whole} pipelines won whole, {torn} torn")
    ledger.check(log)
    assert ledger.misplaced() == 0
    assert log.end(topic) == ledger.outcomes()[ACCEPTED] > 0
    assert ledger.outcomes()[REFUSED]
    assert torn == 0


def test_unconfirmed_fences_of_two_proxies_agree(
    kafka: KafkaCluster, proxy: ProxyProcess, second_proxy: ProxyProcess, unique_topic: Callable[..., str], say: Say
) -> None:
    """A broker without producer state accepts any first sequence. Equal expected offsets get equal sequences."""
    log = Log(kafka.bootstrap)
    topics = [create(proxy.bootstrap, log, unique_topic("required")) for _ in range(30)]
    codes: Counter[int] = Counter()
    with ExitStack() as stack:
        connections = [
            stack.enter_context(Connection(address))
            for address in (proxy.bootstrap, second_proxy.bootstrap, proxy.bootstrap, second_proxy.bootstrap)
        ]
        for topic in topics:
            waiting = {value_of(f"c{i}", 0, 0): connection for i, connection in enumerate(connections)}
            ledger = Ledger(topic)
            for value in waiting:
                ledger.sent(value)
            deadline = time.monotonic() + 60
            while waiting:
                assert time.monotonic() < deadline, f"no proxy knows the log end offset of {topic}"
                for value, connection in waiting.items():
                    connection.send_produce({topic: {0: batch(value, expected=0)}})
                answers = {value: each.receive_produce()[1][topic, 0] for value, each in waiting.items()}
                for value, answer in answers.items():
                    codes[answer.error_code] += 1
                    if answer.error_code != NOT_LEADER:  # otherwise the loop sends it again
                        ledger.note(value, answer)
                        del waiting[value]
            assert ledger.outcomes()[ACCEPTED] == 1
            ledger.check(log)
    say(f"{len(topics)} unconfirmed partitions, four writers each: answers {dict(codes)}")
    assert codes[OK] == len(topics)


# --- unconditional writers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proxies", [1, 2])
def test_unconditional_writers_on_the_same_topic(  # noqa: PLR0917
    proxies: int,
    kafka: KafkaCluster,
    proxy: ProxyProcess,
    second_proxy: ProxyProcess,
    unique_topic: Callable[..., str],
    say: Say,
) -> None:
    """Through one process, no append is misplaced. Through two, an append may be misplaced, but is reported as a
    violation."""
    log = Log(kafka.bootstrap)
    topic = create(proxy.bootstrap, log, unique_topic("checked"))
    rounds = 600
    ledger = Ledger(topic)
    other = [proxy, second_proxy][proxies - 1].bootstrap
    done = threading.Event()

    def unconditional(name: str, address: str, *, idempotent: bool) -> Callable[[], None]:
        def write() -> None:
            with Connection(address) as connection:
                producer = connection.init_producer_id() if idempotent else Producer(-1, -1, -1)
                number = 0
                while not done.is_set() or not number:
                    value = value_of(name, number, None)
                    ledger.sent(value, idempotent=idempotent)
                    who = producer._replace(sequence=number) if idempotent else None
                    until(lambda v=value, w=who: accepted(connection, v, w), f"{name} to append", pause_seconds=0.003)
                    number += 1
                    time.sleep(0.003)

        return write

    def accepted(connection: Connection, value: bytes, who: Producer | None) -> bool:
        answer = connection.append(topic, batch(value, producer=who))
        assert answer.error_code in (OK, NOT_LEADER), answer
        if answer.error_code == OK:
            ledger.note(value, answer)
        return answer.error_code == OK

    def conditional(name: str, address: str) -> Callable[[], None]:
        race = conditional_writer(name, address, ledger, rounds, least=1)

        def write() -> None:
            try:
                race()
            finally:
                done.set()

        return write

    together(
        conditional("c0", proxy.bootstrap),
        conditional("c1", other),
        unconditional("plain", other, idempotent=False),
        unconditional("idempotent", proxy.bootstrap, idempotent=True),
    )
    say(f"{proxies} proxies: {ledger}")
    ledger.check(log)
    outcomes = ledger.outcomes()
    assert not outcomes[UNKNOWN]
    assert ledger.misplaced() == outcomes[VIOLATION]
    if proxies == 1:
        assert not outcomes[VIOLATION]
    assert all(map(ledger.accepted, ("c0", "c1", "plain", "idempotent")))


# --- a broker that is paused, disconnected or killed ------------------------------------------------------------------


class Stage(kit.Stage):
    """One broker, and two proxies that connect through a fault proxy; `naive`, two without fencing."""

    naive: list[ProxyProcess]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Both proxies start at once and find neither a state topic nor a shared producer id."""
    with (
        kit.piped_kafka(1) as (kafka, pipes),
        Stage(kafka, tmp_path_factory.mktemp("races"), pipes) as ready,
    ):
        ready.start_proxies({name: {"config": FENCED} for name in ("p1", "p2")})
        ready.naive = [ready.start_proxy(name, config=NAIVE) for name in ("n1", "n2")]
        yield ready


def test_proxies_started_together_share_one_producer_id(stage: Stage, unique_topic: Callable[..., str]) -> None:
    fences = set()
    for proxy in stage.proxies:
        topic = create(proxy.bootstrap, stage.log, unique_topic("required"))
        with Connection(proxy.bootstrap) as connection:
            assert final_answer(connection, topic, batch(b"x", expected=0)).base_offset == 0
        fences |= {each.producer_id for each in stage.log.batches(topic)}
    assert len(fences) == 1


def warm_up(stage: Stage, proxy: ProxyProcess, run: int, ledger: Ledger) -> int:
    """Append twice through the proxy, so that it confirms its fence. Return the log end offset. The fence is confirmed
    for older connections only. A newer one might lead to a restarted broker."""
    end = stage.log.end(ledger.name)
    succeeded = 0
    deadline = time.monotonic() + 60
    with Connection(proxy.bootstrap) as connection:
        for attempt in itertools.count():
            if time.monotonic() > deadline:
                break
            answer = ledger.append(connection, value_of(f"warm{run}", attempt, end))
            if answer.error_code == OK:
                end, succeeded = end + 1, succeeded + 1
                if succeeded == 2:
                    return end
                continue
            if answer.base_offset >= 0:
                end = answer.base_offset
            time.sleep(0.01)
    raise AssertionError(f"the fence of {ledger.name} is not confirmed: {answer}")


def is_queued(stage: Stage, client: Connection, topic: str, records: bytes, words: bytes) -> bool:
    """Whether the paused broker has received it. If not, the proxy has refused it, because its view of Kafka was too
    old. This happens to a proxy that was paused just before. `words`: bytes that only this request contains."""
    client.send_produce({topic: {0: records}})

    def sent() -> bool:
        return any(words in each.frame for each in list(stage.pipes[1].requests))

    until(
        lambda: sent() or select.select([client.socket], [], [], 0)[0],
        f"{words!r} to be sent or refused",
        pause_seconds=0.002,
    )
    if not sent():
        assert client.receive_produce()[1][topic, 0].error_code == NOT_LEADER
        return False
    return True


def one_run(stage: Stage, proxies: Sequence[ProxyProcess], run: int, ledger: Ledger) -> Answer:
    tries = (one_try(stage, proxies, run, ledger) for _ in range(TRIES_MAX))
    return next(answer for answer in tries if answer is not None)


def one_try(stage: Stage, proxies: Sequence[ProxyProcess], run: int, ledger: Ledger) -> Answer | None:
    """Queue A's append in the paused broker, break a connection, and append B at the same offset. Return None if A was
    refused. The runs alternate. 1: A's client disconnects. 2: the proxy loses its broker connection, and B uses the
    same proxy. 3: like 2, but B uses another proxy, which appended last and has a confirmed fence."""
    topic, through_another = ledger.name, run % 3 == 2
    first, second = proxies[0], proxies[int(through_another)]
    with Connection(first.bootstrap) as a, Connection(second.bootstrap) as b:
        for each in (a, b):
            each.api_versions()  # connects the proxy to Kafka
        end = warm_up(stage, second, run, ledger)
        number = next(_numbers)
        value_a, value_b, padded = value_of("a", number, end), value_of("b", number, end), b"padded/%d/" % number
        # The broker needs a moment to validate this batch, so a later one may overtake it.
        heavy = batch(Record(value_a, expected=end), Record(padded, key=b"\0" * 4_000_000), codec=GZIP)
        # The refusal makes A's proxy read the log end. It may then send one append without another read.
        value = value_of("far", number, end + 1000)
        ledger.sent(value)
        ledger.note(value, final_answer(a, topic, batch(value, expected=end + 1000)))
        a.client_id = mark = f"a/{run}/{end}/{topic}"
        stage.kafka.pause(1)
        try:
            ledger.sent(value_a, padded)
            if not is_queued(stage, a, topic, heavy, mark.encode()):
                ledger.reported(ledger.by_value[value_a], Reported(REFUSED))
                return None
            # its client does not wait for the response
            if run % 3 == 0:
                a.reset()
            else:
                stage.pipes[1].cut_after(mark.encode())
            ledger.sent(value_b)
            b.send_produce({topic: {0: batch(value_b, expected=end)}})
            time.sleep(0.02)
        finally:
            stage.kafka.resume(1)
        answer = b.receive_produce()[1][topic, 0]
    ledger.note(value_b, answer)
    return answer


@pytest.mark.parametrize("runs", [25, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "not fenced"])
def test_a_queued_append_whose_connection_died(
    fenced: bool, runs: int, stage: Stage, unique_topic: Callable[..., str], say: Say
) -> None:
    """Reading the log again does not cover requests in the broker's queue. Kafka's sequence check does."""
    proxies = stage.proxies if fenced else stage.naive
    topic = create(proxies[0].bootstrap, stage.log, unique_topic("required"))
    ledger = Ledger(topic)
    answers: Counter[str] = Counter()
    for run in range(runs):
        answer = one_run(stage, proxies, run, ledger)
        answers[f"{answer.error_code} {(answer.message or '').split(' ')[0]}".strip()] += 1
    there = offsets(stage.log.batches(topic))
    misplaced = sum(expected_of(value) not in (None, offset) for value, offset in there.items())
    queued = sum(value.startswith(b"a/") for value in there)
    say(
        f"{'fenced' if fenced else 'not fenced'}: {runs} runs, {queued} queued appends are in the log, "
        f"{misplaced} at a wrong offset; second writers got {dict(answers)}"
    )
    if fenced:
        ledger.check(stage.log)
        assert not misplaced
    else:
        assert misplaced > runs // 25, "too few appends were misplaced without a fence: these runs prove nothing"


def proxy_killed(stage: Stage, run: int, ledger: Ledger) -> bool:
    """False if the proxy refused the append instead of sending it."""
    first, second = stage.proxies
    topic, number = ledger.name, next(_numbers)
    with Connection(first.bootstrap) as a, Connection(second.bootstrap) as b:
        for each in (a, b):
            each.api_versions()
        end = warm_up(stage, first, run, ledger)
        value_a, value_b = value_of("a", number, end), value_of("b", number, end)
        stage.kafka.pause(1)
        try:
            ledger.sent(value_a)
            if not is_queued(stage, a, topic, batch(value_a, expected=end), value_a):
                ledger.reported(ledger.by_value[value_a], Reported(REFUSED))
                return False
            first.kill()
            ledger.sent(value_b)
            b.send_produce({topic: {0: batch(value_b, expected=end)}})
            time.sleep(0.02)
        finally:
            stage.kafka.resume(1)
        ledger.note(value_b, b.receive_produce()[1][topic, 0])
    return True


def test_proxy_killed_with_queued_append_misplaces_nothing(
    stage: Stage, unique_topic: Callable[..., str], say: Say
) -> None:
    first = stage.proxies[0]
    ledger = Ledger(create(first.bootstrap, stage.log, unique_topic("required")))
    for run in range(6):
        assert any(proxy_killed(stage, run, ledger) for _ in range(TRIES_MAX))
        first.restart()
    say(f"proxy killed: 6 runs, {ledger}")
    ledger.check(stage.log)
    assert ledger.misplaced() == 0


def test_the_broker_is_killed_while_writers_race(stage: Stage, unique_topic: Callable[..., str], say: Say) -> None:
    topic = create(stage.proxies[0].bootstrap, stage.log, unique_topic("required"))
    with under_load(stage, topic) as load:
        load.more(100)
        stage.kafka.kill(1)
        stage.kafka.restart(1)
        load.more(100)
    say(f"broker killed: {load.ledger}")
    assert load.ledger.lost
    assert load.ledger.misplaced() == 0


# --- unknown state ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("timeout_ms", "bound_seconds"), [(1500, 0.5), (30_000, SEQUENCER_WAIT_MAX_SECONDS)])
def test_unknown_log_end_is_waited_for_briefly(
    timeout_ms: int, bound_seconds: float, stage: Stage, unique_topic: Callable[..., str]
) -> None:
    """The wait is limited to a third of the client's timeout, and to the configured maximum."""
    proxy = stage.proxies[0]
    topic = create(proxy.bootstrap, stage.log, unique_topic("required"), partitions=2)
    with Connection(proxy.bootstrap) as client:
        client.api_versions()
        # The proxy states the log end only to clients with WRITE permission. An append to the other partition proves
        # it.
        assert final_answer(client, topic, batch(b"z"), partition=1).error_code == POLICY_VIOLATION
        stage.kafka.pause(1)
        try:
            sent = time.monotonic()
            answer = client.append(topic, batch(b"x", expected=0), timeout_ms=timeout_ms)
            waited = time.monotonic() - sent
        finally:
            stage.kafka.resume(1)
        assert (answer.error_code, answer.base_offset) == (NOT_LEADER, -1)
        assert (answer.message or "").startswith("TRY_AGAIN the log end could not be read in time")
        assert bound_seconds - 0.1 < waited < bound_seconds + 20  # allows for a busy machine
        again = final_answer(client, topic, batch(b"y", expected=0))
    assert (again.error_code, again.base_offset) == (OK, 0)
    assert stage.log.values(topic) == [b"y"]


def test_no_append_is_sent_with_expired_configs(stage: Stage, unique_topic: Callable[..., str], tmp_path: Path) -> None:
    """Another process may have switched on a check, so the proxy does not know whether the topic is checked."""
    address = stage.proxies[0].bootstrap
    topics = [create(address, stage.log, unique_topic(prefix)) for prefix in ("required", "checked", "plain")]
    with (
        ProxyProcess(stage.upstream, tmp_path, config=CHECKED_BY_NAME) as proxy,
        Connection(proxy.bootstrap) as client,
    ):
        for topic in topics:
            assert final_answer(client, topic, batch(b"x", expected=0)).error_code == OK
        stage.kafka.pause(1)
        try:
            time.sleep(LEASE_SECONDS + 0.5)
            for topic in topics:
                client.send_produce({topic: {0: batch(b"never", expected=1)}})
                answer = client.receive_produce()[1][topic, 0]
                assert answer.error_code == NOT_LEADER
                assert answer.lacks_configs
        finally:
            stage.kafka.resume(1)
        for topic in topics:
            assert final_answer(client, topic, batch(b"again", expected=1))[:2] == (OK, 1)
    assert all(stage.log.values(topic) == [b"x", b"again"] for topic in topics)
