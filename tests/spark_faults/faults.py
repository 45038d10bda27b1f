"""The faults that hit a query while it writes one micro-batch after the other.

Most faults hit batch 1: batch 0 is complete, and batch 2 follows. Where our sink refuses to continue, the fault does
what the refusal's message says, so that the final count covers all rows.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.spark_faults import gates
from tests.spark_faults.gates import PASS, RAISE, WAIT, WAIT_AND_RAISE, point
from tests.spark_faults.query import FENCEPOST, SINKS
from tests.spark_faults.stage import CHANGED, CLUSTER, LOCAL, STANDALONE, TASKS, Query, Trial, _signal, until


@dataclass(frozen=True, slots=True)
class Fault:
    """`reported`: the label in the table."""

    name: str
    reported: str
    happen: Callable[[Trial], None]
    #: The sinks that have the fault's point.
    sinks: tuple[str, ...] = SINKS
    master: str = LOCAL
    #: The fault needs a running query and leaves one: consecutive faults share it.
    chained: bool = False


def begun(trial: Trial) -> Query:
    """A query that runs and has completed some batches; the fault hits its next one, `trial.at`."""
    if not trial.queries:
        trial.run(trial.query())
    [query] = trial.queries
    trial.at = query.batches
    return query


def ended(trial: Trial, query: Query) -> None:
    """Wait until the query has completed the faulty batch, and continues."""
    trial.done(query, trial.at)
    if not trial.chained:
        trial.done(query, query.more())


def points(trial: Trial, where: str) -> list[str]:
    """`NAME` – a point that a batch passes once; `NAME/0` – in task 0; `NAME/*` – in each task."""
    name, _, tasks = where.partition("/")
    if name in ("look", "probed"):
        return [name]  # the sink does not know the batch number at this point
    if not tasks:
        return [point(name, trial.at)]
    return [point(name, trial.at, task) for task in (range(TASKS) if tasks == "*" else [int(tasks)])]


def half_written(trial: Trial, query: Query, action: str = WAIT) -> int:
    """Begin a batch: the first rows of each task are in Kafka, but task 0 is not finished. Return its waiting worker.

    Task 1 starts later. Otherwise the two would refuse each other's appends, and our sink retries only with more rows.
    """
    [sequencer], [other] = points(trial, "rows/0"), points(trial, "task/1")
    gates.arm(sequencer, action)
    gates.arm(other)
    query.more()
    if query.load:
        trial.start(query)
    pid = trial.reached(sequencer)
    trial.has_written(query, trial.at, 0)
    trial.reached(other)
    gates.let_pass(other)
    trial.has_written(query, trial.at, 1)
    return pid


def continue_appending(trial: Trial) -> None:
    [sequencer] = points(trial, "rows/0")
    gates.let_pass(sequencer)


# --- tasks ------------------------------------------------------------------------------------------------------------


def task_fails(trial: Trial) -> None:
    query = begun(trial)
    half_written(trial, query, WAIT_AND_RAISE)
    continue_appending(trial)
    ended(trial, query)


def strikes(trial: Trial, where: str, action: str = RAISE) -> None:
    """One fault at this point in the sink. If it raises, Spark retries the task."""
    query = begun(trial)
    [sequencer] = points(trial, where)
    gates.arm(sequencer, action)
    query.more()
    ended(trial, query)
    assert gates.reached(sequencer)


# --- the driver -------------------------------------------------------------------------------------------------------


def driver_killed(trial: Trial, where: str) -> None:
    """Kill the driver when all have reached this point."""
    query = begun(trial)
    for sequencer in points(trial, where):
        gates.arm(sequencer)
    query.more()
    for sequencer in points(trial, where):
        trial.reached(sequencer)
    trial.driver.kill()
    trial.start(query)
    ended(trial, query)


def driver_killed_half_way(trial: Trial) -> None:
    query = begun(trial)
    half_written(trial, query)
    trial.driver.kill()
    trial.start(query)
    ended(trial, query)


def commit_fails(trial: Trial, where: str) -> None:
    query = begun(trial)
    [sequencer] = points(trial, where)
    gates.arm(sequencer, RAISE)
    query.more()
    trial.fails(query)
    assert gates.reached(sequencer)
    trial.start(query)
    ended(trial, query)


# --- executors --------------------------------------------------------------------------------------------------------


def executor_killed(trial: Trial) -> None:
    query = begun(trial)
    process = half_written(trial, query)
    members = trial.driver.processes()
    executors = trial.driver.executors()
    while process not in executors:
        process = members[process][0]
    _signal(process, signal.SIGKILL)
    trial.done(query, trial.at)
    continue_appending(trial)
    ended(trial, query)


def zombie_executor(trial: Trial) -> None:
    """1. The executor stops. 2. The driver dies; the query completes elsewhere. 3. The executor resumes."""
    query = begun(trial)
    half_written(trial, query)
    old = trial.driver
    members = [*old.executors(), *old.workers()]
    for pid in members:
        _signal(pid, signal.SIGSTOP)
    old.kill()
    trial.start(query)
    trial.done(query, trial.at)
    continue_appending(trial)
    for pid in members:
        _signal(pid, signal.SIGCONT)
    until(lambda: not old.processes(), "the zombies have ended")
    ended(trial, query)


def zombie_worker(trial: Trial) -> None:
    """1. A task is about to append. 2. The driver dies, and the query writes everything again. 3. The task appends."""
    query = begun(trial)
    [sequencer] = points(trial, "append/0")
    gates.arm(sequencer)
    query.more()
    trial.reached(sequencer)
    old = trial.driver
    old.kill()
    trial.start(query)
    trial.done(query, trial.at)
    gates.let_pass(sequencer)
    until(lambda: not old.processes(), "the zombie has ended")
    ended(trial, query)


def zombie_driver(trial: Trial) -> None:
    """1. The driver stops. 2. Another driver writes this batch and the next. 3. It resumes until Spark stops it."""
    query = begun(trial)
    half_written(trial, query)
    old = trial.driver
    members = list(old.processes())
    for pid in members:
        _signal(pid, signal.SIGSTOP)
    old.forgotten = True
    trial.start(query)
    trial.done(query, trial.at)
    trial.done(query, query.more())
    continue_appending(trial)
    for pid in members:
        _signal(pid, signal.SIGCONT)
    until(lambda: not old.report("state", name=query.name)["active"], "the older driver's query has ended")
    old.end()
    ended(trial, query)


def speculation(trial: Trial) -> None:
    """1. Task 0 stops. 2. Its speculative copy starts. 3. Task 0 resumes, and both write."""
    trial.driver_settings = {
        "spark_speculation": "true",
        "spark_speculation_quantile": "0.5",
        "spark_speculation_multiplier": "1.1",
        "spark_speculation_interval": "100ms",
        "spark_speculation_minTaskRuntime": "100ms",
    }
    query = begun(trial)
    half_written(trial, query)
    until(lambda: len(gates.recorded(f"started.{trial.at}.0.")) > 1, "a speculative copy of the task")
    continue_appending(trial)
    ended(trial, query)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _backed_up(trial: Trial, query: Query, batches: int) -> str:
    """Return the checkpoint as it was `batches` batches ago. The query is stopped."""
    trial.stop(query)
    backup = f"{query.checkpoint}-backup"
    shutil.copytree(query.checkpoint, backup)
    trial.start(query)
    for _ in range(batches):
        trial.done(query, query.more())
    trial.stop(query)
    return backup


def restored(trial: Trial, batches: int = 1) -> None:
    """Restore a checkpoint from before the last batches."""
    query = begun(trial)
    backup = _backed_up(trial, query, batches)
    shutil.rmtree(query.checkpoint)
    shutil.copytree(backup, query.checkpoint)
    trial.start(query)
    trial.done(query, query.more())


def restored_otherwise(trial: Trial) -> None:
    """As `restored`, and two former batches become one."""
    query = begun(trial)
    backup = _backed_up(trial, query, 2)

    def restore(files: int) -> None:
        shutil.rmtree(query.checkpoint)
        shutil.copytree(backup, query.checkpoint)
        query.files = files
        trial.start(query)

    restore(2)
    if trial.ours:
        trial.refused(query, "the batches as they were (`maxFilesPerTrigger` back to 1)")
        restore(1)
        trial.done(query, query.more())
    else:
        trial.done(query, trial.at)
        query.more()
        trial.done(query, trial.at + 1)


def lost(trial: Trial, *, delete: bool) -> None:
    """Restart the query without a checkpoint, from the first row."""
    query = begun(trial)
    trial.done(query, query.more())
    trial.stop(query)
    kept = f"{query.checkpoint}-kept"
    shutil.copytree(query.checkpoint, kept)
    if delete:
        shutil.rmtree(query.checkpoint)
    else:
        query.checkpoint = f"{query.checkpoint}-new"
    trial.start(query)
    if trial.ours:
        trial.refused(query, "the old checkpoint")
        query.checkpoint = kept
        trial.start(query)
    ended(trial, query)


# --- the query --------------------------------------------------------------------------------------------------------


def changed(trial: Trial, *, half: bool, tasks: int = TASKS, prefix: str = "", then: str = "") -> None:
    """Restart the query with other settings: after a complete batch, or after a half-written one whose driver died.

    `then` – what resolves our sink's refusal; empty: it does not refuse.
    """
    query = trial.query()
    trial.run(query)
    begun(trial)
    if half:
        half_written(trial, query)
        trial.driver.kill()
    else:
        trial.stop(query)
        query.more()
    query.tasks, query.prefix = tasks, prefix
    trial.start(query)
    if trial.ours and then:
        trial.refused(query, then)
        query.tasks, query.prefix = TASKS, ""
        trial.start(query)
    ended(trial, query)


def two_queries(trial: Trial) -> None:
    first, second = trial.query("a"), trial.query("b", 1_000_000)
    for query in (first, second):
        query.more()
        trial.start(query)
    for number in range(3):
        for query in (first, second):
            trial.done(query, number)
            query.more()
    for query in (first, second):
        trial.done(query, 3)


# --- df.write ---------------------------------------------------------------------------------------------------------


def _load(trial: Trial) -> Query:
    query = trial.query()
    query.load = True
    return query


def load_task_fails(trial: Trial) -> None:
    query = _load(trial)
    half_written(trial, query, WAIT_AND_RAISE)
    continue_appending(trial)
    trial.loaded(query)


def load_killed(trial: Trial, *, changed: bool = False) -> None:
    query = _load(trial)
    half_written(trial, query)
    trial.driver.kill()
    query.prefix = CHANGED.decode() if changed else ""
    trial.start(query)
    if trial.ours and changed:
        trial.refused(query, "the data as it was")
        query.prefix = ""
        trial.start(query)
    trial.loaded(query)


def worker_killed(trial: Trial) -> None:
    """A machine of the cluster fails while its task waits half way, and the other machine's task runs."""
    query = _load(trial)
    cluster = trial.stage.standalone
    host = cluster.host_of(half_written(trial, query))
    other = gates.reached(point("task", trial.at, 1))
    assert other is not None
    assert cluster.host_of(other) != host
    cluster.kill_worker(host)
    trial.loaded(query)
    assert len(gates.recorded(f"started.{trial.at}.0.")) > 1, "the task was not repeated"
    cluster.restart_worker(host)


