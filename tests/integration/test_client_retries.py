"""A lost acknowledgement, with every client: what it reports, and that the record is in the log once.

The response to an append is cut at a byte, between proxy and client or between Kafka and proxy, and the client retries.
Further tests cover changed producer epochs and records that the application sends again. The table "After a lost
acknowledgement" in docs/other-clients.md must equal the observed outcomes.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Literal

import pytest
from kafka.protocol.producer import ProduceRequest

from fencepost import Record, RetryPolicy
from fencepost_dev.cluster import KafkaCluster
from tests.kit.fault_proxy import Cut, Drop, Fault, FaultProxy, Hold
from tests.kit.stage import piped_kafka
from tests.kit.waiting import until
from tests.support import clients
from tests.support.clients import LIBRARIES
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log, Logged, batch, read_batches
from tests.support.senders import (
    CLIENTS,
    Client,
    JavaProducers,
    Observed,
    Sender,
    create_topic,
    documented,
    free_proxy_port,
)

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.no_cover,
    pytest.mark.timeout(300),
    # kafka-python leaves the socket of a failed connection attempt to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

LOST = "## After a lost acknowledgement"
#: A retry after a refusal on another partition: how it is sent, its result without and with a `fencepost-write-id`.
IDENTITY = {
    "Java (default: idempotent)": ("the same, same sequence", "success", "success"),
    "kafka-python (default: idempotent)": ("not at all", "refused", "refused"),
    "aiokafka, `enable_idempotence=True`": ("the same, same sequence", "success", "success"),
    "confluent-kafka, `enable.idempotence=true`": ("the next epoch", "refused", "success"),
}
#: The same for a record that the application sends again after a delivery timeout.
GIVEN_UP = {
    "Java (default: idempotent)": ("the next epoch", "refused", "refused, `POSSIBLY_YOURS`"),
    "kafka-python (default: idempotent)": ("not at all",),  # it stops sending
    "aiokafka, `enable_idempotence=True`": (),  # it never times out
    "confluent-kafka, `enable.idempotence=true`": ("the same, next sequence", "refused", "refused"),
}
_REFUSED = ("PolicyViolationException", "PolicyViolationError", "POLICY_VIOLATION", "OffsetMismatchError")
HOST = "127.0.0.2"  # of the clients' fault proxies; the proxy has the same ports on 127.0.0.1
_CONFIG = f"""
advertised_host = "{HOST}"
[limits]
takeover_seconds = 0.5
[topics."retry-*"]
"fencepost.check.expected.offsets" = "true"
"""
Hop = Literal["client", "kafka"]
each_client = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name.replace("`", ""))


@dataclass
class Stage:
    """client -> fault proxy -> proxy -> fault proxy -> Kafka."""

    kafka: KafkaCluster
    proxy: ProxyProcess
    bootstrap: str  # for clients
    pipes: dict[Hop, FaultProxy]  # between client and proxy, and between proxy and Kafka
    front: tuple[FaultProxy, ...]

    @property
    def direct(self) -> str:
        """The proxy's own address, without a fault proxy."""
        return f"127.0.0.1:{self.proxy.port}"

    def topic(self, name: str, partitions: int = 1) -> str:
        return create_topic(self.direct, name, partitions)

    @contextmanager
    def connections_blocked(self) -> Iterator[None]:
        for pipe in self.front:
            pipe.refuse()
        try:
            yield
        finally:
            for pipe in self.front:
                pipe.accept()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with ExitStack() as stack:
        kafka, pipes = stack.enter_context(piped_kafka(1))
        proxy_port = free_proxy_port()
        directory = tmp_path_factory.mktemp("proxy")
        proxy = stack.enter_context(ProxyProcess(pipes[1].address, directory, config=_CONFIG, port=proxy_port))
        front = tuple(
            stack.enter_context(FaultProxy(("127.0.0.1", each), host=HOST, port=each))
            for each in (proxy_port, proxy_port + 2)
        )
        yield Stage(kafka, proxy, front[0].address, {"client": front[1], "kafka": pipes[1]}, front)


def _append(stage: Stage, topic: str, value: bytes, *, expected: int) -> None:
    def tried() -> bool:
        with Connection(stage.direct) as raw:
            answer = raw.append(topic, batch(value, expected=expected))
        assert answer.error_code in (0, 6), answer
        return answer.error_code == 0

    until(tried, f"an append to {topic} at {expected}", seconds=60)


