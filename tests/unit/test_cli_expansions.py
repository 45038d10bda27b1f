"""`fencepost expansions`: output, queries, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fencepost_proxy.cli import expansions
from fencepost_proxy.cli.main import main
from fencepost_proxy.observability.status import ExpansionStatus, GatedStatus, StatusSnapshot
from tests.support.ports import free_port
from tests.support.status import status_page

NOW = 1_800_000_000.0
PENDING = ExpansionStatus(
    "orders", 2, 4, "pending", int(NOW - 12) * 1000, "barriers", "process(es) 7 have not closed it yet"
)
ELSEWHERE = ExpansionStatus("carts", 1, 2, "pending", int(NOW - 3) * 1000)
DONE = ExpansionStatus("clicks", 12, 24, "done", 1_700_000_000_000, blocked_ms=47, thresholds=tuple(range(100, 112)))
DIRECT = ExpansionStatus("views", 2, 8, "unordered", 1_700_000_000_000)
LAGS = GatedStatus(
    "billing", "clicks", 12, "behind", 1_234, ("partition 3: committed 57, threshold 103",), seconds=61.2
)
SNAPSHOT = StatusSnapshot("1", 1.0, "cluster", None)
ROWS: Mapping[str, Sequence[Any]] = {"expansions": (PENDING, ELSEWHERE, DONE, DIRECT), "groups": (LAGS,)}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    (file := tmp_path / "token").write_text("s3cret\n")
    return file


@contextmanager
def page(
    rows: Mapping[str, Sequence[Any]] = ROWS, *, says: str = "group billing gets it", token_file: Path | None = None
) -> Iterator[list[object]]:
    """Its address, and then the groups that were released."""
    found: list[object] = []

    async def release(group: str, topic: str) -> str:
        found.append((group, topic))
        return says

    with status_page(SNAPSHOT, rows, release=release, token_file=token_file) as address:
        found.append(address)
        yield found


def test_expansions_and_gated_groups_are_tables() -> None:
    with page() as [address]:
        found = expansions._of_status(address)  # type: ignore[arg-type]

    assert expansions.reported(found, NOW).splitlines() == [
        "In progress: appends are blocked",
        "  TOPIC   PARTITIONS  FOR   STEP                     WAITS FOR",
        "  orders  2 -> 4      12 s  barriers                 process(es) 7 have not closed it yet",
        "  carts   1 -> 2      3 s   run by another instance  -",
        "",
        "Expanded",
        "  TOPIC   PARTITIONS  AT                       BLOCKED FOR  THRESHOLDS",
        "  clicks  12 -> 24    2023-11-14 22:13:20 UTC  0.047 s      "
        "100, 101, 102, 103, 104, 105, 106, 107, … (4 more)",
        "  views   2 -> 8      2023-11-14 22:13:20 UTC  -            UNORDERED",
        "",
        "Consumer groups with gated partitions",
        "  GROUP    GATED PARTITION  FOR   RECORDS LEFT, AT MOST  LAGS IN",
        "  billing  clicks-12        61 s  1,234                  partition 3: committed 57, threshold 103",
        "",
        "To stop gating a group: fencepost expansions open TOPIC GROUP (it loses the order of keys).",
    ]


def test_empty_expansion_status_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    with page({}) as [address]:
        assert main(["expansions", "--status", str(address)]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "No ordered partition expansion, in progress or completed.",
        "",
        "No consumer group has gated partitions.",
    ]


def test_json_has_one_topics_status_page_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with page() as [address]:
        assert main(["expansions", "--status", str(address), "--topic", "clicks", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert [(each["topic"], each["thresholds"][:2]) for each in found["expansions"]] == [("clicks", [100, 101])]
    assert [(each["group"], each["records_max"]) for each in found["gated"]] == [("billing", 1_234)]


@pytest.mark.parametrize("order", ["status first", "status last"])
def test_an_operator_opens_a_topic_for_a_group(
    capsys: pytest.CaptureFixture[str], order: str, token_file: Path
) -> None:
    with page(token_file=token_file) as found:
        status, what = ["--status", str(found[0])], ["open", "or/ders", "bil ling", "--token-file", str(token_file)]
        assert main(["expansions", *(status + what if order == "status first" else what + status)]) == 0

    assert found[1:] == [("bil ling", "or/ders")]
    assert capsys.readouterr().out == "group billing gets it\n"


@pytest.mark.parametrize(("configured", "stated"), [(False, "set status_token_file"), (True, "token required")])
def test_opening_without_token_names_the_remedy(
    capsys: pytest.CaptureFixture[str], token_file: Path, configured: bool, stated: str
) -> None:
    with page(token_file=token_file if configured else None) as found:
        assert main(["expansions", "open", "orders", "billing", "--status", str(found[0])]) == 2

    assert found[1:] == []
    assert stated in capsys.readouterr().err


def test_what_could_not_be_opened_is_no_success(capsys: pytest.CaptureFixture[str], token_file: Path) -> None:
    says = "orders was not expanded in order: nothing is gated"
    with page(says=says, token_file=token_file) as [address, *_]:
        given = ["--status", str(address), "--token-file", str(token_file)]
        assert main(["expansions", "open", "orders", "billing", *given]) == 1

    captured = capsys.readouterr()
    assert captured.out == ""
    assert "was not expanded" in captured.err


@pytest.mark.parametrize("words", [[], ["open", "orders", "billing"]])
def test_missing_address_is_one_line_and_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["expansions", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fencepost: no ")
    assert "--status HOST:PORT" in line


def test_unreachable_kafka_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"

    assert main(["expansions", "--bootstrap", address]) == 2

    assert capsys.readouterr().err.splitlines()[-1].startswith(f"fencepost: cannot connect to {address}: ")
