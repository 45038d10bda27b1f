"""Producers that write per-key counters to a topic that is expanded, each kind with its usual configuration.

    declared        librdkafka; states the partition count of each record, and places it again after a refusal
    silent          Kafka's Java producer, which states no count: the proxy places its keys during the grace period
    library …       the client library's OrderedProducer, which never waits between records
    transactional   librdkafka; each round is one transaction, which is aborted and repeated after a refusal

Each writer has separate keys, so all of them write to one topic at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import confluent_kafka
from aiokafka.errors import KafkaError as AiokafkaError
from kafka.errors import KafkaError as KafkaPythonError

from tests.kit import producers
from tests.kit.java import JavaError
from tests.kit.threads import Worker
from tests.support.keyed import Keyed

T = TypeVar("T")
#: (key, count) → partition.
Place = Callable[[str, int], int]
_PAUSE_SECONDS = 0.05
#: Brokers and proxies may be killed and restarted meanwhile.
PATIENCE_SECONDS = 180.0
#: Without librdkafka's log of broken connections, which are expected.
_QUIET = {"log_level": 0}
#: How many rounds the library gets at once.
_BURST = 5


@dataclass(frozen=True, slots=True)
class Work:
    """What to write. `count` – the initial number of partitions."""

    bootstrap: str
    topic: str
    place: Place
    count: int
    keys: int
    rounds_per_second: float


def _patiently(call: Callable[[], T], is_temporary: Callable[[Exception], bool] = lambda error: True) -> T:
    """Repeat the call after temporary errors of a client: brokers and proxies may be down."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return call()
        except (KafkaPythonError, AiokafkaError, confluent_kafka.KafkaException) as error:
            if not is_temporary(error) or time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


class Writer(Worker):
    """`written` – acknowledged records by key. `refused` – how many records were resent because of the topic's count
    (unknown for the library's producers)."""

    kind = ""

    def __init__(self, work: Work) -> None:
        super().__init__(self.kind)
        self.written: dict[str, int] = {}
        self.refused = 0
        self._bootstrap, self._topic, self._partition, self._count = work.bootstrap, work.topic, work.place, work.count
        self._keys, self._pause = work.keys, 1 / work.rounds_per_second

    def start(self) -> None:
        self.written = {f"{self.name.replace(' ', '-')}-{i}": 0 for i in range(self._keys)}
        super().start()

    @property
    def rounds(self) -> int:
        return min(self.written.values())

    def end(self) -> None:
        self.stop()
        self.join(PATIENCE_SECONDS)

    def work(self) -> None:
        try:
            self._open()
            while not self.over.wait(self._pause):
                self._round()
        finally:
            self._close()

    def _open(self) -> None: ...

    def _close(self) -> None: ...

    def _round(self) -> None:
        """Write one or several more records of each key; return when all are acknowledged."""
        raise NotImplementedError

    def _learn_count(self, client: Any) -> None:
        # A refusal for the partition count closes a client's connection.
        self._count = _patiently(lambda: len(client.list_topics(self._topic, 10).topics[self._topic].partitions))

    def _header(self) -> list[tuple[str, str | bytes | None]]:
        return [("fencepost-partition-count", b"%d" % self._count)]


class ByRounds(Writer):
    """Sends one record per key and round. A round ends when all records are acknowledged, so resends do not change the
    order of a key's records."""

    def _round(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        left = list(self.written)
        while left:
            failed = self._send(left)
            for key in left:
                if key not in failed:
                    self.written[key] += 1
            left = list(failed)
            if not left:
                return
            assert time.monotonic() < deadline, f"{self.name}'s records are always refused: {set(failed.values())}"
            self.refused += len(left)
            time.sleep(_PAUSE_SECONDS)
            self._after_refusal()

    def _send(self, keys: list[str]) -> dict[str, str]:
        """Send the next record of each key; return the failed ones, with the reason."""
        raise NotImplementedError

    def _after_refusal(self) -> None: ...


class Declared(ByRounds):
    """`learns` – learns the partition count only from refusals; otherwise it queries it before every round."""

    kind = "declared"
    learns = True

    def _open(self) -> None:
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": self._bootstrap, "enable.idempotence": True, "linger.ms": 1, **_QUIET}
        )

    def _round(self) -> None:
        if not self.learns:
            self._learn_count(self._producer)
        super()._round()

    def _send(self, keys: list[str]) -> dict[str, str]:
        outcomes: dict[str, str | None] = {}
        self._migrate(keys, outcomes)
        assert self._producer.flush(PATIENCE_SECONDS) == 0, f"{self.name}'s records were not acknowledged"
        return {key: error for key, error in outcomes.items() if error is not None}

    def _migrate(self, keys: list[str], outcomes: dict[str, str | None]) -> None:
        """`outcomes` – by key, filled in later: None, or the error."""

        def delivered(key: str, error: confluent_kafka.KafkaError | None) -> None:
            outcomes[key] = None if error is None else error.name()

        for key in keys:
            self._producer.produce(
                self._topic,
                b"%d" % (self.written[key] + 1),
                key,
                self._partition(key, self._count),
                on_delivery=lambda error, _, key=key: delivered(key, error),  # type: ignore[misc]
                headers=self._header(),
            )

    def _after_refusal(self) -> None:
        self._learn_count(self._producer)


