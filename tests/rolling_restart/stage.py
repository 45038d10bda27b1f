"""Two proxies of one Kafka, and the bootstrap address of their clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from fencepost_dev.cluster import KafkaCluster
from tests.kit import stage as kit
from tests.kit.fault_proxy import FaultProxy
from tests.rolling_restart.run import EVERYBODY
from tests.support.ports import free_ports_in_a_row
from tests.support.proxy import ProxyProcess

#: Both proxies' addresses; only the first one's, which is restarted like the other; or a load balancer's.
Know = Literal["both", "first", "balancer"]
#: The bootstrap listener's port, and those of brokers.
_PORTS = 7
HOST = "127.0.0.1"


class Stage(kit.Stage):
    """`continue_meanwhile` – clients that must make progress while one of the proxies is down. `before_start` – called
    while it is down."""

    bootstrap = ""
    continue_meanwhile: Collection[str] = ()
    before_start: Callable[[ProxyProcess], None] = staticmethod(lambda proxy: None)


@contextmanager
def two_proxies(
    kafka: KafkaCluster,
    directory: Path,
    config: str,
    *,
    know: Know = "both",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Stage]:
    """`environment` – additional variables of both proxies."""
    each_has = {"config": config, "environment": environment}
    settings: dict[str, dict[str, Any]] = {f"proxy-{number}": dict(each_has) for number in range(2)}
    with Stage(kafka, directory) as stage:
        if know == "balancer":
            # both use the same ports of different hosts
            port, hosts = free_ports_in_a_row(_PORTS), ("127.0.0.2", "127.0.0.3")
            for each, host in zip(settings.values(), hosts, strict=True):
                each |= {"port": port, "arguments": ("--listen", f"{host}:{port}", "--advertised-host", HOST)}
            for each_port in range(port, port + _PORTS):
                balancer = FaultProxy(*((host, each_port) for host in hosts), port=each_port, raw=True)
                stage.on_exit(balancer)
            stage.bootstrap, stage.continue_meanwhile = f"{HOST}:{port}", EVERYBODY
        stage.start_proxies(settings)
        if know != "balancer":
            known = stage.proxies if know == "both" else stage.proxies[:1]
            stage.bootstrap = ",".join(each.bootstrap for each in known)
        yield stage
