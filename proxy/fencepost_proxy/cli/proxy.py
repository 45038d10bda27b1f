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

from fencepost_proxy import logs
from fencepost_proxy.cli.reloading import Running
from fencepost_proxy.cli.service_manager import notify
from fencepost_proxy.config import LogFormat, LogLevel, Mode, ProxyConfig, RefusalScope
from fencepost_proxy.config.keys import SHOWN
from fencepost_proxy.config.reading import FILE_VARIABLE, Loaded, read
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
Everything else goes to stderr. SIGTERM or Ctrl-C drains (limits.drain_seconds) and ends with 0; with a second one it
does not wait for what is under way; a third one ends it at once, with 1.
SIGHUP reads the configuration anew, certificates and keys too, and says what has changed and what needs a restart
(docs/configuration.md); certificates are also read when their files change."""

_EXAMPLES: Final = """\
examples:
  fencepost proxy --upstream localhost:9092 --listen localhost:19092
      one broker on this machine; point clients at localhost:19092

  fencepost proxy --upstream kafka-1:9092,kafka-2:9092 --listen 0.0.0.0:19092 \\
      --advertised-host kafka.example.com --status 127.0.0.1:8080
      clients are told to connect to kafka.example.com; status page and metrics on port 8080

  fencepost proxy --config fencepost.toml
      everything from a file; the environment wins over it, and the command line over both

  FENCEPOST_LIMITS__DRAIN_SECONDS=30 fencepost proxy --config fencepost.toml
      any key by the environment: a dot is two underscores

  fencepost check --config fencepost.toml
      whether all of that works here, before anybody depends on it

a config file:
  upstream = ["kafka-1:9092", "kafka-2:9092"]
  listen = "0.0.0.0:19092"

  [topics."orders-*"]                     # guarded from birth; the first glob that matches decides
  "check.expected.offsets" = "required"

  [limits]                                # fencepost config explain tells of every key
  connections_max = 500
"""


class _ListLimits(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for key in SHOWN:
            if key.table == "limits":
                print(f"{key.field_name} = {key.default}\n    {key.doc}")
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
    add_settings(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # how a supervisor starts a process of its own
    parser.add_argument("--list-limits", action=_ListLimits, nargs=0, help="print every limit, its default and its "
        "meaning, and exit (`fencepost config explain` has all keys)")  # fmt: skip
    parser.set_defaults(run=run)
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """What says how a proxy is to run. Each option is named in the table of keys, too (`option=`)."""
    add = parser.add_argument
    add("--upstream", metavar="HOST:PORT[,…]", help="Kafka brokers to ask first; any one that answers will do")
    add("--mode", choices=get_args(Mode), help="before all brokers (gateway, default), or before one that advertises "
        "the sidecar's address itself")  # fmt: skip
    add("--broker", metavar="HOST:PORT", help="of a sidecar: its broker's listener; --upstream then names one that "
        "clients do not use")  # fmt: skip
    add("--listen", metavar="HOST:PORT", help="bootstrap address for clients (default 127.0.0.1:19092; port 0: any)")
    add("--config", metavar="FILE.toml", type=Path, help="settings from a file (default: what FENCEPOST_CONFIG names)")
    add("--advertised-host", metavar="HOST", help="host that clients are told to use (default: the one they used)")
    add("--refusal-scope", choices=get_args(RefusalScope), help="what one mismatch refuses: its partition (default) or "
        "the whole request, which is KIP-27 to the letter")  # fmt: skip
    add("--status", metavar="HOST:PORT", help="status page, /metrics, /livez and /readyz (default: off)")
    add("--workers", metavar="N", type=int, help="processes that share the work, for more than one core (default 1); "
        "each holds every limit for itself")  # fmt: skip
    add("--log-level", choices=get_args(LogLevel), help="least severe event that is logged (default info)")
    add("--log-format", choices=get_args(LogFormat), help="key=value lines (default) or JSON, on stderr")


def read_config(args: argparse.Namespace) -> Loaded:
    """File, environment and command line, the last on top. Raises ConfigError."""
    given: dict[str, Any] = {}
    for key in SHOWN:
        name = "" if key.option is None else key.option.removeprefix("--").replace("-", "_")
        if name and hasattr(args, name):
            holder = given.setdefault(key.table, {}) if key.table else given
            holder[key.field_name] = getattr(args, name)
    named = os.environ.get(FILE_VARIABLE)
    file = getattr(args, "config", None) or (Path(named) if named else None)
    return read(file, given, environment=os.environ, check_topic_config=check_topic_config)


def config_from(args: argparse.Namespace) -> ProxyConfig:
    """What comes of them. Raises ConfigError."""
    return read_config(args).config


def run(args: argparse.Namespace) -> int:
    """Serves until a signal; the process's exit status. 2: the configuration is wrong. 1: it could not go on."""
    if hasattr(args, "worker"):
        return _run_worker(args.worker)
    try:
        config = config_from(args)
    except ConfigError as e:
        print(f"fencepost proxy: {e}", file=sys.stderr)
        return 2
    running = Running(config, lambda: read_config(args))
    running.listen()
    logs.setup(config.log.level, config.log.format)
    if config.workers > 1:
        # It moves no bytes: Python's own loop will do.
        with asyncio.Runner() as runner:
            return runner.run(_supervise(running))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(config, running=running))


