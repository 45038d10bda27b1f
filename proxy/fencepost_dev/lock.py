"""Create or regenerate a jar lock file (for maintainers).

    python -m fencepost_dev.lock kafka-4.3.1                      # regenerate, from the comments in the file
    python -m fencepost_dev.lock kafka-4.5.0 ROOT… [--without GROUP:ARTIFACT…]      # create

ROOT is group:artifact:version. `--without` excludes jars that the runtime already has (Spark's own). The jgo library
resolves every jar of the roots' Maven runtime classpath; each is downloaded and hashed. Add a lock of a new Kafka
release to `RELEASES` in jars.py.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jgo.maven import MavenContext

from fencepost_dev.jars import LOCKS, Jar, parse_lock, repository_url, say

TIMEOUT_SECONDS = 60
_FROM, _WITHOUT = "# from ", "# without "


def resolve(roots: Iterable[str], without: Iterable[str]) -> list[Jar]:
    """The runtime classpath of `roots` (group:artifact:version), downloaded, hashed and sorted by name."""
    unwanted = set(without)
    with tempfile.TemporaryDirectory(prefix="fencepost-lock-") as repository_cache:
        context = MavenContext(
            repo_cache=Path(repository_cache), remote_repos={"repository": repository_url()}, timeout=TIMEOUT_SECONDS
        )
        # "!" limits each root's dependencyManagement to that root. Otherwise jgo applies that of the logging binding's
        # parent to all roots, which changes the versions of Kafka's zstd-jni and lz4-java.
        inputs, transitive = context.resolver.resolve([context.create_dependency(f"{root}!") for root in roots])
        requested = [
            dependency
            for dependency in (*inputs, *transitive)
            if dependency.type == "jar" and f"{dependency.groupId}:{dependency.artifactId}" not in unwanted
        ]
        with ThreadPoolExecutor(8) as pool:
            files = list(pool.map(lambda dependency: dependency.artifact.resolve(), requested))
        return sorted(
            (
                Jar(
                    dependency.groupId,
                    dependency.artifactId,
                    dependency.version,
                    dependency.classifier or "",
                    hashlib.sha256(file.read_bytes()).hexdigest(),
                )
                for dependency, file in zip(requested, files, strict=True)
            ),
            key=str,
        )


def write_lock(path: Path, roots: list[str], without: list[str]) -> int:
    """Returns the number of jars."""
    jars = resolve(roots, without)
    header = ["# Made by fencepost_dev.lock; do not edit by hand."]
    header += [f"{_FROM}{root}" for root in roots]
    header += [f"{_WITHOUT}{name}" for name in without]
    text = "\n".join([*header, *(f"{jar} {jar.sha256}" for jar in jars)]) + "\n"
    parse_lock(text, path.stem)
    path.write_text(text, "utf-8")
    return len(jars)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fencepost_dev.lock", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", help="name of the lock file, without .lock")
    parser.add_argument(
        "roots", nargs="*", metavar="ROOT", help="group:artifact:version (default: the roots in the lock file)"
    )
    parser.add_argument("--without", action="append", default=[], metavar="GROUP:ARTIFACT")
    args = parser.parse_args()
    path = LOCKS / f"{args.name}.lock"
    roots, without = args.roots, args.without
    if not roots:
        if not path.exists():
            parser.error(f"{path} does not exist: ROOTs are needed to create it")
        lines = path.read_text("utf-8").splitlines()
        roots = [line.removeprefix(_FROM) for line in lines if line.startswith(_FROM)]
        without = [line.removeprefix(_WITHOUT) for line in lines if line.startswith(_WITHOUT)]
    count = write_lock(path, roots, without)
    say(f"{path}: {count} jars")


if __name__ == "__main__":
    main()
