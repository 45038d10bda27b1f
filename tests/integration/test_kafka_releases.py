"""The API versions that the Kafka under test reports match docs/kafka-releases.md. APIs and versions that the proxy
does not know change nothing for clients.

`python -m tests.releases` runs a longer scenario with each release and prints the page's tables.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.jars import RELEASES
from fencepost_proxy.types import Address
from fencepost_proxy.wire.apis import APIS, METADATA, PRODUCE
from tests.kit.waiting import until
from tests.pages import schemas
from tests.pages.schemas import SCHEMAS
from tests.releases import page, story
from tests.releases.story import Front, Release
from tests.support.future_broker import NEW_APIS, NEWER_BY, FutureBroker
from tests.support.kafka import kafka_version, running_kafka, unique_topic
from tests.support.proxy import CHECKED_WITH_LONG_LEASE, ProxyProcess
from tests.support.raw import Connection, Log, batch
from tests.support.senders import CLIENTS, JavaProducers, create_topic

pytestmark = [pytest.mark.kafka]

FETCH, API_VERSIONS = 1, 18


@pytest.mark.brokers
def test_releases_page_matches_reported_versions(kafka: KafkaCluster, proxied: ProxyProcess) -> None:
    direct, reported = story.api_versions(kafka.bootstrap), story.api_versions(proxied.bootstrap)
    release = Release(kafka_version(), direct, reported)
    documented = page.documented(kafka_version())
    assert documented == {key: page.cell(release, key) for key in {*direct, *reported}}


def test_releases_page_covers_every_startable_release() -> None:
    text = page.PAGE.read_text()
    assert [each for each in RELEASES if not re.search(rf"\| {re.escape(each)} \|", text)] == []


# --- a future Kafka release -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker() -> Iterator[FutureBroker]:
    with FutureBroker() as broker:
        yield broker


@pytest.fixture(scope="module")
def of_today(broker: FutureBroker) -> Iterator[KafkaCluster]:
    """The real broker that the fake one forwards to."""
    advertised = {"FUTURE": Address.parse(broker.address)}
    with running_kafka(listeners={"FUTURE": "PLAINTEXT"}, advertised=advertised) as kafka:
        broker.targets = (kafka.address(1, "FUTURE"),)
        yield kafka


@pytest.fixture(scope="module")
def future(broker: FutureBroker, of_today: KafkaCluster, proxy_directory: Path) -> Iterator[Front]:
    with ProxyProcess(broker.address, proxy_directory, config=CHECKED_WITH_LONG_LEASE) as proxy:
        yield Front(of_today, proxy, proxy_directory)


def test_future_broker_does_not_change_advertised_versions(
    future: Front, broker: FutureBroker, of_today: KafkaCluster, tmp_path: Path
) -> None:
    known = story.api_versions(of_today.bootstrap)
    promised = story.api_versions(broker.address)
    assert promised == {key: (low, high + NEWER_BY) for key, (low, high) in known.items()} | NEW_APIS

    with ProxyProcess(of_today.bootstrap, tmp_path) as proxy_of_today:
        for version in range(_API_VERSIONS_MAX + 1):
            reported = []
            for address in (proxy_of_today.bootstrap, future.proxy.bootstrap):
                with Connection(address) as client:
                    reported.append(client.api_versions(version))
            # The result may only add APIs that this release lacks, up to the versions that the proxy supports.
            assert reported[1] == {key: _up_to_the_table(key, known[key]) for key in reported[0]}, version


#: Of kafka-python. The response of v5 is that of v4.
_API_VERSIONS_MAX = 4


def _up_to_the_table(key: int, known: tuple[int, int]) -> tuple[int, int]:
    low, high = known
    return max(low, APIS[key].min_version), min(high + NEWER_BY, APIS[key].max_version)


@pytest.mark.parametrize("library", ["kafka-python", "aiokafka", "confluent-kafka", "java"])
def test_clients_append_as_they_did(library: str, future: Front) -> None:
    """An append is accepted at its expected offset and refused elsewhere."""
    client = next(each for each in CLIENTS if each.library == library)
    with JavaProducers() as java:
        story.append_both_ways(client, future, java)


def test_unknown_request_closes_only_its_connection(future: Front, broker: FutureBroker) -> None:
    """Clients send APIs and versions that only the broker reports."""
    topic = create_topic(future.proxy.bootstrap, unique_topic("required"))
    with Connection(future.proxy.bootstrap) as client:
        assert client.append(topic, batch(b"before", expected=0)).error_code == 0

        for key, version in [
            *((key, low) for key, (low, _) in NEW_APIS.items()),
            (FETCH, 20),
            (METADATA, 16),
            (PRODUCE, 16),
        ]:
            with Connection(future.proxy.bootstrap) as stranger:
                header = struct.pack(">hhih", key, version, 5, -1) + bytes(3)
                stranger.socket.sendall(struct.pack(">i", len(header)) + header)
                assert stranger.is_closed(), (key, version)

        assert client.append(topic, batch(b"after", expected=1)).error_code == 0
    assert Log(future.kafka.bootstrap).values(topic) == [b"before", b"after"]
    until(lambda: "api key 95 v0 is not an API that this proxy serves" in future.proxy.log, "the reason in the log")
    assert not {key for key, _ in broker.queried} & NEW_APIS.keys()


def test_broker_receives_only_requests_it_knows(future: Front, broker: FutureBroker) -> None:
    """Requests of clients, and of the proxy itself, which uses more APIs than it relays."""
    with Connection(future.proxy.bootstrap) as client:
        client.metadata("none")
    known = story.api_versions(future.kafka.bootstrap)
    assert {key for key, _ in broker.queried} >= {PRODUCE, METADATA, API_VERSIONS}
    assert {(key, version) for key, version in broker.queried if not _is_in(known, key, version)} == set()


def _is_in(known: story.Versions, key: int, version: int) -> bool:
    return key in known and known[key][0] <= version <= known[key][1]


def test_schemas_are_those_of_the_release() -> None:
    assert SCHEMAS.read_text("utf-8") == schemas.page(), "run: python -m tests.pages.schemas"
