"""Load the changes of PostgreSQL tables into a topic, each once and in commit order, by logical replication (pgoutput).

    CREATE PUBLICATION orders FOR TABLE orders;                                   -- wal_level=logical
    SELECT pg_create_logical_replication_slot('to_kafka', 'pgoutput');

    python postgres.py 'host=db dbname=shop' --slot to_kafka --publication orders --topic order-changes

A unit of the load is a transaction, its position the end of its commit (LSN). The slot is advanced only to positions
that the topic has, so PostgreSQL keeps what a restart reads again: also the last group. A record's key has the columns
of the table's replica identity, its value the new row, as JSON. Needs `psql`; with a driver, the query is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from fencepost import FencepostError, Record
from fencepost.kafka_python import LogWriter
from fencepost.recipes import Loader

BOOTSTRAP_SERVER = os.environ.get("FENCEPOST_BOOTSTRAP_SERVER", "127.0.0.1:19092")
#: Changes read at a time; PostgreSQL ends with a whole transaction.
CHANGES = 10_000

Row = dict[str, str | None]
Unit = tuple[list[Record], bytes]


class Table(NamedTuple):
    """`columns`: (name, whether it is of the replica identity)."""

    name: str
    columns: Sequence[tuple[str, bool]]


class Message:
    """A message of pgoutput, version 1. https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html"""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(">" + form, self._data, self._at)
        self._at += struct.calcsize(">" + form)
        return int(value)

    def byte(self) -> str:
        return chr(self.number("B"))

    def text(self) -> str:
        end = self._data.index(0, self._at)
        value, self._at = self._data[self._at : end].decode(), end + 1
        return value

    def row(self, table: Table) -> Row:
        """Without large columns that did not change."""
        found: Row = {}
        for name, _ in table.columns[: self.number("H")]:
            kind = self.byte()
            if kind == "t":
                length = self.number("I")
                found[name] = self._data[self._at : self._at + length].decode()
                self._at += length
            elif kind == "n":
                found[name] = None
        return found


def units(messages: Iterator[bytes]) -> Iterator[Unit]:
    """A unit for each transaction."""
    tables: dict[int, Table] = {}
    rows: list[Record] = []
    for data in messages:
        message = Message(data)
        match message.byte():
            case "B":
                rows = []
            case "R":
                number, _, name, _ = message.number("I"), message.text(), message.text(), message.byte()
                columns = []
                for _ in range(message.number("H")):
                    is_key = message.number("B") == 1
                    columns.append((message.text(), is_key))
                    message.number("I"), message.number("i")  # type and modifier
                tables[number] = Table(name, columns)
            case "I" | "U" | "D" as kind:
                rows += change(kind, tables[message.number("I")], message)
            case "C":
                message.number("B"), message.number("Q")  # flags, LSN of the commit
                yield rows, b"%d" % message.number("Q")


def change(kind: str, table: Table, message: Message) -> list[Record]:
    old = new = None
    part = message.byte()
    if part in "KO":
        old = message.row(table)
        part = message.byte() if kind == "U" else ""
    if part == "N":
        new = message.row(table)
    keys = [key_of(table, row) for row in (old, new) if row is not None]
    if len(keys) == 2 and keys[0] != keys[1]:  # the row has a new key
        return [Record(None, keys[0]), Record(json.dumps(new).encode(), keys[1])]
    return [Record(None if new is None else json.dumps(new).encode(), keys[-1])]


def key_of(table: Table, row: Row) -> bytes:
    return json.dumps(
        {"table": table.name, **{name: row.get(name) for name, is_key in table.columns if is_key}}
    ).encode()


class SlotAdvanced(Exception):
    """The slot does not have the transactions after the load's position any more."""


class Slot:
    """`begin`: how far the slot was advanced when this process began."""

    def __init__(self, connection: str, name: str, publication: str) -> None:
        self._connection, self._name, self._publication = connection, name, publication
        self._begin = self._advanced_to()

    def query(self, sql: str) -> list[str]:
        command = ["psql", self._connection, "-qAtX", "-v", "ON_ERROR_STOP=1", "-c", sql]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()

    def _advanced_to(self) -> int:
        where = f"pg_replication_slots WHERE slot_name = '{self._name}'"
        [found] = self.query(f"SELECT confirmed_flush_lsn FROM {where}") or [""]
        if not found:
            raise SystemExit(f"there is no logical replication slot {self._name!r}")
        high, low = found.split("/")
        return (int(high, 16) << 32) + int(low, 16)

    def read(self, position: bytes | None) -> Iterator[Unit]:
        """The next transactions after a position. The slot keeps them until `advance`."""
        after = self._begin if position is None else int(position)
        count, found, whole = CHANGES, list[Unit](), False
        while not (found or whole):  # the slot begins with the last group, which may have any number of changes
            rows = self.query(
                "SELECT encode(data, 'hex') FROM pg_logical_slot_peek_binary_changes("
                f"'{self._name}', NULL, {count}, 'proto_version', '1', 'publication_names', '{self._publication}')"
            )
            # If another process has advanced the slot, transactions after this position may be missing in `rows`.
            if self._advanced_to() > after:
                raise SlotAdvanced(f"another process has advanced slot {self._name!r}")
            found = [unit for unit in units(map(bytes.fromhex, rows)) if int(unit[1]) > after]
            count, whole = 2 * count, len(rows) < count
        yield from found

    def advance(self, position: bytes) -> None:
        high, low = divmod(int(position), 1 << 32)
        to = f"'{high:X}/{low:X}'"
        self.query(
            f"SELECT pg_replication_slot_advance('{self._name}', {to}) FROM pg_replication_slots "
            f"WHERE slot_name = '{self._name}' AND confirmed_flush_lsn < {to}"
        )


def load(slot: Slot, topic: str, bootstrap: str, *, once: bool) -> None:
    with contextlib.closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        [described] = admin.describe_topics([topic])
    logs = [LogWriter(topic, each, bootstrap_servers=bootstrap) for each in range(len(described["partitions"]))]
    with Loader(f"postgres {topic}", logs) as loader:
        if loader.position is not None:
            slot.advance(loader.position)  # the last process may have been killed before it did so
        while True:
            count, stated = 0, loader.position
            for changes, end in slot.read(loader.position):
                loader.append(changes, end)
                count += len(changes)
            loader.flush()
            if count:
                if stated is not None:
                    slot.advance(stated)  # the end of the last group is not in the topic before the next one
                assert loader.position is not None
                print(f"{count} changes, up to {int(loader.position):X}", flush=True)
            elif once:
                return
            else:
                time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Load the changes of PostgreSQL tables into a topic.")
    parser.add_argument("connection", help="as for psql")
    parser.add_argument("--slot", required=True)
    parser.add_argument("--publication", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--bootstrap", default=BOOTSTRAP_SERVER, help="the proxy (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="end when all changes are in the topic")
    args = parser.parse_args()
    while True:
        try:
            slot = Slot(args.connection, args.slot, args.publication)
            return load(slot, args.topic, args.bootstrap, once=args.once)
        except (FencepostError, KafkaError, SlotAdvanced) as error:  # the topic says how far the load is
            print(f"starts again: {error}", flush=True)
            time.sleep(1)
        except subprocess.CalledProcessError as error:  # PostgreSQL restarts, or another process reads the slot
            print(f"starts again: {error.stderr.strip()}", flush=True)
            time.sleep(1)


if __name__ == "__main__":
    main()
