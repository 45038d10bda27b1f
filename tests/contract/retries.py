"""Retries are recognized by write id, or by producer id, epoch and sequence; POSSIBLY_YOURS."""

from fencepost_proxy.preflight.conformance.driver import Settings
from tests.contract.rows import (
    NO_SESSION,
    OTHER,
    OUT_OF_ORDER,
    Batch,
    appended,
    batch,
    from_kafka,
    mismatch,
    row,
    send,
)
from tests.support.raw import CODECS, Record

_MINE = batch(b"a", b"b", expected=0, write_id=b"write-1", resent=True)
_COPIED = (
    " POSSIBLY_YOURS: the log has its write-id with another timestamp: copied headers (leave the fencepost headers out "
    "of a record that is written again; a retry repeats the timestamp)"
)
_LIKE_MINE = {
    "other-records": (batch(b"x", b"y", expected=0, write_id=b"write-1"), _COPIED),
    "another-write-id": (batch(b"a", b"b", expected=0, write_id=b"write-2"), ""),
    "another-second-record": (
        batch(b"a", b"X", expected=0, write_id=b"write-1", resent=True),
        " POSSIBLY_YOURS: 1 of 2 of these records are in the log",
    ),
    "more-records": (
        batch(b"a", b"b", b"c", expected=0, write_id=b"write-1", resent=True),
        " POSSIBLY_YOURS: 2 of 3 of these records are in the log",
    ),
}


def _named(at: int, *values: bytes) -> Batch:
    """Each record has its expected offset and its own write-id."""
    records = (Record(each, at + i, (("fencepost-write-id", b"id of " + each),)) for i, each in enumerate(values))
    return batch(*records, resent=True)


_RESENT = ((0, b"a"), (1, b"b"), (1, b"b", b"c"), (0, b"a", b"b", b"c", b"d"), (2, b"c", b"d"))
_UNNAMED = batch(b"a", expected=0)

ROWS = [
    *(
        row(
            f"by-producer-and-sequence/{topic}",
            topic,
            send(batch(b"a", b"b", expected=2, producer="p"), appended(2)),
            send(batch(b"c", expected=4, producer="p", sequence=2), appended(4)),
            send(batch(b"other", expected=5), appended(5)),
            *(
                send(batch(b"a", b"b", expected=2, producer="p"), appended(2), via=via)
                for via in ("first", "second", "first")
            ),
            length=2,
        )
        for topic in ("required", "checked")
    ),
    row(
        "same-sequence-with-other-records",
        "required",
        send(batch(b"a", expected=0, producer="p"), appended(0)),
        send(batch(b"b", expected=0, producer="p"), mismatch(0, 1)),
        send(batch(b"b", expected=1, producer="p"), appended(1)),
    ),
    row(
        "same-sequence-in-a-newer-epoch",
        "required",
        send(batch(b"a", expected=0, producer="p"), appended(0)),
        send(batch(b"a", expected=0, producer="p", epoch=1), mismatch(0, 1)),
    ),
    *(
        row(
            f"by-write-id/{name}",
            "required",
            send(_MINE, appended(0)),
            send(batch(b"c", expected=2), appended(2)),
            send(_MINE, appended(0), via=via),
            without=NO_SESSION if via == OTHER else {},
        )
        for name, via in (("same-bytes", "first"), ("another-connection", "second"), ("another-process", OTHER))
    ),
    *(
        row(
            f"copied-headers/{topic}/{via}",
            topic,
            send(_MINE, appended(0)),
            send(batch(b"a", b"b", expected=0, write_id=b"write-1", age_ms=60_000), mismatch(0, 2, _COPIED), via=via),
            without=NO_SESSION if via == OTHER else {},
        )
        for topic in ("required", "checked")
        for via in ("first", OTHER)
    ),
    *(
        row(
            f"resend-in-other-batches/{topic}/{via}",
            topic,
            send(_named(0, b"a", b"b"), appended(0)),
            send(_named(2, b"c", b"d"), appended(2)),
            *(send(_named(at, *values), appended(at), again=True, via=via) for at, *values in _RESENT),
            send(_named(3, b"d", b"e"), mismatch(3, 4, " POSSIBLY_YOURS: 1 of 2 of these records are in the log")),
            send(_named(3, b"e"), mismatch(3, 4)),
            without=NO_SESSION if via == OTHER else {},
        )
        for topic in ("required", "checked")
        for via in ("first", OTHER)
    ),
    *(
        row(
            f"no-retry/{name}/{via}",
            "required",
            send(_MINE, appended(0)),
            send(records, mismatch(0, 2, more), via=via),
            send(_MINE, appended(0)),
            without=NO_SESSION if via == OTHER else {},
        )
        for name, (records, more) in _LIKE_MINE.items()
        for via in ("first", OTHER)
    ),
    row(
        "no-retry/within-the-first-batch",
        "required",
        send(_MINE, appended(0)),
        send(batch(b"b", expected=1, write_id=b"write-1"), mismatch(1, 2)),
    ),
    *(
        row(
            f"write-id-in-{name}",  # brokers recompress it
            "required",
            send(batch(b"a" * 300, b"b" * 300, expected=0, write_id=b"it", codec=codec), appended(0)),
            send(batch(b"a" * 300, b"b" * 300, expected=0, write_id=b"it", codec=codec), appended(0), via=OTHER),
            settings=Settings(gzip=True),
            without=NO_SESSION,
        )
        for name, codec in CODECS.items()
    ),
    *(
        row(
            f"write-id-with-log-append-time/{name}",  # the log keeps the producer's timestamps
            "required",
            send(_MINE, appended(0)),
            send(_MINE, appended(0), via="second"),
            send(batch(b"a", b"b", expected=0, write_id=b"write-1", age_ms=60_000), mismatch(0, 2, _COPIED)),
            settings=Settings(log_append_time=True, gzip=name == "recompressed"),
        )
        for name in ("unchanged", "recompressed")
    ),
    *(
        row(
            f"equal-records-are-possibly-yours/{via}",
            "required",
            send(_UNNAMED, appended(0)),
            send(_UNNAMED, mismatch(0, 1, " POSSIBLY_YOURS"), via=via),
            without=NO_SESSION if via == OTHER else {},
        )
        for via in ("first", "second", OTHER)
    ),
    row(
        "conditional-and-other-batches-of-one-producer",
        "checked",
        *(
            send(batch(b"v%d" % i, expected=i if i % 3 == 1 else None, producer="p", sequence=i), appended(i))
            for i in range(12)
        ),
        send(batch(b"bad", expected=5, producer="p", sequence=12), mismatch(5, 12)),
        # The client continues with the sequence of the refused batch, or with the next one.
        send(batch(b"v12", producer="p", sequence=12), appended(12)),
        send(batch(b"v13", expected=13, producer="p", sequence=14), appended(13)),
        *(
            send(
                batch(b"v%d" % i, expected=i if i % 3 == 1 else None, producer="p", sequence=i),
                appended(i),
                via="second",
            )
            for i in (0, 9, 10, 11)
        ),
    ),
    row(
        "unconditional-batches-keep-kafkas-promise",
        "checked",
        *(send(batch(b"v", producer="p", sequence=i), appended(i)) for i in range(3)),
        send(batch(b"v", producer="p", sequence=2), appended(2), via="second"),
        send(batch(b"v", producer="p", sequence=7), from_kafka(OUT_OF_ORDER), via="second"),
    ),
]
