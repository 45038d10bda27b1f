"""The objects that Spark gets on the driver, without Spark: what they send to executors and do with results."""

from __future__ import annotations

import json
import pickle
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, StructType

import pyspark_fencepost
from fencepost._partitioning import murmur2
from fencepost.spark import datasource, register, stated
from fencepost.spark.arranging import COUNT_COLUMN, HASH_COLUMN, _java_hash
from fencepost.spark.datasource import FencepostDataSource, TaskDone, _BatchWriter, _StreamWriter
from fencepost.spark.driver_probe import DriverProbe
from fencepost.spark.errors import SinkError
from fencepost.spark.interfaces import TopicIdentity
from fencepost.spark.options import settings
from fencepost.spark.write import Outcome, Written

SCHEMA = StructType().add("value", "string").add(HASH_COLUMN, IntegerType()).add(COUNT_COLUMN, IntegerType())
REQUIRED = {"kafka.bootstrap.servers": "proxy:1", "topic": "t", "sink.id": "s"}


def writer(**more: str) -> _StreamWriter:
    made = _StreamWriter(settings({**REQUIRED, **{name.replace("_", "."): value for name, value in more.items()}}))
    made._probe = DriverProbe("run", 0, {"t": 2}, frozenset(), {})
    return made


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each query of the version takes the next one."""
    several: list[str] = []
    monkeypatch.setattr(datasource, "_version", lambda: several.pop(0))
    return several


@pytest.mark.parametrize("installed", [["1.0", "1.0"], ["1.0", ""], ["", "1.0"]])
def test_writer_is_pickled_with_the_probe_of_driver(versions: list[str], installed: list[str]) -> None:
    versions += installed
    sent = writer()
    arrived = pickle.loads(pickle.dumps(sent))
    assert (arrived._settings, arrived._probe) == (sent._settings, sent._probe)


def test_different_version_on_executor_is_refused(versions: list[str]) -> None:
    versions += ["1.0", "1.1"]
    with pytest.raises(SinkError, match=r"the driver has fencepost 1.0 and this executor has 1.1"):
        pickle.loads(pickle.dumps(writer()))


def done(task: int, *rows: int, begun: Any = ()) -> TaskDone:
    partitions = {("t", partition): Written(1, 0, -1, 1) for partition in rows}
    return TaskDone(Outcome(task, len(rows), 0, len(rows), 0, 0, partitions, begun=frozenset(begun)))


@pytest.fixture
def no_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    log = SimpleNamespace(connect=lambda: None, identify=lambda topic: TopicIdentity("id", {0: 0, 1: 0}))
    monkeypatch.setattr(datasource, "_log", lambda chosen: log)
    monkeypatch.setattr(datasource, "_facts_of", lambda *_: datasource._Facts(False, 1_000_000, -1, 0.0))


def test_rows_missing_from_all_tasks_are_refused() -> None:
    begun = [("t", 0), ("t", 1)]
    with pytest.raises(SinkError, match=r"t-1: the topic has rows of .* and the data now has none"):
        writer().commit([done(0, 0, begun=begun), done(1, begun=begun)], 3)
    writer().commit([done(0, 0, begun=begun), done(1, 1, begun=begun)], 3)


def test_commit_says_what_was_written_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    tasks = [
        TaskDone(Outcome(0, 5, 3, 2, 1, 1, {("t", 0): Written(2, 3, 7, 10)}, frozenset(), waited=1.26)),
        TaskDone(Outcome(1, 4, 4, 0, 1, 0, {("t", 1): Written(0, 4, 0, 4)}, frozenset(), waited=0.5)),
    ]
    writer().commit(tasks, 3)
    line = capfd.readouterr().err.removesuffix("\n")
    assert json.loads(line.removeprefix("fencepost.spark: ")) == {
        "sink_id": "s",
        "batch": 3,
        "topics": {"t": {"found": 2, "appended": 7}},
        "refused_appends": 1,
        "waited_seconds": 1.8,
    }


def test_older_spark_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql.datasource", ModuleType("as in Spark 3.5"))
    with pytest.raises(ImportError, match=r"fencepost\.spark needs Spark 4\.1 or later, and this is Spark 4"):
        runpy.run_path(str(Path(datasource.__file__)))


@pytest.mark.parametrize("streams", [False, True])
def test_rows_that_are_not_arranged_are_refused_by_the_driver(streams: bool) -> None:
    source = FencepostDataSource(REQUIRED)
    for more in ((), (HASH_COLUMN,), (COUNT_COLUMN,)):
        schema = StructType().add("value", "string")
        for name in more:
            schema = schema.add(name, IntegerType())
        with pytest.raises(SinkError, match=r"not arranged.*fencepost\.spark\.append\(df, …\).*\.stream\(df, …\)"):
            (source.streamWriter if streams else source.writer)(schema, overwrite=False)


def test_tasks_run_without_the_sink_are_not_committed() -> None:
    """trigger(continuous=…) throws the rows of Python sinks away, and has no messages of theirs."""
    with pytest.raises(SinkError, match=r"1 of 2 tasks ran without the sink.*continuous"):
        writer().commit([done(0, 0), None], 3)
    writer().commit([], 3)


def test_state_between_batches_is_that_of_a_topic_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasource, "_known", {})
    monkeypatch.setattr(datasource, "_facts", {})
    old, new = TopicIdentity("old", {0: 0}), TopicIdentity("new", {0: 0})
    known = datasource._known_of("s", {"t": old})
    assert datasource._known_of("s", {"t": old}) is known
    assert datasource._known_of("s", {"t": new}) is not known
    assert datasource._known_of("r", {"t": old}) is not known
    for number in range(datasource._KNOWN_MAX):
        datasource._known_of(f"{number}", {"t": old})
    assert len(datasource._known) == datasource._KNOWN_MAX

    checked: Any = SimpleNamespace(config=lambda topic: {"fencepost.check.expected.offsets": "true"})
    unchecked: Any = SimpleNamespace(config=lambda topic: {"fencepost.check.expected.offsets": "false"})
    datasource._facts_of(checked, "t", old)
    datasource._facts_of(unchecked, "t", old)  # from the cache
    with pytest.raises(SinkError, match="rows could be written twice"):
        datasource._facts_of(unchecked, "t", new)


@pytest.mark.usefixtures("no_kafka")
def test_load_into_a_topic_that_was_recreated_meanwhile_does_not_end() -> None:
    deferred: Any = SimpleNamespace(probed=DriverProbe("run", 0, {"t": 2}, frozenset(), {}, topic_ids={"t": "old"}))
    outcome = Outcome(0, 1, 0, 0, 0, 0, {}, frozenset(), deferred=deferred)
    with pytest.raises(SinkError, match="topic t was deleted and created again while load 's' was written"):
        _BatchWriter(settings(REQUIRED)).commit([TaskDone(outcome)])


@pytest.mark.parametrize("report", ["file/report.json", "directory"])
def test_unwritable_report_is_refused_before_the_first_row(tmp_path: Path, report: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    source = FencepostDataSource({**REQUIRED, "report": str(tmp_path / report)})
    with pytest.raises(SinkError, match=r"option report=.*the driver cannot write this file"):
        source.writer(SCHEMA, overwrite=False)


def test_a_report_s_directory_is_made(tmp_path: Path) -> None:
    source = FencepostDataSource({**REQUIRED, "report": str(tmp_path / "a" / "b" / "report.json")})
    source.writer(SCHEMA, overwrite=False)
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("name", ["value", "key", "partition"])
def test_column_that_occurs_twice_is_refused(name: str) -> None:
    schema = (
        StructType().add("value", "string").add("key", "string").add("partition", IntegerType()).add(name, "string")
    )
    with pytest.raises(SinkError, match=f"several columns are named '{name}'"):
        FencepostDataSource(REQUIRED).writer(schema, overwrite=False)


def test_complete_mode_is_refused_with_the_way_that_works() -> None:
    """Spark itself refuses the mode `update` for Python sinks."""
    schema = StructType().add("value", "string")
    with pytest.raises(SinkError, match=r"outputMode\('complete'\).*foreachBatch: docs/spark.md"):
        FencepostDataSource(REQUIRED).streamWriter(schema, overwrite=True)
    assert "foreachBatch(write)" in (Path(__file__).parents[3] / "docs" / "spark.md").read_text("utf-8")


def test_spark_finds_the_format_in_an_installed_package() -> None:
    assert pyspark_fencepost.DefaultSource is FencepostDataSource
    assert pyspark_fencepost.DefaultSource.name() == "fencepost"


def test_session_registers_the_format_once() -> None:
    """Spark warns when a format is registered again. A frame makes the session the thread's active one each time."""

    class Session:
        def __init__(self) -> None:
            self.calls: list[str] = []
            self.dataSource = SimpleNamespace(register=lambda source: self.calls.append(source.name()))

        def createDataFrame(self, *_: Any) -> None:
            self.calls.append("frame")

    first: Any = Session()
    other: Any = Session()
    for session in (first, first, other):
        register(session)
    assert first.calls == ["fencepost", "frame", "frame"]
    assert other.calls == ["fencepost", "frame"]


