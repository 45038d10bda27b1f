"""87 HEADER_UNREADABLE: a Fencepost header is unreadable or repeated; the message names it."""

from collections.abc import Sequence

from tests.contract.rows import INVALID_RECORD, NO_SESSION, Reply, batch, row, send
from tests.support.raw import Record

_OFFSET, _COUNT, _WRITE_ID = "fencepost-expected-offset", "fencepost-partition-count", "fencepost-write-id"
_NOT_A_NUMBER = "is not an ASCII decimal number of at most 19 digits, nor {form}[@CLUSTER_ID]"
_TWICE = "duplicate header in one record"
_FORMS: list[tuple[str, bytes | None, str]] = [
    ("empty", b"", f"'' {_NOT_A_NUMBER}"),
    ("null", None, "value is null"),
    ("letters", b"abc", f"'abc' {_NOT_A_NUMBER}"),
    ("plus", b"+3", f"'+3' {_NOT_A_NUMBER}"),
    ("space-before", b" 3", f"' 3' {_NOT_A_NUMBER}"),
    ("space-after", b"3 ", f"'3 ' {_NOT_A_NUMBER}"),
    ("fraction", b"3.0", f"'3.0' {_NOT_A_NUMBER}"),
    ("hexadecimal", b"0x3", f"'0x3' {_NOT_A_NUMBER}"),
    ("underscore", b"1_0", f"'1_0' {_NOT_A_NUMBER}"),
    ("negative-with-zero", b"-01", f"'-01' {_NOT_A_NUMBER}"),
    ("twenty-digits", b"0" * 20, f"'{'0' * 20}' {_NOT_A_NUMBER}"),
    ("binary", b"\0\0\0\x29", r"'\x00\x00\x00)' " + _NOT_A_NUMBER),
    ("long", b"secret" * 1000, f"'secretsecretsecretse'… {_NOT_A_NUMBER}"),
]
_BAD_PLACES = [
    "3@",
    "3@orders",
    "3@orders/",
    "3@orders/03",
    "3@orders/-1",
    "3@orders/3@",
    "3@orders/3 ",
    "3@or ders/3",
    "@orders/3",
    "-1@orders/3",
    "3@orders/3@a cluster",
    "12345678901234567890@orders/3",
]
_OFFSETS = [
    *_FORMS,
    ("below-minus-one", b"-2", f"'-2' {_NOT_A_NUMBER}"),
    ("other-digits", "\u0663".encode(), r"'\xd9\xa3' " + _NOT_A_NUMBER),
    *(
        (
            f"place-{number}",
            stated.encode(),
            f"'{stated[:20]}'{'…' * (len(stated) > 20)} {_NOT_A_NUMBER}",
        )
        for number, stated in enumerate(_BAD_PLACES)
    ),
    ("above-int64", b"9223372036854775808", "9223372036854775808 does not fit 64 bits"),
]
_COUNTS = [
    *_FORMS,
    ("zero", b"0", "0 is not a number of partitions"),
    ("minus-one", b"-1", f"'-1' {_NOT_A_NUMBER}"),
    ("place-with-partition", b"6@orders/3", f"'6@orders/3' {_NOT_A_NUMBER}"),
    ("unfinished-place", b"6@", f"'6@' {_NOT_A_NUMBER}"),
    ("unfinished-cluster", b"6@orders@", f"'6@orders@' {_NOT_A_NUMBER}"),
    ("zero-of-this-topic", b"0@{topic}", "0 is not a number of partitions"),
    ("above-int32", b"2147483648", "2147483648 is not a number of partitions"),
]


def _unreadable(header: str, reason: str, record: int = 0) -> Reply:
    reason = reason.replace("{form}", "COUNT@TOPIC" if header == _COUNT else "OFFSET@TOPIC/PARTITION")
    return Reply(INVALID_RECORD, -1, f"HEADER_UNREADABLE {{where}} record={record} header={header}: {reason}")


def _twice(header: str, value: bytes) -> Sequence[tuple[str, bytes]]:
    return ((header, value), ("other", b""), (header, value))


ROWS = [
    *(
        row(
            f"expected-offset/{name}/{topic}",
            topic,
            send(batch(b"first", Record(b"second", headers=((_OFFSET, stated),))), _unreadable(_OFFSET, reason, 1)),
            length=3,
        )
        for name, stated, reason in _OFFSETS
        for topic in ("required", "checked")
    ),
    *(
        row(
            f"repeated/{header}",
            topic,
            send(batch(b"first", Record(b"second", headers=_twice(header, b"6"))), _unreadable(header, _TWICE, 1)),
            partitions=6,
            without=NO_SESSION if topic == "counted" else {},
        )
        for header, topic in ((_OFFSET, "required"), (_WRITE_ID, "checked"), (_COUNT, "counted"))
    ),
    *(
        row(
            f"write-id/{why}",
            "checked",
            send(batch(Record(b"x", headers=((_WRITE_ID, value),))), _unreadable(_WRITE_ID, f"value is {why}")),
        )
        for why, value in (("empty", b""), ("null", None))
    ),
    *(
        row(
            f"base-offset-below-minus-one/{topic}",
            topic,
            send(batch(b"a", base_offset=-2), _unreadable("baseOffset", "-2 is not an offset (-1: no expectation)")),
        )
        for topic in ("base", "required")
    ),
    *(
        row(
            f"partition-count/{name}",
            "counted",
            send(batch(Record(b"x", headers=((_COUNT, stated),))), _unreadable(_COUNT, reason)),
            partitions=6,
            without=NO_SESSION,
        )
        for name, stated, reason in _COUNTS
    ),
    row(
        "partition-count/contradicts-an-earlier-record",
        "counted",
        send(
            batch(Record(b"a", headers=((_COUNT, b"6"),)), Record(b"b", headers=((_COUNT, b"8"),))),
            _unreadable(_COUNT, "8 contradicts 6 in an earlier record", 1),
        ),
        partitions=6,
        without=NO_SESSION,
    ),
]
