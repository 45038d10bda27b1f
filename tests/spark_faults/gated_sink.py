"""Our sink with points (gates.py): a subclass calls each step between two of them, in Spark's processes.

look, probed            in the driver: the writer is pickled for the tasks, and reads the topic
append, appended        in a task: one append is sent and answered
written                 in a task: the write is complete, but Spark does not know it yet
commit, committed       in the driver
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from fencepost.spark.datasource import FencepostDataSource
from fencepost.spark.errors import Unknown
from fencepost.spark.log import Log
from tests.spark_faults import gates
from tests.spark_faults.gates import point
from tests.spark_faults.query import batch_of


class GatedSink(FencepostDataSource):  # type: ignore[misc]
    def streamWriter(self, schema: Any, overwrite: bool) -> GatedWriter:
        return GatedWriter(super().streamWriter(schema, overwrite))

    def writer(self, schema: Any, overwrite: bool) -> GatedLoad:
        return GatedLoad(super().writer(schema, overwrite))


class _Gated:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __reduce__(self) -> Any:
        return type(self), (_ReadBack(self._inner),)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        from pyspark import TaskContext  # noqa: PLC0415

        context = TaskContext.get()
        assert context is not None
        batch, task = batch_of(context), context.partitionId()
        unchanged = Log.append
        Log.append = _gated_append(unchanged, batch, task)  # type: ignore[method-assign]
        try:
            message = self._inner.write(iterator)
        finally:
            Log.append = unchanged  # type: ignore[method-assign]
        gates.passing(point("written", batch, task))
        return message

    def _commit(self, batch: int, *what: Any) -> None:
        gates.passing(point("commit", batch))
        self._inner.commit(*what)
        gates.passing(point("committed", batch))

    def abort(self, *what: Any) -> None:
        self._inner.abort(*what)


class GatedWriter(_Gated, DataSourceStreamArrowWriter):  # type: ignore[misc]
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        self._commit(batchId, messages, batchId)


class GatedLoad(_Gated, DataSourceArrowWriter):  # type: ignore[misc]
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._commit(0, messages)


class _ReadBack:
    """Pickled between two points."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __reduce__(self) -> Any:
        from pyspark import cloudpickle  # noqa: PLC0415

        gates.passing("look")
        pickled = cloudpickle.dumps(self._inner)
        gates.passing("probed")
        return cloudpickle.loads, (pickled,)


def _gated_append(unchanged: Any, batch: str, task: int) -> Any:
    def append(log: Log, *what: Any) -> Future[Any]:
        gates.passing(point("append", batch, task))
        answer: Future[Any] = unchanged(log, *what)
        if gates.armed(name := point("unread", batch, task)):
            answer.result()
            gates.passing(name)
            answer = Future()
            answer.set_exception(Unknown("the answer is lost"))
        if gates.armed(after := point("appended", batch, task)):
            answer.result()
            gates.passing(after)
        return answer

    return append
