"""32 TIMESTAMP_TOO_OLD: on `required` topics the newest record is older than half of `producer.id.expiration.ms`."""

from tests.contract.rows import INVALID_TIMESTAMP, appended, batch, mismatch, refused, row, send
from tests.support.raw import Record

_AGES = {"two-days": (2 * 86_400_000, None), "none-at-all": (0, -1)}


def _old(value: bytes, expected: int | None, age_ms: int, timestamp_ms: int | None):  # type: ignore[no-untyped-def]
    return batch(Record(value, expected, timestamp_ms=timestamp_ms), age_ms=age_ms)


ROWS = [
    *(
        row(
            f"required/{name}",
            "required",
            send(_old(b"x", 1, *age), refused(INVALID_TIMESTAMP, "TIMESTAMP_TOO_OLD {where} newest=")),
            send(batch(b"x", expected=1), appended(1)),
            length=1,
        )
        for name, age in _AGES.items()
    ),
    *(
        row(
            f"accepted-on-checked-topics/{name}",
            "checked",
            send(_old(b"x", 7, *age), mismatch(7, 1)),
            send(_old(b"a", 1, *age), appended(1)),
            send(_old(b"b", 2, *age), appended(2)),
            send(_old(b"plain", None, *age), appended(3)),
            send(batch(b"fresh", expected=4), appended(4)),
            length=1,
        )
        for name, age in _AGES.items()
    ),
]
