"""`python -m tests.kill_matrix`: which fast tests detect which defects? Writes tests/kill_matrix.md.

The defects are those of the simulation and of the fuzzer, and `--generated` ones: a condition is negated, a comparison
changed, `and` exchanged with `or`, or a statement left out. Each runs in a fork of a process that has collected all
tests, with those that call the changed function. Of a test function's cases, none runs after one has failed. A
generated defect that a row of the contract detects needs no other test.

Results are kept in build/: an interrupted run continues there until the code changes.

Seeded defects of the modelled cluster are not counted: no fast test contains it.

A file that never detects a defect alone may repeat others. It stays if it tests what users read, or what no defect
here changes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import os
import resource
import signal
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def _digest() -> str:
    """Of the code: what is known of other code does not count."""
    files = sorted(path for folder in ("proxy", "policies", "tests") for path in (ROOT / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


_DIRECTORY = ROOT / "build" / "kill_matrix" / _digest()
RESULTS, CALLS = _DIRECTORY / "results.jsonl", _DIRECTORY / "calls.json"
PAGE = Path(__file__).with_suffix(".md")
SUITES = ("tests/contract", "tests/unit", "tests/protocol")
#: Tests that call no code of the proxy, or start processes.
_LEFT_OUT = "cli_", "client_", "deploy_", "docs_", "recipes_", "release", "spark", "java", "stopped", "demo", "bench"
#: Where defects are generated; `policies` is `fencepost_policies`.
PACKAGES = ("session", "sequencer", "expansion", "transactions", "topics", "policies")
#: Used with native code alone, which is off here: `tests/native_mutants` and `tests/unit/test_fast_path.py`.
NATIVE_ONLY = ("sequencer.permits.", "session.relay.native_path.")
#: Generated defects that change nothing, without the line: why.
EQUIVALENT = {
    "session.relay.fast_path.FastPath.take_up: if length < REQUEST_BYTES_MIN or end > size or length > "
    "services.frame_bytes_max: → if length < REQUEST_BYTES_MIN or end > size or length >= services.frame_byt": (
        "the general path relays what the fast path leaves"
    ),
    "session.relay.fast_path.FastPath.take_down: if made: → if not made:": "used with native code alone",
    "sequencer.in_doubt.Lookups._refusal: elif pending.append.contradiction is None and actual < "
    "(pending.append.expected_base_offset or 0): → elif pending.append.contradiction is None and actual <= (p": (
        "an expected offset that holds is no mismatch"
    ),
}
DEFECT_SECONDS = 120
#: Longer than any of the tests takes: the defect makes it loop.
TEST_CPU_SECONDS = 6.0
SEEDED, GENERATED = "seeded", "generated"
_SLOWEST_TEST_SECONDS = 3.0
_MEMORY_BYTES = 4 << 30
_NAME_LENGTH = 200


@dataclass(frozen=True)
class Defect:
    """`calls`: the functions of which a test must call one, as `file:first line`; None: any test of the file's code."""

    name: str
    kind: str
    calls: frozenset[str]
    files: frozenset[str]
    live: Callable[[], AbstractContextManager[None]]

    def needs(self, called: set[str]) -> bool:
        return bool(self.calls & called) or any(each.rpartition(":")[0] in self.files for each in called)


def place(code: CodeType) -> str:
    return f"{os.path.relpath(code.co_filename, ROOT)}:{code.co_firstlineno}"


def function_of(value: Any) -> FunctionType | None:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


def seeded() -> Iterator[Defect]:
    # Not before pytest, which changes the modules that it imports.
    from tests.fuzz.defects import DEFECTS  # noqa: PLC0415
    from tests.simulation.mutants import MUTANTS  # noqa: PLC0415

    for mutant in (*MUTANTS, *(mutant for mutant, _ in DEFECTS)):
        calls, files = set(), set()
        for change in mutant.changes:
            holder, name, _ = change()
            function = function_of(vars(holder)[name])
            if function is not None:
                calls.add(place(function.__code__))
            else:
                source = holder if isinstance(holder, ModuleType) else sys.modules[holder.__module__]
                files.add(os.path.relpath(source.__file__ or "", ROOT))
        yield Defect(mutant.name, SEEDED, frozenset(calls), frozenset(files), mutant.live)


