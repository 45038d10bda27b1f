"""For tests of the recipes: a partition in memory with whole records, which several recipes of a test share."""

from __future__ import annotations

from typing import Any, cast

import pytest

from fencepost import LogRecord, Record
from fencepost._appending import Append
from tests.unit.test_client_log_writer import FakeLogWriter, Partition


class RecipePartition(Partition):
    """`records` – by offset, None for an offset without a record. `append_foreign` – a writer without a recipe."""

    @property
    def records(self) -> list[LogRecord | None]:
        return cast("list[LogRecord | None]", self.log)

    def committed(self, partition: int, offset: int) -> Any:
        return self.records[offset]

    def land(self, append: Append) -> bool:
        if append.expected != len(self.records):
            return False
        for index, record in enumerate(append.records):
            at = append.expected + index
            self.records.append(LogRecord(at, 0, record.key, record.value, tuple(append.headers(index))))
        return True

    def append_foreign(self, record: Record) -> int:
        self.records.append(LogRecord(len(self.records), 0, record.key, record.value, record.headers))
        return len(self.records) - 1

    def others_append(self) -> None:
        """Another proxy's transaction marker: it moves the end, and holds no record."""
        self.records.append(None)

    def known(self, append: Append) -> bool:
        at = append.expected
        found = self.records[at] if at < len(self.records) else None
        return found is not None and ("fencepost-write-id", append.write_id) in found.headers

    @property
    def values(self) -> list[bytes | None]:
        return [record.value for record in self.records if record is not None]

    def writer(self, problem: float = 0.0) -> FakeLogWriter:
        return FakeLogWriter(self, problem)


@pytest.fixture
def partition() -> RecipePartition:
    return RecipePartition.quiet()
