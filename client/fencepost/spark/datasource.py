"""The format `fencepost`: the classes that Spark calls on the driver and in tasks.

For each micro-batch, Spark creates a writer on the driver, and another in a separate process for the commit. It pickles
only the first, for the tasks. So the driver's snapshot is taken on pickling, and a commit reads nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import importlib.metadata
import json
import logging
import os
import pickle
import random
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark import __version__ as spark_version
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from fencepost.records import CHECK_CONFIG, COUNT_CHECK_CONFIG
from fencepost.spark import closing, driver_probe, encoding
from fencepost.spark.arranging import COUNT_COLUMN, HASH_COLUMN, check_columns
from fencepost.spark.columns import valid
from fencepost.spark.driver_probe import DriverProbe
from fencepost.spark.errors import CannotReach, NotBegun, SinkError
from fencepost.spark.interfaces import TopicIdentity, TopicPartition
from fencepost.spark.log import Log
from fencepost.spark.options import Settings, settings
from fencepost.spark.task import ARRANGE, Task
from fencepost.spark.write import Outcome, Write, Written

try:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceArrowWriter,
        DataSourceStreamArrowWriter,
        WriterCommitMessage,
    )
except ImportError as error:
    raise ImportError(f"fencepost.spark needs Spark 4.1 or later, and this is Spark {spark_version}") from error

_logger = logging.getLogger("fencepost.spark")

#: How long a topic's configs are cached.
_CONFIG_SECONDS = 30.0
#: Lowest min.compaction.lag.ms of a compacted topic.
_COMPACTION_LAG_MS = 86_400_000
_BATCH_ID = "streaming.sql.batchId"
_QUERY_ID = "sql.streaming.queryId"
#: The query of a micro-batch that foreachBatch writes: Spark does not say which one it is.
_FOREACH_BATCH = "foreachBatch"


class _Clock:
    now = staticmethod(time.monotonic)
    random = staticmethod(random.random)

    @staticmethod
    def time_ms() -> int:
        return int(time.time() * 1000)

    @staticmethod
    def wait(futures: Collection[Future[Any]], seconds: float) -> None:
        if futures:
            concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_COMPLETED)
        else:
            time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class _Framing:
    compression: str | None
    level: int | None = None

    def build(self, bodies: pa.Array, **parts: Any) -> bytes:
        return encoding.build(bodies, compression=self.compression, level=self.level, **parts)


# --- state of a process between micro-batches -------------------------------------------------------------------------
#
# Hints, which Kafka can prove wrong. Their keys have topic ids: another topic may have the same name and address.


@dataclass(slots=True)
class _Facts:
    """From the topic's configs."""

    count_checked: bool
    message_bytes_max: int
    retention_ms: int
    known_at: float


#: By topic id.
_facts: dict[str, _Facts] = {}
#: By sink.id and topic ids; the last used ones.
_known: dict[tuple[str, ...], dict[TopicPartition, driver_probe.Observation]] = {}
_KNOWN_MAX = 64


def _facts_of(log: Log, topic: str, identity: TopicIdentity) -> _Facts:
    for each in [each for each, facts in _facts.items() if time.monotonic() - facts.known_at > _CONFIG_SECONDS]:
        del _facts[each]
    if identity.id not in _facts:
        _facts[identity.id] = check_topic(topic, log.config(topic))
    return _facts[identity.id]


def _known_of(sink: str, topics: Mapping[str, TopicIdentity]) -> dict[TopicPartition, driver_probe.Observation]:
    key = (sink, *(identity.id for identity in topics.values()))
    known = _known[key] = _known.pop(key, {})
    if len(_known) > _KNOWN_MAX:
        del _known[next(iter(_known))]
    return known


