"""Each benchmark runs to its end with the smallest workload. Its measurements are not checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.kafka, pytest.mark.soak, pytest.mark.no_cover, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
QUICK = ("benchmarks", "--quick", "--rounds", "1", "--only")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param((*QUICK, "start and memory"), id="start"),
        pytest.param((*QUICK, "one in flight"), id="latency"),
        pytest.param((*QUICK, "transactional"), id="java"),
        pytest.param(
            ("benchmarks.status_page", "--topics", "2", "--partitions", "2", "--seconds", "1"), id="status page"
        ),
        pytest.param(("benchmarks.metadata", "--kafka", "--topics", "2"), id="metadata"),
        pytest.param(("benchmarks.secured", "--quick"), id="tls"),
        pytest.param(("benchmarks.loads", "--rounds", "1"), id="loads"),
        pytest.param(("benchmarks.spark_load", "--copies", "1"), id="spark load", marks=pytest.mark.spark),
    ],
)
def test_a_benchmark_runs_to_its_end(command: tuple[str, ...], tmp_path: Path) -> None:
    results = ("--results", str(tmp_path)) if command[0] == "benchmarks" else ()
    done = subprocess.run(
        [sys.executable, "-m", *command, *results], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
