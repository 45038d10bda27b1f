"""`make compiled`: has mypyc compile the hot rooms, of copies that `native.py` prepared, into this package's directory.

Needs mypy, setuptools and a C compiler; nothing else of the project does.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from fencepost_compiled import DIRECTORY, MANIFEST, PACKAGES, hash_of
from fencepost_compiled.native import NativeError, native

#: What a request or an answer goes through. In one group: calls between them are calls of C functions. They import what
#: is not among them as any Python does.
MODULES: Final = (
    "fencepost_policies.append",
    "fencepost_policies.conditional_publish",
    "fencepost_policies.idempotence_level",
    "fencepost_policies.partition_count",
    "fencepost_proxy.errors",
    "fencepost_proxy.types",
    "fencepost_proxy.wire.primitives",
    "fencepost_proxy.wire.batch",
    "fencepost_proxy.wire.produce",
    "fencepost_proxy.wire.shortcuts",
    "fencepost_proxy.wire.single",
    "fencepost_proxy.topics.idempotence",
    "fencepost_proxy.partitions.events",
    "fencepost_proxy.partitions.memory",
    "fencepost_proxy.partitions.gate_state",
    "fencepost_proxy.partitions.settling",
    "fencepost_proxy.partitions.publishing",
    "fencepost_proxy.partitions.gate",
    "fencepost_proxy.session.messages",
    "fencepost_proxy.session.cutter",
    "fencepost_proxy.session.slots",
    "fencepost_proxy.session.surroundings",
    "fencepost_proxy.session.turn",
    "fencepost_proxy.session.connection",
    "fencepost_proxy.session.counted",
    "fencepost_proxy.session.control",
    "fencepost_proxy.session.transactions",
    "fencepost_proxy.session.doors",
    "fencepost_proxy.session.guarded",
    "fencepost_proxy.session.handover",
    "fencepost_proxy.session.levels",
    "fencepost_proxy.session.short_way",
    "fencepost_proxy.session.session",
    "fencepost_proxy.session.switch",
    "fencepost_proxy.net.side",
    "fencepost_proxy.net.link",
)
_GROUP: Final = "fencepost"
#: Of the sources, `--strict` is asked elsewhere; what they become is only to be compiled.
_MYPY: Final = ("--python-version", f"{sys.version_info[0]}.{sys.version_info[1]}", "--ignore-missing-imports")


class BuildError(Exception):
    """It cannot be compiled here; the text says what is missing or wrong."""


def build(target: Path, roots: Iterable[Path]) -> None:
    """Puts a build of the packages that lie in `roots` into `target`, in place of what is there. Raises BuildError."""
    with tempfile.TemporaryDirectory(prefix="fencepost-compiled-") as scratch:
        work = Path(scratch).resolve()
        sources = _copied(roots, work)
        made = work / "made"
        _compiled(work, made)
        lines = [f"{hash_of(str(sources[name]))} {name}" for name in sorted(_dependencies(sources))]
        lines += [f"+ {name}" for name in (*MODULES, f"{_GROUP}__mypyc")]
        (made / MANIFEST).write_text("\n".join(lines) + "\n", "ascii")
        # Whoever starts meanwhile finds the old one, none, or the new one.
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copytree(made, new)
        new.rename(target)


def _copied(roots: Iterable[Path], work: Path) -> dict[str, Path]:
    """By module: the path of its source. The copies in `work` are what is compiled."""
    sources = {}
    for root in roots:
        for package in PACKAGES:
            for path in sorted((root / package).rglob("*.py")):
                place = path.relative_to(root)
                parts = place.with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                sources[name] = path
                text = path.read_text("utf-8")
                (work / place).parent.mkdir(parents=True, exist_ok=True)
                try:
                    (work / place).write_text(native(text) if name in MODULES else text, "utf-8")
                except NativeError as error:
                    raise BuildError(f"{path}: {error}") from error
    missing = [name for name in MODULES if name not in sources]
    if missing:
        raise BuildError(f"the sources lack {', '.join(missing)}")
    return sources


def _compiled(work: Path, made: Path) -> None:
    try:
        from mypyc.build import mypycify  # noqa: PLC0415 - needed for this alone
        from setuptools import Distribution  # noqa: PLC0415
        from setuptools.command.build_ext import build_ext  # noqa: PLC0415
        from setuptools.errors import BaseError, CCompilerError  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise BuildError(f"the Python package {error.name} is missing; install mypy and setuptools") from error
    files = [f"{name.replace('.', '/')}.py" for name in MODULES]
    here = Path.cwd()
    os.environ["MYPYPATH"] = os.pathsep.join([str(work), str(Path(__file__).parents[1])])
    os.chdir(work)
    try:
        extensions = mypycify([*_MYPY, *files], opt_level="2", debug_level="0", group_name=_GROUP)
        command = build_ext(Distribution({"name": "fencepost", "ext_modules": extensions}))
        command.build_lib, command.build_temp = str(made), str(work / "objects")
        command.ensure_finalized()
        command.run()
    except (BaseError, CCompilerError, OSError) as error:
        raise BuildError(
            f"it does not compile: {error}. A C compiler and the headers of this Python are needed"
        ) from error
    finally:
        os.chdir(here)
    # Side by side, under their whole names: no package's directory is needed then.
    for path in [each for each in made.rglob("*") if each.is_file()]:
        path.rename(made / ".".join(path.relative_to(made).parts))
    for path in [each for each in made.iterdir() if each.is_dir()]:
        shutil.rmtree(path)


def _dependencies(sources: Mapping[str, Path]) -> set[str]:
    """The compiled modules and what they import, all the way: a constant of another module is compiled in."""
    found: set[str] = set()
    todo = list(MODULES)
    while todo:
        name = todo.pop()
        if name in found or name not in sources:
            continue
        found.add(name)
        for node in ast.walk(ast.parse(sources[name].read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                todo += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
            elif isinstance(node, ast.Import):
                todo += [each.name for each in node.names]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fencepost_compiled.build", description=__doc__)
    parser.add_argument("--clean", action="store_true", help="only remove what was built, for every Python")
    options = parser.parse_args()
    package = Path(__file__).parent
    if options.clean:
        for manifest in package.glob(f"*/{MANIFEST}"):
            shutil.rmtree(manifest.parent)
        return 0
    began = time.monotonic()
    roots = [package.parent, package.parents[1] / "policies"]
    try:
        build(Path(DIRECTORY), [root for root in roots if root.is_dir()])
    except BuildError as error:
        print(f"compiled: {error}", file=sys.stderr)
        return 2
    print(f"compiled in {time.monotonic() - began:.0f} s into {DIRECTORY}; FENCEPOST_COMPILED=0 runs the sources again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
