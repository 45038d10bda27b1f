"""`fencepost verify-broker` against a real Kafka: its results, and that it leaves nothing."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.cli.main import main
from tests.kit.waiting import until
from tests.support.kafka import kafka_version
from tests.support.raw import Connection

pytestmark = pytest.mark.kafka

PAGE = Path(__file__).parents[2] / "docs" / "which-kafka.md"
PROMISES = ("required", "true", "transactions", "Spark sink")


def own_topics(kafka: KafkaCluster) -> list[str]:
    with Connection(kafka.bootstrap) as admin:
        return [each.name for each in admin.metadata().topics if each.name.startswith("fencepost-verify")]


def documented(version: str) -> list[str]:
    """The row of that release: a result for each promise."""
    (row,) = re.findall(rf"(?m)^\| Apache Kafka {re.escape(version)} \| (.*) \|$", PAGE.read_text("utf-8"))
    return [cell.strip() for cell in row.split("|")][: len(PROMISES)]


@pytest.mark.brokers
def test_results_are_those_of_the_page(kafka: KafkaCluster, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    status = main(["verify-broker", "--bootstrap-server", kafka.bootstrap, "--json"])

    report = json.loads(capsys.readouterr().out)
    differing = {
        each["name"]: each["reason"] for each in report["cases"] if each["outcome"] == "differs" and each["promises"]
    }
    assert (status, differing) == (0, {})
    assert [report["promises"][each]["result"] for each in PROMISES] == documented(kafka_version())
    assert report["cluster_id"] == kafka.cluster_id
    assert report["release"] == kafka_version().rpartition(".")[0]
    assert report["seconds"] < 120
    assert own_topics(kafka) == []
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_no_topic(kafka: KafkaCluster, sent: signal.Signals) -> None:
    command = [sys.executable, "-m", "fencepost_proxy", "verify-broker", "--bootstrap-server", kafka.bootstrap]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: own_topics(kafka), "a topic of a case")
        process.send_signal(sent)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert own_topics(kafka) == []
