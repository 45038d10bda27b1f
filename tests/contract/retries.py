"""Retries are recognized by write id, or by producer id, epoch and sequence; POSSIBLY_YOURS."""

from tests.conformance.driver import Settings
from tests.contract.rows import NO_SESSION, OTHER, OUT_OF_ORDER, appended, batch, from_kafka, mismatch, row, send
from tests.support.raw import CODECS

_MINE = batch(b"a", b"b", expected=0, write_id=b"write-1")
_LIKE_MINE = {
    "other-records": batch(b"a", b"X", expected=0, write_id=b"write-1"),
    "another-write-id": batch(b"a", b"b", expected=0, write_id=b"write-2"),
    "fewer-records": batch(b"a", expected=0, write_id=b"write-1"),
    "more-records": batch(b"a", b"b", b"c", expected=0, write_id=b"write-1"),
}
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
            send(batch(b"a", b"b", expected=0, write_id=b"write-1", age_ms=age_ms), appended(0), via=via),
            without=NO_SESSION if via == OTHER else {},
        )
        for name, age_ms, via in (
            ("same-bytes", 0, "first"),
            ("other-timestamps", 60_000, "first"),
            ("another-connection", 0, "second"),
            ("another-process", 0, OTHER),
        )
    ),
    *(
        row(
            f"no-retry/{name}/{via}",
            "required",
            send(_MINE, appended(0)),
            send(records, mismatch(0, 2), via=via),
            send(batch(b"a", b"b", expected=0, write_id=b"write-1"), appended(0)),
            without=NO_SESSION if via == OTHER else {},
        )
        for name, records in _LIKE_MINE.items()
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
            for i in (9, 10, 11)
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
