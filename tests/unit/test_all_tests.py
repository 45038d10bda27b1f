"""Which tests run when, and how a run continues after an interruption: `tests/all.py`, `tests/support/results.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import all as all_tests
from tests.support import results

FILES = all_tests.test_files()
LATER = [file for file in FILES if file not in all_tests.quick_files()]


def test_each_later_file_belongs_to_an_area() -> None:
    areas = [prefix for tests in all_tests.AREAS.values() for prefix in tests]
    assert [file for file in LATER if not file.startswith(tuple(areas))] == []


@pytest.mark.parametrize("prefix", sorted({prefix for tests in all_tests.AREAS.values() for prefix in tests}))
def test_area_names_existing_tests(prefix: str) -> None:
    assert any(file.startswith(prefix) for file in FILES)


@pytest.mark.parametrize("prefix", [prefix for product in all_tests.AREAS for prefix in product])
def test_area_names_existing_product_paths(prefix: str) -> None:
    assert list(all_tests.ROOT.glob(f"{prefix}*"))


@pytest.mark.parametrize("line", all_tests.QUICK.read_text().split())
def test_quick_list_names_existing_tests(line: str) -> None:
    file, _, name = line.partition("::")
    assert (all_tests.ROOT / file).exists()
    assert f"def {name.partition('[')[0]}" in (all_tests.ROOT / file).read_text() if name else True


def test_files_for_a_change_come_first() -> None:
    changed = ["proxy/fencepost_proxy/groups/gating.py", "tests/soak/test_soak.py", "README.md"]
    ordered = all_tests.in_order(LATER, changed, "seed")
    assert sorted(ordered) == LATER
    assert ordered.index("tests/integration/test_groups.py") < ordered.index("tests/integration/test_spark.py")
    assert ordered.index("tests/soak/test_soak.py") < ordered.index("tests/integration/test_spark.py")


def test_order_of_other_files_depends_on_commit() -> None:
    assert all_tests.in_order(LATER, [], "one") != all_tests.in_order(LATER, [], "two")


def test_only_passed_tests_of_same_code_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    lines = [
        {"code": "c"},
        *({"id": name, "outcome": name, "seconds": 1.0} for name in ("passed", "failed", "no time")),
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + '\n{"id": "cut o')
    assert results.passed_in(file, "c") == {"passed"}
    assert results.passed_in(file, "d") == frozenset()
    assert results.passed_in(tmp_path / "absent", "c") == frozenset()


def test_later_result_of_a_test_counts(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    again = [{"id": "tests/unit/a", "outcome": outcome, "seconds": 1.0} for outcome in ("passed", "failed")]
    file.write_text("\n".join(map(json.dumps, [{"code": "c"}, *again])))
    assert results.passed_in(file, "c") == frozenset()
    assert "failed:\ntests/unit/a" in all_tests.summary(file.read_text().splitlines())


def run(directory: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--results=r.jsonl", *options]
    environment = {"PYTHONPATH": str(all_tests.ROOT)}
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    return result.stdout.splitlines()[-1]


def test_interrupted_run_continues(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "conftest.py").write_text(
        "from tests.support import results\n"
        "pytest_addoption = results.add_options\n"
        "def pytest_configure(config): config.pluginmanager.register(results.Results(config))\n"
    )
    passes, fails, waits = "def test_a(): pass", "def test_b(): assert 0", "def test_c(): __import__('time').sleep(1)"
    (tmp_path / "test_it.py").write_text("\n".join([passes, fails, waits, "def test_d(): pass"]))
    assert "1 failed, 2 passed, 1 skipped" in run(tmp_path, "--minutes=0.01")
    assert "1 failed, 1 passed, 2 deselected" in run(tmp_path, "--resume")
