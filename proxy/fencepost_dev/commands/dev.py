"""`fencepost dev`: runs Kafka and the proxy in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Final

from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.errors import ClusterError
from fencepost_dev.jars import DEFAULT_VERSION, RELEASES
from fencepost_dev.security import LISTENER, LISTENERS, Secured
from fencepost_proxy import logs
from fencepost_proxy.cli.options import DEV_BOOTSTRAP
from fencepost_proxy.cli.proxy import loop_factory
from fencepost_proxy.cli.status_client import STATUS_DEFAULT
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.config.reading import read
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.transport.listeners import bind
from fencepost_proxy.types import Address

DEFAULT_LISTEN: Final = Address.parse(DEV_BOOTSTRAP)
#: Loggers that warn of new clusters and of topics with few replicas.
_DURABILITY: Final = ("fencepost.services.topic_warnings", "fencepost.cluster.state_topic_settings")
_WATCH_SECONDS: Final = 1.0
#: `--secure` without a directory.
TEMPORARY: Final = Path()

_DESCRIPTION: Final = """\
Run a real Kafka (KRaft) and the proxy on this machine, in the foreground. The Kafka jars are downloaded once, verified
by hash and cached. Needs JDK 17 or newer (JAVA_HOME, else PATH).

When clients can connect, the command prints one line on stdout:
  ready bootstrap=HOST:PORT kafka=HOST:PORT[,HOST:PORT...] status=HOST:PORT
bootstrap= is the proxy, kafka= the brokers, status= the status page. Progress and logs go to stderr.
Ctrl-C or SIGTERM stops everything; the exit code is 0.

With --secure, proxy and brokers have TLS, logins (SASL/PLAIN) and ACLs, and the line ends with files=DIR, which has:
  ca.pem                                             the CA of all certificates
  admin.properties, app.properties, other.properties client.properties of a super user, of a user with rights on names
                                                     that begin with app-, and of a user without rights
  fencepost.toml                                     the proxy's configuration
On one machine, ACLs cannot distinguish the proxy from other clients: all have one address."""

_EXAMPLES: Final = """\
examples:
  fencepost dev
      run one broker; clients connect to 127.0.0.1:19092; all data is deleted at the end

  fencepost dev --brokers 3 --data ./data
      run three brokers; a later run with the same --data has the same topics and records

  fencepost dev --secure ./secure
      the same with TLS, logins and ACLs; try, in another terminal:
        fencepost kafka-topics --command-config secure/admin.properties --create --topic app-orders
        fencepost kafka-configs --command-config secure/admin.properties --alter --topic app-orders \\
            --add-config fencepost.check.expected.offsets=required
        fencepost append --command-config secure/app.properties app-orders first --expect 0
        fencepost append --command-config secure/other.properties app-orders second --expect 1
        fencepost check --config secure/fencepost.toml --running

  fencepost dev --listen 127.0.0.1:0 --kafka-version 3.9.2
      run an older Kafka; the proxy listens on any free port (read it from the ready line)

try it in another terminal:
  fencepost kafka-topics --create --topic orders
  fencepost kafka-configs --alter --topic orders --add-config fencepost.check.expected.offsets=required
  fencepost append orders first --expect 0
  fencepost read orders
  fencepost status