def check_topic(topic: str, config: Mapping[str, str | None]) -> _Facts:
    """The facts of a topic. Raises SinkError for one that does not allow exactly-once writes."""
    if config.get(CHECK_CONFIG) not in ("true", "required"):
        if CHECK_CONFIG not in config:
            raise SinkError(
                f"topic {topic} has no {CHECK_CONFIG}: kafka.bootstrap.servers is not the proxy (set the option to the "
                "proxy's address)"
            )
        raise SinkError(
            f"topic {topic}: {CHECK_CONFIG} is off, so rows could be written twice (switch it on: kafka-configs.sh "
            f"--bootstrap-server PROXY --alter --topic {topic} --add-config {CHECK_CONFIG}=true)"
        )
    if (
        "compact" in (config.get("cleanup.policy") or "")
        and _int(config, "min.compaction.lag.ms", 0) < _COMPACTION_LAG_MS
    ):
        raise SinkError(
            f"topic {topic} is compacted: rows of an unfinished batch could be lost before a "
            f"retry (set its min.compaction.lag.ms to at least {_COMPACTION_LAG_MS}, one day)"
        )
    return _Facts(
        config.get(COUNT_CHECK_CONFIG) in ("true", "required"),
        _int(config, "max.message.bytes", 1_048_588),
        _int(config, "retention.ms", -1),
        time.monotonic(),
    )


def _int(config: Mapping[str, str | None], name: str, default: int) -> int:
    try:
        return int(config.get(name) or default)
    except ValueError:
        return default


@contextlib.contextmanager
def _without_traceback() -> Iterator[None]:
    """Let Spark report a SinkError as one sentence. Spark reads the variable in the failed process, and ends it."""
    try:
        yield
    except SinkError:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


@functools.cache
def _version() -> str:
    """Version of this library; "" if it was shipped with the job and not installed."""
    try:
        return importlib.metadata.version("fencepost")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _log(chosen: Settings) -> Log:
    return Log.shared(chosen.client, patience_seconds=chosen.plan.patience_seconds)


# --- the writers ------------------------------------------------------------------------------------------------------


