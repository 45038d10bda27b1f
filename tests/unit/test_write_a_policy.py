"""The steps of docs/write-a-policy.md, in a copy of the policies that lacks what they add."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.docs import ROOT

PAGE = (ROOT / "docs" / "write-a-policy.md").read_text()
BLOCKS = [each.partition("```")[0] for each in PAGE.split("```python\n")[1:]]
NAME = "fencepost.max.record.age.ms"
IMPORT = "from fencepost_policies.record_age import RecordAge\n"


def _explain(policies: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (policies, ROOT / "proxy")))
    command = [sys.executable, "-m", "fencepost_proxy", "config", "explain", NAME]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_one_file_and_one_line_add_a_policy(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "policies" / "fencepost_policies", tmp_path / "fencepost_policies")
    policy, registry = (tmp_path / "fencepost_policies" / f"{name}.py" for name in ("record_age", "registry"))
    file, line = BLOCKS
    assert policy.read_text() == file
    complete = registry.read_text()
    policy.unlink()
    registry.write_text(complete.replace(line, "").replace(IMPORT, ""))
    before = _explain(tmp_path)
    assert before.returncode == 2, before.stdout

    policy.write_text(file)
    registry.write_text(
        registry.read_text().replace(")\n", f"{line})\n", 1).replace("\nPOLICIES", f"{IMPORT}\nPOLICIES")
    )
    after = _explain(tmp_path)
    assert after.returncode == 0, after.stderr
    assert "milliseconds from 1, or -1" in after.stdout
    assert sorted(registry.read_text().split()) == sorted(complete.split())
