"""Clients that violate the protocol or overload the proxy: it logs a reason, bounds memory and serves other clients.

The proxy has small limits, so that the tests reach them.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.types import Address
from fencepost_proxy.wire.apis import APIS, Handling
from tests.kit.threads import Worker
from tests.kit.waiting import until
from tests.support.batches import batch
from tests.support.fixtures import proxy_fixture
from tests.support.messages import Closed, Fields, RawConnection, definitions, encode_request
from tests.support.proxy import ProxyProcess, blocked_by
from tests.support.walk import BODIES, ProxiedSocket

pytestmark = pytest.mark.kafka

PRODUCE, FETCH, LIST_OFFSETS, METADATA, API_VERSIONS, CREATE_TOPICS, DESCRIBE_CONFIGS = 0, 1, 2, 3, 18, 19, 32
FRAME_BYTES_MAX = 2_000_000
CONNECTIONS_MAX = 40
PER_ADDRESS_MAX = 36
IN_FLIGHT_MAX = 5
UNPACKED_BYTES_MAX = 1_000_000
#: Limit for a buffered frame and for the proxy's own requests. A busy machine must not reach it.
FRAME_SECONDS = 8
#: Limits before a client's first byte and without any data. Well-behaved clients must not reach them.
HANDSHAKE_SECONDS, IDLE_SECONDS = 10, 16
#: A fully loaded Kafka also delays its responses to the proxy. These tests do not measure that.
CONFIG = f"""
config_lease_seconds = 30.0
[limits]
frame_bytes_max = {FRAME_BYTES_MAX}
connections_max = {CONNECTIONS_MAX}
address_connections_max = {PER_ADDRESS_MAX}
in_flight_requests_max = {IN_FLIGHT_MAX}
buffered_bytes_max = {2 * FRAME_BYTES_MAX}
decompressed_bytes_max = {UNPACKED_BYTES_MAX}
handshake_seconds = {HANDSHAKE_SECONDS}
header_seconds = 1.0
client_idle_seconds = {IDLE_SECONDS}
drain_seconds = 2.0
request_timeout_seconds = {FRAME_SECONDS}
[topics."checked-*"]
"fencepost.check.expected.offsets" = "true"
[log]
level = "debug"
"""
#: Buffers of the kernel and of the allocator. A leak must exceed this.
NOISE_BYTES = 25 * 1024 * 1024
NEVER_READING = 8
#: The proxy opens and closes its own connections to Kafka.
OWN_SOCKETS = 3
PATIENCE_SECONDS = 60.0
SEED = 20_260


proxy = proxy_fixture(config=CONFIG, unexpected=("crashed", "Traceback"))


@pytest.fixture(scope="module")
def listener(proxy: ProxyProcess) -> Address:
    """The listener of the only broker, since appends go to a leader."""
    (broker,) = query_once_accepted(Address.parse(proxy.bootstrap), METADATA, 9, {"Topics": []})["Brokers"]
    return Address(broker["Host"], broker["Port"])


@pytest.fixture(scope="module")
def make_topic(kafka: KafkaCluster) -> Callable[[str], str]:
    """Create a one-partition topic directly in Kafka and wait until it accepts appends."""

    def make(name: str) -> str:
        with RawConnection(kafka.address(1)) as connection:
            requested = {"Name": name, "NumPartitions": 1, "ReplicationFactor": 1}
            assert connection.query(CREATE_TOPICS, 7, {"Topics": [requested]})["Topics"][0]["ErrorCode"] == 0
            until(lambda: _log_end(connection, name), "the leader", accept=lambda end: end is not None)
        return name

    return make


def _log_end(connection: RawConnection, topic: str) -> int | None:
    queried = {"Name": topic, "Partitions": [{"PartitionIndex": 0, "Timestamp": -1}]}
    (answer,) = connection.query(LIST_OFFSETS, 5, {"ReplicaId": -1, "Topics": [queried]})["Topics"][0]["Partitions"]
    return None if answer["ErrorCode"] else int(answer["Offset"])


def _produce(topic: str, *values: bytes, acks: int = 1) -> Fields:
    data = [{"Index": 0, "Records": bytes(batch(*values))}]
    return {"Acks": acks, "TimeoutMs": 5_000, "TopicData": [{"Name": topic, "PartitionData": data}]}


class Neighbour(Worker):
    """A well-behaved client on one connection. It repeats Metadata, Produce and ListOffsets."""

    def __init__(self, address: Address, topic: str) -> None:
        super().__init__("the neighbour")
        self._address, self._topic = address, topic
        self.rounds = 0

    def work(self) -> None:
        with RawConnection(self._address, 60.0) as connection:
            while not self.over.is_set():
                assert connection.query(METADATA, 9, {"Topics": [{"Name": self._topic}]})["Brokers"]
                response = connection.query(PRODUCE, 9, _produce(self._topic, b"mine"))
                (result,) = response["Responses"][0]["PartitionResponses"]
                assert (result["ErrorCode"], result["BaseOffset"]) == (0, self.rounds)
                assert _log_end(connection, self._topic) == self.rounds + 1
                self.rounds += 1
                time.sleep(0.01)

    def await_rounds(self, count: int) -> None:
        goal = self.rounds + count
        until(lambda: self.rounds >= goal or self.error is not None, "responses to the neighbour")
        self.raise_error()


@pytest.fixture
def neighbour(
    listener: Address, make_topic: Callable[[str], str], unique_topic: Callable[..., str]
) -> Iterator[Neighbour]:
    """A client that connects before the test and gets responses during and after it."""
    beside = Neighbour(listener, make_topic(unique_topic("neighbour")))
    beside.start()
    beside.await_rounds(3)
    try:
        yield beside
        beside.await_rounds(10)
    finally:
        beside.stop()
        beside.join(60)


@contextlib.contextmanager
def connected(address: Address, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.create_connection(address, PATIENCE_SECONDS, (source, 0)) as sock:
        yield sock


def is_closed(sock: socket.socket) -> bool:
    """Whether the peer closes within `PATIENCE_SECONDS`. Data before that is skipped."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def open_sockets(pid: int) -> int:
    count = 0
    for proxied in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            count += proxied.readlink().name.startswith("socket:")
    return count