class TaskDone(WriterCommitMessage):
    """A task's result for the driver."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


class _Writer:
    """Created on the driver, then pickled for the tasks."""

    #: The rows of a partition have one order, which depends on the data only.
    _is_sorted = False

    def __init__(self, chosen: Settings) -> None:
        self._settings = chosen
        self._probe: DriverProbe | None = None
        self._plan = chosen.plan

    @_without_traceback()
    def __getstate__(self) -> tuple[str, bytes]:
        if self._probe is None:
            try:
                self._probe = self._snapshot()
            except (SinkError, CannotReach) as error:
                raise NotBegun(str(error)) from error
        return _version(), pickle.dumps(self.__dict__)

    @_without_traceback()
    def __setstate__(self, state: tuple[str, bytes]) -> None:
        """Raises SinkError if the driver has another version of fencepost, which may pickle other fields."""
        (sent_by, pickled), installed = state, _version()
        if sent_by and installed and sent_by != installed:
            raise SinkError(
                f"the driver has fencepost {sent_by} and this executor has {installed} (install the same "
                "version on all machines)"
            )
        self.__dict__.update(pickle.loads(pickled))

    def _snapshot(self) -> DriverProbe:
        chosen = self._settings
        topics = self._identify()
        facts = self._read_configs(topics)
        return driver_probe.probe(
            _log(chosen),
            chosen.plan.sink,
            topics,
            at=_Clock.time_ms(),
            count_checked=frozenset(topic for topic, each in facts.items() if each.count_checked),
            known=_known_of(chosen.plan.sink, topics),
            retention_ms={topic: each.retention_ms for topic, each in facts.items()},
        )

    def _identify(self) -> dict[str, TopicIdentity]:
        log = _log(self._settings)
        return {topic: log.identify(topic) for topic in self._settings.topics}

    def _read_configs(self, topics: Mapping[str, TopicIdentity]) -> dict[str, _Facts]:
        """The facts of the topics, which limit the plan."""
        chosen, log = self._settings, _log(self._settings)
        facts = {topic: _facts_of(log, topic, identity) for topic, identity in topics.items()}
        self._plan = chosen.plan_for(min(each.message_bytes_max for each in facts.values()))
        return facts

    def _identity(self, context: TaskContext) -> tuple[str, int]:
        raise NotImplementedError

    @_without_traceback()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return TaskDone(self._written(iterator))

    @_without_traceback()
    def compare(self, iterator: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Instead of `write`: append nothing. Gives the pickled `Outcome`."""
        outcome = self._written(iterator, only_compares=True)
        return iter([pa.RecordBatch.from_pydict({"outcome": [pickle.dumps(outcome)]})])

    def _written(self, iterator: Iterator[pa.RecordBatch], *, only_compares: bool = False) -> Outcome:
        context = TaskContext.get()
        assert context is not None
        assert self._probe is not None
        chosen = self._settings
        query, batch = self._identity(context)
        log, framing, number = _log(chosen), _Framing(chosen.compression, chosen.level), context.partitionId()
        write = Write(self._plan, self._probe, query, batch, number, log, framing, _Clock(), self._is_sorted)
        write.only_compares = only_compares
        task = Task(write)
        task.begin()
        encoder: encoding.Encoder | None = None
        is_whole = not self._is_sorted
        for received in iterator:
            rows, is_whole = _without_end(received) if self._is_sorted else (received, True)
            if encoder is None:
                encoder = encoding.Encoder(rows.schema, record_bytes_max=chosen.record_bytes_max)
            for topic, some in _by_topic(rows, chosen):
                for arranged, same in _by_count(some):
                    task.feed(topic, encoder.bodies(same), _placements(same), arranged)
        if not is_whole:
            raise SinkError(
                f"task {number} got a part of its rows: Spark stopped it (see the first failure), or a step after "
                "arrange removed the last row of each task (keep the rows with a negative fencepost_hash)"
            )
        return task.finish()

    def _committed(self, messages: Collection[Any], name: str, batch: int | None) -> None:
        outcomes = [message.outcome for message in messages if isinstance(message, TaskDone)]
        if len(outcomes) < len(messages):
            raise SinkError(
                f"{name}: {len(messages) - len(outcomes)} of {len(messages)} tasks ran without the "
                "sink, so their rows are not in the topic: trigger(continuous=…) is not supported "
                "(use processingTime or availableNow)"
            )
        closing.refuse_without_task(self._plan.sink, outcomes)
        partitions: dict[tuple[str, int], Written] = {}
        for outcome in outcomes:
            for topic_partition, written in outcome.partitions.items():
                partitions[topic_partition] = _sum(partitions.get(topic_partition), written)
        self._close(outcomes, partitions)
        _say(self._plan.sink, batch, outcomes, partitions)
        if self._settings.report:
            _write_report(Path(self._settings.report), partitions)

    def _close(self, outcomes: Collection[Outcome], partitions: dict[TopicPartition, Written]) -> None:
        """End a load."""


