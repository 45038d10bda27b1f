"""Third-party software through the proxy: Kafka Connect, MirrorMaker 2, and the calls of graphical admin tools.

docs/other-software.md describes the runs and their results. Spark has separate tests.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import kafka as kafka_python
import pytest

from fencepost.kafka_python import ConditionalProducer
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.tools import compile_java, run_java
from fencepost_proxy.topics.virtual_configs import VIRTUAL_CONFIGS
from tests.integration.test_equivalence import _addresses
from tests.kit.waiting import until
from tests.support import connect
from tests.support.kafka import kafka_version, running_kafka, unique_topic
from tests.support.ports import free_port
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log, batch
from tests.support.tools import at_both

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(900)]

#: A worker starts in half a minute on an idle machine.
PATIENCE_SECONDS = 240.0
LINES = [f"line {number}" for number in range(1000)]
_SCREENS = Path(__file__).parents[1] / "java" / "AdminScreens.java"
_COPY_HEADERS = Path(__file__).parents[1] / "java" / "CopyHeaders.java"
#: All topics check expected offsets.
_CHECKED = '[topics."*"]\n"fencepost.check.expected.offsets" = "true"\n'


# --- admin tools ------------------------------------------------------------------------------------------------------


def screens(bootstrap: str, directory: Path) -> list[str]:
    """One line per call, with names and addresses normalized."""
    prefix = unique_topic("screens")
    (file := directory / f"{prefix}.properties").write_text(f"bootstrap.servers={bootstrap}\n")
    classes = compile_java([_SCREENS], version=kafka_version())
    printed = run_java(
        "AdminScreens", [str(file), prefix], classes=classes, version=kafka_version(), timeout_seconds=PATIENCE_SECONDS
    ).output.replace(prefix, "x")
    for address, name in _addresses(bootstrap).items():
        printed = printed.replace(address, name)
    return printed.splitlines()


def test_admin_tools_see_the_same_through_proxy(
    kafka: KafkaCluster, proxied: ProxyProcess, tmp_path: Path, say: Callable[[str], None]
) -> None:
    """Each call of Java's Admin client that such tools use for their screens, at Kafka and through the proxy."""
    direct, observed = at_both(lambda bootstrap: screens(bootstrap, tmp_path), kafka.bootstrap, proxied.bootstrap)
    say(f"{len(observed)} lines, of {len([line for line in observed if not line.startswith('  ')])} calls")
    # Kafka does not report virtual configs.
    assert [line for line in observed if line.strip().partition("=")[0] not in VIRTUAL_CONFIGS] == direct
    assert len(direct) > 50


# --- Kafka Connect ----------------------------------------------------------------------------------------------------


def test_connect_copies_a_file_through_a_topic(kafka: KafkaCluster, proxied: ProxyProcess, tmp_path: Path) -> None:
    """connect-standalone with a file source and a file sink. More lines are written to the file while it runs."""
    topic = _created(proxied.bootstrap, "connect")
    (source := tmp_path / "source.txt").write_text("".join(f"{line}\n" for line in LINES))
    sink = tmp_path / "sink.txt"
    settings = connect.worker(
        proxied.bootstrap, free_port(), {"offset.storage.file.filename": str(tmp_path / "offsets")}
    )
    given = [settings, connect.file_source(source, topic), connect.file_sink(sink, topic)]

    with connect.running(connect.STANDALONE, tmp_path, given):
        _until_there(sink, LINES, tmp_path)
        with source.open("a") as file:
            file.write("one more\n")
        _until_there(sink, [*LINES, "one more"], tmp_path)

    assert Log(kafka.bootstrap).values(topic) == [line.encode() for line in [*LINES, "one more"]]


@pytest.mark.soak
def test_distributed_connect_is_exactly_once_across_a_restart(
    kafka: KafkaCluster, proxied: ProxyProcess, tmp_path: Path
) -> None:
    """The worker keeps its state in topics and its source's offsets in transactions. It is killed half-way."""
    topic = _created(proxied.bootstrap, "connect-once")
    (source := tmp_path / "source.txt").write_text("".join(f"{line}\n" for line in LINES[:500]))
    sink = tmp_path / "sink.txt"
    port = free_port()
    state = {f"{what}.storage.topic": unique_topic(f"connect-{what}") for what in ("config", "offset", "status")}
    replicas = {f"{what}.storage.replication.factor": "1" for what in ("config", "offset", "status")}
    more = {
        "group.id": unique_topic("connect"),
        "exactly.once.source.support": "enabled",
        "connector.client.config.override.policy": "All",
        **state,
        **replicas,
    }
    settings = [connect.worker(proxied.bootstrap, port, more)]

    with connect.running(connect.DISTRIBUTED, tmp_path, settings) as worker:
        for each in (connect.file_source(source, topic), connect.file_sink(sink, topic)):
            until(lambda each=each: _post(port, each), "the worker to take it", seconds=PATIENCE_SECONDS)  # type: ignore[misc]
        _until_there(sink, LINES[:500], tmp_path)
        worker.signal(signal.SIGKILL)
        assert worker.wait(PATIENCE_SECONDS)
    with source.open("a") as file:
        file.write("".join(f"{line}\n" for line in LINES[500:]))
    with connect.running(connect.DISTRIBUTED, tmp_path, settings):
        # A sink reports its progress periodically. After a kill it writes some records again.
        _until(lambda: {*_lines(sink)} == {*LINES}, "the rest of the file in the sink", tmp_path)

    log = Log(kafka.bootstrap)
    assert log.values(topic) == [line.encode() for line in LINES]
    assert all(each.is_transactional for each in log.batches(topic))


