"""Metrics of real proxies under load: those of dashboard and alerts exist, in a format that Prometheus accepts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fencepost_proxy.observability.exposition import SECTIONS
from tests.kit.waiting import until
from tests.monitoring.prometheus import PROMTOOL, RULES, metrics_in, promtool, queries
from tests.support.fake_cluster import FakeClusterProcess
from tests.support.ports import free_port
from tests.support.proxy import CHECKED_WITH_LONG_LEASE, ProxyProcess
from tests.support.raw import Answer, Connection, batch

NOT_LEADER, POLICY_VIOLATION = 6, 44
PARTITIONS, SHOWN = 3, 2
CONFIG = f"{CHECKED_WITH_LONG_LEASE}\n[limits]\nmetric_partitions_shown_max = {SHOWN}\n"


class Watched(ProxyProcess):
    def __init__(self, upstream: str, directory: Path, *arguments: str) -> None:
        status = f"127.0.0.1:{free_port()}"
        super().__init__(upstream, directory, config=CONFIG, arguments=("--status", status, *arguments))

    def scrape(self) -> str:
        return self.page("/metrics")


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """The kind of Kafka does not matter here."""
    with (
        FakeClusterProcess(brokers=1, topics={"required-topic": PARTITIONS}) as kafka,
        Watched(kafka.bootstrap, tmp_path_factory.mktemp("proxy")) as proxy,
    ):
        yield proxy


def append(connection: Connection, topic: str, partition: int, expected: int) -> Answer:
    """Errors 3, 5 and 6 are retried: the topic, its leader or the partition sequencer may be new."""

    def answered() -> Answer | None:
        answer = connection.append(topic, batch(b"value", expected=expected), partition=partition)
        return None if answer.error_code in (3, 5, NOT_LEADER) else answer

    found: Answer = until(answered, f"an append to {topic}-{partition}")
    return found


def values(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(text: str, name: str, **labels: str) -> float:
    return sum(value for (found, of), value in values(text).items() if found == name and of >= labels.items())


def names_in(text: str) -> set[str]:
    """Metric names as PromQL uses them, including families without a value yet."""
    found = set()
    for family in text_string_to_metric_families(text):
        found |= {family.name, f"{family.name}_total", f"{family.name}_info"}
        found |= {f"{family.name}_{suffix}" for suffix in ("bucket", "count", "sum")}
    return found


def test_scrape_shows_appends_with_limited_partitions(proxy: Watched) -> None:
    # Given a checked topic of three partitions, two of which a scrape may name
    topic = "required-topic"
    with Connection(proxy.bootstrap) as connection:
        before = proxy.scrape()

        # When each partition gets an append, and the first a second one, and then one with an outdated expected offset
        for partition in range(PARTITIONS):
            assert append(connection, topic, partition, 0).base_offset == 0
        assert append(connection, topic, 0, 1).base_offset == 1
        assert append(connection, topic, 0, 1).error_code == POLICY_VIOLATION

        # Then the scrape reports it
        def expanded(after: str) -> list[float]:
            return [
                total(after, name, **labels) - total(before, name, **labels)
                for name, labels in (
                    ("fencepost_refusals_total", {"reason": "offset_mismatch"}),
                    ("fencepost_sequencers", {"phase": "open"}),
                    ("fencepost_partitions_omitted", {}),
                )
            ]

        what = "all three partitions to be reported"
        after = until(proxy.scrape, what, accept=lambda text: expanded(text) == [1, PARTITIONS, PARTITIONS - SHOWN])
    assert total(after, "fencepost_requests_total", api="Produce", version="9") >= 5
    assert total(after, "fencepost_partition_log_end_offset", topic=topic, partition="0") == 2
    assert total(after, "fencepost_partition_log_end_offset", topic=topic) == 3
    assert total(after, "fencepost_partition_sequence_offset", topic=topic) == 0
    assert total(after, "fencepost_ready") == 1
    assert total(after, "fencepost_log_lines_total", level="info") >= 3


def test_topics_of_the_file_are_listed_before_any_append(tmp_path: Path) -> None:
    """An operator looks for them after a restart."""
    topics = {"required-topic": PARTITIONS, "plain": 1}
    with FakeClusterProcess(topics=topics) as kafka, Watched(kafka.bootstrap, tmp_path) as proxy:
        rows = until(lambda: json.loads(proxy.page("/topics.json"))["rows"], "a listed topic")
    configs = {"fencepost.check.expected.offsets": "required"}
    assert [(each["topic"], each["configs"], each["partitions"]) for each in rows] == [
        ("required-topic", configs, PARTITIONS)
    ]


def test_scrape_has_every_documented_and_queried_metric(proxy: Watched) -> None:
    there = names_in(proxy.scrape())

    assert {shown.name for section in SECTIONS for shown in section.shown} <= there
    for title, query in queries():
        assert metrics_in(query) <= there, (title, query)


def test_prometheus_finds_nothing_wrong_with_it(proxy: Watched) -> None:
    text = proxy.scrape()
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    assert len({family.name for family in families}) == len(families)
    if PROMTOOL is not None:
        checked = promtool("check", "metrics", stdin=text.encode())
        assert (checked.returncode, checked.stdout) == (0, b"")


def test_broker_connection_errors_are_in_the_metrics(tmp_path: Path) -> None:
    # Given a request in progress at a paused broker
    with FakeClusterProcess(topics={"plain": 1}) as kafka, Watched(kafka.bootstrap, tmp_path) as proxy:
        with Connection(proxy.bootstrap) as connection:
            connection.api_versions()
            before = proxy.scrape()
            os.kill(kafka.pid, signal.SIGSTOP)
            connection.send_produce({"plain": {0: batch(b"value")}})
            until(lambda: total(proxy.scrape(), "fencepost_requests_in_flight") == 1, "the request in flight")

            # When the broker dies
            os.kill(kafka.pid, signal.SIGKILL)
            assert connection.is_closed()

        # Then the client's connection, later connections and the proxy's connection are counted with that reason
        def reported(of: str, reason: str) -> float:
            return total(proxy.scrape(), "fencepost_upstream_errors_total", of=of, reason=reason)

        def a_late_client_finds_no_broker() -> bool:
            try:
                with Connection(proxy.bootstrap) as late:
                    late.send_produce({"plain": {0: batch(b"value")}})
                    assert late.is_closed()
            except ConnectionRefusedError:  # the listener is closed while its broker is unreachable
                return True
            return reported("clients", "unreachable") >= 1

        assert total(before, "fencepost_upstream_errors_total") == 0
        assert reported("clients", "lost") == 1
        until(a_late_client_finds_no_broker, "a client that finds no broker")
        until(lambda: reported("proxy", "unreachable") >= 1, "the proxy's own connection to be missed")
        until(lambda: "fencepost_requests_in_flight 0.0" in proxy.scrape(), "no request in flight")


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_a_prometheus_evaluates_every_query_and_every_rule(proxies: tuple[Watched, Watched], tmp_path: Path) -> None:
    # Given a Prometheus that scrapes both proxies every second, with our rules
    address = f"127.0.0.1:{free_port()}"
    config = tmp_path / "prometheus.yml"
    targets = [each.status for each in proxies]
    scraped = {"job_name": "fencepost", "static_configs": [{"targets": targets}]}
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config.write_text(json.dumps({"global": every, "rule_files": [str(RULES)], "scrape_configs": [scraped]}))

    def result_of(path: str, **parameters: str) -> Any:
        """The API's response; an error is a response, too."""
        url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code not in (400, 422):
                raise  # it is not up yet
            return json.load(error)

    def scraped_for_a_while() -> bool:
        found = result_of("query", query='min(count_over_time(up{job="fencepost"}[1m])) > 10')
        return bool(found["data"]["result"])

    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=warn",
        ]
    )
    try:
        until(scraped_for_a_while, "ten scrapes of each")
        # Then both targets are up, and each query of the dashboard has a result, over a range and at one moment
        now = time.time()
        empty = []
        for title, query in queries():
            span = {"start": str(now - 10), "end": str(now), "step": "1"}
            for found in (result_of("query_range", query=query, **span), result_of("query", query=query)):
                assert found["status"] == "success", (title, query, found)
            if not found["data"]["result"]:
                empty.append((title, query))

        # And every rule was evaluated without an error
        def evaluated() -> list[Any] | None:
            rules = [rule for group in result_of("rules")["data"]["groups"] for rule in group["rules"]]
            return rules if all(rule["health"] != "unknown" for rule in rules) else None

        rules = until(evaluated, "all rules to be evaluated")
        assert [rule for rule in rules if rule["health"] != "ok"] == []
        assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
        assert [each for each in result_of("query", query="up")["data"]["result"] if each["value"][1] != "1"] == []
        print(f"{len(queries())} queries, {len(rules)} rules; without a value yet: {empty}")
    finally:
        process.terminate()
        process.wait(60)
