"""44 OFFSET_MISMATCH: the log end offset differs from the expected offset."""

from tests.contract.rows import NO_SESSION, OTHER, Bypass, DeleteRecords, appended, batch, mismatch, row, send
from tests.support.raw import Record

_GOOD = send(batch(b"good", expected=3), appended(3))

ROWS = [
    *(
        row(f"{where}/{topic}", topic, send(batch(b"x", expected=expected), mismatch(expected, 3)), length=3)
        for where, expected in {
            "at-the-log-start": 0,
            "before-the-log-end": 2,
            "after-the-log-end": 4,
            "far-after-the-log-end": 9_000_000_000,
            "at-the-highest-offset": 2**63 - 1,
        }.items()
        for topic in ("required", "checked")
    ),
    row("empty-log", "required", send(batch(b"x", expected=1), mismatch(1, 0))),
    row("refusal-changes-nothing", "required", *[send(batch(b"bad", expected=7), mismatch(7, 3))] * 3, _GOOD, length=3),
    row(
        "old-expectation-with-other-records",
        "required",
        send(batch(b"x", expected=1), mismatch(1, 3)),
        send(batch(b"a", expected=3), appended(3)),
        send(batch(b"other", expected=3), mismatch(3, 4)),
        length=3,
    ),
    row(
        "expectation-of-a-later-record",
        "required",
        send(batch(b"a", b"b", Record(b"c", 5)), appended(3)),
        send(batch(b"x", Record(b"y", 6)), mismatch(5, 6)),
        length=3,
    ),
    *(
        row(name, "required", send(batch(*records), reply), length=3)
        for name, records, reply in (
            ("expectations-that-agree", (Record(b"a", 3), b"b", Record(b"c", 5)), appended(3)),
            ("minus-one-before-an-expectation", (Record(b"a", b"-1"), Record(b"b", 4)), appended(3)),
            ("minus-one-after-an-expectation", (Record(b"a", 3), Record(b"b", b"-1")), appended(3)),
            ("leading-zeros", (Record(b"a", b"0003"),), appended(3)),
            ("too-small-for-its-place", (b"a", b"b", Record(b"c", 1)), mismatch(-1, 3)),
            (
                "first-contradiction",
                (Record(b"a", 3), b"b", Record(b"c", 8), Record(b"d", 100)),
                mismatch(8, 5, " record=2", base_offset=3),
            ),
        )
    ),
    row(
        "contradiction-at-the-log-end",
        "required",
        send(batch(Record(b"a", 3), b"b", Record(b"c", 9)), mismatch(9, 5, " record=2", base_offset=3)),
        length=3,
    ),
    row(
        "contradiction-between-records",
        "checked",
        send(batch(Record(b"a", 3), Record(b"b", 3)), mismatch(3, 4, " record=1", base_offset=3)),
        length=3,
    ),
    row(
        "another-process-has-appended",
        "required",
        send(batch(b"a", expected=1), appended(1)),
        send(batch(b"b", expected=2), appended(2), via=OTHER),
        send(batch(b"c", expected=2), mismatch(2, 3)),
        send(batch(b"c", expected=3), appended(3)),
        length=1,
        without=NO_SESSION,
    ),
    row(
        "bypassing-append-is-noticed",
        "required",
        Bypass(batch(b"bypass"), at=1),
        send(batch(b"x", expected=7), mismatch(7, 2)),
        send(batch(b"a", expected=2), appended(2)),
        length=1,
    ),
    row(
        "deleted-records-are-possibly-yours",
        "required",
        DeleteRecords(before=3),
        send(batch(b"a", expected=1), mismatch(1, 3, " POSSIBLY_YOURS")._replace(log_start=3)),
        send(batch(b"b", expected=3), appended(3)._replace(log_start=3)),
        length=3,
    ),
]
