"""`python -m tests.same_bytes`: the compiled build does what the sources do, byte for byte.

The same seeds of simulation and fuzzer are run by both, in processes of their own: what happens in each run, and every
byte on every modelled wire, is in what is compared.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from fencepost_compiled import VARIABLE

_SIMULATED = range(4)
_FUZZED = range(100, 104)
#: The columns of a summary that are the same on every run: target, inputs, events; states, failures, digest.
_SAME = (0, 1, 2, -3, -2, -1)


def _printed(build: str, *command: str) -> str:
    environment = {**os.environ, VARIABLE: build}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{VARIABLE}={build} python -m {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _fuzzed(build: str, seed: int) -> Sequence[object]:
    lines = _printed(build, "tests.fuzz", "--blind", "--inputs", "200", "--seed", str(seed)).splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("target"))
    return [[words[column] for column in _SAME] for line in lines[head + 1 :] if (words := line.split())]


def main() -> int:
    for seed in _SIMULATED:
        command = ("tests.simulation", "--trace", "--seed", str(seed))
        pure, compiled = (_printed(build, *command).splitlines() for build in "01")
        if pure != compiled:
            place = next(place for place, pair in enumerate(zip(pure, compiled, strict=False)) if pair[0] != pair[1])
            print(f"simulation, seed {seed}: from line {place + 1} on\n- {pure[place]}\n+ {compiled[place]}")
            return 1
        print(f"simulation, seed {seed} of every scenario: the same {len(pure):,} lines")
    for seed in _FUZZED:
        pure_digests, compiled_digests = (_fuzzed(build, seed) for build in "01")
        if pure_digests != compiled_digests:
            print(f"fuzzer, seed {seed}:\n- {pure_digests}\n+ {compiled_digests}")
            return 1
        print(f"fuzzer, seed {seed}: the same bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
