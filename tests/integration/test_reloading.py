"""SIGHUP makes a running proxy apply a changed file, with one process and several. An invalid file changes nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from kafka.protocol.metadata import ApiVersionsRequest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.proxy import ProxyProcess
from tests.support.raw import Closed, Connection

pytestmark = pytest.mark.kafka

AT_FIRST = "[limits]\nconnections_max = 100\n"


def admitted(address: str, tries: int) -> int:
    """Number of simultaneous connections that are served."""
    count = 0
    with ExitStack() as stack:
        for _ in range(tries):
            connection = stack.enter_context(Connection(address))
            try:
                connection.query(ApiVersionsRequest(), 0)
                count += 1
            except (Closed, OSError):
                pass
    return count


def test_a_running_proxy_takes_over_what_it_can(kafka: KafkaCluster, tmp_path: Path) -> None:
    with ProxyProcess(kafka.bootstrap, tmp_path, config=AT_FIRST) as proxy:
        (file,) = tmp_path.glob("proxy-*.toml")
        before = file.read_text()

        def hang_up(text: str, wait_for: Callable[[str], bool]) -> str:
            file.write_text(text)
            observed = len(proxy.log)
            os.kill(proxy.pid, signal.SIGHUP)
            until(lambda: wait_for(proxy.log[observed:]), "what it says of the new file")
            return proxy.log[observed:]

        # All connections are admitted.
        assert admitted(proxy.bootstrap, 4) == 4

        # A lower limit, and a setting that needs a restart.
        changed = 'status = "127.0.0.1:1"\n' + before.replace("connections_max = 100", "connections_max = 1")
        stated = hang_up(changed, lambda log: "configuration reloaded" in log)

        # One line reports both settings, and the proxy serves one connection.
        (line,) = [each for each in stated.splitlines() if "configuration reloaded" in each]
        assert 'changed="limits.connections_max: 100 → 1"' in line
        assert 'needs_restart="status: not set → \\"127.0.0.1:1\\""' in line
        until(lambda: admitted(proxy.bootstrap, 4) == 1, "the new limit")

        # An invalid file keeps the limit, and the log names the line.
        stated = hang_up(changed + "\n[limit]\n", lambda log: "keeping the old one" in log)
        assert f"{file}:{len(changed.splitlines()) + 2}: limit: unknown key; did you mean 'limits'?" in stated
        until(lambda: admitted(proxy.bootstrap, 4) == 1, "the limit as it was")

        # The old limit again, with another log format.
        hang_up(before + '\n[log]\nformat = "json"\n', lambda log: "configuration reloaded" in log)
        until(lambda: admitted(proxy.bootstrap, 4) == 4, "room for all")
        assert proxy.stop() == 0
        assert '"event": "drained"' in proxy.log
        assert "Traceback" not in proxy.log
