"""One correct client appends while a thousand connections misbehave: its appends are correct and continue."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.types import Address
from tests.kit.threads import working
from tests.support.batches import batch, expecting
from tests.support.clients import read_all
from tests.support.crowd import KINDS
from tests.support.files import allow_open_files
from tests.support.messages import Closed, RawConnection
from tests.support.proxy import ProxyProcess

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(1200)]

PRODUCE, METADATA, CREATE_TOPICS, LIST_OFFSETS = 0, 3, 19, 2
NONE, NOT_LEADER, TIMED_OUT = 0, 6, 7
SEED = 20_261
CONFIG = """
[limits]
frame_bytes_max = 2_000_000
connections_max = 1_500
buffered_bytes_max = 60_000_000
handshake_seconds = 20.0
header_seconds = 10.0
request_timeout_seconds = 20.0
client_idle_seconds = 30.0
drain_seconds = 3.0
[topics."checked-*"]
"fencepost.check.expected.offsets" = "required"
"""
#: Two sockets per connection in the proxy, and Kafka's sockets.
FILES = 8_192
APPENDS = 200
#: Minimum duration and number of appends next to the misbehaving connections.
BESIDE_SECONDS, AT_LEAST = 10.0, 20
PATIENCE_SECONDS = 120.0
#: Allowed memory for a thousand connections: a full buffer for each that does not read, `buffered_bytes_max` for all,
#: and the socket objects. The test prints the actual amount.
MEMORY_BYTES_MAX = 500 * 1024 * 1024


class Good:
    """Append single records at their expected offsets, with write ids so that an in-doubt append can be retried."""

    def __init__(self, address: Address, topic: str) -> None:
        self._address, self._topic = address, topic
        self._connection: RawConnection | None = None
        self.appended: list[bytes] = []
        self.seconds: list[float] = []
        self.again: Counter[int | None] = Counter()  # by error code, None for a lost connection

    def append(self, count: int) -> None:
        """Append this many records. Every error must be retriable."""
        for _ in range(count):
            give_up = time.monotonic() + PATIENCE_SECONDS
            at, value = len(self.appended), b"record %d" % len(self.appended)
            records = expecting(at, value, write_id=b"write %d" % at)
            began = time.monotonic()
            while (error := self._try(records, at)) != NONE:
                assert error in (NOT_LEADER, TIMED_OUT, None), f"append {at} was answered {error}"
                assert time.monotonic() < give_up, f"{at} appends, then none in {PATIENCE_SECONDS:g} s: {self.again}"
                self.again[error] += 1
                time.sleep(0.05)
            self.seconds.append(time.monotonic() - began)
            self.appended.append(value)

    def _try(self, records: memoryview, at: int) -> int | None:
        """The error code, or None if the connection was lost."""
        data = [{"Index": 0, "Records": bytes(records)}]
        body = {"Acks": -1, "TimeoutMs": 15_000, "TopicData": [{"Name": self._topic, "PartitionData": data}]}
        try:
            if self._connection is None:
                self._connection = RawConnection(self._address)
            (topic,) = self._connection.query(PRODUCE, 9, body)["Responses"]
        except (Closed, OSError):
            self.close()
            self._connection = None
            return None
        (result,) = topic["PartitionResponses"]
        if result["ErrorCode"] == NONE:
            assert result["BaseOffset"] == at
        return int(result["ErrorCode"])

    def take_times(self) -> list[float]:
        taken, self.seconds = sorted(self.seconds), []
        return taken

    def close(self) -> None:
        if self._connection is not None:
            self._connection.socket.close()


@dataclass
class Watch:
    """Maximum memory and sockets of a process."""

    pid: int
    rss_bytes_max: int = 0
    sockets_max: int = 0

    def run(self, over: threading.Event) -> None:
        while not over.wait(0.1):
            self.rss_bytes_max = max(self.rss_bytes_max, rss_bytes(self.pid))
            self.sockets_max = max(self.sockets_max, sockets(self.pid))


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def sockets(pid: int) -> int:
    count = 0
    for proxied in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += proxied.readlink().name.startswith("socket:")
        except FileNotFoundError:
            continue  # closed in the meantime
    return count


def _topic(kafka: KafkaCluster, name: str) -> str:
    with RawConnection(kafka.address(1)) as connection:
        requested = {"Name": name, "NumPartitions": 1, "ReplicationFactor": 1}
        assert connection.query(CREATE_TOPICS, 7, {"Topics": [requested]})["Topics"][0]["ErrorCode"] == NONE
        give_up = time.monotonic() + PATIENCE_SECONDS
        queried = {"Topics": [{"Name": name, "Partitions": [{"PartitionIndex": 0, "Timestamp": -1}]}]}
        while connection.query(LIST_OFFSETS, 5, {"ReplicaId": -1, **queried})["Topics"][0]["Partitions"][0][
            "ErrorCode"
        ]:
            assert time.monotonic() < give_up
            time.sleep(0.05)
    return name


def _fill(kafka: KafkaCluster, topic: str) -> None:
    """Append 10 MB to fetch."""
    with RawConnection(kafka.address(1)) as connection:
        data = [{"Index": 0, "Records": bytes(batch(b"x" * 500_000))}]
        for _ in range(20):
            connection.query(
                PRODUCE, 9, {"Acks": 1, "TimeoutMs": 15_000, "TopicData": [{"Name": topic, "PartitionData": data}]}
            )


@contextmanager
def crowd(listener: Address, plain: str, checked_topic: str) -> Iterator[dict[str, int]]:
    """Run all misbehaving connections. At the end, the counts say how often each kind connected."""
    command = [sys.executable, "-m", "tests.support.crowd", str(listener), plain, checked_topic, str(SEED)]
    root = Path(__file__).parents[2]
    counts: dict[str, int] = {}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == "ready\n", process.communicate()[1][-3000:]
            yield counts
            out, err = process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode == 0, err[-3000:]
            counts.update(json.loads(out))
        finally:
            process.kill()


def _milliseconds(times: list[float]) -> str:
    p50, p99 = times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
    return f"p50 {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms, worst {times[-1] * 1000:.1f} ms"


def _tries(again: Counter[int | None]) -> str:
    return (
        ", ".join(f"{count} after {'a lost connection' if code is None else code}" for code, count in again.items())
        or "0"
    )


def test_good_client_is_unaffected_by_thousand_misbehaving_ones(
    kafka: KafkaCluster, tmp_path: Path, say: Callable[[str], None], unique_topic: type[str]
) -> None:
    if allow_open_files(FILES) < FILES:
        pytest.skip(f"needs {FILES} open files; raise the hard limit (ulimit -Hn)")
    mine = _topic(kafka, unique_topic("checked-mine"))
    plain, checked_topic = _topic(kafka, unique_topic("plain")), _topic(kafka, unique_topic("checked-theirs"))
    _fill(kafka, plain)
    with ProxyProcess(kafka.bootstrap, tmp_path, config=CONFIG) as proxy, ExitStack() as stack:
        with RawConnection(Address.parse(proxy.bootstrap)) as connection:
            (broker,) = connection.query(METADATA, 9, {"Topics": []})["Brokers"]
        listener = Address(broker["Host"], broker["Port"])
        good = stack.enter_context(closing(Good(listener, mine)))

        good.append(APPENDS)
        alone = good.take_times()
        again_alone, good.again = good.again, Counter()
        rss_before, sockets_before = rss_bytes(proxy.pid), sockets(proxy.pid)
        watch = Watch(proxy.pid)
        with working(watch.run), crowd(listener, plain, checked_topic) as came:
            over = time.monotonic() + BESIDE_SECONDS
            while time.monotonic() < over or len(good.seconds) < AT_LEAST:
                good.append(1)
            beside = good.take_times()
        give_up = time.monotonic() + PATIENCE_SECONDS
        while sockets(proxy.pid) > sockets_before + 3:  # the proxy opens and closes its connections
            assert time.monotonic() < give_up, f"{sockets(proxy.pid)} sockets are left, {sockets_before} there were"
            time.sleep(0.2)
        good.append(10)
        rss_after = rss_bytes(proxy.pid)
        log = proxy.log

    say(
        f"one good client next to {sum(KINDS.values())} that misbehave (seed {SEED}):\n"
        f"  alone:  {_milliseconds(alone)} ({len(alone)} appends, tried again {_tries(again_alone)})\n"
        f"  next to them: {_milliseconds(beside)} ({len(beside)} appends, tried again {_tries(good.again)})\n"
        f"  proxy: RSS {rss_before / 1e6:.0f} MB before, {watch.rss_bytes_max / 1e6:.0f} MB at most, "
        f"{rss_after / 1e6:.0f} MB after; sockets {sockets_before} before, {watch.sockets_max} at most\n"
        f"  they came {sum(came.values())} times: {', '.join(f'{kind} {n}' for kind, n in sorted(came.items()))}"
    )
    assert [value for _, value in read_all(kafka.bootstrap, mine)] == good.appended
    assert [offset for offset, _ in read_all(kafka.bootstrap, mine)] == list(range(len(good.appended)))
    assert set(came) == set(KINDS)
    assert watch.rss_bytes_max - rss_before < MEMORY_BYTES_MAX
    assert "Traceback" not in log
    assert "crashed" not in log
