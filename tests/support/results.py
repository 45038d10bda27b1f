"""Test results in a file, a time limit, and a resumed run: pytest's options `--results`, `--minutes`, `--resume`.

`--results FILE` appends a JSON line per test: its id, outcome, seconds and error. With `--resume`, tests that passed in
FILE are deselected, so an interrupted run continues. The file's first line names the commit and a digest of the
uncommitted changes: results of other code are discarded.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
NO_TIME = "no time left (--minutes)"
_ERROR_CHARACTERS = 2000


class Stored(NamedTuple):
    """The contents of a file of results. `last`: the last result of each test, by its id."""

    code: str | None
    last: dict[str, dict[str, Any]]

    @property
    def passed(self) -> frozenset[str]:
        return frozenset(test for test, result in self.last.items() if result["outcome"] == "passed")


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("results")
    group.addoption("--results", metavar="FILE", type=Path, help="append a JSON line per test to FILE")
    group.addoption("--resume", action="store_true", help="leave out what passed in --results, for the same code")
    group.addoption("--minutes", type=float, help="start no test after so many minutes")


def git(*arguments: str, root: Path = ROOT) -> str:
    """The output of git; empty if it fails."""
    return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=False).stdout


def code(root: Path = ROOT) -> str:
    """The commit, and a digest of the uncommitted changes."""
    changes = hashlib.sha256(git("diff", "HEAD", root=root).encode())
    for path in git("ls-files", "--others", "--exclude-standard", "-z", root=root).split("\0")[:-1]:
        changes.update(path.encode() + (root / path).read_bytes())
    return f"{git('rev-parse', 'HEAD', root=root).strip()} {changes.hexdigest()[:12]}"


def read(file: Path) -> Stored:
    of_code, last = None, {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # incomplete
            continue
        of_code = entry.get("code", of_code)
        if "id" in entry:
            last[entry["id"]] = entry
    return Stored(of_code, last)


class Results:
    """The process with the terminal writes the file. Each process that runs tests observes the time limit."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._file: Path | None = config.getoption("--results")
        self._seconds: dict[str, float] = {}
        self._failed: dict[str, str] = {}
        self._skipped: dict[str, str] = {}
        self._passed: frozenset[str] = frozenset()
        worker = getattr(config, "workerinput", None)
        minutes = config.getoption("--minutes")
        self._ends_at = float("inf") if minutes is None else time.time() + 60 * minutes
        if worker is not None:
            self._file = None
            self._ends_at, self._passed = worker["ends_at"], frozenset(worker["passed"])
        elif self._file is not None:
            self._begin(self._file)

    def _begin(self, file: Path) -> None:
        of_code, stored = code(), read(file)
        if self._config.getoption("--resume") and stored.code == of_code:
            self._passed = stored.passed
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"code": of_code}) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["ends_at"], node.workerinput["passed"] = self._ends_at, sorted(self._passed)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if item.nodeid in self._passed]
        items[:] = [item for item in items if item.nodeid not in self._passed]
        config.hook.pytest_deselected(items=left_out)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.time() > self._ends_at:
            pytest.skip(NO_TIME)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(self._config, "workerinput"):
            return
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._failed.setdefault(report.nodeid, crash.message if crash else report.longreprtext)
        elif report.skipped:
            self._skipped[report.nodeid] = "no time" if NO_TIME in str(report.longrepr) else "skipped"
        if report.when != "teardown":
            return
        outcome = "failed" if report.nodeid in self._failed else self._skipped.get(report.nodeid, "passed")
        if self._file is not None:
            line = {"id": report.nodeid, "outcome": outcome, "seconds": round(self._seconds[report.nodeid], 2)}
            if outcome == "failed":
                line["error"] = self._failed[report.nodeid][:_ERROR_CHARACTERS]
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")
