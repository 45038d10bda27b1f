"""`fencepost proxy`: the proxy alone, in front of any Kafka."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import fencepost_compiled
from fencepost_proxy import logs
from fencepost_proxy.config import LogFormat, LogLevel, ProxyConfig, RefusalScope, limit_docs, load
from fencepost_proxy.errors import ConfigError, FencepostError
from fencepost_proxy.topics.virtual_configs import check_topic_config
from fencepost_proxy.types import Address

if TYPE_CHECKING:
    from fencepost_proxy.net.worker import Worker

_log = logs.get("cli")

#: So many collections of the middle generation; Python's own is 10. That is 210,000 objects more than before: some five
#: thousand connections that have come and gone, 14 MB.
_FULL_COLLECTION_EVERY: Final = 30

_DESCRIPTION: Final = """\
Runs the proxy in front of a Kafka that is already there. Clients use --listen as their bootstrap server; each broker
gets a listener of its own behind it (bootstrap port + 1 + broker id), and no client ever sees Kafka's own addresses.

When clients can connect it prints one line on stdout:  ready bootstrap=HOST:PORT
Everything else goes to stderr. SIGTERM or Ctrl-C drains and ends with 0; a second one ends it at once."""

_EXAMPLES: Final = """\
examples:
  fencepost proxy --upstream localhost:9092 --listen localhost:19092
      one broker on this machine; point clients at localhost:19092

  fencepost proxy --upstream kafka-1:9092,kafka-2:9092 --listen 0.0.0.0:19092 \\
      --advertised-host kafka.example.com --status 127.0.0.1:8080
      clients are told to connect to kafka.example.com; status page and metrics on port 8080

  fencepost proxy --config fencepost.toml
      everything from a file; what is also given on the command line wins

a config file:
  upstream = ["kafka-1:9092", "kafka-2:9092"]
  listen = "0.0.0.0:19092"

  [topics."orders-*"]                     # guarded from birth; the first glob that matches decides
  "check.expected.offsets" = "required"

  [limits]                                # --list-limits shows them all
  connections_max = 500
"""


class _ListLimits(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from fencepost_proxy.config import Limits  # noqa: PLC0415 - only for this one listing

        defaults = Limits()
        for name, doc in limit_docs().items():
            print(f"{name} = {getattr(defaults, name)}\n    {doc}")
        parser.exit()


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Adds `proxy` to the command; `run` takes what it parses."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "proxy",
        help="the proxy alone, in front of any Kafka",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # Values that were not given must not hide those of the file.
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--upstream", metavar="HOST:PORT[,…]", help="Kafka brokers to ask first; any one that answers will do")
    add("--listen", metavar="HOST:PORT", help="bootstrap address for clients (default 127.0.0.1:19092; port 0: any)")
    add("--config", metavar="FILE.toml", type=Path, help="settings from a file, see below")
    add("--advertised-host", metavar="HOST", help="host that clients are told to use (default: the one they used)")
    add("--refusal-scope", choices=get_args(RefusalScope), help="what one mismatch refuses: its partition (default) or "
        "the whole request, which is KIP-27 to the letter")  # fmt: skip
    add("--status", metavar="HOST:PORT", help="status page, /metrics, /livez and /readyz (default: off)")
    add("--workers", metavar="N", type=int, help="processes that share the work, for more than one core (default 1); "
        "each holds every limit for itself")  # fmt: skip
    add("--worker", help=argparse.SUPPRESS)  # how a supervisor starts a process of its own
    add("--log-level", choices=get_args(LogLevel), help="least severe event that is logged (default info)")
    add("--log-format", choices=get_args(LogFormat), help="key=value lines (default) or JSON, on stderr")
    add("--list-limits", action=_ListLimits, nargs=0, help="print every limit, its default and its meaning, and exit")
    parser.set_defaults(run=run)
    return parser


def config_from(args: argparse.Namespace) -> ProxyConfig:
    """The file's settings with the command line's on top. Raises ConfigError."""
    given = {key: value for key, value in vars(args).items() if key in _SETTINGS}
    log = {key.removeprefix("log_"): given.pop(key) for key in ("log_level", "log_format") if key in given}
    if log:
        given["log"] = log
    return load(getattr(args, "config", None), given, check_topic_config=check_topic_config)


_SETTINGS: Final = (
    "upstream",
    "listen",
    "advertised_host",
    "refusal_scope",
    "status",
    "workers",
    "log_level",
    "log_format",
)


def run(args: argparse.Namespace) -> int:
    """Serves until a signal; the process's exit status. 2: the configuration is wrong. 1: it could not go on."""
    if hasattr(args, "worker"):
        return _run_worker(args.worker)
    try:
        config = config_from(args)
    except ConfigError as e:
        print(f"fencepost proxy: {e}", file=sys.stderr)
        return 2
    logs.setup(config.log.level, config.log.format)
    if fencepost_compiled.stale():
        _log.warning("the compiled build is left aside: `make compiled` makes it anew", reason=fencepost_compiled.why())
    if config.workers > 1:
        # It moves no bytes: Python's own loop will do.
        with asyncio.Runner() as runner:
            return runner.run(_supervise(config))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(config))


