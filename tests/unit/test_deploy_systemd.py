"""deploy/systemd/: checks by systemd, and agreement with the proxy."""

from __future__ import annotations

import re
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from fencepost_proxy.cli import main
from fencepost_proxy.config import Limits

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "fencepost.service"
#: systemd's own measure, 0 to 10: from 2 on a service is called less than well protected.
EXPOSURE_MAX = 1.5


def systemd_version() -> int:
    """0 where there is none."""
    if shutil.which("systemd-analyze") is None:
        return 0
    stated = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True, check=False).stdout
    found = re.match(r"systemd (\d+)", stated)
    return int(found[1]) if found else 0


@pytest.fixture(scope="module")
def service() -> dict[str, str]:
    # The last one counts if a key is repeated: no test reads such a key.
    parser = RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return dict(parser["Service"])


def test_unit_starts_an_existing_command(service: dict[str, str]) -> None:
    program, *words = service["ExecStart"].split()
    assert program.endswith("/bin/fencepost")
    assert main.command_parser(words[0]).parse_args(words).run is not None
    assert (service["Type"], service["ExecReload"]) == ("notify", "/bin/kill -HUP $MAINPID")


def test_unit_timeouts_cover_drain_and_kafka_startup(service: dict[str, str]) -> None:
    assert int(service["TimeoutStopSec"]) >= Limits().drain_notice_seconds + Limits().drain_seconds + 10
    assert service["TimeoutStartSec"] == "infinity"
    # 2: the configuration is wrong. It will be, next time.
    assert service["RestartPreventExitStatus"] == "2"


def test_descriptor_limit_covers_clients_and_broker_connections(service: dict[str, str]) -> None:
    assert int(service["LimitNOFILE"]) > 4 * Limits().connections_max


@pytest.mark.skipif(systemd_version() < 250, reason="no systemd here that checks a unit without running it")
def test_systemd_verifies_the_unit_and_its_hardening(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    # What it starts is not installed here.
    unit.write_text(UNIT.read_text("utf-8").replace("/opt/fencepost/bin/fencepost", "/bin/sh"), "utf-8")

    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    rated = subprocess.run(
        ["systemd-analyze", "security", "--no-pager", "--offline=true", unit],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (verified.returncode, [line for line in verified.stderr.splitlines() if UNIT.name in line]) == (0, [])
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", rated.stdout)
    assert exposure is not None, rated.stdout + rated.stderr
    assert float(exposure[1]) <= EXPOSURE_MAX
