"""`fencepost load`: loads the lines of files or of stdin, each once, also if it is killed and started again."""

from __future__ import annotations

import argparse
import gzip
import io
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

from fencepost_proxy.cli.options import Subparsers, add_command, add_topic, client_config, kafka_python_settings
from fencepost_proxy.cli.status_client import CannotQuery

if TYPE_CHECKING:
    from fencepost import Record, RetryPolicy

#: Part of the format: with another number, a load that is not finished finds other units.
_UNIT_LINES: Final = 100
_PROGRESS_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 120.0
_LINE_BYTES_MAX: Final = 16 << 20

_DESCRIPTION: Final = """\
Load each line of the files, or of stdin, into a topic: each is a record, once, also if this command, the proxy or a
broker is killed. Run it again with the same input to continue. Lines without a key are spread over the partitions, 100
at a time. Empty lines are left out.

The topic must exist, with fencepost.check.expected.offsets=required (or true).

exit code: 0 complete (with --verify: and verified); 1 not complete, or --verify found something else; 2 not begun."""

_EXAMPLES: Final = """\
examples:
  fencepost load orders orders.jsonl --key customer
      load JSON lines; the value of "customer" is the key

  fencepost load orders part-*.jsonl.gz --name backfill
      load several files: part-2 before part-10

  fencepost load orders --name snapshot-7 < lines.txt
      load stdin, which has to have the same lines when it is run again
"""


def add_parser(subparsers: Subparsers) -> None:
    summary = "load lines of files or stdin, each once"
    parser = add_command(subparsers, "load", run, summary, _DESCRIPTION, examples=_EXAMPLES)
    add_topic(parser)
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="text or JSON lines, also .gz (default: stdin)")
    add("--name", help="of the load, in the topic: another name loads the lines again (default: the name of FILE)")
    add("--key", metavar="FIELD", help="field of the JSON lines that is the key (default: no keys)")
    add("--new", action="store_true", help="this load never ran: needed if old records of the topic were deleted")
    add(
        "--verify",
        action="store_true",
        help="read the topic afterwards: does it have the lines of FILE, and no others?",
    )


def run(args: argparse.Namespace) -> int:
    """Raises `CannotQuery` if nothing could be begun."""
    from kafka.errors import KafkaError  # noqa: PLC0415 - slow to import

    from fencepost import FencepostError  # noqa: PLC0415
    from fencepost_proxy.cli.connecting import partitions_of  # noqa: PLC0415

    files = sorted(args.files, key=_in_order)
    name = args.name or (files[0].name if len(files) == 1 else None)
    if name is None:
        raise CannotQuery("give the load a --name: it says which lines of the topic are of this load")
    if args.verify and not files:
        raise CannotQuery("--verify needs FILE, because stdin can be read once only")
    for file in files:
        if not file.is_file():
            raise CannotQuery(f"{file}: there is no such file")
    partitions = partitions_of(client_config(args), args.topic, None, args.timeout)
    if not partitions:
        raise CannotQuery(f"topic {args.topic} does not exist, or you may not DESCRIBE it")
    source = Source(files, args.key)
    try:
        _load(args, name, source, partitions)
        return _verify(args, source, partitions) if args.verify else 0
    except (KafkaError, FencepostError, _BadLine, OSError) as error:
        print(f"fencepost: not complete: {error}", file=sys.stderr)
        print("fencepost: run it again to continue; no line is doubled", file=sys.stderr)
        return 1


class _BadLine(Exception):
    """The input cannot be read."""


class _Line(NamedTuple):
    """`end`: bytes of its file up to its end, or lines of stdin."""

    record: Record
    end: int


