"""One connection of our own to one broker: requests in a pipeline, answers in order, a time limit on each.

A request that runs out of time gives up its caller, not the connection: its answer, when it comes, is dropped. Only
when the oldest answer is overdue by `request_timeout_seconds` is the connection given up, with all that is on it.

What a failure means to the caller is in the exception's type. `UpstreamUnavailable`: it did not happen, or it was a
question and can be asked again. `OutcomeUnknown`: the bytes may have reached the broker; closing the connection does
not call them back.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from fencepost_proxy import logs
from fencepost_proxy.config import ControlSasl, Limits
from fencepost_proxy.errors import ConfigError, Error, FencepostError, UpstreamProtocolError
from fencepost_proxy.net import sasl, tls
from fencepost_proxy.types import Address, Monotonic
from fencepost_proxy.wire import control as wire
from fencepost_proxy.wire.apis import API_VERSIONS, api_name
from fencepost_proxy.wire.schema import Message

_log = logs.get("net.broker")
_limited_log = logs.RateLimitedLog(_log)

_LENGTH: Final = struct.Struct(">i")
_API_VERSIONS_VERSION: Final = 3  # since Kafka 2.4; this proxy needs far newer brokers for other reasons
#: Of the time that a login stands, when the next one begins.
_LOG_IN_ANEW_AT: Final = 0.8
#: How a TLS alert or handshake begins, taken for a frame's length.
_TLS_LENGTHS: Final = (0x1503, 0x1603)


class UpstreamUnavailable(FencepostError):
    """Kafka could not do it in time, or would not; the text says which, and what to look at.

    `error_code` is Kafka's answer where it is an answer that will not change by itself, for example 3 or 29.
    """

    def __init__(self, reason: str, *, error_code: int | None = None) -> None:
        super().__init__(reason)
        self.error_code = error_code


class OutcomeUnknown(UpstreamUnavailable):
    """The request was sent and its answer never came: it may have been carried out, or still may be."""


def _plain() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Access:
    """How our own connections get in at a broker. `tls` gives what a new one is to use, None: plain TCP.

    `on_failure`, `on_login`, `on_trouble` are told for the metrics: why TLS failed, in one word; whether a login
    succeeded; why a connection could not be had or was lost with something unanswered.
    """

    tls: Callable[[], ssl.SSLContext | None] = _plain
    sasl: ControlSasl | None = None
    on_failure: Callable[[str], None] = lambda kind: None
    on_login: Callable[[bool], None] = lambda succeeded: None
    on_trouble: Callable[[str], None] = lambda reason: None


PLAIN: Final = Access()

#: Is shown an answer's bytes before they are decoded, and gives back what takes its place; None: it is decoded.
Known = Callable[[memoryview], Message | None]


class Call(NamedTuple):
    """One request, at a version that the broker knows (`BrokerConnection.version`).

    `known`: Metadata of ten thousand partitions takes a tenth of a second to decode, and says the same every time.
    """

    api_key: int
    version: int
    message: Message
    known: Known | None = None


@dataclass(slots=True)
class _InFlight:
    call: Call
    correlation_id: int
    sent_at: Monotonic
    answer: asyncio.Future[Message]


def remaining(deadline: Monotonic) -> float:
    """Seconds until the deadline, at least 0."""
    return max(0.0, deadline - time.monotonic())


def deadline_in(seconds: float) -> Monotonic:
    return Monotonic(time.monotonic() + seconds)


class BrokerConnection:
    """An open connection that has learned the broker's API versions. Made by `open`."""

    def __init__(
        self,
        address: Address,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: Limits,
        client_id: str,
        *,
        access: Access = PLAIN,
    ) -> None:
        self.address = address
        self._access = access
        self._letting_in: asyncio.Event | None = None  # while we log in anew: nothing else may be sent
        self._next_login: asyncio.TimerHandle | None = None
        self._logging_in: asyncio.Task[None] | None = None
        self.api_versions: Mapping[int, tuple[int, int]] = {}
        self._served = False  # it has answered more than who may ask it what
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._client_id = client_id
        self._next_correlation_id = 0
        self._in_flight: deque[_InFlight] = deque()
        self._room = asyncio.Semaphore(limits.control_in_flight_max)
        self._room_queue = asyncio.Lock()
        self._closed_because: str | None = None
        self._receiver = asyncio.create_task(self._receive(), name=f"receive {address}")

    @classmethod
    async def open(
        cls, address: Address, *, limits: Limits, client_id: str, access: Access = PLAIN
    ) -> BrokerConnection:
        """Connects, asks ApiVersions, logs in, in `connect_timeout_seconds` altogether. Raises UpstreamUnavailable."""
        deadline = deadline_in(limits.connect_timeout_seconds)
        context = access.tls()
        name = None if context is None else address.host
        try:
            async with asyncio.timeout(limits.connect_timeout_seconds):
                reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname=name)
        except TimeoutError as e:
            access.on_trouble("timeout")
            raise UpstreamUnavailable(
                f"{address}: no connection within {limits.connect_timeout_seconds:g} s; is it the right address?"
            ) from e
        except (ssl.SSLError, ConnectionResetError, ConnectionAbortedError) as e:
            access.on_trouble("unreachable" if context is None else "tls")
            if context is None:
                raise UpstreamUnavailable(f"{address}: cannot connect: {e.strerror or e}") from e
            kind, words = tls.of_broker(e)
            access.on_failure(kind)
            raise UpstreamUnavailable(f"{address}: {words}") from e
        except (OSError, ValueError) as e:
            access.on_trouble("unreachable")
            raise UpstreamUnavailable(f"{address}: cannot connect: {getattr(e, 'strerror', None) or e}") from e
        connection = cls(address, reader, writer, limits, client_id, access=access)
        try:
            hello = Message(client_software_name="fencepost", client_software_version="0")
            answer = await connection.request(API_VERSIONS, _API_VERSIONS_VERSION, hello, deadline=deadline)
            if answer.error_code:
                access.on_trouble("protocol")
                raise UpstreamUnavailable(
                    f"{address}: answered ApiVersions with error {answer.error_code}; Kafka 2.4 or later is needed"
                )
            await connection._log_in(deadline)
        except OutcomeUnknown as e:
            # Of a greeting, not of what the caller is about to ask: that was never sent.
            await connection.close()
            raise UpstreamUnavailable(str(e)) from e
        except BaseException:
            await connection.close()
            raise
        connection.api_versions = {api.api_key: (api.min_version, api.max_version) for api in answer.api_keys}
        return connection

    async def _log_in(self, deadline: Monotonic) -> None:
        """Raises UpstreamUnavailable."""
        wanted = self._access.sasl
        if wanted is None:
            return

        async def ask(api_key: int, version: int, message: Message) -> Message:
            (answer,) = await self._pipeline([Call(api_key, version, message)], deadline, login=True)
            return answer

        try:
            seconds = await sasl.log_in(ask, wanted)
        except (sasl.LoginFailed, ConfigError) as e:
            self._access.on_login(False)
            self._access.on_trouble("login")
            raise UpstreamUnavailable(f"{self.address}: {e}") from e
        except UpstreamUnavailable:
            self._access.on_login(False)
            raise
        self._access.on_login(True)
        if seconds:
            loop = asyncio.get_running_loop()
            self._next_login = loop.call_later(seconds * _LOG_IN_ANEW_AT, self._begin_login, seconds)

    def _begin_login(self, seconds: float) -> None:
        self._logging_in = asyncio.create_task(self._log_in_anew(seconds), name=f"log in at {self.address}")

    async def _log_in_anew(self, seconds: float) -> None:
        """In the middle of a login Kafka takes nothing else; what was sent before it is answered before it."""
        self._letting_in = asyncio.Event()
        try:
            await self._log_in(deadline_in(max(seconds, self._limits.request_timeout_seconds)))
        except UpstreamUnavailable as e:
            self._fail(f"could not log in anew: {e}")
        finally:
            self._letting_in.set()
            self._letting_in = None

    @property
    def secured(self) -> ssl.SSLObject | None:
        """What TLS has come to; None: plain TCP."""
        found: ssl.SSLObject | None = self._writer.get_extra_info("ssl_object")
        return found

    @property
    def closed(self) -> bool:
        return self._closed_because is not None

    def version(self, api_key: int, *, at_most: int, at_least: int = 0) -> int:
        """The highest version that the broker, our codec and `at_most` allow. Raises UpstreamUnavailable with 35."""
        theirs = self.api_versions.get(api_key, (0, -1))
        ours = wire.codec_versions(api_key) or (0, -1)
        version = min(theirs[1], ours[1], at_most)
        if version < max(theirs[0], ours[0], at_least):
            raise UpstreamUnavailable(
                f"{self.address}: has {api_name(api_key)} v{theirs[0]}–{theirs[1]}, needed is v{at_least}–{at_most}; "
                "this Kafka is too old or too new for this proxy",
                error_code=Error.UNSUPPORTED_VERSION,
            )
        return version

    async def request(
        self, api_key: int, version: int, message: Message, known: Known | None = None, *, deadline: Monotonic
    ) -> Message:
        """The answer. Raises UpstreamUnavailable if nothing was sent, OutcomeUnknown if no answer came."""
        (answer,) = await self.pipeline([Call(api_key, version, message, known)], deadline=deadline)
        return answer

    async def pipeline(self, calls: Sequence[Call], *, deadline: Monotonic) -> list[Message]:
        """The answers to calls that are sent back to back: the broker handles them one after the other.

        Raises as `request` does.
        """
        return await self._pipeline(calls, deadline)

    async def _pipeline(self, calls: Sequence[Call], deadline: Monotonic, *, login: bool = False) -> list[Message]:
        frames = []
        for each in calls:
            self._next_correlation_id = (self._next_correlation_id + 1) & 0x7FFFFFFF
            correlation_id = self._next_correlation_id
            frame = wire.encode_request_frame(each.api_key, each.version, correlation_id, self._client_id, each.message)
            frames.append((each, correlation_id, frame))
        await self._take_room(len(frames), deadline)
        while self._letting_in is not None and not login:
            # Without room: the login needs some.
            self._give_room(len(frames))
            await self._let_in(self._letting_in, deadline)
            await self._take_room(len(frames), deadline)
        if self._closed_because is not None:
            self._give_room(len(frames))
            raise UpstreamUnavailable(f"{self.address}: {self._closed_because}")
        # From here to the last write nothing is awaited: no other request comes between these.
        self._write(b"".join(frame for _, _, frame in frames), len(frames))
        loop = asyncio.get_running_loop()
        entries = []
        for call, correlation_id, _ in frames:
            entry = _InFlight(call, correlation_id, Monotonic(time.monotonic()), loop.create_future())
            entries.append(entry)
            self._in_flight.append(entry)
        names = ", ".join(api_name(each.api_key) for each in calls)
        try:
            async with asyncio.timeout(remaining(deadline)):
                return [await entry.answer for entry in entries]
        except TimeoutError:
            self._give_up_if_stuck()
            raise OutcomeUnknown(f"{self.address}: no answer to {names} in time") from None
        finally:
            for entry in entries:
                # An answer that nobody awaits any more must not be reported as a lost exception.
                if not entry.answer.cancel() and not entry.answer.cancelled():
                    entry.answer.exception()

    async def _let_in(self, letting_in: asyncio.Event, deadline: Monotonic) -> None:
        try:
            async with asyncio.timeout(remaining(deadline)):
                await letting_in.wait()
        except TimeoutError:
            raise UpstreamUnavailable(f"{self.address}: not logged in anew in time") from None

    def _write(self, data: bytes, room: int) -> None:
        try:
            self._writer.write(data)
        except (OSError, RuntimeError) as e:
            # uvloop's transport knows that it is closed a moment before our receiver does, and says so by a
            # RuntimeError where asyncio's own would only drop the data.
            self._give_room(room)
            self._fail(f"connection lost: {e}", "lost")
            raise UpstreamUnavailable(f"{self.address}: {self._closed_because}") from e

    async def close(self) -> None:
        """Closes at once; what is in flight fails with OutcomeUnknown."""
        self._fail("closed by us")
        ending = {each for each in (self._receiver, self._logging_in) if each is not None}
        for each in ending:
            each.cancel()
        await asyncio.wait(ending)

    async def _take_room(self, count: int, deadline: Monotonic) -> None:
        taken = 0
        try:
            # One at a time: two pipelines that each hold a part of what both need would wait for ever.
            async with asyncio.timeout(remaining(deadline)), self._room_queue:
                while taken < count:
                    await self._room.acquire()
                    taken += 1
        except BaseException as e:
            self._give_room(taken)
            if isinstance(e, TimeoutError):
                self._give_up_if_stuck()
                raise UpstreamUnavailable(
                    f"{self.address}: {len(self._in_flight)} requests are unanswered (limits.control_in_flight_max)"
                ) from None
            raise

    def _give_room(self, count: int) -> None:
        for _ in range(count):
            self._room.release()

    def _give_up_if_stuck(self) -> None:
        if self._in_flight and time.monotonic() - self._in_flight[0].sent_at > self._limits.request_timeout_seconds:
            seconds = f"{self._limits.request_timeout_seconds:g} s"
            self._fail(f"no answer for {seconds} (limits.request_timeout_seconds)", "timeout")

    async def _receive(self) -> None:
        reason, kind = "receiving ended", "lost"
        try:
            while True:
                (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if size >> 16 in _TLS_LENGTHS and self._access.tls() is None:
                    raise UpstreamProtocolError("it speaks TLS; set upstream_tls")
                if not _LENGTH.size <= size <= self._limits.frame_bytes_max:
                    raise UpstreamProtocolError(f"a response of {size} bytes; limits.frame_bytes_max bounds it")
                self._answer(await self._reader.readexactly(size))
        except asyncio.IncompleteReadError:
            reason = "closed by the broker"
            if self._access.sasl is None and self.api_versions and not self._served:
                reason += " at the first request; does it want a login there (control_sasl)?"
        except ssl.SSLError as e:
            # With TLS 1.3 a broker looks at our certificate when the handshake is over for us.
            why, reason = tls.of_broker(e)
            self._access.on_failure(why)
            kind = "tls"
        except OSError as e:
            reason = f"connection lost: {e.strerror or e}"
        except UpstreamProtocolError as e:
            reason, kind = f"is not talking Kafka's protocol: {e}", "protocol"
            _limited_log.error(self.address, "broker broke the protocol", broker=self.address, reason=e)
        finally:
            self._fail(reason, kind)

    def _answer(self, frame: bytes) -> None:
        if not self._in_flight:
            raise UpstreamProtocolError("a response that nobody asked for")
        entry = self._in_flight[0]
        call = entry.call
        header = wire.parse_response_header(frame, call.api_key, call.version)
        if header.correlation_id != entry.correlation_id:
            raise UpstreamProtocolError(
                f"response {header.correlation_id} where {entry.correlation_id} ({api_name(call.api_key)}) was due"
            )
        body = memoryview(frame)[header.body_offset :]
        message = call.known(body) if call.known is not None else None
        if message is None:
            message = wire.decode_response(call.api_key, call.version, body)
        self._in_flight.popleft()
        self._room.release()
        self._served = self._served or bool(self.api_versions)
        if not entry.answer.done():
            entry.answer.set_result(message)

    def _fail(self, reason: str, kind: str | None = None) -> None:
        """`kind` – for the metrics; None: it was our doing, or is counted already."""
        if self._closed_because is not None:
            return
        self._closed_because = reason
        # A broker closes what is idle: nothing is wrong then.
        if kind is not None and (kind != "lost" or self._in_flight):
            self._access.on_trouble(kind)
        if self._next_login is not None:
            self._next_login.cancel()
        self._writer.transport.abort()
        lost, self._in_flight = self._in_flight, deque()
        self._give_room(len(lost))
        for entry in lost:
            if not entry.answer.done():
                name = api_name(entry.call.api_key)
                entry.answer.set_exception(OutcomeUnknown(f"{self.address}: {reason}, {name} is unanswered"))


class BrokerLink:
    """A connection to one address: opened when it is wanted, and again when it was lost, after a growing pause."""

    def __init__(
        self,
        address: Address,
        *,
        limits: Limits,
        client_id: str,
        on_opened: Callable[[], None] = lambda: None,
        access: Access = PLAIN,
    ) -> None:
        self.address = address
        self._access = access
        self._limits = limits
        self._client_id = client_id
        self._on_opened = on_opened
        self._connection: BrokerConnection | None = None
        self._opening: asyncio.Task[BrokerConnection] | None = None
        self._pause_seconds = 0.0
        self._closed = False
        #: Whoever asks says in the log that it cannot be reached.
        self.quiet = False
        #: API key -> (min, max) version, as of the last connection that was opened; None before the first.
        self.api_versions: Mapping[int, tuple[int, int]] | None = None

    @property
    def connection(self) -> BrokerConnection | None:
        """The open connection, None while there is none."""
        return None if self._connection is None or self._connection.closed else self._connection

    async def connected(self, deadline: Monotonic) -> BrokerConnection:
        """An open connection. One attempt serves all who wait for it. Raises UpstreamUnavailable."""
        if (connection := self.connection) is not None:
            return connection
        if self._closed:
            raise UpstreamUnavailable(f"{self.address}: closed by us")
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open(), name=f"connect {self.address}")
            # Retrieved even if every caller has run out of time by then.
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        # A caller's deadline must not cancel an attempt that others wait for too.
        # And by the time it wakes there may be another attempt.
        opening = self._opening
        done, _ = await asyncio.wait({opening}, timeout=remaining(deadline))
        if not done:
            raise UpstreamUnavailable(f"{self.address}: not connected in time")
        if opening.cancelled():
            raise UpstreamUnavailable(f"{self.address}: closed by us")
        return opening.result()

    async def close(self) -> None:
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        if self._connection is not None:
            await self._connection.close()

    async def _open(self) -> BrokerConnection:
        if self._connection is not None:
            await self._connection.close()
        # Jitter keeps the proxies of a cluster from coming back to a restarted broker in step.
        await asyncio.sleep(self._pause_seconds * random.uniform(0.5, 1.0))
        try:
            self._connection = await BrokerConnection.open(
                self.address, limits=self._limits, client_id=self._client_id, access=self._access
            )
        except UpstreamUnavailable as e:
            doubled = max(self._pause_seconds * 2, self._limits.reconnect_backoff_min_seconds)
            self._pause_seconds = min(doubled, self._limits.reconnect_backoff_max_seconds)
            if not self.quiet:
                _limited_log.warning(self.address, "broker cannot be reached", broker=self.address, reason=e)
            raise
        self._pause_seconds = 0.0
        self.api_versions = self._connection.api_versions
        self._on_opened()
        _log.debug("connected", broker=self.address)
        return self._connection