def await_sockets(proxy: ProxyProcess, count: int) -> None:
    until(lambda: open_sockets(proxy.pid) <= count + OWN_SOCKETS, "the connections of closed clients to be closed")


def await_logged(proxy: ProxyProcess, text: str) -> None:
    until(lambda: text in proxy.log, f"{text!r} in the log")


# --- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.brokers
@pytest.mark.parametrize("length", [0, 3, 7, -1, -(2**31)])
def test_a_frame_of_impossible_length(
    length: int, proxy: ProxyProcess, listener: Address, neighbour: Neighbour
) -> None:
    with connected(listener) as sock:
        sock.sendall(struct.pack(">i", length) + b"\0" * 8)
        assert is_closed(sock)
    await_logged(proxy, "bytes: no Kafka frame is shorter than 8")


@pytest.mark.brokers
@pytest.mark.parametrize("length", [FRAME_BYTES_MAX + 1, 2**31 - 1])
def test_frame_above_the_limit_is_refused_by_length(
    length: int, proxy: ProxyProcess, listener: Address, neighbour: Neighbour
) -> None:
    with connected(listener) as sock:
        sock.sendall(struct.pack(">ihhi", length, PRODUCE, 9, 1))
        assert is_closed(sock)
    await_logged(proxy, f"is above frame_bytes_max={FRAME_BYTES_MAX}")


