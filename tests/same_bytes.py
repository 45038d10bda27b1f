"""`python -m tests.same_bytes CHECKOUT`: does this checkout behave exactly as another one, byte for byte?

Each checkout runs its simulation and fuzzer on the same seeds. A run's digest covers every byte on every modelled
wire, their order, and all random choices. Python alone executes: native code writes in other pieces. Exits with 1 at
a difference, and prints the command that shows it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).parents[1]
_SOURCES = ("policies", "proxy", "client")
_FUZZER_SEEDS = range(100, 104)
#: The columns of the fuzzer's summary that are equal on every run.
_FUZZER_COLUMNS = frozenset({"target", "inputs", "events", "states", "failures", "digest"})


def _start(checkout: Path, *command: object) -> subprocess.Popen[str]:
    sources = os.pathsep.join(str(checkout / each) for each in _SOURCES)
    environment = {**os.environ, "PYTHONPATH": sources, "FENCEPOST_NATIVE": "off"}
    words = [sys.executable, "-m", *map(str, command)]
    return subprocess.Popen(
        words, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _lines(process: subprocess.Popen[str]) -> list[str]:
    printed, complaints = process.communicate()
    if process.returncode:
        sys.exit(f"{process.args} failed:\n{printed}{complaints}")
    return printed.splitlines()


def simulated(lines: Sequence[str]) -> list[str]:
    return [line.removeprefix("digest ") for line in lines if line.startswith("digest ")]


def fuzzed(lines: Sequence[str]) -> list[str]:
    head = next(index for index, line in enumerate(lines) if line.startswith("target"))
    names = lines[head].split()
    rows = [row for row in map(str.split, lines[head + 1 :]) if len(row) == len(names)]
    return [" ".join(word for name, word in zip(names, row, strict=True) if name in _FUZZER_COLUMNS) for row in rows]


def difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """The first pair of lines that differ; empty if all are equal."""
    if not ours or len(ours) != len(theirs):
        return f"{len(ours)} runs here, {len(theirs)} there"
    return next((f"- {one}\n+ {other}" for one, other in zip(theirs, ours, strict=True) if one != other), "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.same_bytes", description=__doc__)
    parser.add_argument("checkout", type=Path, help="the checkout to compare this one with")
    parser.add_argument("--seeds", type=int, default=500, help="seeds of each scenario")
    parser.add_argument("--inputs", type=int, default=200, help="inputs of each of the fuzzer's targets and seeds")
    options = parser.parse_args()
    from tests.simulation.scenarios import SCENARIOS  # noqa: PLC0415 - slow, and only for this

    simulation = ("tests.simulation", "--digests", "--jobs", 1, "--seeds", options.seeds * len(SCENARIOS))
    commands = [(simulation, simulated)]
    for seed in _FUZZER_SEEDS:
        commands.append((("tests.fuzz", "--blind", "--inputs", options.inputs, "--seed", seed), fuzzed))
    for command, read in commands:
        both = [_start(checkout, *command) for checkout in (_HERE, options.checkout.resolve())]
        ours, theirs = (read(_lines(process)) for process in both)
        if found := difference(ours, theirs):
            print(f"python -m {' '.join(map(str, command))}: not the same\n{found}")
            return 1
        print(f"python -m {' '.join(map(str, command))}: the same, {len(ours)} runs", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
