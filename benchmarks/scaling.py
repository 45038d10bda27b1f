"""Measure CPU per request and memory as the number of connections, checked partitions or brokers increases.

    python -m benchmarks.scaling                 # all of it, some minutes
    python -m benchmarks.scaling --quick         # a tenth of everything
    python -m benchmarks.scaling --only brokers

The Kafka is a fake (`tests/support/fake_cluster.py`), because one machine cannot run a hundred brokers. The figure is
the proxy's CPU time (user and system, from the kernel's scheduler) for one request at a time. Each size is compared to
the smallest. Measurements of all sizes alternate, so that other load affects all of them. *Upkeep* is the CPU time of
the idle proxy.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from benchmarks.results import CPU_PER_REQUEST, Goal, Row, at_most, number
from fencepost_proxy.wire import control
from fencepost_proxy.wire.produce import PartitionData, ProduceRequest, TopicData, encode_produce_request
from fencepost_proxy.wire.schema import Message
from tests.support.fake_cluster import FakeClusterProcess
from tests.support.proxy import ProxyProcess
from tests.support.raw import Record, batch

TABLE: Final = "scaling"
COST: Final = CPU_PER_REQUEST
OF_SMALLEST: Final = "of the smallest"
UPKEEP: Final = "upkeep, CPU ms/s"
IDLE_MB: Final = "RSS MB"
KB_EACH: Final = "KB each"

_CONFIG: Final = """
[limits]
connections_max = 12000
address_connections_max = 12000

[topics."required-*"]
"fencepost.check.expected.offsets" = "required"
"""
_LENGTH: Final = struct.Struct(">i")
_PRODUCE_VERSION: Final = 9
_API_VERSIONS, _METADATA = 18, 3
_NO_ID: Final = UUID(int=0)
_RECORD: Final = b"r" * 100
_TIMEOUT_SECONDS: Final = 60.0
#: Error of a proxy that got no CPU time for longer than its lease; the client retries.
_TRY_AGAIN, _PAUSE_SECONDS = 6, 0.05
_UPKEEP_SECONDS: Final = 11.0  # longer than the longest interval of periodic work
#: Many short slices, because other load on the machine changes within seconds.
_ROUNDS: Final = 25
_ROUND_REQUESTS: Final = 400
_FLAT: Final = at_most(1.25)


# --- one client connection --------------------------------------------------------------------------------------------


class Client:
    """A blocking connection with one request in flight."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), _TIMEOUT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def query(self, frame: bytes) -> bytes:
        """The response without its length."""
        self._socket.sendall(frame)
        data = self._socket.recv(65536)
        while len(data) < 4 or len(data) < 4 + _LENGTH.unpack_from(data)[0]:
            more = self._socket.recv(1 << 20)
            if not more:
                raise ConnectionError("the proxy closed the connection")
            data += more
        return data[4:]

    def greet(self, topic: str) -> None:
        """Send ApiVersions and Metadata, as every client does first."""
        versions = Message(client_software_name="scaling", client_software_version="1")
        self.query(control.encode_request_frame(_API_VERSIONS, 3, 1, "scaling", versions))
        requested = Message(topics=[Message(name=topic, topic_id=_NO_ID)], allow_auto_topic_creation=False)
        self.query(control.encode_request_frame(_METADATA, 12, 2, "scaling", requested))

    def close(self) -> None:
        self._socket.close()


def produce_frame(topic: str, partition: int, *, expected: int | None = None) -> bytes:
    data = TopicData(topic, None, (PartitionData(partition, memoryview(batch(Record(_RECORD, expected=expected)))),))
    request = ProduceRequest(_PRODUCE_VERSION, 3, "scaling", b"", None, -1, 10_000, (data,))
    return b"".join(encode_produce_request(request))


def _result(answer: bytes) -> Any:
    return control.decode_response(0, _PRODUCE_VERSION, answer[5:]).responses[0].partition_responses[0]


def check(answer: bytes, what: str) -> None:
    result = _result(answer)
    if result.error_code:
        raise AssertionError(f"{what}: Produce failed with {result.error_code} ({result.error_message})")


# --- resources of a process -------------------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """CPU time so far: all threads, user and system."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def rss_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError(f"process {pid} has no memory")


def cost_us(proxy: ProxyProcess, load: Callable[[], int]) -> float:
    """The proxy's CPU microseconds per request. `load` returns the number of requests."""
    before = cpu_seconds(proxy.pid)
    sent = load()
    return (cpu_seconds(proxy.pid) - before) * 1e6 / sent