class _BatchWriter(_Writer, DataSourceArrowWriter):
    """`df.write`: one write per sink.id. Another run continues the same write. With `batch.id`, one micro-batch of a
    stream."""

    _is_sorted = True

    def _is_load(self) -> bool:
        return self._settings.batch_id is None

    def _snapshot(self) -> DriverProbe:
        # Not for patience.seconds: before the first row, a wrong address is likelier than a restart.
        _log(self._settings).connect()
        probe = super()._snapshot()
        observed = probe.observations
        records = sum(each.end - each.start for each in observed.values())
        if records and all(each.last is None for each in observed.values()):
            _logger.warning(
                "%s: none of its rows was found among the %d records of %d partitions, so all rows are appended",
                self.name(),
                records,
                len(observed),
            )
        return probe

    def is_partly_written(self) -> bool:
        """Raises SinkError, CannotReach."""
        self._probe = self._snapshot()
        return self._probe.is_partly_written(self._settings.batch_id or 0)

    def _close(self, outcomes: Collection[Outcome], partitions: dict[TopicPartition, Written]) -> None:
        chosen = self._settings
        if deferred := [outcome.deferred for outcome in outcomes if outcome.deferred]:
            topics = self._identify()
            closing.refuse_recreated(chosen.plan.sink, deferred[0].probed.topic_ids, topics)
            self._read_configs(topics)
        framing = _Framing(chosen.compression, chosen.level)
        for topic_partition, written in closing.close(
            self._plan, outcomes, log=_log(chosen), framing=framing, clock=_Clock()
        ):
            partitions[topic_partition] = _sum(partitions.get(topic_partition), written)

    def _identity(self, context: TaskContext) -> tuple[str, int]:
        batch = self._settings.batch_id
        return ("", 0) if batch is None else (_FOREACH_BATCH, batch)

    def name(self) -> str:
        return f"sink {self._plan.sink}" + ("" if self._is_load() else f", batch {self._settings.batch_id}")

    @_without_traceback()
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._committed(messages, self.name(), self._settings.batch_id)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _logger.warning("%s: aborted (run it again to continue where it stopped)", self.name())


