"""How to install a release of a client, and run its program.

The first test that needs a release installs it. It stays in the cache. A test is skipped where the release cannot be
installed, because there is no Go, npm or package registry.

The program receives what `Given` has, as JSON (Java: as arguments). It sends three records in each codec, commits a
transaction and aborts another, has a record refused if required, and reads the
topic in a consumer group until it finds the record "committed". It prints lines: a name, a tab, and what it observed.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from fencepost_dev import jars
from fencepost_dev.java import find_jdk
from fencepost_dev.tools import compile_java

_HERE = Path(__file__).parent
_PROGRAMS = _HERE / "programs"
_SECONDS = 200.0
_ALL_CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
#: Without further packages.
_OWN_CODECS = ("none", "gzip")
_ALL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")


@dataclass(frozen=True)
class Given:
    """`mechanism` – "" without TLS and login. `refused` – have a record refused. `java` – a Java client's file."""

    bootstrap: str
    topic: str
    group: str
    transaction: str
    mechanism: str
    user: str
    password: str
    token: str
    ca_file: str
    codecs: Sequence[str]
    refused: bool
    java: str


@dataclass(frozen=True)
class Release:
    """`command` – installs it, and returns the command of its program. `mechanisms` – what it can log in with."""

    name: str
    version: str
    command: Callable[[Release, Given], list[str]]
    codecs: tuple[str, ...] = _ALL_CODECS
    mechanisms: tuple[str, ...] = _ALL_MECHANISMS
    #: Of its package, by npm.
    integrity: str = ""

    def __str__(self) -> str:
        return f"{self.name}-{self.version}"

    def observed(self, given: Given) -> dict[str, str]:
        """What its program prints."""
        done = run(self.command(self, given))
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)


def run(
    command: Sequence[str | Path], cwd: Path | None = None, seconds: float = _SECONDS
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=cwd)


def installed(release: Release, sources: Sequence[Path], install: Callable[[Path], None]) -> Path:
    """The release's directory in the cache, where `install` is executed once for each state of `sources`."""
    state = hashlib.sha256(b"".join(each.read_bytes() for each in sources) + sys.version.encode()).hexdigest()[:16]
    directory = jars.cache_directory() / "clients" / f"{release}-{state}"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "complete").exists():
            install(directory)
            (directory / "complete").touch()
    return directory


def must(release: Release, *command: str | Path, cwd: Path | None = None, seconds: float = _SECONDS) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{release} requires {command[0]}")
    done = run(command, cwd, seconds)
    assert "DO NOT MATCH THE HASHES" not in done.stderr, done.stderr
    if done.returncode:
        pytest.skip(
            f"{release} cannot be installed (is a package registry within reach?): {done.stderr.strip()[-300:]}"
        )
    return done.stdout


def _python(release: Release, given: Given) -> list[str]:
    pinned = _HERE / "pinned" / f"{release}.txt"
    if release.version == "installed":
        python = Path(sys.executable)
    else:

        def install(directory: Path) -> None:
            must(release, sys.executable, "-m", "venv", "--without-pip", directory)
            command = [sys.executable, "-m", "pip", "--python", directory / "bin" / "python", "install", "-q"]
            command += ["--disable-pip-version-check", "--retries", "1", "--only-binary", ":all:", "--require-hashes"]
            must(release, *command, "-r", pinned)

        python = installed(release, [pinned], install) / "bin" / "python"
    return [str(python), "-I", str(_PROGRAMS / "client.py"), json.dumps({**asdict(given), "library": release.name})]


def _go(release: Release, given: Given) -> list[str]:
    program, common = _PROGRAMS / f"{release.name}.go", _PROGRAMS / "common.go"

    def install(directory: Path) -> None:
        module = {"franz-go": "twmb/franz-go", "sarama": "IBM/sarama", "kafka-go": "segmentio/kafka-go"}[release.name]
        (directory / "go.mod").write_text(f"module client\n\nrequire github.com/{module} v{release.version}\n")
        for each in (program, common):
            shutil.copy(each, directory)
        must(release, "go", "mod", "tidy", cwd=directory)
        assert f"{module} v{release.version}" in (directory / "go.mod").read_text()
        must(release, "go", "build", "-o", "client", ".", cwd=directory)

    return [str(installed(release, [program, common], install) / "client"), json.dumps(asdict(given))]


