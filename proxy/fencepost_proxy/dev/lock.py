"""For maintainers: make a jar lock file.

    python -m fencepost_proxy.dev.lock kafka-4.3.1                      # again, from what its own comments say
    python -m fencepost_proxy.dev.lock kafka-4.5.0 ROOT… [--without GROUP:ARTIFACT…]      # a new one

ROOT is group:artifact:version. `--without` names what the place of use already has (Spark's own jars). Every jar that
Maven would put on the runtime classpath of the roots is resolved by the jgo library, fetched and hashed. Where a new
lock is for a Kafka release, add it to `RELEASES` in jars.py.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jgo.maven import MavenContext

from fencepost_proxy.dev.jars import LOCKS, Jar, parse_lock, repository_url, say

TIMEOUT_SECONDS = 60
_FROM, _WITHOUT = "# from ", "# without "


def resolve(roots: Iterable[str], without: Iterable[str]) -> list[Jar]:
    """The runtime classpath of `roots` (group:artifact:version), each jar downloaded and hashed, sorted by name."""
    unwanted = set(without)
    with tempfile.TemporaryDirectory(prefix="fencepost-lock-") as repository_cache:
        context = MavenContext(
            repo_cache=Path(repository_cache), remote_repos={"repository": repository_url()}, timeout=TIMEOUT_SECONDS
        )
        # "!" keeps each root's own dependencyManagement to itself. Without it, jgo applies that of the logging
        # binding's parent to all, which turned Kafka's zstd-jni and lz4-java into other versions.
        inputs, transitive = context.resolver.resolve([context.create_dependency(f"{root}!") for root in roots])
        wanted = [
            dependency
            for dependency in (*inputs, *transitive)
            if dependency.type == "jar" and f"{dependency.groupId}:{dependency.artifactId}" not in unwanted
        ]
        with ThreadPoolExecutor(8) as pool:
            files = list(pool.map(lambda dependency: dependency.artifact.resolve(), wanted))
        return sorted(
            (
                Jar(
                    dependency.groupId,
                    dependency.artifactId,
                    dependency.version,
                    dependency.classifier or "",
                    hashlib.sha256(file.read_bytes()).hexdigest(),
                )
                for dependency, file in zip(wanted, files, strict=True)
            ),
            key=str,
        )


def write_lock(path: Path, roots: list[str], without: list[str]) -> int:
    """Returns the number of jars."""
    jars = resolve(roots, without)
    header = ["# Made by fencepost_proxy.dev.lock; do not edit by hand."]
    header += [f"{_FROM}{root}" for root in roots]
    header += [f"{_WITHOUT}{name}" for name in without]
    text = "\n".join([*header, *(f"{jar} {jar.sha256}" for jar in jars)]) + "\n"
    parse_lock(text, path.stem)
    path.write_text(text, "utf-8")
    return len(jars)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fencepost_proxy.dev.lock", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", help="name of the lock, without .lock")
    parser.add_argument("roots", nargs="*", metavar="ROOT", help="group:artifact:version; default: as the lock says")
    parser.add_argument("--without", action="append", default=[], metavar="GROUP:ARTIFACT")
    args = parser.parse_args()
    path = LOCKS / f"{args.name}.lock"
    roots, without = args.roots, args.without
    if not roots:
        if not path.exists():
            parser.error(f"{path} does not exist: name the ROOTs to make it from")
        lines = path.read_text("utf-8").splitlines()
        roots = [line.removeprefix(_FROM) for line in lines if line.startswith(_FROM)]
        without = [line.removeprefix(_WITHOUT) for line in lines if line.startswith(_WITHOUT)]
    count = write_lock(path, roots, without)
    say(f"{path}: {count} jars")


if __name__ == "__main__":
    main()
