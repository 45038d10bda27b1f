"""Files as rows: CSV (RFC 4180), JSON lines and Parquet.

Rows get `key`, `value` and, where their order matters, their input position. A row's offset must not depend on how
Spark splits the files. So rows are ordered by file name, block in the file and position in the block. The split changes
only the first value of `position`.

What would be read wrongly is an error: a file of another kind, lines with more or fewer fields than the header, a
header that differs between files, lines that are no JSON objects, bytes that are not in the expected encoding.
"""

from __future__ import annotations

import argparse
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import pyspark.sql.functions as sf
from py4j.protocol import Py4JJavaError
from pyspark.errors import ParseException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession

from fencepost.spark.errors import SinkError
from fencepost.spark.jobs import add_client_arguments, add_named_values

KINDS: Final = ("csv", "jsonl", "parquet")
#: Columns with the input position of a row; sorting by them gives the input order.
ORDER: Final = ("file_order", "file", "block", "position")
_METADATA: Final = "_metadata"
#: By the suffix of a file name: the kind, and options of Spark's CSV reader.
_SUFFIXES: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "csv": ("csv", {}),
    "tsv": ("csv", {"sep": "\t"}),
    "jsonl": ("jsonl", {}),
    "ndjson": ("jsonl", {}),
    "parquet": ("parquet", {}),
}
_COMPRESSED: Final = (".bz2", ".deflate", ".gz", ".lz4", ".snappy", ".zst")
#: RFC 4180: a quote in a quoted field is doubled (by default, Spark expects a backslash before it). Each file's header
#: is compared with the first one, and each line's number of fields with the header.
_CSV_OPTIONS: Final[Mapping[str, str]] = {
    "header": "true",
    "escape": '"',
    "mode": "FAILFAST",
    "enforceSchema": "false",
    "columnPruning": "false",
}
#: Reads `--input`, given its kind and, of CSV, the options of Spark's reader. Returns the columns of the input, or JSON
#: lines as one column `value`, and `_metadata`, as Spark's readers have it.
Reader = Callable[[SparkSession, argparse.Namespace, str, Mapping[str, str]], DataFrame]
#: Regular expressions of Java and Python.
_NUMBER, _LONG_NUMBER, _ZEROS = "([0-9]+)", "0*([0-9]{20,})", "0" * 19
#: What decoders put for bytes that are not in their encoding.
_REPLACEMENT: Final = "\ufffd"


INPUT: Final = "file, directory or glob that Spark can read"


def add_load_arguments(parser: argparse.ArgumentParser, *, bootstrap: str) -> None:
    """The command line of a load, without `--input`. A check of a load takes the same."""
    parser.add_argument("--bootstrap", required=True, metavar="HOST:PORT", help=bootstrap)
    parser.add_argument("--topic", required=True)
    parser.add_argument(
        "--load", metavar="NAME", help="name of the load in the log, used as sink.id (default: last part of --input)"
    )
    partitioning = parser.add_mutually_exclusive_group()
    partitioning.add_argument(
        "--key", metavar="COLUMN", help="column for the record key; selects the partition like the Java producer"
    )
    partitioning.add_argument("--partition-column", metavar="COLUMN", help="column with the partition number")
    parser.add_argument(
        "--keep-order",
        action=argparse.BooleanOptionalAction,
        help="keep the order of the input within each Kafka partition; otherwise rows are in an order of their own "
        "(default: with --key or --partition-column)",
    )
    _add_file_arguments(parser)
    parser.add_argument(
        "--batch-bytes", type=int, metavar="N", help="uncompressed size of a record batch (default: 900000)"
    )
    parser.add_argument("--compression", choices=["none", "gzip", "snappy", "lz4", "zstd"], default="zstd")
    parser.add_argument(
        "--patience",
        type=int,
        default=120,
        metavar="SECONDS",
        help="fail after this long without progress (default: %(default)s)",
    )
    add_client_arguments(parser)


def keeps_order(args: argparse.Namespace) -> bool:
    """Whether the rows of a Kafka partition are in the order of the input."""
    return bool(args.key or args.partition_column) if args.keep_order is None else bool(args.keep_order)


