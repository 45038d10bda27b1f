#!/usr/bin/env python3
"""Load files into a Kafka topic through Fencepost: each row once, whatever dies, resumed by running it again.

    spark-submit bulk_load.py --input flights.csv --bootstrap PROXY:9092 --topic flights

How it can be sure (KIP-27, "bulk load"): every row has one place. Its Kafka partition follows from its key or its
content, its rank within that partition from the order of the input, so row `i` of a partition belongs at offset
`start + i`, however Spark splits the files and however often the load is started. Each batch is sent with the offset
that it expects; one that is sent twice, late, or by a process that should be dead is refused by the proxy.

Nothing is remembered outside the log. The last record of every batch carries a `bulk-load` header: the load's name, how
many of its rows the partition holds up to here, and a digest of them. A new run reads the last record of each
partition, skips that many rows, and goes on only if their digest is the same. A worker whose batch is refused does what
it does at the start: it looks at the last record. Rows of this load (an earlier try, or a worker of a killed driver
that still writes) are skipped; anything else is another writer, and the load stops and says at which offset.

This file is all there is: Spark ships its functions to the workers, which need Python's `aiokafka` and `cramjam`. No
Kafka connector and no jar is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import posixpath
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, field, replace
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import pyspark.sql.functions as sf
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaConnectionError, KafkaError, KafkaTimeoutError, PolicyViolationError
from aiokafka.helpers import create_ssl_context
from aiokafka.partitioner import murmur2
from pyspark.sql import Column, DataFrame, SparkSession

#: Headers of the proxy's contract: on the first record of a batch, which binds the whole batch.
EXPECTED_OFFSET = "expected-offset"
WRITE_ID = "write-id"
#: This job's own header, on the last record of a batch. A log is only ever truncated between batches, so the last
#: record of a partition has it for as long as nobody else writes.
PROGRESS = "bulk-load"

CHECK_CONFIG = "check.expected.offsets"

#: Uncompressed, so that a batch fits Kafka's default `max.message.bytes` (1 MiB) however badly it compresses.
BATCH_BYTES_MAX = 900_000
#: What a record takes beside its key and value, at most, headers apart: seven varints and its attributes.
RECORD_OVERHEAD_BYTES = 36
RETRY_SECONDS = 0.5
#: Of one request, the wait for a broker or a proxy that restarts included; `--patience` bounds the whole.
REQUEST_TIMEOUT_MS = 15_000


class LoadError(Exception):
    """The load cannot go on and trying again would not help; the message says what to do."""


class Row(NamedTuple):
    """A record to be: what goes into Kafka as it is."""

    key: bytes | None
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker must know. It travels with the task, secrets in `client` included."""

    bootstrap: str
    topic: str
    load: str
    partition_count: int
    batch_records_max: int
    compression: str | None
    patience_seconds: float
    first_run: bool
    after_others: bool
    client: dict[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one Kafka partition. `start_offset` is where its row 0 lies; `problem` is None for a success."""

    partition: int
    start_offset: int = -1
    rows_found: int = 0
    rows_appended: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """The `bulk-load` header: below `end_offset` the partition holds the first `rows` rows of `load`, and `digest`."""

    load: str
    rows: int
    partition_count: int
    digest: str
    end_offset: int

    def encode(self) -> bytes:
        said = {"load": self.load, "rows": self.rows, "partitions": self.partition_count, "digest": self.digest}
        return json.dumps(said, separators=(",", ":")).encode()

    @classmethod
    def of(cls, record: ConsumerRecord) -> Progress | None:
        """None for a record without a `bulk-load` header that can be read: somebody else's."""
        try:
            said = json.loads(dict(record.headers)[PROGRESS])
            return cls(
                str(said["load"]),
                int(said["rows"]),
                int(said["partitions"]),
                str(said["digest"]),
                record.offset + 1,
            )
        except (KeyError, TypeError, ValueError):
            return None


class Rows:
    """The rows of one partition in their order, and a digest of those that are known to lie in the log."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = iter(rows)
        self._digest = hashlib.blake2b(digest_size=16)
        #: How many lie in the log, which is the number of the next one.
        self.done = 0

    def skip_until(self, count: int) -> bool:
        """Count rows as done until `count` are. False if there are not so many."""
        while self.done < count:
            row = next(self._rows, None)
            if row is None:
                return False
            _add(self._digest, row)
            self.done += 1
        return True

    def digest(self, ahead: Iterable[Row] = ()) -> str:
        """Of the rows that are done and those of `ahead`."""
        digest = self._digest.copy()
        for row in ahead:
            _add(digest, row)
        return digest.hexdigest()

    def next_batch(self, records_max: int) -> list[Row]:
        """The next rows that fit one batch: at least one, where there is one. Give them back with `put_back`."""
        batch: list[Row] = []
        size = 0
        for row in self._rows:
            size += len(row.key or b"") + len(row.value or b"") + RECORD_OVERHEAD_BYTES
            if batch and size > BATCH_BYTES_MAX:
                self._rows = chain([row], self._rows)
                break
            batch.append(row)
            if len(batch) == records_max:
                break
        return batch

    def put_back(self, batch: list[Row]) -> None:
        """A batch was tried. How much of it lies in the log is for `skip_until` to say."""
        self._rows = chain(batch, self._rows)


def _add(digest: hashlib.blake2b, row: Row) -> None:
    # Lengths are part of it, or ("ab", "c") and ("a", "bc") would be the same.
    for part in row:
        digest.update(b"-" if part is None else b"%d:" % len(part))
        digest.update(part or b"")


class PartitionLoad:
    """One Kafka partition, on one worker: find the place, append, and when in doubt find the place again."""

    def __init__(self, settings: Settings, partition: int, rows: Iterable[Row]) -> None:
        self._settings = settings
        self._at = TopicPartition(settings.topic, partition)
        self._rows = Rows(rows)
        #: Where row 0 lies; None until it is known.
        self._start: int | None = None
        self._deadline = 0.0

    async def run(self) -> Outcome:
        """Append what is missing. What a retry may cure is retried, for `patience_seconds` without progress."""
        outcome = Outcome(self._at.partition)
        try:
            async with self._clients() as (producer, consumer):
                await self._find_place(consumer)
                outcome = replace(outcome, start_offset=self._end - self._rows.done, rows_found=self._rows.done)
                while batch := self._rows.next_batch(self._settings.batch_records_max):
                    outcome = replace(outcome, rows_appended=await self._append(producer, consumer, batch, outcome))
        except (LoadError, KafkaError) as error:
            return replace(outcome, problem=str(error))
        return outcome

    async def _append(
        self, producer: AIOKafkaProducer, consumer: AIOKafkaConsumer, batch: list[Row], outcome: Outcome
    ) -> int:
        """Try one batch. Returns how many rows of the partition this run has appended, or others did for it."""
        expected = self._end
        target = self._rows.done + len(batch)
        try:
            offset = await self._send(producer, batch, expected)
        except (PolicyViolationError, KafkaError) as error:
            # Refused, or its fate unknown. If it did land, or lands yet, then at `expected` and nowhere else.
            if not isinstance(error, PolicyViolationError) and not _may_pass(error):
                raise LoadError(f"partition {self._at.partition}, offset {expected}: {error}") from error
            self._rows.put_back(batch)
            before = self._rows.done
            await self._find_place(consumer)
            if self._rows.done == before:
                await self._wait_or_give_up(error)
        else:
            if offset != expected:
                raise LoadError(
                    f"partition {self._at.partition}: rows expected at offset {expected} were appended at {offset}. "
                    f"The expectation was not checked: is {CHECK_CONFIG} on, and --bootstrap the proxy?"
                )
            self._rows.put_back(batch)
            self._rows.skip_until(target)
            self._made_progress()
        return self._rows.done - outcome.rows_found

    async def _send(self, producer: AIOKafkaProducer, batch: list[Row], expected: int) -> int:
        """One batch, one request. Returns the offset of its first record; raises KafkaError."""
        settings, first = self._settings, self._rows.done
        progress = Progress(
            settings.load, first + len(batch), settings.partition_count, self._rows.digest(batch), expected + len(batch)
        )
        write_id = f"{settings.load}/{self._at.partition}/{first}+{len(batch)}"
        headers: dict[int, list[tuple[str, bytes]]] = {0: [], len(batch) - 1: []}
        headers[0] += [(EXPECTED_OFFSET, b"%d" % expected), (WRITE_ID, write_id.encode())]
        headers[len(batch) - 1].append((PROGRESS, progress.encode()))
        builder = producer.create_batch()
        for index, row in enumerate(batch):
            # No timestamp: the builder's clock. An old one would be refused, since Kafka forgets producers by it.
            builder.append(timestamp=None, key=row.key, value=row.value, headers=headers.get(index, []))
        builder.close()
        sent = await producer.send_batch(builder, self._at.topic, partition=self._at.partition)
        return int((await sent).offset)

    @property
    def _end(self) -> int:
        """Where the log ends, if nobody else has written."""
        assert self._start is not None
        return self._start + self._rows.done

    async def _find_place(self, consumer: AIOKafkaConsumer) -> None:
        """Count as done what the log holds of this load. Raises LoadError where the rest cannot follow it."""
        partition = self._at.partition
        while True:
            try:
                begin, end, last = await self._last(consumer)
                break
            except KafkaError as error:
                if not _may_pass(error):
                    raise LoadError(f"partition {partition} cannot be read back: {error}") from error
                await self._wait_or_give_up(error)
        if last is not None and last.load == self._settings.load:
            start = last.end_offset - last.rows
            if self._start not in (None, start):
                raise self._somebody_else(self._end)
            self._skip(last)
            self._start = start
        elif self._start is None:
            self._start = await self._start_behind_others(consumer, begin, end)
        elif end != self._end:
            raise self._somebody_else(self._end)

    async def _last(self, consumer: AIOKafkaConsumer) -> tuple[int, int, Progress | None]:
        """Log start, log end (as far as it is replicated), and what the record before the end says of a load."""
        begin = (await consumer.beginning_offsets([self._at]))[self._at]
        end = (await consumer.end_offsets([self._at]))[self._at]
        last = None
        if end > begin:
            async for progress in self._progress(consumer, end - 1, end):
                last = progress
        return begin, end, last

    async def _progress(self, consumer: AIOKafkaConsumer, offset: int, end: int) -> AsyncIterator[Progress | None]:
        """What each record of [offset, end) says of a load."""
        consumer.seek(self._at, offset)
        give_up = time.monotonic() + self._settings.patience_seconds
        while await consumer.position(self._at) < end:
            found = await consumer.getmany(self._at, timeout_ms=1000)
            for record in found.get(self._at, ()):
                if record.offset < end:
                    yield Progress.of(record)
                give_up = time.monotonic() + self._settings.patience_seconds
            if time.monotonic() > give_up:
                raise KafkaTimeoutError(f"no record of offsets {offset} to {end - 1} in time")

    async def _start_behind_others(self, consumer: AIOKafkaConsumer, begin: int, end: int) -> int:
        """Where row 0 lies, or would, in a partition whose last record is not of this load (at the first look)."""
        partition, settings = self._at.partition, self._settings
        if end == 0 or settings.first_run:
            return end
        mine: Progress | None = None
        async for progress in self._progress(consumer, begin, end):
            if progress is not None and progress.load == settings.load:
                mine = progress
        if mine is not None:
            if not settings.after_others:
                raise self._somebody_else(mine.end_offset, rows=mine.rows)
            self._skip(mine)
            return end - mine.rows
        if begin > 0:
            raise LoadError(
                f"partition {partition} has lost its records below offset {begin}, so it cannot be known whether load "
                f"{settings.load!r} had put rows there. If it never ran, say --first-run"
            )
        return end

    def _skip(self, last: Progress) -> None:
        """Count as done what `last` says is there, if they are the rows that the input has."""
        partition, load = self._at.partition, self._settings.load
        if last.partition_count != self._settings.partition_count:
            raise LoadError(
                f"the topic had {last.partition_count} partitions when load {load!r} began and has "
                f"{self._settings.partition_count} now, so rows would move. Load into a topic of its own"
            )
        if last.rows < self._rows.done:
            raise LoadError(
                f"partition {partition} held {self._rows.done} rows of load {load!r} and holds {last.rows} now: the "
                "topic was created anew or has lost data. Run the load again"
            )
        skipped = last.rows > self._rows.done
        if not self._rows.skip_until(last.rows) or self._rows.digest() != last.digest:
            raise LoadError(
                f"the first {last.rows} rows of load {load!r} in partition {partition} are not those of this input, or "
                "it is read with other options. Resume with what the load began with, or name a new one with --load"
            )
        if skipped:
            self._made_progress()

    def _somebody_else(self, offset: int, rows: int | None = None) -> LoadError:
        return LoadError(
            f"another writer appended to partition {self._at.partition} at offset {offset}, behind "
            f"{self._rows.done if rows is None else rows} rows of load {self._settings.load!r}; nothing was "
            "duplicated. Stop it, and run the load again with --after-others to go on behind its records"
        )

    def _made_progress(self) -> None:
        self._deadline = time.monotonic() + self._settings.patience_seconds

    async def _wait_or_give_up(self, error: KafkaError) -> None:
        if time.monotonic() > self._deadline:
            raise LoadError(
                f"partition {self._at.partition}: nothing appended for {self._settings.patience_seconds:.0f} seconds; "
                f"the last error was {error}. The proxy's log has its reason. Run the load again when that is cured"
            ) from error
        await asyncio.sleep(RETRY_SECONDS)

    @asynccontextmanager
    async def _clients(self) -> AsyncIterator[tuple[AIOKafkaProducer, AIOKafkaConsumer]]:
        self._made_progress()
        common = _client_options(self._settings.bootstrap, self._settings.client)
        while True:
            # Not idempotent: the expectation does that work, and a refused idempotent aiokafka producer is wedged.
            producer = AIOKafkaProducer(
                **common,
                acks="all",
                compression_type=self._settings.compression,
                max_batch_size=2 * BATCH_BYTES_MAX,
            )
            consumer = AIOKafkaConsumer(**common, enable_auto_commit=False, auto_offset_reset="none")
            try:
                await producer.start()
                await consumer.start()
                consumer.assign([self._at])
                break
            except KafkaError as error:
                await producer.stop()
                await consumer.stop()
                await self._wait_or_give_up(error)
        try:
            yield producer, consumer
        finally:
            await producer.stop()
            await consumer.stop()


def _may_pass(error: KafkaError) -> bool:
    return bool(error.retriable) or isinstance(error, KafkaTimeoutError | KafkaConnectionError)


def _client_options(bootstrap: str, client: dict[str, Any]) -> dict[str, Any]:
    """aiokafka's options. `ssl_*` become the SSL context that it wants; a context cannot travel to a worker."""
    options = {name: value for name, value in client.items() if not name.startswith("ssl_")}
    tls = {name.removeprefix("ssl_"): value for name, value in client.items() if name.startswith("ssl_")}
    if tls or str(options.get("security_protocol", "")).endswith("SSL"):
        options["ssl_context"] = create_ssl_context(**tls)
    return {"bootstrap_servers": bootstrap, "request_timeout_ms": REQUEST_TIMEOUT_MS, **options}


def load_partitions(settings: Settings, rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """A Spark task: rows (partition, key, value), sorted by partition, of which there usually is one. Gives Outcomes,
    as tuples: a worker cannot pickle a class of the script that it was sent from.
    """
    for partition, of_partition in groupby(rows, key=itemgetter(0)):
        if partition is None or not 0 <= partition < settings.partition_count:
            problem = f"rows with partition {partition}; the topic has 0 to {settings.partition_count - 1}"
            yield astuple(Outcome(-1, problem=problem))
        else:
            in_order = (Row(row[1], row[2]) for row in of_partition)
            yield astuple(asyncio.run(PartitionLoad(settings, partition, in_order).run()))


def java_partition(key: bytes, partition_count: int) -> int:
    """Where Java's producer, and every client that follows it, puts a key."""
    return int(murmur2(key) & 0x7FFFFFFF) % partition_count


def read_rows(spark: SparkSession, args: argparse.Namespace, partition_count: int) -> DataFrame:
    """`kafka_partition`, `key`, `value`: in as many Spark partitions, each in the order of the input.

    What decides a row's place must not depend on how Spark happens to split the files today: so the order is that of
    file name and position, and a row without a key goes where the hash of its content says.
    """
    suffix = posixpath.splitext(args.input.rstrip("/").removesuffix(".gz"))[1].removeprefix(".")
    kind = args.format or (suffix if suffix in ("jsonl", "parquet") else "csv")
    if kind == "jsonl":
        source = spark.read.text(args.input).where("trim(value) <> ''")
        value: Column = sf.col("value")

        def column(name: str) -> Column:
            return sf.get_json_object("value", f"$['{name}']")

    else:
        reader = spark.read.schema(args.schema) if args.schema else spark.read
        if kind == "csv":
            source = reader.csv(args.input, header=True, mode="FAILFAST", multiLine=args.multiline)
        else:
            source = reader.parquet(args.input)
        value = sf.to_json(sf.struct(*(source[f"`{name}`"] for name in source.columns)), {"ignoreNullFields": "false"})

        def column(name: str) -> Column:
            return sf.col(f"`{name}`")

    def as_bytes(chosen: Column) -> Column:
        return chosen.cast("string").cast("binary")  # binary columns come through as they are

    value = as_bytes(column(args.value) if args.value else value)
    key = as_bytes(column(args.key)) if args.key else sf.lit(None).cast("binary")
    if args.partition_column:
        partition = column(args.partition_column).cast("int")
    else:
        partition = sf.pmod(sf.xxhash64(value), sf.lit(partition_count)).cast("int")
        if args.key:
            # Not by Arrow, which workers may lack.
            place = sf.udf(lambda key: java_partition(bytes(key), partition_count), "int", useArrow=False)
            partition = sf.when(key.isNotNull(), place(key)).otherwise(partition)
    rows = source.select(
        partition.alias("kafka_partition"),
        key.alias("key"),
        value.alias("value"),
        sf.col("_metadata.file_path").alias("file"),
        sf.col("_metadata.file_block_start").alias("block"),
        # Rises with the position within a block, which is all that is asked of it here.
        sf.monotonically_increasing_id().alias("position"),
    )
    if hasattr(rows, "repartitionById"):  # Spark 4.1
        rows = rows.repartitionById(partition_count, "kafka_partition")
    else:
        rows = rows.repartition(partition_count, "kafka_partition")
    rows = rows.sortWithinPartitions("kafka_partition", "file", "block", "position")
    return rows.select("kafka_partition", "key", "value")


async def partition_count_of(bootstrap: str, topic: str, client: dict[str, Any]) -> int:
    """Raises LoadError unless the topic is there and its check is on: otherwise nothing would be checked."""
    admin = AIOKafkaAdminClient(**_client_options(bootstrap, client))
    try:
        await admin.start()
        described = (await admin.describe_topics([topic]))[0]
        if described["error_code"]:
            raise LoadError(f"topic {topic!r} cannot be described (error {described['error_code']}): create it first")
        answers = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic, {CHECK_CONFIG: ""})])
    except KafkaError as error:
        raise LoadError(f"no answer from {bootstrap}: {error}") from error
    finally:
        await admin.close()
    entries = answers[0].to_object()["resources"][0]["config_entries"]
    check = {entry["config_names"]: entry["config_value"] for entry in entries}.get(CHECK_CONFIG)
    if check not in ("true", "required"):
        raise LoadError(
            f"topic {topic!r} has {CHECK_CONFIG}={check}, so rows could be appended twice. Set it to 'required' (or "
            "'true') through the proxy, and give the proxy's address as --bootstrap"
        )
    return len(described["partitions"])


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bulk_load.py",
        description="Load files into a Kafka topic through Fencepost: each row once, whatever dies. Run it again to "
        "resume: the log itself says where. The topic must exist, with check.expected.offsets=required (or true).",
    )
    parser.add_argument("--input", required=True, help="file, directory or glob, as Spark reads it")
    parser.add_argument("--format", choices=["csv", "jsonl", "parquet"], help="default: by the name's ending, else csv")
    parser.add_argument("--bootstrap", required=True, metavar="HOST:PORT", help="the proxy")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--load", metavar="NAME", help="names this load in the log; default: the last part of --input")
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--key", metavar="COLUMN", help="the record's key; decides the partition as Java's producer does"
    )
    place.add_argument("--partition-column", metavar="COLUMN", help="a column that holds the partition's number")
    parser.add_argument("--value", metavar="COLUMN", help="the record's value; default: the row as a JSON object")
    parser.add_argument("--schema", metavar="DDL", help="of a CSV file, 'a INT, b STRING'; default: all strings")
    parser.add_argument(
        "--multiline", action="store_true", help="CSV fields may hold line breaks (files are not split)"
    )
    parser.add_argument(
        "--batch-records", type=int, default=5000, metavar="N", help="at most, in one batch (%(default)s)"
    )
    parser.add_argument("--compression", choices=["none", "gzip", "snappy", "lz4", "zstd"], default="zstd")
    parser.add_argument(
        "--patience", type=float, default=120, metavar="SECONDS", help="without progress, then it fails (%(default)s)"
    )
    parser.add_argument(
        "--first-run", action="store_true", help="this load never ran: do not search a topic with other records for it"
    )
    parser.add_argument(
        "--after-others", action="store_true", help="resume although another writer has appended behind this load"
    )
    parser.add_argument(
        "--client-config",
        metavar="FILE",
        help="JSON object of aiokafka options, such as security_protocol, sasl_plain_password; ssl_cafile, "
        "ssl_certfile, ssl_keyfile name files on the workers",
    )
    return parser


