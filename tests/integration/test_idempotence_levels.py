"""Levels of idempotence (KAFKA-5794) with a broker that supports no producer ids, and with clients that may not use
them.

These tests verify what docs/other-clients.md states about `fencepost.idempotence.level=safe`.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from tests.kit.waiting import until
from tests.support.clients import Producer, read_all
from tests.support.fixtures import proxy_fixture
from tests.support.kafka import unique_topic
from tests.support.old_kafka import OLD_FORMAT, OldKafka
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, batch
from tests.support.senders import CLIENTS, Client, JavaProducers, Observed

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.no_cover,
    # kafka-python leaves the socket of a failed connection attempt to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

#: Errors without the proxy: on a topic with message format 0.10, and for a client that gets no producer id.
WITHOUT_PROXY = {
    "Java (default: idempotent)": ("`UnsupportedForMessageFormatException`", "`ClusterAuthorizationException`"),
    "kafka-python (default: idempotent)": ("`UnsupportedForMessageFormatError`", "`KafkaError`"),
    "aiokafka, `enable_idempotence=True`": ("`UnsupportedForMessageFormatError`", "`ClusterAuthorizationFailedError`"),
    "confluent-kafka, `enable.idempotence=true`": ("`UNSUPPORTED_FOR_MESSAGE_FORMAT`", "`_PURGE_QUEUE`"),
}
NOT_PERMITTED = 31
IDEMPOTENT = [client for client in CLIENTS if client.idempotent and not client.ours]
COUNT = 30
_CONFIG = """
[topics."safe-*"]
"fencepost.idempotence.level" = "safe"
[topics."required-*"]
"fencepost.idempotence.level" = "required"
"""


@pytest.fixture(scope="module")
def old() -> Iterator[OldKafka]:
    with OldKafka() as kafka:
        yield kafka


proxy = proxy_fixture(of="old", config=_CONFIG, arguments=("--status", "127.0.0.1:0"), unexpected=("crashed",))


def create(old: OldKafka, prefix: str, *, old_format: bool) -> str:
    topic = unique_topic(prefix)
    with Connection(old.bootstrap) as connection:
        assert connection.create_topic(topic, configs=OLD_FORMAT if old_format else {}) == (0, None)
        until(lambda: connection.produce({topic: {0: b""}}, version=8)[topic, 0].error_code != 3, "the topic's leader")
    return topic


def downgraded(proxy: ProxyProcess, why: str) -> int:
    return int(proxy.metrics().get(f'fencepost_idempotence_downgraded_batches_total{{reason="{why}"}}', 0))


def outcome(client: Client, bootstrap: str, java: JavaProducers, topic: str, **more: str) -> Sequence[Observed]:
    """Outcomes of `COUNT` concurrent sends, one record per batch."""
    with closing(client.open(bootstrap, java, **client.one_record_a_batch(), **more)) as producer:
        sendings = [producer.send(topic, f"{n}") for n in range(COUNT)]
        return [sending.get() for sending in sendings]


def refused(client: Client, bootstrap: str, java: JavaProducers, topic: str, **more: str) -> Observed:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # from a producer that failed to start
        try:
            with closing(client.open(bootstrap, java, **more)) as producer:
                return producer.send(topic, "x").get()
        except Exception as error:
            return Observed(error=type(error).__name__, shown=str(error))
        finally:
            gc.collect()


def shown(observed: Observed) -> str:
    return f"`{observed.error}`" if observed.error is not None else "appended"


@pytest.mark.parametrize("client", IDEMPOTENT, ids=lambda client: client.name.replace("`", ""))
def test_what_each_idempotent_producer_makes_of_it(
    client: Client, old: OldKafka, proxy: ProxyProcess, java: JavaProducers
) -> None:
    for expected, old_format, more, why in zip(
        WITHOUT_PROXY[client.name],
        (True, False),
        ({}, {"client_id": "not-idempotent"}),
        ("message_format", "not_permitted"),
        strict=True,
    ):
        topic = create(old, "safe", old_format=old_format)
        error = shown(refused(client, old.bootstrap, java, topic, **more))
        if client.library == "kafka-python" and error == "`ClusterAuthorizationFailedError`":
            # A subclass of KafkaError. A race in the client decides whether the constructor or the send raises it.
            error = "`KafkaError`"
        assert error == expected
        assert read_all(old.bootstrap, topic) == []
        before = downgraded(proxy, why)
        observed = outcome(client, proxy.bootstrap, java, topic, **more)
        # All records are in the log once and in order, although Kafka deduplicates none of them.
        assert [each.offset for each in observed] == list(range(COUNT)), observed
        assert read_all(old.bootstrap, topic) == [(n, b"%d" % n) for n in range(COUNT)]
        assert downgraded(proxy, why) > before
        reported = [line for line in proxy.log.splitlines() if "idempotence dropped" in line and topic in line]
        assert len(reported) == 1, reported
    gc.collect()


def test_fabricated_producer_id_grants_no_access(old: OldKafka, proxy: ProxyProcess) -> None:
    """On parsed topics that are not `safe`, the proxy returns Kafka's error. On relayed topics, Kafka decides."""
    safe, required, plain = (create(old, prefix, old_format=False) for prefix in ("safe", "required", "plain"))
    with Connection(proxy.bootstrap) as connection:
        connection.client_id = "not-idempotent"
        made_up = connection.init_producer_id()
        assert made_up.id >= 1 << 62
        assert connection.init_producer_id().id != made_up.id
        records = batch(b"v", producer=made_up)
        assert connection.append(safe, records).error_code == 0
        refusal = connection.append(required, records)
        assert (refusal.error_code, (refusal.message or "").split()[0]) == (NOT_PERMITTED, "IDEMPOTENCE_NOT_PERMITTED")
        assert connection.append(plain, records) == connection.append(plain, records)._replace(log_append_time_ms=-1)
    with Connection(old.bootstrap) as direct:
        # Kafka itself accepts such an id like any other.
        direct.client_id = "not-idempotent"
        assert direct.append(plain, batch(b"w", producer=made_up._replace(id=made_up.id ^ 1))).error_code == 0


@pytest.mark.parametrize("library", ["kafka-python", "aiokafka", "confluent-kafka"])
def test_client_library_requests_safe_idempotence(library: str, old: OldKafka, proxy: ProxyProcess) -> None:
    topic = create(old, "safe", old_format=True)
    with closing(Producer(library, proxy.bootstrap, idempotence="safe")) as made:
        sent = [made.send(topic, b"%d" % n, partition=0) for n in range(COUNT)]
        made.resolve()
        assert [each.get() for each in sent] == list(range(COUNT))
    assert read_all(old.bootstrap, topic) == [(n, b"%d" % n) for n in range(COUNT)]
