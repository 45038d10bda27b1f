"""0: the batch is at the expected offset, and unchanged."""

from fencepost_proxy.preflight.conformance.driver import Settings
from tests.contract.rows import NO_SESSION, Reply, appended, batch, mismatch, row, send
from tests.support.raw import CODECS, Record

_BIG = tuple(b"%d" % i * 500 for i in range(10))
_RESEMBLING = Record(
    b"fencepost-expected-offset\x02\x39", headers=[("expected-offset-", b"9"), ("x", b"fencepost-expected-offset")]
)

ROWS = [
    row(
        "batches-of-all-sizes",
        "required",
        send(batch(b"a", expected=0), appended(0)),
        send(batch(b"b", b"c", b"d", expected=1), appended(1)),
        send(batch(b"e", expected=4), appended(4)),
    ),
    row(
        "with-and-without-expectation",
        "checked",
        send(batch(b"a"), appended(1)),
        send(batch(b"b", expected=2), appended(2)),
        send(batch(b"c", producer="p"), appended(3)),
        send(batch(b"d", expected=4), appended(4)),
        length=1,
    ),
    row("unchecked-topic-ignores-it", "plain", send(batch(b"a", expected=9), appended(0)), without=NO_SESSION),
    row("value-that-resembles-a-header", "checked", send(batch(_RESEMBLING), appended(1)), length=1),
    row("minus-one-on-a-checked-topic", "checked", send(batch(Record(b"x", b"-1")), appended(2)), length=2),
    *(
        row(
            f"codec-{name}",
            "required",
            send(batch(*_BIG, expected=3, codec=codec), appended(3)),
            send(batch(*_BIG, expected=4, codec=codec), mismatch(4, 13)),
            length=3,
        )
        for name, codec in CODECS.items()
    ),
    *(
        row(
            f"produce-v{version}",
            "required",
            send(batch(b"a", expected=3), Reply(0, 3, log_start=start), version=version),
            send(batch(b"b", expected=3), mismatch(3, 4)._replace(log_start=start), version=version),
            length=3,
            without=NO_SESSION,
        )
        for version in range(3, 13)
        for start in [0 if version >= 5 else None]
    ),
    row(
        "log-append-time",
        "required",
        *(send(batch(Record(b"%d" % at, at, timestamp_ms=1)), appended(at)) for at in range(4)),
        send(batch(b"x", expected=2), mismatch(2, 4)),
        settings=Settings(log_append_time=True),
    ),
]
