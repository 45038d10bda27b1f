"""Partition expansion during appends that the barrier cannot see: slow requests, and workers that die."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.expanding import (
    OK,
    check_log,
    counted,
    expand,
    expand_at_the_end,
    expansions,
    partition_count,
    writing,
)
from tests.support.kafka import unique_topic
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log, Record, batch, produce_request
from tests.support.transactions import Transactional

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(400)]

REQUEST_SECONDS = 6.0


def test_slow_produce_is_not_appended_past_the_threshold(kafka: KafkaCluster, tmp_path: Path) -> None:
    """The append starts before partition-count checks are switched on. The proxy closes its connection when the request
    times out."""
    config = (
        f"config_lease_seconds = 3.0\n[limits]\ntakeover_seconds = 0.5\nrequest_timeout_seconds = {REQUEST_SECONDS}\n"
    )
    topic = unique_topic("later")
    with ProxyProcess(kafka.bootstrap, tmp_path, config=config) as proxy, Connection(proxy.bootstrap) as admin:
        assert admin.create_topic(topic) == (OK, None)
        until(lambda: partition_count(proxy.bootstrap, topic) == 1, f"{topic} to appear")
        with Log(proxy.bootstrap).connect(topic) as slow, Log(proxy.bootstrap).connect(topic) as quick:
            assert quick.append(topic, batch(Record(b"quick"))).error_code == OK
            _, frame = slow.frame(produce_request({topic: {0: batch(Record(b"slow" * 100_000))}}), 9)
            slow.socket.sendall(frame[: len(frame) // 2])
            assert quick.append(topic, batch(Record(b"quick"))).error_code == OK

            assert admin.alter_topic(topic, {"fencepost.ordered.partition.expansion": "true"}) == (OK, None)
            assert expand(proxy.bootstrap, topic, 2) == (OK, None)

            # The rest of the request must have no effect.
            with suppress(OSError):
                slow.socket.sendall(frame[len(frame) // 2 :])
            assert slow.is_closed(30.0)
        [grown] = expansions(proxy.bootstrap, topic)
        assert grown.thresholds == (2,)
        assert Log(kafka.bootstrap).end(topic) == 2
        assert f"after partition-count checks of {topic} were enabled" in proxy.log


def worker_pid(proxy: ProxyProcess, worker: int) -> int:
    def found() -> int | None:
        for pid in Path(f"/proc/{proxy.pid}/task/{proxy.pid}/children").read_text().split():
            with suppress(OSError):
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"--worker" in arguments and arguments[-2].startswith(b"%d:" % worker):
                    return int(pid)
        return None

    pid: int = until(found, f"a process of worker {worker}")
    return pid


def reported_or_nothing(address: str, topic: str, count: int) -> tuple[int, str | None] | None:
    with suppress(Exception):
        return expand(address, topic, count)
    return None


def test_expansion_continues_after_primary_worker_is_killed(kafka: KafkaCluster, tmp_path: Path) -> None:
    """Another worker, or the successor of the killed one, finishes the expansion."""
    with ProxyProcess(kafka.bootstrap, tmp_path, config=counted(60.0), arguments=("--workers", "2")) as proxy:
        topic = unique_topic("grows")
        with Connection(proxy.bootstrap) as connection:
            assert connection.create_topic(topic) == (OK, None)
        until(lambda: partition_count(proxy.bootstrap, topic) == 1, f"{topic} to appear")
        # Connect directly to Kafka, so that the connection outlives the worker.
        with Transactional(kafka.bootstrap, topic) as transaction, writing([proxy.bootstrap] * 3, topic) as writers:
            for writer in writers:
                writer.goes_on()
            transaction.begin(topic)
            assert transaction.append(topic, b"t:0:1").error_code == OK
            assert expand_impatiently(proxy.bootstrap, topic) != OK
            until(lambda: f"topic={topic} step=barriers" in proxy.log, "the expansion to wait")
            assert expansions(proxy.bootstrap, topic) == []
            os.kill(worker_pid(proxy, 0), signal.SIGKILL)
            until(lambda: "worker exited unexpectedly worker=0" in proxy.log, "it to be dead")
            transaction.end(commit=True)
            # Any instance at this Kafka may finish the expansion, including the proxy of another test.
            until(lambda: expansions(proxy.bootstrap, topic), f"{topic} to grow")
            for writer in writers:
                writer.goes_on()
        check_log(Log(kafka.bootstrap), topic, expansions(proxy.bootstrap, topic), writers)


def expand_impatiently(address: str, topic: str) -> int:
    return expand(address, topic, 2, timeout_ms=1_000)[0]


@pytest.mark.parametrize(
    ("step", "when"),
    [
        ("create", "after"),
        ("store", "before"),
        pytest.param("intent", "after", marks=pytest.mark.soak),
        pytest.param("closed", "after", marks=pytest.mark.soak),
        pytest.param("create", "before", marks=pytest.mark.soak),
        pytest.param("ends", "after", marks=pytest.mark.soak),
        pytest.param("store", "after", marks=pytest.mark.soak),
    ],
)
def test_expansion_continues_after_worker_dies_at_step(
    kafka: KafkaCluster, tmp_path: Path, step: str, when: str
) -> None:
    path = [str(Path(__file__).parents[1] / "support/dying_workers"), os.environ.get("PYTHONPATH", "")]
    died = tmp_path / "died"
    environment = {"STOP_AT": f"{step}:{when}:die-once:{died}", "PYTHONPATH": os.pathsep.join(filter(None, path))}
    with ProxyProcess(
        kafka.bootstrap, tmp_path, config=counted(60.0), arguments=("--workers", "2"), environment=environment
    ) as proxy:
        topic = unique_topic("grows")
        with Connection(proxy.bootstrap) as connection:
            assert connection.create_topic(topic) == (OK, None)
        until(lambda: partition_count(proxy.bootstrap, topic) == 1, f"{topic} to appear")
        with writing([proxy.bootstrap] * 3, topic) as writers:
            for writer in writers:
                writer.goes_on()
            reported_or_nothing(proxy.bootstrap, topic, 2)
            until(died.exists, "a worker to die")
            until(lambda: expansions(proxy.bootstrap, topic), f"{topic} to grow")
            for writer in writers:
                writer.goes_on()
            expand_at_the_end(proxy.bootstrap, topic, 4)
            for writer in writers:
                writer.goes_on()
        grown = expansions(proxy.bootstrap, topic)
        assert [(each.from_count, each.to_count, each.unordered) for each in grown] == [(1, 2, False), (2, 4, False)]
        check_log(Log(kafka.bootstrap), topic, grown, writers)
