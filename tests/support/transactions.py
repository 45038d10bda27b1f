"""A transactional producer with raw requests, of either protocol, and the ways in which a transaction ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kafka.protocol.producer import AddPartitionsToTxnRequest, EndTxnRequest, InitProducerIdRequest

from fencepost_proxy.types import Address
from tests.kit.reading import read
from tests.kit.waiting import until
from tests.support.messages import RawConnection
from tests.support.raw import Answer, Connection, Producer, batch, produce_request

OK, CONCURRENT_TRANSACTIONS, NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, LOADING = 0, 51, 16, 15, 14
_WAIT = frozenset({CONCURRENT_TRANSACTIONS, NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, LOADING})
_PATIENCE_SECONDS = 60.0
_WRITE_TXN_MARKERS, _DESCRIBE_PRODUCERS, _DESCRIBE_TRANSACTIONS, _UPDATE_FEATURES = 27, 61, 65, 57


def init_request(name: str, timeout_ms: int) -> Any:
    return InitProducerIdRequest(
        transactional_id=name, transaction_timeout_ms=timeout_ms, producer_id=-1, producer_epoch=-1
    )


def add_request(name: str, producer: Producer, partitions: Mapping[str, Sequence[int]]) -> Any:
    """For version 3."""
    topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
    return AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=name,
        v3_and_below_producer_id=producer.id,
        v3_and_below_producer_epoch=producer.epoch,
        v3_and_below_topics=[topic(name=each, partitions=list(found)) for each, found in partitions.items()],
    )


def end_request(name: str, producer: Producer, *, commit: bool) -> Any:
    return EndTxnRequest(
        transactional_id=name, producer_id=producer.id, producer_epoch=producer.epoch, committed=commit
    )


class Transactional:
    """`protocol` 1: partitions are added before they are written to. 2: by the first write (KIP-890).

    For one broker, which is also the coordinator. `epoch` and `sequences` are kept as in a client. `source_is_base` –
    the base offset carries the expected offset, instead of a header.
    """

    source_is_base = False

    def __init__(self, address: str, name: str, *, protocol: int = 2, timeout_ms: int = 60_000) -> None:
        self.name = name
        self.protocol = protocol
        self.timeout_ms = timeout_ms
        self.connection = Connection(address, timeout_seconds=60)
        self.producer = Producer(-1, -1, 0)
        self.sequences: dict[tuple[str, int], int] = {}
        self.init()

    def __enter__(self) -> Transactional:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def init(self) -> None:
        """Also ends an open transaction of an earlier instance with this name."""
        request = init_request(self.name, self.timeout_ms)
        answer = self._until_done(request, 4, lambda found: found.error_code)
        assert answer.error_code == OK, answer
        self.producer = Producer(answer.producer_id, answer.producer_epoch, 0)
        self.sequences.clear()

    def add(self, partitions: Mapping[str, Sequence[int]]) -> dict[tuple[str, int], int]:
        """AddPartitionsToTxn (v1): the error code of each partition."""
        request = add_request(self.name, self.producer, partitions)
        answer = self._until_done(request, 3, lambda found: max(added(found).values()))
        return added(answer)

    def begin(self, *topics: str) -> None:
        """Begin a transaction that may write to partition 0 of these topics."""
        if self.protocol == 1:
            assert set(self.add({topic: [0] for topic in topics}).values()) <= {OK}

    def append(
        self,
        topic: str,
        *values: bytes,
        expected: int | None = None,
        partition: int = 0,
        timeout_ms: int = 10_000,
        codec: int = 0,
    ) -> Answer:
        requested = {(topic, partition): (values, expected)}
        return self.append_all(requested, timeout_ms=timeout_ms, codec=codec)[topic, partition]

    def append_all(
        self,
        requested: Mapping[tuple[str, int], tuple[Sequence[bytes], int | None]],
        *,
        timeout_ms: int = 10_000,
        codec: int = 0,
    ) -> dict[tuple[str, int], Answer]:
        """Send one request. A refused append keeps its sequence for the retry; an OFFSET_VIOLATION has used it."""
        batches: dict[str, dict[int, bytes]] = {}
        for (topic, partition), (values, expected) in requested.items():
            producer = self.producer._replace(sequence=self.sequences.get((topic, partition), 0))
            if self.source_is_base:
                base = -1 if expected is None else expected
                records = batch(*values, base_offset=base, producer=producer, transactional=True, codec=codec)
            else:
                records = batch(*values, expected=expected, producer=producer, transactional=True, codec=codec)
            batches.setdefault(topic, {})[partition] = records
        version = 12 if self.protocol == 2 else 11
        answers: dict[tuple[str, int], Answer] = {}
        while not answers or any(each.error_code in _WAIT or each.lacks_configs for each in answers.values()):
            sent = self.connection.send(produce_request(batches, -1, timeout_ms, self.name), version)
            correlation_id, answers = self.connection.receive_produce(version)
            assert correlation_id == sent
        for where, (values, _) in requested.items():
            if answers[where].error_code == OK or (answers[where].message or "").startswith("OFFSET_VIOLATION"):
                self.sequences[where] = self.sequences.get(where, 0) + len(values)
        return answers

    def end(self, *, commit: bool) -> int:
        """The error code of EndTxn. The markers appear later."""
        version = 5 if self.protocol == 2 else 3
        request = end_request(self.name, self.producer, commit=commit)
        answer = self._until_done(request, version, lambda found: found.error_code)
        if self.protocol == 2 and answer.error_code == OK:
            # Every transaction has a different epoch.
            self.producer = Producer(answer.producer_id, answer.producer_epoch, 0)
            self.sequences.clear()
        return int(answer.error_code)

    def _until_done(self, request: Any, version: int, code: Any) -> Any:
        def queried() -> Any:
            answer = self.connection.query(request, version)
            return None if code(answer) in _WAIT else answer

        return until(queried, "the transaction coordinator", seconds=_PATIENCE_SECONDS)


def added(answer: Any) -> dict[tuple[str, int], int]:
    return {
        (topic.name, partition.partition_index): partition.partition_error_code
        for topic in answer.results_by_topic_v3_and_below
        for partition in topic.results_by_partition
    }


def abort_as_an_admin(address: str, topic: str, producer: Producer) -> None:
    """As `kafka-transactions abort`: the partition's leader writes the marker, without the coordinator.

    The epoch is the one that the leader knows: with transactions v2 not the one of the client's batches.
    """
    with RawConnection(Address.parse(address)) as admin:
        (known,) = [each for each in _producers(admin, topic) if each["ProducerId"] == producer.id]
        known_to_leader = Producer(producer.id, known["ProducerEpoch"], 0)
        code = write_abort_marker(admin, topic, known_to_leader, coordinator_epoch=known["CoordinatorEpoch"])
        assert code == OK


def write_abort_marker(admin: RawConnection, topic: str, producer: Producer, *, coordinator_epoch: int = 0) -> int:
    """The error code of partition 0, whose leader writes a marker whether or not a transaction is open."""
    marker = {
        "ProducerId": producer.id,
        "ProducerEpoch": producer.epoch,
        "TransactionResult": False,
        "Topics": [{"Name": topic, "PartitionIndexes": [0]}],
        "CoordinatorEpoch": coordinator_epoch,
    }
    (answer,) = admin.query(_WRITE_TXN_MARKERS, 1, {"Markers": [marker]})["Markers"]
    return int(answer["Topics"][0]["Partitions"][0]["ErrorCode"])


def committed(bootstrap: str, *partitions: tuple[str, int]) -> dict[tuple[str, int], list[bytes]]:
    """The records that a read_committed consumer reads, up to the last stable offset."""
    found: dict[tuple[str, int], list[bytes]] = {where: [] for where in partitions}
    for message in read(bootstrap, *partitions):
        found[message.topic(), message.partition()].append(message.value())
    return found


def open_transactions(address: str, topic: str) -> set[int]:
    """Producer ids with an open transaction on partition 0, from its leader."""
    with RawConnection(Address.parse(address)) as admin:
        return {each["ProducerId"] for each in _producers(admin, topic) if each["CurrentTxnStartOffset"] >= 0}


def _producers(admin: RawConnection, topic: str) -> list[dict[str, Any]]:
    topics = [{"Name": topic, "PartitionIndexes": [0]}]
    answer = admin.query(_DESCRIBE_PRODUCERS, 0, {"Topics": topics})["Topics"][0]["Partitions"][0]
    assert answer["ErrorCode"] == OK, answer
    found: list[dict[str, Any]] = answer["ActiveProducers"]
    return found


def transaction_state(address: str, name: str) -> tuple[str, set[tuple[str, int]]]:
    """The transaction's state at the coordinator, and the partitions that would get a marker."""
    with RawConnection(Address.parse(address)) as admin:
        (found,) = admin.query(_DESCRIBE_TRANSACTIONS, 0, {"TransactionalIds": [name]})["TransactionStates"]
    assert found["ErrorCode"] == OK, found
    return found["TransactionState"], {(each["Topic"], part) for each in found["Topics"] for part in each["Partitions"]}


def set_transaction_version(address: str, level: int) -> None:
    """The cluster's version: 1 for clients that add partitions themselves, 2 for KIP-890. Set it before connecting."""
    with RawConnection(Address.parse(address)) as admin:
        update = {"Feature": "transaction.version", "MaxVersionLevel": level, "UpgradeType": 1 if level > 1 else 2}
        answer = admin.query(_UPDATE_FEATURES, 1, {"timeoutMs": 30_000, "FeatureUpdates": [update]})
        assert answer["ErrorCode"] == OK, answer
        assert all(each["ErrorCode"] == OK for each in answer["Results"]), answer
