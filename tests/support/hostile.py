"""A hostile client that attacks in one way until it is ended.

    python -m tests.support.hostile HOST:PORT TOPIC WAY [STATUS]

A separate process, so that it competes with the well-behaved client at Kafka or the proxy, not for a Python
interpreter. Prints `ready` once it has started. It reopens closed connections.
`STATUS` is the proxy's status address; Kafka has none.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import random
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice, repeat

from kafka.protocol.admin import AlterClientQuotasRequest
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from tests.support import compressed, raw
from tests.support.bytewise import record
from tests.support.sasl_ssl import ADMIN, logging_in, plain

ABSENT_PARTITIONS = 300
#: Number of partitions of the topic `TOPIC-wide`.
WIDE_PARTITIONS = 60
_TIMEOUT_MS = 5_000
PIPELINED = 200
CONNECTIONS = 100
#: Connections that request the metadata of all topics, and partitions that each such client adds.
POLLING, MANY_PARTITIONS = 20, 500
STATUS_CLIENTS = 8
BOMB_BYTES = 100_000_000
TINY_RECORDS = 200_000
#: Responses that are not read: about what Linux keeps for a sender (`tcp_wmem`). For how long they are not.
_UNREAD_BYTES, UNREAD_SECONDS = range(3_960_000, 4_800_000, 120_000), 1.0
#: Connections whose append follows a request that takes long: so many appends of 900 kB, or a Fetch.
SLOW, LARGE, FETCH_MS = 10, 10, 900
#: Clients that log in again, and after how long. Kafka refuses it within a second.
LOGINS, RELOGIN_SECONDS = 30, 1.05
_LARGE_BYTES, _PIECE_BYTES = 900_000, 30_000
#: An append waits no longer in Kafka or in the proxy.
_LONG_MS = 30_000

#: Sends one attack for each `next`.
Way = Callable[[str, str], Iterator[None]]
WAYS: dict[str, Way] = {}
#: Those for a Kafka with logins.
WITH_LOGINS = frozenset({"logins among appends"})


def way(each: Way) -> Way:
    WAYS[each.__name__.replace("_", " ")] = each
    return each


@way
def absent_partitions(address: str, topic: str) -> Iterator[None]:
    """One existing partition, and many that do not exist."""
    records = raw.batch(b"x")
    return _produces(address, {topic: dict.fromkeys(range(1 + ABSENT_PARTITIONS), records)})


@way
def many_partitions(address: str, topic: str) -> Iterator[None]:
    """Partitions with unknown log ends."""
    records = raw.batch(b"x")
    wide = dict.fromkeys(range(WIDE_PARTITIONS), raw.batch(raw.Record(b"x", expected=1 << 40)))
    return _produces(address, {topic: {0: records}, f"{topic}-wide": wide})


@way
def linked_blocks(address: str, topic: str) -> Iterator[None]:
    """LZ4 that Kafka answers with UNKNOWN_SERVER_ERROR, and that the proxy refuses itself."""
    return _produces(address, *_after_a_good_one(topic, "lz4, linked blocks"))


@way
def error_after_error(address: str, topic: str) -> Iterator[None]:
    """LZ4 that the proxy can decompress, and that Kafka answers with UNKNOWN_SERVER_ERROR."""
    return _produces(address, *_after_a_good_one(topic, "lz4, missing content checksum"))


@way
def wrong_expectations(address: str, topic: str) -> Iterator[None]:
    """Only wrong expected offsets."""
    return _produces(address, {topic: {0: raw.batch(raw.Record(b"x", expected=1 << 40))}})


@way
def appends_without_an_answer(address: str, topic: str) -> Iterator[None]:
    """Closes the connection before Kafka can respond."""
    records = raw.batch(b"x")
    for _ in repeat(None):
        connection = raw.Connection(address)
        connection.append(topic, records)
        connection.send_produce({topic: {0: records}})
        connection.reset()
        yield


@way
def damaged_batches(address: str, topic: str) -> Iterator[None]:
    """Many damaged batches at once, which the proxy refuses itself."""
    damaged = raw.batch(b"x")[:-1] + b"?"
    with raw.Connection(address) as connection:
        for _ in repeat(None):
            for _ in range(PIPELINED):
                connection.send_produce({topic: {0: damaged}}, timeout_ms=_TIMEOUT_MS)
            for _ in range(PIPELINED):
                connection.receive_produce()
            yield


@way
def very_many_requests(address: str, topic: str) -> Iterator[None]:
    """Requests for another partition, at the rate of their responses."""
    wide = {f"{topic}-wide": {0: raw.batch(b"x")}}
    with raw.Connection(address) as connection:
        for _ in repeat(None):
            for _ in range(PIPELINED):
                connection.send_produce(wide, timeout_ms=_TIMEOUT_MS)
            for _ in range(PIPELINED):
                connection.receive_produce()
            yield


@way
def decompression_bomb(address: str, topic: str) -> Iterator[None]:
    records = [record(0, value=bytes(BOMB_BYTES), timestamp_delta=1)]
    return _produces(address, {topic: {0: compressed.batch(1, gzip.compress(records[0]), records=records)}})


@way
def tiny_records(address: str, topic: str) -> Iterator[None]:
    """Very many records in few bytes."""
    tiny = [record(0, timestamp_delta=1, value=None)] * TINY_RECORDS
    return _produces(address, {topic: {0: compressed.batch(1, gzip.compress(b"".join(tiny)), records=tiny)}})


@way
def silent_connections(address: str, topic: str) -> Iterator[None]:
    return _many(address, lambda connection: None)


@way
def half_a_frame(address: str, topic: str) -> Iterator[None]:
    """Half a frame, followed by single bytes."""
    request = raw.produce_request({topic: {0: raw.batch(b"x" * 50_000)}}, -1, _TIMEOUT_MS, None, None)
    with raw.Connection(address) as connection:
        _, frame = connection.frame(request, 9)
    offsets: dict[raw.Connection, int] = {}

    def one(connection: raw.Connection) -> None:
        at = offsets.get(connection, 0)
        until = len(frame) // 2 if not at else min(at + 1, len(frame) - 1)
        connection.socket.sendall(frame[at:until])
        offsets[connection] = until

    return _many(address, one)


@way
def unread_responses(address: str, topic: str) -> Iterator[None]:
    named = [raw.MetadataRequest.MetadataRequestTopic(name=f"{topic}-wide")]
    queried = raw.MetadataRequest(topics=named, allow_auto_topic_creation=False)
    with raw.Connection(address) as first:
        frames = b"".join(first.frame(queried, 5)[1] for _ in range(PIPELINED))
    sent: dict[raw.Connection, int] = {}

    def one(connection: raw.Connection) -> None:
        connection.socket.setblocking(False)
        at = sent.get(connection, 0)
        with contextlib.suppress(BlockingIOError):
            sent[connection] = (at + connection.socket.send(frames[at:])) % len(frames)  # whole frames, in the end

    return _many(address, one)


@way
def append_after_unread_response(address: str, topic: str) -> Iterator[None]:
    """Some of these responses fill their connection, and the client reads nothing: the append's answer stays in it."""
    filled = f"un{topic}"
    with raw.Connection(address) as connection:
        connection.create_topic(filled)
        for _ in range(_UNREAD_BYTES[-1] // _PIECE_BYTES):
            connection.append(filled, raw.batch(b"x" * _PIECE_BYTES))
    append = {topic: {0: raw.batch(b"x")}}
    for _ in repeat(None):
        with contextlib.ExitStack() as stack:
            for bytes_max in _UNREAD_BYTES:
                connection = stack.enter_context(raw.Connection(address, enter=_small_receive_buffer))
                connection.send(raw.fetch(filled, wait_ms=FETCH_MS, bytes_min=bytes_max, bytes_max=bytes_max), 4)
                connection.send_produce(append, timeout_ms=_LONG_MS)
            yield
            time.sleep(UNREAD_SECONDS)


@way
def large_appends_first(address: str, topic: str) -> Iterator[None]:
    """Its connection to Kafka is full of another topic's appends, and an append to the partition follows them."""
    large = {f"un{topic}": {0: raw.batch(b"x" * _LARGE_BYTES)}}
    return _appends_after(address, topic, lambda connection: [connection.send_produce(large) for _ in range(LARGE)], 4)


@way
def long_fetch_first(address: str, topic: str) -> Iterator[None]:
    """Kafka waits for records of another topic, and an append to the partition follows."""
    request = raw.fetch(f"un{topic}", wait_ms=FETCH_MS, bytes_min=1, bytes_max=1)
    return _appends_after(address, topic, lambda connection: connection.send(request, 4), SLOW)


@way
def slow_large_append(address: str, topic: str) -> Iterator[None]:
    """A large append of which a piece arrives now and then."""
    request = raw.produce_request({topic: {0: raw.batch(b"x" * _LARGE_BYTES)}}, -1, _TIMEOUT_MS, None, None)
    with raw.Connection(address, timeout_seconds=60.0) as connection:
        for _ in repeat(None):
            _, frame = connection.frame(request, 9)
            for at in range(0, len(frame), _PIECE_BYTES):
                connection.socket.sendall(frame[at : at + _PIECE_BYTES])
                yield
                time.sleep(0.01)
            connection.receive_produce()


@way
def logins_among_appends(address: str, topic: str) -> Iterator[None]:
    """Clients that log in again while appends are in flight (KIP-368), with an append after the login."""
    append = {topic: {0: raw.batch(b"x")}}
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(raw.Connection(address, enter=logging_in(ADMIN))) for _ in range(LOGINS)]
        for _ in repeat(None):
            time.sleep(RELOGIN_SECONDS)
            for connection in connections:
                for _ in range(5):
                    connection.send_produce(append, timeout_ms=_LONG_MS)
                connection.send(SaslHandshakeRequest(mechanism="PLAIN"), 1)
            yield
            for connection in connections:
                for _ in range(6):
                    connection.receive_frame()
                connection.send(SaslAuthenticateRequest(auth_bytes=plain(ADMIN)), 1)
                connection.send_produce(append, timeout_ms=_LONG_MS)
            for connection in connections:
                assert connection.receive(SaslAuthenticateRequest, 1)[1].error_code == 0
                connection.receive_produce()


