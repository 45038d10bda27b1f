"""`fencepost proxy` as a separate process, so that a test can kill it."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from tests.kit.closing import Closing
from tests.support.ports import free_ports_in_a_row
from tests.support.raw import Enter, as_it_is

#: For shared proxies: a proxy that is suspended for this long, as on a busy machine, stops serving.
LEASE_SECONDS = 3.0
#: Checks topics by name prefix.
CHECKED_BY_NAME = f"""
config_lease_seconds = {LEASE_SECONDS}

[topics."required-*"]
"fencepost.check.expected.offsets" = "required"

[topics."checked-*"]
"fencepost.check.expected.offsets" = "true"

[topics."base-required-*"]
"fencepost.check.expected.offsets" = "required"
"fencepost.expected.offsets.source" = "base"

[topics."base-*"]
"fencepost.check.expected.offsets" = "true"
"fencepost.expected.offsets.source" = "base"
"""

#: For tests that change no virtual configs: the proxy serves after long pauses of it or Kafka.
CHECKED_WITH_LONG_LEASE = CHECKED_BY_NAME.replace(f"seconds = {LEASE_SECONDS}", "seconds = 30.0")

#: The port of the bootstrap listener, and for each broker the port 1 + node id above it.
_PORTS = 7
READY_SECONDS = 60.0
_STOP_SECONDS = 60.0


def _with_short_takeover(config: str) -> str:
    if "takeover_seconds" in config:
        return config
    head, _, rest = config.partition("[limits]\n")
    return f"{head}\n[limits]\ntakeover_seconds = 0.5\n{rest}"


class ProxyProcess(Closing):
    """Starts on construction; `bootstrap` is set once clients can connect.

    `config` is TOML text. By default, takeovers are short, because many proxies share a Kafka and are killed. Without a
    `port`, it takes free ones for itself and the first brokers; `restart` keeps them. `module` – runs instead of the
    proxy's module, with additional variables from `environment`. `log` has its stderr. `enter` – prepares clients'
    sockets.
    """

    def __init__(
        self,
        upstream: str,
        directory: Path,
        *,
        config: str = "",
        port: int = 0,
        arguments: tuple[str, ...] = (),
        module: str = "fencepost_proxy",
        environment: Mapping[str, str] | None = None,
        enter: Enter = as_it_is,
    ) -> None:
        self.upstream = upstream
        self.enter = enter
        self.directory = directory
        self.config = config
        # Chosen here, so that no outgoing connection takes one during a restart.
        self.port = port or free_ports_in_a_row(_PORTS)
        self.arguments = arguments
        self.module = module
        self.environment = dict(environment or {})
        self.bootstrap = ""
        self._log_path = directory / f"proxy-{time.monotonic_ns()}.log"
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        file = self.directory / f"{self._log_path.stem}.toml"
        file.write_text(_with_short_takeover(self.config))
        with self._log_path.open("a") as log:
            process = self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    self.module,
                    "proxy",
                    *("--upstream", self.upstream, "--listen", f"127.0.0.1:{self.port}", "--config", str(file)),
                    *self.arguments,
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment},
                text=True,
            )
        lines: queue.Queue[str] = queue.Queue()
        stdout = process.stdout
        assert stdout is not None

        def read() -> None:
            with stdout:
                for line in stdout:
                    lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        try:
            line = lines.get(timeout=READY_SECONDS)
        except queue.Empty:
            line = ""
        if not line.startswith("ready bootstrap="):
            self.kill()
            raise AssertionError(f"fencepost proxy did not get ready: {line!r}\n{self.log}")
        self.bootstrap = line.split()[1].removeprefix("bootstrap=")
        self.port = int(self.bootstrap.rpartition(":")[2])

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> str:
        """The address of the status server, if it was started with `--status`."""
        return re.findall(r'url="?http://([^\s"]+)/', self.log)[-1]

    def page(self, path: str) -> str:
        return probed(self.status, path)[1]

    def metrics(self) -> dict[str, float]:
        lines = [each for each in self.page("/metrics").splitlines() if not each.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def stop(self) -> int:
        """Send SIGTERM; return the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(_STOP_SECONDS)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(_STOP_SECONDS)

    def pause(self) -> None:
        """Return once the process is stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def signal_reload(self) -> None:
        os.kill(self.pid, signal.SIGHUP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """After `stop` or `kill`: run the same command on the same ports."""
        assert not self.running
        self.start()

    def close(self) -> None:
        if self.running:
            self.resume()
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()


def blocked_by(log: str, packages: str) -> list[str]:
    """Lines of the watchdog that name code of these packages. On a busy machine every callback is late. So only those
    count whose probe used the CPU for 0.5 s; it lasts 0.25 s without a blocking callback."""
    late = [line for line in log.splitlines() if "the event loop was late" in line]
    named = [line for line in late if re.search(rf"frame=\S*({packages})/", line)]
    return [line for line in named if float(re.search(r"cpu_seconds=([\d.]+)", line)[1]) > 0.5]  # type: ignore[index]


def probed(status: str, path: str) -> tuple[int, str]:
    """HTTP status and text of a page, also of a proxy that is still starting. Raises OSError."""
    try:
        with urlopen(f"http://{status}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()
