"""Runs `examples/partition_expansion.py` as a user would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.proxy import ProxyProcess

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "partition_expansion.py"


def _run(proxy: ProxyProcess, *options: str) -> str:
    command = [sys.executable, str(EXAMPLE), "--bootstrap", proxy.bootstrap, *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_library_reads_all_records_in_order(growing: ProxyProcess) -> None:
    stated = _run(growing)
    assert "from 2 to 4: thresholds" in stated
    assert "from 4 to 8: thresholds" in stated
    assert stated.endswith("3000 records of 20 keys read, 0 of them out of order\n")


def test_without_it_some_are(growing: ProxyProcess) -> None:
    found = re.search(r"3000 records of 20 keys read, (\d+) of them out of order", _run(growing, "--unchecked"))
    assert found is not None
    assert int(found[1]) > 0
