"""The programs of examples/clients, as docs/other-clients.md names them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fencepost_dev import jars
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.java import find_jdk
from fencepost_dev.tools import compile_java
from tests.client_matrix.releases import Release, installed, must, run
from tests.support.clients import create_topic
from tests.support.docs import ROOT
from tests.support.proxy import ProxyProcess
from tests.support.raw import Log

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1200)]
_PROGRAMS = ROOT / "examples" / "clients"
#: librdkafka is compiled.
_COMPILE_SECONDS = 900.0


def _java() -> list[str]:
    classes = compile_java([_PROGRAMS / "java" / "Append.java"])
    return [
        str(find_jdk().java),
        "-cp",
        f"{classes}:{jars.classpath(jars.release(jars.DEFAULT_VERSION).broker_lock)}",
        "Append",
    ]


def _go(client: str) -> list[str]:
    source = _PROGRAMS / client / "main.go"
    release = Release(f"append-{client}", "newest", lambda *_: [])

    def install(directory: Path) -> None:
        shutil.copy(source, directory)
        must(release, "go", "mod", "init", "append", cwd=directory)
        must(release, "go", "mod", "tidy", cwd=directory)
        must(release, "go", "build", "-o", "append", ".", cwd=directory)

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


@pytest.fixture(scope="module")
def proxy(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(kafka.bootstrap, tmp_path_factory.mktemp("proxy")) as process:
        yield process


def test_every_program_has_a_command() -> None:
    assert {each.name for each in _PROGRAMS.iterdir()} == set(_COMMANDS)
    page = (ROOT / "docs" / "other-clients.md").read_text("utf-8")
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
