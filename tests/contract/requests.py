"""Requests with several partitions: each is answered separately, unless `refusal_scope = "request"`."""

from tests.contract.rows import (
    NO_SESSION,
    POLICY_VIOLATION,
    SECOND,
    Part,
    Reply,
    Send,
    appended,
    batch,
    mismatch,
    refused,
    row,
)

_X, _STALE = batch(b"x", expected=0), batch(b"x", expected=5)


def _whole(stale: int) -> Reply:
    cause = f"OFFSET_MISMATCH topic={{topic}} partition={stale} expected=5 actual=0"
    return Reply(POLICY_VIOLATION, -1, f"WHOLE_REQUEST_REFUSED {{where}}: {cause}")


WITHOUT = NO_SESSION
ROWS = [
    *(
        row(
            f"each-partition-is-answered-separately/{second}",
            "required",
            Send(
                (
                    Part(batch(b"c"), refused(POLICY_VIOLATION, "EXPECTATION_REQUIRED {where}"), 2),
                    Part(batch(b"d"), appended(0), SECOND),
                    Part(batch(b"a", expected=0), appended(0), 0),
                    Part(batch(b"b", expected=1), mismatch(1, 0), 1),
                )
            ),
            partitions=3,
            second=second,
        )
        for second in ("plain", "checked", "counted", "safe")
    ),
    *(
        row(
            f"a-partition-named-twice-closes-the-connection/{topic}",
            topic,
            Send((Part(batch(b"a", expected=0)), Part(batch(b"b", expected=1))), closes=True),
        )
        for topic in ("required", "counted", "safe")
    ),
    *(
        row(
            f"request-scope/partition-{order[0]}-is-stale-and-first",
            "required",
            Send(
                (
                    Part(_STALE, mismatch(5, 0), order[0]),
                    Part(_X, _whole(order[0]), order[1]),
                    Part(_X, _whole(order[0])._replace(log_start=-1), SECOND),
                )
            ),
            Send((Part(_X, appended(0), 0), Part(_X, appended(0), 1), Part(_X, appended(0), SECOND))),
            partitions=2,
            second="plain",
            scope="request",
        )
        for order in ((0, 1), (1, 0))
    ),
]
