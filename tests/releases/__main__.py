"""`python -m tests.releases`: test the proxy with every Kafka release, one after the other.

Print the tables of docs/kafka-releases.md; `--write` updates the page. Exit status 1: a step failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fencepost_dev.jars import RELEASES
from tests.releases import page, story
from tests.releases.story import Release


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.releases")
    parser.add_argument("--releases", default=",".join(reversed(RELEASES)), help="comma-separated (default: all)")
    parser.add_argument("--write", action="store_true", help="update docs/kafka-releases.md")
    parser.add_argument(
        "--keep", type=Path, metavar="DIRECTORY", help="store results of each release, for a later --write"
    )
    parser.add_argument("--one", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    if options.one:
        return _one(options.one)
    directory = options.keep or Path(tempfile.mkdtemp(prefix="fencepost-releases-"))
    directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    found = [_reported(version, directory) for version in options.releases.split(",")]
    print(f"\n{page.made(found)}")
    if options.write:
        page.write(found)
    holds = all(each.holds for each in found)
    print(f"{'passed' if holds else 'FAILED'}; {time.monotonic() - began:.0f} s")
    return 0 if holds else 1


def _reported(version: str, directory: Path) -> Release:
    """Run in a separate process, which caches facts about one release. Reuse a stored result."""
    file = directory / f"{version}.json"
    if not file.exists():
        command = [sys.executable, "-m", "tests.releases", "--one", str(file)]
        subprocess.run(command, env={**os.environ, "FENCEPOST_KAFKA": version}, check=True)
    return Release.from_json(json.loads(file.read_text()))


def _one(file: Path) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="fencepost-release-") as directory,
        story.front(Path(directory)) as where,
    ):
        release = story.report(where, say=lambda text: print(text, flush=True))
    file.write_text(json.dumps(release.to_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
