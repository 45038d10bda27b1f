"""Rows on real Kafka: raw connections to a proxy process, and the log read at Kafka's own address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kafka.protocol.admin import DeleteRecordsRequest
from kafka.protocol.producer import AddPartitionsToTxnRequest, EndTxnRequest

from fencepost_proxy.preflight.conformance.requests import kafka_configs
from tests.contract.rows import CONFIGS, OTHER, Faulty, Row
from tests.contract.wire import WireLevel
from tests.kit.fault_proxy import Cut, FaultProxy, Hold
from tests.kit.waiting import until
from tests.support import raw
from tests.support.kafka import unique_topic
from tests.support.proxy import ProxyProcess

#: A config file: names of topics begin with that of their configs. Long leases, because no row changes configs. A file
#: has no configs of a newer version.
CONFIG = "config_lease_seconds = 30.0\n" + "\n".join(
    f'[topics."{name}--*"]\n' + "".join(f'"{key}" = "{value}"\n' for key, value in configs.items())
    for name, configs in CONFIGS.items()
    if configs and not name.startswith("newer")
)


def await_first_append(proxy: ProxyProcess) -> None:
    """Kafka and the proxy have just started: on a busy machine the first append may have to be tried again."""
    topic = unique_topic("checked--")
    with raw.Connection(proxy.bootstrap) as connection:
        assert connection.create_topic(topic) == (0, None)
        append = raw.batch(b"first", expected=0)
        until(lambda: connection.append(topic, append).error_code == 0, "the first append")


class RealLevel(WireLevel):
    """`pipe`: between `proxy` and Kafka. `other`: starts the other process, which has `refusal_scope = "request"`."""

    def __init__(
        self, row: Row, kafka: str, pipe: FaultProxy, proxy: ProxyProcess, other: Callable[[], ProxyProcess]
    ) -> None:
        def connect(via: str) -> raw.Connection:
            process = other() if via == OTHER or row.scope == "request" else proxy
            return raw.Connection(process.bootstrap)

        super().__init__(row, unique_topic(f"{row.topic}--"), connect)
        self._log, self._pipe = raw.Log(kafka), pipe
        self.second_topic = unique_topic(f"{row.second}--")
        configs = kafka_configs(row.settings)
        for name in {self.place(partition)[0] for partition in row.logs}:
            created = self.connection("first").create_topic(name, partitions=row.partitions, configs=configs)
            assert created == (0, None), created
        self.fill()

    def new_producer(self) -> tuple[int, int]:
        producer = self.connection("first").init_producer_id()
        return producer.id, producer.epoch

    def shared_producer(self) -> tuple[int, int]:
        last = self._log.batches(self.topic)[-1]
        return last.producer_id, last.producer_epoch

    def stored(self, partition: int) -> list[raw.Logged]:
        return self._log.batches(*self.place(partition), self.log_start)

    def bypass(self, records: bytes) -> int:
        with self._log.connect(self.topic) as direct:
            return direct.append(self.topic, records).base_offset

    @contextmanager
    def fault(self, faulty: Faulty) -> Iterator[None]:
        words = faulty.send.parts[0].batch.values[0]
        fault = (Cut if faulty.response == "lost" else Hold)("response", words)
        self._pipe.add(fault)
        yield
        fault.wait()
        if isinstance(fault, Hold):
            fault.release()

    def begin(self, producer: str) -> tuple[int, int]:
        name = self.transactional_id(producer)
        client = self.connection("first")
        number, epoch, _ = until(lambda: client.init_producer_id(name), "a producer id")
        topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=self.topic, partitions=[0])
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=number,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=[topic],
        )

        def added() -> bool:
            (of_topic,) = client.query(request, 3).results_by_topic_v3_and_below
            return bool(of_topic.results_by_partition[0].partition_error_code == 0)

        until(added, "the partition to be in the transaction")
        return number, epoch

    def end(self, producer: str, *, commit: bool) -> None:
        number, epoch = self._ids[producer]
        name = self.transactional_id(producer)
        request = EndTxnRequest(transactional_id=name, producer_id=number, producer_epoch=epoch, committed=commit)
        client = self.connection("first")
        until(lambda: client.query(request, 3).error_code == 0, "the end of the transaction")

    def await_end(self, log_end: int) -> None:
        until(lambda: self._log.end(self.topic) == log_end, f"the log end {log_end}")

    def delete_records(self, before: int) -> None:
        topic = DeleteRecordsRequest.DeleteRecordsTopic
        partition = topic.DeleteRecordsPartition(partition_index=0, offset=before)
        deleted = topic(name=self.topic, partitions=[partition])
        with self._log.connect(self.topic) as direct:
            direct.query(DeleteRecordsRequest(topics=[deleted], timeout_ms=10_000), 2)