def test_frame_just_below_the_limit_is_relayed(
    listener: Address, make_topic: Callable[[str], str], unique_topic: Callable[..., str], neighbour: Neighbour
) -> None:
    """Kafka refuses it as too large."""
    topic = make_topic(unique_topic("large"))
    with RawConnection(listener) as connection:
        response = connection.query(PRODUCE, 9, _produce(topic, b"x" * (FRAME_BYTES_MAX - 200)))
    assert response["Responses"][0]["PartitionResponses"][0]["ErrorCode"] == 10


@pytest.mark.brokers
@pytest.mark.parametrize("prefix", ["plain", "checked"])
@pytest.mark.usefixtures("neighbour")
def test_produce_cut_off_at_any_byte_appends_nothing(
    prefix: str, proxy: ProxyProcess, kafka: KafkaCluster, listener: Address, make_topic: Callable[[str], str]
) -> None:
    topic = make_topic(f"{prefix}-cut-off")
    frame = encode_request(PRODUCE, 9, 1, _produce(topic, b"value"))
    before = open_sockets(proxy.pid)
    for cut in range(1, len(frame)):
        with connected(listener) as sock:
            sock.sendall(frame[:cut])
            sock.shutdown(socket.SHUT_WR)
            assert is_closed(sock)  # one at a time, to stay below the connection limit
    await_sockets(proxy, before)

    with RawConnection(kafka.address(1)) as connection:
        assert _log_end(connection, topic) == 0
    with RawConnection(listener) as connection:
        connection.query(PRODUCE, 9, _produce(topic, b"value"))


@pytest.mark.parametrize(("prefix", "where"), [("plain", "header"), ("checked", "header"), ("checked", "frame")])
def test_client_stalled_within_a_frame_is_closed(
    prefix: str, where: str, proxy: ProxyProcess, listener: Address, neighbour: Neighbour
) -> None:
    frame = encode_request(PRODUCE, 9, 1, _produce(f"{prefix}-nowhere", b"value"))
    cut = 9 if where == "header" else len(frame) - 1
    with connected(listener) as sock:
        sock.sendall(frame[:cut])
        assert is_closed(sock)
    await_logged(proxy, f"the client stopped within a frame{chr(39) + 's header' if where == 'header' else ''} for 1 s")


def test_client_trickling_a_buffered_frame_is_closed(
    proxy: ProxyProcess, listener: Address, neighbour: Neighbour
) -> None:
    """A client that sends slowly without a pause would occupy shared memory indefinitely."""
    frame = encode_request(PRODUCE, 9, 1, _produce("checked-nowhere", b"x" * 1000))
    give_up = time.monotonic() + FRAME_SECONDS + 3 * PATIENCE_SECONDS
    # Repeat if a busy machine paused the client for a second, which closes it for another reason.
    while f"a frame was not complete within {FRAME_SECONDS} s (limits.request_timeout_seconds)" not in proxy.log:
        with connected(listener) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(frame[:200])
            for byte in frame[200:-1]:
                assert time.monotonic() < give_up, "the proxy does not close the connection"
                sock.sendall(bytes([byte]))
                time.sleep(0.2)


def test_batch_unpacking_beyond_the_limit_is_refused(
    proxy: ProxyProcess, listener: Address, make_topic: Callable[[str], str], unique_topic: Callable[..., str]
) -> None:
    topic = make_topic(unique_topic("checked-bomb"))
    bomb = bytes(batch(b"\0" * (UNPACKED_BYTES_MAX + 1), compression=1))
    assert len(bomb) < FRAME_BYTES_MAX / 10
    data = [{"Index": 0, "Records": bomb}]
    with RawConnection(listener) as connection:
        body = {"Acks": 1, "TimeoutMs": 5_000, "TopicData": [{"Name": topic, "PartitionData": data}]}
        (result,) = connection.query(PRODUCE, 9, body)["Responses"][0]["PartitionResponses"]
        # A client without proven write access gets Kafka's error for an empty batch. Others get the reason.
        response = connection.query(PRODUCE, 9, _produce(topic, b"value"))
        assert response["Responses"][0]["PartitionResponses"][0]["ErrorCode"] == 0
        (again,) = connection.query(PRODUCE, 9, body)["Responses"][0]["PartitionResponses"]
    assert result["ErrorCode"] in (10, 87)
    assert again["ErrorCode"] == 10
    assert f"limit of {UNPACKED_BYTES_MAX} bytes" in again["ErrorMessage"]


