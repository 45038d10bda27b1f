"""Appends in transactions, and alongside open ones: OK, TRANSACTIONS_NOT_SUPPORTED, TRY_AGAIN."""

from tests.contract.rows import (
    NO_SESSION,
    NOT_LEADER,
    POLICY_VIOLATION,
    Begin,
    End,
    appended,
    batch,
    mismatch,
    refused,
    row,
    send,
)

_IN_TRANSACTION = {"producer": "p", "transactional": True}
_REFUSED = batch(b"bad", expected=9, sequence=1, **_IN_TRANSACTION)
_LATER = refused(NOT_LEADER, "TRY_AGAIN ")

WITHOUT = NO_SESSION
ROWS = [
    *(
        row(
            f"expected-offset-in-a-transaction/{topic}/{end}",
            topic,
            Begin("p"),
            send(batch(b"t0", expected=1, **_IN_TRANSACTION), appended(1), transactional_id="p"),
            # A commit would be refused after it.
            *([] if commit else [send(_REFUSED, mismatch(9, 2), transactional_id="p")]),
            send(batch(b"t1", sequence=1, **_IN_TRANSACTION), appended(2), transactional_id="p"),
            send(batch(b"mine", expected=3), _LATER, via="second", timeout_ms=1500),
            End("p", marker_at=3, commit=commit),
            send(batch(b"mine", expected=3), mismatch(3, 4), via="second"),
            send(batch(b"mine", expected=4), appended(4), via="second"),
            length=1,
        )
        for topic in ("checked", "checked-and-safe")
        for end, commit in (("commit", True), ("abort", False))
    ),
    row(
        "refused-in-a-transaction",
        "required",
        send(
            batch(b"x", expected=1, **_IN_TRANSACTION),
            refused(POLICY_VIOLATION, "TRANSACTIONS_NOT_SUPPORTED {where}"),
            transactional_id="p",
        ),
        send(batch(b"y", expected=1), appended(1)),
        length=1,
    ),
]