@way
def all_topics(address: str, topic: str) -> Iterator[None]:
    """Clients that request the metadata of all topics, as fast as they get it."""
    with raw.Connection(address) as connection:
        connection.create_topic(f"{topic}-many", partitions=MANY_PARTITIONS)
    queried = raw.MetadataRequest(topics=None, allow_auto_topic_creation=False)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(raw.Connection(address)) for _ in range(POLLING)]
        for _ in repeat(None):
            for connection in connections:
                connection.send(queried, 5)
            for connection in connections:
                connection.receive_frame()
            yield


@way
def reset_connections(address: str, topic: str) -> Iterator[None]:
    for _ in repeat(None):
        connection = raw.Connection(address)
        connection.socket.sendall(b"\0\0")
        connection.reset()
        yield


@way
def opened_and_closed_connections(address: str, topic: str) -> Iterator[None]:
    """Without a byte."""
    host, _, port = address.rpartition(":")
    for _ in repeat(None):
        socket.create_connection((host, int(port)), 5.0).close()
        yield


@way
def first_requests_only(address: str, topic: str) -> Iterator[None]:
    """A new connection for each request, closed without reading the response."""
    with raw.Connection(address) as connection:
        _, frame = connection.frame(raw.MetadataRequest(topics=[], allow_auto_topic_creation=False), 5)
    for _ in repeat(None):
        connection = raw.Connection(address)
        connection.socket.sendall(frame)
        connection.close()
        yield


