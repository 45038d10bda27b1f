"""Kafka appended a batch, but its response is lost or late: OK, OUTCOME_UNKNOWN."""

from tests.contract.rows import NO_SESSION, TIMED_OUT, Faulty, appended, batch, mismatch, refused, row, send

_MINE = batch(b"unanswered", b"b", expected=1, write_id=b"write-1")

WITHOUT = NO_SESSION
ROWS = [
    *(
        row(
            f"retry-after-a-lost-response/{topic}",
            topic,
            Faulty(send(_MINE, closes=True), "lost"),
            send(_MINE, appended(1), via="second"),
            send(batch(b"c", expected=1), mismatch(1, 3), via="second"),
            send(batch(b"c", expected=3), appended(3), via="second"),
            length=1,
        )
        for topic in ("required", "checked")
    ),
    *(
        row(
            f"late-response-is-an-unknown-outcome/{topic}",
            topic,
            Faulty(send(_MINE, refused(TIMED_OUT, "OUTCOME_UNKNOWN ", log_start=-1), timeout_ms=1500), "late"),
            send(_MINE, appended(1), via="second"),
            send(batch(b"c", expected=3), appended(3), via="second"),
            length=1,
        )
        for topic in ("required", "checked")
    ),
]
