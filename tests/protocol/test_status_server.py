"""The status page over a real socket: what it shows, and what it does with a client that means no good."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from fencepost_proxy.net import http
from fencepost_proxy.net.http import BrokerStatus, GuardedTopicStatus, StatusServer, StatusSnapshot
from fencepost_proxy.net.metrics import Metrics
from fencepost_proxy.types import Address, Monotonic, NodeId

READY = StatusSnapshot(
    version="1.2.3",
    uptime_seconds=3_700,
    cluster_id="abc",
    bootstrap=Address("127.0.0.1", 19092),
    connections=3,
    refusals={"offset_mismatch": 4},
    brokers=(BrokerStatus(NodeId(1), Address("kafka-1", 9092), Address("127.0.0.1", 19094), 2),),
    guarded_topics=(GuardedTopicStatus("<script>alert(1)</script>", "required", 6),),
)


def with_server(
    story: Callable[[Address], Awaitable[None]], snapshot: StatusSnapshot = READY, metrics: Metrics | None = None
) -> None:
    async def run() -> None:
        server = StatusServer(lambda: snapshot, metrics or Metrics())
        address = await server.start(Address("127.0.0.1", 0))
        try:
            await story(address)
        finally:
            await server.close()

    asyncio.run(run())


async def send(address: Address, request: bytes) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split(" ")[1]), headers, body


async def get(address: Address, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    return await send(address, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


def test_the_page_shows_the_state_and_escapes_names() -> None:
    async def story(address: Address) -> None:
        status, headers, body = await get(address, "/")
        page = body.decode()
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in headers["content-security-policy"]
        for text in ("ready", "127.0.0.1:19092", "kafka-1:9092", "127.0.0.1:19094", "required", "1 h 1 min", "1.2.3"):
            assert text in page
        assert "<script" not in page
        assert "&lt;script&gt;" in page
        assert "not ready" not in page

    with_server(story)


def test_the_same_in_json() -> None:
    async def story(address: Address) -> None:
        _, headers, body = await get(address, "/status.json?x=1")
        status: dict[str, Any] = json.loads(body)
        assert headers["content-type"] == "application/json"
        assert status["ready"] is True
        assert status["bootstrap"] == "127.0.0.1:19092"
        assert status["brokers"] == [
            {"node_id": 1, "kafka": "kafka-1:9092", "listener": "127.0.0.1:19094", "connections": 2}
        ]
        assert status["refusals"] == {"offset_mismatch": 4}

    with_server(story)


def test_readiness_is_503_with_the_reasons_while_liveness_is_not() -> None:
    async def story(address: Address) -> None:
        status, _, body = await get(address, "/readyz")
        assert (status, body) == (503, b"not ready\nthe state topic is not loaded\n")
        assert (await get(address, "/livez"))[0] == 200
        assert "the state topic is not loaded" in (await get(address, "/"))[2].decode()

    with_server(story, replace(READY, not_ready=("the state topic is not loaded",)))

    async def ready(address: Address) -> None:
        assert (await get(address, "/readyz"))[::2] == (200, b"ready\n")

    with_server(ready)


def test_metrics_are_what_was_counted() -> None:
    metrics = Metrics(state_fresh_until=lambda: Monotonic(time.monotonic() + 2.5))
    metrics.traffic.bytes_to_kafka += 1_000
    metrics.traffic.requests[0] += 2
    metrics.traffic.requests[metrics.traffic.UNKNOWN_API] += 1
    metrics.refused("offset_mismatch")
    metrics.violations.inc()
    metrics.gate_wait_seconds.observe(0.003)

    async def story(address: Address) -> None:
        _, headers, body = await get(address, "/metrics")
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = body.decode().splitlines()
        assert 'fencepost_relayed_bytes_total{direction="to_kafka"} 1000.0' in lines
        assert 'fencepost_requests_total{api="Produce"} 2.0' in lines
        assert 'fencepost_requests_total{api="unknown"} 1.0' in lines
        assert 'fencepost_refusals_total{reason="offset_mismatch"} 1.0' in lines
        assert "fencepost_offset_violations_total 1.0" in lines
        assert 'fencepost_gate_wait_seconds_bucket{le="0.0025"} 0.0' in lines
        assert 'fencepost_gate_wait_seconds_bucket{le="0.005"} 1.0' in lines
        lease = next(line for line in lines if line.startswith("fencepost_state_lease_seconds "))
        assert 1.5 < float(lease.split()[1]) <= 2.5

    with_server(story, metrics=metrics)


def test_reasons_cannot_grow_without_bound() -> None:
    metrics = Metrics()

    for number in range(1_000):
        metrics.refused(f"from a peer {number}")
        metrics.closed(f"from a peer {number}")

    assert len(metrics.refusals) == 65
    assert metrics.refusals["other"] == 936
    assert metrics.exposition().count(b"fencepost_client_connections_closed_by_us_total{") == 65


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 405),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"\x00\x00\x00\x10garbage\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", 431),
    ],
)
def test_what_is_no_plain_get_is_refused(request_bytes: bytes, expected: int) -> None:
    async def story(address: Address) -> None:
        assert (await send(address, request_bytes))[0] == expected

    with_server(story)


def test_head_has_the_length_but_no_body() -> None:
    async def story(address: Address) -> None:
        status, headers, body = await get(address, "/livez", "HEAD")
        assert (status, headers["content-length"], body) == (200, "3", b"")

    with_server(story)


def test_a_client_that_does_not_finish_its_request_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_REQUEST_SECONDS", 0.1)

    async def story(address: Address) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HT")
        async with asyncio.timeout(30):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()

    with_server(story)


def test_no_more_than_a_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_CONNECTIONS_MAX", 2)

    async def story(address: Address) -> None:
        held = [await asyncio.open_connection(*address) for _ in range(2)]
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection(*address)
        async with asyncio.timeout(30):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
        for _, each in held:
            each.close()

    with_server(story)


def test_a_crash_of_the_snapshot_is_a_500_and_not_the_end() -> None:
    async def run() -> None:
        def crash() -> StatusSnapshot:
            raise RuntimeError("boom")

        server = StatusServer(crash, Metrics())
        address = await server.start(Address("127.0.0.1", 0))
        status, _, body = await get(address, "/")
        assert status == 500
        assert b"boom" not in body
        assert (await get(address, "/livez"))[0] == 200
        await server.close()

    asyncio.run(run())


# ---- the one thing that an operator can do here


class _Operator:
    """A server that opens gates, and what it was asked to open."""

    def __init__(self) -> None:
        self.released: list[tuple[str, str]] = []

    async def release(self, group: str, topic: str) -> str:
        self.released.append((group, topic))
        return "done"


def _post(target: str, *, method: str = "POST", head: str = "") -> tuple[int, list[tuple[str, str]]]:
    operator = _Operator()

    async def ask() -> int:
        snapshot = StatusSnapshot("0", 1.0, None, None)
        server = StatusServer(lambda: snapshot, Metrics(), release=operator.release)
        address = await server.start(Address("127.0.0.1", 0))
        try:
            request = f"{method} {target} HTTP/1.1\r\nHost: x\r\n{head}\r\n"
            return (await send(address, request.encode()))[0]
        finally:
            await server.close()

    return asyncio.run(ask()), operator.released


@pytest.mark.parametrize(
    ("target", "released"),
    [
        ("/groups/g/release?topic=orders", ("g", "orders")),
        ("/groups/a%2Fb%20c/release?topic=or%2Fders", ("a/b c", "or/ders")),
        ("/groups/a/release/release?topic=t", ("a/release", "t")),
    ],
)
def test_an_operator_lets_a_group_have_new_partitions(target: str, released: tuple[str, str]) -> None:
    assert _post(target) == (200, [released])


@pytest.mark.parametrize(
    ("target", "method", "head", "status"),
    [
        ("/groups/g/release", "POST", "", 404),
        ("/groups/g/release?topic=a&topic=b", "POST", "", 404),
        ("/groups//release?topic=a", "POST", "", 404),
        ("/groups/g/forget?topic=a", "POST", "", 404),
        ("/status.json", "POST", "", 405),
        ("/groups/g/release?topic=a", "PUT", "", 405),
        ("/groups/g/release?topic=a", "GET", "", 404),
        # A page of another site, which a browser lets post here.
        ("/groups/g/release?topic=a", "POST", "Origin: http://example.org\r\n", 403),
        ("/groups/g/release?topic=a", "POST", "origin: null\r\n", 403),
    ],
)
def test_nothing_else_does_anything(target: str, method: str, head: str, status: int) -> None:
    assert _post(target, method=method, head=head) == (status, [])