def test_control_request_with_too_many_elements_closes_connection(
    proxy: ProxyProcess, listener: Address, neighbour: Neighbour
) -> None:
    count = 150_000
    body = struct.pack(">i", count) + b"\2\0\0\0\0\0\0" * count + b"\0\0"
    before = rss_bytes(proxy.pid)
    with connected(listener) as sock:
        sock.sendall(struct.pack(">ihhih", 10 + len(body), DESCRIBE_CONFIGS, 3, 1, -1) + body)
        assert is_closed(sock)
    await_logged(proxy, "more array elements than the limit")
    assert rss_bytes(proxy.pid) - before < NOISE_BYTES


def test_many_partitions_pass_or_close_their_connection(
    proxy: ProxyProcess,
    listener: Address,
    neighbour: Neighbour,
    make_topic: Callable[[str], str],
    unique_topic: Callable[..., str],
) -> None:
    """65,536 missing partitions: Kafka responds for each, unless one of the topics is checked."""
    count = 65_536 // 2
    entries = b"".join(struct.pack(">ii", partition, -1) for partition in range(1, 1 + count))

    def request(*topics: str) -> bytes:
        body = b"\xff\xff" + struct.pack(">hii", -1, 10_000, len(topics))  # v3: no transaction, acks, timeout
        for topic in topics:
            body += struct.pack(">h", len(topic)) + topic.encode() + struct.pack(">i", count) + entries
        return struct.pack(">ihhih", 10 + len(body), PRODUCE, 3, 1, -1) + body

    plain, other, checked_topic = (make_topic(unique_topic(name)) for name in ("plain", "plain", "checked"))
    with connected(listener) as sock:
        sock.sendall(request(plain, other))
        with sock.makefile("rb") as answers:
            (length,) = struct.unpack(">i", answers.read(4))
            answer = answers.read(length)
        assert answer.count(b"\0\x03" + b"\xff" * 16) == 2 * count
    with connected(listener) as sock:
        sock.sendall(request(plain, checked_topic))
        assert is_closed(sock)
    await_logged(proxy, "more than 2048 topics or partitions")
    assert not blocked_by(proxy.log, "wire|session")


def test_client_stalled_within_relayed_frame_is_closed_idle(
    proxy: ProxyProcess, listener: Address, make_topic: Callable[[str], str], unique_topic: Callable[..., str]
) -> None:
    frame = encode_request(PRODUCE, 9, 1, _produce(make_topic(unique_topic("plain")), b"value"))
    with connected(listener) as sock:
        sock.sendall(frame[:-1])
        assert is_closed(sock)
    await_logged(proxy, "limits.client_idle_seconds")


@pytest.mark.parametrize(
    ("api_key", "version"), [(-1, 0), (4, 0), (58, 0), (62, 0), (99, 0), (32767, 0), (PRODUCE, 2), (METADATA, 99)]
)
def test_an_api_or_version_that_is_not_served(
    api_key: int, version: int, proxy: ProxyProcess, listener: Address, neighbour: Neighbour
) -> None:
    with connected(listener) as sock:
        sock.sendall(struct.pack(">ihhih", 14, api_key, version, 1, -1) + b"\0" * 4)
        assert is_closed(sock)
    # Keys that differ only in their numbers are logged together.
    name = APIS[api_key].name if api_key in APIS else "api key"
    await_logged(proxy, f'reason="{name}')


# --- not Kafka at all -------------------------------------------------------------------------------------------------