async def _supervise(config: ProxyConfig) -> int:
    from fencepost_proxy.net.supervisor import supervise  # noqa: PLC0415 - for several workers only

    def on_ready(bootstrap: Address) -> None:
        print(f"ready bootstrap={bootstrap}", flush=True)

    try:
        return await supervise(config, on_ready=on_ready)
    except ConfigError as e:
        print(f"fencepost proxy: {e}", file=sys.stderr)
        return 2


def _run_worker(given: str) -> int:
    """`INDEX:FD:FD:FD`, from the supervisor."""
    gc.disable()
    import fencepost_proxy.net.app  # noqa: F401, PLC0415 - while it waits to be told that it may serve
    from fencepost_proxy.net.worker import Worker  # noqa: PLC0415

    index, packets, listeners, loads = map(int, given.split(":"))
    worker = Worker(index, socket.socket(fileno=packets), socket.socket(fileno=listeners), loads)
    config = worker.wait_for_start()
    if config is None:
        return 1
    logs.setup(config.log.level, config.log.format, worker=index)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(config, worker))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - it does not exist on every platform
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _settle_collector() -> None:
    """What a start has made stays; and a full collection is rare.

    What is relayed leaves no cyclic garbage; connections that are closed leave some, and so do answers that are changed
    on their way. A full collection visits every object: with 10,000 guarded partitions and 3,000 connections that took
    0.2 s, in which nobody is served.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_COLLECTION_EVERY)


async def _serve(config: ProxyConfig, worker: Worker | None = None) -> int:
    # Importing makes thirty thousand objects that stay: nobody need look through them for garbage again and again.
    gc.disable()
    from fencepost_proxy.net.app import serve  # noqa: PLC0415 - `--help` need not load the whole proxy

    gc.freeze()
    gc.enable()
    stop = asyncio.Event()
    ready = False

    def on_ready(bootstrap: Address) -> None:
        nonlocal ready
        ready = True
        _settle_collector()
        if worker is None:
            print(f"ready bootstrap={bootstrap}", flush=True)
        else:
            worker.ready(bootstrap)

    def on_signal() -> None:
        if stop.is_set():
            _log.warning("asked twice to stop: ended at once, answers under way are lost")
            os._exit(1)
        stop.set()
        if ready:
            _log.info("draining", longest_seconds=config.limits.drain_seconds)
        else:
            serving.cancel()

    if worker is not None:
        worker.on_end = on_signal
    serving = asyncio.create_task(serve(config, on_ready=on_ready, stop=stop, worker=worker), name="serve")
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, on_signal)
    try:
        await serving
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    except FencepostError as e:
        print(f"fencepost proxy: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1
    return 0
