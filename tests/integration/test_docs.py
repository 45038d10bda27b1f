"""The documentation's examples run unchanged: the whole quickstart, and the commands of Kafka's tools."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import ConfigResource, ConfigResourceType, NewTopic
from kafka.errors import InvalidPartitionsError, PolicyViolationError

from fencepost import CheckIsOffError, OffsetMismatchError
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.errors import ToolError
from fencepost_dev.tools import compile_java, run_java
from fencepost_proxy.config import reference
from fencepost_proxy.topics import hints
from fencepost_proxy.topics.virtual_configs import VIRTUAL_CONFIGS
from tests.kit.waiting import until
from tests.support.clients import create_topic, set_check
from tests.support.docs import ROOT, Command, blocks, commands
from tests.support.fixtures import kafka_fixture, proxy_fixture
from tests.support.kafka import unique_topic
from tests.support.proxy import ProxyProcess
from tests.support.raw import Log
from tests.support.spark import create, running_spark
from tests.support.tools import run_tools

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]

README = ROOT / "README.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"
_KNOWN_SECONDS = 90.0


#: Separate: an expansion would wait for the killed proxies of other tests.
own_kafka = kafka_fixture()
proxy = proxy_fixture(of="own_kafka")


def on_topic(text: str, shown: str, topic: str) -> str:
    """The example with another topic, also in bound expected offsets such as `41@orders/3`."""
    return text.replace(f'"{shown}"', f'"{topic}"').replace(f"@{shown}/", f"@{topic}/")


def test_the_quickstart_does_what_it_says(proxy: ProxyProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """A Python block, followed by its output or error if it has any."""
    shown = [block for block in blocks(QUICKSTART) if block.language in ("python", "text")]
    names: dict[str, object] = {}
    topic = unique_topic("orders")
    stated = 0
    for index, block in enumerate(shown):
        if block.language == "text":
            continue
        code = (
            on_topic(block.text, "orders", topic)
            .replace("127.0.0.1:19092", proxy.bootstrap)
            .replace("get(30)", "get(120)")
        )
        before, reported = capsys.readouterr(), ""
        assert before.err == ""
        try:
            exec(compile(code, block.where, "exec"), names)
        except PolicyViolationError as refused:
            reported = str(refused)
        reported += capsys.readouterr().out
        if index + 1 < len(shown) and shown[index + 1].language == "text":
            assert shown[index + 1].text.replace("topic=orders", f"topic={topic}") in reported, block.where
            stated += 1
    assert stated == 3
    for name in ("producer", "ordinary"):
        names[name].close()  # type: ignore[attr-defined]


_JAVA_MAIN = """
import java.util.Map;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;

public final class Readme {
    public static void main(String[] args) throws Exception {
        String string = "org.apache.kafka.common.serialization.StringSerializer";
        try (var producer = new KafkaProducer<String, String>(
                Map.of("bootstrap.servers", args[0], "key.serializer", string, "value.serializer", string))) {
            BLOCK
        }
    }
}
"""


def test_readme_producers_append_once(proxy: ProxyProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The first Python block, then the Java block, on the same topic."""
    topic = create_topic(proxy.bootstrap, "readme", check="required")
    code = {}
    for block in reversed([*blocks(README)]):
        code[block.language] = on_topic(block.text, "orders", topic).replace("get(30)", "get(120)")

    exec(compile(code["python"].replace("127.0.0.1:19092", proxy.bootstrap), "README.md", "exec"), {})
    assert capsys.readouterr().out == "0 1\n"

    source = tmp_path / "Readme.java"
    source.write_text(_JAVA_MAIN.replace("BLOCK", code["java"]), "utf-8")
    classes = compile_java([source])
    run_java("Readme", [proxy.bootstrap], classes=classes)
    assert Log(proxy.bootstrap).values(topic) == [b"first", b"second"]
    with pytest.raises(ToolError, match=r"PolicyViolationException: OFFSET_MISMATCH .* expected=1 actual=2"):
        run_java("Readme", [proxy.bootstrap], classes=classes)


