"""Log lines: one per event, whatever a peer put into a name."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from fencepost_proxy import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:], root.level = before
    logging.captureWarnings(False)


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_an_event_is_one_line_of_key_and_value(stream: io.StringIO) -> None:
    logs.setup("info", "console", stream)

    logs.get("net.control").warning("connection lost", broker="kafka-1:9092", reason="closed by peer", tries=3)

    (line,) = lines(stream)
    assert line.endswith('WARNING net.control connection lost broker=kafka-1:9092 reason="closed by peer" tries=3')


@pytest.mark.parametrize("style", ["console", "json"])
def test_a_topic_name_cannot_forge_a_line(stream: io.StringIO, style: str) -> None:
    logs.setup("info", style, stream)

    logs.get("session").info("produced", topic='x\n2026-01-01 ERROR disk full\x1b[2J" level=ERROR\u2028\\')

    (line,) = stream.getvalue().split("\n")[:-1]
    assert "\x1b" not in line
    assert "\u2028" not in line
    shown = json.loads(line)["topic"] if style == "json" else line
    assert r"x\n2026-01-01 ERROR disk full\x1b[2J" in shown
    if style == "console":
        assert r"\" level=ERROR\u2028\\" + '"' in line


def test_json_keeps_numbers_and_its_own_keys(stream: io.StringIO) -> None:
    logs.setup("info", "json", stream)

    logs.get("session").info("closed", offset=7, level="forged", reason=None)

    entry = json.loads(stream.getvalue())
    assert (entry["offset"], entry["level"], entry["level_"], entry["reason"]) == (7, "info", "forged", None)
    assert (entry["event"], entry["room"]) == ("closed", "session")


def test_a_long_value_is_cut(stream: io.StringIO) -> None:
    logs.setup("info", "console", stream)

    logs.get("session").info("hello", client_id="a" * 100_000)

    assert len(stream.getvalue()) < 1_000


def test_a_stack_trace_stays_below_its_event(stream: io.StringIO) -> None:
    logs.setup("info", "console", stream)

    try:
        raise ValueError("bad\n2026-01-01 ERROR forged")
    except ValueError as error:
        logs.get("session").crash("our own fault", error, connection=4)

    first, *rest = lines(stream)
    assert "our own fault connection=4" in first
    assert rest
    assert all(line.startswith("    ") for line in rest)


def test_below_its_level_nothing_is_written(stream: io.StringIO) -> None:
    logs.setup("warning", "console", stream)

    logs.get("session").info("quiet")
    logging.getLogger("some.library").info("quiet too")

    assert stream.getvalue() == ""


def test_what_peers_can_repeat_is_logged_once_per_interval(stream: io.StringIO) -> None:
    logs.setup("info", "console", stream)
    now = 100.0
    limited = logs.RateLimitedLog(logs.get("session"), interval_seconds=10, clock=lambda: now)

    for _ in range(5):
        limited.warning("bad frame", "bad frame", size=-1)
    limited.warning("other", "something else")
    now = 110.0
    limited.warning("bad frame", "bad frame", size=-2)

    assert [line.split("session ")[1] for line in lines(stream)] == [
        "bad frame size=-1",
        "something else",
        "bad frame size=-2 suppressed=4",
    ]


def test_the_memory_of_what_was_logged_is_bounded(stream: io.StringIO) -> None:
    logs.setup("info", "console", stream)
    limited = logs.RateLimitedLog(logs.get("session"), keys_max=2, clock=lambda: 0.0)

    for key in ("a", "b", "c", "c", "a"):
        limited.info(key, "event", key=key)

    assert [line[-1] for line in lines(stream)] == ["a", "b", "c", "a"]
