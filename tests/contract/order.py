"""The order of checks: of a batch with several faults, the first one decides. Each step repairs it."""

from tests.contract.rows import (
    CLUSTER_AUTHORIZATION_FAILED,
    CORRUPT_MESSAGE,
    INVALID_PARTITIONS,
    INVALID_RECORD,
    INVALID_TIMESTAMP,
    INVENTED,
    NO_SESSION,
    POLICY_VIOLATION,
    SHARED,
    Batch,
    Reply,
    appended,
    batch,
    mismatch,
    refused,
    row,
    send,
)
from tests.support.raw import Record

WITHOUT = NO_SESSION
_COUNT = "fencepost-partition-count"
_UNSTATED = refused(POLICY_VIOLATION, "EXPECTATION_REQUIRED {where}")
_TWO_DAYS_MS = 2 * 86_400_000


def _faulty(
    expected: bytes | None,
    count: bytes | None,
    *,
    old: bool = False,
    spoiled: bool = False,
    producer: str | int | None = "p",
) -> Batch:
    headers = () if count is None else ((_COUNT, count),)
    record = Record(b"payload", expected, headers, timestamp_ms=1_000 if old else None)
    return batch(record, producer=producer, spoil=_damage if spoiled else None)


def _damage(good: bytes) -> bytes:
    return good.replace(b"payload", b"paylobd")


ROWS = [
    row(
        "all-checks",
        "all-checks",
        *(
            send(sent, reply, via=f"connection {number}")  # 37 closes it
            for number, (sent, reply) in enumerate(
                (
                    (
                        _faulty(b"x", b"3", old=True, spoiled=True, producer=None),
                        refused(POLICY_VIOLATION, "IDEMPOTENCE_REQUIRED {where}"),
                    ),
                    (
                        _faulty(b"x", b"3", old=True, spoiled=True, producer=7),
                        refused(CORRUPT_MESSAGE, "CORRUPT {where}"),
                    ),
                    (_faulty(b"x", b"3", old=True), refused(INVALID_TIMESTAMP, "RECORD_TOO_OLD {where}")),
                    (_faulty(b"x", b"3"), refused(INVALID_RECORD, "HEADER_UNREADABLE {where}")),
                    (_faulty(None, None), refused(POLICY_VIOLATION, "PARTITION_COUNT_REQUIRED {where}")),
                    (
                        _faulty(None, b"3"),
                        Reply(INVALID_PARTITIONS, -1, "INVALID_PARTITION_COUNT {where} expected=3 actual=6"),
                    ),
                    (_faulty(None, b"6"), _UNSTATED),
                    (_faulty(b"7", b"6"), mismatch(7, 1)),
                    (_faulty(b"1", b"6"), appended(1)),
                    (_faulty(b"1", b"6"), appended(1)),  # a retry is recognized before the comparison
                )
            )
        ),
        length=1,
        partitions=6,
    ),
    *(
        row(
            f"producer-id-before-expectation/{name}",
            "required",
            send(batch(b"a", expected=1), appended(1)),
            send(batch(b"x", producer=producer, sequence=2), reply),
            length=1,
        )
        for name, producer, reply in (
            ("shared", SHARED, refused(POLICY_VIOLATION, "PRODUCER_ID_TAKEN {where}")),
            ("invented", INVENTED, refused(CLUSTER_AUTHORIZATION_FAILED, "IDEMPOTENCE_NOT_PERMITTED {where}", -1)),
        )
    ),
    row(
        "transaction-before-expectation",
        "required",
        send(
            batch(b"x", producer="p", transactional=True),
            refused(POLICY_VIOLATION, "TRANSACTIONS_NOT_SUPPORTED {where}"),
            transactional_id="p",
        ),
    ),
    row(
        "log-end-before-timestamps",
        "required",
        send(batch(b"x", expected=7, age_ms=_TWO_DAYS_MS), mismatch(7, 1)),
        send(batch(b"x", expected=1, age_ms=_TWO_DAYS_MS), refused(INVALID_TIMESTAMP, "TIMESTAMP_TOO_OLD {where}")),
        length=1,
    ),
]
