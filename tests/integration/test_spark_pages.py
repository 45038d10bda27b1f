"""Each block of docs/spark.md and docs/spark-quickstart.md runs, in the pages' order: Python, and the jobs'
commands. Other commands: tests/unit/test_docs_commands.py."""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient
from kafka.admin import NewTopic

import fencepost.spark
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.jars import fetch
from tests.kit.waiting import until
from tests.support.docs import ROOT, Block, blocks, commands
from tests.support.kafka import running_kafka
from tests.support.proxy import ProxyProcess
from tests.support.spark import JOBS, QUERY_SECONDS, SPARK_MARKERS, contents, job, running_spark

pytestmark = SPARK_MARKERS

PAGE, QUICKSTART = ROOT / "docs" / "spark.md", ROOT / "docs" / "spark-quickstart.md"
_TARGETS = "arranged", "changes", "enriched", "flights", "invoices", "jobs"
_FLIGHTS = [{"tailnum": f"N{number % 7}", "dest": f"D{number}"} for number in range(200)]
_ROWS = Counter(json.dumps(flight, separators=(",", ":")).encode() for flight in _FLIGHTS)
#: A change feed has these columns. Delta itself is not installed.
_CHANGES = "id BIGINT, amount INT, _change_type STRING, _commit_version BIGINT"
_CONFIG = "".join(f'[topics."{name}"]\n"fencepost.check.expected.offsets" = "required"\n' for name in _TARGETS) + (
    '[topics."orders"]\n"fencepost.ordered.partition.expansion" = "true"\n'
)


class Pages:
    """Runs blocks with this stage's addresses and files instead of those on the page."""

    def __init__(self, spark: Any, kafka: KafkaCluster, proxy: ProxyProcess, home: Path) -> None:
        self.spark, self.kafka, self.proxy, self.home = spark, kafka, proxy, home
        self.names: dict[str, Any] = {"spark": spark, "fencepost": fencepost}
        self.run_blocks: list[Block] = []
        (home / "flights.csv").write_text(
            "tailnum,dest\n" + "".join(f"{each['tailnum']},{each['dest']}\n" for each in _FLIGHTS)
        )

    def text(self, text: str) -> str:
        here = {
            "localhost:19092": self.proxy.bootstrap,
            "kafka:9092": self.kafka.bootstrap,
            "s3a://…": str(self.home),
        }
        for shown, used in here.items():
            text = text.replace(shown, used)
        return re.sub(r"(examples/)?flights\.csv", str(self.home / "flights.csv"), text)

    def run(self, page: Path, containing: str, replaced: dict[str, str] | None = None) -> None:
        [block] = [each for each in blocks(page) if each.language == "python" and containing in each.text]
        self.run_blocks.append(block)
        text = self.text(block.text)
        for shown, used in (replaced or {}).items():
            assert shown in text, block.where
            text = text.replace(shown, used)
        exec(compile(text, block.where, "exec"), self.names)

    def options(self, topic: str, **more: str) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self.proxy.bootstrap, "topic": topic, **more}

    def values(self, topic: str) -> Counter[bytes]:
        return Counter(record.value or b"" for records in contents(self.kafka, topic).values() for record in records)

    def end_queries(self) -> None:
        """Let each write what is there, then stop it."""
        for query in self.spark.streams.active:
            query.processAllAvailable()
            query.stop()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    home = tmp_path_factory.mktemp("pages")
    settings = {"spark.jars": ",".join(map(str, fetch("spark-kafka")))}
    with (
        running_kafka(1) as kafka,
        ProxyProcess(kafka.bootstrap, home, config=_CONFIG) as proxy,
        running_spark(settings) as spark,
        closing(KafkaAdminClient(bootstrap_servers=proxy.bootstrap)) as admin,
    ):
        admin.create_topics([NewTopic(name, 4, 1) for name in (*_TARGETS, "orders")])
        spark.sparkContext.addPyFile(str(JOBS / "verify.py"))  # workers find its functions by the module's name
        yield Pages(spark, kafka, proxy, home)