environment:
  FENCEPOST_CACHE       directory of the jars (default ~/.cache/fencepost)
  FENCEPOST_MAVEN_URL   Maven repository to download them from
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "dev",
        help="run Kafka and the proxy on this machine, for development",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--brokers", type=_count, default=1, metavar="N", help="number of Kafka brokers (default 1)")
    add("--listen", type=_address, default=DEFAULT_LISTEN, metavar="HOST:PORT",
        help=f"bootstrap address of the proxy (default {DEFAULT_LISTEN}; port 0: any free port)")  # fmt: skip
    add("--status", type=_address, metavar="HOST:PORT",
        help=f"status page (default {STATUS_DEFAULT}, or any free port if that one is in use)")  # fmt: skip
    add("--data", type=Path, metavar="DIR", help="keep Kafka's data in DIR (default: a temporary directory)")
    add(
        "--secure",
        type=Path,
        nargs="?",
        const=TEMPORARY,
        metavar="DIR",
        help="switch on TLS, logins and ACLs, and write the clients' files to DIR (default: a temporary directory)",
    )
    add("--kafka-version", choices=sorted(RELEASES), default=DEFAULT_VERSION, metavar="V",
        help=f"one of {', '.join(RELEASES)} (default {DEFAULT_VERSION})")  # fmt: skip
    parser.set_defaults(run=run)
    return parser


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 9")
    return int(text)


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Runs until a signal. Raises `FencepostError` if a prerequisite or an option is wrong."""
    # Before the event loop handles signals, SIGTERM must clean up as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    bind(args.listen, "clients").close()  # report a used port before Kafka starts
    status = status_address(args.status)
    with ExitStack() as stack:
        secured = None if args.secure is None else _secured(args.secure, stack)
        return _run(args, status, secured)


def _run(args: argparse.Namespace, status: Address, secured: Secured | None) -> int:
    properties, listeners = ({}, None) if secured is None else (secured.server_properties(), LISTENERS)
    cluster = KafkaCluster(
        args.brokers, version=args.kafka_version, data=args.data, properties=properties, listeners=listeners
    )
    try:
        cluster.start()
        if secured is None:
            upstream = tuple(map(cluster.address, cluster.node_ids))
            config = ProxyConfig(upstream=upstream, listen=args.listen, status=status)
        else:
            brokers = cluster.bootstrap_of(LISTENER)
            secured.create_acls(brokers)
            secured.write_config(brokers, str(args.listen), str(status))
            config = read(secured.config_file).config
        logs.setup(config.log.level, config.log.format)
        for each in _DURABILITY:
            logging.getLogger(each).setLevel(logging.ERROR)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(config, cluster, secured))
    except KeyboardInterrupt:
        pass
    finally:
        cluster.stop()
    return 0


def _secured(directory: Path, stack: ExitStack) -> Secured:
    if directory == TEMPORARY:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="fencepost-secure-")))
    else:
        directory = directory.resolve()
        directory.mkdir(0o700, parents=True, exist_ok=True)
    secured = Secured(directory)
    secured.write()
    return secured


def status_address(given: Address | None) -> Address:
    """Where the status page listens. Raises `ConfigError` if a given port is in use."""
    try:
        listener = bind(given or STATUS_DEFAULT, "the status page")
    except ConfigError:
        if given is not None:
            raise
        listener = bind(STATUS_DEFAULT._replace(port=0), "the status page")
    with listener:
        return Address(*listener.getsockname()[:2])


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


async def _serve(config: ProxyConfig, cluster: KafkaCluster, secured: Secured | None) -> None:
    from fencepost_proxy.server import serve  # noqa: PLC0415 - keeps `--help` fast

    def print_ready(bootstrap: Address) -> None:
        brokers, files = cluster.bootstrap, ""
        if secured is not None:
            brokers, files = cluster.bootstrap_of(LISTENER), f" files={secured.directory}"
            # The port is known now, if it was 0.
            secured.write_config(brokers, str(bootstrap), str(config.status))
        print(f"ready bootstrap={bootstrap} kafka={brokers} status={config.status}{files}", flush=True)

    serving = asyncio.create_task(serve(config, on_ready=print_ready), name="serve")
    watching = asyncio.create_task(_watch(cluster), name="watch brokers")
    stopping = asyncio.Event()
    queried = asyncio.create_task(stopping.wait(), name="wait for a signal")
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stopping.set)
    done, rest = await asyncio.wait({serving, watching, queried}, return_when=asyncio.FIRST_COMPLETED)
    print("stopping", file=sys.stderr)
    # The proxy stops before the brokers, so that clients see no broker failure.
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    for task in done:
        try:
            task.result()
        except OSError as error:
            raise ConfigError(f"cannot listen on {config.listen}: {error.strerror or error} (--listen)") from error


async def _watch(cluster: KafkaCluster) -> None:
    """Raises `ClusterError` when a broker process has exited."""
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        for node_id in cluster.node_ids:
            if not cluster.running(node_id):
                cluster.keep_data()
                raise ClusterError(f"broker {node_id} exited unexpectedly (see {cluster.log_file(node_id)})")
