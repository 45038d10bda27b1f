"""`mode = "sidecar"`: Kafka's addresses are relayed unchanged, and conditional appends are right while leaders move."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.types import Address
from tests.kit.stage import NODES
from tests.kit.waiting import until
from tests.sidecars.run import Check, run
from tests.sidecars.stage import CLIENTS, Sidecars, Way, addresses_reported, sidecars
from tests.support.messages import Fields, RawConnection
from tests.support.ports import free_port
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(900)]

FIND_COORDINATOR, DESCRIBE_CLUSTER, METADATA = 10, 60, 3


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecars]:
    with sidecars(tmp_path_factory.mktemp("sidecars")) as running:
        yield running


@pytest.mark.parametrize(
    ("rounds", "restarts"),
    [(1, (2,)), pytest.param(6, NODES, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
    ids=["once", "often"],
)
def test_leaders_move_between_sidecars_under_competing_writers(
    rounds: int, restarts: tuple[int, ...], stage: Sidecars, say: Callable[[str], None]
) -> None:
    run(stage, rounds=rounds, restarts=restarts, say=say)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("way", "check"), [("secured", "required"), ("loopback", "required"), ("plain", "true")])
def test_leaders_move_between_secured_sidecars(
    way: Way, check: Check, tmp_path: Path, say: Callable[[str], None]
) -> None:
    with sidecars(tmp_path, way) as running:
        run(running, rounds=2, check=check, say=say)


def test_every_sidecar_reports_the_addresses_of_its_broker(stage: Sidecars) -> None:
    """The proxy rewrites no address: those of brokers and coordinators are Kafka's, for the listener of clients."""
    reported = {node_id: f"127.0.0.1:{stage.sidecar(node_id).port}" for node_id in NODES}
    queried: tuple[tuple[int, int, Fields], ...] = (
        (FIND_COORDINATOR, 4, {"KeyType": 0, "CoordinatorKeys": ["some-group"]}),
        (DESCRIBE_CLUSTER, 0, {"IncludeClusterAuthorizedOperations": False}),
        (METADATA, 9, {"Topics": [], "AllowAutoTopicCreation": False}),
    )
    for node_id in NODES:
        proxied, direct = stage.sidecar(node_id).bootstrap, stage.kafka.address(node_id, CLIENTS)
        assert addresses_reported(proxied) == reported
        for api_key, version, body in queried:
            with RawConnection(Address.parse(proxied)) as through, RawConnection(direct) as beside:
                assert _partitions(through.query(api_key, version, body)) == _partitions(
                    beside.query(api_key, version, body)
                )


def _partitions(answer: Fields) -> set[tuple[str, int]]:
    """Without the controller, which differs at random."""
    return {(each["Host"], each["Port"]) for each in (*answer.get("Brokers", ()), *answer.get("Coordinators", ()))}


def test_sidecar_hides_the_state_topic(stage: Sidecars) -> None:
    with RawConnection(Address.parse(stage.sidecar(1).bootstrap)) as client:
        topics = client.query(METADATA, 9, {"Topics": None, "AllowAutoTopicCreation": False})["Topics"]
    assert "__fencepost_state" not in {each["Name"] for each in topics}


def test_broker_not_advertising_its_sidecar_makes_it_unready(kafka: KafkaCluster, tmp_path: Path) -> None:
    """Clients would bypass the proxy. It is not ready, and reports what to change."""
    status = free_port()
    arguments = ("--mode", "sidecar", "--broker", str(kafka.address(1)), "--status", f"127.0.0.1:{status}")
    config = f'advertised_host = "127.0.0.1"\n{CHECKED_BY_NAME}'
    with ProxyProcess(kafka.bootstrap, tmp_path, config=config, arguments=arguments) as sidecar:
        until(lambda: "advertised.listeners" in sidecar.log, "it to say what is wrong")
        with pytest.raises(HTTPError) as refused:
            urlopen(f"http://127.0.0.1:{status}/readyz", timeout=30)
        with refused.value as answer:
            reason = answer.read().decode()
    assert f"broker 1 at {kafka.address(1)} does not advertise this sidecar, 127.0.0.1:{sidecar.port}" in reason


def test_upstream_must_not_lead_through_sidecars(stage: Sidecars, tmp_path: Path) -> None:
    """The sidecar cannot reach the state topic there. It waits for a correction, and reports what to change."""
    one, status = stage.sidecar(1), free_port()
    one.stop()
    command = [sys.executable, "-m", "fencepost_proxy", "proxy", "--mode", "sidecar", "--listen", one.bootstrap]
    command += ["--upstream", str(stage.kafka.address(1, CLIENTS)), "--broker", str(stage.kafka.address(1, CLIENTS))]
    command += ["--advertised-host", "127.0.0.1", "--status", f"127.0.0.1:{status}"]
    log = tmp_path / "log"
    with log.open("w") as stderr, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr) as wrong:
        try:
            until(lambda: "upstream leads to the sidecars too" in log.read_text(), "it to say what is wrong")
            assert wrong.poll() is None
        finally:
            wrong.terminate()
            assert wrong.wait(60) == 0
            one.restart()


def test_check_reports_whether_broker_advertises_its_sidecar(stage: Sidecars) -> None:
    one = stage.sidecar(1)

    def check(listen: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "fencepost_proxy", "check", "--mode", "sidecar", "--listen", listen]
        command += ["--upstream", stage.kafka.bootstrap, "--broker", str(stage.kafka.address(1, CLIENTS))]
        command += ["--advertised-host", "127.0.0.1", "--running"]
        # A check connects once, and the machine may be busy.
        patient = {**os.environ, "FENCEPOST_LIMITS__CONNECT_TIMEOUT_SECONDS": "60"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=patient)
        return done.returncode, done.stdout

    status, stated = check(one.bootstrap)
    assert (status, "broker 1 sends clients to it" in stated) == (0, True), stated
    status, stated = check(stage.sidecar(2).bootstrap)
    assert (status, "does not advertise this sidecar" in stated) == (1, True), stated
