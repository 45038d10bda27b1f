"""Wheel and sdist, their contents, and each extra in an environment that contains nothing else."""

from __future__ import annotations

import ast
import csv
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import closing
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

import pytest

from fencepost.errors import OffsetMismatchError
from fencepost.kafka_python import ConditionalProducer
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.jars import fetch
from tests.support.clients import create_topic
from tests.support.ports import free_ports_in_a_row
from tests.support.proxy import ProxyProcess
from tests.support.spark import SETTINGS

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
PACKAGES = {"fencepost", "fencepost_dev", "fencepost_policies", "fencepost_proxy", "pyspark_fencepost"}
NATIVE = "fencepost_native.abi3.so"


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env=bare() | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def bare() -> dict[str, str]:
    """The environment without variables that lead to this work tree."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV") and not name.startswith(("COVERAGE", "COV_", "FENCEPOST_"))
    }


def build(source: Path, into: Path, *targets: str, **environment: str) -> None:
    command = (sys.executable, "-m", "hatchling", "build", *(f"-t{each}" for each in targets), "-d", into)
    run(*command, cwd=source, **environment)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of `make dist`, or new ones."""
    if given := os.environ.get("DIST"):
        return ROOT / given
    directory = tmp_path_factory.mktemp("dist")
    build(ROOT, directory, "sdist", "wheel")
    return directory


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (file,) = built.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    (file,) = built.glob("*.tar.gz")
    return file


def test_wheel_contains_packages_type_markers_and_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(about).decode())

    information = about.rpartition("/")[0]
    native = {NATIVE} if wheel_is_native(wheel) else set()
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, *native, information}
    assert {f"{each}/py.typed" for each in PACKAGES} <= names
    assert f"{information}/licenses/LICENSE" in names
    # All modules in the work tree and the files that they read, but no build output.
    there = run("git", "ls-files", "client", "policies", "proxy").split()
    new = run("git", "ls-files", "--others", "--exclude-standard", "client", "policies", "proxy").split()
    entered = {name for name in names if not name.startswith(information)} - native
    assert entered == {each.partition("/")[2] for each in (*there, *new) if (ROOT / each).exists()}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra") or []) == {"dev", "keystores", "proxy", "spark"}
    assert not [each for each in metadata.get_all("Requires-Dist") or [] if "extra ==" not in each]


def wheel_is_native(wheel: Path) -> bool:
    """By its platform; otherwise it is for every platform."""
    pure = wheel.name.endswith("-py3-none-any.whl")
    assert pure or re.search(r"-cp311-abi3-(manylinux|macosx)_\d+_\d+_\w+\.whl$", wheel.name)
    return not pure


def test_wheel_is_native_if_it_can_be_built(wheel: Path) -> None:
    code = "import hatch_build; hatch_build.build()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert wheel_is_native(wheel) is (done.returncode == 0)