def test_spark_programs_start_without_the_packages_of_the_sink() -> None:
    """Spark imports the module in each program, and an error would end it."""
    code = (
        "import sys; sys.modules['aiokafka'] = None; import pyspark_fencepost as p; print(hasattr(p, 'DefaultSource'))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


class Context:
    """Spark's, of a task."""

    def __init__(self, **properties: str) -> None:
        self._properties = {name.replace("_", "."): value for name, value in properties.items()}

    def getLocalProperty(self, name: str) -> str | None:
        return self._properties.get(name)


def test_task_without_batch_identity_writes_nothing() -> None:
    query, batch = {"sql_streaming_queryId": "q"}, {"streaming_sql_batchId": "7"}
    assert writer()._identity(Context(**query, **batch)) == ("q", 7)
    for missing in ({}, query, batch):
        with pytest.raises(SinkError, match=r"streaming.sql.batchId, which identify a batch .*Spark 4.1"):
            writer()._identity(Context(**missing))


def test_batch_of_foreach_batch_is_one_of_a_stream() -> None:
    load, batch = (_BatchWriter(settings({**REQUIRED, **more})) for more in ({}, {"batch.id": "7"}))
    assert load._identity(Context()) == ("", 0)
    assert batch._identity(Context()) == ("foreachBatch", 7)
    with pytest.raises(SinkError, match=r"option batch\.id is for df\.write in foreachBatch"):
        FencepostDataSource({**REQUIRED, "batch.id": "7"}).streamWriter(SCHEMA, False)


def test_places_are_hashes_or_stated_partitions() -> None:
    rows = pa.RecordBatch.from_pydict({
        "partition": pa.array([None, 3, None], pa.int32()),
        HASH_COLUMN: pa.array([7, 8, (1 << 31) - 1], pa.int32()),
        COUNT_COLUMN: pa.array([4, 6, 4], pa.int32()),
    })  # fmt: skip
    assert datasource._placements(rows).tolist() == [7, -4, (1 << 31) - 1]
    assert datasource._placements(rows.drop_columns(["partition"])).tolist() == [7, 8, (1 << 31) - 1]
    parts = {count: some.column(HASH_COLUMN).to_pylist() for count, some in datasource._by_count(rows)}
    assert parts == {4: [7, (1 << 31) - 1], 6: [8]}
    negative = rows.set_column(0, "partition", pa.array([0, -1, None], pa.int32()))
    with pytest.raises(SinkError, match="column 'partition' of a row is -1"):
        datasource._placements(negative)


def test_java_hash_places_keys_as_java_does() -> None:
    keys = [b"", b"k", b"long" * 50, None]
    hashes = _java_hash(pa.array(keys, pa.binary())).to_pylist()
    for count in (1, 7, 400):
        assert [found % count for found in hashes[:3]] == [murmur2(key, count) for key in keys[:3] if key is not None]
    assert hashes[3] is None
    assert len(_java_hash(pa.array([], pa.binary()))) == 0


def test_message_is_that_of_the_sink() -> None:
    """Before Spark runs, and in the words of Spark's exception."""
    assert stated(SinkError("no topic")) == "no topic"
    assert stated(Exception("Spark: fencepost.spark.errors.SinkError: no topic\n  at …")) == "no topic"
    assert stated(ValueError("no topic")) is None
