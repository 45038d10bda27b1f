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


@pytest.mark.parametrize("path", all_tests.QUICK.read_text().split())
def test_quick_list_names_existing_tests(path: str) -> None:
    assert (all_tests.ROOT / path).exists()


def test_files_for_a_change_come_first() -> None:
    changed = ["proxy/fencepost_proxy/expansion/gating.py", "tests/soak/test_soak.py", "README.md"]
    ordered = all_tests.in_order(LATER, changed, "seed")
    assert sorted(ordered) == LATER
    assert ordered.index("tests/integration/test_groups.py") < ordered.index("tests/integration/test_spark.py")
    assert ordered.index("tests/soak/test_soak.py") < ordered.index("tests/integration/test_spark.py")


def test_later_result_of_a_test_counts(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    again = [{"id": "tests/unit/a", "outcome": outcome, "seconds": 1.0} for outcome in ("passed", "failed")]
    file.write_text("\n".join(map(json.dumps, [{"code": "c"}, *again])))
    assert results.read(file).passed == frozenset()
    assert "failed:\ntests/unit/a" in all_tests.summary(results.read(file).last)


@pytest.mark.parametrize("limit", [1, 0])
def test_failed_tests_run_again_alone_unless_too_many(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails_once = "def test_b():\n    runs.open('a').write('b')\n    assert runs.read_text() == 'abb', 'too busy'\n"
    passes = "def test_a(): runs.open('a').write('a')\n"
    in_project(tmp_path, f"from pathlib import Path\nruns = Path('runs')\n{passes}{fails_once}")
    (tmp_path / "tests").mkdir()
    (tmp_path / "test_it.py").rename(tmp_path / "tests" / "test_it.py")
    monkeypatch.setattr(all_tests, "ROOT", tmp_path)
    monkeypatch.setattr(all_tests, "RESULTS", tmp_path / "r.jsonl")
    monkeypatch.setattr(all_tests, "test_files", lambda: ["tests/test_it.py"])
    monkeypatch.setenv("PYTHONPATH", str(results.ROOT))
    monkeypatch.setattr(sys, "argv", ["all", "--without-long", f"--again={limit}", "--", "-p", "no:cacheprovider"])

    assert all_tests.main() == 1 - limit
    assert (tmp_path / "runs").read_text() == "ab" + "b" * limit
    assert ("again alone:\ntests/test_it.py::test_b\n    AssertionError: too busy" in capsys.readouterr().out) == limit


def test_uncommitted_contents_are_other_code(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "new.py").write_text("one")
    before = results.code(tmp_path)
    assert results.code(tmp_path) == before
    (tmp_path / "new.py").write_text("two")
    assert results.code(tmp_path) != before


def run(directory: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--results=r.jsonl", *options]
    environment = {"PYTHONPATH": str(all_tests.ROOT)}
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    return result.stdout.splitlines()[-1]


def in_project(directory: Path, tests: str) -> None:
    (directory / "pytest.ini").write_text("[pytest]")
    (directory / "conftest.py").write_text(
        "from tests.support import results\n"
        "pytest_addoption = results.add_options\n"
        "def pytest_configure(config): config.pluginmanager.register(results.Results(config))\n"
    )
    (directory / "test_it.py").write_text(tests)


def test_interrupted_run_continues(tmp_path: Path) -> None:
    passes, fails = "def test_a(): pass", "def test_b(): assert 0"
    lasts_long = "def test_c(): results.time = SimpleNamespace(time=lambda: 1e99)"
    imports = "from types import SimpleNamespace; from tests.support import results"
    in_project(tmp_path, "\n".join([imports, passes, fails, lasts_long, "def test_d(): pass"]))
    assert "1 failed, 2 passed, 1 skipped" in run(tmp_path, "--minutes=60")
    assert "1 failed, 1 passed, 2 deselected" in run(tmp_path, "--resume")
    assert results.read(tmp_path / "r.jsonl").passed == {f"test_it.py::test_{name}" for name in "acd"}
    (tmp_path / "r.jsonl").write_text('{"code": "other"}\n{"id": "test_it.py::test_a", "outcome": "passed"}\n')
    assert "1 failed, 3 passed" in run(tmp_path, "--resume")


def test_resumed_run_keeps_earlier_failures(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(f'{{"code": "{results.code()}"}}\n{{"id": "earlier", "outcome": "failed"}}\n')
    in_project(tmp_path, "def test_a(): pass")
    assert "1 passed" in run(tmp_path, "--resume")
    assert results.read(file).last.keys() == {"earlier", "test_it.py::test_a"}
