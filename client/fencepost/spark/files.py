"""Files as rows for Kafka: CSV, JSON lines or Parquet as `key` and `value`, and where in the input each row stands.

What decides a row's place in a topic must not depend on how Spark happens to split the files today. So the order is
that of file names, of the blocks in a file, and of the positions in a block; only the last depends on the split, and
only in what it counts from.
"""

from __future__ import annotations

import posixpath
from typing import Final

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame, SparkSession

KINDS: Final = ("csv", "jsonl", "parquet")
#: Columns that say where a row stands; the input is in order by them.
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
    """`key` and `value` (binary), `partition` (int) where that names a column, and the columns of `ORDER`.

    `kind`: one of `KINDS`; by default what the name ends with, else csv. `value`: a column; by default the row as a
    JSON object, nulls included, or the line of a JSON lines file as it is. `schema`: DDL for a CSV file, whose columns
    are strings otherwise. Timestamps become text in the session's time zone.
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
        return chosen.cast("string").cast("binary")  # binary columns come through as they are

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
        # Rises with the position within a block, which is all that is asked of it here.
        sf.monotonically_increasing_id().alias("position"),
    )
