"""A coverage-guided fuzzer for programs of JSON operations. It mutates programs and keeps those with new coverage.

A *target* generates and executes programs. It fails with a `Failure`, any other exception, or a call of the code under
test longer than `CALL_SECONDS` of the thread's CPU time. New coverage is a new pair of consecutive lines in the
target's modules, or a new feature (a state that the target reports).

All choices come from one `random.Random`: the same seed and number of inputs give the same programs, bytes and digest.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar, Protocol, TypeVar

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"

T = TypeVar("T")
Op = list[Any]
_OPS_MAX = 60
_NEW_SHARE = 0.15
_MINIMISE_RUNS_MAX = 600
#: While the event loop runs one call, all connections wait.
CALL_SECONDS = 0.05
#: Repetitions of a program that is too slow.
_SLOW_RUNS = 3
#: Duration of the work in `_slowdown` on the quiet machine where `CALL_SECONDS` applies.
_REFERENCE_SECONDS = 0.008


class Failure(Exception):
    """A broken invariant. Failures with the same `invariant` are the same."""

    def __init__(self, invariant: str, detail: object = "") -> None:
        super().__init__(f"{invariant}: {detail}" if detail != "" else invariant)
        self.invariant = invariant


class TooSlow(Failure):
    def __init__(self, seconds: float) -> None:
        super().__init__("a call takes too long", f"{seconds * 1000:.0f} ms of CPU time")


@dataclass
class Program:
    setup: dict[str, Any]
    ops: list[Op]

    def to_json(self) -> str:
        return json.dumps({"setup": self.setup, "ops": self.ops}, separators=(",", ":"))

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Program:
        return cls(document["setup"], document["ops"])


class Target(Protocol):
    """`modules` – files, relative to the repository, whose lines count. `execute` returns a transcript."""

    name: str
    modules: tuple[str, ...]

    def setup(self, rng: random.Random) -> dict[str, Any]: ...
    def op(self, rng: random.Random) -> Op: ...
    def execute(self, program: Program, observed: set[Hashable], tracer: Tracer | Untraced) -> bytes: ...


@dataclass
class Found:
    signature: str
    message: str
    program: Program
    shrunk_from: int


@dataclass
class Result:
    target: str
    seed: int
    inputs: int = 0
    events: int = 0
    seconds: float = 0.0
    kept: int = 0
    lines: int = 0
    lines_all: int = 0
    pairs: int = 0
    features: int = 0
    digest: str = ""
    slowest_seconds: float = 0.0
    slowest: Program | None = None
    failures: list[Found] = field(default_factory=list)


# --- coverage ---------------------------------------------------------------------------------------------------------


class Tracer:
    """Records pairs of consecutive lines in given files."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._requested = {str(ROOT / module) for module in modules}
        self._numbers: dict[CodeType, int | None] = {}
        self.pairs: set[Hashable] = set()
        self.slowest_seconds = 0.0
        self._last = 0

    def _number(self, code: CodeType) -> int | None:
        """A number for a code object that is the same in every run: from names, not addresses."""
        number = None
        if code.co_filename in self._requested:
            name = f"{code.co_filename.removeprefix(str(ROOT))}:{code.co_firstlineno}:{code.co_name}"
            number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=5).digest(), "big") << 20
        self._numbers[code] = number
        return number

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        number = self._numbers[code] if code in self._numbers else self._number(code)
        if number is None:
            return None
        pairs = self.pairs

        def line(frame: FrameType, event: str, arg: object) -> Any:
            if event == "line":
                here = number + frame.f_lineno
                pairs.add((self._last, here))
                self._last = here
            return line

        return line

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call the code under test with tracing. Nothing else is traced, because tracing is slow."""
        before, started = sys.gettrace(), time.thread_time()
        sys.settrace(self)
        try:
            return function(*args)
        finally:
            sys.settrace(before)
            self.slowest_seconds = max(self.slowest_seconds, time.thread_time() - started)

    def start(self) -> None:
        self.pairs = set()
        self.slowest_seconds = 0.0
        self._last = 0


class Untraced:
    """The same without tracing. `slowest_seconds` – CPU time of the slowest call."""

    pairs: ClassVar[set[Hashable]] = set()

    def __init__(self) -> None:
        self.slowest_seconds = 0.0

    def call(self, function: Callable[..., T], *args: Any) -> T:
        gc.disable()  # a collection would scan everything that the fuzzer keeps
        started = time.thread_time()
        try:
            return function(*args)
        finally:
            self.slowest_seconds = max(self.slowest_seconds, time.thread_time() - started)
            gc.enable()

    def start(self) -> None:
        self.slowest_seconds = 0.0


def lines_of(modules: tuple[str, ...]) -> int:
    """Number of lines with code in functions of these modules."""
    count = 0
    for module in modules:
        path = ROOT / module
        todo = [compile(path.read_text(), str(path), "exec")]
        while todo:
            code = todo.pop()
            if code.co_name not in ("<module>", "<lambda>") and code.co_flags & 0x2:  # a function, not a class body
                count += len({line for _, _, line in code.co_lines() if line and line != code.co_firstlineno})
            todo += [each for each in code.co_consts if isinstance(each, CodeType)]
    return count


# --- generating programs ----------------------------------------------------------------------------------------------


def _copied(ops: list[Op]) -> list[Op]:
    return json.loads(json.dumps(ops))  # type: ignore[no-any-return]


def generate(target: Target, rng: random.Random) -> Program:
    return Program(target.setup(rng), [target.op(rng) for _ in range(rng.choice((3, 8, 15, 30)))])


def mutate(target: Target, rng: random.Random, parent: Program, corpus: list[Program]) -> Program:
    setup, ops = dict(parent.setup), _copied(parent.ops)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(ops) + 1)
        match rng.randrange(9):
            case 0 if ops:
                del ops[at : at + rng.randint(1, 4)]
            case 1 if ops:
                ops[at:at] = _copied(ops[at : at + rng.randint(1, 4)])
            case 2 if ops and at < len(ops):
                ops[at] = target.op(rng)
            case 3 | 4 if ops:
                _tweak(rng, ops[at % len(ops)])
            case 5:
                other = rng.choice(corpus).ops
                start = rng.randrange(len(other) + 1)
                ops[at:] = _copied(other[start:])
            case 6 if len(ops) > 1:
                ops.insert(at % len(ops), ops.pop(rng.randrange(len(ops))))
            case 7 if rng.random() < 0.3:
                setup = target.setup(rng)
            case _:
                ops[at:at] = [target.op(rng) for _ in range(rng.randint(1, 4))]
    del ops[_OPS_MAX:]
    return Program(setup, ops)


def _tweak(rng: random.Random, op: Op) -> None:
    """Replace a number in an operation."""
    numbers: list[tuple[Any, Any]] = []

    def walk(entered: Any) -> None:
        for key, value in entered.items() if isinstance(entered, dict) else enumerate(entered):
            if isinstance(value, bool):
                continue
            if isinstance(value, int):
                numbers.append((entered, key))
            elif isinstance(value, list | dict):
                walk(value)

    walk(op)
    if numbers:
        entered, key = rng.choice(numbers)
        entered[key] = rng.choice(
            (entered[key] + 1, entered[key] - 1, 0, 1, 2, 3, rng.randrange(256), rng.getrandbits(16))
        )


# --- running programs -------------------------------------------------------------------------------------------------


def signature_of(error: Exception) -> str:
    """Identifies a failure: its invariant, or the exception and the line that raised it."""
    if isinstance(error, Failure):
        return error.invariant
    where = "?"
    for frame in traceback.extract_tb(error.__traceback__):
        if "/proxy/fencepost_proxy/" in frame.filename or "/policies/" in frame.filename:
            where = f"{Path(frame.filename).name}:{frame.name}"
    return f"{type(error).__name__} in {where}"


def attempt(
    target: Target, program: Program, observed: set[Hashable], tracer: Tracer | Untraced | None = None
) -> tuple[bytes, Exception | None]:
    try:
        return target.execute(program, observed, tracer or Untraced()), None
    except Exception as error:
        return str(error).encode(), error


def slowest_call(target: Target, program: Program) -> float:
    """CPU seconds of the slowest call; the best of several runs if it is too long."""
    seconds = float("inf")
    for _ in range(_SLOW_RUNS):
        untraced = Untraced()
        attempt(target, Program.from_json(json.loads(program.to_json())), set(), untraced)
        seconds = min(seconds, untraced.slowest_seconds)
        if seconds <= CALL_SECONDS:
            break
    return seconds


def check_time(target: Target, program: Program) -> float:
    """Raise TooSlow. With line tracing (coverage) every call is slow."""
    seconds = slowest_call(target, program)
    if seconds > CALL_SECONDS and sys.gettrace() is None and seconds > CALL_SECONDS * _slowdown():
        raise TooSlow(seconds)
    return seconds


def _slowdown() -> float:
    """The current CPU time of Python work relative to a quiet machine: up to double on a busy one."""
    best = float("inf")
    for _ in range(_SLOW_RUNS):
        started, total = time.thread_time(), 0
        for number in range(100_000):
            total += number * number % 7
        best = min(best, time.thread_time() - started)
    return max(1.0, best / _REFERENCE_SECONDS)


def _failed(target: Target, program: Program) -> Exception | None:
    _, error = attempt(target, program, set())
    if error is None:
        try:
            check_time(target, program)
        except TooSlow as slow:
            return slow
    return error


def minimise(target: Target, program: Program, signature: str, runs_max: int = _MINIMISE_RUNS_MAX) -> Program:
    """Remove operations in ever smaller parts while the failure stays the same."""
    runs = 0

    def fails(setup: dict[str, Any], ops: list[Op]) -> bool:
        nonlocal runs
        runs += 1
        error = _failed(target, Program(setup, _copied(ops)))
        return error is not None and signature_of(error) == signature

    setup, ops = program.setup, program.ops
    size = max(1, len(ops) // 2)
    while size and runs < runs_max:
        at = 0
        while at < len(ops) and runs < runs_max:
            less = ops[:at] + ops[at + size :]
            if fails(setup, less):
                ops = less
            else:
                at += size
        size //= 2
    for index, op in enumerate(ops):
        for smaller in _smaller(op):
            if runs >= runs_max:
                break
            if fails(setup, [*ops[:index], smaller, *ops[index + 1 :]]):
                ops = [*ops[:index], smaller, *ops[index + 1 :]]
    return Program(setup, ops)


def _smaller(op: Op) -> Iterator[Op]:
    """Shorten lists inside an operation."""
    for position, value in enumerate(op):
        if isinstance(value, list):
            for index in range(len(value)):
                yield [*op[:position], [*value[:index], *value[index + 1 :]], *op[position + 1 :]]


def fuzz(
    target: Target,
    seed: int,
    *,
    seconds: float | None = None,
    inputs: int | None = None,
    guided: bool = True,
    minimised: bool = True,
    starting_from: list[Program] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Result:
    """Run until time or inputs are used up. Failures with one signature count once."""
    rng = random.Random(f"{target.name} {seed}")
    tracer = Tracer(target.modules) if guided else Untraced()
    corpus: list[Program] = []
    known: set[Hashable] = set()
    found: dict[str, Found] = {}
    digest = hashlib.sha256()
    result = Result(target.name, seed, lines_all=lines_of(target.modules))
    started = time.monotonic()
    waiting = list(starting_from or ())
    reported_at = started
    slowest_so_far = 0.0
    while (inputs is None or result.inputs < inputs) and (
        seconds is None or time.monotonic() - started < seconds or not result.inputs
    ):
        if waiting:
            program = waiting.pop()
        elif not corpus or rng.random() < _NEW_SHARE:
            program = generate(target, rng)
        else:
            # Prefer new programs: their coverage was explored least.
            newest = corpus[-20:] if rng.random() < 0.4 else corpus
            program = mutate(target, rng, rng.choice(newest), corpus)
        written = program.to_json()
        program = Program.from_json(json.loads(written))
        observed: set[Hashable] = set()
        tracer.start()
        transcript, error = attempt(target, program, observed, tracer)
        observed |= tracer.pairs
        result.inputs += 1
        result.events += len(program.ops)
        digest.update(written.encode())
        digest.update(hashlib.blake2b(transcript).digest())
        program = Program.from_json(json.loads(written))
        if tracer.slowest_seconds > slowest_so_far:
            # Line tracing is slow: rerun without it those that may be the slowest.
            slowest_so_far = tracer.slowest_seconds
            took = slowest_call(target, program)
            if took > result.slowest_seconds:
                result.slowest_seconds, result.slowest = took, program
            if error is None and took > CALL_SECONDS and sys.gettrace() is None:
                error = TooSlow(took)
        if not observed <= known:
            known |= observed
            corpus.append(program)
        if error is not None and (signature := signature_of(error)) not in found:
            message = "".join(traceback.format_exception(error)[-4:])
            report(f"FAILED {target.name} input {result.inputs}: {signature}: {error}")
            small = minimise(target, program, signature) if minimised else program
            found[signature] = Found(signature, message, small, len(program.ops))
        if time.monotonic() - reported_at > 30:
            reported_at = time.monotonic()
            report(f"{target.name}: {result.inputs} inputs, {len(corpus)} kept, {len(known)} pairs and features")
    pairs_known = {each for each in known if isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], int)}
    result.seconds = time.monotonic() - started
    result.kept = len(corpus)
    result.pairs = len(pairs_known)
    result.features = len(known) - len(pairs_known)
    result.lines = len({each[1] for each in pairs_known})
    result.digest = digest.hexdigest()[:16]
    result.failures = list(found.values())
    return result


# --- saving failures --------------------------------------------------------------------------------------------------


def save(directory: Path, found: Found, target: str, seed: int) -> Path:
    """Write a file that the corpus test replays."""
    directory.mkdir(parents=True, exist_ok=True)
    name = hashlib.blake2b(found.program.to_json().encode(), digest_size=4).hexdigest()
    path = directory / f"{target}-{name}.json"
    document = {
        "target": target,
        "failed_with": found.signature,
        "seed": seed,
        "setup": found.program.setup,
        "ops": found.program.ops,
    }
    head = {key: value for key, value in document.items() if key != "ops"}
    ops = ",\n  ".join(json.dumps(op) for op in found.program.ops)
    path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "ops": [\n  {ops}\n ]\n}}\n')
    return path
