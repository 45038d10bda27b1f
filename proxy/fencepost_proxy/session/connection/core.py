"""The parts of a session that the others are built on."""

from __future__ import annotations

from fencepost_proxy.session.connection.draining import Draining
from fencepost_proxy.session.connection.failed_pipelines import FailedPipelines
from fencepost_proxy.session.connection.in_progress import InProgress
from fencepost_proxy.session.connection.proofs import Proofs
from fencepost_proxy.session.connection.read_holds import ReadHolds, Throttling
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.connection.threads import ThreadWork
from fencepost_proxy.session.connection.unchecked import UncheckedSamples
from fencepost_proxy.session.frames.services import Services


class Core:
    """Only to make the other parts."""

    __slots__ = ("draining", "holds", "in_progress", "pipelines", "proofs", "queue", "samples", "state", "threads")

    def __init__(self, connection: int, local_host: str, services: Services, opened_at: float) -> None:
        self.state = ConnectionState(connection, local_host, services, opened_at)
        self.holds = ReadHolds(self.state, services, Throttling(self.state))
        self.pipelines = FailedPipelines(self.state, self.holds, services)
        self.queue = ResponseQueue(self.state, self.pipelines, services, services)
        self.in_progress = InProgress(self.state, self.holds, self.queue)
        self.threads = ThreadWork(self.state, self.queue)
        self.proofs = Proofs(self.state, self.queue, services)
        self.samples = UncheckedSamples(self.state, services, services)
        self.draining = Draining(self.state, self.holds, self.queue)
