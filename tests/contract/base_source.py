"""The expected offset in a batch's base offset, and which source takes precedence."""

from tests.contract.rows import appended, batch, mismatch, row, send
from tests.support.raw import Record

ROWS = [
    row(
        "above-zero-counts-without-the-config",
        "required",
        send(batch(b"x", base_offset=2), mismatch(2, 3)),
        send(batch(b"a", b"b", base_offset=3), appended(3)),  # Kafka accepts no base offset but 0: it was reset
        length=3,
    ),
    row(
        "zero-is-literal",
        "base-required",
        send(batch(b"a", base_offset=0), appended(0)),
        send(batch(b"b", base_offset=0), mismatch(0, 1)),
        send(batch(b"d", base_offset=1), appended(1)),
    ),
    row(
        "header-minus-one-defers-to-it", "base", send(batch(Record(b"a", b"-1"), base_offset=3), appended(3)), length=3
    ),
    *(
        row(
            f"header-takes-precedence/{topic}",
            topic,
            send(batch(b"a", expected=0, base_offset=7), appended(0)),
            send(batch(b"b", expected=7, base_offset=1), mismatch(7, 1)),
        )
        for topic in ("required", "base-required")
    ),
    *(
        row(
            f"minus-one-is-reset/{name}",
            "base",
            send(batch(Record(b"a", stated), base_offset=-1, producer="p"), appended(0)),
            send(batch(b"b", base_offset=-1), appended(1)),
        )
        for name, stated in {"no-header": None, "header-minus-one": b"-1"}.items()
    ),
]
