"""Any cluster as a driver, by the protocol alone. Only requests that are not under test are retried.

It leaves nothing: topics are deleted after each case, and open transactions are aborted before. Kafka removes the
transactional ids after `transactional.id.expiration.ms`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final, NoReturn

from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import Error, error_name
from fencepost_proxy.preflight.conformance.case import NotAvailable, NotTested
from fencepost_proxy.preflight.conformance.driver import DEFAULTS, Answer, Kafka, Settings, Topic, Transaction
from fencepost_proxy.preflight.conformance.requests import ANSWER_SECONDS, PREFIX, Requests
from fencepost_proxy.preflight.conformance.topics import (
    PRODUCE,
    PRODUCE_V2,
    AnyTopic,
    require_permission,
    same_code,
)
from fencepost_proxy.types import Address
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message

_TRANSACTION_FEATURE, _TRANSACTIONS_V2 = "transaction.version", 2
_TRANSACTION_TIMEOUT_MS: Final = 60_000
_COORDINATOR_BUSY: Final = frozenset(
    {
        Error.COORDINATOR_LOAD_IN_PROGRESS,
        Error.COORDINATOR_NOT_AVAILABLE,
        Error.NOT_COORDINATOR,
        Error.CONCURRENT_TRANSACTIONS,
    }
)
#: Also: the coordinator does not know the new topic yet, or the leader could not verify the transaction (19).
_LATER: Final = _COORDINATOR_BUSY | {Error.UNKNOWN_TOPIC_OR_PARTITION, Error.NOT_ENOUGH_REPLICAS}


class AnyKafka(Requests, Kafka):
    """A cluster that others use too."""

    def __init__(
        self, config: ProxyConfig, *, answer_seconds: float = ANSWER_SECONDS, prefix: str = PREFIX, replicas: int = -1
    ) -> None:
        super().__init__(config, answer_seconds=answer_seconds, prefix=prefix, replicas=replicas)
        self._transactions: list[AnyTransaction] = []

    def create(self, settings: Settings = DEFAULTS) -> AnyTopic:
        return AnyTopic(self, self.name(), settings)

    def transactional(self, *, v2: bool) -> AnyTransaction:
        if v2 and self.features().get(_TRANSACTION_FEATURE, 0) < _TRANSACTIONS_V2:
            raise NotAvailable(f"{_TRANSACTION_FEATURE} {_TRANSACTIONS_V2} is not in force")
        transaction = AnyTransaction(self, self.name(), v2=v2)
        self._transactions.append(transaction)
        return transaction

    def until(self, condition: Callable[[], bool], what: str) -> None:
        self.wait(condition, what)

    def clean(self) -> None:
        """Remove what a case has left. Raises `NotDeleted`."""
        self.until_time = float("inf")
        wires, self.wires = self.wires, []
        for wire in wires:
            wire.close()
        transactions, self._transactions = self._transactions, []
        for transaction in transactions:
            # Fences it, which aborts what is open. Kafka does it itself after the transaction's timeout.
            with contextlib.suppress(AssertionError, UpstreamUnavailable, NotTested):
                transaction.begin()
        self.delete_topics(list(self.topics_left))

    # ---- not by requests of a client

    def _no_control(self, *_: object, **__: object) -> NoReturn:
        raise NotTested("brokers are not to be disturbed")

    restart = crash = expire_producers = let_fetches_end = _no_control
    pause = resume = kill = start_again = _no_control


class AnyTransaction(Transaction):
    def __init__(self, kafka: AnyKafka, name: str, *, v2: bool) -> None:
        self._kafka = kafka
        self._name = name
        self._v2 = v2
        self.begin()

    def begin(self) -> None:
        """InitProducerId: it also aborts an open transaction of the id."""
        message = Message(
            transactional_id=self._name,
            transaction_timeout_ms=_TRANSACTION_TIMEOUT_MS,
            producer_id=-1,
            producer_epoch=-1,
        )

        def begun() -> Message:
            answer = self._coordinator(apis.INIT_PRODUCER_ID, message, at_most=4)
            require_permission(answer.error_code)
            return answer

        producer = self._kafka.wait(begun, "a producer id", lambda answer: not answer.error_code)
        self.producer_id, self.epoch = producer.producer_id, producer.producer_epoch

    def _coordinator(self, api_key: int, message: Message, *, at_most: int, at_least: int = 0) -> Message:
        find = Message(key=self._name, key_type=1, coordinator_keys=[self._name])
        answer = self._kafka.query(apis.FIND_COORDINATOR, find, at_least=1, at_most=4)
        found = answer.coordinators[0] if answer.coordinators else answer
        require_permission(found.error_code)
        if found.error_code:
            raise UpstreamUnavailable(f"FindCoordinator returned {error_name(found.error_code)}")
        to = Address(found.host, found.port)
        return self._kafka.query(api_key, message, at_least=at_least, at_most=at_most, to=to)

    def add(self, topic: Topic) -> None:
        assert isinstance(topic, AnyTopic)
        if self._v2:
            return
        message = Message(
            v3_and_below_transactional_id=self._name,
            v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=[Message(name=topic.name, partitions=[0])],
        )

        def done() -> bool:
            answer = self._coordinator(apis.ADD_PARTITIONS_TO_TXN, message, at_most=3)
            code = answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code
            require_permission(code)
            if code not in _LATER:
                same_code(code, "AddPartitionsToTxn")
            return bool(code == Error.NONE)

        self._kafka.until(done, "the partition to be added")

    def append(self, topic: Topic, records: bytes) -> Answer:
        """Retry while the coordinator still writes the previous transaction's markers (v2): nothing is appended."""
        assert isinstance(topic, AnyTopic)
        version = PRODUCE_V2 if self._v2 else PRODUCE
        return self._kafka.wait(
            lambda: topic.produce(records, version, name=self._name),
            "the transactional append",
            lambda answer: answer.error_code not in _LATER,
        )

    def _described(self) -> Message:
        message = Message(transactional_ids=[self._name])
        (state,) = self._coordinator(apis.DESCRIBE_TRANSACTIONS, message, at_most=0).transaction_states
        require_permission(state.error_code)
        same_code(state.error_code, "DescribeTransactions")
        found: Message = state
        return found

    def is_on(self, topic: Topic) -> bool:
        assert isinstance(topic, AnyTopic)
        return topic.name in [each.topic for each in self._described().topics]

    def say_end(self, epoch: int, *, commit: bool) -> int:
        return self._kafka.wait(
            lambda: int(self._end_txn(epoch, commit).error_code),
            "an answer to EndTxn",
            lambda code: code not in _COORDINATOR_BUSY,
        )

    def state(self) -> str:
        return str(self._described().transaction_state)

    def _end_txn(self, epoch: int, commit: bool) -> Message:
        version = 5 if self._v2 else 3
        message = Message(
            transactional_id=self._name, producer_id=self.producer_id, producer_epoch=epoch, committed=commit
        )
        return self._coordinator(apis.END_TXN, message, at_least=version if self._v2 else 1, at_most=version)

    def end(self, *, commit: bool) -> None:
        answer = self._end_txn(self.epoch, commit)
        same_code(answer.error_code, "EndTxn")
        if self._v2:
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
