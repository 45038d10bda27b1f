"""`fencepost proxy`: runs the proxy in front of an existing Kafka."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from fencepost_proxy import logs
from fencepost_proxy.cli.options import COMMAND_CONFIG, Subparsers, add_command
from fencepost_proxy.cli.reloading import Running
from fencepost_proxy.cli.service_manager import notify
from fencepost_proxy.config import Limits, LogFormat, LogLevel, Mode, ProxyConfig, RefusalScope
from fencepost_proxy.config.keys import SHOWN
from fencepost_proxy.config.reading import FILE_VARIABLE, REMOVED, Loaded, read
from fencepost_proxy.errors import ConfigError, FencepostError
from fencepost_proxy.types import Address

_log = logs.get("cli")
Result = TypeVar("Result")

#: Collections of the middle generation per full collection; Python's default is 10. About 210,000 new objects: 5,000
#: closed connections, 14 MB.
_FULL_COLLECTION_EVERY: Final = 30

_DESCRIPTION: Final = """\
Run the proxy in front of an existing Kafka. Clients use --listen as their bootstrap server. The proxy opens one
listener per broker (bootstrap port + 1 + broker id), and clients never see Kafka's own addresses.

When clients can connect, the command prints one line on stdout:  ready bootstrap=HOST:PORT
Logs go to stderr.

SIGTERM or Ctrl-C drains for up to limits.drain_seconds and exits with 0. A second signal stops without waiting for
requests in progress. A third exits immediately with 1.
SIGHUP reloads the configuration, certificates and keys, and logs what changed and what needs a restart
(docs/configuration.md). Certificates are also reloaded when their files change."""

_EXAMPLES: Final = """\
examples:
  fencepost proxy --bootstrap-server localhost:9092 --listen localhost:19092
      proxy one local broker; clients use localhost:19092 as their bootstrap server

  fencepost proxy --bootstrap-server kafka-1:9092,kafka-2:9092 --listen 0.0.0.0:19092 \\
      --advertised-host kafka.example.com --status 127.0.0.1:8080
      advertise kafka.example.com to clients; serve status page and metrics on port 8080

  fencepost proxy --bootstrap-server kafka-1:9093 --command-config client.properties
      connect with the TLS and SASL settings of a Java client

  fencepost proxy --config fencepost.toml
      read a config file; environment variables override it, and options override both

  FENCEPOST_LIMITS__DRAIN_SECONDS=30 fencepost proxy --config fencepost.toml
      set any key in the environment; write a dot as two underscores

  fencepost check --config fencepost.toml
      check the configuration first

config file:
  upstream = ["kafka-1:9092", "kafka-2:9092"]
  listen = "0.0.0.0:19092"

  [topics."orders-*"]                     # default topic configs; the first matching glob applies
  "fencepost.check.expected.offsets" = "required"

  [limits]                                # fencepost config explain lists all keys
  connections_max = 500
"""


class _ListLimits(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for key in SHOWN:
            if key.table == "limits":
                print(f"{key.field_name} = {key.default}\n    {key.doc}")
        parser.exit()


class _Removed(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(f"{self.option_strings[0]} {REMOVED[self.dest]}")


def add_parser(subparsers: Subparsers) -> None:
    """Adds the `proxy` command."""
    summary = "run the proxy in front of an existing Kafka"
    parser = add_command(subparsers, "proxy", run, summary, _DESCRIPTION, examples=_EXAMPLES)
    add_settings(parser)
    parser.add_argument("--list-limits", action=_ListLimits, nargs=0, help="print every limit with its default and "
        "meaning, and exit (`fencepost config explain` prints all keys)")  # fmt: skip
    parser.add_argument("--workers", action=_Removed, help=argparse.SUPPRESS)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the options that set configuration keys; the key table names each one (`option=`)."""
    # Options that were not given must not override the file.
    parser.argument_default = argparse.SUPPRESS
    add = parser.add_argument
    add("--bootstrap-server", "--upstream", metavar="HOST:PORT[,…]", help="Kafka bootstrap servers; one that responds "
        "is enough (--upstream: the same)")  # fmt: skip
    add("--command-config", **COMMAND_CONFIG)
    add("--mode", choices=get_args(Mode), help="gateway: in front of all brokers (default); sidecar: in front of one "
        "broker that advertises the sidecar's address")  # fmt: skip
    add("--broker", metavar="HOST:PORT", help="sidecar only: listener of its broker; --bootstrap-server then names a "
        "listener that clients do not use")  # fmt: skip
    add("--listen", metavar="HOST:PORT", help="bootstrap address for clients (default 127.0.0.1:19092; port 0: any)")
    add("--config", metavar="FILE.toml", type=Path, help="config file (default: the value of FENCEPOST_CONFIG)")
    add("--advertised-host", metavar="HOST", help="host to advertise to clients (default: the host they connected to)")
    add("--refusal-scope", choices=get_args(RefusalScope), help="what one mismatch refuses: its partition (default) or "
        "the whole request, as KIP-27 specifies")  # fmt: skip
    add("--status", metavar="HOST:PORT", help="address of status page, /metrics, /livez and /readyz (default: off)")
    add("--log-level", choices=get_args(LogLevel), help="lowest level to log (default info)")
    add("--log-format", choices=get_args(LogFormat), help="key=value lines (default) or JSON, on stderr")


