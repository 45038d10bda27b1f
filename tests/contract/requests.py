"""Requests with several partitions: each is answered separately, unless `refusal_scope = "request"`."""

from tests.contract.rows import (
    NO_SESSION,
    POLICY_VIOLATION,
    Part,
    Send,
    appended,
    batch,
    mismatch,
    refused,
    row,
)

_X = batch(b"x", expected=0)
_STALE = batch(b"x", expected=5)

ROWS = [
    row(
        "each-partition-is-answered-separately",
        "required",
        Send(
            (
                Part(batch(b"c"), refused(POLICY_VIOLATION, "EXPECTATION_REQUIRED {where}"), 2),
                Part(batch(b"a", expected=0), appended(0), 0),
                Part(batch(b"b", expected=1), mismatch(1, 0), 1),
            )
        ),
        partitions=3,
        added={0: (b"a",)},
        without=NO_SESSION,
    ),
    row(
        "a-partition-named-twice-closes-the-connection",
        "required",
        Send((Part(batch(b"a", expected=0)), Part(batch(b"b", expected=1))), closes=True),
        without=NO_SESSION,
    ),
    *(
        row(
            f"request-scope/partition-{bad}-is-stale",
            "required",
            Send(
                tuple(
                    Part(
                        _STALE if each == bad else _X,
                        mismatch(5, 0) if each == bad else refused(POLICY_VIOLATION, ""),
                        each,
                    )
                    for each in order
                )
            ),
            Send((Part(_X, appended(0), 0), Part(_X, appended(0), 1))),
            partitions=2,
            scope="request",
            added={0: (b"x",), 1: (b"x",)},
            without=NO_SESSION,
        )
        for bad, order in ((0, (0, 1)), (1, (0, 1)), (0, (1, 0)))
        if order == (0, 1)
    ),
]