def _announce(bootstrap: Address) -> None:
    """To whoever started it: a person, a script, systemd."""
    print(f"ready bootstrap={bootstrap}", flush=True)
    notify(f"READY=1\nSTATUS=serving clients at {bootstrap}")


async def _supervise(running: Running) -> int:
    from fencepost_proxy.net.supervisor import supervise  # noqa: PLC0415 - for several workers only

    def on_ready(bootstrap: Address) -> None:
        _announce(bootstrap)

    def on_reload(reload: Callable[[ProxyConfig], None]) -> None:
        running.listen_in(asyncio.get_running_loop(), lambda: reload(running.read_anew()))

    try:
        return await supervise(running.config, on_ready=on_ready, on_reload=on_reload)
    except ConfigError as e:
        print(f"fencepost proxy: {e}", file=sys.stderr)
        return 2


def _run_worker(given: str) -> int:
    """`INDEX:FD:FD:FD`, from the supervisor."""
    # It hears of a new configuration from there; the signal is not to end it all the same.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
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


async def _serve(config: ProxyConfig, worker: Worker | None = None, running: Running | None = None) -> int:
    # Importing makes thirty thousand objects that stay: nobody need look through them for garbage again and again.
    gc.disable()
    from fencepost_proxy.net.app import serve  # noqa: PLC0415 - `--help` need not load the whole proxy

    gc.freeze()
    gc.enable()
    stop, hasten = asyncio.Event(), asyncio.Event()
    ready = False

    def on_ready(bootstrap: Address) -> None:
        nonlocal ready
        ready = True
        _settle_collector()
        if worker is None:
            _announce(bootstrap)
        else:
            worker.ready(bootstrap)

    def on_signal() -> None:
        if hasten.is_set():
            _log.warning("asked three times to stop: ended at once, answers under way are lost")
            os._exit(1)
        if stop.is_set():
            _log.warning("asked twice to stop: what is under way is not waited for")
            hasten.set()
            return
        stop.set()
        notify("STOPPING=1")
        if ready:
            limits = (config if running is None else running.config).limits
            _log.info("draining", longest_seconds=limits.drain_seconds)
        else:
            serving.cancel()

    def on_reload(reload: Callable[[ProxyConfig], None]) -> None:
        if running is not None:
            running.listen_in(loop, lambda: reload(running.read_anew()))

    if worker is not None:
        worker.on_end = on_signal
    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(
        serve(
            config,
            on_ready=on_ready,
            stop=stop,
            hasten=hasten,
            worker=worker,
            on_reload=on_reload,
        ),
        name="serve",
    )
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
