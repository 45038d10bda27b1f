"""Expected offsets on topics that do not check them, and copied headers: what sessions notice, and what is reported."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost_proxy import logs
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability.diagnosis import of_ignored_offsets
from fencepost_proxy.services import reports
from fencepost_proxy.services.reports import Reports
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.types import TopicPartition
from tests.support.raw import CODECS, Record, batch
from tests.unit.test_session import Talk, produce


def _ignored(talk: Talk) -> list[str]:
    found = [each.topic for each in talk.commands if isinstance(each, m.OffsetIgnored)]
    talk.commands.clear()
    return found


def _records(stated: bytes | int | None, codec: int = 0, value: bytes = b"v") -> memoryview:
    return memoryview(batch(Record(value, stated), Record(b"more"), codec=codec))


@pytest.mark.parametrize("codec", CODECS.values())
@pytest.mark.parametrize("version", [3, 9, 12])
def test_expected_offset_on_unchecked_topic_is_noticed(version: int, codec: int) -> None:
    talk = Talk()
    talk.client(produce(("logs", 3, _records(41, codec)), version=version))
    assert _ignored(talk) == ["logs"]


@pytest.mark.parametrize(
    "records",
    [
        _records(None, value=b"fencepost-expected-offset"),
        _records(-1),
        _records(b"41@elsewhere/3"),
        _records(b"unreadable"),
        _records(41, value=b"x" * 20_000),
    ],
)
def test_other_batches_on_unchecked_topic_are_not_noticed(records: memoryview) -> None:
    talk = Talk()
    talk.client(produce(("logs", 3, records)))
    assert _ignored(talk) == []


def test_each_topic_of_a_request_is_noticed() -> None:
    talk = Talk()
    talk.client(produce(("logs", 0, _records(1)), ("other", 0, _records(2)), ("quiet", 0, _records(None))))
    assert _ignored(talk) == ["logs", "other"]


def test_only_first_requests_of_a_topic_are_read() -> None:
    talk = Talk()
    for correlation in range(10):
        topic = "logs" if correlation % 2 else "other"  # alternating: none takes the fast path
        talk.client(produce((topic, 0, _records(1)), correlation=correlation))
    assert sorted(_ignored(talk)) == ["logs"] * 3 + ["other"] * 3


class _Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: str, /, **fields: Any) -> None:
        self.lines.append((event, fields))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> _Log:
    made = _Log()
    monkeypatch.setattr(reports, "_limited_log", logs.RateLimitedLog(made))  # type: ignore[arg-type]
    return made


def _reports() -> Reports:
    unused: Any = None
    return Reports(Metrics(), unused, unused, unused, unused)


def test_ignored_offsets_are_counted_and_logged_once_per_topic(log: _Log) -> None:
    made = _reports()
    for topic in ("logs", "logs", "other", "logs"):
        assert made.take(m.OffsetIgnored(topic), None)
    assert [fields["topic"] for _, fields in log.lines] == ["logs", "other"]
    assert (made.metrics.ignored_offsets.value, list(made.ignored_offsets)) == (4, ["other", "logs"])
    (problem,) = of_ignored_offsets(["logs", "other"])
    assert (problem.bad, problem.what) == (
        False,
        "Topics that get expected offsets, but do not check them: logs, other",
    )
    assert not list(of_ignored_offsets([]))


def test_copied_headers_are_counted_and_logged_once_per_client_and_topic(log: _Log) -> None:
    made = _reports()
    for client_id, topic in (("app", "retry"), ("app", "retry"), ("app", "dlt"), (None, "other")):
        assert made.take(m.HeadersCopied(TopicPartition(topic, 0), "orders/3", client_id), None)
    assert [(fields["client_id"], fields["partition"].topic) for _, fields in log.lines] == [
        ("app", "retry"),
        ("app", "dlt"),
        ("unknown", "other"),
    ]
    assert log.lines[0][1]["made_for"] == "orders/3"
    assert made.metrics.copied_headers.value == 4
