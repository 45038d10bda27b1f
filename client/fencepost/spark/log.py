"""The sink's access to Kafka's log: append prepared batches and read the log.

A synchronous interface to aiokafka's client, which provides connections, SASL and TLS. Its event loop runs in its own
thread, so that appends are in flight while the caller encodes the next batch.

Appends are never retried here, because the caller resolves their outcome: one call sends at most one request, and ends
with the proxy's response or Unknown. Queries and reads are retried, because leaders move and brokers and proxies
restart. After `patience_seconds` without progress they raise CannotReach.

This module requests topic metadata itself: aiokafka's client would let Kafka create a missing topic
(`auto.create.topics.enable`), and requests all topics of the cluster while it knows none.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import os
import random
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, ClassVar, NamedTuple, TypeVar

from aiokafka.abc import AbstractTokenProvider
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import create_conn
from aiokafka.errors import (
    IllegalSaslStateError,
    IncompatibleBrokerVersion,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
    for_code,
)
from aiokafka.helpers import create_ssl_context
from aiokafka.protocol.admin import DescribeConfigsRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.offset import OffsetRequest

from fencepost.java_keystores import pem_file
from fencepost.spark.encoding import Logged, batches
from fencepost.spark.errors import CannotReach, LogRefused, SinkError, Unknown
from fencepost.spark.interfaces import Answer, TopicIdentity
from fencepost.spark.wire import Metadata, Produce, topic_id, update_brokers

__all__ = ["Answer", "Log", "Logged", "OffsetsDeleted"]

_T = TypeVar("_T")

REQUEST_SECONDS = 30.0
CONNECT_SECONDS = 10.0
PATIENCE_SECONDS = 120.0
#: How long a broker may not know a topic that was just created.
_UNKNOWN_TOPIC_SECONDS = 5.0
#: Pause between tries; doubles each time.
_PAUSE_SECONDS, _PAUSE_MAX_SECONDS = 0.05, 1.0
_CLOSE_SECONDS = 10.0
#: Fetch size; a longer batch is fetched alone.
_FETCH_BYTES = 4 << 20
_FETCH_WAIT_MS = 500
#: Limits of one Fetch of the last batches of many partitions, per partition and in total.
_LAST_BATCH_BYTES, _LAST_BATCHES_BYTES = 2 << 20, 16 << 20

#: Longer than batches and their copies in aiokafka; at most 32 MB, glibc's limit for its dynamic mmap threshold.
_LONGEST_BLOCK_BYTES = 16 << 20

_NEVER_MS = 1 << 31

_EARLIEST, _LATEST = -2, -1
_TOPIC_RESOURCE = 2

_NONE, _OFFSET_OUT_OF_RANGE, _UNKNOWN_TOPIC, _INVALID_TOPIC, _TOPIC_DENIED, _CLUSTER_DENIED = 0, 1, 3, 17, 29, 31
#: After these errors, look up the leader again.
_ELSEWHERE = frozenset({3, 5, 6, 56, 72, 74, 75, 76, 78, 100, 103})
#: Permanent errors.
_FINAL = {
    _INVALID_TOPIC: "Kafka does not accept this name",
    _TOPIC_DENIED: "missing permission (allow READ, WRITE, DESCRIBE and DESCRIBE_CONFIGS on the topic)",
    _CLUSTER_DENIED: "missing permission (allow READ, WRITE, DESCRIBE and DESCRIBE_CONFIGS on the topic)",
}


class OffsetsDeleted(SinkError):
    """The requested records are no longer in the log: retention or a DeleteRecords request removed them."""

    def __init__(self, topic: str, partition: int, requested: int, log_start: int) -> None:
        super().__init__(
            f"{topic}-{partition}: cannot read offset {requested}: the log begins at {log_start}, "
            "so retention or an operator deleted records"
        )
        self.log_start = log_start


class Log:
    """Access to the log. `client_options`: options of aiokafka's client, and `ssl_cafile`, `ssl_cadata`,
    `ssl_certfile`, `ssl_keyfile`, `ssl_password`, `ssl_check_hostname` for TLS. `patience_seconds`: see the module.

    Connects on first use. Thread-safe, but not usable in a forked child process, which needs its own (`Log.shared`).
    Every method raises CannotReach and LogRefused.
    """

    def __init__(self, client_options: Mapping[str, Any], *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._options = dict(client_options)
        self._patience_seconds = patience_seconds
        self._wire: _Wire | None = None
        self._starting = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        _open.add(self)

    _shared: ClassVar[dict[Any, Log]] = {}
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def shared(cls, client_options: Mapping[str, Any], *, patience_seconds: float = PATIENCE_SECONDS) -> Log:
        """This process's instance for these options. It stays open, because Spark reuses its Python workers."""
        key = (os.getpid(), patience_seconds, *sorted(client_options.items()))
        with cls._sharing:
            log = cls._shared.get(key)
            if log is None or log._closed:
                log = cls._shared[key] = cls(client_options, patience_seconds=patience_seconds)
            return log

    def connect(self) -> None:
        """Connect, unless connected. Fails early: after `CONNECT_SECONDS`."""
        self._query(lambda wire: wire.connect())

    def identify(self, topic: str) -> TopicIdentity:
        """The topic that has this name now. Raises LogRefused for an unknown topic."""
        return self._query(lambda wire: wire.identify(topic))

    def partition_count(self, topic: str) -> int:
        """Kafka's current count. Raises LogRefused for an unknown topic."""
        return self.identify(topic).partitions

    def config(self, topic: str) -> dict[str, str | None]:
        """The topic's configs, including the proxy's."""
        return self._query(lambda wire: wire.config(topic))

    def offsets(self, topic: str, partitions: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Log start offset and high watermark of each partition."""
        requested = list(partitions)
        return self._query(lambda wire: wire.offsets(topic, requested))

    def append(self, topic: str, partition: int, batch: bytes) -> Future[Answer]:
        """Send the batch once. The future returns the response or raises Unknown: the batch may be in the log."""
        return self._submit(lambda wire: wire.append(topic, partition, batch))

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Logged]:
        """The batches from the one with `start` that begin below `end`. Waits until all below `end` is replicated.

        Compaction leaves gaps between and within batches. Raises OffsetsDeleted.
        """
        at, empty = start, 0
        while at < end:
            here = at
            fetched = self._query(lambda wire: wire.fetch(topic, partition, here, end))  # noqa: B023 - awaited at once
            for logged in batches(fetched):
                if logged.next_offset > at and logged.base_offset < end:
                    at, empty = logged.next_offset, 0
                    yield logged
                elif logged.base_offset >= end:
                    return
            if at == here:
                # Replicated up to the end, but two empty responses: compaction removed the rest.
                empty += 1
                if empty > 1:
                    return

    def last_batch(self, topic: str, partition: int, end: int) -> Logged | None:
        """The batch that ends at `end`; None if it was removed."""
        if end <= 0:
            return None
        try:
            fetched = self._query(lambda wire: wire.fetch(topic, partition, end - 1, end, bytes_max=1))
        except OffsetsDeleted:
            return None
        for logged in batches(fetched):
            if logged.base_offset < end <= logged.next_offset:
                return logged
        return None

    def last_batches(self, topic: str, ends: Mapping[int, int]) -> dict[int, Logged | None]:
        """`last_batch` of several partitions, with few requests to each broker. `ends`: by partition."""
        fetched = self._query(lambda wire: wire.fetch_last(topic, ends)) if len(ends) > 1 else {}
        found: dict[int, Logged | None] = {}
        for partition, end in ends.items():
            last = next((each for each in batches(fetched.get(partition, b"")) if each.next_offset >= end), None)
            found[partition] = last or self.last_batch(topic, partition, end)
        return found

    def close(self) -> None:
        """Close the connections. Appends in flight raise Unknown."""
        with self._starting:
            self._closed, wire, self._wire = True, self._wire, None
        _open.discard(self)
        if wire is not None and self._pid == os.getpid():
            wire.stop()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a Log cannot be pickled (send its options)")

    def _query(self, call: Callable[[_Client], Coroutine[Any, Any, _T]]) -> _T:
        return self._submit(call).result()

    def _submit(self, call: Callable[[_Client], Coroutine[Any, Any, _T]]) -> Future[_T]:
        return self._started().submit(call)

    def _started(self) -> _Wire:
        if self._pid != os.getpid():
            raise RuntimeError("this Log was used before the process was forked (use Log.shared, or create another)")
        with self._starting:
            if self._closed:
                raise RuntimeError("this Log is closed")
            if self._wire is None:
                self._wire = _Wire(_Client(self._options, self._patience_seconds))
            return self._wire


#: To close at process exit.
_open: set[Log] = set()
#: Inherited by a forked process, and kept from garbage collection: closing a connection here would remove the parent's
#: from the epoll set that both processes share.
_inherited: list[Any] = []


def _close_all() -> None:
    for log in list(_open):
        log.close()


def _forget_all() -> None:
    _inherited.extend([list(_open), Log._shared])
    _open.clear()
    Log._shared = {}
    Log._sharing = threading.Lock()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)


class _Wire:
    """An event loop in a thread, and its client."""

    def __init__(self, client: _Client) -> None:
        self._client = client
        # Until a longer block was freed, glibc returns each batch's memory to the kernel and allocates it again page by
        # page: half the cost of an append.
        bytes(_LONGEST_BLOCK_BYTES)
        self._loop = asyncio.new_event_loop()
        # Daemon: the process may exit without `close`.
        self._thread = threading.Thread(target=self._run, name="fencepost-log", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[_Client], Coroutine[Any, Any, _T]]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(_answered(call(self._client)), self._loop)

    def stop(self) -> None:
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._client.close(), _CLOSE_SECONDS / 2)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _answered(call: Coroutine[Any, Any, _T]) -> _T:
    try:
        return await call
    except asyncio.CancelledError:
        raise Unknown("the connection was closed by this process") from None


class _KafkaClient(AIOKafkaClient):  # type: ignore[misc]
    """Connections and broker addresses; `_Client` requests the metadata."""

    def force_metadata_update(self) -> Awaitable[bool]:
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        done.set_result(True)
        return done


class _Client:
    """The part of `Log` that runs in the event loop."""

    def __init__(self, options: Mapping[str, Any], patience_seconds: float) -> None:
        self._options = {"request_timeout_ms": int(REQUEST_SECONDS * 1000)} | connection_options(options)
        self._patience_seconds = patience_seconds
        self._request_seconds = self._options["request_timeout_ms"] / 1000
        # Shorter than the request timeout, so that broker and proxy respond before the connection is closed.
        self._produce_timeout_ms = int(self._options["request_timeout_ms"] * 0.8)
        self._kafka: _KafkaClient | None = None
        self._topics: dict[str, _Topic] = {}
        self._queried = 0  # successful Metadata requests
        self._querying = asyncio.Lock()

    # --- requests of a Log

    async def connect(self) -> None:
        await self._connected(_Tries(min(CONNECT_SECONDS, self._patience_seconds), "the proxy"))

    async def identify(self, topic: str) -> TopicIdentity:
        tries = _Tries(self._patience_seconds, f"topic {topic}")
        while True:
            await self._refresh(topic, tries, self._queried)
            known = self._topics[topic]
            if known.code == _NONE and known.leaders:
                return TopicIdentity(known.id, dict(known.epochs))
            _refuse_final(topic, known.code)
            _refuse_unknown(topic, known.code, tries)
            await tries.pause(for_code(known.code).__name__)

    async def config(self, topic: str) -> dict[str, str | None]:
        tries = _Tries(self._patience_seconds, f"the configs of topic {topic}")
        while True:
            kafka = await self._connected(tries)
            response = await self._sent(
                kafka.get_random_node(), DescribeConfigsRequest([(_TOPIC_RESOURCE, topic, None)])
            )
            if isinstance(response, Exception):
                await tries.pause(response)
                await self._refresh(None, tries, self._queried)
                continue
            ((code, _, _, _, entries),) = response.resources
            if code == _NONE:
                return {entry[0]: entry[1] for entry in entries}
            _refuse_final(topic, code)
            _refuse_unknown(topic, code, tries)
            await tries.pause(for_code(code).__name__)

    async def offsets(self, topic: str, partitions: list[int]) -> dict[int, tuple[int, int]]:
        tries = _Tries(self._patience_seconds, f"the log ends of topic {topic}")
        found: dict[int, tuple[int, int]] = {}
        while missing := [partition for partition in partitions if partition not in found]:
            queried = self._queried
            by_leader: dict[int, list[int]] = {}
            for partition in missing:
                by_leader.setdefault(await self._leader(topic, partition, tries), []).append(partition)
            outcomes = await asyncio.gather(*(self._offsets_of(node, topic, led) for node, led in by_leader.items()))
            for known, problem in outcomes:
                found |= known
                if problem is not None:
                    await self._refresh(topic, tries, queried)
                    await tries.pause(problem)
        return found

    async def _offsets_of(
        self, node: int, topic: str, partitions: list[int]
    ) -> tuple[dict[int, tuple[int, int]], object]:
        """Known offsets, and the problem if some are missing."""
        found: dict[int, dict[int, int]] = {_EARLIEST: {}, _LATEST: {}}
        problem: object = None
        requests = [OffsetRequest(-1, 0, [(topic, [(each, time_) for each in partitions])]) for time_ in found]
        responses = await asyncio.gather(*(self._sent(node, request) for request in requests))
        for response, offsets in zip(responses, found.values(), strict=True):
            if isinstance(response, Exception):
                return {}, response
            for _, answers in response.topics:
                for partition, code, *_, offset in answers:
                    _refuse_final(topic, code)
                    if code == _NONE:
                        offsets[partition] = offset
                    else:
                        problem = for_code(code).__name__
        both = found[_EARLIEST].keys() & found[_LATEST].keys()
        return {each: (found[_EARLIEST][each], found[_LATEST][each]) for each in both}, problem

    async def append(self, topic: str, partition: int, batch: bytes) -> Answer:
        tries = _Tries(self._request_seconds, f"the leader of {topic}-{partition}")
        try:
            node = await self._leader(topic, partition, tries)
            kafka = await self._connected(tries)
            while not await kafka.ready(node):
                await tries.pause(f"broker {node} cannot be reached")
                await self._refresh(topic, tries, self._queried)
                node = await self._leader(topic, partition, tries)
        except CannotReach as error:
            raise Unknown(f"not sent: {error}") from error
        response = await self._sent(node, Produce(topic, partition, self._produce_timeout_ms, batch))
        if isinstance(response, Exception):
            self._forget_leader(topic, partition)
            raise Unknown(f"{topic}-{partition}: no response from broker {node}: {_stated(response)}") from response
        ((_, ((_, code, base_offset, *_, message, _),), _),) = response.topics
        if code in _ELSEWHERE:
            self._forget_leader(topic, partition)
        return Answer(code, base_offset, message)

    async def fetch(self, topic: str, partition: int, offset: int, end: int, bytes_max: int = _FETCH_BYTES) -> bytes:
        """Fetch batches from `offset`; empty if none is left and the high watermark has reached `end`."""
        tries = _Tries(self._patience_seconds, f"{topic}-{partition} at offset {offset}")
        while True:
            queried = self._queried
            node = await self._leader(topic, partition, tries)
            request = FetchRequest(_FETCH_WAIT_MS, 1, bytes_max, 0, [(topic, [(partition, offset, bytes_max)])])
            response = await self._sent(node, request)
            if isinstance(response, Exception):
                problem: object = response
            else:
                ((_, ((_, code, high_watermark, *_, records),)),) = response.topics
                _refuse_final(topic, code)
                if code == _NONE and records:
                    return bytes(records)
                if code == _NONE and high_watermark >= end and not response.throttle_time_ms:
                    return b""
                if code == _OFFSET_OUT_OF_RANGE:
                    ((log_start, _),) = (await self.offsets(topic, [partition])).values()
                    if offset < log_start:
                        raise OffsetsDeleted(topic, partition, offset, log_start)
                problem = for_code(code).__name__ if code else f"replicated up to offset {high_watermark} only"
                if code == _NONE:
                    await tries.pause(problem)
                    continue
            await tries.pause(problem)
            await self._refresh(topic, tries, queried)

    async def fetch_last(self, topic: str, ends: Mapping[int, int]) -> dict[int, bytes]:
        """Fetch the batches that end at `ends`; those of partitions with problems are missing."""
        tries = _Tries(self._patience_seconds, f"the ends of topic {topic}")
        by_leader: dict[int, dict[int, int]] = {}
        for partition, end in ends.items():
            by_leader.setdefault(await self._leader(topic, partition, tries), {})[partition] = end
        fetched: dict[int, bytes] = {}
        for each in await asyncio.gather(*(self._fetch_last_of(node, topic, led) for node, led in by_leader.items())):
            fetched |= each
        return fetched

    async def _fetch_last_of(self, node: int, topic: str, ends: dict[int, int]) -> dict[int, bytes]:
        """A broker returns at least one whole batch, and others as far as they fit."""
        found: dict[int, bytes] = {}
        while missing := [
            (partition, end - 1, _LAST_BATCH_BYTES) for partition, end in ends.items() if partition not in found
        ]:
            response = await self._sent(
                node, FetchRequest(_FETCH_WAIT_MS, 1, _LAST_BATCHES_BYTES, 0, [(topic, missing)])
            )
            if isinstance(response, Exception):
                break
            answers = [answer for _, partitions in response.topics for answer in partitions]
            now = {partition: bytes(records) for partition, code, *_, records in answers if code == _NONE and records}
            if not now:
                break
            found |= now
        return found

    async def close(self) -> None:
        if self._kafka is not None:
            await self._kafka.close()

    # --- leaders and connections

    async def _leader(self, topic: str, partition: int, tries: _Tries) -> int:
        while True:
            known = self._topics.get(topic)
            leader = -1 if known is None else known.leaders.get(partition, -1)
            if leader >= 0:
                return leader
            if known is not None:
                _refuse_final(topic, known.code)
                await tries.pause(f"{topic}-{partition} has no leader")
            await self._refresh(topic, tries, self._queried)

    def _forget_leader(self, topic: str, partition: int) -> None:
        known = self._topics.get(topic)
        if known is not None:
            known.leaders[partition] = -1

    async def _refresh(self, topic: str | None, tries: _Tries, queried: int) -> None:
        """Request metadata of all topics used here, unless a response arrived since `queried`."""
        async with self._querying:
            if topic is not None and topic not in self._topics:
                self._topics[topic] = _Topic(_UNKNOWN_TOPIC)
            elif self._queried != queried:
                return
            while True:
                kafka = await self._connected(tries)
                problem: object = "no broker is known"
                nodes = [broker.nodeId for broker in kafka.cluster.brokers()]
                random.shuffle(nodes)
                for node in nodes:
                    response = await self._sent(node, Metadata(sorted(self._topics)))
                    if not isinstance(response, Exception):
                        self._learn(kafka, response)
                        return
                    problem = response
                await tries.pause(problem)
                await self._bootstrap(kafka)

    def _learn(self, kafka: _KafkaClient, response: Any) -> None:
        self._queried += 1
        for code, topic, high, low, _, partitions, *_ in response.topics:
            # Partitions without a leader count too.
            leaders = {number: leader for _, number, leader, *_ in partitions}
            epochs = {number: epoch for _, number, _, epoch, *_ in partitions}
            self._topics[topic] = _Topic(code, topic_id(high, low), leaders, epochs)
        update_brokers(kafka.cluster, response)

    async def _connected(self, tries: _Tries) -> _KafkaClient:
        while self._kafka is None:
            # With a maximum age, aiokafka requests all topics of the cluster.
            options = self._options | {"metadata_max_age_ms": _NEVER_MS}
            kafka = _KafkaClient(loop=asyncio.get_running_loop(), **options)
            problem = await self._bootstrap(kafka)
            if problem is None:
                if self._kafka is None:
                    self._kafka = kafka
                    break
                await kafka.close()
            else:
                await kafka.close()
                await tries.pause(problem)
        return self._kafka

    async def _bootstrap(self, kafka: _KafkaClient) -> object:
        """Connect to the bootstrap servers. Returns the error, or None."""
        try:
            await kafka.bootstrap()
        except (TimeoutError, KafkaError, OSError) as error:
            return await self._why(kafka) or error
        return None

    async def _why(self, kafka: _KafkaClient) -> str | None:
        """The error that `bootstrap` only logs. Raises LogRefused for a permanent one."""
        options = {key: value for key, value in self._options.items() if key in _CONNECTION_OPTIONS}
        found: str | None = None
        for host, port, _ in kafka.hosts:
            try:
                (await create_conn(host, port, **options)).close()
            except (SaslAuthenticationFailed, UnsupportedSaslMechanismError, IllegalSaslStateError) as error:
                raise LogRefused(
                    f"SASL authentication with {host}:{port} failed: {_stated(error)} (check kafka.sasl.*)"
                ) from error
            except ssl.SSLCertVerificationError as error:
                raise LogRefused(
                    f"the certificate of {host}:{port} is not trusted: {error.verify_message} "
                    "(see kafka.ssl.truststore.location)"
                ) from error
            except (TimeoutError, KafkaError, OSError) as error:
                found = f"cannot connect to {host}:{port}: {_reason(error)} (check kafka.bootstrap.servers)"
        return found

    async def _sent(self, node: int | None, request: Any) -> Any:
        """The response, or the error; then the request may have arrived."""
        kafka = self._kafka
        assert kafka is not None
        try:
            return await kafka.send(node, request)
        except (IncompatibleBrokerVersion, NotImplementedError) as error:
            raise LogRefused(
                f"the brokers do not support the APIs that the sink needs (Kafka 3.1 or newer): {_stated(error)}"
            ) from error
        except Exception as error:
            return error


class _Topic(NamedTuple):
    """From metadata: error code, topic id, and of each partition the leader (-1: none) and its epoch."""

    code: int
    id: str = ""
    leaders: dict[int, int] = {}  # noqa: RUF012 - shared by topics without partitions
    epochs: dict[int, int] = {}  # noqa: RUF012


class _Tries:
    """Pauses and deadline of one query."""

    def __init__(self, patience_seconds: float, what: str) -> None:
        self._began = time.monotonic()
        self._patience_seconds = patience_seconds
        self._what = what
        self._pause_seconds = _PAUSE_SECONDS

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    async def pause(self, problem: object) -> None:
        """Wait before the next try. Raises CannotReach after the deadline."""
        if self.seconds >= self._patience_seconds:
            raise CannotReach(f"{self._what}: {_stated(problem)}, tried for {self._patience_seconds:g} s")
        await asyncio.sleep(self._pause_seconds * random.uniform(0.5, 1))
        self._pause_seconds = min(self._pause_seconds * 2, _PAUSE_MAX_SECONDS)


def _stated(problem: object) -> str:
    if isinstance(problem, BaseException):
        return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
    return str(problem)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
    return _stated(error)


def _refuse_final(topic: str, code: int) -> None:
    if code in _FINAL:
        raise LogRefused(f"topic {topic}: {for_code(code).__name__}: {_FINAL[code]}")


def _refuse_unknown(topic: str, code: int, tries: _Tries) -> None:
    if code == _UNKNOWN_TOPIC and tries.seconds > _UNKNOWN_TOPIC_SECONDS:
        raise LogRefused(f"topic {topic} does not exist (create it with the number of partitions that it needs)")


_SSL_FILES = {"ssl_cafile": "cafile", "ssl_cadata": "cadata", "ssl_certfile": "certfile", "ssl_keyfile": "keyfile"}
_CONNECTION_OPTIONS = inspect.signature(create_conn).parameters


class _TokenFile(AbstractTokenProvider):  # type: ignore[misc]
    """The first line of a file, read at each login."""

    def __init__(self, file: str) -> None:
        self._file = file

    async def token(self) -> str:
        return self._read()

    def _read(self) -> str:
        try:
            with open(self._file, encoding="utf-8") as file:
                return file.readline().strip()
        except OSError as error:
            raise LogRefused(f"cannot read the OAuth token in {self._file}: {error.strerror}") from error


def connection_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """aiokafka's options. Those of `client_options`, which can be pickled, become an SSL context and a token provider,
    which cannot. Raises SinkError."""
    given = {key: value for key, value in options.items() if not key.startswith("ssl_") or key == "ssl_context"}
    if token := given.pop("sasl_oauth_token_file", None):
        given["sasl_oauth_token_provider"] = _TokenFile(token)
    if given.get("security_protocol") in {"SSL", "SASL_SSL"} and "ssl_context" not in given:
        files = {name: options[key] for key, name in _SSL_FILES.items() if options.get(key) is not None}
        try:
            context = create_ssl_context(**files, password=options.get("ssl_password"))
            if text := options.get("ssl_identity"):
                with pem_file(text) as file:
                    context.load_cert_chain(file)
        except OSError as error:  # ssl.SSLError is one
            raise SinkError(f"cannot load the certificates of kafka.ssl.*: {error}") from error
        context.check_hostname = bool(options.get("ssl_check_hostname", True))
        given["ssl_context"] = context
    return given
