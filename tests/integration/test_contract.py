"""The contract (docs/contract.md) beyond appends (`tests/contract`): configs, the state topic.

The tests use raw sockets on a real Kafka, and read appended records from Kafka directly.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest
from kafka.protocol.producer import ProduceRequest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.proxy import ProxyProcess
from tests.support.raw import (
    Answer,
    Closed,
    Connection,
    Log,
    Record,
    batch,
    fetch,
    produce_request,
)

pytestmark = [pytest.mark.kafka, pytest.mark.brokers]

PRODUCE = 0
#: The first Produce version that names topics by id.
BY_TOPIC_ID = 13

OK = 0
UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER = 3, 6
TOPIC_AUTHORIZATION_FAILED, INVALID_CONFIG, POLICY_VIOLATION = 29, 40, 44
CHECK = "fencepost.check.expected.offsets"
SOURCE = "fencepost.expected.offsets.source"
STATE_TOPIC = "__fencepost_state"
#: The value of records that must not enter the state topic.
FORGED = b'{"forged": true}'

NewTopic = Callable[..., str]


@pytest.fixture
def new_topic(client: Connection, log: Log, unique_topic: Callable[..., str]) -> NewTopic:
    """`new_topic("required")`: created through the proxy, checked by the pattern that matches its prefix."""

    def create(prefix: str, *, partitions: int = 1, length: int = 0, **configs: str) -> str:
        name = unique_topic(prefix)
        kafka_names = {key.replace("_", "."): value for key, value in configs.items()}
        assert client.create_topic(name, partitions=partitions, configs=kafka_names) == (OK, None)
        for partition in range(partitions):
            assert log.end(name, partition) == 0
        if length:
            assert client.append(name, batch(*[b"old"] * length, expected=0)).error_code == OK
        return name

    return create


def assert_refused(answer: Answer, code: int, message: str, *, base_offset: int = -1) -> None:
    """`message` is a prefix of the response's message."""
    assert (answer.error_code, answer.base_offset) == (code, base_offset), answer
    assert answer.message is not None
    assert answer.message.startswith(message), answer
    assert answer.record_errors == ()


# --- several requests in flight ---------------------------------------------------------------------------------------


def _request(topic: str, records: bytes) -> Any:
    return produce_request({topic: {0: records}})


def test_answers_keep_the_order_of_requests(client: Connection, log: Log, new_topic: NewTopic) -> None:
    required, plain = new_topic("required"), new_topic("plain")
    newest = client.api_versions()[PRODUCE][1]
    expected_kinds = []
    frames = b""
    for i in range(12):
        requests: list[tuple[Any, int]] = [
            (_request(required, batch(b"r%d" % i, expected=i if i % 3 else 99)), 9),
            (_request(plain, batch(b"p%d" % i)), newest),
            (_request(required, batch(b"late", expected=50)), 3),
            (ApiVersionsRequest(client_software_name="raw", client_software_version="1"), 3),
            (MetadataRequest(topics=None, allow_auto_topic_creation=False), 9),
            (fetch(plain, wait_ms=1, bytes_min=0, bytes_max=1000), 11),
        ]
        for request, version in requests:
            correlation_id, frame = client.frame(request, version)
            frames += frame
            expected_kinds.append((correlation_id, type(request), version))
    client.socket.sendall(frames)
    appended = 0
    for correlation_id, kind, version in expected_kinds:
        got, answer = client.receive(kind, version)
        assert got == correlation_id
        if kind is ProduceRequest and answer.responses[0].name == plain:
            # A proxy that paused for longer than its lease responds NOT_LEADER until it knows the checks.
            code = answer.responses[0].partition_responses[0].error_code
            assert code in (OK, NOT_LEADER)
            appended += code == OK
    assert log.end(plain) == appended


# --- warnings ---------------------------------------------------------------------------------------------------------


def test_topic_checked_by_pattern_logs_replication_warning(
    proxy: ProxyProcess, client: Connection, new_topic: NewTopic
) -> None:
    """One broker means one replica. The warning is logged at first use, since the file may name missing topics."""
    topic = new_topic("checked")
    until(lambda: client.append(topic, batch(b"a")).error_code == OK, "a leader of the new topic")
    until(
        lambda: [line for line in proxy.log.splitlines() if topic in line and "has 1 replica(s)" in line],
        "a warning",
        seconds=60,
    )


