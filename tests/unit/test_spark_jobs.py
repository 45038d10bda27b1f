"""What the Spark jobs make of a command line, and how they report progress. No Spark is started."""

from __future__ import annotations

import argparse
import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fencepost.spark.errors import CannotReach, SinkError
from fencepost.spark.jobs import Progress, add_client_arguments, client_settings
from tests.support.spark import job


def settings(*words: str) -> dict[str, str]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap")
    add_client_arguments(parser)
    return client_settings(parser.parse_args(["--bootstrap", "proxy:9092", *words]))


def test_command_line_settings_override_the_client_config_file(tmp_path: Path) -> None:
    # given a .properties file as Kafka's own tools take it
    file = tmp_path / "client.properties"
    login = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="u" password="a=b";'
    continued = login.replace(" required ", " required \\\n    ")
    file.write_text(f"# of the loader\n! and this\n\nsecurity.protocol: SASL_SSL\nsasl.jaas.config = {continued}\n")
    # when it is named together with an option that it also has
    found = settings("--client-config", str(file), "--option", "security.protocol=SASL_PLAINTEXT")
    # then values may have an equals sign, and the command line decides
    assert found == {
        "kafka.bootstrap.servers": "proxy:9092",
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.jaas.config": login,
    }


@pytest.mark.parametrize("once", [True, False])
def test_finished_stream_says_so(
    once: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = job("stream")
    session = SimpleNamespace(stop=lambda: None)
    builder = SimpleNamespace(appName=lambda _: SimpleNamespace(getOrCreate=lambda: session))
    monkeypatch.setattr(stream, "SparkSession", SimpleNamespace(builder=builder))
    monkeypatch.setattr(stream, "run", lambda *_: None)
    words = ["stream.py", "--bootstrap", "p:9092", "--from", "orders", "--to", "invoices", "--checkpoint", "c"]
    monkeypatch.setattr("sys.argv", [*words, *(["--once"] if once else [])])
    assert stream.main() == 0
    stated = "stream: finished, all records that orders had are processed into invoices\n"
    assert capsys.readouterr().out == (stated if once else "")


def test_invalid_settings_line_is_not_quoted(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("secret\n")
    with pytest.raises(SinkError, match="not NAME=VALUE") as refused:
        settings("--client-config", str(file))
    assert "secret" not in str(refused.value)
    with pytest.raises(SinkError, match="No such file"):
        settings("--client-config", str(tmp_path / "nowhere"))


@pytest.mark.parametrize("wrong", ["security.protocol", "=x"])
def test_an_option_has_a_name_and_a_value(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings("--option", wrong)
    assert "is not NAME=VALUE" in capsys.readouterr().err


class AdvancingLog:
    """Each read finds ten more records; the second read fails."""

    def __init__(self) -> None:
        self.probes = 0

    def offsets(self, topic: str, partitions: Any) -> dict[int, tuple[int, int]]:
        self.probes += 1
        if self.probes == 2:
            raise CannotReach("not now")
        return dict.fromkeys(partitions, (0, 100 + 10 * self.probes))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()], ids=["a file", "a terminal"])
def test_progress_is_printed_while_spark_works(out: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a log that gets longer, and a Spark that is at its second stage
    monkeypatch.setattr("fencepost.spark.jobs._PROBE_SECONDS", 0.001)
    monkeypatch.setattr("fencepost.spark.jobs._LINE_SECONDS", 0.0)
    stage = SimpleNamespace(numCompletedTasks=3, numTasks=8)
    tracker = SimpleNamespace(
        getActiveStageIds=lambda: [1, 2], getStageInfo=lambda number: stage if number == 2 else None
    )
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker))
    log: Any = AdvancingLog()
    # when it is shown for some looks
    with Progress("load", spark, log, "t", partitions=2, out=out).shown():
        deadline = time.monotonic() + 30
        while log.probes < 4:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    # then it reports what was appended since the first read; a failed read is left out
    lines = out.getvalue().replace("\r", "\n").split("\n")
    reported = [line.rstrip() for line in lines if line.strip()]
    assert reported[0].startswith("load: 0 records appended, 0 a second; log ends 110 110; Spark: 3 of 8 tasks done")
    assert reported[1].startswith("load: 40 records appended, ")
    assert "log ends 130 130" in reported[1]
    # and a terminal's line is wiped in the end
    assert isinstance(out, Terminal) == out.getvalue().endswith(" \r")