def load_again(trial: Trial, *, more: bool = False) -> None:
    """`more`: the second time, the source has more rows."""
    query = _load(trial)
    query.more()
    trial.start(query)
    trial.loaded(query)
    if more:
        query.more()
    trial.start(query)
    if trial.ours and more:
        trial.refused(query, "another sink.id for the rows that are new")
        Path(query.source, "0000.parquet").unlink()
        query.sink_id += "-2"
        trial.start(query)
    trial.loaded(query)


def load_commit_killed(trial: Trial, where: str) -> None:
    """Kill the driver before the last rows and the commit tag, or after that."""
    query = _load(trial)
    gates.arm(point(where, 0))
    query.more()
    trial.start(query)
    trial.reached(point(where, 0))
    trial.driver.kill()
    trial.start(query)
    trial.loaded(query)


# --- proxy and broker -------------------------------------------------------------------------------------------------


def proxy_killed(trial: Trial) -> None:
    query = begun(trial)
    half_written(trial, query)
    trial.stage.proxy.kill()
    continue_appending(trial)
    trial.stage.proxy.restart()
    ended(trial, query)


def broker_killed(trial: Trial) -> None:
    query = begun(trial)
    half_written(trial, query)
    kafka = trial.stage.kafka
    kafka.kill(kafka.node_ids[0])
    continue_appending(trial)
    kafka.restart(kafka.node_ids[0])
    ended(trial, query)


