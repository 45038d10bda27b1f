"""With authorization and SASL, the proxy refuses what KIP-98 forbids, with the same errors as Kafka. A client cannot
affect another client's transaction through the proxy's transaction state."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.types import Address
from tests.kit.waiting import until
from tests.support.kafka import unique_topic
from tests.support.messages import Fields
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.raw import Log, Producer, batch, sign
from tests.support.secured import User, allow, proxy_of

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(600)]

PRODUCE, CREATE_TOPICS, FIND_COORDINATOR, INIT_PRODUCER_ID = 0, 19, 10, 22
ADD_PARTITIONS, ADD_OFFSETS, END_TXN, WRITE_MARKERS, TXN_OFFSET_COMMIT = 24, 25, 26, 27, 28
DESCRIBE_PRODUCERS, DESCRIBE_TRANSACTIONS, LIST_TRANSACTIONS = 61, 65, 66
TOPIC, GROUP, TRANSACTIONAL_ID = 2, 3, 5
READ, WRITE = 3, 4
OK, INVALID_TOPIC, TOPIC_DENIED, GROUP_DENIED, CLUSTER_DENIED = 0, 17, 29, 30, 31
INVALID_TXN_STATE, BAD_MAPPING, CONCURRENT, TRANSACTIONAL_ID_DENIED = 48, 49, 51, 53
POLICY_VIOLATION, INVALID_RECORD, NOT_ATTEMPTED = 44, 87, 55
NOT_LEADER = 6
LATER = frozenset({14, 15, 16, CONCURRENT})
# Users: `owner` has rights on the transactional id, the topics and the group. `topicless`, `idless`, `groupless` each
# lack one of these. `other` has another transactional id, and the topics. `internal` has the rights of `owner` on the
# transactional id, and may write the internal topics.

_COMMIT, _ABORT = True, False


@pytest.fixture(scope="module")
def kafka(secured: KafkaCluster) -> KafkaCluster:
    return secured


@pytest.fixture(scope="module")
def proxy(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with proxy_of(kafka, tmp_path_factory.mktemp("rights"), CHECKED_BY_NAME) as proxy:
        yield proxy
        assert "Traceback" not in proxy.log


@dataclass
class Scene:
    """Topics plain-x and checked-x, a transactional id and a group. Users log in at `direct` and `through`."""

    kafka: KafkaCluster
    direct: Address
    through: Address
    prefix: str

    @property
    def log(self) -> Log:
        return Log(str(self.kafka.address(1)))

    @property
    def name(self) -> str:
        return f"txn-{self.prefix}"

    @property
    def others_name(self) -> str:
        return f"other-{self.prefix}"

    @property
    def group(self) -> str:
        return f"group-{self.prefix}"

    def topic(self, kind: str) -> str:
        return f"{kind}-{self.prefix}"

    @property
    def sides(self) -> tuple[Address, Address]:
        return self.direct, self.through

    def as_user(self, user: str, side: Address, api_key: int, version: int, body: Fields) -> Fields:
        with User(side, user) as connection:
            return connection.query(api_key, version, body)

    def same(self, user: str, api_key: int, version: int, body: Fields, *codes: int) -> Fields:
        """The response that Kafka and the proxy both give, after retriable errors."""

        def query(side: Address) -> Fields:
            def answer() -> Fields | None:
                reported = self.as_user(user, side, api_key, version, body)
                return None if _codes(reported) & LATER else reported

            reported: Fields = until(answer, "an answer", seconds=60)
            return reported

        direct, proxied = map(query, self.sides)
        assert direct == proxied, (user, api_key, version)
        assert _codes(direct) == set(codes), (user, api_key, version, direct)
        return direct

    def init(self, user: str, name: str, side: Address | None = None) -> Producer:
        def answer() -> Fields | None:
            reported = self.as_user(user, side or self.through, INIT_PRODUCER_ID, 4, _init(name))
            return None if reported["ErrorCode"] in LATER else reported

        reported = until(answer, "a coordinator", seconds=60)
        assert reported["ErrorCode"] == OK, reported
        return Producer(reported["ProducerId"], reported["ProducerEpoch"], 0)

    def end(self, user: str, name: str, producer: Producer, *, commit: bool, version: int = 3) -> int:
        def answer() -> Fields | None:
            reported = self.as_user(user, self.through, END_TXN, version, _end(name, producer, commit=commit))
            return None if reported["ErrorCode"] in LATER else reported

        reported: Fields = until(answer, "a coordinator", seconds=60)
        return int(reported["ErrorCode"])

    def add(self, user: str, name: str, producer: Producer, *topics: str) -> None:
        def answer() -> bool:
            reported = self.as_user(user, self.through, ADD_PARTITIONS, 3, _add(name, producer, *topics))
            assert _codes(reported) <= {OK, *LATER}, reported
            return _codes(reported) == {OK}

        until(answer, "a coordinator", seconds=60)

    def produce(self, user: str, topic: str, records: bytes, name: str | None, side: Address | None = None) -> Fields:
        def answer() -> Fields | None:
            reported = self.as_user(user, side or self.through, PRODUCE, 9, _produce(topic, records, name))
            partition: Fields = reported["Responses"][0]["PartitionResponses"][0]
            return None if partition["ErrorCode"] == NOT_LEADER else partition  # the log end offset is not known yet

        found: Fields = until(answer, "an answer", seconds=60)
        return found


@pytest.fixture
def scene(kafka: KafkaCluster, proxy: ProxyProcess) -> Scene:
    found = Scene(kafka, kafka.address(1, "SASL"), Address.parse(proxy.bootstrap), unique_topic("x"))
    topics = [found.topic(kind) for kind in ("plain", "checked")]
    for user in ("owner", "groupless", "topicless", "internal"):
        allow(kafka, user, TRANSACTIONAL_ID, found.name, WRITE)
    for user in ("owner", "groupless", "idless", "other"):
        for topic in topics:
            allow(kafka, user, TOPIC, topic, WRITE)
            allow(kafka, user, TOPIC, topic, READ)
    for user in ("owner", "topicless", "idless", "other"):
        allow(kafka, user, GROUP, found.group, READ)
    allow(kafka, "other", TRANSACTIONAL_ID, found.others_name, WRITE)
    allow(kafka, "internal", TOPIC, "__transaction_state", WRITE)
    allow(kafka, "internal", TOPIC, "__consumer_offsets", WRITE)
    with User(found.through, "admin") as admin:
        requested = [
            {"Name": topic, "NumPartitions": 1, "ReplicationFactor": 1, "Assignments": [], "Configs": []}
            for topic in topics
        ]
        created = admin.query(CREATE_TOPICS, 5, {"Topics": requested, "timeoutMs": 30_000})
        assert {each["ErrorCode"] for each in created["Topics"]} == {OK}
    for topic in topics:
        assert found.log.end(topic) == 0
    return found


# --- requests ---------------------------------------------------------------------------------------------------------


def _init(name: str | None) -> Fields:
    return {"TransactionalId": name, "TransactionTimeoutMs": 60_000, "ProducerId": -1, "ProducerEpoch": -1}


def _end(name: str, producer: Producer, *, commit: bool) -> Fields:
    who = {"TransactionalId": name, "ProducerId": producer.id, "ProducerEpoch": producer.epoch}
    return who | {"Committed": commit}


def _add(name: str, producer: Producer, *topics: str) -> Fields:
    return {
        "V3AndBelowTransactionalId": name,
        "V3AndBelowProducerId": producer.id,
        "V3AndBelowProducerEpoch": producer.epoch,
        "V3AndBelowTopics": [{"Name": topic, "Partitions": [0]} for topic in topics],
    }


def _add_offsets(name: str, producer: Producer, group: str) -> Fields:
    who = {"TransactionalId": name, "ProducerId": producer.id, "ProducerEpoch": producer.epoch}
    return who | {"GroupId": group}


def _commit_offsets(name: str, producer: Producer, group: str, topic: str) -> Fields:
    partition = {"PartitionIndex": 0, "CommittedOffset": 1, "CommittedLeaderEpoch": -1, "CommittedMetadata": ""}
    return {
        "TransactionalId": name,
        "GroupId": group,
        "ProducerId": producer.id,
        "ProducerEpoch": producer.epoch,
        "GenerationIdOrMemberEpoch": -1,
        "MemberId": "",
        "GroupInstanceId": None,
        "Topics": [{"Name": topic, "Partitions": [partition]}],
    }


def _produce(topic: str, records: bytes, name: str | None) -> Fields:
    return {
        "TransactionalId": name,
        "Acks": -1,
        "TimeoutMs": 10_000,
        "TopicData": [{"Name": topic, "PartitionData": [{"Index": 0, "Records": records}]}],
    }


def _codes(answer: Any) -> set[int]:
    """All error codes in a response."""
    if isinstance(answer, dict):
        own = {value for name, value in answer.items() if name in ("ErrorCode", "PartitionErrorCode")}
        return own.union(*map(_codes, answer.values())) if answer else own
    return set().union(*map(_codes, answer)) if isinstance(answer, list) else set()


def _control_batch(producer: Producer, *, transactional: bool) -> bytes:
    """A batch like a COMMIT marker: version 0, type 1."""
    found = bytearray(batch(b"\0\0\0\0\0\0", producer=producer, transactional=transactional))
    attributes = struct.unpack_from(">h", found, 21)[0] | 0x20
    struct.pack_into(">h", found, 21, attributes)
    sign(found)
    return bytes(found)


# --- required rights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "checked"])
def test_each_request_of_a_transaction_needs_its_rights(scene: Scene, kind: str) -> None:
    """Users that lack one of the rights send requests for an open transaction. Each gets the matching error, and the
    transaction still commits."""
    topic, name, group = scene.topic(kind), scene.name, scene.group
    producer = scene.init("owner", name)
    scene.add("owner", name, producer, topic)
    assert scene.produce("owner", topic, batch(b"mine", producer=producer, transactional=True), name)["ErrorCode"] == OK
    records = batch(b"theirs", producer=producer._replace(sequence=1), transactional=True)

    for user in ("idless", "other", "nobody"):
        scene.same(user, FIND_COORDINATOR, 4, {"KeyType": 1, "CoordinatorKeys": [name]}, TRANSACTIONAL_ID_DENIED)
        scene.same(user, INIT_PRODUCER_ID, 4, _init(name), TRANSACTIONAL_ID_DENIED)
        for version in (2, 3):
            scene.same(user, ADD_PARTITIONS, version, _add(name, producer, topic), TRANSACTIONAL_ID_DENIED)
        scene.same(user, ADD_OFFSETS, 3, _add_offsets(name, producer, group), TRANSACTIONAL_ID_DENIED)
        scene.same(user, TXN_OFFSET_COMMIT, 3, _commit_offsets(name, producer, group, topic), TRANSACTIONAL_ID_DENIED)
        scene.same(user, PRODUCE, 9, _produce(topic, records, name), TRANSACTIONAL_ID_DENIED)
        for commit in (_COMMIT, _ABORT):
            for version in (1, 3, 4, 5):
                denied = _end(name, producer, commit=commit)
                scene.same(user, END_TXN, version, denied, TRANSACTIONAL_ID_DENIED)
        scene.same(user, DESCRIBE_TRANSACTIONS, 0, {"TransactionalIds": [name]}, TRANSACTIONAL_ID_DENIED)
        scene.same(user, WRITE_MARKERS, 1, _markers(producer, topic), CLUSTER_DENIED)
    scene.same("topicless", ADD_PARTITIONS, 3, _add(name, producer, topic), TOPIC_DENIED)
    scene.same("topicless", PRODUCE, 9, _produce(topic, records, name), TOPIC_DENIED)
    offsets = _commit_offsets(name, producer, group, topic)
    scene.same("topicless", TXN_OFFSET_COMMIT, 3, offsets, TOPIC_DENIED)
    scene.same("groupless", ADD_OFFSETS, 3, _add_offsets(name, producer, group), GROUP_DENIED)
    scene.same("groupless", TXN_OFFSET_COMMIT, 3, offsets, GROUP_DENIED)
    producers = {"Topics": [{"Name": topic, "PartitionIndexes": [0]}]}
    scene.same("nobody", DESCRIBE_PRODUCERS, 0, producers, TOPIC_DENIED)
    for side in scene.sides:
        listed = scene.as_user("nobody", side, LIST_TRANSACTIONS, 0, {"StateFilters": [], "ProducerIdFilters": []})
        assert listed["TransactionStates"] == []

    assert scene.end("owner", name, producer, commit=True) == OK
    log = scene.log
    until(lambda: log.end(topic) == 2, "the marker")
    assert log.values(topic) == [b"mine"]


def _markers(producer: Producer, topic: str) -> Fields:
    marker = {
        "ProducerId": producer.id,
        "ProducerEpoch": producer.epoch,
        "TransactionResult": True,
        "Topics": [{"Name": topic, "PartitionIndexes": [0]}],
        "CoordinatorEpoch": 0,
    }
    return {"Markers": [marker]}


def test_one_denied_topic_keeps_others_from_being_added(scene: Scene, kafka: KafkaCluster) -> None:
    producer = scene.init("owner", scene.name)
    allow(kafka, "topicless", TOPIC, scene.topic("checked"), WRITE)
    body = _add(scene.name, producer, scene.topic("checked"), scene.topic("plain"))
    scene.same("topicless", ADD_PARTITIONS, 3, body, NOT_ATTEMPTED, TOPIC_DENIED)


@pytest.mark.parametrize("kind", ["plain", "checked"])
def test_anothers_producer_id_under_ones_own_transactional_id(scene: Scene, kind: str) -> None:
    """The coordinator refuses the combination, and the transaction commits."""
    topic = scene.topic(kind)
    producer = scene.init("owner", scene.name)
    scene.init("other", scene.others_name)
    scene.add("owner", scene.name, producer, topic)
    assert (
        scene.produce("owner", topic, batch(b"mine", producer=producer, transactional=True), scene.name)["ErrorCode"]
        == OK
    )
    mine = scene.others_name
    scene.same("other", ADD_PARTITIONS, 3, _add(mine, producer, topic), BAD_MAPPING)
    scene.same("other", ADD_OFFSETS, 3, _add_offsets(mine, producer, scene.group), BAD_MAPPING)
    for commit in (_COMMIT, _ABORT):
        scene.same("other", END_TXN, 3, _end(mine, producer, commit=commit), BAD_MAPPING)
    assert scene.end("owner", scene.name, producer, commit=True) == OK


# --- always forbidden -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["__transaction_state", "__consumer_offsets"])
def test_internal_topics_refuse_all_client_writes(scene: Scene, topic: str) -> None:
    """Users with WRITE are refused too. Users without WRITE get an authorization error."""
    producer = scene.init("owner", scene.name)
    for side in scene.sides:  # creates __consumer_offsets
        queried = {"KeyType": 0, "CoordinatorKeys": [scene.group]}
        until(
            lambda side=side, queried=queried: (
                not _codes(scene.as_user("owner", side, FIND_COORDINATOR, 4, queried)) - {OK}
            ),
            "it",
        )
    plain = batch(b"x", producer=Producer(-1, -1, -1))
    transactional = batch(b"x", producer=producer, transactional=True)
    scene.same("internal", PRODUCE, 9, _produce(topic, plain, None), INVALID_TOPIC)
    # The coordinator checks the transaction first and does not know this partition.
    scene.same("internal", PRODUCE, 9, _produce(topic, transactional, scene.name), INVALID_TXN_STATE)
    scene.same("owner", PRODUCE, 9, _produce(topic, plain, None), TOPIC_DENIED)


@pytest.mark.parametrize("kind", ["plain", "checked"])
def test_client_written_control_batches_are_refused(scene: Scene, kind: str) -> None:
    topic = scene.topic(kind)
    producer = scene.init("owner", scene.name)
    scene.add("owner", scene.name, producer, topic)
    assert (
        scene.produce("owner", topic, batch(b"mine", producer=producer, transactional=True), scene.name)["ErrorCode"]
        == OK
    )
    for transactional in (True, False):
        records = _control_batch(producer._replace(sequence=1), transactional=transactional)
        reported = [
            scene.produce("owner", topic, records, scene.name if transactional else None, side)["ErrorCode"]
            for side in scene.sides
        ]
        assert reported[0] == reported[1] == INVALID_RECORD, reported
    log = scene.log
    assert log.end(topic) == 1
    assert scene.end("owner", scene.name, producer, commit=False) == OK


# --- transaction state in the proxy -----------------------------------------------------------------------------------


def _conditional(producer: Producer, value: bytes, expected: int) -> bytes:
    return batch(value, expected=expected, producer=producer, transactional=True)


def _begun(scene: Scene) -> Producer:
    """A transaction of `owner` with one conditional append at 0."""
    topic = scene.topic("checked")
    producer = scene.init("owner", scene.name)
    scene.add("owner", scene.name, producer, topic)
    assert scene.produce("owner", topic, _conditional(producer, b"mine", 0), scene.name)["ErrorCode"] == OK
    return producer


def _unauthorized(user: str, name_of: str, *, epoch: int = 0) -> Callable[[Scene, Producer], None]:
    def speaks(scene: Scene, producer: Producer) -> None:
        claimed = producer._replace(epoch=producer.epoch + epoch, sequence=1)
        name = scene.name if name_of == "owner" else scene.others_name
        if name_of == "other":
            scene.init("other", name)
        for expected in (1, 77):
            reported = scene.produce(user, scene.topic("checked"), _conditional(claimed, b"theirs", expected), name)
            assert reported["ErrorCode"] != OK, reported

    return speaks


UNAUTHORIZED_CLIENTS: dict[str, Callable[[Scene, Producer], None]] = {
    "who may nothing": _unauthorized("nobody", "owner"),
    "who may write the topic": _unauthorized("idless", "owner"),
    "who may write the topic, of the next epoch": _unauthorized("idless", "owner", epoch=1),
    "under its own transactional id": _unauthorized("other", "other"),
    "under its own transactional id, of the next epoch": _unauthorized("other", "other", epoch=1),
}


@pytest.mark.parametrize("who", UNAUTHORIZED_CLIENTS)
def test_unauthorized_batch_does_not_make_transaction_abort_only(scene: Scene, who: str) -> None:
    producer = _begun(scene)
    UNAUTHORIZED_CLIENTS[who](scene, producer)
    assert scene.end("owner", scene.name, producer, commit=True) == OK
    log = scene.log
    until(lambda: log.end(scene.topic("checked")) == 2, "the marker")
    assert log.values(scene.topic("checked")) == [b"mine"]


@pytest.mark.parametrize("who", ["who may write the topic", "who may nothing"])
def test_unauthorized_client_gets_kafka_errors_and_no_offsets(scene: Scene, who: str) -> None:
    """Kafka and the proxy give the same response, with and without an expected offset, whether it is the right one or
    not."""
    user = {"who may write the topic": "idless", "who may nothing": "nobody"}[who]
    producer = _begun(scene)
    for records in (
        _conditional(producer._replace(sequence=1), b"theirs", 1),
        _conditional(producer._replace(sequence=1), b"theirs", 77),
        batch(b"theirs", producer=producer._replace(sequence=1), transactional=True),
    ):
        scene.same(user, PRODUCE, 9, _produce(scene.topic("checked"), records, scene.name), TRANSACTIONAL_ID_DENIED)
    assert scene.end("owner", scene.name, producer, commit=True) == OK
    log = scene.log
    until(lambda: log.end(scene.topic("checked")) == 2, "the marker")
    assert log.values(scene.topic("checked")) == [b"mine"]


@pytest.mark.parametrize("side", ["direct", "through"])
def test_kafka_accepts_another_transactional_ids_unconditional_batch(scene: Scene, side: str) -> None:
    """A user may write the topic and use its transactional id, but names another's producer id. Kafka accepts such a
    batch without an expected offset as part of the other transaction, with or without the proxy. The proxy's sequencer
    checks a batch with an expected offset and refuses it."""
    producer = _begun(scene)
    scene.init("other", scene.others_name)
    theirs = batch(b"theirs", producer=producer._replace(sequence=1), transactional=True)
    where = scene.direct if side == "direct" else scene.through
    assert scene.produce("other", scene.topic("checked"), theirs, scene.others_name, where)["ErrorCode"] == OK
    more = _conditional(producer._replace(sequence=2), b"theirs too", 2)
    reported = scene.produce("other", scene.topic("checked"), more, scene.others_name)
    assert reported["ErrorCode"] == BAD_MAPPING
    assert scene.end("owner", scene.name, producer, commit=False) == OK


def test_refused_append_blocks_commit_through_another_connection(scene: Scene) -> None:
    """The proxy still accepts the commit of the next transaction."""
    producer = _begun(scene)
    wrong = _conditional(producer._replace(sequence=1), b"wrong", 77)
    assert scene.produce("owner", scene.topic("checked"), wrong, scene.name)["ErrorCode"] == POLICY_VIOLATION
    assert scene.end("owner", scene.name, producer, commit=True) == 59
    assert scene.end("owner", scene.name, producer, commit=False) == OK
    until(lambda: scene.log.end(scene.topic("checked")) == 2, "the marker")
    producer = scene.init("owner", scene.name)
    scene.add("owner", scene.name, producer, scene.topic("checked"))
    right = _conditional(producer, b"right", 2)
    until(
        lambda: scene.produce("owner", scene.topic("checked"), right, scene.name)["ErrorCode"] == OK,
        "its place",
        seconds=60,
    )
    assert scene.end("owner", scene.name, producer, commit=True) == OK


@pytest.mark.parametrize("version", [3, 5])
def test_unauthorized_end_neither_reveals_nor_clears_abort_only(scene: Scene, version: int) -> None:
    """An unauthorized EndTxn gets Kafka's error, and the commit is still refused afterwards."""
    producer = _begun(scene)
    wrong = _conditional(producer._replace(sequence=1), b"wrong", 77)
    assert scene.produce("owner", scene.topic("checked"), wrong, scene.name)["ErrorCode"] == POLICY_VIOLATION
    for commit in (_ABORT, _COMMIT):
        denied = _end(scene.name, producer, commit=commit)
        scene.same("idless", END_TXN, version, denied, TRANSACTIONAL_ID_DENIED)
    assert scene.end("owner", scene.name, producer, commit=True, version=3) == 59
    assert scene.end("owner", scene.name, producer, commit=False, version=3) == OK
    log = scene.log
    until(lambda: log.end(scene.topic("checked")) == 2, "the marker")
