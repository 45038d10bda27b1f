"""Requests of cases to any cluster, with the security of a proxy's own connections."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from fencepost_proxy.cluster.broker import Access, BrokerConnection, UpstreamUnavailable, deadline_in
from fencepost_proxy.config import Limits, ProxyConfig
from fencepost_proxy.errors import Error, FencepostError, error_name
from fencepost_proxy.preflight.conformance.case import Deviation, NotTested
from fencepost_proxy.preflight.conformance.driver import Settings, Wire
from fencepost_proxy.transport.certificates import upstream_context
from fencepost_proxy.types import NO_TOPIC_ID, Address
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message

#: Start of the names of all topics and transactional ids.
PREFIX: Final = "fencepost-verify"
ANSWER_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.05
_CLIENT_ID: Final = "fencepost-verify-broker"
DENIED_CODES: Final = frozenset(
    {
        Error.TOPIC_AUTHORIZATION_FAILED,
        Error.GROUP_AUTHORIZATION_FAILED,
        Error.CLUSTER_AUTHORIZATION_FAILED,
        Error.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
_Result = TypeVar("_Result")


class NotDeleted(FencepostError):
    """A topic is left; the text names it."""


def kafka_configs(settings: Settings) -> dict[str, str]:
    configs = {"min.insync.replicas": str(settings.min_isr)}
    if settings.log_append_time:
        configs["message.timestamp.type"] = "LogAppendTime"
    if settings.max_message_bytes is not None:
        configs["max.message.bytes"] = str(settings.max_message_bytes)
    if settings.gzip:
        configs["compression.type"] = "gzip"
    if settings.timestamp_after_max_ms is not None:
        configs["message.timestamp.after.max.ms"] = str(settings.timestamp_after_max_ms)
    return configs


class Requests:
    """`replicas`: of topics whose case states none; -1 is the cluster's default."""

    def __init__(
        self, config: ProxyConfig, *, answer_seconds: float = ANSWER_SECONDS, prefix: str = PREFIX, replicas: int = -1
    ) -> None:
        self.answer_seconds = answer_seconds
        self.replicas = replicas
        self._config = config
        self._prefix = f"{prefix}-{secrets.token_hex(4)}"
        self._context = None if config.upstream_tls is None else upstream_context(config.upstream_tls)
        self._limits = Limits(connect_timeout_seconds=answer_seconds, request_timeout_seconds=6 * answer_seconds)
        self._runner = asyncio.Runner()
        self._connections: dict[Address, BrokerConnection] = {}
        self._brokers: dict[int, Address] = {}
        self._named = 0
        self.topics_left: list[str] = []
        self.wires: list[Wire] = []
        self.until_time = float("inf")  # from then on cases end with `NotTested`

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return self._runner.run(work)

    async def open(self, address: Address) -> BrokerConnection:
        access = Access(lambda: self._context, self._config.control_sasl)
        return await BrokerConnection.open(address, limits=self._limits, client_id=_CLIENT_ID, access=access)

    async def _connected(self, address: Address) -> BrokerConnection:
        """The connection is kept, so that requests to a broker have one order."""
        known = self._connections.get(address)
        if known is None or known.closed:
            known = self._connections[address] = await self.open(address)
        return known

    def disconnect(self) -> None:
        """Before brokers stop."""
        kept, self._connections = list(self._connections.values()), {}

        async def close() -> None:
            await asyncio.gather(*(each.close() for each in kept))

        self.run(close())

    def close(self) -> None:
        self.disconnect()
        self._runner.close()

    def servers(self) -> Sequence[Address]:
        """Brokers that may be queried about anything."""
        return self._config.upstream

    def query(
        self,
        api_key: int,
        message: Message,
        *,
        at_most: int,
        at_least: int = 0,
        to: Address | None = None,
        seconds: float = 0.0,
    ) -> Message:
        """The answer of `to`, or of the first server that is there. Raises `UpstreamUnavailable`."""
        if time.monotonic() > self.until_time:
            raise NotTested("no time is left")

        async def answer() -> Message:
            connection = await (self._first() if to is None else self._connected(to))
            deadline = deadline_in(seconds + self.answer_seconds)
            return await connection.query(api_key, message, at_least=at_least, at_most=at_most, deadline=deadline)

        return self.run(answer())

    async def _first(self) -> BrokerConnection:
        servers = self.servers()
        for address in servers[:-1]:
            with contextlib.suppress(UpstreamUnavailable):
                return await self._connected(address)
        return await self._connected(servers[-1])

    def address(self, node: int) -> Address:
        if node not in self._brokers:
            self._brokers = self.brokers()
        if node not in self._brokers:
            raise UpstreamUnavailable(f"broker {node} is not in the cluster now")
        return self._brokers[node]

    def brokers(self) -> dict[int, Address]:
        answer = self.query(apis.METADATA, Message(topics=[]), at_least=4, at_most=12)
        return {each.node_id: Address(each.host, each.port) for each in answer.brokers}

    def features(self) -> dict[str, int]:
        """Finalized features and their levels."""
        hello = Message(client_software_name="fencepost", client_software_version="0")
        answer = self.query(apis.API_VERSIONS, hello, at_least=3, at_most=3)
        return {each.name: each.max_version_level for each in answer.finalized_features or ()}

    def new_producer_id(self) -> int | None:
        """One that a coordinator has assigned, as the proxy's; None if there is none for this user."""
        message = Message(transactional_id=None, transaction_timeout_ms=0, producer_id=-1, producer_epoch=-1)
        answer = self.query(apis.INIT_PRODUCER_ID, message, at_most=4)
        return None if answer.error_code else int(answer.producer_id)

    def api_versions(self) -> Mapping[int, tuple[int, int]]:
        return self.run(self._first()).api_versions

    def now_ms(self) -> int:
        return int(time.time() * 1000)

    def name(self) -> str:
        self._named += 1
        return f"{self._prefix}-{self._named}"

    def wait(self, probe: Callable[[], _Result], what: str, accept: Callable[[_Result], bool] = bool) -> _Result:
        """The first accepted result. A request without an answer is repeated."""
        deadline = time.monotonic() + self.answer_seconds
        found: object = None
        while True:
            try:
                result = probe()
            except UpstreamUnavailable as error:
                if error.error_code == Error.UNSUPPORTED_VERSION:
                    raise
                found = error
            else:
                if accept(result):
                    return result
                found = result
            if time.monotonic() > deadline:
                raise Deviation(f"waited {self.answer_seconds:g} s for {what}; the last result was {found}")
            time.sleep(_PAUSE_SECONDS)

    def create_topic(self, name: str, settings: Settings, replicas: int) -> None:
        configs = [Message(name=key, value=value) for key, value in kafka_configs(settings).items()]
        topic = Message(name=name, num_partitions=1, replication_factor=replicas, assignments=[], configs=configs)
        if name not in self.topics_left:
            self.topics_left.append(name)  # before it exists: an interrupted run deletes it too
        message = Message(topics=[topic], timeout_ms=int(self.answer_seconds * 1000), validate_only=False)
        (answer,) = self.query(apis.CREATE_TOPICS, message, at_least=2, at_most=7).topics
        if answer.error_code:
            if answer.error_code != Error.REQUEST_TIMED_OUT:
                self.topics_left.remove(name)
            stated = f"{error_name(answer.error_code)}, {answer.error_message or 'without a reason'}"
            raise NotTested(f"its topic cannot be created: {stated}")

    def delete_topics(self, names: Sequence[str]) -> None:
        """Return when they are deleted. Raises `NotDeleted`."""
        for name in names:
            topic = Message(name=name, topic_id=NO_TOPIC_ID)
            timeout_ms = int(self.answer_seconds * 1000)
            message = Message(topics=[topic], topic_names=[name], timeout_ms=timeout_ms)

            def deleted(name: str = name, message: Message = message) -> bool:
                (answer,) = self.query(apis.DELETE_TOPICS, message, at_least=1, at_most=6).responses
                if answer.error_code in (Error.NONE, Error.UNKNOWN_TOPIC_OR_PARTITION):
                    return bool(self.metadata(name).error_code == Error.UNKNOWN_TOPIC_OR_PARTITION)
                if answer.error_code in (*DENIED_CODES, Error.TOPIC_DELETION_DISABLED):
                    raise NotDeleted(f"topic {name} cannot be deleted: {error_name(answer.error_code)}")
                return False

            try:
                self.wait(deleted, f"{name} to be deleted")
            except (AssertionError, UpstreamUnavailable) as error:
                raise NotDeleted(f"topic {name} cannot be deleted: {error}") from None
            self.topics_left.remove(name)

    def metadata(self, topic: str) -> Message:
        queried = [Message(name=topic, topic_id=NO_TOPIC_ID)]
        message = Message(topics=queried, allow_auto_topic_creation=False)
        found: Message = self.query(apis.METADATA, message, at_least=7, at_most=12).topics[0]
        return found
