"""37 INVALID_PARTITION_COUNT, 44 PARTITION_COUNT_REQUIRED, 87 PARTITION_COUNT_CONTRADICTION and _UNREADABLE."""

import struct

from tests.contract.rows import (
    INVALID_PARTITIONS,
    INVALID_RECORD,
    NO_SESSION,
    POLICY_VIOLATION,
    SECOND,
    Part,
    Reply,
    Send,
    appended,
    batch,
    mismatch,
    refused,
    row,
    send,
)
from tests.support.raw import CODECS, Record

_CURRENT = batch(b"v", count=6)
_CHECKED = ("counted", "count-required", "checked-and-counted")


def _stale(expected: int) -> Reply:
    return Reply(INVALID_PARTITIONS, -1, f"INVALID_PARTITION_COUNT {{where}} expected={expected} actual=6")


def _int32(count: int) -> bytes:
    return struct.pack(">i", count)


def _row(name: str, topic: str, *steps, **more):  # type: ignore[no-untyped-def]
    return row(name, topic, *steps, partitions=6, **more)


WITHOUT = NO_SESSION
ROWS = [
    *(
        _row(
            f"current-count/{topic}",
            topic,
            send(batch(b"header", expected=0, count=6), appended(0)),
            send(batch(b"field", expected=1), appended(1), count=_int32(6)),
            send(batch(b"both", expected=2, count=6), appended(2), count=_int32(6)),
            send(batch(b"zeros", expected=3, count=b"006"), appended(3)),
        )
        for topic in _CHECKED
    ),
    *(
        _row(
            f"stale-count-{count}-in-a-header/{topic}", topic, send(batch(b"x", expected=0, count=count), _stale(count))
        )
        for topic in _CHECKED
        for count in (3, 8, 2**31 - 1)
    ),
    *(
        _row(f"stale-count-in-the-field/{topic}", topic, send(batch(b"x", expected=0), _stale(3), count=_int32(3)))
        for topic in _CHECKED
    ),
    _row(
        "the-connection-is-closed-afterwards",
        "counted",
        send(batch(b"x", count=3), _stale(3)),
        send(batch(b"y", count=6), closes=True),
    ),
    _row("missing-count", "counted", send(batch(b"x"), appended(0))),
    _row(
        "missing-count-is-required",
        "count-required",
        send(batch(b"x"), refused(POLICY_VIOLATION, "PARTITION_COUNT_REQUIRED {where} actual=6: this topic has ")),
    ),
    _row(
        "header-contradicts-the-field",
        "counted",
        send(
            batch(b"x", count=6),
            Reply(INVALID_RECORD, -1, "PARTITION_COUNT_CONTRADICTION {where}: record header has 6, request has 3"),
            count=_int32(3),
        ),
    ),
    *(
        _row(
            f"unreadable-field/{name}",
            "counted",
            send(batch(b"x"), Reply(INVALID_RECORD, -1, f"PARTITION_COUNT_UNREADABLE {{where}}: {why}"), count=content),
        )
        for name, content, why in (
            ("empty", b"", "tagged field 253 has 0 bytes; it is an int32"),
            ("three-bytes", b"\0\0\6", "tagged field 253 has 3 bytes; it is an int32"),
            ("five-bytes", b"\0\0\0\0\6", "tagged field 253 has 5 bytes; it is an int32"),
            ("zero", _int32(0), "0 is not a number of partitions"),
            ("negative", _int32(-1), "-1 is not a number of partitions"),
            ("lowest", _int32(-(2**31)), f"{-(2**31)} is not a number of partitions"),
        )
    ),
    _row(
        "headers-of-other-checks-are-ignored",
        "counted",
        send(
            batch(Record(b"x", b"nonsense", [("fencepost-write-id", b""), ("fencepost-partition-count", b"3")])),
            _stale(3),
        ),
    ),
    _row("count-is-not-checked-elsewhere", "required", send(batch(b"x", expected=0, count=3), appended(0))),
    _row("both-checks-apply", "checked-and-counted", send(batch(b"x", expected=1, count=6), mismatch(1, 0))),
    _row(
        "count-is-checked-before-the-offset", "checked-and-counted", send(batch(b"x", expected=5, count=3), _stale(3))
    ),
    _row(
        "each-partition-is-answered-separately",
        "counted",
        Send(
            (Part(_CURRENT, appended(0)), Part(batch(b"x", count=3), _stale(3), 2), Part(_CURRENT, appended(0), SECOND))
        ),
        send(_CURRENT, closes=True),
        second="plain",
    ),
    _row(
        "request-scope",
        "counted",
        Send(
            (
                Part(batch(b"x", count=3), _stale(3), 2),
                Part(_CURRENT, refused(INVALID_PARTITIONS, "WHOLE_REQUEST_REFUSED {where}: INVALID_PARTITION_COUNT ")),
            )
        ),
        scope="request",
    ),
    *(
        _row(f"stale-count-in-{name}", "counted", send(batch(b"x" * 300, count=3, codec=codec), _stale(3)))
        for name, codec in CODECS.items()
    ),
    *(
        _row(f"field-in-version-{version}/{count}", "counted", step)
        for version in (9, 12)
        for count, step in (
            (6, send(batch(b"v"), appended(0), count=_int32(6), version=version)),
            (3, send(batch(b"v"), _stale(3), count=_int32(3), version=version)),
        )
    ),
    *(
        _row(f"header-is-ignored-without-the-check/{count!r}", "plain", send(batch(b"v", count=count), appended(0)))
        for count in (3, b"x", b"-1")
    ),
]
