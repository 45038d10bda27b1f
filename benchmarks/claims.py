"""Pipelined conditional appends through several proxies, with claims and without, next to one proxy.

    python -m benchmarks.claims                 # about 3 minutes
    python -m benchmarks.claims --delay-ms 0

A relay between the proxies and Kafka delays each direction, because a round trip on the loopback costs too little to
see. Each partition has one writer with five appends in flight, which states their offsets. All writers are threads of
one process, and share the machine's cores with the proxies and Kafka. Ratios are of one proxy, within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks import machine
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.ports import HOST
from fencepost_proxy.types import Address
from tests.support.ports import free_port
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, batch

PARTITIONS: Final = 16
WINDOW: Final = 5
#: Until all partitions are claimed: five seconds alone, and eight appends that waited.
_WARM_UP_SECONDS: Final = 12.0
_CONFIG: Final = """
[topics."claimed-*"]
"fencepost.check.expected.offsets" = "required"
"fencepost.claims" = "true"

[topics."required-*"]
"fencepost.check.expected.offsets" = "required"

[limits]
takeover_seconds = 0.5
"""
_SERIES: Final = (("1 proxy", 1, "required"), ("2 proxies", 2, "required"), ("2 proxies, claims", 2, "claimed"))


class DelayingRelay:
    """Forwards connections to `target`, each direction `seconds` later."""

    def __init__(self, port: int, seconds: float) -> None:
        self.target = 0
        self._port, self._seconds = port, seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(asyncio.start_server(self._accepted, HOST, port), self._loop).result(10)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(HOST, self.target)
        await asyncio.gather(self._forward(reader, far_writer), self._forward(far_reader, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                self._loop.call_later(self._seconds, writer.write, data)
        self._loop.call_later(self._seconds, writer.close)


class Writer:
    """Appends to a partition through one proxy."""

    def __init__(self, address: str, topic: str, partition: int) -> None:
        self.accepted = 0
        self._address, self._topic, self._partition = address, topic, partition
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        end = sent_to = in_flight = 0
        with Connection(self._address) as connection:
            while not self._stop.is_set():
                while in_flight < WINDOW:
                    records = batch(b"x" * 100, expected=sent_to)
                    connection.send_produce({self._topic: {self._partition: records}})
                    sent_to, in_flight = sent_to + 1, in_flight + 1
                answer = connection.receive_produce()[1][self._topic, self._partition]
                in_flight -= 1
                if answer.error_code == 0:
                    self.accepted += 1
                    end = answer.base_offset + 1
                    continue
                if "OFFSET_MISMATCH" in (answer.message or ""):
                    end = answer.base_offset
                for _ in range(in_flight):  # they fail, too
                    connection.receive_produce()
                sent_to, in_flight = end, 0


@contextlib.contextmanager
def running(count: int, upstream: str, directory: Path) -> Iterator[list[ProxyProcess]]:
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(ProxyProcess(upstream, directory, config=_CONFIG)) for _ in range(count)]


def appends_a_second(addresses: Sequence[str], topic: str, seconds: float) -> float:
    with Connection(addresses[0]) as connection:
        error, text = connection.create_topic(topic, partitions=PARTITIONS)
        assert error == 0, text
    writers = [Writer(addresses[each % len(addresses)], topic, each) for each in range(PARTITIONS)]
    time.sleep(_WARM_UP_SECONDS)
    before, began = sum(each.accepted for each in writers), time.monotonic()
    time.sleep(seconds)
    rate = (sum(each.accepted for each in writers) - before) / (time.monotonic() - began)
    for each in writers:
        each.stop()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="measure each series for so long (default: 5)")
    parser.add_argument("--delay-ms", type=float, default=2.0, help="round trip added before Kafka (default: 2)")
    args = parser.parse_args()
    machine.print_heading("Several proxies, and claims")
    relay = DelayingRelay(port := free_port(), args.delay_ms / 2000)
    ratios: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        KafkaCluster(listeners={"DELAYED": "PLAINTEXT"}, advertised={"DELAYED": Address(HOST, port)}) as kafka,
    ):
        relay.target = int(kafka.bootstrap_of("DELAYED").rpartition(":")[2])
        for number in range(args.rounds):
            rates = {}
            for name, count, prefix in _SERIES:
                with running(count, f"{HOST}:{port}", Path(directory)) as proxies:
                    addresses = [each.bootstrap for each in proxies]
                    rates[name] = appends_a_second(addresses, f"{prefix}-{number}-{count}", args.seconds)
                ratios.setdefault(name, []).append(rates[name] / rates["1 proxy"])
                print(f"round {number}: {name}: {rates[name]:,.0f} appends/s, {ratios[name][-1]:.2f}", flush=True)
    for name, found in ratios.items():
        print(f"{name}: {statistics.median(found):.2f} of one proxy ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
