"""Errors that idempotent producers receive when Kafka has lost their state or acknowledged records (KAFKA-5793).

These tests verify the section "When Kafka has lost a producer's state" in docs/other-clients.md.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.integration.test_producer_state import SETTINGS, delete_records, log_start, producers
from tests.kit.waiting import until
from tests.support.fake_cluster import FORGETFUL, FORGETS_EVERY, FakeClusterProcess
from tests.support.fixtures import kafka_fixture, proxy_fixture
from tests.support.kafka import unique_topic
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log, Producer, batch
from tests.support.senders import CLIENTS, Client, JavaProducers, Observed, Sender
from tests.support.three_brokers import Stage3, leaders_listener

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.no_cover,
    # kafka-python leaves the socket of a failed connection attempt to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

#: After error 45 from a broker that only lost the producer's state; after acknowledged records were lost.
OUTCOMES = {
    "Java (default: idempotent)": ("goes on", "goes on after the sequence gap"),
    "kafka-python (default: idempotent)": ("`OutOfOrderSequenceNumberError` once",) * 2,
    "aiokafka, `enable_idempotence=True`": (
        "`UnknownProducerId` from then on",
        "`OutOfOrderSequenceNumber` from then on",
    ),
    "confluent-kafka, `enable.idempotence=true`": ("goes on", "`OUT_OF_ORDER_SEQUENCE_NUMBER` from then on"),
}
OK, REFUSED, OUT_OF_ORDER, UNKNOWN_PRODUCER_ID = 0, 44, 45, 59
IDEMPOTENT = [client for client in CLIENTS if client.idempotent and not client.ours]
BEFORE, AFTER = 5, 5
#: The proxy parses appends to `read-…` topics and relays all others.
_CONFIG = f"""
[topics."read-*"]
"fencepost.idempotence.level" = "required"
[topics."{FORGETFUL}*"]
"fencepost.idempotence.level" = "required"
"""
each_client = pytest.mark.parametrize("client", IDEMPOTENT, ids=lambda client: client.name.replace("`", ""))


forgetful = kafka_fixture(1, properties=SETTINGS)


proxy = proxy_fixture(of="forgetful", config=_CONFIG, unexpected=("crashed",))


def create(proxy: ProxyProcess, log: Log, prefix: str) -> str:
    topic = unique_topic(prefix)
    with Connection(proxy.bootstrap) as connection:
        assert connection.create_topic(topic) == (0, None)
    assert log.end(topic) == 0
    return topic


def send(producer: Sender, topic: str, numbers: range) -> list[Observed]:
    """Send one record at a time, each after the previous one's response."""
    return [producer.send(topic, f"{n}").get() for n in numbers]


def outcome(observed: list[Observed], all_healthy: str) -> str:
    first, *others = observed
    if first.error is None:
        assert all(each.error is None for each in others), observed
        return all_healthy
    continued = all(each.error is None for each in others)
    return f"`{first.error}` once" if continued else f"`{first.error}` from then on"


# --- expired producer state, current brokers --------------------------------------------------------------------------


def by_delete_records(log: Log, topic: str) -> None:
    delete_records(log, topic)


def by_retention(log: Log, topic: str) -> None:
    with log.connect(topic) as direct:
        assert direct.alter_topic(topic, {"retention.ms": "1", "segment.ms": "50"}) == (0, None)
        until(lambda: log_start(log, topic) == BEFORE, "the records to be deleted", seconds=90)
        assert direct.alter_topic(topic, {"retention.ms": "3600000"}) == (0, None)


Forgotten = dict[tuple[str, str], tuple[Client, str, Sender]]


@pytest.fixture(scope="module")
def forgotten(forgetful: KafkaCluster, proxy: ProxyProcess, java: JavaProducers) -> Iterator[Forgotten]:
    """Producers whose state has expired, on parsed and on relayed topics. All share one wait."""
    log, made = Log(forgetful.bootstrap), {}
    with ExitStack() as stack:
        for client in IDEMPOTENT:
            for prefix in ("read", "plain"):
                topic = create(proxy, log, prefix)
                producer = stack.enter_context(closing(client.open(proxy.bootstrap, java)))
                assert [each.offset for each in send(producer, topic, range(BEFORE))] == list(range(BEFORE))
                made[client.name, prefix] = client, topic, producer
        for _, topic, _ in made.values():
            until(lambda topic=topic: not producers(log, topic), "Kafka to forget", seconds=90)
        yield made
    gc.collect()


@pytest.mark.parametrize("prefix", ["read", "plain"])
@each_client
def test_a_producer_whose_state_has_expired_goes_on(
    client: Client, prefix: str, forgotten: Forgotten, forgetful: KafkaCluster
) -> None:
    _, topic, producer = forgotten[client.name, prefix]
    observed = send(producer, topic, range(BEFORE, BEFORE + AFTER))
    assert [each.offset for each in observed] == list(range(BEFORE, BEFORE + AFTER)), observed
    assert Log(forgetful.bootstrap).values(topic) == [b"%d" % n for n in range(BEFORE + AFTER)]