class Source:
    """Units of up to 100 lines of one file. A position is the number of bytes read of a file, and its name."""

    def __init__(self, files: Sequence[Path], key: str | None) -> None:
        self._files = files
        self._key = key

    def read(self, position: bytes | None) -> Iterator[tuple[list[Record], bytes]]:
        """From a position on. Raises `_BadLine`."""
        if not self._files:
            lines = self._lines(sys.stdin.buffer, "stdin", 0)
            skipped = 0 if position is None else int(position)
            yield from self._units(itertools.islice(lines, skipped, None), lambda end: b"%d" % end)
            return
        at, _, name = (position or b"0 ").decode().partition(" ")
        names = [file.name for file in self._files]
        if len(set(names)) < len(names):
            raise _BadLine("two files have the same name")
        if name and name not in names:
            raise _BadLine(f"the load has come to {name}, which is not among the files")
        for file in self._files[names.index(name) if name else 0 :]:
            with _opened(file) as stream:
                begin = int(at) if file.name == name else 0
                stream.seek(begin)
                lines = self._lines(stream, file.name, begin)
                yield from self._units(lines, lambda end, file=file: f"{end} {file.name}".encode())

    @staticmethod
    def _units(lines: Iterator[_Line], position: Any) -> Iterator[tuple[list[Record], bytes]]:
        while unit := list(itertools.islice(lines, _UNIT_LINES)):
            yield [line.record for line in unit], position(unit[-1].end)

    def _lines(self, stream: gzip.GzipFile | io.BufferedReader | BinaryIO, name: str, begin: int) -> Iterator[_Line]:
        from fencepost import Record  # noqa: PLC0415 - slow to import

        end, counts_bytes = begin, bool(self._files)
        for number in itertools.count(1):
            if not (line := stream.readline(_LINE_BYTES_MAX + 1)):
                return
            if len(line) > _LINE_BYTES_MAX:
                raise _BadLine(f"a line of {name} is longer than {_LINE_BYTES_MAX:,} bytes")
            end += len(line) if counts_bytes else 0
            text = line.rstrip(b"\r\n")
            if text:
                end += not counts_bytes
                yield _Line(Record(text, self._key_of(text, name, number if not begin else 0)), end)

    def _key_of(self, line: bytes, name: str, number: int) -> bytes | None:
        if self._key is None:
            return None
        where = f"line {number} of {name}" if number else f"a line of {name}"
        try:
            value = json.loads(line)[self._key]
        except (ValueError, TypeError, KeyError):
            raise _BadLine(f"{where} is not a JSON object with the field {self._key}") from None
        return value.encode() if isinstance(value, str) else json.dumps(value, separators=(",", ":")).encode()


def _opened(file: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")


def _in_order(file: Path) -> list[tuple[int, str]]:
    """part-2 before part-10."""
    return [(int(each), "") if each.isdigit() else (-1, each) for each in re.split(r"(\d+)", str(file))]


def _load(args: argparse.Namespace, name: str, source: Source, partitions: Sequence[int]) -> None:
    from fencepost.kafka_python import LogWriter  # noqa: PLC0415 - slow to import
    from fencepost.recipes import Loader  # noqa: PLC0415

    options = {"retry": _retry(args), "compression_type": "gzip", **kafka_python_settings(args)}
    progress, lines = _Progress(), 0
    with Loader(name, [LogWriter(args.topic, each, **options) for each in partitions], new=args.new) as load:
        if load.position is not None:
            print(f"load {name!r} continues after {_shown(load.position)}", file=sys.stderr)
        for rows, position in source.read(load.position):
            load.append(rows, position)
            lines += len(rows)
            progress.show(lines)
    print(f"load {name!r} is complete: {lines:,} lines in this run, {progress.seconds:.1f} s")


def _retry(args: argparse.Namespace) -> RetryPolicy:
    from fencepost import RetryPolicy  # noqa: PLC0415 - slow to import

    return RetryPolicy(attempt_seconds=args.timeout, total_seconds=max(_RETRY_SECONDS, args.timeout))


def _shown(position: bytes) -> str:
    at, _, name = position.decode().partition(" ")
    return f"byte {int(at):,} of {name}" if name else f"line {int(at):,}"


class _Progress:
    """Lines and rate on stderr, now and then."""

    def __init__(self) -> None:
        self._began = self._shown = time.monotonic()
        self._every = 1.0 if sys.stderr.isatty() else _PROGRESS_SECONDS

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def show(self, lines: int) -> None:
        now = time.monotonic()
        if now - self._shown >= self._every:
            self._shown = now
            print(f"{lines:,} lines, {lines / self.seconds:,.0f} a second", file=sys.stderr)


def _verify(args: argparse.Namespace, source: Source, partitions: Sequence[int]) -> int:
    """Read the topic, and the input once for each partition. Returns the exit code."""
    from fencepost.kafka_python import LogReader  # noqa: PLC0415 - slow to import
    from fencepost.recipes import by_key  # noqa: PLC0415

    count, found, missing, others, first = len(partitions), 0, 0, 0, ""
    for partition in partitions:
        units = enumerate(source.read(None), 1)
        rows = (row for unit, (all_, _) in units for row in all_ if by_key(row, unit, count) == partition)
        row = next(rows, None)
        with LogReader([(args.topic, partition)], retry=_retry(args), **kafka_python_settings(args)) as log:
            for _, record in log:
                if row is not None and (record.key, record.value) == (row.key, row.value):
                    found, row = found + 1, next(rows, None)
                else:
                    first = first or f"first difference: {args.topic}-{partition} offset {record.offset}"
                    others += 1
        missing += 0 if row is None else 1 + sum(1 for _ in rows)
    print(f"{found:,} lines found in order, {missing:,} not; {others:,} other records")
    if first:
        print(first)
    return 0 if not missing and not others else 1
