"""What librdkafka's offsets of refused records mean: it adds each record's place in its batch."""

from __future__ import annotations

import pytest

from fencepost.confluent._producer import LogEnds


@pytest.mark.parametrize(
    ("shown", "ends"),
    [
        pytest.param([(41, 57), (42, 58), (43, 59)], [57, 57, 57], id="one batch"),
        pytest.param([(41, 57), (42, 58), (43, 57), (44, 58)], [57, 57, 57, 57], id="next batch"),
        pytest.param([(41, 57), (42, 58), (43, 60), (44, 61)], [57, 57, 60, 60], id="next batch after an append"),
    ],
)
def test_refused_batch_reports_one_log_end(shown: list[tuple[int, int]], ends: list[int]) -> None:
    """`shown` has the expected offsets, and the offsets that librdkafka shows."""
    log_ends = LogEnds()
    released_total = log_ends.count
    assert [log_ends.of_refusal("t", 0, expected, offset, released_total) for expected, offset in shown] == ends


def test_record_sent_after_refusal_is_another_batch() -> None:
    """Refused at 56, the log ends at 57; sent again at 57; refused again, because the log now ends at 58."""
    ends = LogEnds()
    assert ends.of_refusal("t", 0, 56, 57, ends.count) == 57
    assert ends.of_refusal("t", 0, 57, 58, ends.count) == 58


def test_partitions_are_tracked_separately() -> None:
    ends = LogEnds()
    released_total = ends.count
    assert ends.of_refusal("t", 0, 41, 57, released_total) == 57
    assert ends.of_refusal("t", 1, 42, 58, released_total) == 58
    assert ends.of_refusal("t", 0, 42, 58, released_total) == 57
