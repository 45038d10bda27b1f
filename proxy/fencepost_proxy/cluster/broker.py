"""The proxy's own connection to one broker: pipelined requests, ordered responses, a timeout for each.

A request timeout fails the caller, not the connection: a late response is dropped. The connection is closed, with all
its requests, only if the oldest response is overdue by `request_timeout_seconds`.

The exception's type states the outcome. `UpstreamUnavailable`: the request had no effect, or is a query that can be
repeated. `OutcomeUnknown`: the bytes may have reached the broker.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from fencepost_proxy import logs
from fencepost_proxy.cluster import hints, sasl, tls_failures
from fencepost_proxy.cluster.connecting import Connector, NoResponse
from fencepost_proxy.config import ControlSasl, Limits
from fencepost_proxy.errors import ConfigError, Error, FencepostError, Reason, UpstreamProtocolError, error_name
from fencepost_proxy.types import Address, Monotonic
from fencepost_proxy.wire import control as wire
from fencepost_proxy.wire.apis import API_VERSIONS, api_name
from fencepost_proxy.wire.schema import Message

_log = logs.get("cluster.broker")
_limited_log = logs.RateLimitedLog(_log)

#: Unanswered requests per connection. Further ones wait.
IN_FLIGHT_MAX: Final = 256
#: First pause before a retry; later ones double, up to `Limits.reconnect_backoff_max_seconds`.
BACKOFF_SECONDS: Final = 0.05
_LENGTH: Final = struct.Struct(">i")
_API_VERSIONS_VERSION: Final = 3  # since Kafka 2.4; other APIs need newer brokers
#: Share of the session lifetime after which the next login starts.
_LOG_IN_AGAIN_AT: Final = 0.8
#: First bytes of a TLS alert or handshake, read as a frame length.
_TLS_LENGTHS: Final = (0x1503, 0x1603)


class UpstreamUnavailable(FencepostError):
    """Kafka failed or refused a request; the text has the reason.

    `error_code`: Kafka's error code if a retry would not help, for example 3 or 29.
    """

    def __init__(self, reason: str, *, error_code: int | None = None, hint: str = "") -> None:
        super().__init__(reason, hint=hint)
        self.error_code = error_code


class OutcomeUnknown(UpstreamUnavailable):
    """The request was sent without a response: it may have been executed, or may still be."""


def _no_tls() -> None:
    return None


@dataclass(slots=True, eq=False)
class Access:
    """TLS and SASL of the proxy's own connections. `tls` returns the context for a new one, None for plain TCP.
    `sasl`: for the next logins.

    Callbacks for metrics: `on_failure` gets the reason of a TLS failure in one word, `on_login` whether a login
    succeeded, `on_error` why a connection failed to open or was lost with requests in progress, `on_refused` which
    broker closed a connection before its first response.
    """

    tls: Callable[[], ssl.SSLContext | None] = _no_tls
    sasl: ControlSasl | None = None
    on_failure: Callable[[str], None] = lambda kind: None
    on_login: Callable[[bool], None] = lambda succeeded: None
    on_error: Callable[[str], None] = lambda reason: None
    on_refused: Callable[[Address], None] = lambda address: None
    connector: Connector = field(default_factory=Connector)


PLAINTEXT: Final = Access()

#: Gets a response's bytes before decoding; returns a replacement, or None to decode them.
Known = Callable[[memoryview], Message | None]


class Call(NamedTuple):
    """One request, at a version that the broker supports (`BrokerConnection.version`).

    `known`: skips decoding an unchanged response; Metadata of ten thousand partitions takes 0.1 s to decode.
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
    """An open connection with the broker's API versions. Created by `open`."""

    def __init__(
        self,
        address: Address,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: Limits,
        client_id: str,
        *,
        access: Access = PLAINTEXT,
    ) -> None:
        self.address = address
        self._access = access
        self._letting_in: asyncio.Event | None = None  # during a repeated login: nothing else may be sent
        self._next_login: asyncio.TimerHandle | None = None
        self._logging_in: asyncio.Task[None] | None = None
        self.api_versions: Mapping[int, tuple[int, int]] = {}
        self._answered = False
        self._served = False  # it has answered a request after ApiVersions and login
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._client_id = client_id
        self._next_correlation_id = 0
        self._in_flight: deque[_InFlight] = deque()
        self._package = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._reserve_queue = asyncio.Lock()
        self._closed_because: Reason | None = None
        self._receiver = asyncio.create_task(self._receive(), name=f"receive {address}")

    @classmethod
    async def open(
        cls,
        address: Address,
        *,
        limits: Limits,
        client_id: str,
        access: Access = PLAINTEXT,
        on_accepted: Callable[[], None] = lambda: None,
    ) -> BrokerConnection:
        """Connect, send ApiVersions and log in within `connect_timeout_seconds`. Raises `UpstreamUnavailable`.

        `on_accepted` – called once the TCP connection is open.
        """
        deadline = deadline_in(limits.connect_timeout_seconds)
        reader, writer = await cls._connect(address, limits, access, deadline, on_accepted)
        connection = cls(address, reader, writer, limits, client_id, access=access)
        try:
            hello = Message(client_software_name="fencepost", client_software_version="0")
            answer = await connection.request(API_VERSIONS, _API_VERSIONS_VERSION, hello, deadline=deadline)
            if answer.error_code:
                access.on_error("protocol")
                raise UpstreamUnavailable(
                    f"{address}: ApiVersions returned {error_name(answer.error_code)} (Kafka 2.4 or later is needed)"
                )
            await connection._log_in(deadline)
        except OutcomeUnknown as e:
            # The caller's own request was never sent.
            await connection.close()
            raise UpstreamUnavailable(str(e), hint=e.hint) from e
        except BaseException:
            await connection.close()
            raise
        connection.api_versions = {api.api_key: (api.min_version, api.max_version) for api in answer.api_keys}
        return connection

    @staticmethod
    async def _connect(
        address: Address, limits: Limits, access: Access, deadline: Monotonic, on_accepted: Callable[[], None]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = access.tls()
        name = None if context is None else address.host
        seconds = f"{limits.connect_timeout_seconds:g} s"
        try:
            sock = await access.connector.connect(address, limits.connect_timeout_seconds)
            on_accepted()
            try:
                async with asyncio.timeout(remaining(deadline)):
                    return await asyncio.open_connection(sock=sock, ssl=context, server_hostname=name)
            except BaseException:
                sock.close()
                raise
        except NoResponse as e:
            access.on_error("timeout")
            reason = f"{address}: no connection within {seconds} (check the address): {e}"
            raise UpstreamUnavailable(reason, hint=hints.NO_RESPONSE) from e
        except TimeoutError as e:
            access.on_error("timeout")
            raise UpstreamUnavailable(f"{address}: no TLS handshake within {seconds}", hint=hints.SLOW) from e
        except (ssl.SSLError, ConnectionResetError, ConnectionAbortedError) as e:
            access.on_error("unreachable" if context is None else "tls")
            if context is None:
                raise UpstreamUnavailable(f"{address}: cannot connect: {e.strerror or e}") from e
            failed = tls_failures.of_broker(e)
            access.on_failure(failed.kind)
            raise UpstreamUnavailable(f"{address}: {failed.words}", hint=failed.hint) from e
        except (OSError, ValueError) as e:
            access.on_error("unreachable")
            reason = f"{address}: cannot connect: {getattr(e, 'strerror', None) or e}"
            raise UpstreamUnavailable(reason, hint=hints.of_connect(e)) from e

    async def _log_in(self, deadline: Monotonic) -> None:
        """Log in if SASL is configured. Raises `UpstreamUnavailable`."""
        requested = self._access.sasl
        if requested is None:
            return

        async def query(api_key: int, version: int, message: Message) -> Message:
            (answer,) = await self.pipeline([Call(api_key, version, message)], deadline=deadline, login=True)
            return answer

        try:
            seconds = await sasl.log_in(query, requested)
        except (sasl.LoginFailed, ConfigError) as e:
            self._access.on_login(False)
            self._access.on_error("login")
            hint = e.hint if isinstance(e, sasl.LoginFailed) else hints.SECRET_FILE
            raise UpstreamUnavailable(f"{self.address}: {e}", hint=hint) from e
        except UpstreamUnavailable:
            self._access.on_login(False)
            raise
        self._access.on_login(True)
        if seconds:
            loop = asyncio.get_running_loop()
            self._next_login = loop.call_later(seconds * _LOG_IN_AGAIN_AT, self._begin_login, seconds)

    def _begin_login(self, seconds: float) -> None:
        self._logging_in = asyncio.create_task(self._log_in_again(seconds), name=f"log in at {self.address}")

    async def _log_in_again(self, seconds: float) -> None:
        """Log in again. Kafka accepts no other request during a login; earlier requests are answered first."""
        self._letting_in = asyncio.Event()
        try:
            await self._log_in(deadline_in(max(seconds, self._limits.request_timeout_seconds)))
        except UpstreamUnavailable as e:
            self._fail(f"repeated login failed: {e}")
        finally:
            self._letting_in.set()
            self._letting_in = None

    @property
    def secured(self) -> ssl.SSLObject | None:
        """The TLS object; None for plain TCP."""
        found: ssl.SSLObject | None = self._writer.get_extra_info("ssl_object")
        return found

    @property
    def local_host(self) -> str:
        """This end's address: by which the broker knows the proxy, without address translation between them."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def closed(self) -> bool:
        return self._closed_because is not None

    def version(self, api_key: int, *, at_most: int, at_least: int = 0) -> int:
        """The highest version that the broker, the codec and `at_most` allow. Raises `UpstreamUnavailable` with 35."""
        theirs = self.api_versions.get(api_key, (0, -1))
        ours = wire.codec_versions(api_key) or (0, -1)
        version = min(theirs[1], ours[1], at_most)
        if version < max(theirs[0], ours[0], at_least):
            name = api_name(api_key)
            has = f"{name} v{theirs[0]}–{theirs[1]}" if theirs[1] >= theirs[0] else f"no {name}"
            raise UpstreamUnavailable(
                f"{self.address}: has {has}, needed is v{at_least}–{at_most}; "
                "this Kafka is too old or too new for this proxy",
                error_code=Error.UNSUPPORTED_VERSION,
                hint=hints.RELEASE,
            )
        return version

    def call(
        self, api_key: int, message: Message, known: Known | None = None, *, at_most: int, at_least: int = 0
    ) -> Call:
        return Call(api_key, self.version(api_key, at_most=at_most, at_least=at_least), message, known)

    async def query(
        self, api_key: int, message: Message, *, at_most: int, at_least: int = 0, deadline: Monotonic
    ) -> Message:
        """The response, at the highest version possible. Raises as `version` and `request` do."""
        return await self.request(*self.call(api_key, message, at_most=at_most, at_least=at_least), deadline=deadline)

    async def request(
        self, api_key: int, version: int, message: Message, known: Known | None = None, *, deadline: Monotonic
    ) -> Message:
        """The response. Raises `UpstreamUnavailable` if nothing was sent, `OutcomeUnknown` without a response."""
        (answer,) = await self.pipeline([Call(api_key, version, message, known)], deadline=deadline)
        return answer

    async def pipeline(self, calls: Sequence[Call], *, deadline: Monotonic, login: bool = False) -> list[Message]:
        """Responses to calls sent back to back, which the broker handles in order. Raises as `request` does.

        `login`: the calls are part of a login; all others wait for its end.
        """
        frames = []
        for each in calls:
            self._next_correlation_id = (self._next_correlation_id + 1) & 0x7FFFFFFF
            correlation_id = self._next_correlation_id
            frame = wire.encode_request_frame(each.api_key, each.version, correlation_id, self._client_id, each.message)
            frames.append((each, correlation_id, frame))
        await self._reserve(len(frames), deadline)
        while self._letting_in is not None and not login:
            # The login needs part of this reservation.
            self._release(len(frames))
            await self._let_in(self._letting_in, deadline)
            await self._reserve(len(frames), deadline)
        if self._closed_because is not None:
            self._release(len(frames))
            raise UpstreamUnavailable(f"{self.address}: {self._closed_because}", hint=self._closed_because.hint)
        # No await up to the last write, so no other request is sent between these.
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
            raise OutcomeUnknown(f"{self.address}: no answer to {names} in time", hint=hints.SLOW) from None
        finally:
            for entry in entries:
                # Retrieve the exception, so that asyncio does not report it as lost.
                if not entry.answer.cancel() and not entry.answer.cancelled():
                    entry.answer.exception()

    async def _let_in(self, letting_in: asyncio.Event, deadline: Monotonic) -> None:
        try:
            async with asyncio.timeout(remaining(deadline)):
                await letting_in.wait()
        except TimeoutError:
            reason = f"{self.address}: repeated login not finished in time"
            raise UpstreamUnavailable(reason, hint=hints.SLOW) from None

    def _write(self, data: bytes, reserved: int) -> None:
        try:
            self._writer.write(data)
        except (OSError, RuntimeError) as e:
            # uvloop's transport detects the close before the receiver does and raises RuntimeError, where asyncio drops
            # the data.
            self._release(reserved)
            self._fail(f"connection lost: {e}", "lost")
            raise UpstreamUnavailable(f"{self.address}: {self._closed_because}") from e

    async def close(self) -> None:
        """Close immediately; requests in progress fail with `OutcomeUnknown`."""
        self._fail("closed by the proxy")
        ending = {each for each in (self._receiver, self._logging_in) if each is not None}
        for each in ending:
            each.cancel()
        await asyncio.wait(ending)

    async def _reserve(self, count: int, deadline: Monotonic) -> None:
        taken = 0
        try:
            # One pipeline at a time: two partial reservations would deadlock.
            async with asyncio.timeout(remaining(deadline)), self._reserve_queue:
                while taken < count:
                    await self._package.acquire()
                    taken += 1
        except BaseException as e:
            self._release(taken)
            if isinstance(e, TimeoutError):
                self._give_up_if_stuck()
                raise UpstreamUnavailable(
                    f"{self.address}: {len(self._in_flight)} requests are unanswered, the limit"
                ) from None
            raise

    def _release(self, count: int) -> None:
        for _ in range(count):
            self._package.release()

    def _give_up_if_stuck(self) -> None:
        if self._in_flight and time.monotonic() - self._in_flight[0].sent_at > self._limits.request_timeout_seconds:
            seconds = f"{self._limits.request_timeout_seconds:g} s"
            self._fail(f"no answer for {seconds} (limits.request_timeout_seconds)", "timeout", hints.SLOW)

    async def _receive(self) -> None:
        reason, kind, hint = "receiving ended", "lost", ""
        try:
            while True:
                (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if size >> 16 in _TLS_LENGTHS and self._access.tls() is None:
                    raise UpstreamProtocolError("it speaks TLS; set upstream_tls", hint=hints.TLS)
                if not _LENGTH.size <= size <= self._limits.frame_bytes_max:
                    raise UpstreamProtocolError(f"a response of {size} bytes; limits.frame_bytes_max bounds it")
                self._answer(await self._reader.readexactly(size))
        except asyncio.IncompleteReadError:
            reason = "closed by the broker"
            if self._access.sasl is None and self.api_versions and not self._served:
                reason += " at the first request; does that listener require a login (control_sasl)?"
                hint = hints.LOGIN
            elif self._next_correlation_id and not self._answered:
                reason, hint = self._refused(reason)
        except ssl.SSLError as e:
            # With TLS 1.3 a broker checks the client certificate after the client's handshake is complete.
            why, reason, hint = tls_failures.of_broker(e)
            self._access.on_failure(why)
            kind = "tls"
        except OSError as e:
            reason = f"connection lost: {e.strerror or e}"
            if not self._answered:
                reason, hint = self._refused(reason)
        except UpstreamProtocolError as e:
            reason, kind = f"is not talking Kafka's protocol: {e}", "protocol"
            hint = e.hint or hints.NOT_KAFKA
            _limited_log.error(self.address, "protocol error by the broker", broker=self.address, reason=e)
        finally:
            self._fail(reason, kind, hint)

    def _refused(self, reason: str) -> tuple[str, str]:
        """The broker has closed the connection, and never responded. Returns the reason and a hint."""
        self._access.on_refused(self.address)
        return f"{reason} before its first response", hints.LIMITED

    def _answer(self, frame: bytes) -> None:
        if not self._in_flight:
            raise UpstreamProtocolError("a response without a request")
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
        self._package.release()
        self._answered = True
        self._served = self._served or bool(self.api_versions)
        if not entry.answer.done():
            entry.answer.set_result(message)

    def _fail(self, reason: str, kind: str | None = None, hint: str = "") -> None:
        """`kind`: for metrics; None if the proxy closed the connection, or the failure is already counted."""
        if self._closed_because is not None:
            return
        self._closed_because = Reason(reason, hint)
        # Brokers close idle connections: not a failure.
        if kind is not None and (kind != "lost" or self._in_flight):
            self._access.on_error(kind)
        if self._next_login is not None:
            self._next_login.cancel()
        self._writer.transport.abort()
        lost, self._in_flight = self._in_flight, deque()
        self._release(len(lost))
        for entry in lost:
            if not entry.answer.done():
                name = api_name(entry.call.api_key)
                lost_response = OutcomeUnknown(f"{self.address}: {reason}, no response to {name}", hint=hint)
                entry.answer.set_exception(lost_response)


class PooledConnection:
    """A connection to one address, opened on demand and again after a loss, with increasing pauses."""

    def __init__(
        self,
        address: Address,
        *,
        limits: Limits,
        client_id: str,
        on_opened: Callable[[], None] = lambda: None,
        access: Access = PLAINTEXT,
    ) -> None:
        self.address = address
        self._access = access
        self._limits = limits
        self._client_id = client_id
        self._on_opened = on_opened
        self._connection: BrokerConnection | None = None
        self._opening: asyncio.Task[BrokerConnection] | None = None
        self._pause_seconds = 0.0
        self._accepted = False  # the broker has, in the attempt in progress
        self._closed = False
        #: The caller logs failures to connect.
        self.quiet = False
        #: API key -> (min, max) version, from the last connection; None before the first.
        self.api_versions: Mapping[int, tuple[int, int]] | None = None

    def _on_accepted(self) -> None:
        self._accepted = True

    @property
    def connection(self) -> BrokerConnection | None:
        """The open connection, or None."""
        return None if self._connection is None or self._connection.closed else self._connection

    async def connected(self, deadline: Monotonic) -> BrokerConnection:
        """An open connection. Concurrent callers share one attempt. Raises `UpstreamUnavailable`."""
        if (connection := self.connection) is not None:
            return connection
        if self._closed:
            raise UpstreamUnavailable(f"{self.address}: closed by the proxy")
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open(), name=f"connect {self.address}")
            # Retrieve the exception even if every caller has timed out.
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        # A caller's deadline must not cancel the shared attempt, and `_opening` may be another one after the wait.
        opening = self._opening
        done, _ = await asyncio.wait({opening}, timeout=remaining(deadline))
        if not done:
            hint = hints.SLOW if self._accepted else hints.NO_RESPONSE
            raise UpstreamUnavailable(f"{self.address}: not connected in time", hint=hint)
        if opening.cancelled():
            raise UpstreamUnavailable(f"{self.address}: closed by the proxy")
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
        # Jitter, so that proxies do not reconnect to a restarted broker at the same time.
        await asyncio.sleep(self._pause_seconds * random.uniform(0.5, 1.0))
        self._accepted = False
        try:
            self._connection = await BrokerConnection.open(
                self.address,
                limits=self._limits,
                client_id=self._client_id,
                access=self._access,
                on_accepted=self._on_accepted,
            )
        except UpstreamUnavailable as e:
            doubled = max(self._pause_seconds * 2, BACKOFF_SECONDS)
            self._pause_seconds = min(doubled, self._limits.reconnect_backoff_max_seconds)
            if not self.quiet:
                _limited_log.warning(self.address, "broker unreachable", broker=self.address, reason=e)
            raise
        self._pause_seconds = 0.0
        self.api_versions = self._connection.api_versions
        self._on_opened()
        _log.debug("connected", broker=self.address)
        return self._connection
