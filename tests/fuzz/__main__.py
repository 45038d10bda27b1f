"""`python -m tests.fuzz --seconds 300 --seed 1`: looks for inputs that break an invariant, and says what it found.

`--target NAME` (again and again) leaves the others out, `--inputs N` ends each after so many inputs instead of by time:
the same seed and number give the same digest. What fails is made small and written to `tests/fuzz/corpus`, where the
tests replay it; `--replay FILE` runs one again.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path

from tests.fuzz.dialogue import Dialogue
from tests.fuzz.engine import CORPUS, ROOT, Program, Result, Target, Untraced, fuzz, save
from tests.fuzz.gates import Gates
from tests.fuzz.parsers import Parsers

#: Each with its share of the time.
TARGETS: dict[str, tuple[Target, float]] = {
    "session": (Dialogue(), 0.6),
    "gate": (Gates(), 0.25),
    "wire": (Parsers(), 0.15),
}


def replay(path: Path) -> None:
    """Raises what it finds."""
    document = json.loads(path.read_text())
    target, _ = TARGETS[document["target"]]
    target.execute(Program.from_json(document), set(), Untraced())


def replayable(target: str) -> list[Program]:
    """The corpus of a target: where a run starts."""
    documents = [json.loads(path.read_text()) for path in sorted(CORPUS.glob(f"{target}-*.json"))]
    return [Program.from_json(document) for document in documents]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=float, default=300, help="of all targets together")
    parser.add_argument("--inputs", type=int, help="of each target, instead of a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="where failing inputs are written")
    parser.add_argument("--blind", action="store_true", help="without coverage: more inputs, fewer surprises")
    parser.add_argument("--replay", type=Path, help="only this file")
    options = parser.parse_args()
    if options.replay is not None:
        try:
            replay(options.replay)
        except Exception:
            traceback.print_exc()
            return 1
        print("holds")
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
            guided=not options.blind,
            starting_from=replayable(name),
            tell=lambda line: print(line, flush=True),
        )
        results.append(result)
    return _summary(results, options.corpus)


def _summary(results: list[Result], corpus: Path) -> int:
    print(
        f"\n{'target':<9}{'inputs':>8}{'events':>9}{'seconds':>9}{'kept':>6}{'lines':>13}{'pairs':>7}{'states':>8}"
        f"{'failures':>10}  digest"
    )
    for each in results:
        lines = f"{each.lines}/{each.lines_all}"
        print(
            f"{each.target:<9}{each.inputs:>8}{each.events:>9}{each.seconds:>9.1f}{each.kept:>6}{lines:>13}"
            f"{each.pairs:>7}{each.features:>8}{len(each.failures):>10}  {each.digest}"
        )
    for each in results:
        for found in each.failures:
            path = save(corpus, found, each.target, each.seed)
            shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            print(
                f"\n{found.signature} ({found.shrunk_from} operations, made {len(found.program.ops)})\n{found.message}"
            )
            print(f"replay: python -m tests.fuzz --replay {shown}")
    return 1 if any(each.failures for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
