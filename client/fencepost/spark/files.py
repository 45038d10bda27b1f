"""CSV, JSON lines or Parquet files as rows for Kafka: `key`, `value` and the input position of each row.

A row's offset must not depend on how Spark splits the files. So rows are ordered by file name, block in the file and
position in the block. The split changes only the first value of `position`.
"""

from __future__ import annotations

import posixpath
from typing import Final

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame, SparkSession

KINDS: Final = ("csv", "jsonl", "parquet")
#: Columns with the input position of a row; sorting by them gives the input order.
ORDER: Final = ("file", "block", "position")


def rows_of(
    spark: SparkSession,
    path: str,
    *,
    kind: str | None = None,
    key: str | None = None,
    value: str | None = None,
    partition: str | None = None,
    schema: str | None = None,
    multiline: bool = False,
) -> DataFrame:
    """`key` and `value` (binary), `partition` (int) if it names a column, and the columns of `ORDER`.

    `kind`: one of `KINDS`; by default the file name's suffix, else csv. `value`: a column; by default the row as a
    JSON object with nulls, or the unchanged line of a JSON lines file. `schema`: DDL for a CSV file; otherwise its
    columns are strings. Timestamps become text in the session's time zone.
    """
    suffix = posixpath.splitext(path.rstrip("/").removesuffix(".gz"))[1].removeprefix(".")
    kind = kind or (suffix if suffix in KINDS else "csv")
    if kind == "jsonl":
        source = spark.read.text(path).where("trim(value) <> ''")
        whole: Column = sf.col("value")

        def column(name: str) -> Column:
            return sf.get_json_object("value", f"$['{name}']")

    else:
        reader = spark.read.schema(schema) if schema else spark.read
        if kind == "csv":
            source = reader.csv(path, header=True, mode="FAILFAST", multiLine=multiline)
        else:
            source = reader.parquet(path)
        whole = sf.to_json(sf.struct(*(source[f"`{name}`"] for name in source.columns)), {"ignoreNullFields": "false"})

        def column(name: str) -> Column:
            return sf.col(f"`{name}`")

    def as_bytes(chosen: Column) -> Column:
        return chosen.cast("string").cast("binary")  # binary columns stay unchanged

    chosen = [
        as_bytes(column(key) if key else sf.lit(None)).alias("key"),
        as_bytes(column(value) if value else whole).alias("value"),
    ]
    if partition is not None:
        chosen.append(column(partition).cast("int").alias("partition"))
    return source.select(
        *chosen,
        sf.col("_metadata.file_path").alias("file"),
        sf.col("_metadata.file_block_start").alias("block"),
        # Increases with the position in a block.
        sf.monotonically_increasing_id().alias("position"),
    )
