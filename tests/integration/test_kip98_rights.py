"""With authorization and SASL, the proxy refuses what KIP-98 forbids, with the same errors as Kafka. A client cannot
affect another client's transaction through the proxy's transaction state."""

from __future__ import annotations

import struct

import pytest

from tests.kit.waiting import until
from tests.support.kafka import unique_topic
from tests.support.messages import Fields
from tests.support.raw import Producer, batch, sign
from tests.support.secured import (
    ADD_PARTITIONS,
    END_TXN,
    GROUP,
    INIT_PRODUCER_ID,
    OK,
    PRODUCE,
    READ,
    TOPIC,
    TRANSACTIONAL_ID,
    WRITE,
    Sides,
    add,
    allow,
    codes,
    end,
    init,
    of_producer,
    produce,
)

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(600)]

FIND_COORDINATOR, ADD_OFFSETS, WRITE_MARKERS, TXN_OFFSET_COMMIT = 10, 25, 27, 28
DESCRIBE_PRODUCERS, DESCRIBE_TRANSACTIONS, LIST_TRANSACTIONS = 61, 65, 66
INVALID_TOPIC, TOPIC_DENIED, GROUP_DENIED, CLUSTER_DENIED, POLICY_VIOLATION = 17, 29, 30, 31, 44
INVALID_TXN_STATE, BAD_MAPPING, TRANSACTIONAL_ID_DENIED, NOT_ATTEMPTED, UNKNOWN_PRODUCER_ID = 48, 49, 53, 55, 59
INVALID_RECORD = 87
both_kinds = pytest.mark.parametrize("kind", ["plain", "checked"])


class Scene(Sides):
    """Topics plain-x and checked-x, a transactional id and a group.

    `owner` has rights on the transactional id, the topics and the group. `topicless`, `idless`, `groupless` each lack
    one of these. `other` has another transactional id, and the topics. `internal` has the rights of `owner` on the
    transactional id, and may write the internal topics.
    """

    def __init__(self, sides: Sides) -> None:
        super().__init__(sides.kafka, sides.proxy)
        prefix = unique_topic("x")
        self.topics = {kind: f"{kind}-{prefix}" for kind in ("plain", "checked")}
        self.checked = self.topics["checked"]
        self.name, self.others_name, self.group = f"txn-{prefix}", f"other-{prefix}", f"group-{prefix}"
        for user in ("owner", "groupless", "topicless", "internal"):
            allow(self.kafka, user, TRANSACTIONAL_ID, self.name, WRITE)
        for user in ("owner", "groupless", "idless", "other"):
            for topic in self.topics.values():
                for operation in (READ, WRITE):
                    allow(self.kafka, user, TOPIC, topic, operation)
        for user in ("owner", "topicless", "idless", "other"):
            allow(self.kafka, user, GROUP, self.group, READ)
        allow(self.kafka, "other", TRANSACTIONAL_ID, self.others_name, WRITE)
        for topic in ("__transaction_state", "__consumer_offsets"):
            allow(self.kafka, "internal", TOPIC, topic, WRITE)
        for topic in self.topics.values():
            self.create(topic)

    def begun(self, topic: str, *, expected: int | None = None) -> Producer:
        """A transaction of `owner` with one append."""
        producer = self.init("owner", self.name)
        self.add("owner", self.name, producer, topic)
        records = batch(b"mine", expected=expected, producer=producer, transactional=True)
        assert self.produce("owner", topic, records, self.name)["ErrorCode"] == OK
        return producer

    def commits(self, producer: Producer, topic: str) -> None:
        """The transaction of `begun` commits, and nothing else is in the log."""
        assert self.end("owner", self.name, producer, commit=True) == OK
        until(lambda: self.log.end(topic) == 2, "the marker")
        assert self.log.values(topic) == [b"mine"]


@pytest.fixture
def scene(sides: Sides) -> Scene:
    return Scene(sides)


def _add_offsets(name: str, producer: Producer, group: str) -> Fields:
    return of_producer(name, producer) | {"GroupId": group}


def _commit_offsets(name: str, producer: Producer, group: str, topic: str) -> Fields:
    partition = {"PartitionIndex": 0, "CommittedOffset": 1, "CommittedLeaderEpoch": -1, "CommittedMetadata": ""}
    return of_producer(name, producer) | {
        "GroupId": group,
        "GenerationIdOrMemberEpoch": -1,
        "MemberId": "",
        "GroupInstanceId": None,
        "Topics": [{"Name": topic, "Partitions": [partition]}],
    }


def _markers(producer: Producer, topic: str) -> Fields:
    marker = {
        "ProducerId": producer.id,
        "ProducerEpoch": producer.epoch,
        "TransactionResult": True,
        "Topics": [{"Name": topic, "PartitionIndexes": [0]}],
        "CoordinatorEpoch": 0,
    }
    return {"Markers": [marker]}


