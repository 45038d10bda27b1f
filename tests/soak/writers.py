"""The kinds of writers of a soak: raw requests, and those of `tests/kit/writers.py`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from fencepost import RetryPolicy
from tests.kit.history import TRY_AGAIN, UNKNOWN, Manner, Reported
from tests.kit.writers import ClientWriter, LogWriter, Transactional, Writer
from tests.soak.stage import PROXIES
from tests.support.raw import Closed, Connection, Producer, batch
from tests.support.writers import NOT_LEADER, reported_by

#: How long a client may retry, and how long one request may take.
DELIVERY_SECONDS = 12.0
REQUEST_SECONDS = 4.0
_REQUEST_MS = int(REQUEST_SECONDS * 1000)
_SOCKET_SECONDS = 7.0


class RawWriter(Writer):
    """Pipelined batches with consecutive expected offsets, without retries; or one batch at a time.

    `batches`, `records` – their numbers, chosen at random. Idempotent ones have sequences that continue after a
    refusal.
    """

    def __init__(
        self, *place: Any, batches: Sequence[int] = (1,), records: Sequence[int] = (1, 1, 1, 3), **more: Any
    ) -> None:
        super().__init__(*place, **more)
        self._batches, self._records = batches, records
        self._pipelines = itertools.count(1)
        self.producer: Producer | None = None

    def open(self) -> None:
        self.connection = self.connect(self.bootstrap)
        if self.manner.idempotent:
            self.producer = self.connection.init_producer_id()

    def connect(self, bootstrap: str) -> Connection:
        return connect_to_leader(bootstrap, self.topic, _SOCKET_SECONDS)

    def close(self) -> None:
        self.connection.close()

    def batch(self, ids: Sequence[str], expected: int | None) -> bytes:
        producer, write_id = self.producer, ids[0].encode() if self.manner.named else None
        if producer is not None:
            self.producer = producer._replace(sequence=producer.sequence + len(ids))
        return batch(*(each.encode() for each in ids), expected=expected, producer=producer, write_id=write_id)

    def step(self) -> None:
        end = self.expectation() if self.conditional else None
        count = self.random.choice(self._batches)
        pipeline_key = f"{self.name}/pipeline {next(self._pipelines)}" if count > 1 else None
        calls, batches = [], []
        for _ in range(count):
            ids = [self.new_id() for _ in range(self.random.choice(self._records))]
            batches.append(self.batch(ids, end))
            calls.append(self.call(ids, end, pipeline_key=pipeline_key))
            end = None if end is None else end + len(ids)
        left = list(calls)
        try:
            for answer in self.connection.pipeline(self.topic, batches, timeout_ms=_REQUEST_MS):
                self.reported(left.pop(0), reported_by(answer))
        except (OSError, Closed) as error:
            for operation in left:
                self.reported(operation, Reported(UNKNOWN, code=type(error).__name__))
            raise
        if answer.error_code == NOT_LEADER:
            raise OSError("another leader, perhaps")


class RawRetrier(RawWriter):
    """Sends each batch again until its outcome is known: through either proxy, or if idempotent through its own."""

    def open(self) -> None:
        self._open: Connection | None = None
        if self.manner.idempotent:
            with Connection(self.bootstrap, timeout_seconds=_SOCKET_SECONDS) as connection:
                self.producer = connection.init_producer_id()

    def step(self) -> None:
        each, expected = self.new_id(), self.expectation()
        records = self.batch([each], expected)
        operation = self.call([each], expected)
        give_up = time.monotonic() + 2 * DELIVERY_SECONDS
        proxies = (self.proxy,) if self.manner.idempotent else PROXIES
        while True:
            try:
                if self._open is None:
                    self._open = self.connect(self.crew.address(self.random.choice(proxies)))
                reported = reported_by(self._open.append(self.topic, records, timeout_ms=_REQUEST_MS))
            except (OSError, Closed, AssertionError) as error:
                reported = Reported(UNKNOWN, code=type(error).__name__)
            # "Try again" covers one attempt: an earlier one may have been appended.
            if reported.outcome not in (UNKNOWN, TRY_AGAIN) or time.monotonic() > give_up:
                break
            self.close()
            if self.over.wait(0.1):
                break
        if reported.outcome == TRY_AGAIN:
            reported = Reported(UNKNOWN, code=reported.code)
        self.reported(operation, reported)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = None


def connect_to_leader(bootstrap: str, topic: str, timeout_seconds: float) -> Connection:
    with Connection(bootstrap, timeout_seconds=timeout_seconds) as queried:
        metadata = queried.metadata(topic)
    brokers = {each.node_id: f"{each.host}:{each.port}" for each in metadata.brokers}
    partitions = metadata.topics[0].partitions
    leader = partitions[0].leader_id if partitions else -1
    if leader not in brokers:
        raise OSError(f"{topic} has no leader")
    return Connection(brokers[leader], timeout_seconds=timeout_seconds)


# --- the kinds --------------------------------------------------------------------------------------------------------

_IDEMPOTENT, _NOT_IDEMPOTENT = {"enable_idempotence": True}, {"enable_idempotence": False}
_NAMED, _SEQUENCED = Manner(named=True, resends=True), Manner(resends=True, idempotent=True)
_SILENT = replace(_SEQUENCED, sees_messages=False)


def _configs(library: str, **more: Any) -> dict[str, Any]:
    """Settings that let a library give up in time."""
    request_ms, delivery_ms = int(REQUEST_SECONDS * 1000), int(DELIVERY_SECONDS * 1000)
    found: dict[str, Any] = {
        "kafka-python": {
            "request_timeout_ms": request_ms,
            "delivery_timeout_ms": delivery_ms,
            "max_block_ms": delivery_ms,
            "retries": 1000,
            "acks": "all",
            "connections_max_idle_ms": 60_000,
        },
        "aiokafka": {"request_timeout_ms": request_ms, "acks": "all"},
        "confluent-kafka": {
            "message_timeout_ms": delivery_ms,
            "request_timeout_ms": request_ms,
            "socket_timeout_ms": request_ms,
            "linger_ms": 0,
        },
        "java": {
            "request_timeout_ms": request_ms,
            "delivery_timeout_ms": delivery_ms,
            "max_block_ms": delivery_ms,
            "linger_ms": 0,
        },
    }[library]
    return found | more


def _client(
    client: str, manner: Manner, settings: Mapping[str, Any] = MappingProxyType({}), **more: Any
) -> Callable[..., Writer]:
    return partial(ClientWriter, client=client, manner=manner, settings=_configs(client, **settings), **more)


def _log(client: str) -> Callable[..., Writer]:
    policy = RetryPolicy(attempt_seconds=REQUEST_SECONDS, total_seconds=3 * DELIVERY_SECONDS)
    return partial(LogWriter, client=client, policy=policy)


def _transactional(client: str) -> Callable[..., Writer]:
    return partial(Transactional, client=client, settings=_configs(client))


#: Kind → a writer of (kind, crew, topic, proxy). A pipeline's requests, or its records, go out together; a plain writer
#: states no expected offset.
KINDS: dict[str, Callable[..., Writer]] = {
    "raw": RawWriter,
    "raw-plain": partial(RawWriter, conditional=False, records=(1,)),
    "raw-pipeline": partial(RawWriter, batches=range(2, 9), records=(1,)),
    "raw-pipeline-sequenced": partial(RawWriter, batches=range(2, 9), records=(1,), manner=Manner(idempotent=True)),
    "raw-named": partial(RawRetrier, manner=_NAMED),
    "raw-sequenced": partial(RawRetrier, manner=_SEQUENCED),
    "kafka-python": _client("kafka-python", _NAMED, ours=True),
    "aiokafka": _client("aiokafka", replace(_NAMED, sees_messages=False, reads_end=True), ours=True),
    "confluent": _client("confluent-kafka", replace(_NAMED, sees_messages=False), ours=True),
    "kafka-python-headers": _client("kafka-python", Manner(resends=True), settings=_NOT_IDEMPOTENT),
    "aiokafka-headers": _client("aiokafka", replace(_SILENT, named=True), settings=_IDEMPOTENT),
    "confluent-headers": _client("confluent-kafka", replace(_SILENT, named=True), settings=_IDEMPOTENT),
    "confluent-headers-not-idempotent": _client(
        "confluent-kafka", replace(_NAMED, sees_messages=False), settings=_NOT_IDEMPOTENT
    ),
    "java": _client("java", _SEQUENCED),
    "java-pipeline": _client("java", _SEQUENCED, at_once=6),
    "java-named": _client("java", _NAMED, settings=_NOT_IDEMPOTENT),
    "kafka-python-plain": _client("kafka-python", _SEQUENCED, conditional=False),
    "confluent-plain": _client("confluent-kafka", _SILENT, conditional=False, settings=_IDEMPOTENT),
    "aiokafka-plain": _client("aiokafka", Manner(resends=True, sees_messages=False), conditional=False),
    "java-plain": _client("java", _SEQUENCED, conditional=False, at_once=3),
    "kafka-python-log": _log("kafka-python"),
    "aiokafka-log": _log("aiokafka"),
    "confluent-log": _log("confluent-kafka"),
    "confluent-transactional": _transactional("confluent-kafka"),
    "java-transactional": _transactional("java"),
    "aiokafka-transactional": _transactional("aiokafka"),
}
