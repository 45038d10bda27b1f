"""The programs of examples/clients, as docs/application-developers.md and docs/recipes/loader.md name them."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from kafka import KafkaProducer

from fencepost import Record
from fencepost.kafka_python import LogReader
from fencepost.recipes import by_key
from fencepost_dev import jars
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.java import find_jdk
from fencepost_dev.tools import compile_java
from tests.client_matrix.releases import Release, installed, must, run
from tests.support.clients import create_topic, set_check
from tests.support.docs import ROOT
from tests.support.fixtures import proxy_fixture
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.raw import Log
from tests.support.senders import free_proxy_port

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1200)]
_PROGRAMS = ROOT / "examples" / "clients"
#: librdkafka is compiled.
_COMPILE_SECONDS = 900.0


def _java(program: str = "Append") -> list[str]:
    classes = compile_java([_PROGRAMS / "java" / f"{program}.java"])
    return [
        str(find_jdk().java),
        "-cp",
        f"{classes}:{jars.classpath(jars.release(jars.DEFAULT_VERSION).broker_lock)}",
        program,
    ]


def _go(client: str) -> list[str]:
    source = _PROGRAMS / client / "main.go"
    release = Release(f"append-{client.replace('/', '-')}", "newest", lambda *_: [])

    def install(directory: Path) -> None:
        shutil.copy(source, directory)
        must(release, "go", "mod", "init", "append", cwd=directory)
        must(release, "go", "mod", "tidy", cwd=directory)
        built = run(["go", "build", "-o", "append", "."], directory)
        assert built.returncode == 0, built.stderr  # a program that does not compile is no reason to skip its test

    return [str(installed(release, [source], install) / "append")]


def _node() -> list[str]:
    source = _PROGRAMS / "kafkajs" / "append.js"
    release = Release("append-kafkajs", "newest", lambda *_: [])

    def install(directory: Path) -> None:
        shutil.copy(source, directory)
        must(release, "npm", "install", "--silent", "--ignore-scripts", "kafkajs", cwd=directory)

    return ["node", str(installed(release, [source], install) / source.name)]


def _rust() -> list[str]:
    sources = [_PROGRAMS / "rust" / "Cargo.toml", _PROGRAMS / "rust" / "src" / "main.rs"]
    release = Release("append-rdkafka", "newest", lambda *_: [])

    def install(directory: Path) -> None:
        shutil.copytree(_PROGRAMS / "rust", directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("target"))
        must(release, "cargo", "build", "--quiet", cwd=directory, seconds=_COMPILE_SECONDS)

    return [str(installed(release, sources, install) / "target" / "debug" / "append")]


_COMMANDS: dict[str, Callable[[], list[str]]] = {
    "java": _java,
    "franz-go": lambda: _go("franz-go"),
    "sarama": lambda: _go("sarama"),
    "kafkajs": _node,
    "rust": _rust,
}


proxy = proxy_fixture()


def test_every_program_has_a_command() -> None:
    assert {each.name for each in _PROGRAMS.iterdir()} == set(_COMMANDS)
    page = (ROOT / "docs" / "application-developers.md").read_text("utf-8")
    for client in _COMMANDS:
        assert f"`examples/clients/{client}/" in page


@pytest.mark.parametrize("client", _COMMANDS)
def test_program_appends_recognizes_a_refusal_and_retries(
    client: str, proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    command = _COMMANDS[client]()
    topic = create_topic(proxy.bootstrap, unique_topic("append"), "required")
    printed = []
    for value in ("one", "two", "three"):
        done = run([*command, proxy.bootstrap, topic, value])
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
    assert printed[0] == "appended at 0\n"
    for offset, text in enumerate(printed[1:], 1):
        first, last = text.splitlines()
        assert first.startswith("refused: ")
        assert last == f"appended at {offset}"
    assert Log(proxy.bootstrap).values(topic) == [b"one", b"two", b"three"]


@pytest.mark.parametrize("client", _COMMANDS)
def test_program_reads_over_a_transaction_marker(
    client: str, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    """At the log end, then before the last record."""
    command = _COMMANDS[client]()
    topic = create_topic(proxy.bootstrap, unique_topic("marker"))
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=topic)
    with closing(producer):
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"of a transaction", partition=0)
        producer.commit_transaction()
    set_check(proxy.bootstrap, topic, "required")
    for offset in (2, 3):
        done = run([*command, proxy.bootstrap, topic, "one"])
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == f"appended at {offset}"


_LOADERS: dict[str, Callable[[], list[str]]] = {"java": lambda: _java("Load"), "go": lambda: _go("franz-go/load")}
_PARTITIONS, _LINES_MAX = 3, 150
#: Length of `run` in the headers of the program.
_RUN_LENGTH = {"java": 36, "go": 26}


def test_loaders_are_short() -> None:
    page = (ROOT / "docs" / "recipes" / "loader.md").read_text("utf-8")
    for path in ("java/Load.java", "franz-go/load/main.go"):
        assert len((_PROGRAMS / path).read_text("utf-8").splitlines()) < _LINES_MAX
        assert f"`examples/clients/{path}`" in page


@pytest.mark.parametrize("language", _LOADERS)
def test_loader_program_and_python_load_each_line_once_under_kills(
    language: str, kafka: KafkaCluster, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    """First one of them alone, then both at once: loaders and the proxy are killed."""
    rng = random.Random(seed := random.randrange(1 << 32))
    print(f"seed {seed}")
    rows = [Record(b"%d" % number + b"x" * 60, b"key %d" % (number % 17)) for number in range(12_000)]
    file = tmp_path / "lines"
    with ProxyProcess(kafka.bootstrap, tmp_path, config=CHECKED_BY_NAME, port=free_proxy_port()) as proxy:
        topic = create_topic(proxy.bootstrap, unique_topic("required"), partitions=_PARTITIONS)
        program = [*_LOADERS[language](), proxy.bootstrap, topic, "lines", str(file)]
        python = [sys.executable, "-m", "tests.support.line_loader", proxy.bootstrap, topic, "lines", str(file)]
        for phase, commands in enumerate([[program], [python], *[[program, python]] * 2], 1):
            some = rows[: len(rows) * phase // 4]
            file.write_bytes(b"".join((row.key or b"") + b"\t" + (row.value or b"") + b"\n" for row in some))
            _load(commands, proxy if phase == 4 else None, rng)
        found: list[list[bytes | None]] = [[] for _ in range(_PARTITIONS)]
        lengths = set()
        with LogReader([(topic, each) for each in range(_PARTITIONS)], bootstrap_servers=kafka.bootstrap) as log:
            for (_, partition), record in log:
                found[partition].append(record.value)
                lengths |= {len(json.loads(value)["run"]) for name, value in record.headers if name == "fencepost-load"}
    expected: list[list[bytes | None]] = [[] for _ in range(_PARTITIONS)]
    for number, row in enumerate(rows, 1):
        expected[by_key(row, number, _PARTITIONS)].append(row.value)
    assert found == expected
    assert lengths == {_RUN_LENGTH[language], 16}


def _load(commands: Sequence[list[str]], proxy: ProxyProcess | None, rng: random.Random) -> None:
    """Run them until each has ended well; kill one of them, and the proxy, once."""
    running = {number: subprocess.Popen(command, cwd=ROOT) for number, command in enumerate(commands)}
    kill_at, give_up, proxy_killed = time.monotonic() + rng.uniform(0.2, 2.5), time.monotonic() + 240, proxy is None
    killed = False
    try:
        while running:
            assert time.monotonic() < give_up
            time.sleep(0.02)
            if time.monotonic() > kill_at and not killed:
                rng.choice(list(running.values())).kill()
                killed, kill_at = True, time.monotonic() + rng.uniform(0, 1.5)
            elif time.monotonic() > kill_at and not proxy_killed:
                assert proxy is not None
                proxy.kill()
                proxy.restart()
                proxy_killed = True
            for number, process in list(running.items()):
                if process.poll() == 0:
                    del running[number]
                elif process.poll() is not None:
                    running[number] = subprocess.Popen(commands[number], cwd=ROOT)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
