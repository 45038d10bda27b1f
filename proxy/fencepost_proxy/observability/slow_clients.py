"""Clients that Kafka does not serve: over a quota, or without an answer to an append while others get theirs."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from fencepost_proxy import logs
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability.audit import Identity
from fencepost_proxy.observability.lists import clipped
from fencepost_proxy.observability.status import Problem
from fencepost_proxy.transport.proxied_connection import ProxiedConnection
from fencepost_proxy.types import TopicPartition

_limited_log = logs.RateLimitedLog(logs.get("observability.slow_clients"))
_CLIENTS_MAX: Final = 1_000
#: Problems shown; a client is shown for so long after the last time.
_SHOWN_MAX: Final = 5
_SHOWN_SECONDS: Final = 60.0
#: Shorter throttle times are how a quota works; a client notices more.
_THROTTLED_SECONDS_MIN: Final = 1.0


@dataclass(slots=True)
class _Client:
    """`throttled_seconds`: of `responses`, since `since`. `late_at`: of its last append without answer."""

    since: float
    last: float
    responses: int = 0
    throttled_seconds: float = 0.0
    late_at: TopicPartition | None = None


class SlowClients:
    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._clients: OrderedDict[tuple[str, str], _Client] = OrderedDict()  # by client id and address

    def throttled(self, proxied: ProxiedConnection | None, throttle_ms: int) -> None:
        """A response to the client has this throttle time."""
        identity = Identity.of(proxied)
        client = self._client(identity)
        client.responses += 1
        client.throttled_seconds += throttle_ms / 1000
        self._metrics.throttled_responses.inc()
        self._metrics.throttled_seconds += throttle_ms / 1000
        _limited_log.info(
            ("throttled", _name(identity)),
            "client is over its Kafka quota: Kafka and the proxy read nothing more from it for that time",
            **identity._asdict(),
            throttle_ms=throttle_ms,
        )

    def late(self, proxied: ProxiedConnection | None, partition: TopicPartition, seconds: float) -> None:
        """Kafka did not answer its append, which others wait for."""
        identity = Identity.of(proxied)
        self._client(identity).late_at = partition
        self._metrics.appends_without_answer.inc()
        _limited_log.warning(
            ("late", _name(identity)),
            "Kafka does not answer a client's append: it is resolved from the log, since other clients wait for it",
            **identity._asdict(),
            partition=partition,
            seconds=round(seconds, 1),
        )

    def _client(self, identity: Identity) -> _Client:
        now, name = self._clock(), _name(identity)
        client = self._clients.pop(name, None)
        if client is None or now - client.last > _SHOWN_SECONDS:
            client = _Client(now, now)
        client.last = now
        self._clients[name] = client
        if len(self._clients) > _CLIENTS_MAX:
            self._clients.popitem(last=False)
        return client

    def problems(self) -> Iterator[Problem]:
        """Of the clients of the last minute, the last ones first."""
        now, shown = self._clock(), 0
        for (client_id, host), client in reversed(self._clients.items()):
            if now - client.last > _SHOWN_SECONDS or shown >= _SHOWN_MAX:
                return
            name, page = f"Client {client_id} ({host})", f"/clients?search={quote(host)}"
            if client.throttled_seconds >= _THROTTLED_SECONDS_MIN:
                shown += 1
                yield Problem(
                    False,
                    f"{name} is over its Kafka quota: {client.responses:,} responses in {now - client.since:.0f} s had "
                    f"throttle times, {client.throttled_seconds:.1f} s in total",
                    "Only this client waits. Let it send less, or raise its producer_byte_rate, consumer_byte_rate or "
                    "request_percentage: kafka-configs.sh --describe --entity-type clients (or users) shows them.",
                    page,
                )
            if client.late_at is not None:
                shown += 1
                yield Problem(
                    False,
                    f"Kafka did not answer an append of {name[0].lower()}{name[1:]} to {client.late_at} in time",
                    "The proxy resolved it from the log, and other clients went on. Is the client over a quota that "
                    "its responses do not show, or is a broker slow?",
                    page,
                )


def _name(identity: Identity) -> tuple[str, str]:
    return clipped(identity.client_id) or "without a client id", "" if identity.peer is None else identity.peer.host