def test_quickstart_load_appends_each_row_once(pages: Pages) -> None:
    for _ in range(2):
        pages.run(QUICKSTART, '"flights-2013"')
    assert pages.values("flights") == _ROWS


def test_quickstart_stream_writes_each_row_once(pages: Pages) -> None:
    (pages.home / "events").mkdir()
    (pages.home / "events" / "a").write_text("1\n2\n")
    pages.names["events"] = pages.spark.readStream.format("text").load(str(pages.home / "events"))
    for _ in range(2):
        pages.run(QUICKSTART, "fencepost.spark.stream(events")
        pages.end_queries()
    assert pages.values("enriched") == Counter([b"1", b"2"])


def test_commands_of_the_jobs_load_and_verify(pages: Pages, capsys: pytest.CaptureFixture[str]) -> None:
    """Also the one for Airflow: the same rows as another load."""
    run = 0
    for command in commands(QUICKSTART, PAGE):
        if found := re.fullmatch(r"spark-submit (?:spark_jobs/)?(bulk_load|verify)\.py (.*)", command.text):
            words = shlex.split(pages.text(found[2]).replace("--topic flights", "--topic jobs"))
            module = job(found[1])
            args = module.arguments().parse_args(words)
            if found[1] == "verify":
                assert module.verify(pages.spark, args) == 0, capsys.readouterr().out
            else:
                module.load(pages.spark, args)
            run += 1
    assert run == 3
    assert pages.values("jobs") == _ROWS + _ROWS


def test_arranged_rows_are_written(pages: Pages) -> None:
    rows = pages.spark.range(50).selectExpr(
        "CAST(id AS STRING) AS key", "CAST(id AS STRING) AS value", "id AS event_time"
    )
    pages.names |= {"rows": rows}
    pages.run(PAGE, 'order_by=["event_time"]')
    assert pages.values("arranged") == Counter(b"%d" % number for number in range(50))


def test_change_feed_is_published_in_order(pages: Pages) -> None:
    (pages.home / "feed").mkdir()
    changed = [
        {"id": number % 3, "amount": number, "_change_type": "insert", "_commit_version": number}
        for number in range(30)
    ]
    (pages.home / "feed" / "a.json").write_text("\n".join(map(json.dumps, reversed(changed))))
    feed = {
        'format("delta").option("readChangeFeed", "true").table("orders")': f'schema("{_CHANGES}").json('
        f'"{pages.home}/feed")'
    }
    pages.run(PAGE, "readChangeFeed", feed)
    pages.end_queries()
    for records in contents(pages.kafka, "changes").values():
        versions = [json.loads(record.value or b"")["_commit_version"] for record in records]
        assert versions == sorted(versions)
    assert pages.values("changes").total() == 30


def test_stream_from_kafka_to_kafka(pages: Pages) -> None:
    values = pages.spark.range(40).selectExpr("CAST(id AS STRING) AS key", "concat('v', id) AS value")
    values.write.format("kafka").options(**pages.options("orders")).save()

    def follow() -> None:
        fencepost.spark.register(pages.spark)
        pages.run(PAGE, "read_ordered")

    running = threading.Thread(target=follow)
    running.start()
    try:
        until(lambda: pages.values("invoices").total() >= 40 or not running.is_alive(), "rows", seconds=QUERY_SECONDS)
    finally:

        def ended() -> bool:
            pages.end_queries()
            return not running.is_alive()

        until(ended, "the query to end", seconds=QUERY_SECONDS)
    assert pages.values("invoices") == Counter(b"V%d" % number for number in range(40))


def test_every_block_was_run(pages: Pages) -> None:
    shown = [each for each in blocks(PAGE, QUICKSTART) if each.language == "python"]
    assert {each.where for each in shown} == {each.where for each in pages.run_blocks}
