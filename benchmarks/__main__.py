"""`python -m benchmarks` (`make bench`): start all services, measure, write the result. See docs/performance.md."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import importlib.util
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from benchmarks import chart, machine, routes
from benchmarks.results import FLOOR, HAPROXY, Report, Row, is_product, published, with_goals
from benchmarks.routes import PeersError, StartError
from benchmarks.stage import FULL, QUICK, Plan, Run, Stage, say
from benchmarks.workloads import WORKLOADS, settings_of
from fencepost_dev.errors import DevError
from fencepost_dev.jars import DEFAULT_VERSION

_HERE = Path(__file__).parent
RESULTS = _HERE / "results"
PEERS = _HERE / "peers.toml"
PAGE = _HERE.parent / "docs" / "performance.md"
#: Modules of this package that add rows: `def rows(run: Run) -> list[Row]`.
CONTRIBUTORS = ("scaling",)
_KAFKA_PORT_FOR_GIVEN_ROUTES = 29_092

_EPILOG = """
workloads: {workloads}

examples:
  python -m benchmarks --quick
  python -m benchmarks --only 'produce*' --only consume
  python -m benchmarks --route mine=127.0.0.1:19092
      a running proxy; it must forward to port 29092, where this run starts Kafka (--kafka-port)
  python -m benchmarks --tcp-route lb=127.0.0.1:19092
      a running TCP proxy; it must forward to port 29093, where Kafka advertises 127.0.0.1:19092
"""


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure Kafka directly and through the product, HAProxy and other proxies, in one run.",
        epilog=_EPILOG.format(workloads=", ".join([*WORKLOADS, *CONTRIBUTORS])),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run for minutes instead of a quarter of an hour; too short for published figures",
    )
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", default=[], help="run workloads with a matching name only"
    )
    parser.add_argument(
        "--routes",
        metavar="PATTERN[,…]",
        default="*",
        help="run routes with a matching name only; direct and the product always run",
    )
    parser.add_argument(
        "--route", action="append", metavar="NAME=HOST:PORT", default=[], help="add a running proxy as a route"
    )
    parser.add_argument(
        "--tcp-route", action="append", metavar="NAME=HOST:PORT", default=[], help="add a running TCP proxy as a route"
    )
    parser.add_argument("--kafka-port", type=int, help="set the port of Kafka (default: a free port)")
    parser.add_argument("--rounds", type=int, help="set the number of repetitions")
    parser.add_argument("--peers", type=Path, default=PEERS, metavar="FILE.toml")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    parser.add_argument(
        "--publish", type=Path, metavar="RESULT.json", help="write an earlier result into docs/ without measuring"
    )
    return parser


def main() -> int:
    parser = command_parser()
    options = parser.parse_args()
    if options.publish is not None:
        report = Report.from_json(options.publish.read_text("utf-8"))
        if report.busy:
            parser.error(f"{options.publish} is not published: {report.busy}")
        publish(report, PAGE)
        return 0
    chosen = chosen_workloads(options.only, quick=options.quick)
    if not chosen:
        parser.error(f"no workload matches {options.only} (choose from {', '.join([*WORKLOADS, *CONTRIBUTORS])})")
    signal.signal(signal.SIGTERM, _interrupt)
    plan = QUICK if options.quick else FULL
    if options.rounds:
        plan = plan.with_rounds(options.rounds)
    try:
        peers = _peers(options)
        report = _measure(plan, chosen, peers, options)
    except (PeersError, StartError, DevError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted; all started processes are stopped", file=sys.stderr)
        return 130
    written = write(report, options.results)
    print(report.to_markdown())
    say(f"written to {written}, with the JSON next to it")
    return 1 if report.failures else 0


def chosen_workloads(only: list[str], *, quick: bool) -> list[str]:
    """Workloads that match `--only`, else all. A quick run skips the contributors, which always take minutes."""
    if not only and quick:
        return list(WORKLOADS)
    return [name for name in (*WORKLOADS, *CONTRIBUTORS) if _matches(name, only or ["*"])]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)


def _peers(options: argparse.Namespace) -> list[routes.Peer]:
    text = options.peers.read_text("utf-8") if options.peers.exists() else ""
    found = [routes.haproxy(), routes.floor(), *routes.read_peers(text)]
    found += [routes.absent(name) for name in routes.KNOWN_PEERS if name not in [peer.name for peer in found]]
    found = [peer for peer in found if _matches(peer.name, options.routes.split(","))]
    found += [routes.given_route(text, rewrites=True) for text in options.route]
    found += [routes.given_route(text, rewrites=False) for text in options.tcp_route]
    return [routes.product(), *found]


def _measure(plan: Plan, chosen: list[str], peers: list[routes.Peer], options: argparse.Namespace) -> Report:
    began = time.monotonic()
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    facts = machine.facts()
    busy = machine.busy()
    if busy:
        say(f"{busy}: the figures will be wrong, and --publish will refuse them")
    kafka_port = options.kafka_port
    if kafka_port is None and (options.route or options.tcp_route):
        kafka_port = _KAFKA_PORT_FOR_GIVEN_ROUTES
    rows: list[Row] = []
    failures: list[str] = []
    with Stage(plan, peers, kafka_port=kafka_port) as run:
        versions = {"Kafka": DEFAULT_VERSION, **machine.versions()}
        versions |= {route.name: route.version() for route in run.routes if route.version()}
        for name in chosen:
            workload = WORKLOADS.get(name) or _contributor(name)
            if workload is None:
                continue
            started = time.monotonic()
            try:
                # Standard output is for the result only.
                with contextlib.redirect_stdout(sys.stderr):
                    rows += workload(run)
            except Exception as error:  # the result reports it, and the others run
                failures.append(f"{name}: {str(error).partition(chr(10))[0]}")
                traceback.print_exc()
            say(f"{name}: {time.monotonic() - started:.0f} s")
        others = [
            route.name
            for route in run.routes
            if route is not run.direct and route.name not in (HAPROXY, FLOOR) and not is_product(route.name)
        ]
        missing = dict(run.missing)
    if plan.quick:
        missing |= {name: f"not part of a quick run; --only {name}" for name in CONTRIBUTORS if name not in chosen}
    facts["duration"] = f"{(time.monotonic() - began) / 60:.1f} min"
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    return Report(
        when,
        command,
        machine.commit(),
        facts,
        versions,
        settings_of(plan),
        missing,
        tuple(with_goals(rows, others)),
        tuple(failures),
        busy,
    )


def _contributor(name: str) -> Callable[[Run], list[Row]] | None:
    if importlib.util.find_spec(f"benchmarks.{name}") is None:
        return None
    found: Callable[[Run], list[Row]] = importlib.import_module(f"benchmarks.{name}").rows
    return found


def write(report: Report, directory: Path) -> Path:
    """Write the result as Markdown and JSON. Returns the Markdown file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{report.stem}.json").write_text(report.to_json(), "utf-8")
    path = directory / f"{report.stem}.md"
    path.write_text(report.to_markdown(), "utf-8")
    return path


def publish(report: Report, page: Path) -> None:
    """Write the summary of a run into the page, and its chart next to it."""
    page.write_text(published(page.read_text("utf-8"), report), "utf-8")
    page.with_suffix(".svg").write_text(chart.svg(report), "utf-8")
    say(f"written into {page}, with the chart next to it")


if __name__ == "__main__":
    sys.exit(main())
