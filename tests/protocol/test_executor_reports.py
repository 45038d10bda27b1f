"""A starting proxy reports what executes its hot path: in the log, in /status.json and as a label of a metric."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from fencepost_proxy.session.relay.native import MODULE
from tests.support.executors import needs_native
from tests.support.ports import free_ports_in_a_row

_VERSION = None if MODULE is None else MODULE.__version__
_BROKEN = "raise ImportError('GLIBC_2.34 not found')"


@pytest.mark.parametrize(
    ("source", "environment", "level", "executor"),
    [
        pytest.param(None, {}, "INFO", f"native {_VERSION}", marks=needs_native),
        (_BROKEN, {"FENCEPOST_NATIVE": "off"}, "INFO", "pure Python: FENCEPOST_NATIVE=off"),
        (_BROKEN, {}, "WARNING", "pure Python: fencepost_native cannot be imported: GLIBC_2.34 not found"),
    ],
)
def test_executor_is_reported(
    source: str | None, environment: dict[str, str], level: str, executor: str, tmp_path: Path
) -> None:
    if source is not None:  # instead of the installed module
        (tmp_path / "fencepost_native.py").write_text(source)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    port = free_ports_in_a_row(3)
    addresses = ("--upstream", f"127.0.0.1:{port}", "--listen", f"127.0.0.1:{port + 1}")
    status = f"127.0.0.1:{port + 2}"
    with subprocess.Popen(
        [sys.executable, "-m", "fencepost_proxy", "proxy", *addresses, "--status", status],
        env={**{k: v for k, v in os.environ.items() if k != "FENCEPOST_NATIVE"}, "PYTHONPATH": path, **environment},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            line = next(each for each in process.stderr if "executor of the hot path" in each)
            with urlopen(f"http://{status}/status.json") as response:
                reported = json.load(response)
            with urlopen(f"http://{status}/metrics") as response:
                (metric,) = [each for each in response.read().decode().splitlines() if "build_info{" in each]
        finally:
            process.kill()

    assert f" {level} server executor of the hot path " in line
    assert executor in line
    assert reported["executor"] == executor
    assert f'executor="{executor.partition(" ")[0].replace("pure", "python")}"' in metric
