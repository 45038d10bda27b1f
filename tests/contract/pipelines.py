"""Pipelined appends, and PREDECESSOR_FAILED: an earlier batch of the same producer and connection failed."""

from fencepost_proxy.preflight.conformance.driver import Settings
from tests.contract.rows import (
    CORRUPT_MESSAGE,
    INVALID_RECORD,
    NO_SESSION,
    POLICY_VIOLATION,
    SEQUENCER,
    TOO_LARGE,
    Pipelined,
    Reply,
    appended,
    batch,
    from_kafka,
    mismatch,
    refused,
    row,
    send,
)
from tests.support.raw import sign


def _after_mismatch(expected: int, actual: int) -> Reply:
    """With the log end of the failed append, by which clients without messages know a mismatch."""
    message = f"PREDECESSOR_FAILED OFFSET_MISMATCH {{where}} expected={expected} actual={actual}"
    return refused(POLICY_VIOLATION, message)._replace(base_offset=actual)


_FAILED = _after_mismatch(7, 4)
#: Without proof of WRITE, answers after the first have no log start.
_PROVED = send(batch(b"proved", expected=3), appended(3))
_UNSENT = {SEQUENCER: "sessions fail the appends that follow a refusal"}
_PRODUCERS = {"idempotent": "p", "without-producer-id": None}


def _header_missing(good: bytes) -> bytes:
    bad = bytearray(good[:-1] + b"\x09")  # a header count without headers
    sign(bad)
    return bytes(bad)


#: Refused batches.
_BAD = {
    "too-large": (batch(b"x" * 3000), from_kafka(TOO_LARGE)),
    "corrupt": (batch(b"good", spoil=lambda good: good[:-1] + b"!"), refused(CORRUPT_MESSAGE, "CORRUPT {where}")),
    "malformed": (batch(b"good", spoil=_header_missing), refused(INVALID_RECORD, "MALFORMED {where}")),
}


def _ten(producer: str | None) -> Pipelined:
    """Ten appends from offset 5 on. From the fourth on, each expects one too much."""
    replies = [appended(5), appended(6), appended(7), mismatch(9, 8)]
    replies += [_after_mismatch(9, 8)] * 6
    return Pipelined(
        tuple(
            send(batch(b"%d" % i, expected=5 + i + (i >= 3), producer=producer, sequence=i), reply)
            for i, reply in enumerate(replies)
        )
    )


ROWS = [
    *(
        row(
            f"appended-in-order/{topic}/{name}",
            topic,
            Pipelined(
                tuple(
                    send(
                        batch(b"a%d" % i, b"b%d" % i, expected=2 * i, producer=producer, sequence=2 * i),
                        appended(2 * i),
                    )
                    for i in range(20)
                )
            ),
        )
        for topic in ("required", "checked")
        for name, producer in _PRODUCERS.items()
    ),
    *(
        row(
            f"refused-after-a-refusal/{name}",
            "required",
            _ten(producer),
            send(batch(b"next", expected=8), appended(8)),
            length=5,
            without=_UNSENT,
        )
        for name, producer in _PRODUCERS.items()
    ),
    *(
        row(
            f"fitting-append-after-a-refusal/{name}",
            "checked",
            _PROVED,
            Pipelined(
                (
                    send(batch(b"refused", expected=7, producer=producer), mismatch(7, 4)),
                    send(batch(b"fits", expected=4, producer=producer, sequence=1), _FAILED),
                    send(batch(b"unconditional", producer=producer, sequence=2), _FAILED),
                    send(batch(b"another's", expected=4, producer="q"), appended(4)),
                )
            ),
            send(batch(b"after the answers", expected=5), appended(5)),
            length=3,
            without=_UNSENT,
        )
        for name, producer in _PRODUCERS.items()
    ),
    row(
        "another-partition-is-not-affected",
        "required",
        Pipelined(
            (send(batch(b"x", expected=7), mismatch(7, 3)), send(batch(b"y", expected=0), appended(0), partition=1))
        ),
        length=3,
        partitions=2,
        without=NO_SESSION,
    ),
    *(
        row(
            f"unconditional-without-producer-id-is-independent/{name}",
            "checked",
            Pipelined(
                tuple(
                    send(bad, refusal) if i % 10 == 3 else send(batch(b"good"), appended(i - (i + 6) // 10))
                    for i in range(30)
                )
            ),
            settings=Settings(max_message_bytes=2000),
            without=NO_SESSION,
        )
        for name, (bad, refusal) in _BAD.items()
    ),
]
