"""Whether a process is dead, by its identity."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from fencepost_proxy.cluster import process_identity

pytestmark = pytest.mark.skipif(process_identity.own_identity() is None, reason="only on Linux")
SAY = "from fencepost_proxy.cluster.process_identity import own_identity; print(own_identity(), flush=True); input()"


def test_process_is_dead_once_ended_even_unreaped() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SAY], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        identity = process.stdout.readline().strip()
        assert not process_identity.is_dead(identity)
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        assert process_identity.is_dead(identity)
        process.wait()
        assert process_identity.is_dead(identity)


def test_reused_process_number_is_another_process() -> None:
    own = process_identity.own_identity()
    assert own is not None
    machine, pid, started = own.split("/")

    assert not process_identity.is_dead(own)
    assert process_identity.is_dead(f"{machine}/{pid}/{int(started) + 1}")


@pytest.mark.parametrize("identity", ["another/1/2", "", "nonsense", "a/b/c"])
def test_process_on_another_machine_is_not_dead(identity: str) -> None:
    assert not process_identity.is_dead(identity)