# --- copied headers ---------------------------------------------------------------------------------------------------


def test_copies_of_conditional_records_are_appended_to_checked_topics(kafka: KafkaCluster, tmp_path: Path) -> None:
    """By Kafka Streams, Connect's dead-letter queue and a dead-letter route as Spring's, with their defaults."""
    (connect_directory := tmp_path / "connect").mkdir()
    (streams_directory := tmp_path / "streams").mkdir()
    values = [line.encode() for line in LINES[:15]]
    with ProxyProcess(kafka.bootstrap, tmp_path, config=_CHECKED) as proxy, ThreadPoolExecutor(1) as pool:
        source, mapped, letters, queue = (_created(proxy.bootstrap, f"copy-{each}") for each in range(4))
        with Connection(proxy.bootstrap) as client:
            for topic in (mapped, letters, queue):  # so that the copies get other offsets
                until(lambda topic=topic: client.append(topic, batch(b"earlier")).error_code == 0, "an append")  # type: ignore[misc]
        _write_conditionally(proxy.bootstrap, source, values)
        settings = connect.worker(
            proxy.bootstrap, free_port(), {"offset.storage.file.filename": str(tmp_path / "offsets")}
        )
        sink = connect.file_sink(tmp_path / "sink.txt", source) | {
            "value.converter": "org.apache.kafka.connect.json.JsonConverter",  # no value is JSON
            "errors.tolerance": "all",
            "errors.deadletterqueue.topic.name": queue,
            "errors.deadletterqueue.topic.replication.factor": "1",
            "errors.deadletterqueue.context.headers.enable": "true",
        }
        arguments = [proxy.bootstrap, source, mapped, letters, str(len(values)), str(streams_directory)]
        copying = pool.submit(
            lambda: run_java(
                "CopyHeaders",
                arguments,
                classes=compile_java([_COPY_HEADERS]),
                timeout_seconds=PATIENCE_SECONDS,
            )
        )
        with connect.running(connect.STANDALONE, connect_directory, [settings, sink]):
            log = Log(kafka.bootstrap)
            _until(lambda: log.end(queue) > len(values), "the dead letters of Connect", connect_directory)
            assert "streams RUNNING" in copying.result().output
        for topic in (mapped, letters, queue):
            assert log.values(topic) == [b"earlier", *values], topic
            assert f"partition={topic}-0 made_for={source}/0" in proxy.log


def _write_conditionally(bootstrap: str, topic: str, values: list[bytes]) -> None:
    with ConditionalProducer(bootstrap_servers=bootstrap) as producer:
        sent = [producer.send(topic, value, partition=0, expected_offset=at) for at, value in enumerate(values)]
        for each in sent:
            each.get(PATIENCE_SECONDS)


