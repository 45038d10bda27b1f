"""What the Spark jobs make of a command line, and how they report progress. No Spark is started."""

from __future__ import annotations

import argparse
import io
import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError

from fencepost.spark import files, jobs
from fencepost.spark.errors import CannotReach, SinkError
from fencepost.spark.files import keeps_order
from fencepost.spark.jobs import Progress, Stages, add_client_arguments, client_settings, progress_of
from fencepost.spark.options import client_options
from tests.support.ports import free_port
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
    monkeypatch.setattr(stream, "session", lambda _: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(stream, "run", lambda *_: None)
    words = ["stream.py", "--bootstrap", "p:9092", "--from", "orders", "--to", "invoices", "--checkpoint", "c"]
    monkeypatch.setattr("sys.argv", [*words, *(["--once"] if once else [])])
    assert stream.main() == 0
    stated = "stream: finished, all records that orders had are processed into invoices\n"
    assert capsys.readouterr().out == (stated if once else "")


@pytest.mark.parametrize("given", [set(), {"spark.log.level"}], ids=["nothing given", "level given"])
def test_spark_is_quiet_unless_asked(given: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[str, str] = {}
    builder = SimpleNamespace(
        getOrCreate=lambda: chosen, config=lambda name, value: chosen.update({name: value}) or builder
    )
    parts = {"SparkSession": SimpleNamespace(builder=SimpleNamespace(appName=lambda _: builder))}
    parts |= {"SparkContext": SimpleNamespace(_ensure_initialized=lambda: None)}
    parts |= {"SparkConf": lambda: SimpleNamespace(contains=given.__contains__)}
    for name, part in parts.items():
        monkeypatch.setattr(jobs, name, part)
    quiet = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}
    assert jobs.session("x") == {name: value for name, value in quiet.items() if name not in given}


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
    # given a log that gets longer, and a Spark that writes the rows which another stage read
    monkeypatch.setattr("fencepost.spark.jobs._PROBE_SECONDS", 0.001)
    monkeypatch.setattr("fencepost.spark.jobs._LINE_SECONDS", 0.0)
    log: Any = AdvancingLog()
    stages = Stages(spark_with(stage(2, 2, shuffled=162), stage(3, 8)))
    # when it is shown for some looks
    with Progress("load", stages, log, "t", partitions=2, found=40, out=out).shown():
        deadline = time.monotonic() + 30
        while log.probes < 4:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    # then it names what Spark does, and the share of the rows that are in the log; a failed read is left out
    lines = out.getvalue().replace("\r", "\n").split("\n")
    reported = [line.rstrip() for line in lines if line.strip()]
    assert reported[0] == "load: sorting: 160 rows; an earlier run appended 40 of them"
    assert re.fullmatch(r"load: writing: 80 of 160 rows \(50%\), [\d,]+ a second, 0:00:00 left", reported[1])
    # and a terminal's line is wiped in the end
    assert isinstance(out, Terminal) == out.getvalue().endswith(" \r")


def stage(done: int, tasks: int, *, read: int = 0, shuffled: int = 0) -> dict[str, int]:
    return {"numCompleteTasks": done, "numTasks": tasks, "inputRecords": read, "shuffleWriteRecords": shuffled}


def spark_with(*stages: dict[str, int] | None) -> Any:
    """The last of its stages is active. None: Spark has forgotten it."""

    def last_attempt(number: int) -> Any:
        if (values := stages[number]) is None:
            raise Py4JError("NoSuchElementException")
        return SimpleNamespace(**{name: partial(int, value) for name, value in values.items()})

    store = SimpleNamespace(lastStageAttempt=last_attempt)
    tracker = SimpleNamespace(getActiveStageIds=lambda: [len(stages) - 1] if stages else [])
    jsc = SimpleNamespace(sc=lambda: SimpleNamespace(statusStore=lambda: store))
    return SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker, _jsc=jsc))


READ = stage(4, 4, shuffled=2000)


@pytest.mark.parametrize(
    ("stages", "appended", "line"),
    [
        ((), 0, ""),
        ((stage(1, 4, read=500),), 0, "reading: 500 rows, 1 of 4 tasks done (25%)"),
        ((None,), 0, ""),
        ((READ, stage(0, 2)), 0, "sorting: 2,000 rows"),
        ((READ, None, stage(0, 2)), 500, "writing: 500 of 2,000 rows (25%), 50 a second, 0:00:30 left"),
        ((READ, stage(0, 2)), 9999, "writing: 2,000 of 2,000 rows (100%), 1,000 a second, 0:00:00 left"),
        ((None,), 500, "writing: 500 records appended, 50 a second"),
    ],
)
def test_progress_names_the_phase(stages: Any, appended: int, line: str) -> None:
    assert progress_of(Stages(spark_with(*stages)).work(), 0, appended, 10.0) == line


# --- the command line of a load ---------------------------------------------------------------------------------------


def test_check_takes_the_command_line_of_the_load() -> None:
    def options(name: str) -> set[str]:
        return {each for action in job(name).arguments()._actions for each in action.option_strings}

    assert options("bulk_load") - options("verify") == {"--dry-run"}


@pytest.mark.parametrize(
    ("words", "keeps", "order"),
    [
        ((), False, "none"),
        (("--key", "k"), True, "partition"),
        (("--partition-column", "p"), True, "partition"),
        (("--keep-order",), True, "partition"),
        (("--key", "k", "--no-keep-order"), False, "none"),
    ],
)
def test_order_of_the_input_is_kept_where_it_matters(words: tuple[str, ...], keeps: bool, order: str) -> None:
    verify = job("verify")
    args = verify.arguments().parse_args(["--input", "f.csv", "--bootstrap", "p:1", "--topic", "t", *words])
    assert (keeps_order(args), verify._order(args)) == (keeps, order)


def test_numbers_in_file_names_sort_by_value() -> None:
    names = ["a/part-2.csv", "a/part-10.csv", "a/part-010b.csv", f"a/part-1{'0' * 30}.csv", "a/part-x.csv"]
    assert sorted(names, key=files._natural) == names


def test_topic_that_cannot_be_read_is_one_sentence() -> None:
    verify = job("verify")
    read = verify.topic_reader("t", client_options({"kafka.bootstrap.servers": f"127.0.0.1:{free_port()}"}))
    with pytest.raises(CannotReach, match=r"^t-3 cannot be read: .*run verify again when Kafka is up"):
        list(read((3, 0, 9)))
