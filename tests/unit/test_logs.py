"""Log lines: one per event, whatever text a client chose."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from weakref import WeakSet

import pytest

from fencepost_proxy import logs


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    # Suppressed lines of the process's other logs are not reported here.
    monkeypatch.setattr(logs, "_rate_limited", WeakSet())
    handlers = logging.getLogger().handlers
    before = handlers[:]
    yield io.StringIO()
    handlers[:] = before


@pytest.fixture
def console(stream: io.StringIO) -> io.StringIO:
    logs.setup("info", "console", stream)
    return stream


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_event_is_one_line_of_key_values(console: io.StringIO) -> None:
    logs.get("cluster.client").warning("connection lost", broker="kafka-1:9092", reason="closed by peer", tries=3)
    (line,) = lines(console)
    assert line.endswith('WARNING cluster.client connection lost broker=kafka-1:9092 reason="closed by peer" tries=3')


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
    logs.get("session").info("closed", offset=7, level="forged", reason=None, much=float("inf"), none=float("nan"))

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    entry = json.loads(stream.getvalue(), parse_constant=no_constant)
    assert (entry["offset"], entry["level"], entry["level_"], entry["reason"]) == (7, "info", "forged", None)
    assert (entry["much"], entry["none"]) == ("inf", "nan")
    assert (entry["event"], entry["logger"]) == ("closed", "session")


def test_a_long_value_is_cut(console: io.StringIO) -> None:
    logs.get("session").info("hello", client_id="a" * 100_000)
    assert len(console.getvalue()) < 1_000


def test_a_stack_trace_stays_below_its_event(console: io.StringIO) -> None:
    try:
        raise ValueError("bad\n2026-01-01 ERROR forged")
    except ValueError as error:
        logs.get("session").crash("our own fault", error, connection=4)
    first, *rest = lines(console)
    assert "our own fault connection=4" in first
    assert rest
    assert all(line.startswith("    ") for line in rest)


def test_below_its_level_nothing_is_written(stream: io.StringIO) -> None:
    logs.setup("warning", "console", stream)
    logs.get("session").info("quiet")
    logging.getLogger("some.library").info("quiet too")
    assert stream.getvalue() == ""


def test_repeated_peer_events_are_logged_once_per_interval(console: io.StringIO) -> None:
    now = 100.0
    limited = logs.RateLimitedLog(logs.get("session"), interval_seconds=10, clock=lambda: now)

    for _ in range(5):
        limited.warning("bad frame", "bad frame", size=-1)
    limited.warning("other", "something else")
    now = 110.0
    limited.warning("bad frame", "bad frame", size=-2)

    assert [line.split("session ")[1] for line in lines(console)] == [
        "bad frame size=-1",
        "something else",
        "bad frame size=-2 suppressed=4",
    ]


def test_the_memory_of_what_was_logged_is_bounded(console: io.StringIO) -> None:
    limited = logs.RateLimitedLog(logs.get("session"), keys_max=2, clock=lambda: 0.0)
    for key in ("a", "b", "c", "c", "a"):
        limited.info(key, "event", key=key)
    assert [line[-1] for line in lines(console)] == ["a", "b", "c", "a"]


def test_suppressed_lines_are_reported_without_a_later_event(console: io.StringIO) -> None:
    now = 100.0
    limited = logs.RateLimitedLog(logs.get("session"), interval_seconds=10, clock=lambda: now)
    left_out = logs.lines()["left_out"]

    for size in range(5):
        limited.warning("bad frame", "bad frame", size=size)
    logs.report_suppressed()
    now = 110.0
    logs.report_suppressed()
    logs.report_suppressed()

    # The last of them is logged, and stands for three others.
    assert [line.split("session ")[1] for line in lines(console)] == [
        "bad frame size=0",
        "bad frame size=4 suppressed=3",
    ]
    assert logs.lines()["left_out"] - left_out == 3


def test_suppressed_lines_are_reported_at_shutdown(console: io.StringIO) -> None:
    limited = logs.RateLimitedLog(logs.get("session"), clock=lambda: 100.0)
    for size in range(2):
        limited.warning("bad frame", "bad frame", size=size)
    logs.report_suppressed(at_once=True)
    assert [line.split("session ")[1] for line in lines(console)] == ["bad frame size=0", "bad frame size=1"]


@pytest.mark.parametrize("style", ["console", "json"])
def test_no_event_can_flood_the_log(stream: io.StringIO, style: str) -> None:
    # Given an event of which there are three more than may be, with other values each time
    logs.setup("info", style, stream)
    before = logs.lines()
    log = logs.get("services.groups")

    # When they come, with another one, and then the process ends
    for number in range(logs.EVENT_LINES_MAX + 3):
        log.info("a group gets a new partition", group=f"group-{number}")
    log.info("another event")
    logs.report_suppressed(at_once=True)

    # Then three are left out, counted, and reported
    *_, last, another, reported = lines(stream)
    assert f"group-{logs.EVENT_LINES_MAX - 1}" in last
    assert "another event" in another
    if style == "json":
        assert json.loads(reported) | {"time": ""} == {
            "time": "",
            "level": "info",
            "logger": "services.groups",
            "event": "a group gets a new partition",
            "suppressed": 3,
        }
    else:
        assert reported.endswith("INFO services.groups a group gets a new partition suppressed=3")
    after = logs.lines()
    assert after["info"] - before["info"] == logs.EVENT_LINES_MAX + 1
    assert after["left_out"] - before["left_out"] == 3


def test_library_lines_are_rate_limited(console: io.StringIO) -> None:
    for number in range(logs.EVENT_LINES_MAX + 1):
        logging.getLogger("some.library").warning("cannot do %s", number)
    assert len(lines(console)) == logs.EVENT_LINES_MAX


def test_json_stack_trace_is_one_printable_line(stream: io.StringIO) -> None:
    logs.setup("info", "json", stream)
    try:
        raise ValueError("bad\n\x1b[2J\x9b2J\x7f forged")
    except ValueError as error:
        logs.get("session").crash("our own fault", error)
    assert len(lines(stream)) == 1
    assert "\x1b" not in stream.getvalue()
    assert all(each.isprintable() for each in stream.getvalue().rstrip("\n"))
    assert "forged" in json.loads(stream.getvalue())["exception"]