def generated(called: set[str]) -> Iterator[Defect]:
    """One defect for each place of each function that tests call."""
    for function in _functions():
        name = f"{function.__module__.removeprefix('fencepost_').removeprefix('proxy.')}.{function.__qualname__}"
        if name.startswith(NATIVE_ONLY):
            continue
        if place(function.__code__) in called and not function.__code__.co_freevars:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
            for number in range(sum(1 for _ in changes(tree))):
                changed = ast.parse(textwrap.dedent(inspect.getsource(function)))
                line, apply = list(changes(changed))[number]
                before = ast.unparse(changed)
                apply()
                after = ast.unparse(ast.fix_missing_locations(changed))
                pairs = zip(before.splitlines(), after.splitlines(), strict=False)
                shown = next((f"{old.strip()} → {new.strip()}" for old, new in pairs if old != new), "")
                if f"{name}: {shown}"[:_NAME_LENGTH] in EQUIVALENT:
                    continue
                yield Defect(
                    f"{name} +{line}: {shown}"[:_NAME_LENGTH],
                    GENERATED,
                    frozenset({place(function.__code__)}),
                    frozenset(),
                    lambda function=function, changed=changed: _replaced(function, changed),  # type: ignore[misc]
                )


@contextmanager
def _replaced(function: FunctionType, tree: ast.Module) -> Iterator[None]:
    """The fork ends afterwards: nothing is undone. References to the function execute the changed code too."""
    scope: dict[str, Any] = {}
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    flags = function.__code__.co_flags & __import__("__future__").annotations.compiler_flag
    exec(compile(tree, f"<{function.__name__} with a defect>", "exec", flags, dont_inherit=True), {}, scope)
    function.__code__ = scope[function.__name__].__code__
    yield


def _functions() -> Iterator[FunctionType]:
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(("fencepost_policies", *(f"fencepost_proxy.{each}" for each in PACKAGES))):
            continue
        holders = [module, *(each for each in vars(module).values() if isinstance(each, type))]
        for holder in holders:
            for value in vars(holder).values():
                function = function_of(value)
                if function is not None and function.__module__ == name and not hasattr(value, "__wrapped__"):
                    owner = function.__qualname__.rpartition(".")[0]
                    if owner == (holder.__qualname__ if isinstance(holder, type) else ""):
                        yield function


_OTHER: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
#: A time equals its limit by chance only.
_NEGATED = _OTHER | {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}


def _is_of_time(comparison: ast.Compare) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "now" for each in ast.walk(comparison))


def _is_initial_constant(function: ast.AST, statement: ast.stmt) -> bool:
    """A test that reads the attribute fails without it."""
    is_constant = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
    return is_constant and isinstance(function, ast.FunctionDef) and function.name == "__init__"


