"""Loads a CSV file into a topic with Spark's own Kafka sink. The demonstration compares it with bulk_load.py."""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--input", "--bootstrap", "--topic"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    spark = SparkSession.builder.getOrCreate()
    rows = spark.read.option("header", "true").csv(options.input)
    values = rows.selectExpr("to_json(struct(*), map('ignoreNullFields', 'false')) AS value")
    sink = values.write.format("kafka").option("kafka.bootstrap.servers", options.bootstrap)
    sink.option("topic", options.topic).save()


if __name__ == "__main__":
    main()
