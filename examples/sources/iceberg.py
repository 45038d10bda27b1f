"""Load the rows of an Iceberg table into a topic, snapshot by snapshot, each once and in order.

    pip install 'pyiceberg[pyarrow]'                       # and what the catalog needs
    PYICEBERG_CATALOG__DEFAULT__URI=http://catalog:8181 python iceberg.py shop.orders orders --key customer

A unit is up to 1,000 rows of a data file, in the order of the snapshots and of the files' paths. Its position has the
table, the snapshot's sequence number (Iceberg v2), file and row. A record is a row as JSON. Snapshots that only rewrite
data files are skipped. One that deletes or overwrites rows ends the load with an error, as does one that was expired
before it was loaded. A restart reads the last group again: expire a snapshot only when a later one is in the topic.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq
from kafka import KafkaAdminClient
from kafka.errors import KafkaError
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import RESTError
from pyiceberg.manifest import ManifestEntryStatus
from pyiceberg.table import Table

from fencepost import FencepostError, LoadChangedError, LoadPositionLostError, Record
from fencepost.kafka_python import LogWriter
from fencepost.recipes import Loader

UNIT_ROWS = 1_000

Unit = tuple[list[Record], bytes]


class CannotContinue(Exception):
    """The table does not have the rows after the position, or has not only added rows."""


class Source:
    def __init__(self, table: Table, key: str | None) -> None:
        self._table, self._key = table, key

    def read(self, position: bytes | None) -> Iterator[Unit]:
        """The units after a position, up to the current snapshot."""
        self._table.refresh()
        table = str(self._table.metadata.table_uuid)
        at = {"table": table, "sequence": 0, "complete": True} if position is None else json.loads(position)
        if at["table"] != table:
            raise CannotContinue(f"{self._table.name()} was dropped and created again")
        for snapshot in self._snapshots(at):
            units = self._units(snapshot, at if snapshot.sequence_number == at["sequence"] else None)
            unit = next(units, None)
            while unit is not None:
                rows, file, count = unit
                unit = next(units, None)
                after = {"sequence": snapshot.sequence_number, "file": file, "rows": count, "complete": unit is None}
                yield rows, json.dumps({"table": table, **after}).encode()

    def _snapshots(self, at: dict[str, Any]) -> list[Any]:
        """Those with rows after a position, in order. Each has the next sequence number, unless one was expired: expiry
        may also remove the parent's id from its child."""
        first = at["sequence"] + at["complete"]
        found: list[Any] = []
        snapshot = self._table.current_snapshot()
        while snapshot is not None and snapshot.sequence_number >= first:
            found.insert(0, snapshot)
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)
        numbers = [each.sequence_number for each in found]
        if numbers != list(range(first, first + len(numbers))) or not (numbers or at["complete"]):
            raise CannotContinue(f"the table has snapshots {numbers}, not {first}: they were expired or rolled back")
        return found

    def _units(self, snapshot: Any, at: dict[str, Any] | None) -> Iterator[tuple[list[Record], str, int]]:
        """(rows, file, number of the file's rows up to there) of a snapshot, after a position."""
        for path in self._added_files(snapshot):
            if at is None or path >= at["file"]:
                skip = at["rows"] if at is not None and path == at["file"] else 0
                with self._table.io.new_input(path).open() as stream:
                    count = 0
                    for batch in pq.ParquetFile(stream).iter_batches(UNIT_ROWS):
                        count += batch.num_rows
                        if count > skip:
                            yield [self._record(row) for row in batch.to_pylist()], path, count

    def _added_files(self, snapshot: Any) -> list[str]:
        operation = snapshot.summary.operation.value
        if operation == "replace":
            return []
        if operation != "append":
            raise CannotContinue(f"snapshot {snapshot.snapshot_id} is of the kind {operation}, not append")
        return sorted(
            entry.data_file.file_path
            for manifest in snapshot.manifests(self._table.io)
            if manifest.added_snapshot_id == snapshot.snapshot_id
            for entry in manifest.fetch_manifest_entry(self._table.io, discard_deleted=True)
            if entry.status == ManifestEntryStatus.ADDED
        )

    def _record(self, row: dict[str, Any]) -> Record:
        key = None if self._key is None else str(row[self._key]).encode()
        return Record(json.dumps(row, default=str).encode(), key)


def load(source: Source, name: str, topic: str, bootstrap: str, *, once: bool) -> None:
    with contextlib.closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        [described] = admin.describe_topics([topic])
    logs = [LogWriter(topic, each, bootstrap_servers=bootstrap) for each in range(len(described["partitions"]))]
    with Loader(name, logs) as loader:
        while True:
            before = loader.position
            for rows, position in source.read(before):
                loader.append(rows, position)
            loader.flush()
            if loader.position != before:
                print(f"loaded up to {(loader.position or b'').decode()}", flush=True)
            elif once:
                return
            else:
                time.sleep(5)


def main() -> None:
    parser = argparse.ArgumentParser(description="Load the rows of an Iceberg table into a topic, each once.")
    parser.add_argument("table", help="as NAMESPACE.TABLE")
    parser.add_argument("topic", help="a topic with fencepost.check.expected.offsets=required")
    parser.add_argument("--catalog", default="default", help="its name in pyiceberg's configuration (%(default)s)")
    parser.add_argument("--key", help="the column that has a record's key")
    parser.add_argument("--bootstrap", default="127.0.0.1:19092", help="the proxy (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="end when all rows are in the topic")
    args = parser.parse_args()
    while True:
        try:
            source = Source(load_catalog(args.catalog).load_table(args.table), args.key)
            return load(source, f"iceberg {args.table}", args.topic, args.bootstrap, once=args.once)
        except (CannotContinue, LoadChangedError, LoadPositionLostError) as error:
            raise SystemExit(f"cannot continue: {error}") from None
        except (FencepostError, KafkaError, RESTError) as error:  # the topic says how far the load is
            print(f"starts again: {error}", flush=True)
            time.sleep(1)


if __name__ == "__main__":
    main()
