"""Runs a suite's tests twice: directly at Kafka, and through a proxy that checks and expands every topic."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from kafka import KafkaAdminClient
from kafka.admin import ConfigResource, ConfigResourceType

from tests.foreign.explained import EXPLAINED
from tests.foreign.suites import FAILED, PASSED, Outcomes, Run, Suite
from tests.support.clients import create_topic
from tests.support.kafka import running_kafka
from tests.support.proxy import ProxyProcess

#: Maximum number of runs. A test that fails in one setup runs again in both, and counts as passed if it passed once.
TRIES = 3
CHECKED = {"fencepost.check.expected.offsets": "true", "fencepost.ordered.partition.expansion": "true"}
CONFIG = '[topics."*"]\n' + "".join(f'"{name}" = "{value}"\n' for name, value in CHECKED.items())


@dataclass(frozen=True)
class Compared:
    """Results of a suite's tests in both setups."""

    suite: str
    version: str
    what: str
    direct: Outcomes
    proxied: Outcomes
    seconds: float

    @property
    def different(self) -> list[str]:
        return sorted(test for test in self.direct if self.direct[test] != self.proxied[test])

    @property
    def unexplained(self) -> list[str]:
        return [test for test in self.different if (self.suite, test) not in EXPLAINED]


def compare(suite: Suite, root: Path, directory: Path, only: Sequence[str] | None = None) -> Compared:
    """Each setup has a separate Kafka. Both run concurrently, because the tests mostly wait."""
    began = time.monotonic()
    with ExitStack() as stack:
        runs = {}
        for side in ("direct", "proxied"):
            (where := directory / suite.name / side).mkdir(parents=True, exist_ok=True)
            kafka = stack.enter_context(running_kafka(suite.brokers, properties=dict(suite.properties)))
            bootstrap = kafka.bootstrap
            if side == "proxied":
                bootstrap = stack.enter_context(ProxyProcess(bootstrap, where, config=CONFIG)).bootstrap
                assert_checked(bootstrap)
            runs[side] = Run(bootstrap, where)
        pool = stack.enter_context(ThreadPoolExecutor(len(runs)))
        found: dict[str, Outcomes] = {side: {} for side in runs}
        tests = only
        for number in range(1, TRIES + 1):
            under_way = {side: pool.submit(suite.run, root, run, tests) for side, run in runs.items()}
            for side, ran in under_way.items():
                found[side] |= {test: each for test, each in ran.result().items() if found[side].get(test) != PASSED}
            for test in found["direct"].keys() ^ found["proxied"].keys():  # a run that ended before this test
                for outcomes in found.values():
                    outcomes.setdefault(test, FAILED)
            tests = sorted(test for test in found["direct"] if FAILED in (each[test] for each in found.values()))
            print(f"{suite.name}: try {number}: failed on a side: {' '.join(tests) or 'none'}", flush=True)
            if not tests:
                break
    return Compared(suite.name, suite.version, suite.what, found["direct"], found["proxied"], time.monotonic() - began)


def assert_checked(bootstrap: str) -> None:
    """Without checks, the proxy would only relay, and the results could not differ."""
    topic = create_topic(bootstrap, "is-checked")
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        configs = admin.describe_configs([resource], config_filter="all")["topic"][topic]
        assert {name: configs[name]["value"] for name in CHECKED} == CHECKED
        admin.delete_topics([topic])