# --- the table --------------------------------------------------------------------------------------------------------

OURS = (FENCEPOST,)
_CHANGED = CHANGED.decode()
_BACK = "the query as it was"


def _at(
    name: str, reported: str, happen: Callable[..., None], where: str, sinks: tuple[str, ...] = SINKS, **more: Any
) -> Fault:
    return Fault(name, reported, partial(happen, where=where, **more), sinks, chained=True)


def _killed(name: str, reported: str, where: str, sinks: tuple[str, ...] = SINKS, **more: Any) -> Fault:
    return _at(f"kill-{name}", f"driver killed {reported}", driver_killed, where, sinks, **more)


FAULTS = (
    Fault("task-fails", "task fails, batch partly written", task_fails, chained=True),
    _at("append-fails", "sink's write raises before an append", strikes, "append/0", OURS),
    _at("answer-fails", "sink's write raises after an append", strikes, "appended/0", OURS),
    _at("answer-lost", "response to an append lost", strikes, "unread/0", OURS, action=PASS),
    _at("commit-raises", "sink's commit raises", commit_fails, "commit", OURS),
    _at("committed-raises", "sink's commit raises at its end", commit_fails, "committed", OURS),
    _at("log-raises", "Spark cannot log the batch as done", commit_fails, "commits"),
    Fault("proxy-killed", "proxy killed", proxy_killed, chained=True),
    Fault("broker-killed", "broker killed", broker_killed, chained=True),
    _killed("before-offsets", "before Spark logs the offsets", "offsets"),
    _killed("after-offsets", "after Spark logs the offsets", "offsets-logged"),
    _killed("before-look", "before the sink reads the topic", "look", OURS),
    _killed("after-look", "after the sink reads the topic", "probed", OURS),
    _killed("at-task", "at the first row of all tasks", "task/*"),
    _killed("at-append", "at the first append of a task", "append/0", OURS),
    _killed("at-answer", "at the first response to a task", "appended/0", OURS),
    Fault("kill-half-way", "driver killed, batch partly written", driver_killed_half_way, chained=True),
    _killed("at-last-row", "at the last row of all tasks", "all/*"),
    _killed("all-written", "when all rows are written", "written/*", OURS),
    _killed("before-commit", "before the sink's commit", "commit", OURS),
    _killed("after-commit", "after the sink's commit", "committed", OURS),
    _killed("before-log", "before Spark logs the batch as done", "commits"),
    _killed("after-log", "after Spark logs the batch as done", "commits-logged"),
    Fault(
        "zombie-append",
        "worker appends after the batch was written again",
        zombie_worker,
        OURS,
        chained=True,
    ),
    Fault(
        "zombie-driver",
        "driver paused while another writes this batch and the next",
        zombie_driver,
        chained=True,
    ),
    Fault("restored", "checkpoint one batch old", restored),
    Fault("restored-2", "checkpoint two batches old", partial(restored, batches=2)),
    Fault("restored-otherwise", "checkpoint two batches old, source splits rows differently", restored_otherwise),
    Fault("deleted", "checkpoint deleted", partial(lost, delete=True)),
    Fault("new-checkpoint", "another checkpoint location", partial(lost, delete=False)),
    Fault("changed-query", "query changed between batches", partial(changed, half=False, prefix=_CHANGED)),
    Fault(
        "changed-query-half",
        "query changed, batch partly written",
        partial(changed, half=True, prefix=_CHANGED, then=_BACK),
    ),
    Fault("changed-tasks", "task count changed between batches", partial(changed, half=False, tasks=3)),
    Fault(
        "changed-tasks-half",
        "task count changed, batch partly written",
        partial(changed, half=True, tasks=3),
    ),
    Fault("two-queries", "two queries write to one topic", two_queries),
    Fault("load-task-fails", "`df.write`: task fails, partly written", load_task_fails),
    Fault("load-again", "`df.write`: repeated when done", load_again),
    Fault("load-more", "`df.write`: repeated when done, with more rows", partial(load_again, more=True)),
    Fault(
        "load-kill-before-mark",
        "`df.write`: driver killed before its commit appends the last rows",
        partial(load_commit_killed, where="commit"),
        OURS,
    ),
    Fault(
        "load-kill-after-mark",
        "`df.write`: driver killed after its commit appends the last rows",
        partial(load_commit_killed, where="committed"),
        OURS,
    ),
    Fault("load-killed", "`df.write`: driver killed, partly written", load_killed),
    Fault("load-changed", "`df.write`: driver killed, partly written; other data", partial(load_killed, changed=True)),
    Fault(
        "executor-killed",
        "executor killed, batch partly written",
        executor_killed,
        master=CLUSTER,
        chained=True,
    ),
    Fault(
        "zombie-executor",
        "executor resumes after the batch was written again",
        zombie_executor,
        master=CLUSTER,
        chained=True,
    ),
    Fault(
        "worker-killed",
        "`df.write` on two machines: one fails, partly written",
        worker_killed,
        master=STANDALONE,
    ),
    Fault("speculation", "speculative copy of a slow task", speculation, master=STANDALONE),
)