def read_config(args: argparse.Namespace) -> Loaded:
    """Reads file, client properties, environment and command line; the last one wins. Raises `ConfigError`."""
    given: dict[str, Any] = {}
    for key in SHOWN:
        name = (key.option or "").removeprefix("--").replace("-", "_")
        if name and hasattr(args, name):
            holder = given.setdefault(key.table, {}) if key.table else given
            holder[key.field_name] = getattr(args, name)
    named = os.environ.get(FILE_VARIABLE)
    file = getattr(args, "config", None) or (Path(named) if named else None)
    return read(file, given, environment=os.environ, command_config=getattr(args, "command_config", None))


def run(args: argparse.Namespace) -> int:
    """Serves until a signal. Returns 1 after a failure while running. Raises `ConfigError`."""
    loaded = read_config(args)
    config = loaded.config
    running = Running(config, lambda: read_config(args))
    running.listen()
    logs.setup(config.log.level, config.log.format)
    if loaded.ignored:
        _log.debug("client properties ignored", file=args.command_config, properties=", ".join(loaded.ignored))
    return run_in_loop(_serve(config, running))


def run_in_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """With uvloop, where there is one."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - not available on every platform
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _tune_garbage_collector() -> None:
    """Exempts the objects of the start from collection, and makes full collections rare.

    Closed connections and rewritten responses leave cyclic garbage; relayed bytes leave none. A full collection visits
    every object: with 10,000 checked partitions and 3,000 connections it blocked the event loop for 0.2 s.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_COLLECTION_EVERY)


class _StopSignals:
    """The first one drains, the second does not wait for requests in progress, and the third exits immediately.

    Before the proxy is ready, the first one cancels the start.
    """

    def __init__(
        self, serving: asyncio.Task[None], stop: asyncio.Event, force: asyncio.Event, limits: Callable[[], Limits]
    ) -> None:
        self._serving, self._stop, self._force, self._limits = serving, stop, force, limits
        self.ready = False

    def receive(self) -> None:
        if self._force.is_set():
            _log.warning("third stop signal: exiting immediately, responses in progress are lost")
            os._exit(1)
        if self._stop.is_set():
            _log.warning("second stop signal: not waiting for requests in progress")
            self._force.set()
            return
        self._stop.set()
        notify("STOPPING=1")
        if self.ready:
            _log.info("draining", longest_seconds=self._limits().drain_seconds)
        else:
            self._serving.cancel()


async def _serve(config: ProxyConfig, running: Running) -> int:
    # Imports create 30,000 permanent objects; `gc.freeze` exempts them from every later collection.
    gc.disable()
    from fencepost_proxy.server import serve  # noqa: PLC0415 - keeps `--help` fast

    gc.freeze()
    gc.enable()

    def on_ready(bootstrap: Address) -> None:
        signals.ready = True
        _tune_garbage_collector()
        print(f"ready bootstrap={bootstrap}", flush=True)
        notify(f"READY=1\nSTATUS=serving clients at {bootstrap}")

    stop, force = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(
        serve(config, on_ready=on_ready, stop=stop, force=force, on_reload=running.listen_with), name="serve"
    )
    signals = _StopSignals(serving, stop, force, lambda: running.config.limits)
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, signals.receive)
    try:
        await serving
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    except ConfigError:
        raise
    except FencepostError as e:
        print(f"fencepost proxy: {e}", file=sys.stderr)
        return 1
    return 0