def _add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """How `--input` is read."""
    parser.add_argument("--format", choices=KINDS, help="input format (default: from the suffix of the files)")
    parser.add_argument("--value", metavar="COLUMN", help="column for the record value (default: the row as JSON)")
    parser.add_argument("--schema", metavar="DDL", help="CSV schema, such as 'a INT, b STRING' (default: all strings)")
    parser.add_argument(
        "--multiline", action="store_true", help="allow line breaks in CSV fields (files are not split)"
    )
    add_named_values(
        parser,
        "--csv-option",
        help="Set an option of Spark's CSV reader: sep=;  encoding=ISO-8859-1  escape=\\ ; repeatable",
    )
    parser.add_argument(
        "--allow-replacement-characters",
        action="store_true",
        help=f"load rows that contain U+FFFD ({_REPLACEMENT}), which usually shows a wrong encoding",
    )


def spark_reader(spark: SparkSession, args: argparse.Namespace, kind: str, csv_options: Mapping[str, str]) -> DataFrame:
    """Raises errors of Spark."""
    if kind == "jsonl":
        return spark.read.text(args.input)
    reader = spark.read.schema(args.schema) if args.schema else spark.read
    source = reader.options(**csv_options).csv(args.input) if kind == "csv" else reader.parquet(args.input)
    if _METADATA in source.columns:
        raise SinkError(f"--input {args.input}: a column has the name {_METADATA}, which Spark uses itself; rename it")
    return source


def rows_of(
    spark: SparkSession,
    args: argparse.Namespace,
    *,
    partition: str | None = None,
    read: Reader = spark_reader,
    has_order: bool = True,
) -> DataFrame:
    """`key` and `value` (binary), `partition` (int) if it names a column, and with `has_order` the columns of `ORDER`.

    `args`: `--input`, `--key` and those of `add_load_arguments`. The value is a column, or by default the row as a JSON
    object with nulls, or the unchanged line of a JSON lines file. Timestamps become text in the session's time zone.
    Raises SinkError.
    """
    try:
        kind, options = format_of(spark, args)
        source = read(spark, args, kind, options)
        position = _position(spark.read.text(args.input).inputFiles()) if has_order else ()
    except (PySparkException, Py4JJavaError) as error:
        raise SinkError(_not_read(error, args)) from error
    if kind == "jsonl":
        source, chosen = _lines(source, args, partition)
        return source.select(*chosen, *position)
    names = [name for name in source.columns if name != _METADATA]
    checked = kind == "csv" and not args.allow_replacement_characters
    if checked and any(_REPLACEMENT in name or "\0" in name for name in names):
        raise SinkError(f"--input {args.input}: {_NOT_ENCODED}")
    for option, name in (("--key", args.key), ("--value", args.value), ("--partition-column", partition)):
        if name is not None and name.lower() not in map(str.lower, names):
            has = ", ".join(names[:20]) + (" …" if len(names) > 20 else "")
            raise SinkError(f"{option} {name}: the input has no such column; it has {has}")
    columns = (source[_quoted(name)] for name in names)
    whole = sf.to_json(sf.struct(*columns), {"ignoreNullFields": "false"})
    key, value = (None if name is None else source[_quoted(name)] for name in (args.key, args.value))
    value = whole if value is None else value
    if checked:
        key, value = None if key is None else _decoded(key), _decoded(value)
    chosen = [_bytes(key).alias("key"), _bytes(value).alias("value")]
    if partition is not None:
        chosen.append(source[_quoted(partition)].cast("int").alias("partition"))
    return source.select(*chosen, *position)


