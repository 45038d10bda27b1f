"""Results of tests in a file, a time limit, and a resumed run: pytest's options `--results`, `--minutes`, `--resume`.

`--results FILE` appends a JSON line per test: its id, outcome and seconds. With `--resume`, tests that passed in FILE
are deselected, so a run that was interrupted continues. The file's first line names the commit and a digest of the
uncommitted changes: results of other code are discarded.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

NO_TIME = "no time left (--minutes)"


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("results")
    group.addoption("--results", metavar="FILE", type=Path, help="append a JSON line per test to FILE")
    group.addoption("--resume", action="store_true", help="leave out what passed in --results, for the same code")
    group.addoption("--minutes", type=float, help="start no test after so many minutes")


def code() -> str:
    """The commit, and a digest of what is not committed."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], capture_output=True, check=False).stdout

    changes = git("diff", "HEAD") + git("ls-files", "--others", "--exclude-standard")
    return f"{git('rev-parse', 'HEAD').decode().strip()} {hashlib.sha256(changes).hexdigest()[:12]}"


def passed_in(file: Path, of_code: str) -> frozenset[str]:
    """Ids of the tests that passed in a file of results; none if it is of other code, or absent."""
    lines = file.read_text().splitlines() if file.is_file() else []
    results = []
    for line in lines:
        try:
            results.append(json.loads(line))
        except ValueError:  # cut off
            continue
    if not results or results[0].get("code") != of_code:
        return frozenset()
    last = {each["id"]: each["outcome"] for each in results[1:] if "id" in each}
    return frozenset(test for test, outcome in last.items() if outcome == "passed")


class Results:
    """The process with the terminal writes the file. Each process that runs tests observes the time limit."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._file: Path | None = config.getoption("--results")
        self._started = time.time()
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        self._skipped: dict[str, str] = {}
        self.outcomes: Counter[str] = Counter()
        self._passed: frozenset[str] = frozenset()
        worker = getattr(config, "workerinput", None)
        minutes = config.getoption("--minutes")
        self._ends_at = float("inf") if minutes is None else self._started + 60 * minutes
        if worker is not None:
            self._file = None
            self._ends_at, self._passed = worker["ends_at"], frozenset(worker["passed"])
        elif self._file is not None:
            self._begin(self._file)

    def _begin(self, file: Path) -> None:
        of_code = code()
        self._passed = passed_in(file, of_code) if self._config.getoption("--resume") else frozenset()
        if not self._passed:
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
            self._failed.add(report.nodeid)
        elif report.skipped:
            self._skipped[report.nodeid] = "no time" if NO_TIME in str(report.longrepr) else "skipped"
        if report.when != "teardown":
            return
        outcome = "failed" if report.nodeid in self._failed else self._skipped.get(report.nodeid, "passed")
        self.outcomes[outcome] += 1
        if self._file is not None:
            line = {"id": report.nodeid, "outcome": outcome, "seconds": round(self._seconds[report.nodeid], 2)}
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")