class _StreamWriter(_Writer, DataSourceStreamArrowWriter):
    def _identity(self, context: TaskContext) -> tuple[str, int]:
        query, batch = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
        if not query or batch is None:
            raise SinkError(
                f"Spark does not give its tasks {_QUERY_ID} and {_BATCH_ID}, which identify a batch "
                "(use Spark 4.1 or newer)"
            )
        return query, int(batch)

    @_without_traceback()
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._committed(messages, f"sink {self._plan.sink}, batch {batchId}", batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _logger.warning("sink %s, batch %d: aborted; the next try continues where it stopped", self._plan.sink, batchId)


def compare(rows: DataFrame, options: Mapping[str, str]) -> None:
    """Compare arranged rows with those that the topic has of their load or batch, if it has some of them.

    A task compares before it appends, but only where the topic has rows of the batch. So it would append other data
    elsewhere, and then neither these data nor the right ones could finish the batch. Raises SinkError, CannotReach, and
    Spark's exceptions.
    """
    writer = _BatchWriter(settings(options))
    if not writer.is_partly_written():
        return
    _logger.info("%s: the topic has a part of its rows, with which all rows are compared first", writer.name())
    compared = rows.mapInArrow(writer.compare, "outcome binary").collect()
    closing.refuse_without_task(options["sink.id"], [pickle.loads(outcome) for (outcome,) in compared])


class FencepostDataSource(DataSource):
    """The format `fencepost`."""

    @classmethod
    def name(cls) -> str:
        return "fencepost"

    @_without_traceback()
    def schema(self) -> StructType | str:
        raise SinkError("format 'fencepost' cannot be read (read with Spark's format 'kafka' and the proxy's address)")

    def reader(self, schema: StructType) -> Any:
        self.schema()

    def streamReader(self, schema: StructType) -> Any:
        self.schema()

    @_without_traceback()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        if overwrite:
            raise SinkError("a topic cannot be overwritten (use mode('append'))")
        return _BatchWriter(self._checked(schema))

    @_without_traceback()
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        if overwrite:
            raise SinkError("outputMode('complete') overwrites, which a topic cannot (use foreachBatch: docs/spark.md)")
        chosen = self._checked(schema)
        if chosen.batch_id is not None:
            raise SinkError("option batch.id is for df.write in foreachBatch (leave it out: Spark numbers the batches)")
        return _StreamWriter(chosen)

    def _checked(self, schema: StructType) -> Settings:
        chosen = settings(self.options)
        names = schema.fieldNames()
        check_columns(schema)
        if chosen.topic_column and "topic" not in names:
            raise SinkError("no topic: set the option 'topic' or add a column `topic`")
        if not {HASH_COLUMN, COUNT_COLUMN} <= set(names):
            raise SinkError(f"the rows are not arranged: {ARRANGE}")
        if chosen.report:
            _check_report(Path(chosen.report))
        if chosen.ignored:
            _logger.info("ignored options: %s", ", ".join(chosen.ignored))
        return chosen


# --- rows -------------------------------------------------------------------------------------------------------------


def _without_end(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, bool]:
    """The rows, and whether they ended with the last row of a task (`arranging.py`), which is left out."""
    if not rows.num_rows or rows.column(HASH_COLUMN)[-1].as_py() >= 0:
        return rows, False
    return rows.slice(0, rows.num_rows - 1), True


def _by_topic(rows: pa.RecordBatch, chosen: Settings) -> Iterator[tuple[str, pa.RecordBatch]]:
    if not rows.num_rows:
        return
    if not chosen.topic_column:
        yield chosen.topics[0], rows
        return
    column = rows.column("topic")
    for topic in pc.unique(column).to_pylist():
        if topic is None:
            raise SinkError("column `topic` of a row is null")
        if topic not in chosen.topics:
            raise SinkError(
                f"column `topic` of a row is {topic}, which the option topics={','.join(chosen.topics)} does not name"
            )
        yield topic, rows.filter(pc.equal(column, topic))


def _by_count(rows: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows by the partition count by which they were arranged: one, unless a union has several."""
    column = rows.column(COUNT_COLUMN)
    counts = pc.unique(column).to_pylist()
    for count in counts:
        yield count, rows if len(counts) == 1 else rows.filter(pc.equal(column, count))


def _placements(rows: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """As `Task.feed` takes them."""
    placements = np.asarray(rows.column(HASH_COLUMN).to_numpy(zero_copy_only=False)).astype(np.int64)
    if "partition" not in rows.schema.names:
        return placements
    stated = rows.column("partition")
    if stated.null_count == len(stated):
        return placements
    numbers = np.asarray(pc.fill_null(stated, 0).to_numpy(zero_copy_only=False)).astype(np.int64)
    if (numbers < 0).any():
        raise SinkError(f"column 'partition' of a row is {numbers.min()} (it must be at least 0)")
    return np.where(valid(stated), -1 - numbers, placements)


def _sum(one: Written | None, other: Written) -> Written:
    if one is None:
        return other
    firsts = [each for each in (one.first, other.first) if each >= 0]
    return Written(
        one.found + other.found, one.appended + other.appended, min(firsts, default=-1), max(one.end, other.end)
    )


def _say(
    sink: str, batch: int | None, outcomes: Collection[Outcome], partitions: Mapping[TopicPartition, Written]
) -> None:
    """One line in the log of the driver. StreamingQueryProgress has metrics of sinks in Java only, and Spark shows
    no INFO line of this process."""
    topics: dict[str, dict[str, int]] = {}
    for (topic, _), written in sorted(partitions.items()):
        sums = topics.setdefault(topic, {"found": 0, "appended": 0})
        sums["found"] += written.found
        sums["appended"] += written.appended
    line = {
        "sink_id": sink,
        "batch": batch,
        "topics": topics,
        "refused_appends": sum(each.refused for each in outcomes),
        "waited_seconds": round(sum(each.waited for each in outcomes), 1),
    }
    print(f"fencepost.spark: {json.dumps(line)}", file=sys.stderr, flush=True)


def _check_report(path: Path) -> None:
    """Raises SinkError early: at the commit, each try would fail after writing all rows."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    except OSError as error:
        raise SinkError(f"option report={path}: the driver cannot write this file: {error}") from error


def _write_report(path: Path, partitions: Mapping[tuple[str, int], Written]) -> None:
    report: dict[str, dict[str, dict[str, int]]] = {}
    for (topic, partition), written in sorted(partitions.items()):
        report.setdefault(topic, {})[str(partition)] = written._asdict()
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_text(json.dumps(report))
    half.replace(path)