# --- changes of the check ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("incremental", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_the_check_is_changed_while_clients_write(
    incremental: bool, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    topic = new_topic("plain")

    def set_check(value: str) -> None:
        assert client.alter_topic(topic, {CHECK: value}, incremental=incremental) == (OK, None)
        assert client.describe_topic(topic)[CHECK] == value

    assert client.append(topic, batch(b"unchecked", expected=5)).base_offset == 0
    set_check("true")
    assert_refused(client.append(topic, batch(b"x", expected=5)), POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=1)
    assert client.append(topic, batch(b"checked")).base_offset == 1
    assert client.append(topic, batch(b"checked", expected=2)).base_offset == 2
    set_check("required")
    assert_refused(client.append(topic, batch(b"x")), POLICY_VIOLATION, "EXPECTATION_REQUIRED")
    assert client.append(topic, batch(b"required", expected=3)).base_offset == 3
    set_check("false")
    assert client.append(topic, batch(b"unchecked", expected=5)).base_offset == 4
    set_check("required")
    assert_refused(client.append(topic, batch(b"x", expected=4)), POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=5)
    assert client.append(topic, batch(b"required", expected=5)).base_offset == 5
    assert log.end(topic) == 6


@pytest.mark.parametrize("by", ["the proxy", "Kafka itself"])
def test_recreated_topic_starts_at_offset_zero(by: str, client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic("required", length=3)
    old_id = client.metadata(topic).topics[0].topic_id
    with log.connect(topic) as direct:
        if by == "Kafka itself" and direct.api_versions()[PRODUCE][1] < BY_TOPIC_ID:
            pytest.skip("this Kafka takes batches by topic name alone: such an append is reported as a violation")
        admin = client if by == "the proxy" else direct
        assert admin.delete_topic(topic) == OK
        until(lambda: direct.metadata(topic).topics[0].error_code == UNKNOWN_TOPIC_OR_PARTITION, "the deletion")
        until(lambda: admin.create_topic(topic)[0] == OK, "the creation")
        until(lambda: direct.metadata(topic).topics[0].topic_id not in (old_id, None), "the new topic")
    assert log.end(topic) == 0

    def final(records: bytes) -> Answer:
        """Retry while the proxy is uncertain. The first final response must be right."""

        def answer() -> Answer | None:
            last = client.append(topic, records)
            return None if last.error_code in (UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER) else last

        answered: Answer = until(answer, "an answer that is not retriable")
        return answered

    assert_refused(final(batch(b"x", expected=3)), POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=0)
    assert final(batch(b"new", expected=0))[:2] == (OK, 0)
    assert final(batch(b"newer", expected=1))[:2] == (OK, 1)
    assert log.values(topic) == [b"new", b"newer"]


# --- virtual configs --------------------------------------------------------------------------------------------------


def test_a_config_given_at_creation(client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic(
        "plain", check_expected_offsets="required", expected_offsets_source="base", retention_ms="7200000"
    )
    shown = client.describe_topic(topic)
    assert (shown[CHECK], shown[SOURCE], shown["retention.ms"]) == ("required", "base", "7200000")
    assert client.describe_topic(topic, keys=[CHECK]) == {CHECK: "required"}
    assert client.append(topic, batch(b"a", base_offset=0)).base_offset == 0
    assert client.append(topic, batch(b"b", base_offset=0)).error_code == POLICY_VIOLATION
    with log.connect(topic) as direct:
        assert CHECK not in direct.describe_topic(topic)


def test_topic_shows_default_and_file_configs(client: Connection, new_topic: NewTopic) -> None:
    assert client.describe_topic(new_topic("plain"), keys=[CHECK, SOURCE]) == {CHECK: "false", SOURCE: "header"}
    assert client.describe_topic(new_topic("required"), keys=[CHECK]) == {CHECK: "required"}
    assert client.describe_topic(new_topic("base"), keys=[SOURCE]) == {SOURCE: "base"}


@pytest.mark.parametrize(("name", "value"), [(CHECK, "maybe"), (CHECK, ""), (SOURCE, "pigeon")])
def test_invalid_config_value_is_refused_with_its_reason(
    name: str, value: str, client: Connection, new_topic: NewTopic, unique_topic: Callable[..., str]
) -> None:
    topic = new_topic("plain")
    allowed = "false, true or required" if name == CHECK else "header or base"
    for incremental in (True, False):
        code, message = client.alter_topic(topic, {name: value, "retention.ms": "7200000"}, incremental=incremental)
        assert code == INVALID_CONFIG
        assert message == f"Invalid value '{value}' for configuration {name}: it must be {allowed}"
    never = unique_topic("plain")
    assert client.create_topic(never, configs={name: value})[0] == INVALID_CONFIG
    assert client.metadata(never).topics[0].error_code == UNKNOWN_TOPIC_OR_PARTITION
    assert client.describe_topic(topic)["retention.ms"] != "7200000"


@pytest.mark.parametrize("incremental", [True, False])
def test_validate_only_changes_nothing(incremental: bool, client: Connection, new_topic: NewTopic) -> None:
    topic = new_topic("plain")
    alter = client.alter_topic
    assert alter(topic, {CHECK: "required"}, incremental=incremental, validate_only=True) == (OK, None)
    assert alter(topic, {CHECK: "maybe"}, incremental=incremental, validate_only=True)[0] == INVALID_CONFIG
    assert client.describe_topic(topic)[CHECK] == "false"
    assert client.append(topic, batch(b"x")).error_code == OK


def test_a_config_is_taken_back(client: Connection, new_topic: NewTopic) -> None:
    """Deletion in the incremental API restores the file's value. Omission in the legacy API changes nothing."""
    topic = new_topic("required")
    assert client.alter_topic(topic, {CHECK: "true"}) == (OK, None)
    assert client.describe_topic(topic)[CHECK] == "true"
    assert client.alter_topic(topic, {CHECK: None}) == (OK, None)
    assert client.describe_topic(topic)[CHECK] == "required"
    assert client.alter_topic(topic, {CHECK: "false"}) == (OK, None)
    assert client.alter_topic(topic, {"retention.ms": "7200000"}, incremental=False) == (OK, None)
    assert client.describe_topic(topic)[CHECK] == "false"


def test_kafka_config_errors_are_relayed_and_nothing_stored(client: Connection, new_topic: NewTopic) -> None:
    topic = new_topic("plain")
    code, _ = client.alter_topic(topic, {CHECK: "required", "retention.ms": "soon"})
    assert code == INVALID_CONFIG
    assert client.describe_topic(topic)[CHECK] == "false"
    assert client.alter_topic("no-such-topic", {CHECK: "required"})[0] == UNKNOWN_TOPIC_OR_PARTITION


def test_config_survives_restart_and_ends_with_its_topic(
    kafka: KafkaCluster, proxy: ProxyProcess, log: Log, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = unique_topic("plain")
    with ProxyProcess(kafka.bootstrap, tmp_path, config="config_lease_seconds = 1.0") as other:
        with Connection(other.bootstrap) as client:
            assert client.create_topic(topic, configs={CHECK: "required"}) == (OK, None)
        other.kill()
        other.restart()
        for address in (other.bootstrap, proxy.bootstrap):
            with Connection(address) as client:
                assert client.describe_topic(topic)[CHECK] == "required"
                assert client.append(topic, batch(b"x")).error_code == POLICY_VIOLATION
        with Connection(other.bootstrap) as client:
            assert client.delete_topic(topic) == OK
            until(lambda: client.metadata(topic).topics[0].error_code == UNKNOWN_TOPIC_OR_PARTITION, "the deletion")
            until(lambda: client.create_topic(topic)[0] == OK, "the creation")
            assert log.end(topic) == 0
            assert client.describe_topic(topic)[CHECK] == "false"
            assert client.append(topic, batch(b"x")).error_code == OK


def test_recreated_topic_is_checked_by_every_instance(
    kafka: KafkaCluster, log: Log, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    """The other instance has appended to the deleted topic, so that it knows the old topic id."""
    topic, lease = unique_topic("plain"), "config_lease_seconds = 1.0"
    with (
        ProxyProcess(kafka.bootstrap, tmp_path, config=lease) as one,
        ProxyProcess(kafka.bootstrap, tmp_path, config=lease) as other,
        Connection(one.bootstrap) as admin,
        Connection(other.bootstrap) as client,
    ):
        assert admin.create_topic(topic, configs={CHECK: "required"}) == (OK, None)
        assert client.append(topic, batch(b"x", expected=0)).error_code == OK
        assert admin.delete_topic(topic) == OK
        until(lambda: admin.metadata(topic).topics[0].error_code == UNKNOWN_TOPIC_OR_PARTITION, "the deletion")
        until(lambda: admin.create_topic(topic, configs={CHECK: "required"})[0] == OK, "the creation")

        assert client.append(topic, batch(b"nowhere", expected=5)).error_code == POLICY_VIOLATION
        assert client.append(topic, batch(b"bare")).error_code == POLICY_VIOLATION
        assert client.append(topic, batch(b"y", expected=0)).base_offset == 0
        assert log.values(topic) == [b"y"]


# --- the state topic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [9, 13])
def test_state_topic_append_in_mixed_request_is_refused(
    version: int, proxy: ProxyProcess, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    plain = new_topic("plain")
    with log.connect(STATE_TOPIC) as direct:
        ids = {topic.name: topic.topic_id for topic in direct.metadata(plain, STATE_TOPIC).topics}
    state = batch(Record(FORGED, key=b"x"))
    with Connection(proxy.bootstrap) as other:
        try:
            other.send_produce({STATE_TOPIC: {0: state}}, acks=0, version=version, topic_ids=ids)
            assert other.is_closed()
        except Closed:
            pass
    if version < 13:  # newer versions are not served
        answers = client.produce({plain: {0: batch(b"x")}, STATE_TOPIC: {0: state}}, version=version)
        assert answers[STATE_TOPIC, 0].error_code == TOPIC_AUTHORIZATION_FAILED
        assert answers[plain, 0].error_code == OK
    assert FORGED not in log.values(STATE_TOPIC)  # the end moves, since proxies write heartbeats
