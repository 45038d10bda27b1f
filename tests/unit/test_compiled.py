"""The compiled build: what sources become, and when a build is used. No compiler is needed for these."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

import fencepost_compiled
from fencepost_compiled import MANIFEST, VARIABLE, fitting, hash_of, source_of
from fencepost_compiled.build import MODULES, _dependencies
from fencepost_compiled.native import NativeError, native

_HEAD = "from __future__ import annotations\n\n"
_SOURCE = """\
from __future__ import annotations

from dataclasses import dataclass, field, replace

LIMIT = 5


@value
class Point:
    \"\"\"Where.\"\"\"

    x: int
    y: int = LIMIT
    seen: int = field(default=0, compare=False)

    @property
    def far(self) -> bool:
        return self.x > LIMIT


@dataclass(slots=True, eq=False)
class Line:
    points: list[Point] = field(default_factory=list)


@value
class Nothing:
    pass


def moved(point: Point) -> Point:
    return replace(point, x=point.x + 1)
"""


@pytest.fixture
def made() -> Iterator[Any]:
    scope: dict[str, Any] = {"__name__": "made"}
    exec(compile(native(_SOURCE), "made.py", "exec"), scope)
    module = type(sys)("made")
    vars(module).update(scope)
    sys.modules["made"] = module
    yield module
    del sys.modules["made"]


# --- what a source becomes --------------------------------------------------------------------------------------------


def test_a_value_stays_one(made: Any) -> None:
    point = made.Point(1)

    assert (point.x, point.y, point.far) == (1, 5, False)
    assert repr(point) == "Point(x=1, y=5, seen=0)"
    assert point == made.Point(1, 5, seen=7)
    assert point != made.Point(2)
    assert made.moved(point) == made.Point(2)
    assert [each.name for each in dataclasses.fields(point)] == ["x", "y", "seen"]
    match point:
        case made.Point(x, y):
            assert (x, y) == (1, 5)
        case _:
            pytest.fail("a value takes part in matching")
    assert made.Nothing() == made.Nothing()


def test_a_value_is_copied_and_goes_to_another_process(made: Any) -> None:
    point = made.Point(1, 2, 3)

    for other in (copy.copy(point), pickle.loads(pickle.dumps(point))):
        assert (other.x, other.y, other.seen) == (1, 2, 3)


def test_what_is_not_compared_by_its_fields_is_itself(made: Any) -> None:
    assert made.Line() != made.Line()
    assert made.Line().points is not made.Line().points


def test_every_line_keeps_its_number() -> None:
    before, after = _SOURCE.splitlines(), native(_SOURCE).splitlines()

    same = [number for number, line in enumerate(before) if "def " in line]
    assert same
    assert all(after[number] == before[number] for number in same)


def test_a_constant_is_final() -> None:
    assert "LIMIT: Final = 5" in native(_SOURCE)


@pytest.mark.parametrize(
    "body",
    [
        "    try: pass\n    except OSError as error: pass\n    except ValueError as error: pass\n",
        "    error = 1\n    try: pass\n    except OSError as error: pass\n",
        "    match 1:\n        case error: pass\n    try: pass\n    except OSError as error: pass\n",
    ],
    ids=["two kinds", "a variable", "a capture"],
)
def test_a_name_that_would_have_two_types_is_refused(body: str) -> None:
    with pytest.raises(NativeError, match="f: error is"):
        native(_HEAD + "def f() -> None:\n" + body)


@pytest.mark.parametrize("name", MODULES)
def test_each_module_is_written_as_it_must_be(name: str) -> None:
    path = source_of(name)
    assert path is not None
    text = Path(path).read_text("utf-8")

    assert native(text).count("\n") >= text.count("\n")
    compile(native(text), path, "exec")


# --- when a build is used ---------------------------------------------------------------------------------------------


def _manifest(directory: Path, *, but: str = "") -> None:
    """Of a build of all sources as they are, one excepted."""
    lines = [f"{'00' * 8 if name == but else hash_of(source_of(name) or '')} {name}" for name in MODULES]
    (directory / MANIFEST).write_text("\n".join([*lines, *(f"+ {name}" for name in MODULES)]) + "\n")


def test_a_build_of_these_sources_fits(tmp_path: Path) -> None:
    _manifest(tmp_path)

    assert fitting(str(tmp_path)) == (list(MODULES), "")


def test_a_build_of_other_sources_does_not(tmp_path: Path) -> None:
    _manifest(tmp_path, but="fencepost_proxy.wire.batch")

    _, why = fitting(str(tmp_path))

    assert why == "the compiled build is not of these sources: fencepost_proxy.wire.batch is another"


def test_a_build_is_bound_to_what_it_takes_constants_from() -> None:
    package = Path(fencepost_compiled.__file__).parent
    roots = [package.parent, package.parents[1] / "policies"]
    sources = {}
    for root in roots:
        for path in root.rglob("*.py"):
            sources[".".join(path.relative_to(root).with_suffix("").parts)] = path

    found = _dependencies(sources)

    assert {*MODULES, "fencepost_proxy.wire.apis", "fencepost_proxy.topics.virtual_configs"} <= found
    assert "fencepost_proxy.net.app" not in found


def _started(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fencepost_compiled"],
        env={**{name: text for name, text in os.environ.items() if name != VARIABLE}, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_sources_run_where_that_is_asked_for() -> None:
    assert _started(**{VARIABLE: "0"}).stdout == f"pure Python: {VARIABLE}=0\n"


def test_nonsense_is_refused() -> None:
    done = _started(**{VARIABLE: "yes"})

    assert done.returncode
    assert f"{VARIABLE}=yes: it is 1 (only compiled), 0 (never), or not set" in done.stderr


def _copy_of_the_sources(directory: Path) -> dict[str, str]:
    """Without any build; the environment that runs them."""
    package = Path(fencepost_compiled.__file__).parent
    for each in package.glob("*.py"):
        (directory / package.name).mkdir(exist_ok=True)
        (directory / package.name / each.name).write_bytes(each.read_bytes())
    for name in ("fencepost_policies", "fencepost_proxy"):
        (directory / name).symlink_to(Path(source_of(name) or "").parent)
    return {"PYTHONPATH": str(directory)}


def test_without_a_build_the_sources_run_and_a_demand_is_refused(tmp_path: Path) -> None:
    environment = _copy_of_the_sources(tmp_path)

    assert _started(**environment).stdout == "pure Python: there is no compiled build for this Python\n"
    refused = _started(**environment, **{VARIABLE: "1"})
    assert refused.returncode
    assert f"{VARIABLE}=1, but there is no compiled build for this Python. `make compiled` makes" in refused.stderr


def test_a_stale_build_is_left_aside_and_said(tmp_path: Path) -> None:
    environment = _copy_of_the_sources(tmp_path)
    directory = tmp_path / "fencepost_compiled" / EXTENSION_SUFFIXES[0].strip(".").partition(".")[0]
    directory.mkdir()
    _manifest(directory, but="fencepost_policies.append")

    done = _started(**environment)

    assert done.stdout == (
        "pure Python: the compiled build is not of these sources: fencepost_policies.append is another\n"
    )


def test_the_version_says_what_runs() -> None:
    command = [sys.executable, "-m", "fencepost_proxy", "--version"]
    done = subprocess.run(command, env={**os.environ, VARIABLE: "0"}, capture_output=True, text=True, check=True)

    assert done.stdout.endswith(" (pure Python)\n")