def test_readme_commands_append_and_refuse(proxy: ProxyProcess) -> None:
    topic = unique_topic("trial")
    printed = [each.text for each in commands(README) if re.search("fencepost (kafka-|append|read)", each.text)]
    environment = {**os.environ, "FENCEPOST_BOOTSTRAP_SERVER": proxy.bootstrap}
    assert len(printed) == 5

    def run(text: str) -> tuple[int, str]:
        words = text.removeprefix(".venv/bin/fencepost ").replace("trial", topic).split()
        command = [sys.executable, "-m", "fencepost_proxy", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
        return done.returncode, done.stdout + done.stderr

    for text in printed[:2]:
        assert run(text)[0] == 0
    until(lambda: run(printed[2]), "an append", accept=lambda done: done == (0, "appended at offset 0\n"))
    code, stated = run(printed[3])
    assert (code, stated.startswith("fencepost: refused: ")) == (1, True)
    assert "the log end offset is 1" in stated
    assert run(printed[4]) == (0, f"0\t0\t-\tfirst\n{topic}-0: the next record gets offset 1\n")


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_commands_of_the_docker_guide_run_without_docker(kafka: KafkaCluster, tmp_path: Path) -> None:
    """What the guide runs on the host and in Spark's container, with a proxy that has the mounted file's topics."""
    checks = (ROOT / "deploy" / "fencepost.toml").read_text("utf-8").partition("[topics.")
    assert checks[1]
    with ProxyProcess(kafka.bootstrap, tmp_path, config="".join(checks[1:])) as proxy, running_spark({}) as spark:
        environment = {**os.environ, "FENCEPOST_BOOTSTRAP_SERVER": proxy.bootstrap}
        printed = []
        for text in (each.text for each in commands(ROOT / "deploy" / "docker" / "README.md")):
            if words := re.match(r"\.venv/bin/fencepost (.*)", text):
                done = subprocess.run(
                    [sys.executable, "-m", "fencepost_proxy", *words[1].split()],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=150,
                    check=False,
                )
                printed.append((done.returncode, done.stdout + done.stderr))
                # Brokers learn of a topic shortly after the controller.
                time.sleep(2)
            elif words := re.match(r"docker-compose run --rm spark bulk_load (.*)", text):
                jobs = runpy.run_path(str(ROOT / "spark_jobs" / "bulk_load.py"))
                given = [each.replace("/data/", f"{ROOT}/") for each in words[1].split()]
                jobs["load"](spark, jobs["arguments"]().parse_args([*given, "--bootstrap", proxy.bootstrap]))
    trial, first, second, flights = printed
    assert (trial[0], flights[0]) == (0, 0)
    assert first == (0, "appended at offset 0\n")
    assert second[0] == 1
    assert "the log end offset is 1" in second[1]
    log, rows = Log(kafka.bootstrap), (ROOT / "examples" / "flights.csv").read_text("utf-8").splitlines()[1:]
    loaded = [json.loads(value) for partition in range(4) for value in log.values("checked-flights", partition)]
    assert sorted(",".join(each.values()) for each in loaded) == sorted(rows)


def test_readme_leader_writes_after_its_claim(proxy: ProxyProcess) -> None:
    topic = create_topic(proxy.bootstrap, "ledger", check="required")
    (block,) = [each for each in blocks(README) if "Leader(" in each.text]
    code = block.text.replace("127.0.0.1:19092", proxy.bootstrap).replace('"ledger"', f'"{topic}"')
    exec(compile(code, block.where, "exec"), {"apply": _State().apply})
    assert Log(proxy.bootstrap).values(topic) == [b"node-1", b"entry 1", b"entry 2"]


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_readme_spark_load_is_resumable(proxy: ProxyProcess) -> None:
    topic = unique_topic("readme-flights")
    create(proxy.bootstrap, topic, partitions=2)
    set_check(proxy.bootstrap, topic, "required")
    (block,) = [each for each in blocks(README) if each.language == "python" and "fencepost.spark.append" in each.text]
    code = block.text.replace("127.0.0.1:19092", proxy.bootstrap).replace('"flights"', f'"{topic}"')
    with running_spark({}) as spark:
        rows = spark.range(500).selectExpr("CAST(id AS STRING) AS key", "CAST(id AS STRING) AS value")
        for _ in range(2):
            exec(compile(code, block.where, "exec"), {"spark": spark, "rows": rows})

    log = Log(proxy.bootstrap)
    assert sorted(value for partition in (0, 1) for value in log.values(topic, partition)) == sorted(
        b"%d" % number for number in range(500)
    )


class _State:
    """The application's state in the examples: it depends only on the number of records."""

    def __init__(self) -> None:
        self.applied = 0

    def apply(self, *_: object) -> None:
        self.applied += 1

    def decide(self, *_: object) -> list[bytes]:
        return [b"%d" % self.applied, b"%d" % self.applied]

    def apply_all(self, records: list[object]) -> None:
        self.applied += len(records)


class _Handled(Exception):
    """Ends the loop of a consumer."""


def test_python_examples_of_client_pages_run(proxy: ProxyProcess, capsys: pytest.CaptureFixture[str]) -> None:
    topics = {name: unique_topic(name) for name in ("accounts", "orders", "carts")}
    accounts, orders, carts = topics.values()
    checked = {"fencepost.check.expected.offsets": "true"}
    ordered = {"fencepost.ordered.partition.expansion": "true", "fencepost.check.partition.count": "true"}
    with closing(KafkaAdminClient(bootstrap_servers=proxy.bootstrap)) as admin:
        admin.create_topics(
            [
                NewTopic(accounts, 4, 1, topic_configs=checked),
                NewTopic(orders, 2, 1, topic_configs=ordered),
                NewTopic(carts, 1, 1, topic_configs=checked),
            ]
        )

    def handle(records: list[Any]) -> None:
        raise _Handled(records[0].value)

    state = _State()
    names: dict[str, Any] = {"state": state, "requests": ["one", "two"], "handle": handle}
    names |= {"time": time, "InvalidPartitionsError": InvalidPartitionsError, "key": b"k", "value": b"v"}
    outcomes = []
    for block in blocks(ROOT / "docs" / "client.md", ROOT / "docs" / "other-clients.md"):
        if block.language != "python":
            continue
        text = block.text.replace("localhost:19092", proxy.bootstrap)
        for name, topic in topics.items():
            text = on_topic(text, name, topic)
        if block.page.name == "other-clients.md":
            names["producer"] = KafkaProducer(bootstrap_servers=proxy.bootstrap, enable_idempotence=False)
        code = compile(text, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        try:
            running = eval(code, names)
            if inspect.isawaitable(running):
                asyncio.run(_awaited(running))
        except (OffsetMismatchError, _Handled) as error:
            outcomes.append((type(error).__name__, str(error)))
        producer = names.pop("producer", None)
        if hasattr(producer, "close"):  # aiokafka's producer is closed by its context
            producer.flush()
            producer.close()

    mismatch = f"{accounts}-3: expected offset 41, but the log end offset is 0"
    assert capsys.readouterr().out.splitlines() == ["41 0", mismatch]
    assert outcomes == [("OffsetMismatchError", mismatch), ("_Handled", "b'...'")]
    assert state.applied == 4
    log = Log(proxy.bootstrap)
    assert log.values(accounts, 3) == [b"0", b"0", b"2", b"2"]
    assert sum(len(log.values(accounts, partition)) for partition in (0, 1, 2, 3)) == 4 + 2 + 1
    assert log.values(carts) == [b"apple"]


async def _awaited(running: Any) -> None:
    await running


#: docs/write-a-policy.md adds this config to the proxy (`tests/unit/test_write_a_policy.py`).
_OF_THE_TUTORIAL = "fencepost.require.key"


def test_kafkas_own_tools_do_what_pages_say(proxy: ProxyProcess, tmp_path: Path) -> None:
    """Page by page, in order, with separate topics. The test creates topics that the page does not create."""
    prefix = unique_topic("docs")
    shown = [
        each
        for each in commands()
        if re.match(r"(fencepost )?kafka-(topics|configs)", each.text) and _OF_THE_TUTORIAL not in each.text
    ]
    given = [_with_names(each, prefix, proxy.bootstrap) for each in shown]
    creating = [words for words in given if "--create" in words]
    others = [words for words in given if words not in creating]
    topics = {words[_named(words)] for words in given}
    with closing(KafkaAdminClient(bootstrap_servers=proxy.bootstrap)) as admin:
        made = topics - {words[_named(words)] for words in creating}
        admin.create_topics([NewTopic(topic, 2, 1) for topic in sorted(made)])
        run_tools(creating, tmp_path)
        # Brokers learn of a topic shortly after the controller.
        give_up = time.monotonic() + _KNOWN_SECONDS
        while any(each.get("error_code") for each in admin.describe_topics(sorted(topics))):
            assert time.monotonic() < give_up
            time.sleep(0.1)

        run_tools(others, tmp_path)

        counts = {each["name"]: len(each["partitions"]) for each in admin.describe_topics(sorted(topics))}
    expanded = {
        words[_named(words)]: int(words[words.index("--partitions") + 1]) for words in given if "--partitions" in words
    }
    assert expanded.items() <= counts.items()
    assert len(expanded) >= 3


def test_printed_kafka_configs_commands_change_the_topic(
    proxy: ProxyProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of error messages, of hints and of `fencepost config explain`. The shell must take each as one command."""
    topic = unique_topic("printed")
    texts = [str(CheckIsOffError(topic, "off")), hints.CLEANUP_POLICY]
    texts += [reference.explain(name) for name in VIRTUAL_CONFIGS]
    printed = [found for text in texts for found in re.findall(r"kafka-configs\.sh --[^)(\n]*[^)(\s]", text)]
    assert len(printed) == len(texts)
    given = []
    for text in printed:
        assert not re.search("[<>|&;$]", text), "the shell would not run this as one command"
        words = shlex.split(text)
        words[words.index("--bootstrap-server") + 1] = proxy.bootstrap
        words[_named(words)] = topic
        given.append(words)
    with closing(KafkaAdminClient(bootstrap_servers=proxy.bootstrap)) as admin:
        admin.create_topics([NewTopic(topic, 1, 1)])
        run_tools(given, tmp_path)
        shown = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)], config_filter="all")
    configs = shown["topic"][topic]
    for words in given:
        name, _, value = words[words.index("--add-config") + 1].partition("=")
        assert configs[name]["value"] == value or name == "fencepost.check.expected.offsets"


def _with_names(command: Command, prefix: str, bootstrap: str) -> list[str]:
    words = shlex.split(command.text.removeprefix("fencepost "))
    if command.text.startswith("fencepost "):  # which adds the address of `fencepost dev`
        words += ["--bootstrap-server", bootstrap]
    page = re.sub(r"\W", "-", command.where.partition(":")[0])
    words[words.index("--bootstrap-server") + 1] = bootstrap
    words[_named(words)] = f"{prefix}-{page}-{words[_named(words)]}"
    return words


def _named(words: list[str]) -> int:
    """The index of the topic name."""
    return words.index("--entity-name" if "--entity-name" in words else "--topic") + 1