TLS_CLIENT_HELLO = bytes.fromhex("16030100f1010000ed0303") + bytes(range(230))
GARBAGE = {
    "tls": TLS_CLIENT_HELLO,
    "http": b"GET / HTTP/1.1\r\nHost: kafka\r\n\r\n",
    "ssh": b"SSH-2.0-OpenSSH_9.2\r\n",
    "random": random.Random(SEED).randbytes(65536),
    "zeros": bytes(1000),
    "length then random": struct.pack(">i", 1000) + random.Random(SEED).randbytes(1000),
}


@pytest.mark.brokers
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_instead_of_a_request(kind: str, proxy: ProxyProcess, listener: Address, neighbour: Neighbour) -> None:
    with connected(listener) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(GARBAGE[kind])
        assert is_closed(sock)
    await_logged(proxy, "connection closed")


def test_requests_with_broken_bytes_are_answered_or_closed(
    proxy: ProxyProcess, kafka: KafkaCluster, listener: Address, neighbour: Neighbour
) -> None:
    """Valid requests of every API that the proxy decodes, with a few bytes changed, never crash it."""
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    side = ProxiedSocket("x", 1, kafka.address(1))
    outcomes = {"answered": 0, "closed": 0, "nothing": 0}
    for key, api in APIS.items():
        if api.gated or not api.handling or key not in definitions():
            continue
        low, high = definitions()[key].versions
        for version in range(max(api.min_version, low, 3 if key == PRODUCE else 0), min(api.max_version, high) + 1):
            bodies = BODIES.get(api.name, lambda side, version: [{}])(side, version)
            if api.handling is Handling.PRODUCE:
                bodies = [_produce("checked-nowhere", b"value")]
            for body in bodies:
                frame = bytearray(encode_request(key, version, 77, body))
                for _ in range(chance.randint(1, 4)):
                    # Keep length, API key, version and correlation id, so that the proxy decodes the rest.
                    frame[chance.randrange(12, len(frame))] = chance.randrange(256)
                with connected(listener) as sock:
                    sock.sendall(frame)
                    sock.settimeout(6.0)
                    try:
                        outcomes["answered" if sock.recv(4) else "closed"] += 1
                    except ConnectionError:
                        outcomes["closed"] += 1
                    except TimeoutError:
                        outcomes["nothing"] += 1  # the changed request has acks=0 or a long wait
    print(outcomes)
    assert min(outcomes["answered"], outcomes["closed"]) > 10
    assert outcomes["nothing"] < 10
    assert "Traceback" not in proxy.log


# --- overload ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big_topic(kafka: KafkaCluster, make_topic: Callable[[str], str]) -> str:
    topic = make_topic("bad-input-big")
    with RawConnection(kafka.address(1)) as connection:
        for _ in range(60):
            connection.query(PRODUCE, 9, _produce(topic, random.Random(SEED).randbytes(500_000)))
    return topic


def _never_reading(listener: Address, requests: bytes, seconds: float, probe: Callable[[], None]) -> None:
    """Clients that send as much as possible for some seconds and read nothing."""
    with contextlib.ExitStack() as stack:
        left = {}
        for _ in range(NEVER_READING):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(listener)
            sock.setblocking(False)
            left[sock] = memoryview(requests)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for sock in left:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        left[sock] = left[sock][sock.send(left[sock]) :] or memoryview(requests)
            probe()
            time.sleep(0.02)


