"""Batches that are damaged, malformed or reserved: 2, 87, 44."""

import struct

from tests.contract.rows import (
    CORRUPT_MESSAGE,
    INVALID_RECORD,
    NO_SESSION,
    POLICY_VIOLATION,
    SHARED,
    Part,
    Send,
    appended,
    batch,
    refused,
    row,
    send,
)
from tests.support.raw import Record, sign


def _with_count(count: int):  # type: ignore[no-untyped-def]
    def spoil(good: bytes) -> bytes:
        bad = bytearray(good)
        struct.pack_into(">i", bad, 57, count)
        sign(bad)
        return bytes(bad)

    return spoil


def _damage(good: bytes) -> bytes:
    return good.replace(b"payload", b"paylobd")


_MALFORMED = {
    "half-a-header": lambda good: good[:40],
    "last-byte-missing": lambda good: good[:-1],
    "one-byte-more": lambda good: good + b"\0",
    "two-batches": lambda good: good + good,
    "empty": lambda good: b"",
    "record-count-too-high": _with_count(2),
    "record-count-zero": _with_count(0),
    "magic-1": lambda good: good[:16] + b"\1" + good[17:],
}
_MARKER = batch(Record(b"\0\0\0\0\0\0", 0, key=b"\0\0\0\1"), attributes=0x20)

ROWS = [
    row(
        "wrong-crc-is-not-repaired",  # the proxy computes the CRC of a fenced batch
        "required",
        send(
            batch(b"payload", expected=0, spoil=_damage),
            refused(CORRUPT_MESSAGE, "CORRUPT {where}: the batch does not match its CRC", log_start=-1),
        ),
        send(batch(b"payload", expected=0), appended(0)),
        without=NO_SESSION,
    ),
    *(
        row(
            f"only-its-partition-fails/{name}",
            "required",
            Send(
                (
                    Part(batch(b"v", expected=0, spoil=spoil), refused(INVALID_RECORD, "")),
                    Part(batch(b"v", expected=0), appended(0), 1),
                )
            ),
            partitions=2,
            without=NO_SESSION,
        )
        for name, spoil in _MALFORMED.items()
    ),
    row("control-batch", "required", send(_MARKER, refused(INVALID_RECORD, "CONTROL_BATCH {where}: ", log_start=-1))),
    *(
        row(
            f"shared-producer-id/{topic}",
            topic,
            send(batch(b"a", expected=1), appended(1)),
            send(
                batch(b"x", expected=2, producer=SHARED, sequence=2),
                refused(POLICY_VIOLATION, "PRODUCER_ID_TAKEN {where}: "),
            ),
            length=1,
        )
        for topic in ("required", "checked")
    ),
]
