"""Bound statements count only for their partition: elsewhere, their headers were copied."""

from tests.contract.rows import NO_SESSION, POLICY_VIOLATION, Reply, appended, batch, mismatch, refused, row, send
from tests.support.raw import Record

_OFFSET, _WRITE_ID = "fencepost-expected-offset", "fencepost-write-id"


def _not_stated(of: str) -> Reply:
    return refused(
        POLICY_VIOLATION,
        "EXPECTATION_REQUIRED {where}: this topic has fencepost.check.expected.offsets=required, so the first record "
        "of every batch must carry its expected offset (its Fencepost headers are copied headers: they were made for "
        f"{of} and do not count here;",
    )


_ELSEWHERE = {
    "topic": (b"3@elsewhere/0", "elsewhere/0"),
    "longer-name": (b"3@{topic}s/0", "{topic}s/0"),
    "partition": (b"3@{topic}/1", "{topic}/1"),
    "topic-and-cluster": (b"3@elsewhere/0@Mk3OEYBSD34fcwNTJENDM2Qx", "elsewhere/0 of cluster Mk3OEYBSD34fcwNTJENDM2Qx"),
}

ROWS = [
    *(
        row(
            f"{name}/required",
            "required",
            send(batch(Record(b"a", stated)), _not_stated(of)),
            send(batch(Record(b"b", 3)), appended(3)),
            length=3,
        )
        for name, (stated, of) in _ELSEWHERE.items()
    ),
    *(
        row(
            f"{name}/true",
            "checked",
            send(batch(Record(b"a", stated)), appended(3)),
            send(batch(Record(b"a", stated)), appended(4)),
            length=3,
        )
        for name, (stated, _) in _ELSEWHERE.items()
    ),
    row(
        "made-for-this-partition",
        "required",
        send(batch(Record(b"a", b"3@{topic}/0")), appended(3)),
        send(batch(Record(b"b", b"3@{topic}/0")), mismatch(3, 4)),
        send(batch(*(Record(b"%d" % at, b"%d@{topic}/0" % at) for at in range(4, 12))), appended(4)),
        send(batch(Record(b"c", b"012@{topic}/0")), appended(12)),
        length=3,
    ),
    row(
        "every-record-states-it",
        "required",
        send(batch(Record(b"a", b"3@{topic}/0"), Record(b"b", b"4@{topic}/0"), Record(b"c", 5)), appended(3)),
        send(
            batch(Record(b"a", b"6@{topic}/0"), Record(b"b", b"7@{topic}/0"), Record(b"c", b"9@{topic}/0")),
            Reply(POLICY_VIOLATION, 6, "OFFSET_MISMATCH {where} expected=9 actual=8 record=2"),
        ),
        length=3,
    ),
    row(
        "copies-among-own-records",
        "required",
        send(batch(Record(b"copy", b"77@elsewhere/0"), Record(b"own", b"4@{topic}/0")), appended(3)),
        length=3,
    ),
    row(
        "own-header-added-to-a-copied-one",
        "required",
        send(batch(Record(b"a", b"77@elsewhere/0", headers=((_OFFSET, b"3@{topic}/0"),))), appended(3)),
        length=3,
    ),
    row(
        "write-id-of-a-copy",
        "checked",
        send(batch(Record(b"a", b"0@elsewhere/0", headers=((_WRITE_ID, b"w"),))), appended(0)),
        send(batch(Record(b"a", b"0@{topic}/0", headers=((_WRITE_ID, b"w"),))), mismatch(0, 1)),
    ),
    row(
        "partition-count",
        "count-required",
        send(batch(b"a", count=b"6@{topic}"), appended(0)),
        send(
            batch(b"a", count=b"8@elsewhere"),
            refused(
                POLICY_VIOLATION, "PARTITION_COUNT_REQUIRED {where} actual=6: this topic has fencepost.check.partit"
            ),
        ),
        send(batch(b"a", count=b"8@{topic}"), Reply(37, -1, "INVALID_PARTITION_COUNT {where} expected=8 actual=6")),
        partitions=6,
        without=NO_SESSION,
    ),
    row(
        "partition-count-elsewhere",
        "counted",
        send(batch(b"a", count=b"8@elsewhere"), appended(0)),
        partitions=6,
        without=NO_SESSION,
    ),
]
