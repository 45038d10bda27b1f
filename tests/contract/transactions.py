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
#: The proxy may have to read twice that the transaction has ended.
_LONG_MS = 30_000
_LATER = refused(NOT_LEADER, "TRY_AGAIN ")

WITHOUT = NO_SESSION
ROWS = [
    *(
        row(
            f"expected-offset-in-a-transaction/{topic}/{end}",
            topic,
            send(batch(b"proves permission", expected=1), appended(1), via="second"),
            Begin("p"),
            send(batch(b"t0", expected=2, **_IN_TRANSACTION), appended(2), transactional_id="p"),
            # A commit would be refused after it.
            *([] if commit else [send(_REFUSED, mismatch(9, 3), transactional_id="p")]),
            send(batch(b"t1", sequence=1, **_IN_TRANSACTION), appended(3), transactional_id="p"),
            send(batch(b"mine", expected=4), _LATER, via="second", timeout_ms=1500),
            End("p", marker_at=4, commit=commit),
            send(batch(b"mine", expected=4), mismatch(4, 5), via="second", timeout_ms=_LONG_MS),
            send(batch(b"mine", expected=5), appended(5), via="second", timeout_ms=_LONG_MS),
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
