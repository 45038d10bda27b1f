"""The memory that all connections of a process share (`limits.buffered_bytes_max`)."""

from __future__ import annotations


class MemoryBudget:
    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._free_bytes = bytes_max

    def reserve(self, byte_count: int) -> bool:
        if byte_count > self._free_bytes:
            return False
        self._free_bytes -= byte_count
        return True

    def release(self, byte_count: int) -> None:
        self._free_bytes += byte_count

    @property
    def reserved_bytes(self) -> int:
        return self._bytes_max - self._free_bytes

    def resize(self, bytes_max: int) -> None:
        """If more is reserved than that, reservations fail until enough is released."""
        self._free_bytes += bytes_max - self._bytes_max
        self._bytes_max = bytes_max
