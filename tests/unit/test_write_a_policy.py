"""The steps of docs/write-a-policy.md, in copies of the policies and of the contract's tables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.docs import ROOT

FIELD, POLICY, LINE, CONFIGS, TABLE = re.findall(
    r"```(?:python|text)\n(.*?)```", (ROOT / "docs" / "write-a-policy.md").read_text(), re.DOTALL
)
#: Runs the new table with the copies, and prints what an operator sees of the policy.
_RUN = """
import sys
import tests.contract

tests.contract.__path__[:] = [sys.argv[1]]
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability.exposition import exposition
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from tests.contract.test_rows import TABLES, test_modelled_cluster
from tests.pages import config

print(*(each for each in exposition(Metrics()).decode().splitlines() if "key_required" in each))
print(*TopicPolicy.of({"fencepost.require.key": " TRUE "}).configs)
print(*(each for each in config.page().splitlines() if each.startswith("| `fencepost.require.key` | false or true")))
for row in TABLES["require_key"]:
    test_modelled_cluster(row)
"""


class Walk:
    """Copies of what the steps change."""

    def __init__(self, directory: Path) -> None:
        self.policies, self.contract = directory / "fencepost_policies", directory / "contract"
        shutil.copytree(ROOT / "policies" / "fencepost_policies", self.policies)
        shutil.copytree(ROOT / "tests" / "contract", self.contract)

    def write_field_and_policy(self) -> None:
        with (self.policies / "fields.py").open("a") as fields:
            fields.write(FIELD)
        (self.policies / "require_key.py").write_text(POLICY)

    def add_to_the_list(self) -> None:
        registry = self.policies / "registry.py"
        listed = registry.read_text().replace("    RecordAge(),\n", f"    RecordAge(),\n{LINE}")
        needed = "from fencepost_policies.require_key import RequireKey\n"
        registry.write_text(listed.replace("\nPOLICIES", f"{needed}\nPOLICIES", 1))

    def write_table(self) -> None:
        rows = self.contract / "rows.py"
        rows.write_text(rows.read_text().replace('    "plain": {},\n', f'    "plain": {{}},\n{CONFIGS}'))
        (self.contract / "require_key.py").write_text(TABLE)

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(map(str, (self.policies.parent, ROOT / "proxy", ROOT)))
        environment = {**os.environ, "PYTHONPATH": path}
        whole = [sys.executable, *command]
        return subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=120, check=False)

    def explain(self) -> subprocess.CompletedProcess[str]:
        return self.call("-m", "fencepost_proxy", "config", "explain", "fencepost.require.key")

    def run_table(self) -> subprocess.CompletedProcess[str]:
        return self.call("-c", _RUN, str(self.contract))


@pytest.fixture
def walk(tmp_path: Path) -> Walk:
    return Walk(tmp_path)


def test_one_field_one_file_and_one_line_add_a_policy(walk: Walk) -> None:
    walk.write_field_and_policy()
    before = walk.explain()
    assert before.returncode == 2, before.stdout

    walk.add_to_the_list()
    after = walk.explain()
    assert after.returncode == 0, after.stderr
    assert "false or true" in after.stdout

    walk.write_table()
    run = walk.run_table()
    assert run.returncode == 0, run.stderr
    metric, configs, documented = run.stdout.splitlines()
    assert metric == 'fencepost_refusals_total{reason="key_required"} 0.0'
    assert configs == "('fencepost.require.key', 'true')"
    assert documented.endswith("| `key_required` |")

    policy = walk.policies / "require_key.py"
    policy.write_text(POLICY.replace("if record is None:", "if True:"))
    assert "KEY_REQUIRED" in walk.run_table().stderr, "the table fails without the check"
