"""Run all tests, in one or several runs: `make test-all`, and in `.ci/run` what fits its time limit after `make test`.

Passed tests are recorded in build/test-all.jsonl. An interrupted run continues there until the code changes. First come
the test files for areas that changed since `--base`, then the others, shuffled by the commit so that a time limit cuts
off different files each time. The long forms (marker soak) come last.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.support import results

ROOT = results.ROOT
RESULTS = ROOT / "build" / "test-all.jsonl"
QUICK = ROOT / "tests" / "quick.txt"
#: Duration of the longest soak test.
_LONG_FORM_MINUTES = 15
_ERROR_LINES = 5
#: pytest's exit codes.
TESTS_FAILED, INTERRUPTED, NO_TESTS_COLLECTED = 1, 2, 5
_COVERAGE = ("--cov", "--cov-append", "--cov-report=", "--cov-fail-under=0")
_I = "tests/integration/test_"
#: Paths of the product, and the test files or folders that a change there needs. The first match counts. Each file that
#: is not in `quick.txt` is in at least one row (`tests/unit/test_all_tests.py`).
AREAS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("client/fencepost/spark", "spark_jobs"): (
        f"{_I}spark",
        "tests/spark_faults",
        "tests/sink_simulation",
        "tests/unit/spark_sink",
    ),
    ("client", "contract", "examples"): (
        f"{_I}contract_cases",
        f"{_I}recipes",
        f"{_I}loader_sources",
        f"{_I}client_",
        f"{_I}transactional_writer",
        f"{_I}atomic_clients",
        f"{_I}examples",
        f"{_I}kv_store",
        f"{_I}transfer",
        "tests/expansion/test_library",
        "tests/expansion/test_example",
        f"{_I}docs",
        f"{_I}remove",
        f"{_I}testcontainers",
    ),
    (
        "proxy/fencepost_proxy/expansion",
        "proxy/fencepost_proxy/services/groups",
        "proxy/fencepost_proxy/services/expan",
    ): (
        "tests/order_proof",
        "tests/expansion",
        f"{_I}groups",
        f"{_I}group_rights",
        f"{_I}share_groups",
        f"{_I}partition_",
        f"{_I}in_doubt_expansion",
        f"{_I}replaced_topics",
    ),
    ("proxy/fencepost_proxy/services/homes", "proxy/fencepost_proxy/addresses"): (f"{_I}homes",),
    ("proxy/fencepost_proxy/transactions", "proxy/fencepost_proxy/session/transactions"): (
        f"{_I}atomic_",
        f"{_I}checked_transactions",
        f"{_I}commits_and_moves",
        f"{_I}kip98_",
        f"{_I}stuck_transactions",
        f"{_I}idempoten",
        "tests/eos_proof",
    ),
    ("proxy/fencepost_proxy/sequencer", "policies"): (
        f"{_I}races",
        f"{_I}in_doubt",
        f"{_I}leader_changes",
        f"{_I}cut_off_leader",
        f"{_I}fenced_batches",
        f"{_I}producer_state",
        f"{_I}lost_records",
        f"{_I}bypassing_writers",
        f"{_I}claims",
        f"{_I}several_proxies",
        f"{_I}restarts",
        f"{_I}rolling_upgrade",
        f"{_I}upgrade",
        f"{_I}idempotent_producers",
        "tests/soak",
        "tests/rolling_restart",
    ),
    ("proxy/fencepost_proxy/session", "proxy/fencepost_proxy/wire", "native"): (
        f"{_I}equivalence",
        f"{_I}newer_clients",
        f"{_I}api_walk",
        f"{_I}control_messages",
        f"{_I}bad_input",
        f"{_I}malformed_records",
        f"{_I}compressed_forms",
        f"{_I}misbehaving",
        f"{_I}hostile_",
        f"{_I}internal_topics",
        f"{_I}java_",
        f"{_I}other_software",
        f"{_I}foreign",
        f"{_I}kafka_releases",
        "tests/client_matrix",
        f"{_I}races",
        "tests/fuzz",
        "tests/native_mutants",
    ),
    ("proxy/fencepost_proxy/topics",): (
        f"{_I}state_topic",
        f"{_I}rights",
        f"{_I}idempotence_levels",
        f"{_I}replaced_topics",
        f"{_I}broker_settings",
    ),
    (
        "proxy/fencepost_proxy/cluster",
        "proxy/fencepost_proxy/observability",
        "proxy/fencepost_proxy/preflight",
        "proxy/fencepost_proxy/server.py",
        "proxy/fencepost_proxy/services",
        "proxy/fencepost_proxy/transport",
        "proxy/fencepost_proxy/config",
        "proxy/fencepost_proxy/cli",
        "deploy",
        "locks",
    ): (
        f"{_I}reloading",
        f"{_I}help_examples",
        f"{_I}proxy_command",
        f"{_I}control_client",
        f"{_I}cluster_changes",
        f"{_I}sasl_ssl",
        f"{_I}tls_keys",
        f"{_I}status_page",
        f"{_I}check",
        f"{_I}verify_broker",
        f"{_I}compose",
        f"{_I}distribution",
        f"{_I}added_time",
        "tests/sidecars",
        "tests/monitoring",
        "tests/rolling_restart",
    ),
    ("release", "hatch_build.py"): (f"{_I}release", f"{_I}distribution"),
    ("proxy/fencepost_dev", "benchmarks", "tests/support", "tests/kit"): (
        f"{_I}embedded_kafka",
        f"{_I}dev_",
        f"{_I}demo",
        f"{_I}bench",
        f"{_I}fake_cluster",
        "tests/conformance",
        "tests/simulation",
    ),
}


def test_files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def quick_files() -> frozenset[str]:
    return frozenset(file for file in test_files() if file.startswith(tuple(QUICK.read_text().split())))


def in_order(files: Sequence[str], changed: Iterable[str], seed: str) -> list[str]:
    """Sort `files`: first those that the changed paths need."""
    needed: set[str] = set()
    for path in changed:
        tests = next((tests for product, tests in AREAS.items() if path.startswith(product)), ())
        needed.update(file for file in files if file == path or file.startswith(tests))
    others = [file for file in files if file not in needed]
    random.Random(seed).shuffle(others)
    return [*sorted(needed), *others]


def _changed(base: str | None) -> list[str]:
    """Paths that differ from `base`: by default the branch point from origin/main, else the last 50 commits."""
    if base is None:
        recent = results.git("rev-list", "--max-count=51", "HEAD").split()
        fork = results.git("merge-base", "HEAD", "origin/main").strip()
        base = fork if fork not in ("", *recent[:1]) else "".join(recent[-1:])
    return results.git("diff", "--name-only", base).split()


def summary(last: Mapping[str, Mapping[str, Any]]) -> str:
    """One page about the last result of each test: failures per folder, and the ten slowest tests."""
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    for each in last.values():
        folder = each["id"].split("/")[1]
        folders[folder][each["outcome"]] += 1
        seconds[folder] += each["seconds"]
    columns = ("passed", "failed", "skipped", "no time")
    rows = [f"{'':20}" + "".join(f"{column:>9}" for column in (*columns, "seconds"))]
    for folder, counts in sorted(folders.items()):
        rows.append(f"{folder:20}" + "".join(f"{counts[c]:9}" for c in columns) + f"{seconds[folder]:9.0f}")
    slowest = sorted(last.values(), key=lambda each: -each["seconds"])[:10]
    rows += ["", "slowest:", *(f"{each['seconds']:7.1f} s  {each['id']}" for each in slowest)]
    return "\n".join([*rows, *listed("failed:", failures(last))])


def failures(last: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [each for each in last.values() if each["outcome"] == "failed"]


def listed(title: str, failed: Iterable[Mapping[str, Any]]) -> list[str]:
    """Each failed test and the first lines of its error."""
    lines: list[str] = []
    for each in failed:
        lines += [each["id"], *(f"    {line}" for line in each.get("error", "").splitlines()[:_ERROR_LINES])]
    return ["", title, *lines] if lines else []


def _run(markers: str, options: Sequence[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-m", markers, f"--results={RESULTS}", "--resume", *options]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    return 0 if status == NO_TESTS_COLLECTED else status


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.all", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, help="start no test after so many minutes")
    parser.add_argument("--without-quick", action="store_true", help="leave out what `make test` runs")
    parser.add_argument("--without-long", action="store_true", help="leave out the long forms (marker soak)")
    parser.add_argument("--base", metavar="REV", help="order tests by what changed since REV")
    parser.add_argument("--coverage", action="store_true", help="measure coverage, and report it at the end")
    parser.add_argument(
        "--again", metavar="N", type=int, default=0, help="if at most N tests fail, run them again, alone; lists them"
    )
    parser.add_argument("options", nargs="*", help="options of pytest, after --")
    given = parser.parse_args()
    files = [file for file in test_files() if not (given.without_quick and file in quick_files())]
    code = results.code()
    ordered = in_order(files, _changed(given.base), code)
    ends_at = float("inf") if given.minutes is None else time.monotonic() + 60 * given.minutes
    if given.coverage and results.read(RESULTS).code != code:
        _coverage("erase")
    status, once = 0, []
    for markers in ("not soak",) if given.without_long else ("not soak", "soak"):
        left = (ends_at - time.monotonic()) / 60
        if markers == "soak" and left < _LONG_FORM_MINUTES:
            print("no time left for the long forms of tests", file=sys.stderr)
            break
        limit = () if given.minutes is None else (f"--minutes={left}",)
        result = _run(markers, [*limit, *(_COVERAGE if given.coverage else ()), *given.options, *ordered])
        failed = failures(results.read(RESULTS).last)
        if result == TESTS_FAILED and len(failed) <= given.again:
            result = _run(markers, [each["id"] for each in failed])
            once += failed
        status = status or result
        if result == INTERRUPTED:
            break
    again = listed("failed at first, and were run again alone:", once)
    print("\n".join([summary(results.read(RESULTS).last), *again]))
    return status or (_coverage("report", "--skip-covered") if given.coverage else 0)


def _coverage(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
