"""Measure the cost of monitoring a proxy with many partitions: CPU time per page, and memory.

    python -m benchmarks.status_page                                       # 100 topics of 100 partitions: some minutes
    python -m benchmarks.status_page --topics 10 --partitions 20 --seconds 10

One Kafka. Half of the topics are checked by the configuration file, half by an admin client. Each partition gets one
append and one refusal before the measurement. CPU time is the proxy process's (user and system, from the kernel's
scheduler). Elapsed time is shown as well, but includes other load of the machine.
"""

from __future__ import annotations

import argparse
import http.client
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType  # type: ignore[attr-defined]

from benchmarks.scaling import cpu_seconds, rss_kb
from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.ports import free_port
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, batch

_TIMES: Final = 30
_PATHS: Final = (
    "/",
    "/status.json",
    "/status.json?limit=20",
    "/topics.json",
    "/topics.json?search=set-05",
    "/partitions.json?topic=listed-000",
    "/partitions.json?offset=9000&limit=500",
    "/refusals.json",
    "/metrics",
    "/readyz",
)
_COMMANDS: Final = (("status",), ("topics",), ("topics", "listed-000"), ("expansions",), ("transactions",))
_PROBE_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 600.0
_CONFIG: Final = """
[topics."listed-*"]
"fencepost.check.expected.offsets" = "required"
"""


def fill(bootstrap: str, topics: int, partitions: int) -> None:
    """Create topics through the proxy, with one append and one refusal per partition."""
    names = [f"{'listed' if number % 2 == 0 else 'set'}-{number:03}" for number in range(topics)]
    admin = AdminClient({"bootstrap.servers": bootstrap})
    # Kafka creates at most 10,000 partitions per request.
    for start in range(0, len(names), 10):
        requested = [NewTopic(name, partitions, 1) for name in names[start : start + 10]]
        for made in admin.create_topics(requested, request_timeout=_PATIENCE_SECONDS).values():
            made.result()
    entry = ConfigEntry("fencepost.check.expected.offsets", "required", incremental_operation=AlterConfigOpType.SET)
    switched_on = [
        ConfigResource(ResourceType.TOPIC, name, incremental_configs=[entry])
        for name in names
        if name.startswith("set")
    ]

    def switch_on() -> bool:
        """Refused until the broker has created the logs of all topics, one after the other."""
        try:
            for done in admin.incremental_alter_configs(switched_on, request_timeout=_PATIENCE_SECONDS).values():
                done.result()
        except KafkaException:
            return False
        return True

    until(switch_on, "checks to be switched on", seconds=_PATIENCE_SECONDS)
    with Connection(bootstrap, timeout_seconds=_PATIENCE_SECONDS) as client:
        for name in names:
            left = set(range(partitions))
            first, again = batch(b"x", expected=0), batch(b"y", expected=0)

            def append(name: str = name, left: set[int] = left, first: bytes = first) -> bool:
                answers = client.produce({name: dict.fromkeys(sorted(left), first)}, timeout_ms=60_000)
                left -= {partition for (_, partition), answer in answers.items() if not answer.error_code}
                return not left

            until(append, f"every partition of {name} to be appended to", seconds=_PATIENCE_SECONDS)
            refused = client.produce({name: dict.fromkeys(range(partitions), again)}, timeout_ms=60_000)
            assert all(answer.error_code for answer in refused.values())


def get(address: str, path: str) -> bytes:
    connection = http.client.HTTPConnection(address, timeout=_PATIENCE_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def cost(pid: int, work: Callable[[], None], times: int) -> tuple[float, float]:
    """CPU milliseconds of the process per call, and median elapsed milliseconds."""
    passed = []
    before = cpu_seconds(pid)
    for _ in range(times):
        began = time.monotonic()
        work()
        passed.append(time.monotonic() - began)
    return (cpu_seconds(pid) - before) / times * 1e3, statistics.median(passed) * 1e3


def share(pid: int, seconds: float, work: Callable[[], None] | None = None) -> float:
    """CPU use in percent of one core during `seconds`, with `work` at the refresh interval of a page."""
    before, began = cpu_seconds(pid), time.monotonic()
    due = began
    while (now := time.monotonic()) < began + seconds:
        if work is not None and now >= due:
            work()
            due += _PROBE_SECONDS
        time.sleep(min(0.2, seconds / 10))
    return (cpu_seconds(pid) - before) / (time.monotonic() - began) * 100


def fencepost(*arguments: str) -> tuple[str, float]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "fencepost_proxy", *arguments], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout, time.monotonic() - began


def measure(directory: Path, topics: int, partitions: int, seconds: float) -> None:
    # Each open index file of a partition has this size on disk.
    with KafkaCluster(1, heap="2g", properties={"log.index.size.max.bytes": "65536"}) as kafka:
        address = f"127.0.0.1:{free_port()}"
        with ProxyProcess(kafka.bootstrap, directory, config=_CONFIG, arguments=("--status", address)) as proxy:
            empty_kb = rss_kb(proxy.pid)
            before, began = cpu_seconds(proxy.pid), time.monotonic()
            fill(proxy.bootstrap, topics, partitions)
            print(
                f"{topics * partitions:,} partitions, filled in {time.monotonic() - began:.0f} s "
                f"(proxy: {cpu_seconds(proxy.pid) - before:.1f} s of CPU)",
                flush=True,
            )
            print(f"resident memory: {empty_kb / 1024:.0f} MB before, {rss_kb(proxy.pid) / 1024:.0f} MB after")
            print(f"idle: {share(proxy.pid, seconds):.2f} % of a core", flush=True)
            page = share(proxy.pid, seconds, lambda: ignore(get(address, "/status.json?limit=20")))
            print(f"one page open: {page:.2f} % of a core; {rss_kb(proxy.pid) / 1024:.0f} MB", flush=True)
            print(f"\n{'path':42}{'bytes':>10}{'CPU ms':>9}{'ms':>9}")
            for path in _PATHS:
                size = len(get(address, path))
                cpu_ms, passed_ms = cost(proxy.pid, lambda path=path: ignore(get(address, path)), _TIMES)  # type: ignore[misc]
                print(f"{path:42}{size:>10,}{cpu_ms:>9.1f}{passed_ms:>9.1f}", flush=True)
            print(f"\n{'command':42}{'lines':>10}{'s':>9}")
            for command in _COMMANDS:
                reported, passed = fencepost(*command, "--status", address)
                print(f"{'fencepost ' + ' '.join(command):42}{reported.count(chr(10)):>10}{passed:>9.1f}", flush=True)
            file = directory / "checked.toml"
            file.write_text(f'upstream = "{kafka.bootstrap}"\nlisten = "127.0.0.1:{proxy.port}"\n{_CONFIG}')
            reported, passed = fencepost("check", "--running", "--config", str(file))
            print(
                f"{'fencepost check --running':42}{reported.count(chr(10)):>10}{passed:>9.1f}\n\n{reported}", flush=True
            )
            print(f"resident memory at the end: {rss_kb(proxy.pid) / 1024:.0f} MB", flush=True)


def ignore(_: object) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--partitions", type=int, default=100, help="partitions per topic")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each measurement of a running process")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fencepost-status-") as directory:
        measure(Path(directory), args.topics, args.partitions, args.seconds)


if __name__ == "__main__":
    main()
