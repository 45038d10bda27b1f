"""Rows on raw connections: what the modelled and the real level share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.contract.rows import Level, Part, Row, Send, appended, filling, send
from tests.support import raw

_COUNT_TAG, _LEVEL_TAG = 253, 254
_LATE_MS = 60_000


class WireLevel(Level):
    def __init__(self, row: Row, topic: str, connect: Callable[[str], raw.Connection]) -> None:
        super().__init__(row, topic)
        self._connect = connect
        self._connections: dict[str, raw.Connection] = {}

    def connection(self, via: str) -> raw.Connection:
        if via not in self._connections:
            self._connections[via] = self._connect(via)
        return self._connections[via]

    def close(self) -> None:
        for each in self._connections.values():
            each.close()

    def transactional_id(self, producer: str | None) -> str | None:
        return None if producer is None else f"{self.topic}-{producer}"

    def fill(self) -> None:
        """Append the records that the log has beforehand."""
        if self.row.length:
            self.send((send(filling(self.row), appended(0)),))

    def send(self, sends: tuple[Send, ...]) -> None:
        connection = self.connection(sends[0].via)
        frames = [self._frame(connection, each) for each in sends]
        connection.socket.sendall(b"".join(data for _, data in frames))
        for each, (sent, _) in zip(sends, frames, strict=True):
            if each.closes:
                closed = connection.is_closed()
                assert closed, f"row {self.row.name}: the connection stays open after {each}"
                self._connections.pop(each.via).close()
            elif each.acks:
                correlation_id, answers = connection.receive_produce(each.version)
                assert correlation_id == sent
                assert len(answers) == len(each.parts)
                for part in each.parts:
                    self._check(each, part, answers[self.place(part.partition)])

    def _check(self, request: Send, part: Part, answer: raw.Answer) -> None:
        assert answer.record_errors == ()
        if self.row.settings.log_append_time and answer.error_code == 0:
            assert abs(answer.log_append_time_ms - self.now_ms()) < _LATE_MS
        if request.version < 8 and part.reply is not None:  # older versions have no message
            part = part._replace(reply=part.reply._replace(message=None))
        self.check(part, (answer.error_code, answer.base_offset, answer.message, answer.log_start_offset))

    def _frame(self, connection: raw.Connection, request: Send) -> tuple[int, bytes]:
        made = raw.produce_request(
            {}, request.acks, request.timeout_ms, self.transactional_id(request.transactional_id)
        )
        topics: dict[str, Any] = {}
        for part in request.parts:  # a partition may be named twice
            topic, partition = self.place(part.partition)
            (one,) = raw.produce_request({topic: {partition: self.bytes_of(part.batch)}}).topic_data
            topics.setdefault(topic, one)
            if topics[topic] is not one:
                topics[topic].partition_data += one.partition_data
        made.topic_data = list(topics.values())
        sent, frame = connection.frame(made, request.version)
        if request.level is not None:
            at = 4 + 8 + 2 + len(connection.client_id)
            frame = frame[:at] + _tag(_LEVEL_TAG, request.level) + frame[at + 1 :]
        if request.count is not None:
            frame = frame[:-2] + _tag(_COUNT_TAG, request.count) + frame[-1:]
        return sent, (len(frame) - 4).to_bytes(4, "big") + frame[4:]


def _tag(number: int, content: bytes) -> bytes:
    return bytes([1, number & 0x7F | 0x80, number >> 7, len(content)]) + content
