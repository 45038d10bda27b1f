"""`fencepost transactions` on a status page: output for people and programs, exit codes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from fencepost_proxy.cli import transactions
from fencepost_proxy.cli.main import main
from fencepost_proxy.cli.tables import duration, table

OPEN = {
    "transactional_id": "payments-7",
    "producer_id": 3,
    "producer_epoch": 0,
    "state": "Ongoing",
    "coordinator": 1,
    "age_seconds": 192.4,
    "timeout_ms": 60_000,
    "partitions": 12,
    "first_partitions": ["orders-0", "orders-1"],
    "stuck": None,
}
HANGING = {
    "topic": "orders",
    "partition": 0,
    "start_offset": 41,
    "producer_id": 3,
    "producer_epoch": 2,
    "coordinator_epoch": 0,
    "last_timestamp_ms": 1_767_225_600_000,
    "observed_seconds": 60.0,
    "transactional_id": None,
    "why": "unknown_to_coordinator",
}
ABORT = ("abort", "--topic", "orders", "--partition", "0")
REPORT: dict[str, Any] = {
    "open": [],
    "hanging": [],
    "open_transactions": 0,
    "transactional_ids": {"Empty": 2, "Ongoing": 0},
    "partitions": 100,
    "lagging_partitions": 1,
    "partitions_unreadable": 0,
    "partitions_left_out": 0,
    "sweep_seconds": 4.0,
    "sweep_age_seconds": 7.0,
    "problem": None,
}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The status page's report, which a test changes."""
    report = dict(REPORT)
    stated = {"ready": True, "bootstrap": "proxy:19092", "transactions": report}
    monkeypatch.setattr(transactions, "status_page", lambda status: json.loads(json.dumps(stated)))
    return report


def run(*arguments: str) -> int:
    return main(["transactions", *arguments, "--status", "127.0.0.1:8080"])


def test_open_transactions_are_a_table(page: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    page |= {"open": [OPEN], "open_transactions": 1, "transactional_ids": {"Empty": 2, "Ongoing": 1}}
    assert run() == 0
    head, row, _, summary = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["TRANSACTIONAL", "ID"]
    assert "3 min 12 s" in row
    assert row.endswith("12: orders-0, orders-1, …")
    assert summary == "1 open; transactional ids by state: Empty 2, Ongoing 1"


def test_hanging_transaction_is_reported_with_abort_command(
    page: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    page["hanging"] = [HANGING]
    assert run("hanging") == 1
    text = capsys.readouterr().out
    assert text.startswith("orders-0: hanging from offset 41: its coordinator does not know of it")
    advice = shlex.split(next(line for line in text.splitlines() if "to abort it" in line).partition("to abort it:")[2])
    assert advice[:5] == ["fencepost", "transactions", "abort", "--bootstrap-server", "proxy:19092"]
    assert advice[-1] == "41"


def test_abort_command_takes_the_given_login(
    page: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def nothing(*_: object, **__: object) -> None: ...

    async def probed(*_: object) -> dict[str, Any]:
        return page | {"hanging": [HANGING]}

    monkeypatch.setattr("fencepost_proxy.cluster.client.KafkaClient.start", nothing)
    monkeypatch.setattr(transactions, "_probe", probed)
    (login := tmp_path / "client.properties").write_text("security.protocol=PLAINTEXT\n")
    assert main(["transactions", "hanging", "--bootstrap-server", "kafka:9092", "--command-config", str(login)]) == 1
    assert f"abort --bootstrap-server kafka:9092 --command-config {login} --topic" in capsys.readouterr().out


def test_what_is_beyond_its_timeout_counts_too(page: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    page["open"] = [{**OPEN, "stuck": "overdue"}]
    assert run("hanging") == 1
    assert "should have aborted it" in capsys.readouterr().out


@pytest.mark.parametrize(
    "unknown", [{"partitions_unreadable": 3}, {"problem": "broker 2 is away"}, {"sweep_seconds": None}]
)
def test_incomplete_scan_does_not_report_success(page: dict[str, Any], unknown: dict[str, Any]) -> None:
    assert run("hanging") == 0
    page |= unknown
    assert run("hanging") == 2


def test_programs_get_json(page: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    page["hanging"] = [HANGING]
    assert run("hanging", "--json") == 1
    (found,) = json.loads(capsys.readouterr().out)["hanging"]
    assert found["start_offset"] == 41
    assert found["to_end_it"].startswith("fencepost transactions abort ")


def test_a_name_is_no_command_to_a_terminal(page: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    page["open"] = [{**OPEN, "transactional_id": "evil\x1b[2J\nforged"}]
    run()
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "requested"),
    [
        (["describe", "--status", "x:1"], "describe ID"),
        (["list", "payments-7", "--status", "x:1"], "unexpected 'payments-7'"),
        ([], "no source given"),
        (["--bootstrap", "nowhere"], "HOST:PORT"),
        (["abort", "--start-offset", "3"], "--topic and --partition"),
        ([*ABORT], "--start-offset, or"),
        ([*ABORT, "--producer-id", "5", "--producer-epoch", "0"], "--start-offset, or"),
        ([*ABORT, "--start-offset", "3", "--producer-id", "5"], "--start-offset, or"),
        ([*ABORT, "--start-offset", "3", "--json"], "no --json"),
        ([*ABORT, "--start-offset", "3", "--status", "x:1"], "abort needs --bootstrap-server"),
        (["hanging", "--start-offset", "3", "--status", "x:1"], "options of abort"),
        (["abort", "payments-7", "--topic", "orders", "--bootstrap", "x:1"], "leave out --topic"),
        (["abort", "payments-7", "--status", "x:1"], "abort needs --bootstrap-server"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], requested: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transactions", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert requested in line


def test_describe_finds_only_transactions_on_the_page(page: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    page["open"] = [OPEN]
    assert run("describe", "payments-7") == 0
    assert "Ongoing" in capsys.readouterr().out
    assert run("describe", "another") == 2


def test_columns_of_numbers_are_on_the_right() -> None:
    assert table(("NAME", "N"), [("a", 5), ("bcdef", 12)]) == "NAME    N\na       5\nbcdef  12"
    assert [duration(each) for each in (7.4, 61, 3700, 90_000)] == ["7 s", "1 min 1 s", "1 h 1 min", "1 d 1 h"]
