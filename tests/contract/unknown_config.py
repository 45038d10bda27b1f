"""6 TRY_AGAIN: a newer version set a topic config that must be understood, and this one does not know it."""

from tests.contract.rows import (
    NO_SESSION,
    NOT_LEADER,
    REAL,
    SECOND,
    Part,
    Pipelined,
    Send,
    appended,
    batch,
    refused,
    row,
    send,
)

WITHOUT = {
    **NO_SESSION,
    REAL: "no client can set a config that its proxy does not know (tests/integration/test_rolling_upgrade)",
}
_UNKNOWN = refused(
    NOT_LEADER, "TRY_AGAIN {where}: this proxy does not know the topic config fencepost.future, which", -1
)

ROWS = [
    *(
        row(f"{topic}/codec-{codec}", topic, send(batch(b"x", b"y", codec=codec, **more), _UNKNOWN))
        for topic, more in (
            ("newer", {}),
            ("newer-and-required", {"expected": 0}),
            ("newer-and-counted", {"count": 1}),
        )
        for codec in (0, 1)
    ),
    row(
        "only-its-own-topic",
        "newer",
        Send((Part(batch(b"x"), _UNKNOWN), Part(batch(b"y"), _UNKNOWN, 1), Part(batch(b"z"), appended(0), SECOND))),
        partitions=2,
        second="plain",
    ),
    row(
        "later-batches-of-the-pipeline",
        "newer-and-required",
        Pipelined((send(batch(b"x", expected=0), _UNKNOWN), send(batch(b"y", expected=1), _UNKNOWN))),
    ),
    row("acks-0-closes-the-connection", "newer", send(batch(b"x"), acks=0, closes=True)),
    row("one-that-may-be-ignored", "newer-and-ignored", send(batch(b"x"), appended(0))),
]