@pytest.mark.brokers
@pytest.mark.parametrize("what", ["fetch", "metadata", "answered here", "refused here"])
def test_client_that_never_reads_costs_bounded_memory(
    what: str, proxy: ProxyProcess, listener: Address, big_topic: str, neighbour: Neighbour
) -> None:
    partition = {"Partition": 0, "FetchOffset": 0, "PartitionMaxBytes": 10_000_000}
    fetch = {"MaxWaitMs": 0, "MinBytes": 1, "Topics": [{"Topic": big_topic, "Partitions": [partition]}]}
    requests = {
        "fetch": encode_request(FETCH, 11, 1, fetch),
        "metadata": encode_request(METADATA, 9, 1, {"Topics": None}) * 500,
        "answered here": (struct.pack(">ihhih", 11, API_VERSIONS, 99, 1, -1) + b"\0") * 5_000,
        "refused here": encode_request(PRODUCE, 9, 1, _produce("checked-nowhere", b"value")) * 500,
    }
    before, sockets = rss_bytes(proxy.pid), open_sockets(proxy.pid)
    observed = [before]

    _never_reading(listener, requests[what], 3.0, lambda: observed.append(rss_bytes(proxy.pid)))

    print(f"{what}: {(max(observed) - before) / 1e6:.1f} MB more at most")
    # Unsent data per client, and kernel buffers that are not reported.
    assert max(observed) - before < NOISE_BYTES
    await_sockets(proxy, sockets)


@pytest.mark.brokers
def test_announced_frames_without_data_block_no_other_client(
    proxy: ProxyProcess, listener: Address, neighbour: Neighbour
) -> None:
    """Two of them reach `buffered_bytes_max`. Small requests still pass, and large ones pass soon after."""
    before = rss_bytes(proxy.pid)
    with contextlib.ExitStack() as stack:
        stalled = [stack.enter_context(connected(listener)) for _ in range(4)]
        for sock in stalled:
            sock.sendall(struct.pack(">ihhih", FRAME_BYTES_MAX, METADATA, 9, 1, -1) + b"\0" * 100)
        time.sleep(0.3)
        neighbour.await_rounds(5)
        assert rss_bytes(proxy.pid) - before < NOISE_BYTES
        topics = {"Topics": [{"Name": f"checked-{number:0200}"} for number in range(100)]}
        with RawConnection(listener) as connection:
            answer = connection.query(METADATA, 9, {**topics, "AllowAutoTopicCreation": False})
        assert len(answer["Topics"]) == 100
        assert all(is_closed(sock) for sock in stalled)
    await_logged(proxy, "the client stopped within a frame for 1 s (limits.header_seconds)")


@pytest.mark.brokers
def test_half_open_connections_are_closed_and_block_none(
    proxy: ProxyProcess, listener: Address, neighbour: Neighbour
) -> None:
    with contextlib.ExitStack() as stack:
        sources = [f"127.0.0.{2 + number % 4}" for number in range(CONNECTIONS_MAX + 60)]
        many = [stack.enter_context(connected(listener, source)) for source in sources]
        await_logged(proxy, "connections_max is reached")
        neighbour.await_rounds(5)
        assert all(is_closed(sock) for sock in many)
        await_logged(proxy, f"the client sent nothing for {HANDSHAKE_SECONDS} s (limits.handshake_seconds)")
        assert query_once_accepted(listener, METADATA, 9, {"Topics": []})["Brokers"]


@pytest.mark.brokers
def test_one_address_does_not_take_all_connections(
    proxy: ProxyProcess, listener: Address, neighbour: Neighbour
) -> None:
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(connected(listener, "127.0.0.9")) for _ in range(PER_ADDRESS_MAX + 20)]
        await_logged(proxy, "address_connections_max is reached peer=127.0.0.9:")
        assert query_once_accepted(listener, METADATA, 9, {"Topics": []})["Brokers"]
        neighbour.await_rounds(5)
    del many
    until(lambda: is_accepted(listener, "127.0.0.9"), "an accepted connection after the excess was closed")


def is_accepted(listener: Address, source: str) -> bool:
    with connected(listener, source) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(struct.pack(">ihhih", 11, API_VERSIONS, 0, 1, -1) + b"\0")
        return bool(sock.recv(4))
    return False


