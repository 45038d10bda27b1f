"""Build all that a release consists of, from a tag, in a clean environment, and try each part (CONTRIBUTING.md).

Needs git, Rust, a JDK 17 or newer, and a package index. Changes nothing outside build/release, and publishes nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from release.artefacts import (
    CHECKSUMS,
    MACHINES,
    Builder,
    CannotBuild,
    build_images,
    read_checksums,
    runs_here,
    write_checksums,
)
from release.quickstart import try_out
from release.source import ROOT, ReleaseError, Source, commit_of, export, git, release_notes

PARTS = (*MACHINES, "images", "quickstart")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument("--tag", help="such as v0.1.0 (default: a trial from HEAD, which is marked as such)")
    parser.add_argument("--without", action="append", default=[], choices=PARTS, help="leave a part out; repeatable")
    parser.add_argument(
        "--to", type=Path, default=ROOT / "build" / "release", metavar="DIR", help="default: %(default)s"
    )
    arguments = parser.parse_args()
    try:
        left_out = release(arguments.tag, arguments.to, frozenset(arguments.without))
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 1 if left_out else 0


def release(tag: str | None, to: Path, without: frozenset[str]) -> list[str]:
    """Returns what is missing in the release because it could not be built here."""
    directory = to.resolve() / (tag or f"trial-{commit_of(None)[:12]}")
    dist, transcripts = directory / "dist", directory / "transcripts"
    earlier = read_checksums(dist)
    source = export(tag, directory / "source")
    say(f"fencepost {source.version} from {describe(source)}")
    changes = release_notes(source)

    builder = Builder(source, directory / "tools", dist)
    missing: list[str] = []
    built = [builder.sdist(), builder.pure_wheel()]
    for machine in MACHINES:
        if machine in without:
            say(f"wheel for {machine}: left out by --without")
            continue
        try:
            built.append(builder.native_wheel(machine))
        except CannotBuild as error:
            missing.append(str(error))
            say(str(error))
    for file in built:
        say(f"built {file.name}")
    builder.check_with_twine(built)
    say(f"twine check --strict: {len(built)} files passed")
    say(f"built {builder.sbom().name}")
    mark = "" if source.tag else f"**A trial from commit {source.commit}, not a release.**\n\n"
    (dist / "RELEASE-NOTES.md").write_text(f"# Fencepost {source.version}\n\n{mark}{changes}\n", "utf-8")
    write_checksums(dist)
    compare(earlier, read_checksums(dist))

    if "quickstart" not in without:
        transcripts.mkdir(exist_ok=True)
        page = (source.tree / "docs" / "quickstart.md").read_text("utf-8")
        for file in built:
            try_here(file, source, page, directory / "try", transcripts)
    try:
        if "images" not in without:
            for image in build_images(source):
                say(f"built image {image}")
    except CannotBuild as error:
        say(str(error))
    say(f"{'complete' if not missing else 'INCOMPLETE'}: {dist}")
    return missing


def describe(source: Source) -> str:
    if source.tag:
        return f"tag {source.tag}, commit {source.commit}"
    changed = len(git("status", "--porcelain").splitlines())
    ignored = f"; {changed} uncommitted changes of the work tree are not in it" if changed else ""
    return f"HEAD, commit {source.commit}: A TRIAL, NOT A RELEASE (a release is made from a tag: TAG=v0.1.0){ignored}"


def try_here(file: Path, source: Source, page: str, directory: Path, transcripts: Path) -> None:
    if not runs_here(file):
        say(f"{file.name}: not installed, since this machine has another processor; its symbols were checked")
        return
    begun = time.monotonic()
    # An sdist is built by whatever the environment has.
    executor = None if file.suffix == ".gz" else "pure Python" if file.name.endswith("-none-any.whl") else "native"
    transcript = try_out(file, source.version, executor, page, directory)
    (transcripts / f"{file.name}.txt").write_text(transcript, "utf-8")
    say(f"{file.name}: installed into an empty environment, ran the quickstart ({time.monotonic() - begun:.0f} s)")


def compare(earlier: dict[str, str], now: dict[str, str]) -> None:
    """Says whether an earlier run from this commit made the same files."""
    common = sorted((earlier.keys() & now.keys()) - {CHECKSUMS})
    if differing := [name for name in common if earlier[name] != now[name]]:
        say(f"other bytes than in the run before: {', '.join(differing)}")
    elif common:
        say(f"the same bytes as in the run before: {len(common)} files")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