@pytest.mark.skipif(sys.platform != "linux", reason="manylinux is for Linux")
def test_manylinux_tag_names_a_glibc_that_suffices(wheel: Path) -> None:
    """`make dist` links by zig, for the oldest glibc that Rust supports; others as their linker does."""
    if not wheel_is_native(wheel):
        pytest.skip("the wheel is pure Python")
    (tag,) = re.findall(r"manylinux_(\d+)_(\d+)_", wheel.name)
    # It also verifies that nothing but the C library is needed.
    audited = run(sys.executable, "-m", "auditwheel", "show", wheel)
    assert re.search(r'following platform tag: "manylinux_\d', audited.replace("\n", " ")), audited
    needed = [(int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", audited)]
    assert max(needed) <= (int(tag[0]), int(tag[1])), audited
    if find_spec("ziglang") is not None:
        assert tag == ("2", "17")


def test_build_that_requires_the_native_module_fails_without_cargo(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"there is no cargo\n.*FENCEPOST_NATIVE=on.*install Rust"):
        build(ROOT, tmp_path, "wheel", FENCEPOST_NATIVE="on", PATH=str(tmp_path))
    assert not list(tmp_path.glob("*.whl"))


def test_wheel_without_native_module_is_pure(tmp_path: Path) -> None:
    build(ROOT, tmp_path, "wheel", FENCEPOST_NATIVE="off")
    (file,) = tmp_path.glob("*.whl")
    assert not wheel_is_native(file)
    with zipfile.ZipFile(file) as archive:
        assert NATIVE not in archive.namelist()


def test_the_sdist_makes_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert not [name for name in names if any(part in name for part in ("/tests/", "/docs/", "/.venv/", "__pycache__"))]

    build(unpacked, tmp_path / "again", "wheel")

    (again,) = (tmp_path / "again").glob("*.whl")
    assert again.read_bytes() == wheel.read_bytes()


def environment(directory: Path, wheel: Path, extras: str, lock: str) -> Path:
    """The scripts directory of a new environment with only fencepost[extras], in the locked versions.

    The test environment uses the same versions, so uv takes them from its cache. Otherwise pip downloads them.
    """
    venv.create(directory, symlinks=True)
    programs = directory / "bin"
    uv = [Path(sys.executable).with_name("uv"), "pip", "install", "-q", "--offline", "--python", programs / "python"]
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "-q", "--disable-pip-version-check"]
    try:
        run(*uv, f"{wheel}[{extras}]", "--constraints", ROOT / "locks" / lock)
    except AssertionError:
        run(*pip, "--require-hashes", "-r", ROOT / "locks" / lock)
        run(*pip, "--no-deps", wheel)
    return programs


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("environment"), wheel, "proxy", "proxy.txt")


def test_commands_run_where_nothing_else_is_installed(installed: Path, wheel: Path, tmp_path: Path) -> None:
    version = run(installed / "fencepost", "--version", cwd=tmp_path)
    executor = r"native 0\S+" if wheel_is_native(wheel) else "pure Python: fencepost_native is not installed"
    assert re.fullmatch(rf"fencepost 0\S+ \({executor}\)\n", version)
    assert "--upstream" in run(installed / "fencepost", "proxy", "--help", cwd=tmp_path)
    assert "_shtab_fencepost" in run(installed / "fencepost", "completion", "bash", cwd=tmp_path)
    # A missing dependency is reported in one line.
    demo = subprocess.run(
        [installed / "fencepost", "demo"], cwd=tmp_path, env=bare(), capture_output=True, text=True, check=False
    )
    assert demo.returncode == 2
    assert "pip install 'fencepost[proxy,dev,spark]'" in demo.stderr


def test_proxy_extra_has_all_that_the_proxy_imports(installed: Path) -> None:
    """Some modules import others only when they are needed, such as those of a login."""
    imported = set()
    for file in (ROOT / "proxy" / "fencepost_proxy").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module))
    find = "import sys; from importlib.util import find_spec; print([m for m in sys.argv[1:] if not find_spec(m)])"
    packages = sorted({name.partition(".")[0] for name in imported} - {"fencepost_native"})
    assert "kafka" in packages
    assert run(installed / "python", "-c", find, *packages) == "[]\n"


