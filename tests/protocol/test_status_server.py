"""The status page over a real socket: its contents, and its limits for hostile clients."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fencepost_proxy import logs
from fencepost_proxy.config import ListenTls
from fencepost_proxy.errors import Reason
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability import http
from fencepost_proxy.observability.exposition import SECTIONS, exposition
from fencepost_proxy.observability.status import (
    BrokerStatus,
    CheckedTopicStatus,
    ExpansionStatus,
    Listed,
    PageRequest,
    StatusSnapshot,
)
from fencepost_proxy.observability.status_server import StatusServer
from fencepost_proxy.transport.certificates import Certificates
from fencepost_proxy.types import Address, Monotonic, NodeId
from fencepost_proxy.wire.apis import API_VERSIONS, PRODUCE, UNKNOWN_VERSION
from tests.support.certificates import Authority
from tests.support.status import REQUIRED
from tests.support.status import lists as canned

READY = StatusSnapshot(
    version="1.2.3",
    uptime_seconds=3_700,
    cluster_id="abc",
    bootstrap=Address("127.0.0.1", 19092),
    connections=3,
    refusals={"offset_mismatch": 4},
    brokers=(BrokerStatus(NodeId(1), Address("kafka-1", 9092), Address("127.0.0.1", 19094), 2),),
)
NOT_LOADED = Reason("the state topic is not loaded", "Wait.")
TOPICS = (CheckedTopicStatus("<script>alert(1)</script>", REQUIRED, 6),)


@asynccontextmanager
async def status_server(
    snapshot: Callable[[], StatusSnapshot] = lambda: READY,
    metrics: Metrics | None = None,
    host: str = "127.0.0.1",
    **more: Any,
) -> AsyncIterator[Address]:
    shown = metrics or Metrics()
    given = {"lists": canned({"topics": TOPICS}), "not_ready": lambda: snapshot().not_ready, **more}
    server = StatusServer(snapshot, lambda: shown, **given)
    try:
        yield await server.start(Address(host, 0))
    finally:
        await server.close()


async def send_raw(address: Address, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()


async def send(address: Address, request: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = (await send_raw(address, request)).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split(" ")[1]), headers, body


async def get_json(address: Address, path: str = "/status.json") -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((await get(address, path))[2])
    return answer


async def get(address: Address, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    return await send(address, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


@pytest.mark.parametrize(
    "path", ["/", "/topics", "/partitions?topic=a", "/refusals", "/clients", "/expansions", "/groups"]
)
async def test_every_page_is_static_and_loads_only_own_files(path: str) -> None:
    async with status_server() as address:
        status, headers, body = await get(address, path)
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = dict(each.partition(" ")[::2] for each in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        page = body.decode()
        assert re.findall(r' (?:src|href)="(/page\S*)"', page) == ["/page.css", "/page.js"]
        assert not re.search(r"\sstyle=|<style|<script>|\son\w+=|//", page.replace("<!doctype", "")), (
            "what no policy lets in"
        )
        for name, content_type in (("/page.css", "text/css"), ("/page.js", "text/javascript")):
            status, headers, body = await get(address, name)
            assert (status, headers["content-type"]) == (200, f"{content_type}; charset=utf-8")
            assert body


async def test_the_same_in_json() -> None:
    async with status_server() as address:
        _, headers, body = await get(address, "/status.json?x=1")
        status: dict[str, Any] = json.loads(body)
        assert headers["content-type"] == "application/json"
        assert status["ready"] is True
        assert status["bootstrap"] == "127.0.0.1:19092"
        assert status["brokers"] == [
            {"node_id": 1, "kafka": "kafka-1:9092", "listener": "127.0.0.1:19094", "connections": 2, "problem": None}
        ]
        assert status["state"] == "healthy"
        assert status["totals"]["checked_topics"] == 1
        assert status["checked_topics"][0]["topic"] == "<script>alert(1)</script>"
        assert status["refusals"] == {"offset_mismatch": 4}


async def test_readiness_is_503_with_reasons_and_liveness_200() -> None:
    async with status_server(lambda: replace(READY, not_ready=(NOT_LOADED,))) as address:
        status, _, body = await get(address, "/readyz")
        assert (status, body) == (503, b"not ready\nthe state topic is not loaded\n")
        assert (await get(address, "/livez"))[0] == 200
        problems = (await get_json(address))["problems"]
        assert (problems[0]["what"], problems[0]["do"]) == ("Not ready: the state topic is not loaded", "Wait.")
        assert (await get_json(address))["not_ready"] == ["the state topic is not loaded"]

    async with status_server() as address:
        assert (await get(address, "/readyz"))[::2] == (200, b"ready\n")


async def test_metrics_show_recorded_values() -> None:
    metrics = Metrics(state_fresh_until=lambda: Monotonic(time.monotonic() + 1000))
    metrics.traffic.bytes_to_kafka += 1_000
    metrics.traffic.requests[PRODUCE][9] += 2
    metrics.traffic.requests[API_VERSIONS][UNKNOWN_VERSION] += 1
    metrics.refusals.inc("offset_mismatch")
    metrics.violations.inc()
    metrics.sequencer_wait_seconds.observe(0.003)

    async with status_server(metrics=metrics) as address:
        _, headers, body = await get(address, "/metrics")
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = body.decode().splitlines()
        assert 'fencepost_relayed_bytes_total{direction="to_kafka"} 1000.0' in lines
        assert 'fencepost_requests_total{api="Produce",version="9"} 2.0' in lines
        assert 'fencepost_requests_total{api="ApiVersions",version="unknown"} 1.0' in lines
        assert 'fencepost_refusals_total{reason="offset_mismatch"} 1.0' in lines
        assert "fencepost_offset_violations_total 1.0" in lines
        assert 'fencepost_sequencer_wait_seconds_bucket{le="0.0025"} 0.0' in lines
        assert 'fencepost_sequencer_wait_seconds_bucket{le="0.005"} 1.0' in lines
        lease = next(line for line in lines if line.startswith("fencepost_state_lease_seconds "))
        assert 900 < float(lease.split()[1]) <= 1000


def test_prometheus_reads_every_metric_and_label() -> None:
    metrics = Metrics()
    metrics.refusals.inc('a "quoted" \\ reason\nof two lines', 3)
    metrics.sequencer_wait_seconds.observe(0.003, times=2)
    metrics.traffic.bytes_to_kafka = 10**12

    families = {each.name: each for each in text_string_to_metric_families(exposition(metrics).decode())}

    values = {(each.name, *each.labels.values()): each.value for of in families.values() for each in of.samples}
    assert values["fencepost_refusals_total", 'a "quoted" \\ reason\nof two lines'] == 3
    assert values["fencepost_relayed_bytes_total", "to_kafka"] == 1e12
    assert values["fencepost_sequencer_wait_seconds_bucket", "+Inf"] == 2
    assert values["fencepost_sequencer_wait_seconds_count",] == 2
    assert values["fencepost_sequencer_wait_seconds_sum",] == 0.006
    assert values["process_resident_memory_bytes",] > 1_000_000
    assert 0 < time.time() - values["process_start_time_seconds",] < 86_400
    assert families["fencepost_sequencer_wait_seconds"].type == "histogram"
    shown = {each.name.removesuffix("_total"): each for section in SECTIONS for each in section.shown}
    assert all(each.documentation == shown[name].help for name, each in families.items())


def test_number_of_reasons_is_bounded() -> None:
    metrics = Metrics()

    for number in range(1_000):
        metrics.refusals.inc(f"from a peer {number}")
        metrics.connections_closed.inc(f"from a peer {number}")

    assert len(metrics.refusals) == 65
    assert metrics.refusals["other"] == 936
    # And those that are shown from the start.
    shown = exposition(metrics)
    for reason in (b"connections_max", b"address_connections_max"):
        assert b'fencepost_client_connections_dropped_total{reason="%s"} 0' % reason in shown
    assert shown.count(b"fencepost_client_connections_dropped_total{") == 67


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 405),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"\x00\x00\x00\x10garbage\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", 431),
    ],
)
async def test_invalid_http_request_is_refused(request_bytes: bytes, expected: int) -> None:
    async with status_server() as address:
        assert (await send(address, request_bytes))[0] == expected


async def test_head_has_the_length_but_no_body() -> None:
    async with status_server() as address:
        status, headers, body = await get(address, "/livez", "HEAD")
        assert (status, headers["content-length"], body) == (200, "3", b"")


async def test_unfinished_request_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_REQUEST_SECONDS", 0.1)

    async with status_server() as address, asyncio.timeout(60):
        with suppress(ConnectionResetError):
            assert await send_raw(address, b"GET / HT") == b""


async def test_page_slower_than_the_request_limit_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_REQUEST_SECONDS", 2.0)

    async def lists(requested: Sequence[PageRequest]) -> Sequence[Listed]:
        await asyncio.sleep(2.2)
        return [Listed(0, ())]

    async with status_server(lists=lists) as address:
        assert (await get(address, "/topics.json"))[0] == 200


async def test_page_slower_than_its_own_limit_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ANSWER_SECONDS", 0.1)

    async def lists(requested: Sequence[PageRequest]) -> Sequence[Listed]:
        await asyncio.Event().wait()
        raise AssertionError

    async with status_server(lists=lists) as address, asyncio.timeout(60):
        with suppress(ConnectionResetError):
            assert await send_raw(address, b"GET /topics.json HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""


async def test_query_has_at_most_16_fields() -> None:
    def target(count: int) -> str:
        return "/topics.json?" + "&".join(f"field{number}=1" for number in range(count))

    async with status_server() as address:
        assert [(await get(address, target(count)))[0] for count in (16, 17)] == [200, 400]


async def test_json_texts_are_clipped_at_400_characters() -> None:
    names = ("a" * 400, "b" * 401)
    rows = tuple(CheckedTopicStatus(name, REQUIRED, 6) for name in names)

    async with status_server(lists=canned({"topics": rows})) as address:
        shown = (await get_json(address, "/topics.json"))["rows"]
        assert [row["topic"] for row in shown] == ["a" * 400, "b" * 400 + "…"]


async def test_silent_connections_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_REQUEST_SECONDS", 600.0)

    async with status_server() as address:
        silent = [await asyncio.open_connection(*address) for _ in range(64)]
        for _ in range(42):
            assert (await get(address, "/livez"))[0] == 200
        assert (await get(address, "/status.json"))[0] == 200
        # Each was let in in the place of the one that had been silent for longest.
        ended = [reader.at_eof() or reader.exception() is not None for reader, _ in silent]
        assert ended == sorted(ended, reverse=True)
        assert 0 < ended.count(True) <= 43
        for _, each in silent:
            each.close()


async def test_health_is_answered_while_all_else_is_busy() -> None:
    continue_appending = asyncio.Event()
    busy = asyncio.Semaphore(0)

    async def lists(requested: Sequence[PageRequest]) -> Sequence[Listed]:
        busy.release()
        await continue_appending.wait()
        return [Listed() for _ in requested]

    async with status_server(lists=lists) as address:
        pages = [asyncio.create_task(get(address, f"/topics.json?limit={1 + n}")) for n in range(32)]
        for _ in pages:
            await busy.acquire()

        assert (await get(address, "/topics.json"))[0] == 503
        assert [(await get(address, path))[0] for path in ("/livez", "/readyz")] == [200, 200]

        continue_appending.set()
        assert {status for status, _, _ in await asyncio.gather(*pages)} == {200}


async def test_waiting_requests_share_one_snapshot() -> None:
    taken = 0

    def slow() -> StatusSnapshot:
        nonlocal taken
        taken += 1
        time.sleep(0.05)
        return READY

    async with status_server(slow) as address:
        began = time.monotonic()
        for _ in range(4):
            pages = await asyncio.gather(*(get(address, "/status.json") for _ in range(8)))
            assert {status for status, _, _ in pages} == {200}
        # A tenth of the time: after a burst, eight clients that query without a pause wait for half a second.
        assert time.monotonic() - began >= 0.05 * taken * 10 - 2
    assert taken < 16


async def test_connections_to_the_status_page_get_their_share_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "_CONNECTION_SECONDS", 0.05)  # as if each took that long
    async with status_server() as address:
        began = time.monotonic()
        for _ in range(4):
            assert (await get(address, "/livez"))[0] == 200
        assert time.monotonic() - began > 0.9, "the fourth waits until three are a twentieth of the time"


async def test_snapshot_is_newer_than_its_request() -> None:
    started = 0

    def counted() -> StatusSnapshot:
        return replace(READY, connections=started)

    async with status_server(counted) as address:
        for started in range(50):
            assert (await get_json(address))["connections"] == started


async def test_snapshot_crash_is_500_and_server_continues() -> None:
    def crash() -> StatusSnapshot:
        raise RuntimeError("boom")

    async with status_server(crash) as address:
        status, _, body = await get(address, "/status.json")
        assert status == 500
        assert b"boom" not in body
        assert (await get(address, "/livez"))[0] == 200


# ---- lists, a page at a time


async def test_list_comes_in_linked_parts() -> None:
    rows = [CheckedTopicStatus(f"orders-{number:05}", REQUIRED, 1) for number in range(1_234)]

    async with status_server(lists=canned({"topics": rows})) as address:
        found: list[str] = []
        target: str | None = "/topics.json?limit=500"
        while target is not None:
            answer = await get_json(address, target)
            assert (answer["matching"], answer["offset"]) == (1_234, len(found))
            found += [each["topic"] for each in answer["rows"]]
            target = answer["next"]
        assert found == [each.topic for each in rows]
        one = await get_json(address, "/topics.json?search=-00007")
        assert [each["topic"] for each in one["rows"]] == ["orders-00007"]


@pytest.mark.parametrize("target", ["/status.json", "/topics.json?limit=500"])
async def test_page_size_is_bounded_for_any_rows(target: str) -> None:
    rows = [CheckedTopicStatus("\N{SNOWMAN}" * 5_000 + str(number), REQUIRED, 1) for number in range(600)]

    async with status_server(lists=canned({"topics": rows})) as address:
        status, _, body = await get(address, target)
        assert status == 200
        assert len(body) < 2_000_000


async def test_many_thresholds_are_served_whole_in_small_parts() -> None:
    rows = [
        ExpansionStatus(f"t{number}", 15_000, 30_000, "done", 0, thresholds=tuple(range(15_000))) for number in range(4)
    ]

    async with status_server(lists=canned({"expansions": rows})) as address:
        found: list[Any] = []
        target: str | None = "/expansions.json"
        while target is not None:
            answer = await get_json(address, target)
            assert len(answer["rows"]) == 1
            found += answer["rows"]
            target = answer["next"]
        assert [(each["topic"], len(each["thresholds"])) for each in found] == [(f"t{n}", 15_000) for n in range(4)]
        assert len((await get_json(address))["expansions"]) == 1


async def test_overview_has_the_first_rows_of_each_list() -> None:
    rows = [CheckedTopicStatus(f"t{number}", REQUIRED, 1) for number in range(300)]
    async with status_server(lists=canned({"topics": rows})) as address:
        for query, expected in (("", 100), ("?limit=20", 20)):
            status = await get_json(address, f"/status.json{query}")
            assert (len(status["checked_topics"]), status["totals"]["checked_topics"]) == (expected, 300)
        assert (await get(address, "/status.json?limit=101"))[0] == 400


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=501", "offset=-1", "offset=100001", "limit=1e3", "limit=\u0663", "&".join(["a=1"] * 17)],
)
async def test_numbers_are_numbers_within_their_bounds(query: str) -> None:
    async with status_server(lists=canned({"topics": []})) as address:
        request = f"GET /topics.json?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        assert (await send(address, request))[0] == 400


async def test_unknown_numbers_are_null_in_json() -> None:
    unknown = replace(READY, state_lease_seconds=float("-inf"), added_seconds=(0.001, float("inf")))
    async with status_server(lambda: unknown) as address:
        status = await get_json(address)
        assert (status["state_lease_seconds"], status["added_seconds"]) == (None, [0.001, None])


async def test_response_has_the_proxys_time() -> None:
    async with status_server() as address:
        date = parsedate_to_datetime((await get(address, "/status.json"))[1]["date"])
        assert abs(date.timestamp() - time.time()) < 60


# ---- whom it answers


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("Host: 127.0.0.1:8080\r\n", 200),
        ("Host: localhost:8080\r\n", 200),
        ("host:LOCALHOST\r\n", 200),
        ("Host: [::1]:8080\r\n", 200),
        ("Host: 192.168.0.7\r\n", 200),
        ("", 200),
        ("Host: rebound.example.org\r\n", 421),
        ("Host: localhost.example.org:8080\r\n", 421),
        ("Host: 127.0.0.1.example.org\r\n", 421),
    ],
)
async def test_dns_rebinding_site_cannot_read_the_page(host: str, expected: int) -> None:
    async with status_server() as address:
        for target in ("/", "/status.json", "/topics.json", "/metrics", "/readyz"):
            status, _, body = await send(address, f"GET {target} HTTP/1.1\r\n{host}\r\n".encode())
            assert status == expected, target
            assert (b"kafka-1" in body) <= (expected == 200)


async def test_status_page_reachable_from_elsewhere_is_warned_once(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info", "console")
    async with status_server(host="0.0.0.0") as address:
        request = b"GET /status.json HTTP/1.1\r\nHost: fencepost.monitoring:8080\r\n\r\n"
        assert (await send(Address("127.0.0.1", address.port), request))[0] == 200
    assert capsys.readouterr().err.count("status page is reachable from other machines") == 1


# ---- the one thing that an operator can do here


async def _post(
    target: str, *, method: str = "POST", head: str = "", token_file: Path | None = None
) -> tuple[int, list[tuple[str, str]]]:
    """The status of the response, and the partitions that the server released."""
    released: list[tuple[str, str]] = []

    async def release(group: str, topic: str) -> str:
        released.append((group, topic))
        return "done"

    async with status_server(release=release, token_file=token_file) as address:
        request = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n"
        return (await send(address, request.encode()))[0], released


TOKEN = "Authorization: Bearer s3cret\r\n"
BASIC = f"Authorization: Basic {b64encode(b'x:s3cret').decode()}\r\n"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    (file := tmp_path / "token").write_text("s3cret\nanother line\n")
    return file


@pytest.mark.parametrize(
    ("target", "released"),
    [
        ("/groups/g/release?topic=orders", ("g", "orders")),
        ("/groups/a%2Fb%20c/release?topic=or%2Fders", ("a/b c", "or/ders")),
        ("/groups/a/release/release?topic=t", ("a/release", "t")),
    ],
)
async def test_an_operator_lets_a_group_have_new_partitions(
    target: str, released: tuple[str, str], token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fencepost"):
        assert await _post(target, head=TOKEN, token_file=token_file) == (200, [released])
    (line,) = [each for each in caplog.records if each.name == "fencepost.audit"]
    fields = line.__dict__["fencepost_fields"]
    assert line.getMessage() == "an operator released a group"
    assert (fields["group"], fields["topic"]) == released
    assert fields["peer"].startswith("127.0.0.1:")


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
async def test_nothing_else_does_anything(target: str, method: str, head: str, status: int, token_file: Path) -> None:
    assert await _post(target, method=method, head=TOKEN + head, token_file=token_file) == (status, [])


@pytest.mark.parametrize(
    ("head", "configured", "status"),
    [
        (TOKEN, "", 403),
        (TOKEN, "absent", 403),
        ("", "token", 401),
        ("Authorization: Bearer s3cre\r\n", "token", 401),
        ("Authorization: Basic s3cret\r\n", "token", 401),
        (BASIC, "token", 401),
        ("Authorization: Bearer \xff\r\n", "token", 401),
        ("authorization:bearer  s3cret\r\n", "token", 200),
    ],
)
async def test_action_needs_the_configured_token(
    head: str, configured: str, status: int, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = token_file.parent / configured if configured else None

    answered, released = await _post("/groups/g/release?topic=a", head=head, token_file=file)

    assert answered == status
    assert bool(released) is (status == 200)
    refused = [each for each in caplog.records if each.getMessage() == "action refused"]
    assert {each.name for each in refused} == ({"fencepost.audit"} if status != 200 else set())


# --- a login for readers, and TLS -------------------------------------------------------------------------------------

EVERYTHING = ("/", "/page.js", "/topics", "/status.json", "/topics.json", "/metrics", "/nowhere")


@pytest.mark.parametrize(
    ("authorization", "allowed"),
    [
        (None, False),
        ("Bearer r3ad", True),
        ("bearer  r3ad", True),
        ("Bearer r3a", False),
        ("Basic " + b64encode(b"prometheus:r3ad").decode(), True),
        ("Basic " + b64encode(b":r3ad").decode(), True),
        ("Basic " + b64encode(b"r3ad:").decode(), False),
        ("Basic r3ad!", False),
        ("Digest r3ad", False),
        ("Bearer s3cret", True),  # an operator may read too
        ("Basic " + b64encode(b"x:s3cret").decode(), True),
    ],
)
async def test_reading_needs_the_configured_token(authorization: str | None, allowed: bool, token_file: Path) -> None:
    (reads := token_file.parent / "reads").write_text("r3ad\n")
    head = "" if authorization is None else f"Authorization: {authorization}\r\n"
    async with status_server(read_token_file=reads, token_file=token_file) as address:
        for path in EVERYTHING:
            status, headers, _ = await send(address, f"GET {path} HTTP/1.1\r\n{head}\r\n".encode())
            assert status == ((404 if path == "/nowhere" else 200) if allowed else 401), path
            if not allowed:
                assert headers["www-authenticate"] == 'basic realm="fencepost"', "a browser prompts for it"
        for path in ("/livez", "/readyz"):
            assert (await send(address, f"GET {path} HTTP/1.1\r\n{head}\r\n".encode()))[0] == 200, path


async def test_token_for_reading_allows_no_action(token_file: Path) -> None:
    (reads := token_file.parent / "reads").write_text("r3ad\n")
    async with status_server(read_token_file=reads, token_file=token_file) as address:
        post = b"POST /groups/g/release?topic=t HTTP/1.1\r\nAuthorization: Bearer %s\r\n\r\n"
        assert (await send(address, post % b"r3ad"))[0] in (401, 404)


async def test_unusable_token_file_shows_nothing(tmp_path: Path) -> None:
    async with status_server(read_token_file=tmp_path / "absent") as address:
        status, _, body = await send(address, b"GET /status.json HTTP/1.1\r\nAuthorization: Bearer \r\n\r\n")
        assert (status, b"status_read_token_file is not usable" in body) == (403, True)
        assert (await get(address, "/livez"))[0] == 200


async def test_page_uses_tls_with_the_present_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    first, second = authority.sign("first"), authority.sign("second")
    listen = ListenTls(first.certificate, first.key, client_certificates="required", client_ca_file=authority.file)
    certificates = Certificates(listen, None)
    client = ssl.create_default_context(cafile=str(authority.file))

    async def served() -> tuple[bytes, bytes | None]:
        reader, writer = await asyncio.open_connection(*address, ssl=client)
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.write(b"GET /livez HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer.rpartition(b"\r\n")[2], certificate

    async with status_server(tls=certificates.status_context) as address:
        answer, before = await served()
        assert answer == b"ok\n"
        certificates.change(replace(listen, certificate_file=second.certificate, key_file=second.key), None)
        answer, after = await served()
        assert answer == b"ok\n"
        assert before != after
        with suppress(ConnectionError):
            assert not (await send_raw(address, b"GET /livez HTTP/1.1\r\n\r\n")).startswith(b"HTTP"), "not in plaintext"
