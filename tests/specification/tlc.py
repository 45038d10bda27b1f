"""Runs TLC, the model checker of TLA+, on one module with one set of constants."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fencepost_dev import jars
from fencepost_dev.java import QUICK_JVM, find_jdk

ROOT = Path(__file__).resolve().parents[2]
SPECIFICATION = ROOT / "specification"
HEAP = "-Xmx2g"
#: TLC's exit codes: no error; an invariant is violated.
_PASSED, _VIOLATED = 0, 12
_STATES = re.compile(r"(\d+) states generated.*?, (\d+) distinct states found, (\d+) states left on queue", re.DOTALL)
_INVARIANT = re.compile(r"Invariant (\w+) is violated")


@dataclass(frozen=True, slots=True)
class Checked:
    """What TLC found. `violated`: the first invariant that a reachable state violates; None: none, in all states."""

    violated: str | None
    distinct_states: int
    output: str

    @property
    def counterexample(self) -> str:
        """The steps to the violation, and the values that each one changes."""
        return self.output.partition("The behavior up to this point is:")[2]


class TlcError(Exception):
    """TLC did not finish: the specification is wrong, or it took too long."""


def check(
    module: str,
    constants: Mapping[str, str],
    invariants: tuple[str, ...],
    *,
    timeout_seconds: float,
    symmetry: str | None = None,
    specification: str = "Spec",
    modules: Mapping[str, str] | None = None,
) -> Checked:
    """Check all reachable states. `constants`: TLA+ expressions. `symmetry`: a set of model values to permute.
    `modules`: texts of further modules."""
    with tempfile.TemporaryDirectory(prefix="fencepost-tlc-") as directory:
        folder = Path(directory)
        for each in SPECIFICATION.glob("*.tla"):
            shutil.copy(each, folder)
        for name, text in (modules or {}).items():
            (folder / f"{name}.tla").write_text(text)
        definitions = [f"Model_{name} == {value}" for name, value in constants.items() if not _is_literal(value)]
        if symmetry is not None:
            definitions.append(f"Model_Symmetry == Permutations({symmetry})")
        text = "\n".join(["---- MODULE Model ----", f"EXTENDS {module}, TLC", *definitions, "===="])
        (folder / "Model.tla").write_text(text)
        (folder / "Model.cfg").write_text(_config(constants, invariants, symmetry, specification))
        return _run(folder, timeout_seconds)


def _is_literal(value: str) -> bool:
    """Whether a configuration file may have it: no tuples, records or operators."""
    return re.fullmatch(r"[\w{}, \"'-]+", value) is not None


def _config(constants: Mapping[str, str], invariants: tuple[str, ...], symmetry: str | None, specification: str) -> str:
    lines = [f"SPECIFICATION {specification}", "CONSTANTS"]
    lines += [
        f"  {name} = {value}" if _is_literal(value) else f"  {name} <- Model_{name}"
        for name, value in constants.items()
    ]
    lines += [f"INVARIANTS {' '.join(invariants)}"] if invariants else []
    return "\n".join(lines + (["SYMMETRY Model_Symmetry"] if symmetry is not None else []))


def _run(folder: Path, timeout_seconds: float) -> Checked:
    # TLC unpacks its standard modules there, and two runs at once would disturb each other.
    own_files = f"-Djava.io.tmpdir={folder}"
    command = [find_jdk().java, *QUICK_JVM, HEAP, own_files, "-cp", jars.classpath(jars.TLC_LOCK)]
    command += ["tlc2.TLC", "-workers", "1"]
    # A state without successors is the end of a run, not a deadlock. One order of states makes counts repeatable.
    command += ["-deadlock", "-nowarning", "-difftrace", "-fp", "0", "-metadir", str(folder / "states"), "Model"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise TlcError(
            f"TLC did not finish within {timeout_seconds:.0f} s (reduce the bound, or wait longer)"
        ) from error
    violated, states = _INVARIANT.search(done.stdout), list(_STATES.finditer(done.stdout))
    expected = _PASSED if violated is None else _VIOLATED
    if done.returncode != expected or not states:
        raise TlcError(f"TLC ended with code {done.returncode}:\n{done.stdout[-6000:]}{done.stderr[-2000:]}")
    return Checked(None if violated is None else violated[1], int(states[-1][2]), done.stdout)
