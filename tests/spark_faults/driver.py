"""A separate Spark driver that can be killed. It reads commands as JSON lines, see `stage.Driver`.

Arguments: the master, and Spark's settings as JSON. It answers each line with one.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any


def main() -> None:
    master, settings = sys.argv[1], json.loads(sys.argv[2])
    answers = sys.stdout
    sys.stdout = sys.stderr
    warnings.simplefilter("ignore")
    from pyspark.sql import SparkSession  # noqa: PLC0415 - its import warns

    from tests.spark_faults import query  # noqa: PLC0415

    builder = SparkSession.builder.master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    query.register(spark)
    queries: dict[str, query.Running] = {}

    def obey(reported: dict[str, Any]) -> Any:
        name = reported.get("name", "")
        match reported["do"]:
            case "start":
                queries[name] = query.Running(spark, reported)
                return None
            case "state":
                return queries[name].state
            case "stop":
                queries.pop(name).stop()
                return None
            case other:
                raise ValueError(other)

    def answer(what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    answer("ready")
    for line in sys.stdin:
        try:
            answer({"ok": obey(json.loads(line))})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
    spark.stop()


if __name__ == "__main__":
    main()