@way
def producer_over_its_quota(address: str, topic: str) -> Iterator[None]:
    """It sends its next append while Kafka reads nothing from it."""
    return _over_quota(address, topic, "producer_byte_rate", 2_000.0, raw.batch(b"x" * 20_000))


@way
def client_over_its_request_quota(address: str, topic: str) -> Iterator[None]:
    """The same for the broker's CPU time."""
    return _over_quota(address, topic, "request_percentage", 0.01, raw.batch(b"x"))


@way
def status_pages(address: str, topic: str) -> Iterator[None]:
    """Eight clients of the status address, which request all that they can."""
    status = sys.argv[4] if len(sys.argv) > 4 else None
    if status is None:
        yield from (time.sleep(0.1) for _ in repeat(None))
        return
    clients: list[http.client.HTTPConnection] = []
    for path in cycle(("/status.json", "/metrics", "/topics.json")):
        for _ in range(STATUS_CLIENTS - len(clients)):
            client = http.client.HTTPConnection(status, timeout=60)
            client.request("GET", path)
            clients.append(client)
        with contextlib.suppress(OSError, http.client.HTTPException):
            clients[0].getresponse().read()
        clients.pop(0).close()
        yield


@way
def absurd_length(address: str, topic: str) -> Iterator[None]:
    return _closed(address, struct.pack(">ihhi", 2**31 - 1, 0, 9, 1))


