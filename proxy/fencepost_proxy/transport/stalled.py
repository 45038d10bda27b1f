"""Closes connections that do not go on: silent clients, frames that never end, peers that do not read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from fencepost_proxy import logs
from fencepost_proxy.config import Limits
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.session.dispatcher import Dispatcher
from fencepost_proxy.transport.proxied_connection import ProxiedConnection

_limited_log = logs.RateLimitedLog(logs.get("transport.stalled"))

_WITHIN_HEADER: Final = "the client stopped within a frame's header for {:g} s (limits.header_seconds)"


class StalledConnections:
    def __init__(self, limits: Callable[[], Limits], dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._limits = limits
        self._dispatcher = dispatcher
        self._metrics = metrics

    def close(self, proxied_connections: Iterable[ProxiedConnection], now: float) -> None:
        """Call it about every second."""
        past_barriers = self._dispatcher.past_barriers.find(now)
        for proxied in proxied_connections:
            self._abort_unread(proxied, now)
            proxied.update_received_at()
            proxied.client.take_trickle(now)
            if proxied.upstream is not None:
                proxied.upstream.take_trickle(now)
            reason = self._stalled(proxied, now) or (
                self._streams_past_a_barrier(proxied, now) if past_barriers else None
            )
            if reason is not None:
                _limited_log.info(reason, "connection closed", peer=proxied.peer, reason=reason)
                self._metrics.connections_closed.inc("stalled")
                proxied.client.close(now)

    def _abort_unread(self, proxied: ProxiedConnection, now: float) -> None:
        """Closes connections whose peer stopped reading, which would stay half-closed indefinitely.

        The peer is a client that does not read its responses, or the broker of a disconnected client: it blocks on a
        response that is no longer read, and so reads nothing either.
        """
        for sock in (proxied.client, proxied.upstream):
            since = None if sock is None else sock.closing_since
            if sock is not None and since is not None and now - since > self._limits().drain_seconds:
                sock.abort()

    def _stalled(self, proxied: ProxiedConnection, now: float) -> str | None:
        if proxied.client.closing_since is not None:
            return None
        limits = self._limits()
        session = self._dispatcher.sessions.get(proxied.connection)
        silent = now - max(proxied.client.received_at, proxied.opened_at)
        if session is None:
            if not proxied.awaits_request:
                return None  # its handshake, or its upstream connection, has a separate limit
            if silent > limits.header_seconds and proxied.client.unread_bytes():
                return _WITHIN_HEADER.format(limits.header_seconds)
            if silent > limits.handshake_seconds:
                return f"the client sent nothing for {limits.handshake_seconds:g} s (limits.handshake_seconds)"
            return None
        if session.state.mid_header and not proxied.client.paused and silent > limits.header_seconds:
            return _WITHIN_HEADER.format(limits.header_seconds)
        since = session.fast_path.collecting_since
        if since is not None and not proxied.client.paused:
            # The frame occupies shared memory: it must not stop, nor trickle.
            if silent > limits.header_seconds:
                return f"the client stopped within a frame for {limits.header_seconds:g} s (limits.header_seconds)"
            if now - since > limits.request_timeout_seconds:
                allowed = f"{limits.request_timeout_seconds:g} s (limits.request_timeout_seconds)"
                return f"a frame was not complete within {allowed}"
        last_observed = 0.0 if proxied.upstream is None else proxied.upstream.received_at
        if min(silent, now - last_observed) > limits.client_idle_seconds:
            # The client is silent, or does not read its responses.
            return f"no data in either direction for {limits.client_idle_seconds:g} s (limits.client_idle_seconds)"
        return None

    def _streams_past_a_barrier(self, proxied: ProxiedConnection, now: float) -> str | None:
        """Relayed frames have no time limit, except those that an expansion waits for."""
        session, seconds = self._dispatcher.sessions.get(proxied.connection), self._limits().request_timeout_seconds
        topic = None if session is None else self._dispatcher.past_barriers.streamed_by(session, now - seconds)
        if topic is None or proxied.client.closing_since is not None:
            return None
        return (
            f"a frame was not complete within {seconds:g} s (limits.request_timeout_seconds) "
            f"after partition-count checks of {topic} were enabled"
        )
