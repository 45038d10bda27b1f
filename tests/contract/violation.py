"""44 OFFSET_VIOLATION: the batch was appended, at another offset, because a writer bypassed the proxy."""

from tests.contract.rows import POLICY_VIOLATION, Bypass, Reply, appended, batch, mismatch, row, send

_RETRIED = {
    "named": batch(b"mine", expected=3, write_id=b"it"),
    "with-producer-id": batch(b"mine", expected=3, producer="p"),
}
_VIOLATION = Reply(POLICY_VIOLATION, 4, "OFFSET_VIOLATION {where} expected=3 appended_at=4 producer_id=-1…")

ROWS = [
    row(
        f"bypassing-append/{topic}/{named}",
        topic,
        send(batch(b"a", expected=2), appended(2)),
        Bypass(batch(b"bypass"), at=3),
        send(mine, _VIOLATION),
        send(mine, _VIOLATION, via="second"),
        send(batch(b"x", expected=4), mismatch(4, 5)),
        send(batch(b"b", expected=5), appended(5)),
        # Noticed before the next append, it is an ordinary mismatch.
        Bypass(batch(b"bypass"), at=6),
        send(batch(b"x", expected=1), mismatch(1, 7)),
        send(batch(b"y", expected=6), mismatch(6, 7)),
        send(batch(b"z", expected=7), appended(7)),
        length=2,
    )
    for topic in ("required", "checked")
    for named, mine in _RETRIED.items()
] + [
    row(
        "unconditional-append-after-a-bypassing-one",
        "checked",
        send(batch(b"a", expected=2), appended(2)),
        Bypass(batch(b"bypass"), at=3),
        send(batch(b"anywhere"), appended(4)),
        send(batch(b"b", expected=5), appended(5)),
        length=2,
    )
]