@pytest.mark.parametrize("lose", [by_delete_records, by_retention], ids=["DeleteRecords", "retention"])
@each_client
def test_a_producer_whose_records_are_deleted_goes_on(
    client: Client,
    lose: Callable[[Log, str], None],
    proxy: ProxyProcess,
    forgetful: KafkaCluster,
    java: JavaProducers,
) -> None:
    log = Log(forgetful.bootstrap)
    topic = create(proxy, log, "read")
    with closing(client.open(proxy.bootstrap, java)) as producer:
        assert [each.offset for each in send(producer, topic, range(BEFORE))] == list(range(BEFORE))
        lose(log, topic)
        observed = send(producer, topic, range(BEFORE, BEFORE + AFTER))
    assert [each.offset for each in observed] == list(range(BEFORE, BEFORE + AFTER)), observed
    found = [(each.base_offset, *each.values) for each in log.batches(topic, start=log_start(log, topic))]
    assert found == [(n, b"%d" % n) for n in range(BEFORE, BEFORE + AFTER)]
    gc.collect()


def test_every_answer_says_where_the_log_starts(proxy: ProxyProcess, forgetful: KafkaCluster) -> None:
    log = Log(forgetful.bootstrap)
    topic = create(proxy, log, "read")
    with Connection(proxy.bootstrap) as connection:
        producer = connection.init_producer_id()
        for sequence in range(3):
            records = batch(b"v", producer=producer._replace(sequence=sequence))
            assert connection.append(topic, records).log_start_offset == 0
        delete_records(log, topic)
    for version in (5, 7, 8, 9, 11):
        with Connection(proxy.bootstrap) as connection:  # not known to the proxy yet
            # The proxy read the log start a moment ago, and reads it again soon.
            refusal = until(
                lambda version=version: connection.append(topic, batch(b"v"), version=version),
                "a refusal that knows it",
                accept=lambda answer: answer.log_start_offset == 3,
            )
            assert refusal.error_code == REFUSED
            gap = connection.append(
                topic, batch(b"v", producer=producer._replace(sequence=9 + version)), version=version
            )
            assert (gap.error_code, gap.log_start_offset) == (UNKNOWN_PRODUCER_ID, 3)  # all its records are deleted


# --- expired producer state, a broker that still returns 45 -----------------------------------------------------------


@pytest.fixture(scope="module")
def old_fashioned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A fake broker and a proxy in front of it. No available broker that the proxy supports still returns 45: since
    2.5, brokers accept any first sequence."""
    topics = {f"{FORGETFUL}{n}": 1 for n in range(len(IDEMPOTENT))}
    with (
        FakeClusterProcess(topics=topics) as fake,
        ProxyProcess(fake.bootstrap, tmp_path_factory.mktemp("old-fashioned"), config=_CONFIG) as proxy,
    ):
        yield fake.bootstrap, proxy.bootstrap


@each_client
def test_harmless_error_45_lets_the_producer_continue(
    client: Client, old_fashioned: tuple[str, str], java: JavaProducers
) -> None:
    direct, proxied = old_fashioned
    topic = f"{FORGETFUL}{IDEMPOTENT.index(client)}"
    with closing(client.open(proxied, java)) as producer:
        observed = send(producer, topic, range(FORGETS_EVERY + AFTER))
    print([str(each) for each in observed])
    reported = [each.offset for each in observed if each.error is None]
    assert reported == list(range(len(reported)))
    assert Log(direct).end(topic) == len(reported)
    assert outcome(observed[FORGETS_EVERY:], "goes on") == OUTCOMES[client.name][0]
    gc.collect()


# --- lost records -----------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_records_lost_by_kafka_are_reported_lost(stage3: Stage3, java: JavaProducers) -> None:
    """An outdated replica becomes leader: acknowledged records are lost, and the log still starts at 0."""
    proxy = stage3.proxies[0]
    configs = {
        "fencepost.idempotence.level": "required",
        "unclean.leader.election.enable": "true",
        "min.insync.replicas": "1",
    }
    names = [client.name for client in IDEMPOTENT]
    topics = {name: stage3.create(unique_topic("lossy"), on=(1, 2), configs=configs) for name in [*names, "raw"]}
    producer = Producer(-1)
    sequences = iter(range(100))

    def append_raw() -> int:
        nonlocal producer
        with Connection(leaders_listener(proxy, topics["raw"])) as connection:
            if producer.id < 0:
                producer = connection.init_producer_id()
            records = batch(b"v", producer=producer._replace(sequence=next(sequences)))
            return connection.append(topics["raw"], records).error_code

    with ExitStack() as stack:
        senders = {each.name: stack.enter_context(closing(each.open(proxy.bootstrap, java))) for each in IDEMPOTENT}
        for name, sender in senders.items():
            assert [each.offset for each in send(sender, topics[name], range(3))] == [0, 1, 2]
        assert [append_raw() for _ in range(3)] == [OK] * 3
        stage3.kafka.kill(2)
        for topic in topics.values():
            stage3.until(lambda topic=topic: stage3.isr(topic) == {1}, "broker 1 to be alone")
        for name, sender in senders.items():
            assert [each.offset for each in send(sender, topics[name], range(3, 6))] == [3, 4, 5]
        assert [append_raw() for _ in range(3)] == [OK] * 3
        stage3.kafka.kill(1)
        stage3.kafka.restart(2, wait=False)
        for topic in topics.values():
            stage3.await_leader(topic, is_now=2)
            assert stage3.log.end(topic) == 3
        found = until(append_raw, "an answer of the new leader", accept=lambda code: code not in (3, 6, 7))
        assert found == OUT_OF_ORDER
        outcomes = {}
        for client in IDEMPOTENT:
            observed = send(senders[client.name], topics[client.name], range(6, 8))
            print(client.name, [str(each) for each in observed])
            outcomes[client.name] = outcome(observed, "goes on after the sequence gap")
    print(outcomes)
    for client in IDEMPOTENT:
        assert outcomes[client.name] == OUTCOMES[client.name][1]
    gc.collect()
