"""`python -m tests.fuzz --seconds 300 --seed 1`: search for inputs that break an invariant.

A call of the code under test that takes more than 50 ms of CPU time counts as broken; the slowest input is kept.

`--target NAME` (repeatable) selects targets. `--inputs N` limits inputs per target instead of time: the same seed and
number give the same digest. Failing inputs are minimised and written to `tests/fuzz/corpus`, where tests replay them;
`--replay FILE` runs one again.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path

from tests.fuzz.dialogue import Dialogue
from tests.fuzz.engine import CORPUS, ROOT, Found, Program, Result, Target, Untraced, check_time, fuzz, save
from tests.fuzz.large import Large
from tests.fuzz.parsers import Parsers
from tests.fuzz.sequencers import Sequencers
from tests.support import executors

#: Shares of the time.
TARGETS: dict[str, tuple[Target, float]] = {
    "session": (Dialogue(), 0.5),
    "sequencer": (Sequencers(), 0.2),
    "wire": (Parsers(), 0.15),
    "large": (Large(), 0.15),
}


_SLOWEST = ROOT / "build" / "fuzz"


def replay(path: Path) -> float:
    """Replay a file. Raise its failure, or return the duration of the slowest call."""
    document = json.loads(path.read_text())
    target, _ = TARGETS[document["target"]]
    target.execute(Program.from_json(document), set(), Untraced())
    return check_time(target, Program.from_json(document))


def replayable(target: str) -> list[Program]:
    """The corpus of a target, with which a run starts."""
    documents = [json.loads(path.read_text()) for path in sorted(CORPUS.glob(f"{target}-*.json"))]
    return [Program.from_json(document) for document in documents]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=float, default=300, help="time for all targets (default: %(default)s)")
    parser.add_argument("--inputs", type=int, help="inputs per target, instead of time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--executor", choices=executors.AVAILABLE, help="default: by the seed, native if it is even")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="directory for failing inputs")
    parser.add_argument("--blind", action="store_true", help="run without coverage guidance")
    parser.add_argument("--replay", type=Path, help="replay one file")
    options = parser.parse_args()
    executor = options.executor or executors.of_seed(_seed_of(options))
    print(f"executor {executor}", flush=True)
    with executors.executing(executor):
        return _run(options)


def _seed_of(options: argparse.Namespace) -> int:
    """A failing input is replayed by the executor that it failed with."""
    return int(options.seed if options.replay is None else json.loads(options.replay.read_text())["seed"])


def _run(options: argparse.Namespace) -> int:
    if options.replay is not None:
        try:
            seconds = replay(options.replay)
        except Exception:
            traceback.print_exc()
            return 1
        print(f"passed; slowest call: {seconds * 1000:.1f} ms")
        return 0
    names = list(dict.fromkeys(options.target or TARGETS))
    shares = sum(TARGETS[name][1] for name in names)
    print(f"seed {options.seed}", flush=True)
    results = []
    for name in names:
        target, share = TARGETS[name]
        result = fuzz(
            target,
            options.seed,
            seconds=None if options.inputs else options.seconds * share / shares,
            inputs=options.inputs,
            # Large inputs test time, and tracing would distort it.
            guided=not options.blind and name != "large",
            starting_from=replayable(name),
            report=lambda line: print(line, flush=True),
        )
        results.append(result)
    return _summary(results, options.corpus)


def _summary(results: list[Result], corpus: Path) -> int:
    print(
        f"\n{'target':<9}{'inputs':>8}{'events':>9}{'seconds':>9}{'kept':>6}{'lines':>13}{'pairs':>7}{'states':>8}"
        f"{'failures':>10}{'slowest_ms':>11}  digest"
    )
    for each in results:
        lines = f"{each.lines}/{each.lines_all}"
        print(
            f"{each.target:<9}{each.inputs:>8}{each.events:>9}{each.seconds:>9.1f}{each.kept:>6}{lines:>13}"
            f"{each.pairs:>7}{each.features:>8}{len(each.failures):>10}{each.slowest_seconds * 1000:>11.1f}"
            f"  {each.digest}"
        )
    slowest = max(results, key=lambda each: each.slowest_seconds)
    if slowest.slowest is not None:
        found = Found("slowest", "", slowest.slowest, len(slowest.slowest.ops))
        path = save(_SLOWEST, found, slowest.target, slowest.seed)
        print(f"slowest call: {slowest.slowest_seconds * 1000:.1f} ms; python -m tests.fuzz --replay {_shown(path)}")
    for each in results:
        for found in each.failures:
            path = save(corpus, found, each.target, each.seed)
            print(
                f"\n{found.signature} ({found.shrunk_from} operations, made {len(found.program.ops)})\n{found.message}"
            )
            print(f"replay: python -m tests.fuzz --replay {_shown(path)}")
    return 1 if any(each.failures for each in results) else 0


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


if __name__ == "__main__":
    sys.exit(main())
