"""What is released: a commit, exported into a new directory, and what its files say of the version."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


class ReleaseError(Exception):
    """What is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """`tag` – None for a trial from HEAD. `tree` – the exported files. `seconds` – when it was committed."""

    tag: str | None
    commit: str
    seconds: int
    tree: Path

    @property
    def version(self) -> str:
        return version_of(self.tree)


def git(*arguments: str, root: Path = ROOT) -> str:
    return _git(*arguments, root=root).decode().strip()


def _git(*arguments: str, root: Path) -> bytes:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {' '.join(arguments)} failed: {done.stderr.decode().strip()}")
    return done.stdout


def commit_of(tag: str | None, root: Path = ROOT) -> str:
    try:
        return git("rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}" if tag else "HEAD", root=root)
    except ReleaseError:
        raise ReleaseError(f"there is no tag {tag} (make it: git tag -a {tag})") from None


def export(tag: str | None, to: Path, root: Path = ROOT) -> Source:
    """Writes the commit's files to `to`, which it empties first: nothing else of the work tree can enter."""
    commit = commit_of(tag, root)
    shutil.rmtree(to, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, root=root))) as archive:
        archive.extractall(to, filter="data")
    source = Source(tag, commit, int(git("show", "-s", "--format=%ct", commit, root=root)), to)
    if tag is not None and tag != f"v{source.version}":
        raise ReleaseError(f"tag {tag} is on version {source.version} (the tag of that version is v{source.version})")
    return source


def version_of(tree: Path) -> str:
    """Raises ReleaseError if the native module has another one."""
    version = str(tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["project"]["version"])
    native = str(tomllib.loads((tree / "native" / "Cargo.toml").read_text("utf-8"))["package"]["version"])
    if native != version:
        raise ReleaseError(f"pyproject.toml has version {version}, native/Cargo.toml {native} (make them equal)")
    return version


def release_notes(source: Source) -> str:
    """The version's section of the changelog. A trial takes that of the next release if the version has none."""
    text = (source.tree / "CHANGELOG.md").read_text("utf-8")
    section = _section(text, source.version)
    if section is None and source.tag is None:
        section = _section(text, "Unreleased")
    if section is None:
        raise ReleaseError(f"CHANGELOG.md has no section '## {source.version}' (rename '## Unreleased', and date it)")
    if not section:
        raise ReleaseError(f"the section of {source.version} in CHANGELOG.md is empty")
    return section


def _section(changelog: str, name: str) -> str | None:
    """Without its heading, which may have a link, a date: `## [0.1.0] - 2026-12-01`."""
    parts = re.split(r"^## +(.+)$", changelog, flags=re.MULTILINE)
    for heading, section in zip(parts[1::2], parts[2::2], strict=True):
        if re.fullmatch(rf"\[?v?{re.escape(name)}\]?( +[-–] .*)?", heading.strip()):
            return section.strip()
    return None