def _control_batch(producer: Producer, *, transactional: bool) -> bytes:
    """A batch like a COMMIT marker: version 0, type 1."""
    found = bytearray(batch(b"\0\0\0\0\0\0", producer=producer, transactional=transactional))
    attributes = struct.unpack_from(">h", found, 21)[0] | 0x20
    struct.pack_into(">h", found, 21, attributes)
    sign(found)
    return bytes(found)


# --- required rights --------------------------------------------------------------------------------------------------


@both_kinds
def test_each_request_of_a_transaction_needs_its_rights(scene: Scene, kind: str) -> None:
    """Users that lack one of the rights send requests for an open transaction. Each gets the matching error, and the
    transaction still commits."""
    topic, name, group = scene.topics[kind], scene.name, scene.group
    producer = scene.begun(topic)
    records = batch(b"theirs", producer=producer._replace(sequence=1), transactional=True)
    offsets = _commit_offsets(name, producer, group, topic)
    for user in ("idless", "other", "nobody"):
        for api_key, version, body in (
            (FIND_COORDINATOR, 4, {"KeyType": 1, "CoordinatorKeys": [name]}),
            (INIT_PRODUCER_ID, 4, init(name)),
            (ADD_PARTITIONS, 2, add(name, producer, topic)),
            (ADD_PARTITIONS, 3, add(name, producer, topic)),
            (ADD_OFFSETS, 3, _add_offsets(name, producer, group)),
            (TXN_OFFSET_COMMIT, 3, offsets),
            (PRODUCE, 9, produce(topic, records, name=name)),
            *((END_TXN, v, end(name, producer, commit=commit)) for commit in (True, False) for v in (1, 3, 4, 5)),
            (DESCRIBE_TRANSACTIONS, 0, {"TransactionalIds": [name]}),
        ):
            scene.same(user, api_key, version, body, TRANSACTIONAL_ID_DENIED)
        scene.same(user, WRITE_MARKERS, 1, _markers(producer, topic), CLUSTER_DENIED)
    scene.same("topicless", ADD_PARTITIONS, 3, add(name, producer, topic), TOPIC_DENIED)
    scene.same("topicless", PRODUCE, 9, produce(topic, records, name=name), TOPIC_DENIED)
    scene.same("topicless", TXN_OFFSET_COMMIT, 3, offsets, TOPIC_DENIED)
    scene.same("groupless", ADD_OFFSETS, 3, _add_offsets(name, producer, group), GROUP_DENIED)
    scene.same("groupless", TXN_OFFSET_COMMIT, 3, offsets, GROUP_DENIED)
    producers = {"Topics": [{"Name": topic, "PartitionIndexes": [0]}]}
    scene.same("nobody", DESCRIBE_PRODUCERS, 0, producers, TOPIC_DENIED)
    listed = scene.same("nobody", LIST_TRANSACTIONS, 0, {"StateFilters": [], "ProducerIdFilters": []})
    assert listed["TransactionStates"] == []
    scene.commits(producer, topic)


def test_one_denied_topic_keeps_others_from_being_added(scene: Scene) -> None:
    producer = scene.init("owner", scene.name)
    allow(scene.kafka, "topicless", TOPIC, scene.checked, WRITE)
    body = add(scene.name, producer, scene.checked, scene.topics["plain"])
    scene.same("topicless", ADD_PARTITIONS, 3, body, NOT_ATTEMPTED, TOPIC_DENIED)


def test_only_authorized_clients_learn_that_a_topic_refuses_transactions(scene: Scene) -> None:
    strict, plain = unique_topic("required"), scene.topics["plain"]
    scene.create(strict, {"fencepost.check.expected.offsets": "required"})
    producer = scene.init("owner", scene.name)
    for topics in ((strict,), (strict, plain)):
        body = add(scene.name, producer, *topics)
        scene.same("idless", ADD_PARTITIONS, 3, body, TRANSACTIONAL_ID_DENIED)
    scene.same("owner", ADD_PARTITIONS, 3, add(scene.name, producer, strict, plain), NOT_ATTEMPTED, TOPIC_DENIED)
    allow(scene.kafka, "owner", TOPIC, strict, WRITE)
    reported = scene.query("owner", scene.through, ADD_PARTITIONS, 3, add(scene.name, producer, strict, plain))
    assert codes(reported) == {NOT_ATTEMPTED, POLICY_VIOLATION}
    begun = scene.query("owner", scene.direct, DESCRIBE_TRANSACTIONS, 0, {"TransactionalIds": [scene.name]})
    assert begun["TransactionStates"][0]["Topics"] == [], "nothing was added"