def upkeep_ms(proxy: ProxyProcess) -> float:
    before, since = cpu_seconds(proxy.pid), time.monotonic()
    time.sleep(_UPKEEP_SECONDS)
    return (cpu_seconds(proxy.pid) - before) * 1e3 / (time.monotonic() - since)


class _Table:
    """Collects the rows of one dimension."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(
        self, route: str, measure: str, values: Sequence[float], remark: str = "", goal: Goal | None = None
    ) -> None:
        row = Row(TABLE, f"fencepost, {route}", measure, tuple(values), goal, remark)
        self.rows.append(row)
        print(f"{row.route:55} {measure:25} {row} {remark}", flush=True)

    def costs(self, loads: dict[str, tuple[ProxyProcess, Callable[[], int]]]) -> None:
        """Alternate between the loads, smallest first. Ratios are computed within each round."""
        found: dict[str, list[float]] = {route: [] for route in loads}
        for round_number in range(_ROUNDS + 1):
            for route, (proxy, load) in loads.items():
                cost = cost_us(proxy, load)
                if round_number:  # the first warms up
                    found[route].append(cost)
        smallest = next(iter(found.values()))
        for route, values in found.items():
            self.add(route, COST, values)
            if values is not smallest:
                self.add(route, OF_SMALLEST, [a / b for a, b in zip(values, smallest, strict=True)], goal=_FLAT)


# --- connections ------------------------------------------------------------------------------------------------------


def connections(stack: ExitStack, scale: float) -> list[Row]:
    """One connection; one active connection among thousands of idle ones; thousands active in sequence."""
    table = _Table()
    many = int(5_000 * scale)
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    kafka = stack.enter_context(FakeClusterProcess(topics={"open": 4}, kept_max=8))
    small = stack.enter_context(ProxyProcess(kafka.bootstrap, directory, config=_CONFIG))
    large = stack.enter_context(ProxyProcess(kafka.bootstrap, directory, config=_CONFIG))
    frame = produce_frame("open", 0)

    def connect(proxy: ProxyProcess) -> Client:
        client = Client(proxy.bootstrap)
        stack.callback(client.close)
        client.greet("open")
        return client

    warm_up = [connect(large) for _ in range(20)]
    empty_kb = rss_kb(large.pid)
    crowd = warm_up + [connect(large) for _ in range(many)]
    full_kb = rss_kb(large.pid)
    one = connect(small)
    table.add(f"{many:,} idle connections", KB_EACH, [(full_kb - empty_kb) / many])
    table.add("1 connection", UPKEEP, [upkeep_ms(small)])
    table.add(f"{many:,} idle connections", UPKEEP, [upkeep_ms(large)])

    everybody = itertools.cycle(crowd)

    def in_sequence() -> int:
        for client in itertools.islice(everybody, _ROUND_REQUESTS):
            client.query(frame)
        return _ROUND_REQUESTS

    table.costs(
        {
            "1 connection": (small, _again_and_again(one, frame)),
            f"1 of {many:,} connections": (large, _again_and_again(crowd[0], frame)),
            f"{many:,} connections in turn": (large, in_sequence),
        }
    )
    table.add(f"{many:,} connections that have worked", KB_EACH, [(rss_kb(large.pid) - empty_kb) / many])
    return table.rows


def _again_and_again(client: Client, frame: bytes) -> Callable[[], int]:
    def load() -> int:
        for _ in range(_ROUND_REQUESTS):
            client.query(frame)
        return _ROUND_REQUESTS

    return load


# --- checked partitions -----------------------------------------------------------------------------------------------


def partitions(stack: ExitStack, scale: float) -> list[Row]:
    """Conditional appends to one checked partition, and to ten thousand in sequence."""
    table = _Table()
    topics = int(100 * scale)
    names = [f"required-{index}" for index in range(topics)]
    spread = [(name, partition) for name in names for partition in range(100)]
    many = len(spread)
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    kafka = stack.enter_context(FakeClusterProcess(topics={"required-one": 1, **dict.fromkeys(names, 100)}, kept_max=8))
    small = stack.enter_context(ProxyProcess(kafka.bootstrap, directory, config=_CONFIG))
    large = stack.enter_context(ProxyProcess(kafka.bootstrap, directory, config=_CONFIG))
    clients = {}
    for proxy in (small, large):
        client = clients[proxy] = Client(proxy.bootstrap)
        stack.callback(client.close)
        client.greet("required-one")
    each_once = itertools.cycle(enumerate(spread))
    rounds = [0] * many

    def in_sequence(count: int = _ROUND_REQUESTS) -> int:
        frames = []
        for index, (name, partition) in itertools.islice(each_once, count):
            frames.append(produce_frame(name, partition, expected=rounds[index]))
            rounds[index] += 1
        return _query_all(clients[large], frames)

    one = _appends(clients[small])
    empty_kb = rss_kb(large.pid)
    cost_us(small, one)
    first = cost_us(large, lambda: in_sequence(many))
    table.add(f"first append to each of {many:,} checked partitions", COST, [first], "their log ends are read")
    cost_us(large, lambda: in_sequence(many))
    table.add(f"{many:,} checked partitions", KB_EACH, [(rss_kb(large.pid) - empty_kb) / many])
    table.add("1 checked partition", UPKEEP, [upkeep_ms(small)])
    table.add(f"{many:,} checked partitions", UPKEEP, [upkeep_ms(large)])
    table.costs({"1 checked partition": (small, one), f"{many:,} checked partitions in turn": (large, in_sequence)})
    return table.rows


def _appends(client: Client) -> Callable[[], int]:
    """Consecutive appends to one checked partition."""
    ends = itertools.count(0)

    def load() -> int:
        frames = [produce_frame("required-one", 0, expected=next(ends)) for _ in range(_ROUND_REQUESTS)]
        return _query_all(client, frames)

    return load


def _query_all(client: Client, frames: Iterator[bytes] | Sequence[bytes]) -> int:
    sent = 0
    for frame in frames:
        answer = client.query(frame)
        give_up = time.monotonic() + _TIMEOUT_SECONDS
        while _result(answer).error_code == _TRY_AGAIN and time.monotonic() < give_up:
            time.sleep(_PAUSE_SECONDS)
            answer = client.query(frame)
        sent += 1
        check(answer, f"append {sent}")
    return sent


# --- brokers ----------------------------------------------------------------------------------------------------------


def brokers(stack: ExitStack, scale: float) -> list[Row]:
    """The same loads on clusters of 1, 10 and 100 brokers. The checked topic has partitions on each broker."""
    table = _Table()
    sizes = [1, 10, max(20, int(100 * scale))]
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    loads: dict[int, tuple[ProxyProcess, Client]] = {}
    memory: dict[int, int] = {}
    for size in sizes:
        topics = {"open": size, "required-one": 1, "required-all": size}
        kafka = stack.enter_context(FakeClusterProcess(brokers=size, topics=topics, kept_max=8))
        proxy = stack.enter_context(ProxyProcess(kafka.bootstrap, directory, config=_CONFIG))
        client = Client(proxy.bootstrap)
        stack.callback(client.close)
        client.greet("open")
        loads[size] = proxy, client
        memory[size] = rss_kb(proxy.pid)
        table.add(_brokers(size), IDLE_MB, [memory[size] / 1024])
    table.add(_brokers(sizes[-1]), KB_EACH, [(memory[sizes[-1]] - memory[1]) / (sizes[-1] - 1)])
    for size in sizes:
        table.add(_brokers(size), UPKEEP, [upkeep_ms(loads[size][0])])
    frame = produce_frame("open", 0)
    table.costs(
        {
            f"{_brokers(size)}, unchecked": (proxy, _again_and_again(client, frame))
            for size, (proxy, client) in loads.items()
        }
    )
    table.costs({f"{_brokers(size)}, checked": (proxy, _appends(client)) for size, (proxy, client) in loads.items()})
    return table.rows


def _brokers(size: int) -> str:
    return f"{size} broker{'s' if size > 1 else ''}"


# --- the run ----------------------------------------------------------------------------------------------------------

_PARTS: Final[dict[str, Callable[[ExitStack, float], list[Row]]]] = {
    "connections": connections,
    "partitions": partitions,
    "brokers": brokers,
}


def rows(run: Any = None, *, quick: bool = False, only: str | None = None, scale: float | None = None) -> list[Row]:
    """All rows of the table. Uses only the plan of `run`, because it starts its own fake Kafka."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    quick = quick or bool(run is not None and run.plan.quick)
    found = []
    for name, part in _PARTS.items():
        if only in (None, name):
            with ExitStack() as stack:
                found += part(stack, scale or (0.1 if quick else 1.0))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run a tenth of each measurement")
    parser.add_argument("--only", choices=_PARTS, help="run one part only")
    arguments = parser.parse_args()
    found = rows(quick=arguments.quick, only=arguments.only)
    ratios = [row for row in found if row.measure == OF_SMALLEST]
    print("\ncost of largest relative to smallest: " + ", ".join(f"{r.route} {number(r.median)}" for r in ratios))
    return 0


if __name__ == "__main__":
    sys.exit(main())
