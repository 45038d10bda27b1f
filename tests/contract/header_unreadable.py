"""87 HEADER_UNREADABLE: a Fencepost header is unreadable or repeated; the message names it."""

from tests.contract.rows import INVALID_RECORD, NO_SESSION, batch, refused, row, send
from tests.support.raw import Record

_OFFSET, _COUNT = "fencepost-expected-offset", "fencepost-partition-count"
_NUMBERS = {
    "empty": b"",
    "letters": b"abc",
    "plus": b"+3",
    "space-before": b" 3",
    "space-after": b"3 ",
    "negative": b"-2",
    "hexadecimal": b"0x3",
    "fraction": b"3.0",
    "other-digits": "\u0663".encode(),
    "twenty-digits": b"1" * 20,
    "above-int64": b"9223372036854775808",
}
_COUNTS = {
    "empty": b"",
    "zero": b"0",
    "negative": b"-1",
    "plus": b"+6",
    "space-before": b" 6",
    "fraction": b"6.0",
    "above-int32": b"2147483648",
    "twenty-digits": b"9" * 20,
}


def _unreadable(header: str, record: int = 0):  # type: ignore[no-untyped-def]
    return refused(INVALID_RECORD, f"HEADER_UNREADABLE {{where}} record={record} header={header}: ")


ROWS = [
    *(
        row(
            f"{name}/{topic}",
            topic,
            send(batch(b"first", Record(b"second", stated)), _unreadable(_OFFSET, 1)),
            length=3,
        )
        for name, stated in _NUMBERS.items()
        for topic in ("required", "checked")
    ),
    row("null", "required", send(batch(Record(b"x", headers=[(_OFFSET, None)])), _unreadable(_OFFSET))),
    row(
        "repeated",
        "required",
        send(batch(Record(b"x", 0, headers=[("other", b"1"), (_OFFSET, b"0")])), _unreadable(_OFFSET)),
    ),
    row(
        "below-minus-one-as-base",
        "base",
        send(batch(b"a", base_offset=-2), refused(INVALID_RECORD, "HEADER_UNREADABLE {where} ")),
    ),
    *(
        row(
            f"count-{name}",
            "counted",
            send(batch(b"x", count=stated), _unreadable(_COUNT)),
            partitions=6,
            without=NO_SESSION,
        )
        for name, stated in _COUNTS.items()
    ),
    row(
        "count-repeated",
        "counted",
        send(batch(Record(b"x", headers=[(_COUNT, b"6"), (_COUNT, b"6")])), _unreadable(_COUNT)),
        partitions=6,
        without=NO_SESSION,
    ),
]