class Querying(Declared):
    """For a topic without ordered expansion."""

    learns = False


class Silent(ByRounds):
    """Places keys as Kafka's producers do by default, whatever `place` is."""

    kind = "silent"

    def _open(self) -> None:
        # Metadata does not expire during a run: the producer learns the count from a refusal.
        self._java = Keyed("Java", self._bootstrap, linger_ms=1)

    def _close(self) -> None:
        self._java.close()

    def _send(self, keys: list[str]) -> dict[str, str]:
        sent = {key: self._java.start(self._topic, key, f"{self.written[key] + 1}") for key in keys}
        failed = {}
        for key, future in sent.items():
            try:
                future.result(PATIENCE_SECONDS)
            except JavaError as error:
                failed[key] = error.kind
        return failed


class Library(Writer):
    """Sends records sequentially; waits only for the outcomes of a burst."""

    def __init__(self, work: Work, library: str) -> None:
        super().__init__(work)
        self.name = f"library {library}"
        self._library = library

    def _open(self) -> None:
        place = self._partition
        self._producer = producers.ordered(
            self._library,
            self._bootstrap,
            partitioner=lambda key, count: place(key.decode(), count),
            repartition_timeout_seconds=PATIENCE_SECONDS,
        )

    def _close(self) -> None:
        self._producer.close()

    def _round(self) -> None:
        sent = []
        for number in range(1, _BURST + 1):
            sent += [self._send(key, f"{before + number}") for key, before in self.written.items()]
            time.sleep(self._pause)
        failed = producers.failures(sent)
        assert not failed, f"{self.name}: {failed[:3]}"
        for key in self.written:
            self.written[key] += _BURST

    def _send(self, key: str, value: str) -> Future[producers.Placed]:
        """The library checks now and then whether the check is still on. It sends nothing while it cannot."""
        return _patiently(lambda: self._producer.send(self._topic, value, key=key, partition=None))


class Transactional(Declared):
    kind = "transactional"

    def _open(self) -> None:
        config = {"transactional.id": f"order-{uuid4().hex}", "linger.ms": 1, "transaction.timeout.ms": 30_000}
        self._producer = confluent_kafka.Producer({"bootstrap.servers": self._bootstrap, **config, **_QUIET})
        self._again(lambda: self._producer.init_transactions(10))

    def _send(self, keys: list[str]) -> dict[str, str]:
        self._producer.begin_transaction()
        outcomes: dict[str, str | None] = {}
        try:
            self._migrate(keys, outcomes)
            deadline = time.monotonic() + PATIENCE_SECONDS
            # flush() would wait: after one refusal, librdkafka sends no other record until they time out.
            while len(outcomes) < len(keys) and not any(outcomes.values()):
                assert time.monotonic() < deadline, f"{self.name}'s records were not acknowledged"
                self._producer.poll(_PAUSE_SECONDS)
            if not any(outcomes.values()):
                self._again(lambda: self._producer.commit_transaction(10))
                return {}
        except confluent_kafka.KafkaException as error:
            # A refusal while other records were being queued leaves a state that permits only an abort.
            code = error.args[0].code()
            if not error.args[0].txn_requires_abort() and code != confluent_kafka.KafkaError._STATE:
                raise
        self._again(lambda: self._producer.abort_transaction(10))
        return dict.fromkeys(keys, next(filter(None, outcomes.values()), "aborted"))

    def _again(self, call: Callable[[], None]) -> None:
        _patiently(call, lambda error: error.args[0].retriable())


WRITERS: dict[str, Callable[[Work], Writer]] = {
    "declared": Declared,
    "silent": Silent,
    "transactional": Transactional,
    **{f"library {each}": partial(Library, library=each) for each in ("kafka-python", "aiokafka", "confluent-kafka")},
}