def settings_of(args: argparse.Namespace) -> Settings:
    """Raises LoadError where the topic cannot be loaded into."""
    client: dict[str, Any] = {}
    if args.client_config:
        with open(args.client_config, encoding="utf-8") as file:
            client = json.load(file)
    return Settings(
        bootstrap=args.bootstrap,
        topic=args.topic,
        load=args.load or posixpath.basename(args.input.rstrip("/")),
        partition_count=asyncio.run(partition_count_of(args.bootstrap, args.topic, client)),
        batch_records_max=args.batch_records,
        compression=None if args.compression == "none" else args.compression,
        patience_seconds=args.patience,
        first_run=args.first_run,
        after_others=args.after_others,
        client=client,
    )


def load(spark: SparkSession, args: argparse.Namespace, settings: Settings) -> list[Outcome]:
    """Loads, and says what became of each partition that has rows."""
    # Time zone: it is in the text of timestamps, so in the content that a resumed load compares.
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    rows = read_rows(spark, args, settings.partition_count)
    outcomes = rows.rdd.mapPartitions(lambda of_task: load_partitions(settings, of_task)).collect()
    return [Outcome(*outcome) for outcome in sorted(outcomes)]


def report(settings: Settings, outcomes: list[Outcome]) -> int:
    for outcome in outcomes:
        rows = outcome.rows_found + outcome.rows_appended
        where = f"offsets {outcome.start_offset} to {outcome.start_offset + rows - 1}" if rows else "empty"
        state = outcome.problem or f"{outcome.rows_found} rows were there, {outcome.rows_appended} appended, {where}"
        print(f"bulk_load: {settings.topic}-{outcome.partition}: {state}", flush=True)
    failed = [outcome for outcome in outcomes if outcome.problem is not None]
    total = sum(outcome.rows_found + outcome.rows_appended for outcome in outcomes)
    if failed:
        print(f"bulk_load: NOT complete: {len(failed)} of {len(outcomes)} partitions stopped", file=sys.stderr)
        return 1
    print(f"bulk_load: complete: {total} rows of load {settings.load!r} in {settings.topic}", flush=True)
    return 0


def main() -> int:
    args = arguments().parse_args()
    try:
        settings = settings_of(args)
    except LoadError as error:
        print(f"bulk_load: {error}", file=sys.stderr)
        return 1
    spark = SparkSession.builder.appName(f"bulk_load {settings.load}").getOrCreate()
    try:
        outcomes = load(spark, args, settings)
    finally:
        spark.stop()
    return report(settings, outcomes)


if __name__ == "__main__":
    sys.exit(main())
