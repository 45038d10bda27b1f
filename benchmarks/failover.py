"""How long a writer stands still when the proxy that serves it is killed (kill -9).

    python -m benchmarks.failover               # about 6 minutes
    python -m benchmarks.failover --kills 2

One writer, `LogWriter` for confluent-kafka with both addresses, appends one record after the other. The pause is the
longest time between two successes, up to that of the first append that began after the kill. With one proxy, it is
started again at once. Limits are the proxy's defaults, so a takeover takes 35 s where it applies: after the start of a
process, on `true` topics. Of two proxies, both have been up for longer.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Final

from fencepost import Record
from fencepost.confluent import LogWriter
from fencepost_dev.cluster import KafkaCluster
from tests.support.clients import create_topic
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection

#: Name, number of proxies, the check, claims, homes.
_SERIES: Final = (
    ("1 proxy, restarted", 1, "required", False, False),
    ("2 proxies", 2, "required", False, False),
    ("2 proxies, claims", 2, "required", True, False),
    ("2 proxies, claims, homes", 2, "required", True, True),
    ("1 proxy, restarted, `true`", 1, "true", False, False),
    ("2 proxies, `true`", 2, "true", False, False),
)
#: Longer than a claim needs.
_BEFORE_SECONDS: Final = 8.0
_TAKEOVER_SECONDS: Final = 35.0
_AFTER_SECONDS: Final = 90.0


class Writer(threading.Thread):
    """Appends until `over`. `at`: when each append succeeded. `began`: when the last of these began."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(daemon=True)
        self._address, self._topic = bootstrap, topic
        self.over = threading.Event()
        self.at: list[float] = []
        self.began = 0.0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with contextlib.closing(
                LogWriter(self._topic, 0, {"bootstrap.servers": self._address, "log_level": 0})
            ) as log:
                log.read_to_end(lambda record: None)
                while not self.over.is_set():
                    began = time.monotonic()
                    log.append([Record(b"x" * 100)])
                    self.at.append(time.monotonic())
                    self.began = began
        except Exception as error:
            self.error = error


def pause(kafka: KafkaCluster, count: int, check: str, *, claims: bool, homes: bool) -> float:
    """Seconds for which the writer stands still after a kill, in a new topic with new proxies."""
    limits = f"[limits]\ntakeover_seconds = {_TAKEOVER_SECONDS}\n"
    config = f'advertised_host = "127.0.0.1"\nhomes = {str(homes).lower()}\n{limits}'
    with contextlib.ExitStack() as running:
        proxies = []
        for _ in range(count):
            directory = Path(running.enter_context(tempfile.TemporaryDirectory()))
            proxies.append(running.enter_context(ProxyProcess(kafka.bootstrap, directory, config=config)))
        topic = create_topic(proxies[0].bootstrap, f"failover-{time.monotonic_ns()}", check)
        if claims:
            with Connection(proxies[0].bootstrap) as admin:
                assert admin.alter_topic(topic, {"fencepost.claims": "true"}) == (0, None)
        writer = Writer(",".join(each.bootstrap for each in proxies), topic)
        if check == "true" and count > 1:
            time.sleep(_TAKEOVER_SECONDS)
        writer.start()
        time.sleep(_BEFORE_SECONDS)
        serving = _serving(proxies, writer)
        serving.kill()
        killed_at = time.monotonic()
        if count == 1:
            serving.restart()
        while writer.began < killed_at:
            if writer.error is not None or time.monotonic() > killed_at + _AFTER_SECONDS:
                raise RuntimeError(f"the writer did not go on: {writer.error}")
            time.sleep(0.01)
        writer.over.set()
        writer.join(30)
        before = max(each for each in writer.at if each <= killed_at)
        successes = [before, *(each for each in writer.at if each > killed_at)]
        return max(after - before for before, after in pairwise(successes))


def _serving(proxies: list[ProxyProcess], writer: Writer) -> ProxyProcess:
    """The one whose suspension stops the writer."""
    for proxy in proxies:
        proxy.pause()
        time.sleep(0.2)
        before = len(writer.at)
        time.sleep(0.3)
        stands_still = len(writer.at) == before
        proxy.resume()
        if stands_still:
            return proxy
        time.sleep(0.5)
    raise RuntimeError("no proxy serves the writer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="for each row (default: %(default)s)")
    options = parser.parse_args()
    print("| | pause s, median | longest |\n|---|---|---|")
    for name, count, check, claims, homes in _SERIES:
        # With a new Kafka: without heartbeats of the processes killed before.
        pauses = []
        for _ in range(options.kills):
            with KafkaCluster(progress=lambda text: None) as kafka:
                pauses.append(pause(kafka, count, check, claims=claims, homes=homes))
        print(f"| {name} | {statistics.median(pauses):.1f} | {max(pauses):.1f} |", flush=True)


if __name__ == "__main__":
    main()
