"""What librdkafka's offsets of refused records mean: it adds each record's place in its batch."""

from __future__ import annotations

from fencepost.confluent import LogEnds


def test_refused_batch_reports_one_log_end() -> None:
    """Expected 41, 42, 43 in one batch; the log ends at 57; librdkafka shows 57, 58, 59."""
    ends = LogEnds()
    released_total = ends.count
    assert [ends.of_refusal("t", 0, 41 + i, 57 + i, released_total) for i in range(3)] == [57, 57, 57]


def test_next_refused_batch_is_evaluated_separately() -> None:
    ends = LogEnds()
    released_total = ends.count
    shown = [(41, 57), (42, 58), (43, 57), (44, 58)]
    assert [ends.of_refusal("t", 0, e, o, released_total) for e, o in shown] == [57, 57, 57, 57]


def test_record_sent_after_refusal_is_another_batch() -> None:
    """Refused at 56, the log ends at 57; tried at 57; refused again, since it ends at 58 by now."""
    ends = LogEnds()
    assert ends.of_refusal("t", 0, 56, 57, ends.count) == 57
    assert ends.of_refusal("t", 0, 57, 58, ends.count) == 58


def test_partitions_are_tracked_separately() -> None:
    ends = LogEnds()
    released_total = ends.count
    assert ends.of_refusal("t", 0, 41, 57, released_total) == 57
    assert ends.of_refusal("t", 1, 42, 58, released_total) == 58
    assert ends.of_refusal("t", 0, 42, 58, released_total) == 57
