"""Installs one artefact into an empty environment, and runs docs/quickstart.md there."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from release.artefacts import clean_environment, run
from release.source import ReleaseError

#: Kafka's jars are downloaded by the first.
READY_SECONDS = 600.0
#: Runs the page's Python blocks, one a file, in one namespace. Prints each, and what it printed or raised.
DRIVER = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
names = {}
for file in sys.argv[1:]:
    code = Path(file).read_text("utf-8")
    print("".join(f">>> {line}\\n" for line in code.splitlines() if line), end="", flush=True)
    try:
        exec(compile(code, file, "exec"), names)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
for name in ("producer", "ordinary"):
    names[name].close()
"""


def blocks(page: str) -> list[tuple[str, str]]:
    """The Python blocks, each with the text block that follows it, or an empty text."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    pairs = []
    for number, (language, text) in enumerate(found):
        if language == "python":
            following, shown = found[number + 1] if number + 1 < len(found) else ("", "")
            pairs.append((text, shown.strip() if following == "text" else ""))
    return pairs


def try_out(artefact: Path, version: str, executor: str | None, page: str, directory: Path) -> str:
    """The transcript. `executor`: native or pure Python, None for either. Raises ReleaseError with the transcript."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    environment = clean_environment()
    run(sys.executable, "-m", "venv", directory / "environment")
    programs = directory / "environment" / "bin"
    transcript = [f"$ python3 -m venv environment && environment/bin/pip install '{artefact.name}[proxy,dev]'\n"]
    pip = (programs / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check")
    run(*pip, f"{artefact}[proxy,dev]", cwd=directory, env=environment)
    printed = run(programs / "fencepost", "--version", cwd=directory, env=environment)
    transcript.append(f"$ fencepost --version\n{printed}")
    if not printed.startswith(f"fencepost {version} (") or (executor and f"({executor}" not in printed):
        raise ReleaseError(f"{artefact.name} says that it is {printed.strip()}")

    # This page may be newer than the artefact, never older.
    steps = blocks(page)
    if not steps:
        raise ReleaseError("docs/quickstart.md has no Python block")
    with _development_cluster(programs / "fencepost", directory) as bootstrap:
        transcript.append("$ fencepost dev &\n$ python docs/quickstart.md\n")
        files = []
        for number, (code, _) in enumerate(steps):
            files.append(directory / f"block-{number}.py")
            files[-1].write_text(code.replace("127.0.0.1:19092", bootstrap), "utf-8")
        driver = directory / "driver.py"
        driver.write_text(DRIVER, "utf-8")
        shown = run(programs / "python", driver, *files, cwd=directory, env=environment)
        transcript.append(shown)
        read = run(programs / "fencepost", "read", "orders", "--bootstrap", bootstrap, cwd=directory, env=environment)
        transcript.append(f"$ fencepost read orders\n{read}")
    text = "".join(transcript)
    missing = [expected for _, expected in steps if expected not in shown]
    if missing or [line.split("\t")[1] for line in read.splitlines() if "\t" in line] != ["0", "1"]:
        raise ReleaseError(f"{artefact.name} does not do what docs/quickstart.md says: {missing}\n{text}")
    return text


@contextmanager
def _development_cluster(command: Path, directory: Path) -> Iterator[str]:
    """Its proxy's address, on free ports."""
    with (directory / "dev.log").open("w") as log:
        process = subprocess.Popen(
            [command, "dev", "--listen", "127.0.0.1:0", "--status", "127.0.0.1:0"],
            cwd=directory,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    limit = threading.Timer(READY_SECONDS, process.kill)
    limit.start()
    try:
        assert process.stdout is not None
        ready = re.match(r"ready bootstrap=(\S+)", process.stdout.readline())
        if ready is None:
            raise ReleaseError(f"fencepost dev did not start:\n{(directory / 'dev.log').read_text('utf-8')}")
        yield ready[1]
    finally:
        limit.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
