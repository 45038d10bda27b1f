"""Count the requests, bytes, CPU seconds and memory of Spark loads, by tasks and partitions.

    python -m benchmarks.spark_requests            # 1, 4 and 12 tasks, 4, 40 and 400 partitions: some minutes
    python -m benchmarks.spark_requests --tasks 4 --partitions 1000

Each load writes the same rows into a new topic with required checks; every task has rows for every partition. All tasks
run at once, on this machine. The proxy's metrics have the requests and bytes. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.spark import jvm_pid, session
from fencepost.spark import append
from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.raw import Connection

_COLUMNS: Final = (
    *("tasks", "partitions", "seconds", "Produce", "Fetch", "ListOffsets", "other", "MB to Kafka", "MB to clients"),
    *("proxy CPU s", "Spark CPU s", "largest worker, MB"),
)
_RELAYED: Final = 'fencepost_relayed_bytes_total{{direction="{}"}}'


def _row(spark: Any, proxy: ProxyProcess, rows: Any, tasks: int, partitions: int) -> list[str]:
    topic = f"required-{uuid.uuid4().hex}"
    with Connection(proxy.bootstrap) as admin:
        assert admin.create_topic(topic, partitions=partitions) == (0, None)
        until(lambda: len(admin.metadata(topic).topics[0].partitions) == partitions, f"the partitions of {topic}")
    jvm = jvm_pid(spark)
    machine.forget_peak(machine.family(jvm))
    before, cpu, began = proxy.metrics(), _cpu(proxy, jvm), time.monotonic()
    append(rows, topic=topic, sink_id=topic, bootstrap=proxy.bootstrap)
    seconds, spent = time.monotonic() - began, [now - then for now, then in zip(_cpu(proxy, jvm), cpu, strict=True)]
    more = {name: value - before.get(name, 0.0) for name, value in proxy.metrics().items()}
    requests = dict.fromkeys(("Produce", "Fetch", "ListOffsets", "other"), 0)
    for name, count in more.items():
        if name.startswith("fencepost_requests_total{"):
            api = name.partition('api="')[2].partition('"')[0]
            requests[api if api in requests else "other"] += int(count)
    megabytes = [more[_RELAYED.format(direction)] / 1e6 for direction in ("to_kafka", "to_clients")]
    workers = [pid for pid in machine.family(jvm) if "pyspark.daemon" in machine.command_line(pid)]
    largest = max(machine.rss_peak_bytes([pid]) for pid in workers) / 1e6
    values = [tasks, partitions, f"{seconds:.1f}", *requests.values(), *(f"{each:.1f}" for each in megabytes)]
    return [str(each) for each in (*values, *(f"{each:.1f}" for each in spent), f"{largest:.0f}")]


def _cpu(proxy: ProxyProcess, jvm: int) -> tuple[float, float]:
    return machine.cpu_seconds([proxy.pid]), machine.cpu_seconds(machine.family(jvm))


def measure(directory: Path, tasks: Sequence[int], partitions: Sequence[int], row_count: int) -> None:
    status = ("--status", "127.0.0.1:0")
    with (
        KafkaCluster(1, heap="2g") as kafka,
        ProxyProcess(kafka.bootstrap, directory, config=CHECKED_BY_NAME, arguments=status) as proxy,
    ):
        spark = session(directory, cores=max(tasks))
        rows = spark.range(row_count).selectExpr("CAST(id AS STRING) AS key", "sha2(CAST(id AS STRING), 256) AS value")
        inputs = {count: rows.repartition(count).persist() for count in tasks}
        for each in inputs.values():
            each.count()
        _row(spark, proxy, inputs[max(tasks)], max(tasks), 1)  # starts the Python workers
        print("|".join(("", *_COLUMNS, "")), "|---" * len(_COLUMNS) + "|", sep="\n", flush=True)
        for count, width in itertools.product(tasks, partitions):
            print("|".join(("", *_row(spark, proxy, inputs[count], count, width), "")), flush=True)
        spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark_requests", description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 4, 12], metavar="N")
    parser.add_argument("--partitions", type=int, nargs="+", default=[4, 40, 400], metavar="N")
    parser.add_argument("--rows", type=int, default=200_000, metavar="N", help="of each load (default: %(default)s)")
    options = parser.parse_args()
    facts = machine.facts()
    print(f"commit {machine.commit()}; {facts['cores']} cores, load {facts['load when it began']}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="fencepost-spark-") as directory:
        measure(Path(directory), options.tasks, options.partitions, options.rows)


if __name__ == "__main__":
    main()
