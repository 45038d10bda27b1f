"""Three brokers with a fault proxy each, and two proxies that connect through these.

Every node is broker and controller. All tests of a run share one cluster; the fixture `stage3` repairs it after each.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from fencepost_proxy.types import Address
from tests.kit.stage import NODES, THREE_REPLICAS, Stage, piped_kafka
from tests.support.kafka import unique_topic
from tests.support.messages import Closed, Fields, RawConnection
from tests.support.proxy import CHECKED_BY_NAME, LEASE_SECONDS, ProxyProcess

#: Short takeovers of `true` topics.
LIMITS = """
[limits]
sequencer_wait_max_seconds = 1.0
metadata_refresh_seconds = 1.0
reconnect_backoff_max_seconds = 0.2
takeover_seconds = 3.0
"""
FENCED = CHECKED_BY_NAME + LIMITS
#: A long lease, so that their faults are visible on a slow machine, too.
NAIVE = "unsafe_disable_fencing = true\n" + FENCED.replace(
    f"config_lease_seconds = {LEASE_SECONDS}", "config_lease_seconds = 30.0"
)
_METADATA = 3


class Stage3(Stage):
    def start_proxy(self, name: str, **settings: Any) -> ProxyProcess:
        proxy = super().start_proxy(name, **settings)
        with contextlib.suppress(Closed):
            leaders_listener(proxy, "there-is-no-such-topic")  # learns the listeners
        return proxy

    @cached_property
    def naive(self) -> tuple[ProxyProcess, ProxyProcess]:
        """Two proxies that compare offsets without Kafka. Their faults show what fencing prevents."""
        return self.start_proxy("n1", config=NAIVE), self.start_proxy("n2", config=NAIVE)


@contextmanager
def three_brokers(directory: Path) -> Iterator[Stage3]:
    with (
        piped_kafka(len(NODES), properties=THREE_REPLICAS) as (kafka, pipes),
        Stage3(kafka, directory, pipes) as stage,
    ):
        stage.start_proxies({name: {"config": FENCED} for name in ("p1", "p2")})
        yield stage


def required_topic() -> str:
    return unique_topic("required")


#: Listeners of each proxy process by node id, once a client has learned them.
_listeners: dict[int, dict[int, str]] = {}


def _client(proxy: ProxyProcess, address: str) -> RawConnection:
    return RawConnection(Address.parse(address), 2.0, enter=proxy.enter)


def leaders_listener(proxy: ProxyProcess, topic: str) -> str:
    """The address for a client's appends through this proxy. Raises Closed or OSError; retry then.

    Queries any known address, as clients do, because some brokers may be stopped.
    """
    known = _listeners.setdefault(proxy.pid, {})
    for address in random.sample([proxy.bootstrap, *known.values()], 1 + len(known)):
        with contextlib.suppress(OSError, Closed), _client(proxy, address) as connection:
            topics: Fields = {"Topics": [{"Name": topic}], "AllowAutoTopicCreation": False}
            metadata = connection.query(_METADATA, 9, topics)
            known |= {each["NodeId"]: f"{each['Host']}:{each['Port']}" for each in metadata["Brokers"]}
            leaders = [each["LeaderId"] for each in metadata["Topics"][0]["Partitions"] if each["PartitionIndex"] == 0]
            if leaders and leaders[0] in known:
                return known[leaders[0]]
    raise Closed(f"no leader of {topic} is known to {proxy.bootstrap}")