@way
def many_elements(address: str, topic: str) -> Iterator[None]:
    """A Metadata request that claims a hundred million topics."""
    return _closed(address, struct.pack(">ihhihi", 4_000_014, 3, 5, 1, -1, 100_000_000) + bytes(4_000_000))


@way
def random_bytes(address: str, topic: str) -> Iterator[None]:
    chance = random.Random(20_261)
    for _ in repeat(None):
        noise = chance.randbytes(1000)
        yield from islice(_closed(address, struct.pack(">ihhi", len(noise) + 8, chance.randrange(70), 5, 1) + noise), 1)


def _closed(address: str, data: bytes) -> Iterator[None]:
    for _ in repeat(None):
        with raw.Connection(address, timeout_seconds=1.0) as connection, contextlib.suppress(OSError):
            connection.socket.sendall(data)
            connection.is_closed(1.0)
        yield


def _many(address: str, one: Callable[[raw.Connection], None]) -> Iterator[None]:
    """Call `one` on each of many connections in turn; reopen closed ones."""
    connections = [raw.Connection(address) for _ in range(CONNECTIONS)]
    while True:
        for number, connection in enumerate(connections):
            try:
                one(connection)
            except (OSError, raw.Closed):
                connection.close()
                connections[number] = raw.Connection(address)
        yield
        time.sleep(0.01)


def _after_a_good_one(topic: str, form: str) -> Iterator[raw.Batches]:
    """First sends a valid append, which proves the permission to write and makes a retry of it possible."""
    odd = compressed.batch(*compressed.FORMS[form], base_timestamp_ms=int(time.time() * 1000))
    for batch in (raw.batch(b"x"), *[odd] * 20):
        yield {topic: {0: batch}}


def _small_receive_buffer(new: socket.socket) -> socket.socket:
    new.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return new


def _appends_after(address: str, topic: str, first: Callable[[raw.Connection], object], count: int) -> Iterator[None]:
    """Each of some connections sends what takes long, and an append to the partition with it."""
    append = {topic: {0: raw.batch(b"x")}}
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(raw.Connection(address, timeout_seconds=60.0)) for _ in range(count)]
        connections[0].create_topic(f"un{topic}")
        while True:
            for connection in connections:
                first(connection)
                appended = connection.send_produce(append, timeout_ms=_LONG_MS)
                yield
            for connection in connections:
                while int.from_bytes(connection.receive_frame()[:4]) != appended:
                    pass


def _over_quota(address: str, topic: str, quota: str, limit: float, records: bytes) -> Iterator[None]:
    client_id = f"{quota}-{topic}"
    entity = AlterClientQuotasRequest.EntryData.EntityData(entity_type="client-id", entity_name=client_id)
    change = AlterClientQuotasRequest.EntryData.OpData(key=quota, value=limit, remove=False)
    entry = AlterClientQuotasRequest.EntryData(entity=[entity], ops=[change])
    with raw.Connection(address, timeout_seconds=60.0) as connection:
        answer = connection.query(AlterClientQuotasRequest(entries=[entry], validate_only=False), 1)
        assert [each.error_code for each in answer.entries] == [0]
        connection.client_id = client_id
        connection.append(topic, records)
        for _ in repeat(None):
            connection.append(topic, records, timeout_ms=_TIMEOUT_MS)
            yield


def _produces(address: str, *requests: raw.Batches) -> Iterator[None]:
    with raw.Connection(address) as connection:
        for batches in cycle(requests):
            connection.produce(batches, timeout_ms=_TIMEOUT_MS)
            yield


def main() -> None:
    address, topic, name = sys.argv[1:4]
    began = False
    while True:
        try:
            for _ in WAYS[name](address, topic):
                if not began:
                    print("ready", flush=True)
                began = True
        except (OSError, raw.Closed):
            continue


if __name__ == "__main__":
    main()