def _cuts(rng: random.Random) -> dict[str, float]:
    """How much of the response arrives, by name."""
    return {"before its first byte": 0.0, "inside": rng.uniform(0.001, 0.999), "after its last byte": 1.0}


def _reported(observed: Observed) -> str:
    """An outcome in the words of the tables."""
    if observed.error is None:
        return "success"
    if observed.error not in _REFUSED:
        return f"`{observed.error}`"
    return "refused, `POSSIBLY_YOURS`" if "POSSIBLY_YOURS" in observed.shown else "refused"


def _may_miss_the_last_answer(client: Client, observed: Observed) -> bool:
    """kafka-python may drop a complete response if the connection closes directly after it."""
    return client.library == "kafka-python" and observed.error is not None


@each_client
def test_lost_acknowledgement_outcome_matches_documentation(
    client: Client, stage: Stage, java: JavaProducers, unique_topic: Callable[..., str]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    topic = stage.topic(unique_topic("retry"))
    with ExitStack() as open_producers:

        def producer() -> Sender:
            return open_producers.enter_context(closing(client.open(stage.bootstrap, java)))

        log = Log(stage.kafka.bootstrap)
        sender = producer()
        assert sender.send(topic, "first", expected=0).get().offset == 0
        values = ["first"]
        reported: dict[tuple[Hop, bool], list[str]] = {}
        for hop, pipe in stage.pipes.items():
            for named in (False, True):
                for where, part in _cuts(rng).items():
                    value = f"{hop} {'named' if named else 'unnamed'} {where}"
                    cut = pipe.add(Cut("response", value.encode(), part=part))
                    sending = sender.send(
                        topic, value, expected=len(values), write_id=f"{topic} {value}" if named else None
                    )
                    cut.wait()
                    observed = sending.get()
                    print(f"    {value} -> {observed}")
                    # Whatever the client reports, the record was appended once, at that offset.
                    if observed.error is None:
                        assert observed.offset == len(values)
                    values.append(value)
                    assert log.values(topic) == [each.encode() for each in values]
                    if where != "after its last byte" or _may_miss_the_last_answer(client, observed):
                        reported.setdefault((hop, named), []).append(_reported(observed))
                    else:
                        assert observed.error is None
                    if observed.error is not None and not client.goes_on:
                        sender = producer()
    assert {*reported["client", True], *reported["kafka", True]} == {"success"}
    lost = _all(reported["client", False] + reported["kafka", False])
    print(f"    {client.name}: {lost}")
    assert lost == ("success" if client.ours else _documented(LOST, client)["acknowledgement lost"])
    gc.collect()


def test_lost_acknowledgement_with_proxy_and_broker_killed(
    stage: Stage, java: JavaProducers, unique_topic: Callable[..., str]
) -> None:
    """1. Each client has an append in the log whose response is delayed. 2. Proxy and broker are killed and restarted.
    3. Other producers append. 4. The clients reconnect and retry."""
    log = Log(stage.kafka.bootstrap)
    reported: dict[str, dict[bool, Observed]] = {client.name: {} for client in CLIENTS}
    with ExitStack() as stack:
        waiting, writing = [], []
        hanging: list[Fault] = []
        for client in CLIENTS:
            for named in (False, True):
                topic = stage.topic(unique_topic("retry-killed"))
                # aiokafka without idempotence fails the record after this time.
                patient = {"request_timeout_ms": 120_000} if client.library == "aiokafka" else {}
                sender = stack.enter_context(closing(client.open(stage.bootstrap, java, **patient)))
                assert sender.send(topic, "before", expected=0).get().offset == 0
                value = f"mine in {topic}"
                hanging.append(stage.pipes["client"].add(Drop("response", value.encode(), everything=True)))
                sending = sender.send(topic, value, expected=1, write_id=f"the id of {value}" if named else None)
                waiting.append((client, named, topic, value, sending))
        pool = stack.enter_context(ThreadPoolExecutor(len(LIBRARIES)))
        for library in LIBRARIES:
            topic, value = stage.topic(unique_topic("retry-killed-log")), f"mine by {library}"
            # Its attempt must not end before the kill.
            retry = RetryPolicy(attempt_seconds=90, total_seconds=180)
            writer = stack.enter_context(closing(clients.log_writer(library, topic, stage.bootstrap, retry)))
            writer.read_to_end(lambda record: None)
            assert writer.append([Record(b"before")]) == 0
            hanging.append(stage.pipes["client"].add(Drop("response", value.encode(), everything=True)))
            writing.append((topic, value, pool.submit(writer.append, [Record(value.encode())])))
        for cut in hanging:
            cut.wait()
        with stage.connections_blocked():
            stage.proxy.kill()
            stage.kafka.kill(1)
            stage.kafka.restart(1)
            stage.proxy.restart()
            for topic in (*(topic for _, _, topic, _, _ in waiting), *(topic for topic, _, _ in writing)):
                _append(stage, topic, b"behind it", expected=2)
        for client, named, topic, value, sending in waiting:
            observed = reported[client.name][named] = sending.get(120)
            print(f"    {client.name}, {'named' if named else 'unnamed'} -> {observed}")
            assert log.values(topic) == [b"before", value.encode(), b"behind it"]
            if observed.error is None:
                assert observed.offset == 1
        for topic, value, appending in writing:
            assert appending.result(180) == 1
            assert log.values(topic) == [b"before", value.encode(), b"behind it"]
    assert {_reported(reported[client.name][True]) for client in CLIENTS} == {"success"}
    rows = {client.name: _reported(reported[client.name][False]) for client in CLIENTS}
    print(rows)
    documentation = {row["client"]: row["proxy and broker also restarted"] for row in documented(LOST)}
    assert rows == documentation | {client.name: "success" for client in CLIENTS if client.ours}
    gc.collect()


# --- new producer ids and epochs --------------------------------------------------------------------------------------

#: Settings with which a client soon fails a record. Idempotent aiokafka retries indefinitely.
_GIVES_UP = {
    "java": {"delivery_timeout_ms": 3000, "request_timeout_ms": 2500, "linger_ms": 0},
    "kafka-python": {"delivery_timeout_ms": 3000, "request_timeout_ms": 2500},
    "confluent-kafka": {"message_timeout_ms": 3000, "reconnect_backoff_max_ms": 100},
}
_TIMEOUTS = ("TimeoutException", "_MSG_TIMED_OUT")
#: A retry waits this long, and the next record does not.
_WAITS_BEFORE_RETRIES = {
    "java": {"retry_backoff_ms": 2000, "retry_backoff_max_ms": 2000, "linger_ms": 0},
    "kafka-python": {"retry_backoff_ms": 2000},
    "aiokafka": {"retry_backoff_ms": 2000},
    "confluent-kafka": {"retry_backoff_ms": 2000, "retry_backoff_max_ms": 2000, "linger_ms": 0},
}
each_idempotent = pytest.mark.parametrize(
    "client",
    [client for client in CLIENTS if client.idempotent and not client.ours],
    ids=lambda client: client.name.replace("`", ""),
)


@each_idempotent
def test_retry_after_refusal_on_another_partition_is_recognised(
    client: Client, stage: Stage, java: JavaProducers, unique_topic: Callable[..., str]
) -> None:
    """1. A record is appended and its acknowledgement lost. 2. A record for another partition is refused.
    3. The client retries the first record."""
    changes, reported = [], []
    for named in (False, True):
        for _ in range(10):
            topic = stage.topic(unique_topic("retry-bump"), partitions=2)
            value = f"in the log of {topic}"
            with closing(client.open(stage.bootstrap, java, **_WAITS_BEFORE_RETRIES[client.library])) as sender:
                for partition in (0, 1):
                    assert sender.send(topic, "before", partition=partition, expected=0).get().offset == 0
                cut = stage.pipes["client"].add(Cut("response", value.encode()))
                sending = sender.send(topic, value, expected=1, write_id=f"{topic} id" if named else None)
                cut.wait()
                assert sender.send(topic, "wrong", partition=1, expected=7).get().error is not None
                # aiokafka has one request to a broker in flight: nothing overtakes a retry.
                overtaken = len(_tries(stage, value)) == 1 or client.library == "aiokafka"
                observed = sending.get()
            if overtaken:
                break
        else:
            pytest.fail("the retry preceded the refusal in every attempt")
        print(f"    {client.name}, {'named' if named else 'unnamed'}: {observed}")
        reported.append(_reported(observed))
        changes.append(_comes_as(stage, value))
        assert Log(stage.kafka.bootstrap).values(topic) == [b"before", value.encode()]
    assert (_all(changes), *reported) == IDENTITY[client.name]


@each_idempotent
def test_resent_given_up_record_is_not_appended_twice(
    client: Client, stage: Stage, java: JavaProducers, unique_topic: Callable[..., str]
) -> None:
    """The record that timed out is in the log. The user's repeat is a new batch, possibly with a new epoch. Its time is
    new, too, so not even its write id distinguishes it from a copy."""
    changes, reported = [], []
    # kafka-python stops sending: one variant is enough, since it takes long.
    variants = {"aiokafka": (), "kafka-python": (False,)}.get(client.library, (False, True))
    for named in variants:
        topic = stage.topic(unique_topic("retry-given-up"))
        with closing(client.open(stage.bootstrap, java, **_GIVES_UP[client.library])) as sender:
            while sender.send(topic, "before", expected=0, write_id=f"{topic} before").get().offset != 0:
                pass  # a slow machine: the client timed out too soon
            write_id = f"{topic} id" if named else None
            value = f"given up in {topic}"
            hanging = stage.pipes["client"].add(Drop("response", value.encode(), everything=True))
            sending = sender.send(topic, value, expected=1, write_id=write_id)
            hanging.wait()
            with stage.connections_blocked():
                assert sending.get().error is not None
            again = sender.send(topic, value, expected=1, write_id=write_id)
            while client.library != "kafka-python" and again.get().error in _TIMEOUTS:  # a slow machine
                again = sender.send(topic, value, expected=1, write_id=write_id)
            if client.library == "kafka-python":
                # It waits for a new producer id but never requests one. The same happens without a proxy.
                with pytest.raises(AssertionError, match="no outcome yet"):
                    again.get(3)
                changes.append(_comes_as(stage, value))
            else:
                reported.append(_reported(again.get()))
                changes.append(_comes_as(stage, value))
        assert Log(stage.kafka.bootstrap).values(topic) == [b"before", value.encode()]
    assert (*dict.fromkeys(changes), *reported) == GIVEN_UP[client.name]
    gc.collect()


def _comes_as(stage: Stage, value: str) -> str:
    """Producer id, epoch and sequence of the last batch with this value, compared with the first."""
    tries = _tries(stage, value)
    if len(tries) == 1:
        return "not at all"
    first, last = tries[0], tries[-1]
    if first.producer_id != last.producer_id:
        return "another producer id"
    if first.producer_epoch != last.producer_epoch:
        return "the next epoch"
    return f"the same, {'same' if first.base_sequence == last.base_sequence else 'next'} sequence"


def _tries(stage: Stage, value: str) -> list[Logged]:
    found = []
    for frame in stage.pipes["client"].produced:
        if value.encode() in frame:
            request = ProduceRequest.decode(frame[4:], version=int.from_bytes(frame[6:8], "big"), header=True)
            found += read_batches(bytes(request.topic_data[0].partition_data[0].records))
    return found


@pytest.mark.parametrize(
    "client", [client for client in CLIENTS if client.pipelines], ids=lambda client: client.name.replace("`", "")
)
def test_pipelined_retry_after_lost_refusal_is_appended_alone(
    client: Client, stage: Stage, java: JavaProducers, unique_topic: Callable[..., str]
) -> None:
    """A retry on a new connection is independent: it cannot be distinguished from a new record of a new epoch."""
    topic = stage.topic(unique_topic("retry-chain"))
    with (
        Connection(stage.direct) as raw,
        closing(client.open(stage.bootstrap, java, **client.one_record_a_batch())) as sender,
    ):
        assert sender.send(topic, "warm", expected=0).get().offset == 0
        assert raw.append(topic, batch(b"rival", expected=1)).error_code == 0
        one, two = f"link 1 of {topic}", f"link 2 of {topic}"
        cut = stage.pipes["client"].add(Cut("response", two.encode()))
        with stage.pipes["client"].add(Hold("request", b"link ", count=2)):
            first, second = sender.send(topic, one, expected=1), sender.send(topic, two, expected=2)
            cut.wait()
        assert first.get().error is not None
        print(f"    {client.name}: {first.get()}, then {second.get()}")
        assert second.get() == Observed(2)
    assert _comes_as(stage, two) == ("the next epoch" if client.idempotent else "the same, same sequence")
    assert Log(stage.kafka.bootstrap).values(topic) == [b"warm", b"rival", two.encode()]


def test_the_table_has_one_row_for_each_client() -> None:
    assert [row["client"] for row in documented(LOST)] == [client.name for client in CLIENTS if not client.ours]


def _all(reported: list[str]) -> str:
    return " or ".join(dict.fromkeys(reported))


def _documented(heading: str, client: Client) -> dict[str, str]:
    return next(row for row in documented(heading) if row["client"] == client.name)