# --- MirrorMaker 2 ----------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["Default", "Identity"])
def test_mirror_maker_copies_records_and_group_offsets(
    kafka: KafkaCluster, proxied: ProxyProcess, tmp_path: Path, policy: str
) -> None:
    """From one cluster to another, each with a proxy in front. The copies get other offsets than the records state. The
    copy of another checked topic goes to plain Kafka."""
    topic, group = unique_topic("mirrored"), unique_topic("reader")
    checked = _checked(proxied.bootstrap)
    with Connection(proxied.bootstrap) as admin:
        assert admin.create_topic(topic, configs={"fencepost.check.expected.offsets": "true"}) == (0, None)
    values = [line.encode() for line in LINES]
    _write_conditionally(proxied.bootstrap, topic, values)
    _commit(proxied.bootstrap, group, topic, len(values))
    with closing(kafka_python.KafkaAdminClient(bootstrap_servers=proxied.bootstrap)) as admin_client:
        admin_client.delete_records({kafka_python.TopicPartition(topic, 0): 5})
    del values[:5]
    with running_kafka() as far, ProxyProcess(far.bootstrap, tmp_path, config=_CHECKED) as far_proxy:
        settings = {
            "clusters": "near, far, checked, plain",
            "emit.heartbeats.enabled": "false",  # else it starts a worker for each pair
            "near.bootstrap.servers": proxied.bootstrap,
            "checked.bootstrap.servers": proxied.bootstrap,
            "plain.bootstrap.servers": far.bootstrap,
            "checked->plain.enabled": "true",
            "checked->plain.topics": checked,
            "checked->plain.groups": "none",
            "far.bootstrap.servers": far_proxy.bootstrap,
            "near->far.enabled": "true",
            "near->far.topics": topic,
            "near->far.groups": group,
            "near->far.sync.group.offsets.enabled": "true",
            "near->far.offset.lag.max": "0",
            "offset.flush.interval.ms": "500",  # it delays offsets of a slow target until then
            "replication.policy.class": f"org.apache.kafka.connect.mirror.{policy}ReplicationPolicy",
            **{f"{each}.replication.factor": "1" for each in _MIRROR_MAKERS_TOPICS},
            **{f"{each}.interval.seconds": "1" for each in _MIRROR_MAKERS_INTERVALS},
            "replication.factor": "1",
        }
        copy, plain_copy = (f"near.{topic}", f"checked.{checked}") if policy == "Default" else (topic, checked)
        with connect.running(connect.MIRROR_MAKER, tmp_path, [settings]):
            log = Log(far.bootstrap)
            _until(lambda: copy in _topics(far.bootstrap), f"{copy} in the other cluster", tmp_path)
            _until(lambda: log.end(copy) >= len(values), f"{len(values)} records in {copy}", tmp_path)
            _until(lambda: _committed(far.bootstrap, group, copy) == len(values), f"the offset of {group}", tmp_path)
            _until(lambda: plain_copy in _topics(far.bootstrap), "the copy at plain Kafka", tmp_path)
            _until(lambda: log.end(plain_copy) >= 1, "its record", tmp_path)
            _set_retention(proxied.bootstrap, checked, "7200000")
            _until(lambda: _retention(far.bootstrap, plain_copy) == "7200000", "synced configs", tmp_path)
        # A synced default would reset a check of a checked copy.
        assert "fencepost." not in connect.log_of(tmp_path).read_text()
        assert log.values(copy) == values


_MIRROR_MAKERS_TOPICS = (
    "checkpoints.topic",
    "heartbeats.topic",
    "offset-syncs.topic",
    "offset.storage",
    "status.storage",
    "config.storage",
)
_MIRROR_MAKERS_INTERVALS = (
    "emit.checkpoints",
    "sync.group.offsets",
    "sync.topic.configs",
    "refresh.topics",
    "refresh.groups",
)


def _checked(bootstrap: str) -> str:
    """A topic with one record, whose checks plain Kafka does not know."""
    name = unique_topic("checked")
    configs = {"fencepost.check.expected.offsets": "required", "retention.ms": "3600000"}
    with Connection(bootstrap) as client:
        assert client.create_topic(name, configs=configs) == (0, None)
        until(lambda: client.append(name, batch(b"first", expected=0)).error_code == 0, "an append")
    return name


def _set_retention(bootstrap: str, topic: str, value: str) -> None:
    with Connection(bootstrap) as client:
        assert client.alter_topic(topic, {"retention.ms": value}) == (0, None)


def _retention(bootstrap: str, topic: str) -> str | None:
    with Connection(bootstrap) as client:
        return client.describe_topic(topic)["retention.ms"]


# --- shared helpers ---------------------------------------------------------------------------------------------------


def _created(bootstrap: str, prefix: str) -> str:
    name = unique_topic(prefix)
    with Connection(bootstrap) as admin:
        assert admin.create_topic(name) == (0, None)
    return name


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _until(there: Callable[[], object], what: str, directory: Path) -> None:
    try:
        until(there, what, seconds=PATIENCE_SECONDS)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{connect.log_of(directory).read_text()[-6000:]}") from None


def _until_there(file: Path, lines: list[str], directory: Path) -> None:
    _until(lambda: len(_lines(file)) >= len(lines), f"{len(lines)} lines in {file.name}", directory)
    assert _lines(file) == lines


def _post(port: int, connector: Mapping[str, str]) -> bool:
    """Whether a Connect worker has accepted the connector. A starting worker refuses it or is not reachable."""
    body = json.dumps({"name": connector["name"], "config": connector}).encode()
    request = Request(f"http://127.0.0.1:{port}/connectors", body, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return bool(answer.status == HTTPStatus.CREATED)
    except HTTPError as refused:
        with refused:
            return refused.code == HTTPStatus.CONFLICT and connector["name"] in refused.read().decode()
    except URLError:
        return False


def _consumer(bootstrap: str, group: str) -> kafka_python.KafkaConsumer:
    return kafka_python.KafkaConsumer(bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False)


def _commit(bootstrap: str, group: str, topic: str, offset: int) -> None:
    with closing(_consumer(bootstrap, group)) as consumer:
        partition = kafka_python.TopicPartition(topic, 0)
        consumer.assign([partition])
        consumer.commit({partition: kafka_python.OffsetAndMetadata(offset, "", -1)})


def _committed(bootstrap: str, group: str, topic: str) -> int | None:
    with closing(_consumer(bootstrap, group)) as consumer:
        found: int | None = consumer.committed(kafka_python.TopicPartition(topic, 0))
    return found


def _topics(bootstrap: str) -> set[str]:
    with Connection(bootstrap) as client:
        return {each.name for each in client.metadata().topics}
