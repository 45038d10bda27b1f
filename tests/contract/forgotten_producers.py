"""PRODUCER_FORGOTTEN: Kafka answers 45, but all records of the producer were deleted."""

from tests.contract.rows import (
    NO_SESSION,
    OUT_OF_ORDER,
    UNKNOWN_PRODUCER_ID,
    DeleteRecords,
    Reply,
    appended,
    batch,
    refused,
    row,
    send,
)

_GAP = send(batch(b"gap", producer="p", sequence=9), refused(UNKNOWN_PRODUCER_ID, "PRODUCER_FORGOTTEN {where}", 3))

WITHOUT = NO_SESSION
ROWS = [
    row(
        "once-per-batch",
        "checked",
        *(send(batch(b"v", producer="p", sequence=i), appended(i)) for i in range(3)),
        DeleteRecords(before=3),
        _GAP,
        send(batch(b"gap", producer="p", sequence=9), Reply(OUT_OF_ORDER, log_start=3)),
    ),
    row(
        "not-while-a-record-remains",
        "checked",
        *(send(batch(b"v", producer="p", sequence=i), appended(i)) for i in range(3)),
        DeleteRecords(before=2),
        send(batch(b"gap", producer="p", sequence=9), Reply(OUT_OF_ORDER, log_start=2)),
    ),
]
