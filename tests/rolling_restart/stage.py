"""Two proxies of one Kafka, and the bootstrap address of their clients."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.kit.fault_proxy import FaultProxy
from tests.rolling_restart.run import EVERYBODY
from tests.support.ports import free_ports_in_a_row
from tests.support.proxy import ProxyProcess

#: Both proxies' addresses; only the first one's, which is restarted like the other; or a load balancer's.
Know = Literal["both", "first", "balancer"]
#: The bootstrap listener's port, and those of brokers.
_PORTS = 7
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Stage:
    """`continue_meanwhile` – clients that must make progress while one of the proxies is down."""

    proxies: tuple[ProxyProcess, ProxyProcess]
    bootstrap: str
    continue_meanwhile: Collection[str]


@contextmanager
def two_proxies(kafka: str, directory: Path, config: str, *, know: Know = "both") -> Iterator[Stage]:
    with ExitStack() as stack:
        balanced = know == "balancer"
        port = free_ports_in_a_row(_PORTS) if balanced else 0
        hosts = ("127.0.0.2", "127.0.0.3")  # with a load balancer, both use the same ports
        proxies = []
        for number, host in enumerate(hosts):
            logs = directory / f"proxy-{number}"
            logs.mkdir()
            arguments: list[str] = []
            if balanced:
                arguments += ["--listen", f"{host}:{port}", "--advertised-host", HOST]
            proxy = ProxyProcess(kafka, logs, config=config, port=port, arguments=tuple(arguments))
            proxies.append(stack.enter_context(proxy))
        first, second = proxies
        if balanced:
            for each in range(port, port + _PORTS):
                stack.enter_context(FaultProxy(*((host, each) for host in hosts), port=each, raw=True))
        bootstrap = {
            "both": f"{first.bootstrap},{second.bootstrap}",
            "first": first.bootstrap,
            "balancer": f"{HOST}:{port}",
        }[know]
        yield Stage((first, second), bootstrap, EVERYBODY if balanced else ())