@both_kinds
def test_anothers_producer_id_under_ones_own_transactional_id(scene: Scene, kind: str) -> None:
    """The coordinator refuses the combination, and the transaction commits."""
    topic, mine = scene.topics[kind], scene.others_name
    producer = scene.begun(topic)
    scene.init("other", mine)
    scene.same("other", ADD_PARTITIONS, 3, add(mine, producer, topic), BAD_MAPPING)
    scene.same("other", ADD_OFFSETS, 3, _add_offsets(mine, producer, scene.group), BAD_MAPPING)
    for commit in (True, False):
        scene.same("other", END_TXN, 3, end(mine, producer, commit=commit), BAD_MAPPING)
    scene.commits(producer, topic)


# --- always forbidden -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["__transaction_state", "__consumer_offsets"])
def test_internal_topics_refuse_all_client_writes(scene: Scene, topic: str) -> None:
    """Users with WRITE are refused too. Users without WRITE get an authorization error."""
    producer = scene.init("owner", scene.name)
    for side in (scene.direct, scene.through):  # creates __consumer_offsets
        scene.query("owner", side, FIND_COORDINATOR, 4, {"KeyType": 0, "CoordinatorKeys": [scene.group]})
    plain = batch(b"x", producer=Producer(-1, -1, -1))
    transactional = batch(b"x", producer=producer, transactional=True)
    scene.same("internal", PRODUCE, 9, produce(topic, plain), INVALID_TOPIC)
    # The coordinator checks the transaction first and does not know this partition.
    scene.same("internal", PRODUCE, 9, produce(topic, transactional, name=scene.name), INVALID_TXN_STATE)
    scene.same("owner", PRODUCE, 9, produce(topic, plain), TOPIC_DENIED)


@both_kinds
def test_client_written_control_batches_are_refused(scene: Scene, kind: str) -> None:
    topic = scene.topics[kind]
    producer = scene.begun(topic)
    for name in (scene.name, None):
        records = _control_batch(producer._replace(sequence=1), transactional=name is not None)
        for side in (scene.direct, scene.through):
            assert scene.produce("owner", topic, records, name, side)["ErrorCode"] == INVALID_RECORD
    assert scene.log.end(topic) == 1
    assert scene.end("owner", scene.name, producer, commit=False) == OK


# --- transaction state in the proxy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("user", ["nobody", "idless", "other"])
def test_unauthorized_batch_does_not_make_transaction_abort_only(scene: Scene, user: str, epoch: int) -> None:
    """Of the transaction's epoch or the next one, at the right offset or not. `other` uses its own transactional id,
    and the others get Kafka's error, without an offset."""
    producer = scene.begun(scene.checked, expected=0)
    if user == "other":
        scene.init("other", scene.others_name)
    for expected in (1, 77):
        claimed = producer._replace(epoch=producer.epoch + epoch, sequence=1)
        records = batch(b"theirs", expected=expected, producer=claimed, transactional=True)
        if user == "other":
            assert scene.produce(user, scene.checked, records, scene.others_name)["ErrorCode"] != OK
        else:
            denied = produce(scene.checked, records, name=scene.name)
            scene.same(user, PRODUCE, 9, denied, TRANSACTIONAL_ID_DENIED)
    scene.commits(producer, scene.checked)


@pytest.mark.parametrize("side", ["direct", "through"])
def test_kafka_accepts_another_transactional_ids_unconditional_batch(scene: Scene, side: str) -> None:
    """A user may write the topic and use its transactional id, but names another's producer id. Kafka accepts such a
    batch without an expected offset as part of the other transaction, with or without the proxy. The proxy's sequencer
    checks a batch with an expected offset and refuses it."""
    producer = scene.begun(scene.checked, expected=0)
    scene.init("other", scene.others_name)
    theirs = batch(b"theirs", producer=producer._replace(sequence=1), transactional=True)
    where = scene.direct if side == "direct" else scene.through
    assert scene.produce("other", scene.checked, theirs, scene.others_name, where)["ErrorCode"] == OK
    more = batch(b"theirs too", expected=2, producer=producer._replace(sequence=2), transactional=True)
    assert scene.produce("other", scene.checked, more, scene.others_name)["ErrorCode"] == BAD_MAPPING
    assert scene.end("owner", scene.name, producer, commit=False) == OK


def test_unauthorized_end_neither_reveals_nor_clears_abort_only(scene: Scene) -> None:
    """An unauthorized EndTxn gets Kafka's error, and the commit is still refused afterwards."""
    producer = scene.begun(scene.checked, expected=0)
    wrong = batch(b"wrong", expected=77, producer=producer._replace(sequence=1), transactional=True)
    assert scene.produce("owner", scene.checked, wrong, scene.name)["ErrorCode"] == POLICY_VIOLATION
    for version in (3, 5):
        for commit in (False, True):
            denied = end(scene.name, producer, commit=commit)
            scene.same("idless", END_TXN, version, denied, TRANSACTIONAL_ID_DENIED)
    assert scene.end("owner", scene.name, producer, commit=True) == UNKNOWN_PRODUCER_ID
    assert scene.end("owner", scene.name, producer, commit=False) == OK
