"""deploy/docker/ and docker-compose.yml, as text: commands, users and permissions.

`tests/integration/test_compose.py` runs them, where there is a Docker daemon.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml

from fencepost_dev import two_writers
from fencepost_dev.jars import release
from fencepost_proxy.cli import main
from fencepost_proxy.cli.proxy import read_config
from fencepost_proxy.config import Limits

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("Dockerfile*"))
MOUNTED = re.compile(r"^(\./[^:]+):")


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", dockerfile.read_text("utf-8"), flags=re.MULTILINE))
    return [
        (word, " ".join(rest.split()))
        for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def last_stage(dockerfile: Path) -> dict[str, str]:
    found = instructions(dockerfile)
    start = max(index for index, (word, _) in enumerate(found) if word == "FROM")
    return dict(found[start:])


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
    return read


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda each: each.name)
def test_images_run_unprivileged_and_entrypoints_get_signals(dockerfile: Path) -> None:
    stage = last_stage(dockerfile)
    assert stage["USER"] not in ("root", "0")
    # In the form with a shell, the shell would get SIGTERM.
    assert json.loads(stage["ENTRYPOINT"])
    for word, rest in instructions(dockerfile):
        assert word != "ADD", rest
        if word == "COPY":
            assert not re.search(r"(^| )\.env|secret|\.git( |$)", rest)


def test_proxy_image_needs_no_shell_for_healthcheck() -> None:
    stage = last_stage(ROOT / "deploy" / "docker" / "Dockerfile")
    assert "RUN" not in stage
    assert int(stage["USER"].partition(":")[0]) > 0
    health = json.loads(stage["HEALTHCHECK"].partition(" CMD ")[2])
    assert health[0] == "fencepost"
    assert main.command_parser(health[1]).parse_args(health[1:]).run is not None


def test_proxy_image_has_only_needed_packages() -> None:
    locked = set(re.findall(r"^([\w.-]+)==", (ROOT / "locks" / "proxy.txt").read_text("utf-8"), re.MULTILINE))
    removed = {
        package
        for word, rest in instructions(ROOT / "deploy" / "docker" / "Dockerfile")
        for packages in (re.findall(r"pip uninstall --yes ([^&]+)", rest) if word == "RUN" else ())
        for package in packages.split()
    }
    needed: set[str] = set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    queried = {requirement_name(each) for each in project["optional-dependencies"]["proxy"]}
    while queried:
        needed |= queried
        queried = {
            requirement_name(each) for one in queried for each in requires(one) or () if "extra ==" not in each
        } - needed

    assert locked - removed == needed
    # These come with a new environment.
    assert {"pip", "setuptools"} <= removed


def requirement_name(text: str) -> str:
    return re.split(r"[^\w.-]", text, maxsplit=1)[0]


def test_every_published_port_is_one_that_the_proxy_listens_on(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each variable alone may be set: otherwise the container is healthy, and its clients find no broker."""
    service = compose["services"]["proxy"]
    for given in ({}, {"FENCEPOST_PORT": "29092"}, {"FENCEPOST_BROKER_PORT": "29094"}):

        def filled(text: str, given: dict[str, str] = given) -> str:
            return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: given.get(found[1], found[2]), text)

        words = [filled(each) for each in service["command"] if not each.startswith("--config")]
        with monkeypatch.context() as environment:
            for name, value in service["environment"].items():
                environment.setenv(name, filled(value))
            arguments = main.command_parser("proxy").parse_args(["proxy", "--upstream", "kafka:9092", *words])
            config = read_config(arguments).config
        listened = {config.listen.port, *config.broker_ports.values(), 8080}
        published = [filled(each).rsplit(":", 2)[1:] for each in service["ports"]]
        assert {int(inside) for _, inside in published} == listened
        assert all(outside == inside for outside, inside in published if inside != "8080")


def native_stage(dockerfile: str) -> list[tuple[str, str]]:
    found = instructions(ROOT / "deploy" / "docker" / dockerfile)
    start = next(index for index, (_, rest) in enumerate(found) if rest.endswith(" AS native"))
    end = next(index for index, (word, _) in enumerate(found) if word == "FROM" and index > start)
    return found[start:end]


def test_images_contain_the_native_module_and_no_compiler() -> None:
    """A module that cannot be imported is an error of the build: the container would run the slower pure Python."""
    for name, check in (
        ("Dockerfile", 'fencepost --version | grep -qF "(native "'),
        ("Dockerfile.spark", "import fencepost_native"),
    ):
        dockerfile = ROOT / "deploy" / "docker" / name
        # Docker builds the stage once for both images.
        assert native_stage(name) == native_stage("Dockerfile")
        assert ("COPY", "--from=native /built /built") in instructions(dockerfile)
        (copied,) = [rest for word, rest in instructions(dockerfile) if word == "RUN" and "cp -r /built/. " in rest]
        assert check in copied.partition("""{ [ "$FENCEPOST_NATIVE" = off ] || """)[2]
        assert ("ARG", "FENCEPOST_NATIVE=on") in instructions(dockerfile)
        assert last_stage(dockerfile)["FROM"] in ("${RUNTIME}", "${BASE}")
        assert "native" not in last_stage(dockerfile)["COPY"]


def built_files(tmp_path: Path, native: str = "on") -> dict[str, str]:
    """What the stage that builds the native module leaves. Its cargo is a stand-in."""
    (script,) = [rest for word, rest in native_stage("Dockerfile") if word == "RUN"]
    built = tmp_path / "built"
    shutil.rmtree(built, ignore_errors=True)
    script = script.replace("/built", str(built)).replace("/native", str(tmp_path / "native"))
    (tmp_path / "cargo").write_text(
        "#!/bin/sh\nmkdir -p target/release && echo new >target/release/libfencepost_native.so\n"
    )
    (tmp_path / "cargo").chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "FENCEPOST_NATIVE": native}
    subprocess.run(["sh", "-c", script], env=environment, check=True, timeout=60)
    return {each.name: each.read_text() for each in built.iterdir()}


