"""Wheels, sdist, bill of materials, images, checksums: what is built from an exported commit."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from release.source import ReleaseError, Source

CHECKSUMS = "SHA256SUMS"
MACHINES = ("x86_64", "aarch64")
NATIVE = "fencepost_native.abi3.so"
#: Of an ELF file: bytes 18 and 19.
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
IMAGES = {"fencepost": "Dockerfile", "fencepost-spark": "Dockerfile.spark"}
#: What is in the images and in an installation with extras; `locks/all.txt` has the tests' packages too.
SBOM_LOCKS = ("run", "spark")


class CannotBuild(Exception):
    """It is left out here: why, and what to do."""


def run(*command: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """What it printed. Raises ReleaseError with that if it fails."""
    words = [str(each) for each in command]
    done = subprocess.run(
        words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise ReleaseError(f"failed: {' '.join(words)}\n{done.stdout.strip()}")
    return done.stdout


def clean_environment() -> dict[str, str]:
    """Without variables that lead to another installation or configure Fencepost."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RUSTFLAGS", "CARGO_TARGET_DIR")
        and not name.startswith(("COV_", "COVERAGE", "FENCEPOST_"))
    }


class Builder:
    """Builds into `dist`, with the tools of a new environment in `tools`, which `source`'s lock pins by hash."""

    def __init__(self, source: Source, tools: Path, dist: Path) -> None:
        self._source = source
        self._python = tools / "bin" / "python"
        self._dist = dist
        # Times in archives are those of the commit, so that a second run makes the same bytes.
        self._environment = {**clean_environment(), "SOURCE_DATE_EPOCH": str(source.seconds)}
        shutil.rmtree(tools, ignore_errors=True)
        shutil.rmtree(dist, ignore_errors=True)
        dist.mkdir(parents=True)
        run(sys.executable, "-m", "venv", tools)
        lock = source.tree / "locks" / "release.txt"
        run(self._python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--require-hashes", "-r", lock)

    def sdist(self) -> Path:
        return self._hatchling("sdist")

    def pure_wheel(self) -> Path:
        return self._hatchling("wheel", FENCEPOST_NATIVE="off")

    def native_wheel(self, machine: str) -> Path:
        """Raises CannotBuild where Rust has no library for `machine`."""
        if sys.platform != "linux":
            raise CannotBuild(f"wheel for {machine}: left out, it is built on Linux (or by a container of it)")
        triple = f"{machine}-unknown-linux-gnu"
        if not _has_rust_for(triple):
            raise CannotBuild(
                f"wheel for {machine}: left out, Rust's standard library for {triple} is missing (run `rustup target "
                f"add {triple}`, or name a compiler that has it by RUSTC, or accept it by --without {machine})"
            )
        wheel = self._hatchling("wheel", FENCEPOST_NATIVE="on", FENCEPOST_MACHINE=machine)
        if not re.search(rf"-cp311-abi3-manylinux_\d+_\d+_{machine}\.whl$", wheel.name):
            raise ReleaseError(f"{wheel.name} is not for manylinux on {machine}")
        with zipfile.ZipFile(wheel) as archive:
            head = archive.read(NATIVE)[:20]
        if head[:4] != b"\x7fELF" or int.from_bytes(head[18:20], "little") != ELF_MACHINES[machine]:
            raise ReleaseError(f"{NATIVE} in {wheel.name} is not a library for {machine}")
        # That the tag is right: the newest symbols that it needs, and that it needs no other library.
        audited = " ".join(run(self._python, "-m", "auditwheel", "show", wheel).split())
        tag = wheel.stem.rpartition("-")[2]
        if f'following platform tag: "{tag}"' not in audited:
            raise ReleaseError(f"auditwheel disagrees with the tag of {wheel.name}: {audited}")
        return wheel

    def _hatchling(self, target: str, **environment: str) -> Path:
        before = set(self._dist.iterdir())
        run(
            *(self._python, "-m", "hatchling", "build", "-t", target, "-d", self._dist),
            cwd=self._source.tree,
            env=self._environment | environment,
        )
        (file,) = set(self._dist.iterdir()) - before
        return file

    def sbom(self) -> Path:
        """CycloneDX: Python packages by the locks, and the crates in the native module."""
        components: dict[str, Any] = {}
        for lock in SBOM_LOCKS:
            made = self._dist / f"{lock}.json"
            options = ("--output-reproducible", "--of", "JSON", "-o", made)
            pyproject = ("--pyproject", self._source.tree / "pyproject.toml", "--mc-type", "application")
            requirements = self._source.tree / "locks" / f"{lock}.txt"
            run(self._python, "-m", "cyclonedx_py", "requirements", *pyproject, *options, requirements)
            found = json.loads(made.read_bytes())
            made.unlink()
            for component in found["components"]:
                components.setdefault(component["purl"], component)
        for crate in crates(self._source.tree):
            components[crate["purl"]] = crate
        for purl, component in components.items():
            component["bom-ref"] = purl
            # The line of the lock.
            component.pop("description", None)
        bill = {**found, "components": [components[each] for each in sorted(components)]}
        bill["metadata"]["component"]["version"] = self._source.version
        # The locks do not have which package needs which.
        del bill["dependencies"]
        file = self._dist / f"fencepost-{self._source.version}.cdx.json"
        file.write_text(json.dumps(bill, indent=2) + "\n", "utf-8")
        code = (
            "import sys; from pathlib import Path; from cyclonedx.schema import SchemaVersion; "
            "from cyclonedx.validation.json import JsonStrictValidator; "
            "sys.exit(JsonStrictValidator(SchemaVersion.from_version(sys.argv[2])).validate_str("
            "Path(sys.argv[1]).read_text('utf-8')) and 'the bill of materials is invalid')"
        )
        run(self._python, "-c", code, file, bill["specVersion"])
        return file

    def check_with_twine(self, files: Iterable[Path]) -> None:
        run(self._python, "-m", "twine", "check", "--strict", *files)


def _has_rust_for(triple: str) -> bool:
    compiler = os.environ.get("RUSTC") or shutil.which("rustc")
    if compiler is None:
        raise CannotBuild("native wheels: left out, there is no Rust (install Rust 1.85 or newer: https://rustup.rs)")
    library = Path(run(compiler, "--print", "target-libdir", "--target", triple).strip())
    return any(library.glob("libstd-*.rlib"))


def crates(tree: Path) -> list[dict[str, Any]]:
    """As CycloneDX has them, with the hashes of the lock file. Some are only needed to build it."""
    locked = tomllib.loads((tree / "native" / "Cargo.lock").read_text("utf-8"))["package"]
    return [
        {
            "type": "library",
            "name": each["name"],
            "version": each["version"],
            "purl": f"pkg:cargo/{each['name']}@{quote(each['version'])}",
            "hashes": [{"alg": "SHA-256", "content": each["checksum"]}],
        }
        for each in locked
        if "checksum" in each
    ]


def engine() -> str:
    """`docker` or `podman`, whichever answers. Raises CannotBuild."""
    for name in ("docker", "podman"):
        query = [name, "info"]
        if shutil.which(name) and not subprocess.run(query, capture_output=True, timeout=60, check=False).returncode:
            return name
    raise CannotBuild("container images: left out, neither docker nor podman answers (start one to build them)")


def build_images(source: Source) -> list[str]:
    """Their names, in the engine's own store. The builds check the native module."""
    command, names = engine(), []
    for image, dockerfile in IMAGES.items():
        name = f"{image}:{source.version}"
        labels = {"version": source.version, "revision": source.commit, "licenses": "Apache-2.0"}
        options = [f"--label=org.opencontainers.image.{key}={value}" for key, value in labels.items()]
        run(command, "build", *options, "-f", f"deploy/docker/{dockerfile}", "-t", name, ".", cwd=source.tree)
        names.append(name)
    return names


def write_checksums(dist: Path) -> Path:
    """As `sha256sum -c` reads it."""
    lines = [f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}" for each in sorted(dist.iterdir())]
    file = dist / CHECKSUMS
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return file


def read_checksums(dist: Path) -> dict[str, str]:
    """By file name; of an earlier run."""
    file = dist / CHECKSUMS
    if not file.exists():
        return {}
    pairs = (line.split("  ", 1) for line in file.read_text("utf-8").splitlines())
    return {name: digest for digest, name in pairs}


def runs_here(file: Path) -> bool:
    """Whether this machine can execute what is in it."""
    machine = re.search(r"-manylinux_\d+_\d+_(\w+)\.whl$", file.name)
    return machine is None or machine[1] == platform.machine()
