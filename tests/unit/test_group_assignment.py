"""The assignment bytes of a group's leader: reduced, and otherwise unchanged to the byte."""

from __future__ import annotations

import struct

import pytest

from fencepost_proxy.expansion.assignment import MalformedAssignment, decode_assignment

_TOPIC = b"\x00\x06orders"


def _assignment(*partitions: int, version: int = 0, rest: bytes = b"\x00\x00\x00\x00") -> bytes:
    numbers = struct.pack(f">i{len(partitions)}i", len(partitions), *partitions)
    return struct.pack(">hi", version, 1) + _TOPIC + numbers + rest


def _user_data(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


@pytest.mark.parametrize("version", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(
    "rest",
    [b"", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", _user_data(b"tasks"), _user_data(b"x") + b"of a newer version"],
)
def test_ungated_assignment_stays_byte_identical(version: int, rest: bytes) -> None:
    data = _assignment(0, 1, 2, version=version, rest=rest)
    assert decode_assignment(data).keeping(lambda topic, partition: True).encode() == data
    cut = decode_assignment(data).keeping(lambda topic, partition: (topic, partition) != ("orders", 2))
    assert cut.encode() == _assignment(0, 1, version=version, rest=rest)


def test_topic_without_remaining_partitions_is_removed() -> None:
    cut = decode_assignment(_assignment(2)).keeping(lambda topic, partition: False)
    assert cut.topics == ()
    assert cut.encode() == struct.pack(">hi", 0, 0) + b"\x00\x00\x00\x00"


@pytest.mark.parametrize(
    ("rest", "tasks"),
    [
        (b"", False),
        (b"\x00\x00\x00\x00", False),  # librdkafka, kafka-python, aiokafka
        (b"\xff\xff\xff\xff", False),  # Java
        # What librdkafka's sticky assignor copies there: topics with partitions, and the generation.
        (_user_data(struct.pack(">i", 1) + _TOPIC + struct.pack(">ii", 1, 0) + struct.pack(">i", 7)), False),
        (_user_data(struct.pack(">i", 1) + _TOPIC + struct.pack(">ii", 1, 0)), False),
        (_user_data(struct.pack(">ii", 0, -1)), False),
        # Streams: version, the newest version it knows, then tasks.
        (_user_data(struct.pack(">iii", 11, 11, 4) + bytes(76)), True),
        (_user_data(b"whatever"), True),
    ],
)
def test_task_data_is_distinguished_from_ordinary_user_data(rest: bytes, tasks: bool) -> None:
    assert decode_assignment(_assignment(0, rest=rest)).has_task_data is tasks


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        struct.pack(">hi", 0, -1),
        struct.pack(">hi", 0, 2**31 - 1),
        struct.pack(">hi", 0, 1) + b"\x00\x09orders",
        _assignment(0, 1)[:-9],
        struct.pack(">hi", 0, 1) + b"\x00\x02\xff\xff" + bytes(4),
    ],
)
def test_malformed_assignment_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedAssignment):
        decode_assignment(data)