def query_once_accepted(listener: Address, api_key: int, version: int, body: Fields) -> Fields:
    """Clients observe the close of a connection before the proxy subtracts it."""

    def answer() -> Fields | None:
        with contextlib.suppress(Closed), RawConnection(listener) as connection:
            return connection.query(api_key, version, body)
        return None

    found: Fields = until(answer, "an accepted connection")
    return found


def test_requests_above_in_flight_limit_answered_in_order(listener: Address, neighbour: Neighbour) -> None:
    """`in_flight_requests_max` delays the client and refuses nothing."""
    count = 40 * IN_FLIGHT_MAX
    with RawConnection(listener) as connection:
        connection.socket.sendall(
            b"".join(encode_request(METADATA, 9, number, {"Topics": []}) for number in range(count))
        )
        answered = [struct.unpack_from(">i", connection.receive())[0] for _ in range(count)]
    assert answered == list(range(count))


def test_silent_client_is_closed_after_idle_time(proxy: ProxyProcess, listener: Address) -> None:
    with RawConnection(listener) as connection:
        connection.query(METADATA, 9, {"Topics": []})
        with pytest.raises(Closed):
            connection.receive()
    await_logged(proxy, f"no data in either direction for {IDLE_SECONDS} s (limits.client_idle_seconds)")


def test_short_connections_leak_no_memory_or_sockets(proxy: ProxyProcess, listener: Address) -> None:
    before, sockets = rss_bytes(proxy.pid), open_sockets(proxy.pid)
    for _ in range(500):
        with connected(listener):
            pass
    query_once_accepted(listener, METADATA, 9, {"Topics": []})  # the last connection is served
    await_sockets(proxy, sockets)
    assert rss_bytes(proxy.pid) - before < NOISE_BYTES


@pytest.mark.parametrize("prefix", ["plain", "checked"])
def test_closing_after_requests_with_acks_0_loses_none(
    prefix: str, listener: Address, make_topic: Callable[[str], str], unique_topic: Callable[..., str]
) -> None:
    """As without the proxy: the broker handles what it has received. The first one waits for a read of the log end."""
    for count in (1, 2, 10):
        topic = make_topic(unique_topic(prefix))
        with RawConnection(listener) as connection:
            connection.socket.sendall(
                b"".join(encode_request(PRODUCE, 9, each, _produce(topic, b"x", acks=0)) for each in range(count))
            )
        with RawConnection(listener) as connection:
            until(lambda: _log_end(connection, topic) == count, "all records")  # noqa: B023


@pytest.mark.parametrize("prefix", ["plain", "checked"])
@pytest.mark.parametrize("fault", ["length", "api", "acks"])
def test_requests_before_a_faulty_one_are_answered(
    prefix: str, fault: str, listener: Address, make_topic: Callable[[str], str], unique_topic: Callable[..., str]
) -> None:
    """As without the proxy: the broker answers them before it closes the connection."""
    topic, other = make_topic(unique_topic(prefix)), make_topic(unique_topic("checked"))
    expecting = {"Index": 0, "Records": bytes(batch(b"x", headers=[[("fencepost-expected-offset", b"7")]]))}
    faulty = {
        "length": struct.pack(">i", FRAME_BYTES_MAX + 1),
        "api": struct.pack(">ihhih", 10, 999, 0, 99, 0),
        "acks": encode_request(
            PRODUCE,
            9,
            99,
            {"Acks": 0, "TimeoutMs": 5_000, "TopicData": [{"Name": other, "PartitionData": [expecting]}]},
        ),
    }[fault]
    requests = [encode_request(PRODUCE, 9, each, _produce(topic, b"x")) for each in range(IN_FLIGHT_MAX)]
    with RawConnection(listener) as connection:
        connection.socket.sendall(b"".join(requests) + faulty)
        answered = [struct.unpack_from(">i", connection.receive())[0] for _ in requests]
        with pytest.raises(Closed):
            connection.receive()
    assert answered == list(range(IN_FLIGHT_MAX))
