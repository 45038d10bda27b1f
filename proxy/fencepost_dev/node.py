"""One node of an embedded cluster: its directory and its process."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fencepost_dev.errors import ClusterError, PortTakenError
from fencepost_dev.process import SupervisedProcess

#: Time for one broker to shut down before it is killed.
SHUT_DOWN_TIMEOUT_SECONDS = 20.0
_FORMAT_TIMEOUT_SECONDS = 120.0
_ADDRESS_IN_USE = "Address already in use"


@dataclass(slots=True)
class Node:
    """`directory` contains its settings, log and records. `java`: the command of a JVM with Kafka's classes;
    `broker_flags`: further JVM flags of the broker."""

    node_id: int
    directory: Path
    java: Sequence[str]
    broker_flags: Sequence[str]
    process: SupervisedProcess | None = None
    paused: bool = False

    @property
    def log_file(self) -> Path:
        return self.directory / "broker.log"

    @property
    def _properties_file(self) -> Path:
        return self.directory / "server.properties"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.running

    @property
    def started(self) -> SupervisedProcess:
        assert self.process is not None
        return self.process

    def write_properties(self, properties: Mapping[str, str]) -> None:
        self.directory.mkdir(exist_ok=True)
        lines = [f"{name}={_escaped(value)}\n" for name, value in properties.items()]
        self._properties_file.write_text("".join(lines), "utf-8")

    def format(self, cluster_id: str) -> None:
        """Prepare the storage, unless it was prepared earlier."""
        if (self.directory / "data" / "meta.properties").exists():
            return
        output = self.directory / "format.log"
        tool = ["kafka.tools.StorageTool", "format", f"--config={self._properties_file}", f"--cluster-id={cluster_id}"]
        process = SupervisedProcess([*self.java, *tool], output=output)
        ended = process.wait(_FORMAT_TIMEOUT_SECONDS)
        if not ended or process.exit_code:
            process.signal(signal.SIGKILL)
            how = f"code {process.exit_code}" if ended else f"timeout after {_FORMAT_TIMEOUT_SECONDS:.0f} s"
            raise ClusterError(
                f"formatting the storage of node {self.node_id} failed ({how}): {_last_line(output)} (see {output})"
            )

    def launch(self) -> None:
        self.paused = False
        jvm = [self.java[0], *self.broker_flags, *self.java[1:]]
        self.process = SupervisedProcess([*jvm, "kafka.Kafka", str(self._properties_file)], output=self.log_file)

    def end(self, how: signal.Signals, timeout_seconds: float = SHUT_DOWN_TIMEOUT_SECONDS) -> None:
        """SIGKILL after the timeout."""
        self.started.signal(how)
        if self.paused:
            self.resume()  # SIGTERM is not delivered to a stopped process; SIGKILL is
        if not self.started.wait(timeout_seconds):
            self.started.signal(signal.SIGKILL)
            self.started.wait(SHUT_DOWN_TIMEOUT_SECONDS)

    def pause(self) -> None:
        self.started.stop_all_threads()
        self.paused = True

    def resume(self) -> None:
        self.started.signal(signal.SIGCONT)
        self.paused = False

    def require_running(self, ports: Sequence[int]) -> None:
        """Raise if it ended by an error. `ports`: named in the error if one of them is in use."""
        if self.process is None or self.process.running or self.process.exit_code == -signal.SIGKILL:
            return
        name = f"broker {self.node_id}"
        if _ADDRESS_IN_USE in self.log_file.read_text("utf-8", "replace"):
            raise PortTakenError(
                f"one of the ports {', '.join(map(str, ports))} of {name} is in use (see {self.log_file})"
            )
        code = self.process.exit_code
        raise ClusterError(f"{name} exited with code {code}: {_last_line(self.log_file)} (see {self.log_file})")


def _escaped(value: str) -> str:
    """Escapes a value for java.util.Properties."""
    return value.replace("\\", "\\\\").replace("\n", "\\n")


def _last_line(log: Path) -> str:
    """The last line with an exception, else the last line."""
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    exceptions = [line for line in lines if "Exception" in line and not line.startswith(("\t", " "))]
    return (exceptions or lines or ["nothing was printed"])[-1].strip()
