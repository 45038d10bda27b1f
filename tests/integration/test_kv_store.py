"""KIP-27's example, run as a command: two competing leaders on one partition end with equal state, and diverge without
checks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.support.fixtures import proxy_fixture
from tests.support.proxy import ProxyProcess

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "kv_store.py"


store_proxy = proxy_fixture()


def _run(bootstrap: str, topic: str, *options: str) -> tuple[int, str]:
    command = [sys.executable, str(EXAMPLE), "--bootstrap", bootstrap, "--topic", topic, "--pause-ms", "5", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode in (0, 1), result.stderr
    return result.returncode, result.stdout + result.stderr


def test_competing_leaders_end_in_the_same_state(store_proxy: ProxyProcess, unique_topic: Callable[..., str]) -> None:
    status, reported = _run(store_proxy.bootstrap, unique_topic("kv"))
    print(reported)
    assert status == 0, reported
    assert "EQUAL" in reported
    assert "requests lost: 0   doubled: 0   decided on a stale value: 0" in reported
    refused = sum(int(n) for n in re.findall(r"(\d+) were refused", reported))
    assert refused > 0, "no append was refused: the leaders never competed"


def test_without_expected_offsets_the_same_run_diverges(
    store_proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    status, reported = _run(store_proxy.bootstrap, unique_topic("kv-unchecked"), "--unchecked")
    assert status == 1, reported
    assert "DIVERGED" in reported


def test_example_without_a_proxy_reports_it_missing(kafka: KafkaCluster, unique_topic: Callable[..., str]) -> None:
    _, reported = _run(kafka.bootstrap, unique_topic("kv-plain"))
    assert "is not a Fencepost proxy" in reported
    assert "Traceback" not in reported
