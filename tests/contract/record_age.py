"""32 RECORD_TOO_OLD: one record of the batch is older than `fencepost.max.record.age.ms`."""

from tests.contract.rows import (
    INVALID_TIMESTAMP,
    NO_SESSION,
    OUT_OF_ORDER,
    Part,
    Pipelined,
    Send,
    appended,
    batch,
    from_kafka,
    mismatch,
    refused,
    row,
    send,
)
from tests.support.raw import Record

_TOO_OLD = refused(INVALID_TIMESTAMP, "RECORD_TOO_OLD {where} timestamp=")
_OLD = Record(b"old", timestamp_ms=1_000)
_NEVER = Record(b"x", timestamp_ms=-1)

ROWS = [
    *(
        row(
            f"one-old-record/{topic}/codec-{codec}",
            topic,
            send(batch(b"x", b"y", _OLD, b"z", codec=codec), _TOO_OLD),
            send(batch(b"x", b"y", b"z", codec=codec, age_ms=30_000), appended(1)),
            length=1,
            without=NO_SESSION,
        )
        for topic in ("aged", "checked-and-aged", "counted-and-aged")
        for codec in (0, 1)
    ),
    row("no-timestamps", "aged", send(batch(_NEVER, _NEVER), appended(0)), without=NO_SESSION),
    row(
        "before-the-comparison",
        "checked-and-aged",
        send(batch(_OLD, expected=7), _TOO_OLD),
        send(batch(b"x", expected=7), mismatch(7, 1)),
        send(batch(b"x", expected=1), appended(1)),
        length=1,
        without=NO_SESSION,
    ),
    row(
        "only-its-own-partition",
        "aged",
        Send((Part(batch(_OLD), _TOO_OLD), Part(batch(b"x"), appended(0), 1))),
        partitions=2,
        without=NO_SESSION,
    ),
    row(
        "later-batches-of-the-pipeline/unchecked",
        "aged",
        send(batch(b"w", producer="p"), appended(0)),
        Pipelined(
            (
                send(batch(_OLD, producer="p", sequence=1), _TOO_OLD),
                send(batch(b"x", producer="p", sequence=2), from_kafka(OUT_OF_ORDER)),
            )
        ),
        send(batch(b"y", producer="p", sequence=1), appended(1)),
        without=NO_SESSION,
    ),
    row(
        "later-batches-of-the-pipeline/checked",
        "checked-and-aged",
        send(batch(b"w", expected=1), appended(1)),
        Pipelined(
            (
                send(batch(_OLD, expected=2), _TOO_OLD),
                send(batch(b"x", expected=3), refused(INVALID_TIMESTAMP, "PREDECESSOR_FAILED RECORD_TOO_OLD {where}")),
            )
        ),
        send(batch(b"y", expected=2), appended(2)),
        length=1,
        without=NO_SESSION,
    ),
]