def format_of(spark: SparkSession, args: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """The kind of the input and, of CSV, the options of Spark's reader. Raises SinkError, errors of Spark."""
    kind, options = _kind_of(spark, args.input, args.format)
    if kind != "csv":
        return kind, {}
    return kind, {**_CSV_OPTIONS, **options, **dict(args.csv_option), "multiLine": str(args.multiline).lower()}


def _lines(source: DataFrame, args: argparse.Namespace, partition: str | None) -> tuple[DataFrame, list[Column]]:
    source = source.where("trim(value) <> ''")
    line = sf.col("value")
    checks = sf.when(sf.json_object_keys(line).isNull(), _refused("a line is not a JSON object (one in each line)"))
    if not args.allow_replacement_characters:
        checks = checks.when(~sf.is_valid_utf8(line), _refused("a line is not UTF-8"))
    line = checks.otherwise(line)

    def column(name: str) -> Column:
        return sf.get_json_object(line, f"$['{name}']")

    key = None if args.key is None else column(args.key)
    value = line if args.value is None else column(args.value)
    chosen = [_bytes(key).alias("key"), _bytes(value).alias("value")]
    if partition is not None:
        chosen.append(column(partition).cast("int").alias("partition"))
    return source, chosen


def _position(files: Sequence[str]) -> tuple[Column, ...]:
    """The columns of `ORDER`. Numbers in file names count as numbers: `part-2` is before `part-10`."""
    file = sf.col("_metadata.file_path")
    order = sf.lit("")
    if sorted(files) != sorted(files, key=_natural):
        order = sf.regexp_replace(sf.regexp_replace(file, _NUMBER, f"{_ZEROS}$1"), _LONG_NUMBER, "$1")
    return (
        order.alias("file_order"),
        file.alias("file"),
        sf.col("_metadata.file_block_start").alias("block"),
        # Increases with the position in a block.
        sf.monotonically_increasing_id().alias("position"),
    )


def _natural(file: str) -> str:
    """Each number in it has at least 20 digits, and so sorts by its value."""
    return re.sub(_LONG_NUMBER, r"\1", re.sub(_NUMBER, rf"{_ZEROS}\1", file))


def _kind_of(spark: SparkSession, path: str, stated: str | None) -> tuple[str, Mapping[str, str]]:
    """The kind of the input, and options for reading it: from its name, otherwise from the names of its files."""
    known = _SUFFIXES.get(_suffix(path))
    if stated is not None:
        return known if known is not None and known[0] == stated else (stated, {})
    if known is None:
        suffixes = {_suffix(file) for file in spark.read.text(path).inputFiles()}
        if len(suffixes) > 1:
            found = ", ".join(f".{suffix}" if suffix else "no suffix" for suffix in sorted(suffixes))
            raise SinkError(f"--input {path}: its files are of several kinds ({found}); pass a pattern: {path}/*.csv")
        known = next(filter(None, map(_SUFFIXES.get, suffixes)), None)
    if known is None:
        names = ", ".join(f".{suffix}" for suffix in _SUFFIXES)
        raise SinkError(
            f"--input {path}: its name does not say what it contains ({names}); pass --format csv, jsonl or parquet"
        )
    return known


def _suffix(path: str) -> str:
    name = path.rstrip("/")
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    return posixpath.splitext(name)[1].removeprefix(".").lower()


_NOT_ENCODED: Final = (
    "it contains bytes that are not UTF-8, or the character U+FFFD; name the encoding (--csv-option "
    "encoding=ISO-8859-1; UTF-16 also needs --multiline), or load them as they are (--allow-replacement-characters)"
)


def _bytes(column: Column | None) -> Column:
    """Of its text; those of a binary column stay unchanged."""
    return (sf.lit(None) if column is None else column.cast("string")).cast("binary")


def _decoded(column: Column) -> Column:
    text = column.cast("string")
    return sf.when(sf.contains(text, sf.lit(_REPLACEMENT)), _refused(_NOT_ENCODED)).otherwise(text)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _refused(why: str) -> Column:
    return sf.raise_error(sf.lit(f"--input: {why}"))


def _not_read(error: PySparkException | Py4JJavaError, args: argparse.Namespace) -> str:
    first = str(error).strip().splitlines()[0]
    if isinstance(error, ParseException):
        return f"--schema {args.schema!r} is not a list of columns and types, such as 'a INT, b STRING': {first}"
    if isinstance(error, PySparkException) and error.getCondition() == "PATH_NOT_FOUND":
        return f"--input {args.input}: there is no such file"
    return input_error(error) or f"--input {args.input}: {first}"


def input_error(error: Exception) -> str | None:
    """What is wrong with the input, from an error of Spark while it reads the files; None: it is not about them."""
    text = str(error)
    if raised := re.search(
        r"(?:\[USER_RAISED_EXCEPTION\]|ValueError:) (--input: .+?)(?: SQLSTATE: \w+)?$", text, re.MULTILINE
    ):
        return raised.group(1)
    failed = re.search(r"\[FAILED_READ_FILE\S*\] Encountered error while reading file (\S+?)\.\s", text)
    if failed is None:
        return None
    if "CSV header does not conform to the schema" in text or "Number of column in CSV header" in text:
        return f"--input: the header of {failed.group(1)} differs from the first one, or from --schema"
    if "MALFORMED_RECORD_IN_PARSING" in text or "MALFORMED_CSV_RECORD" in text:
        return (
            f"--input: a line of {failed.group(1)} has more or fewer fields than the header, or a value that is not of "
            "its type in --schema; if fields contain line breaks, pass --multiline"
        )
    causes = re.findall(r"^Caused by: [\w.$]+: (.+)$", text, re.MULTILINE)
    return f"--input: {failed.group(1)} cannot be read" + (f": {causes[-1]}" if causes else "")