def test_image_uses_module_of_build_local_only_with_its_sources(tmp_path: Path) -> None:
    native = tmp_path / "native"
    (native / "src").mkdir(parents=True)
    for name in ("Cargo.toml", "Cargo.lock", "src/lib.rs"):
        (native / name).write_text(name)
    module = "fencepost_native.abi3.so"
    assert built_files(tmp_path) == {module: "new\n"}
    assert built_files(tmp_path, native="off") == {}

    local = (ROOT / "deploy" / "docker" / "build-local.sh").read_text("utf-8")
    (hashed,) = re.findall(r"\(cd native && (.*)\) > \$native/sources", local)
    (native / module).write_text("of build-local.sh")
    (native / "sources").write_bytes(
        subprocess.run(["bash", "-c", hashed], cwd=native, capture_output=True, check=True).stdout
    )
    assert built_files(tmp_path) == {module: "of build-local.sh"}
    (native / "src" / "lib.rs").write_text("changed")
    assert built_files(tmp_path) == {module: "new\n"}


def test_docker_gets_the_module_of_build_local() -> None:
    """The last pattern of .dockerignore that matches a file decides."""
    patterns = (ROOT / ".dockerignore").read_text("utf-8").split("\n")
    assert patterns.index("!build/docker/native/*.so") > patterns.index("**/*.so")


def test_compose_gives_proxies_minimal_privileges(compose: dict[str, Any]) -> None:
    for name in ("proxy", "proxy-jobs"):
        service = compose["services"][name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["healthcheck"]["test"] == ["CMD", "fencepost", "health"]
        drain = Limits().drain_notice_seconds + Limits().drain_seconds
        assert int(service["stop_grace_period"].removesuffix("s")) >= drain + 5
        words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", each) for each in service["command"]]
        main.command_parser("proxy").parse_args(["proxy", *words])


def test_demonstrations_run_where_their_address_is(compose: dict[str, Any]) -> None:
    """They need nothing but the proxy's image, and are only started by name of their profile."""
    services = compose["services"]
    for name, option in (("demo", "proxy"), ("direct", "kafka")):
        service = services[name]
        assert service["profiles"] == [name]
        assert service["image"] == services["proxy"]["image"]
        assert service["entrypoint"] == ["python3", "-m", "fencepost_dev.two_writers"]
        address = getattr(two_writers.parser().parse_args(service["command"]), option)
        host = address.partition(":")[0]
        assert set(service["networks"]) <= set(services[host]["networks"])
        assert list(service["depends_on"]) == [host]


def test_what_compose_publishes_is_on_the_loopback(compose: dict[str, Any]) -> None:
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert len(published) >= 4
    for port in published:
        assert port.startswith(("127.0.0.1:", "${FENCEPOST_BIND:-127.0.0.1}:")), port


def test_both_image_paths_have_one_kafka_release(compose: dict[str, Any]) -> None:
    """build-local.sh reads the release from the compose file. There must be a lock file for it."""
    (image,) = re.findall(r"apache/kafka:([\d.]+)\}", (ROOT / "docker-compose.yml").read_text("utf-8"))
    assert release(image).version == image
    script = (ROOT / "deploy" / "docker" / "build-local.sh").read_text("utf-8")
    (read,) = re.findall(r"sed -n '(.*?)' docker-compose\.yml", script)
    found = subprocess.run(["sed", "-n", read, ROOT / "docker-compose.yml"], capture_output=True, text=True, check=True)
    assert found.stdout == f"{image}\n"


def test_local_build_names_its_images_in_a_file_that_git_ignores(tmp_path: Path) -> None:
    script = (ROOT / "deploy" / "docker" / "build-local.sh").read_text("utf-8")
    writes = "base=base:local\n" + script[script.index('settings="') : script.index('echo "build-local: done')]
    (tmp_path / ".env").write_text("FENCEPOST_PORT=1\nFENCEPOST_BASE_IMAGE=old\n")
    for _ in range(2):
        subprocess.run(["bash", "-euo", "pipefail", "-c", writes], cwd=tmp_path, check=True)
    bases = ["FENCEPOST_BASE_IMAGE=base:local", "FENCEPOST_RUST_IMAGE=base:local"]
    lines = ["FENCEPOST_PORT=1", *bases, "FENCEPOST_KAFKA_IMAGE=fencepost-kafka:local"]
    assert (tmp_path / ".env").read_text().splitlines() == lines
    assert "/.env" in (ROOT / ".gitignore").read_text("utf-8").split()


def test_what_compose_mounts_is_there_and_read_only(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            if mounted := MOUNTED.match(volume):
                assert (ROOT / mounted[1]).exists(), volume
                assert volume.endswith(":ro"), volume
            elif not volume.startswith("${"):
                assert volume.partition(":")[0] in compose["volumes"]


def test_prometheus_scrapes_every_proxy_and_grafana_queries_prometheus(compose: dict[str, Any]) -> None:
    services = compose["services"]
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    targets = {target for job in scraped for group in job["static_configs"] for target in group["targets"]}
    assert targets == {"proxy:8080", "proxy-jobs:8080"}
    for target in targets:
        assert set(services[target.partition(":")[0]]["networks"]) & set(services["prometheus"]["networks"])
    provisioning = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text("utf-8"))["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert set(services["grafana"]["networks"]) & set(services["prometheus"]["networks"])
    # Both are optional.
    assert services["prometheus"]["profiles"] == services["grafana"]["profiles"] == ["monitoring"]