def changes(tree: ast.Module) -> Iterator[tuple[int, Callable[[], None]]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            negated = ast.UnaryOp(ast.Not(), node.test)
            if not isinstance(node.test, ast.Compare):
                yield node.test.lineno, lambda node=node, negated=negated: setattr(node, "test", negated)  # type: ignore[misc]
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            others = _NEGATED if _is_of_time(node) else _OTHER
            other = others[type(node.ops[0])]()
            yield node.lineno, lambda node=node, other=other: setattr(node, "ops", [other])  # type: ignore[misc]
        if isinstance(node, ast.BoolOp):
            operator = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield node.lineno, lambda node=node, operator=operator: setattr(node, "op", operator)  # type: ignore[misc]
        for field in ("body", "orelse"):
            statements = getattr(node, field, None)
            if not isinstance(statements, list):
                continue
            for index, statement in enumerate(statements):
                if _is_initial_constant(node, statement) or ast.unparse(statement).endswith(".take_over()"):
                    continue  # the second one does nothing without native code
                if isinstance(statement, (ast.Expr, ast.Assign, ast.AugAssign)):
                    if isinstance(statement, ast.Expr) and isinstance(statement.value, (ast.Constant, ast.Yield)):
                        continue
                    at = slice(index, index + 1)
                    yield statement.lineno, lambda lines=statements, at=at: lines.__setitem__(at, [ast.Pass()])  # type: ignore[misc]


def name_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


class Matrix:
    """Runs what pytest collected: once to see what each test calls, then once for each defect."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid.partition("[")[0])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        calls = self._calls(session)
        if not self._options.report:
            self._run_defects(session, calls)
        PAGE.write_text(page(calls, {name_of(item) for item in session.items}), "utf-8")
        return True

    def _calls(self, session: pytest.Session) -> dict[str, set[str]]:
        """Test (with its parameters) → the functions that it calls. Tests that fail or take long are left out."""
        if not CALLS.exists():
            process = os.fork()
            if not process:
                CALLS.write_text(json.dumps(self._traced(session)), "utf-8")
                os._exit(0)
            os.waitpid(process, 0)
        return {test: set(called) for test, called in json.loads(CALLS.read_text("utf-8")).items()}

    def _traced(self, session: pytest.Session) -> dict[str, list[str]]:
        calls, ours = {}, (f"{ROOT}/proxy/", f"{ROOT}/policies/", f"{ROOT}/tests/simulation/")
        for item in session.items:
            seen: set[CodeType] = set()

            def note(frame: FrameType, event: str, _: Any, seen: set[CodeType] = seen) -> None:
                if event == "call":
                    seen.add(frame.f_code)

            started = time.process_time()
            sys.setprofile(note)
            try:
                self._run(item)
            finally:
                sys.setprofile(None)
            called = sorted(place(code) for code in seen if code.co_filename.startswith(ours))
            if called and time.process_time() - started < _SLOWEST_TEST_SECONDS and name_of(item) not in self._failed:
                calls[item.nodeid] = called
        return calls

    def _run(self, item: pytest.Item) -> None:
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)

    def _run_defects(self, session: pytest.Session, calls: dict[str, set[str]]) -> None:
        ends_at = time.monotonic() + self._options.minutes * 60
        done = {row["defect"] for row in rows()}
        by_hand = list(seeded())
        made = list(generated(set().union(*calls.values())))
        made = [defect for defect in made if defect.name.startswith(tuple(self._options.packages.split(",")))]
        # In the same order whatever else is generated.
        made.sort(key=lambda defect: hashlib.sha256(f"{self._options.seed} {defect.name}".encode()).digest())
        items = {item.nodeid: item for item in session.items}
        for defect in (*by_hand, *made[: self._options.generated]):
            if time.monotonic() > ends_at:
                return
            if defect.name not in done:
                chosen = [items[test] for test, called in calls.items() if test in items and defect.needs(called)]
                self._run_defect(defect, chosen)

    def _run_defect(self, defect: Defect, chosen: list[pytest.Item]) -> None:
        started, found = time.monotonic(), _DIRECTORY / f"{os.getpid()}.txt"
        found.write_text("", "utf-8")
        process = os.fork()
        if not process:
            try:
                os.nice(max(0, 19 - os.nice(0)))
                resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
                signal.alarm(DEFECT_SECONDS)
                self._in_fork(defect, chosen, found)
            finally:
                os._exit(1)
        _, status = os.waitpid(process, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            print(f"{defect.name} does not apply", file=sys.stderr, flush=True)
            return
        lines = found.read_text("utf-8").splitlines()
        killed = [line[2:] for line in lines if line.startswith("x ")]
        if os.WIFSIGNALED(status) and lines and lines[-1].startswith("> "):
            killed.append(lines[-1][2:])  # it hangs, or ends the process
        row = {
            "defect": defect.name,
            "kind": defect.kind,
            "modelled": all(each.startswith("tests/simulation") for each in defect.calls | defect.files),
            "tests": len(chosen),
            "killed": sorted(set(killed)),
            "seconds": round(time.monotonic() - started, 1),
        }
        with RESULTS.open("a", encoding="utf-8") as results:
            print(json.dumps(row), file=results)
        print(f"{len(killed):>5} of {len(chosen):>5} tests  {defect.name}", file=sys.stderr, flush=True)

    def _in_fork(self, defect: Defect, chosen: list[pytest.Item], found: Path) -> None:
        self._failed.clear()
        with found.open("a", encoding="utf-8", buffering=1) as results, defect.live():
            for item in chosen:
                name = name_of(item)
                if name not in self._failed:
                    print("> " + name, file=results)
                    signal.setitimer(signal.ITIMER_VIRTUAL, TEST_CPU_SECONDS)  # ends the process
                    self._run(item)
                    if name in self._failed:
                        print("x " + name, file=results)
                        if defect.kind == GENERATED and name.startswith(SUITES[0]):
                            break
            os._exit(0)


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()] if RESULTS.exists() else []


def page(calls: Iterable[str], present: set[str]) -> str:
    """`present`: the test functions that there are now."""
    tests, alone, kills = defaultdict(set), defaultdict(set), defaultdict(set)
    files_alone: dict[str, set[str]] = defaultdict(set)
    for test in calls:
        name = test.partition("[")[0]
        if name not in present:
            continue
        tests[name.partition("::")[0]].add(name)
    results = [row | {"killed": sorted(present & {*row["killed"]})} for row in rows()]
    for row in results:
        files = {name.partition("::")[0] for name in row["killed"]}
        for name in row["killed"]:
            kills[name].add(row["defect"])
        if len(row["killed"]) == 1:
            alone[row["killed"][0]].add(row["defect"])
        if len(files) == 1:
            files_alone[files.pop()].add(row["defect"])
    lines = [
        "# Which fast tests detect which defects",
        "",
        "Written by `python -m tests.kill_matrix`. *Alone*: defects that no other test function or file detects. A",
        "generated defect that `test_rows.py` detects is not tried on the others.",
        "",
    ]
    for kind in (SEEDED, GENERATED):
        of_kind = [row for row in results if row["kind"] == kind and not row["modelled"]]
        detected = sum(bool(row["killed"]) for row in of_kind)
        lines.append(f"- {kind} defects: {len(of_kind)}, detected by fast tests: {detected}")
    lines += ["", "| file | lines | functions | that detect | alone | file alone |", "|---|---|---|---|---|---|"]
    for file, names in sorted(tests.items()):
        count = len((ROOT / file).read_text("utf-8").splitlines())
        detecting, only = sum(bool(kills[name]) for name in names), sum(bool(alone[name]) for name in names)
        lines.append(f"| `{file}` | {count} | {len(names)} | {detecting} | {only} | {len(files_alone[file])} |")
    lines += ["", "Seeded defects, and the functions that detect them:", ""]
    for row in results:
        if row["kind"] == SEEDED:
            by = "the simulation, of which it is a part" if row["modelled"] else "only the simulation or the fuzzer"
            first = ", ".join(f"`{name.removeprefix('tests/')}`" for name in row["killed"][:2]) or by
            more = f" and {len(row['killed']) - 2} more" if len(row["killed"]) > 2 else ""
            lines.append(f"- `{row['defect']}`: {first}{more}")
    lines += ["", "Generated defects that no fast test detects:", ""]
    lines += [f"- `{row['defect']}`" for row in results if row["kind"] == GENERATED and not row["killed"]]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kill_matrix")
    parser.add_argument("--generated", type=int, default=600, help="how many generated defects (600)")
    parser.add_argument("--packages", default=",".join(PACKAGES), help="where, by commas (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument("--minutes", type=float, default=40, help="when to stop (40)")
    parser.add_argument("--report", action="store_true", help="only write the page")
    options = parser.parse_args()
    os.environ["FENCEPOST_NATIVE"] = "off"
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    os.chdir(ROOT)
    _DIRECTORY.mkdir(parents=True, exist_ok=True)
    unit = [*ROOT.glob("tests/unit/test_*.py"), ROOT / "tests/unit/spark_sink", ROOT / "tests/unit/keystores"]
    left_out = [path for path in unit if path.is_dir() or path.name.removeprefix("test_").startswith(_LEFT_OUT)]
    arguments = ["-q", "-p", "no:cacheprovider", "-o", "timeout=0"]
    arguments += ["-m", "not kafka and not soak and not spark and not docker"]
    return int(
        pytest.main([*arguments, *(f"--ignore={path}" for path in left_out), *SUITES], plugins=[Matrix(options)])
    )


if __name__ == "__main__":
    sys.exit(main())