def _node(release: Release, given: Given) -> list[str]:
    program = _PROGRAMS / f"{release.name}.js"

    def install(directory: Path) -> None:
        package = must(release, "npm", "pack", "--silent", f"{release.name}@{release.version}", cwd=directory).strip()
        found = base64.b64encode(hashlib.sha512((directory / package).read_bytes()).digest()).decode()
        assert found == release.integrity, f"{package} has another hash: {found}"
        must(release, "npm", "install", "--silent", "--ignore-scripts", f"./{package}", cwd=directory)
        shutil.copy(program, directory)

    directory = installed(release, [program], install)
    return ["node", str(directory / program.name), json.dumps(asdict(given))]


def _java(release: Release, given: Given) -> list[str]:
    # Compiled for the newest release; what it uses is in all of them.
    classes = compile_java([_PROGRAMS / "MatrixClient.java"])
    lock = {"2.8.2": jars.OLD_BROKER_LOCK, "3.7.2": jars.OLD_CLIENTS_LOCK}.get(release.version)
    classpath = jars.classpath(lock or jars.release(release.version).broker_lock)
    arguments = [given.java, given.topic, given.group, given.transaction, ",".join(given.codecs)]
    return [
        str(find_jdk().java),
        "-cp",
        f"{classes}:{classpath}",
        "MatrixClient",
        *arguments,
        str(given.refused).lower(),
    ]


#: SCRAM in librdkafka before 2.6.1 repeats its nonce, which current Kafka refuses, with or without a proxy.
_NO_SCRAM = ("PLAIN", "OAUTHBEARER")
_GO_MECHANISMS = ("PLAIN", "SCRAM-SHA-512")
_KAFKAJS = "j/YeapB1vfPT2iOIUn/vxdyKEuhuY2PxMBvf5JWux6iSaukAccrMtXEY/Lb7OvavDhOWME589bpLrEdnVHjfjA=="

OLDEST = (
    Release("kafka-python", "2.0.2", _python, _OWN_CODECS),
    Release("aiokafka", "0.8.1", _python, _OWN_CODECS),
    Release("confluent-kafka", "2.0.2", _python, mechanisms=_NO_SCRAM),
    Release("Java", "2.8.2", _java),
)
OTHERS = (
    Release("kafka-python", "2.2.15", _python, _OWN_CODECS),
    Release("kafka-python", "installed", _python, _OWN_CODECS),
    Release("aiokafka", "0.12.0", _python, _OWN_CODECS),
    Release("aiokafka", "installed", _python),
    Release("confluent-kafka", "2.10.1", _python),
    Release("confluent-kafka", "installed", _python),
    # Its lock lacks Jackson, which OAUTHBEARER needs.
    Release("Java", "3.7.2", _java, mechanisms=_ALL_MECHANISMS[:-1]),
    *(Release("Java", version, _java) for version in ("3.9.2", "4.0.2", "4.2.2", "4.4.0")),
    Release("franz-go", "1.14.0", _go),
    Release("franz-go", "1.22.3", _go),
    Release("sarama", "1.40.1", _go, mechanisms=_GO_MECHANISMS),
    Release("sarama", "1.61.1", _go, mechanisms=_GO_MECHANISMS),
    Release("kafka-go", "0.4.42", _go, mechanisms=_GO_MECHANISMS),
    Release("kafka-go", "0.4.51", _go, mechanisms=_GO_MECHANISMS),
    Release("kafkajs", "2.2.4", _node, _OWN_CODECS, integrity=_KAFKAJS),
)
