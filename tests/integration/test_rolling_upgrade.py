"""A proxy of this version next to one of a newer version, which has one more topic config."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.newer_proxy import ONE_RECORD
from tests.support.ports import free_ports_in_a_row
from tests.support.proxy import ProxyProcess
from tests.support.raw import Answer, Connection, batch, final_answer

pytestmark = pytest.mark.kafka

NEWER = "tests.support.newer_proxy"
OK, NOT_LEADER, POLICY_VIOLATION = 0, 6, 44
CONFIG = 'config_lease_seconds = 1.0\nstatus = "127.0.0.1:0"\n'
ONE, TWO = batch(b"one"), batch(b"one", b"two")


def once(proxy: ProxyProcess, topic: str, records: bytes) -> Answer:
    with Connection(proxy.bootstrap) as client:
        return client.append(topic, records)


def finally_(proxy: ProxyProcess, topic: str, records: bytes) -> int:
    with Connection(proxy.bootstrap) as client:
        return final_answer(client, topic, records).error_code


def check(kafka: KafkaCluster) -> str:
    """The report of `fencepost check` of this version."""
    options = ("--upstream", kafka.bootstrap, "--listen", f"127.0.0.1:{free_ports_in_a_row(4)}")
    command = [sys.executable, "-m", "fencepost_proxy", "check", *options, "--seconds", "200", "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def test_older_proxy_refuses_what_it_does_not_know(
    kafka: KafkaCluster, tmp_path: Path, unique_topic: Callable[..., str]
) -> None:
    topic, other = unique_topic("newer"), unique_topic("other")
    with ExitStack() as stack:
        proxies = []
        for module in (NEWER, "fencepost_proxy"):
            (directory := tmp_path / module).mkdir()
            process = ProxyProcess(kafka.bootstrap, directory, config=CONFIG, module=module)
            proxies.append(stack.enter_context(process))
        newer, older = proxies
        with Connection(newer.bootstrap) as admin:
            assert admin.create_topic(topic, configs={ONE_RECORD: "true"}) == (OK, None)
            assert admin.create_topic(other) == (OK, None)

        # Both run: only the newer one can decide.
        assert [finally_(newer, topic, records) for records in (ONE, TWO)] == [OK, POLICY_VIOLATION]
        for records in (ONE, TWO):
            answer = once(older, topic, records)
            assert answer.error_code == NOT_LEADER
            assert f"does not know the topic config {ONE_RECORD}" in (answer.message or "")
        assert finally_(older, other, TWO) == OK
        problem = f"Appends to {topic} are refused: this version does not know {ONE_RECORD}"
        assert problem in older.page("/status.json")
        assert "appends to topics are refused: they have configs that this version does not know" in older.log
        assert problem not in newer.page("/status.json")

        # A change through the older one keeps the config.
        with Connection(older.bootstrap) as admin:
            assert admin.alter_topic(topic, {"fencepost.max.record.age.ms": "3600000"}) == (OK, None)
            assert admin.alter_topic(topic, {ONE_RECORD: "false"})[0] == 40
            assert admin.describe_topic(topic)[ONE_RECORD] == "true"
        assert once(older, topic, ONE).error_code == NOT_LEADER

        # The older one is upgraded, then rolled back. The newer one is stopped.
        older.stop()
        older.module = NEWER
        older.restart()
        assert [finally_(older, topic, records) for records in (ONE, TWO)] == [OK, POLICY_VIOLATION]
        for process in proxies:
            process.stop()
        older.module = "fencepost_proxy"
        older.restart()
        assert once(older, topic, ONE).error_code == NOT_LEADER
        assert problem in check(kafka)
        with Connection(older.bootstrap) as admin:
            assert admin.alter_topic(topic, {ONE_RECORD: None}) == (OK, None)
        assert finally_(older, topic, TWO) == OK
        until(lambda: problem not in older.page("/status.json"), "the problem to end")