@pytest.fixture
def proxy(installed: Path, kafka: KafkaCluster, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Its bootstrap address and status page. The proxy starts and stops as under systemd, which it notifies of both."""
    port = free_ports_in_a_row(4)
    bootstrap, status = f"127.0.0.1:{port}", f"127.0.0.1:{port + 3}"
    options = ("--listen", bootstrap, "--status", status)
    notified = tmp_path / "notified"
    with (tmp_path / "log").open("w") as log, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(notified))
        manager.settimeout(60)
        process = subprocess.Popen(
            [installed / "fencepost", "proxy", "--upstream", kafka.bootstrap, *options],
            cwd=tmp_path,
            env={**bare(), "NOTIFY_SOCKET": str(notified)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == f"ready bootstrap={bootstrap}\n", (tmp_path / "log").read_text()
            assert manager.recv(1000) == f"READY=1\nSTATUS=serving clients at {bootstrap}".encode()
            yield bootstrap, status
            process.terminate()
            assert manager.recv(1000) == b"STOPPING=1"
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.communicate()


@pytest.mark.kafka
def test_proxy_from_wheel_checks_expected_offsets(installed: Path, proxy: tuple[str, str]) -> None:
    bootstrap, status = proxy
    assert run(installed / "fencepost", "health", "--status", status) == "ready\n"
    topic = create_topic(bootstrap, "shipped", check="required")
    with closing(ConditionalProducer(bootstrap_servers=bootstrap)) as producer:
        assert producer.send(topic, b"first", partition=0, expected_offset=0).get(60).offset == 0
        with pytest.raises(OffsetMismatchError):
            producer.send(topic, b"stale", partition=0, expected_offset=0).get(60)


@pytest.mark.kafka
def test_dev_command_from_its_extras_alone(wheel: Path, tmp_path: Path) -> None:
    """`fencepost dev`: the proxy, and Kafka's jars fetched by jgo."""
    programs = environment(tmp_path / "environment", wheel, "proxy,dev", "run.txt")
    with subprocess.Popen(
        [programs / "fencepost", "dev", "--listen", f"127.0.0.1:{free_ports_in_a_row(3)}"],
        cwd=tmp_path,
        env=bare(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith("ready bootstrap=")
            bootstrap = ready.split()[1].removeprefix("bootstrap=")
            topic = create_topic(bootstrap, "dev", check="required")
            with closing(ConditionalProducer(bootstrap_servers=bootstrap)) as producer:
                assert producer.send(topic, b"first", partition=0, expected_offset=0).get(60).offset == 0
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.kafka
@pytest.mark.spark
def test_every_spark_job_from_its_extra_alone(
    wheel: Path, kafka: KafkaCluster, proxied: ProxyProcess, tmp_path: Path
) -> None:
    """From locks/spark.txt, without the other packages of the test environment."""
    programs = environment(tmp_path / "environment", wheel, "spark", "spark.txt")
    executor = "native" if wheel_is_native(wheel) else "columns"
    code = "from fencepost.spark.native import EXECUTOR; print(EXECUTOR.batch.__module__)"
    assert run(programs / "python", "-c", code, cwd=tmp_path) == f"fencepost.spark.{executor}\n"
    loaded, copied = (create_topic(proxied.bootstrap, each, check="true") for each in ("loaded.rows", "copied.rows"))
    rows = tmp_path / "rows.csv"
    with rows.open("w", newline="") as file:
        csv.writer(file).writerows([("id", "name"), *((i, f"name {i}") for i in range(100))])
    settings = {**SETTINGS, "spark.log.level": "WARN", "spark.jars": ",".join(map(str, fetch("spark-kafka")))}

    def job(name: str, bootstrap: str, *arguments: object) -> str:
        options = [word for pair in settings.items() for word in ("--conf", "=".join(pair))]
        submit = (programs / "spark-submit", "--master", "local[2]", *options, ROOT / "spark_jobs" / f"{name}.py")
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        return run(*submit, "--bootstrap", bootstrap, *arguments, cwd=tmp_path, PATH=path, PYSPARK_PYTHON="python3")

    stream = ("--from", loaded, "--to", copied, "--sink-id", "copy", "--checkpoint", tmp_path / "checkpoint", "--once")
    assert "complete: 100 rows" in job("bulk_load", proxied.bootstrap, "--input", rows, "--topic", loaded)
    job("stream", proxied.bootstrap, *stream)
    assert "PROVED: every row exactly once" in job("verify", kafka.bootstrap, "--input", rows, "--topic", copied)


def test_key_stores_from_their_extra_alone(wheel: Path, tmp_path: Path) -> None:
    programs = environment(tmp_path / "environment", wheel, "keystores", "all.txt")
    store = ROOT / "tests" / "unit" / "keystores" / "trust.p12"
    code = f"""from pathlib import Path
from fencepost.java_keystores import trusted_certificates
print(len(trusted_certificates(Path({str(store)!r}).read_bytes(), "changeit")))"""
    assert run(programs / "python", "-c", code, cwd=tmp_path) == "1\n"


def test_every_extra_has_a_test_here() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) == {"proxy", "dev", "spark", "keystores"}
