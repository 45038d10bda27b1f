"""Responses of which a few elements of one array change: the others are copied as bytes.

`SplicedResponse` gives the bytes that decoding and encoding the whole response would give, at a hundredth of the cost.
`TopicList` is one for the two responses that list topics, `ConfigList` for DescribeConfigs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from fencepost_proxy.errors import UpstreamProtocolError
from fencepost_proxy.wire import schema
from fencepost_proxy.wire.apis import api_name
from fencepost_proxy.wire.control import parse_response_header
from fencepost_proxy.wire.layouts import FIXED, element_ends
from fencepost_proxy.wire.primitives import INT16, INT32, MALFORMED, Malformed, read_uvarint, reason_of, write_uvarint
from fencepost_proxy.wire.schema import Message

_ERROR_CODE_BYTES: Final = 2


class SplicedResponse:
    """`before`, `after` – the decoded fields before and after the array. `encoded` includes changes of `before`.

    The elements of the array have indexes. Their fields are checked for their lengths only. Raises
    `UpstreamProtocolError` if the response is malformed.
    """

    def __init__(self, api_key: int, version: int, frame: bytes, array: str, *, has_header: bool = True) -> None:
        """`frame`: without its length."""
        self._message, self._version, self._array = f"{api_name(api_key)}Response", version, array
        self._what = f"malformed {self._message} v{version} of {len(frame)} bytes"
        self._data = frame
        self._head_end = parse_response_header(frame, api_key, version).body_offset if has_header else 0
        self._parts = schema.parts(self._message, version, array)
        self._new: dict[int, tuple[int, bytes]] = {}
        try:
            self.before, self._before_end = self._parts.before.read(frame, self._head_end)
            count, begin = self._read_count(self._before_end)
            ends = element_ends(frame, begin, count, self._parts.element.layout)
            self._bounds = [begin, *ends]
            self.after, end = self._parts.after.read(frame, self._bounds[-1])
        except MALFORMED as error:
            raise self._malformed(error) from error
        if end != len(frame):
            raise UpstreamProtocolError(f"{self._what}: {len(frame) - end} extra bytes at the end")

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def element(self, index: int) -> Message:
        begin, end = self._bounds[index : index + 2]
        try:
            element, read_end = self._parts.element.read(self._data, begin)
        except MALFORMED as error:
            raise self._malformed(error) from error
        assert read_end == end, f"{self._what}: element {index} ends at {read_end}, not at {end}"
        assert isinstance(element, Message)
        return element

    def encoded_element(self, index: int) -> bytes:
        return self._data[self._bounds[index] : self._bounds[index + 1]]

    def containing(self, marks: Iterable[bytes]) -> list[int]:
        """Indexes of the elements that contain one of these sequences of bytes."""
        found = set()
        for mark in marks:
            at = self._data.find(mark, self._bounds[0])
            while 0 <= at < self._bounds[-1]:
                index = bisect_right(self._bounds, at) - 1
                found.add(index)
                at = self._data.find(mark, self._bounds[index + 1])
        return sorted(found)

    def replace(self, index: int, elements: Sequence[Message]) -> None:
        """One element by any number of others; with the index after the last one, add them."""
        out = bytearray()
        for element in elements:
            self._parts.element.write(out, element)
        self._new[index] = len(elements), bytes(out)

    def encoded(self, *, changed_before: bool) -> bytes:
        """The frame with its length. `changed_before`: something in `before` was changed."""
        data, bounds = memoryview(self._data), self._bounds
        out = bytearray(INT32.size) + data[: self._head_end]
        if changed_before:
            self._parts.before.write(out, self.before)
        else:
            out += data[self._head_end : self._before_end]
        replaced = sum(index < len(self) for index in self._new)
        self._write_count(out, len(self) - replaced + sum(count for count, _ in self._new.values()))
        copied_to = bounds[0]
        for index, (_, encoded) in sorted(self._new.items()):
            out += data[copied_to : bounds[index]]
            out += encoded
            copied_to = bounds[min(index + 1, len(self))]
        out += data[copied_to:]
        INT32.pack_into(out, 0, len(out) - INT32.size)
        return bytes(out)

    def _read_count(self, at: int) -> tuple[int, int]:
        if self._parts.compact:
            count, at = read_uvarint(self._data, at)
            count -= 1
        else:
            (count,) = INT32.unpack_from(self._data, at)
            at += INT32.size
        if count < 0:
            raise Malformed(f"a count of {count}")
        return count, at

    def _write_count(self, out: bytearray, count: int) -> None:
        if self._parts.compact:
            write_uvarint(out, count + 1)
        else:
            out += INT32.pack(count)

    def _malformed(self, error: Exception) -> UpstreamProtocolError:
        return UpstreamProtocolError(f"{self._what}: {reason_of(error)}")


class TopicList(SplicedResponse):
    """Metadata and DescribeTopicPartitions. A topic: error code, name, fields of fixed length, partitions, others."""

    def __init__(self, api_key: int, version: int, frame: bytes, *, has_header: bool = True) -> None:
        super().__init__(api_key, version, frame, "Topics", has_header=has_header)

    def partition_counts(self, names: Collection[bytes] | None) -> list[tuple[str, int]]:
        """Name and number of partitions of the topics of these names, None for all, that have no error."""
        step, size = self._parts.element.layout[2]
        partitions_after = size if step == FIXED else 0
        counts = []
        for begin in self._bounds[:-1]:
            name, at = self._name(begin + _ERROR_CODE_BYTES)
            if name and (names is None or name in names) and not any(self._data[begin : begin + _ERROR_CODE_BYTES]):
                counts.append((name.decode(errors="replace"), self._read_count(at + partitions_after)[0]))
        return counts

    def _name(self, at: int) -> tuple[bytes, int]:
        """Of a topic, and where it ends; empty for null."""
        if self._parts.compact:
            length, at = read_uvarint(self._data, at)
            length -= 1
        else:
            (length,) = INT16.unpack_from(self._data, at)
            at += INT16.size
        end = at + max(length, 0)
        return self._data[at:end], end


class ConfigList(SplicedResponse):
    """DescribeConfigs: configs are added to resources, and resources to the list."""

    def __init__(self, api_key: int, version: int, frame: bytes) -> None:
        super().__init__(api_key, version, frame, "Results")
        self._inner = schema.parts(self._message, version, self._array, "Configs")
        self._configs_at: list[int] = []

    def results(self) -> list[Message]:
        """The resources without their configs."""
        results = []
        try:
            for begin in self._bounds[:-1]:
                result, at = self._inner.before.read(self._data, begin)
                result.configs = []
                results.append(result)
                self._configs_at.append(at)
        except MALFORMED as error:
            raise self._malformed(error) from error
        return results

    def encoded_with(self, results: Sequence[Message]) -> bytes:
        """`results` – as from `results`, with configs to add, and more resources."""
        for index, result in enumerate(results[: len(self)]):
            if result.configs:
                self._new[index] = 1, self._with_configs(index, result.configs)
        self.replace(len(self), results[len(self) :])
        return self.encoded(changed_before=False)

    def _with_configs(self, index: int, configs: Sequence[Message]) -> bytes:
        begin, end = self._bounds[index : index + 2]
        count, at = self._read_count(self._configs_at[index])
        configs_end = element_ends(self._data, at, count, self._inner.element.layout)[-1] if count else at
        out = bytearray(self._data[begin : self._configs_at[index]])
        self._write_count(out, count + len(configs))
        out += self._data[at:configs_end]
        for config in configs:
            self._inner.element.write(out, config)
        return bytes(out + self._data[configs_end:end])
