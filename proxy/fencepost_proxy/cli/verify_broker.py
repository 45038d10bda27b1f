"""`fencepost verify-broker`: tests whether a cluster behaves as the promises of the contract need."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final

from fencepost_proxy.cli.options import BOOTSTRAP_VARIABLE, COMMAND_CONFIG, Subparsers, add_command, seconds
from fencepost_proxy.cli.status_client import CannotQuery
from fencepost_proxy.cli.tables import printable
from fencepost_proxy.errors import ConfigError

if TYPE_CHECKING:
    from fencepost_proxy.preflight.verifying import Report

_SECONDS: Final = 90.0
_CONNECT_SECONDS: Final = 10.0
_WIDTH: Final = 110
#: Characters of a reason; `--json` has all.
_REASON_MAX: Final = 330

_DESCRIPTION: Final = """\
Test whether a cluster behaves as the promises of docs/contract.md need: run the conformance cases (docs/conformance.md)
against its brokers, and print a result for each promise.

The command creates topics `fencepost-verify-…`, one to three at a time, sends a few thousand small requests one after
the other, and deletes each topic after its case, also after Ctrl-C. It stops no broker and changes nothing else. Kafka
removes the transactional ids `fencepost-verify-…` itself, after transactional.id.expiration.ms.

The user needs all operations on these topics and transactional ids, and ALTER on the cluster to move a leader
and to write a marker.

exit code: 0 all promises hold; 1 one does not, or is unknown (but for claims); 2 the cluster cannot be reached."""

_EXAMPLES: Final = """\
examples:
  fencepost verify-broker --bootstrap-server kafka-1:9092
      test a cluster

  fencepost verify-broker --bootstrap-server kafka-1:9092 --command-config client.properties --json
      log in, and print {"promises": {"required": {"result": "holds", "reason": ""}, …}, "cases": […], …}

sample output:
  required      holds
  true          holds
  transactions  does not hold: A transactional batch for a partition not added gets 48
  Spark sink    holds
"""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the `verify-broker` command."""
    summary = "test whether a cluster behaves as the promises need"
    parser = add_command(subparsers, "verify-broker", run, summary, _DESCRIPTION, examples=_EXAMPLES)
    add = parser.add_argument
    add("--bootstrap-server", "--bootstrap", dest="bootstrap", metavar="HOST:PORT[,…]",
        help=f"brokers to test (--bootstrap: the same; default: {BOOTSTRAP_VARIABLE})")  # fmt: skip
    add("--command-config", **COMMAND_CONFIG)
    add("--timeout", type=seconds, default=_SECONDS, metavar="SECONDS", help="start no request of a case later "
        f"(default {_SECONDS:g}); the rest is reported as not tested")  # fmt: skip
    add("--json", action="store_true", default=False, help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Raises `ConfigError`, `CannotQuery` or `NotDeleted`."""
    args.bootstrap = args.bootstrap or os.environ.get(BOOTSTRAP_VARIABLE)
    if not args.bootstrap:
        raise ConfigError("no cluster given: use --bootstrap-server HOST:PORT (brokers)")
    from fencepost_proxy.cli.connecting import reason_of, require_connection  # noqa: PLC0415 - keeps `--help` fast
    from fencepost_proxy.cli.options import client_config  # noqa: PLC0415
    from fencepost_proxy.cluster.broker import UpstreamUnavailable  # noqa: PLC0415
    from fencepost_proxy.preflight.conformance.cluster import AnyKafka  # noqa: PLC0415
    from fencepost_proxy.preflight.verifying import as_json, verify  # noqa: PLC0415

    config = client_config(args)
    require_connection(config, _CONNECT_SECONDS)
    try:
        with _like_ctrl_c(signal.SIGTERM), closing(AnyKafka(config)) as kafka:
            report = verify(kafka, seconds=args.timeout)
    except UpstreamUnavailable as error:
        raise CannotQuery(f"cannot query {reason_of(error)}") from None
    if args.json:
        print(json.dumps(as_json(report), indent=2, ensure_ascii=False))
    else:
        _print(report)
    if report.left:
        print(f"fencepost: {printable(report.left)} (delete it yourself)", file=sys.stderr)
    return 0 if report.holds else 1


@contextmanager
def _like_ctrl_c(number: signal.Signals) -> Iterator[None]:
    """The topics of the case are deleted before the command ends."""
    before = signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(number, before)


def _print(report: Report) -> None:
    from fencepost_proxy.preflight.conformance.case import Promise  # noqa: PLC0415 - keeps `--help` fast
    from fencepost_proxy.preflight.verifying import Outcome, Status, not_tested  # noqa: PLC0415

    cluster = report.cluster
    release = "release unknown" if cluster.release is None else f"features of Kafka {cluster.release}"
    stated = f"cluster {cluster.cluster_id}, {cluster.brokers} broker(s), {release}"
    print(printable(f"{stated}: {len(report.results)} cases in {report.seconds:.0f} s"))
    print()
    for promise in Promise:
        status, reason = report.status(promise)
        because = f" ({reason})" if status is Status.HOLDS else f": {reason}"
        _wrapped(f"{promise.value:<14}", f"{status.value}{because if reason else ''}")
    _wrapped(f"{'not tested':<14}", "; ".join(not_tested()))
    for outcome in (Outcome.DIFFERS, Outcome.UNKNOWN, Outcome.ABSENT, Outcome.HOLDS):
        its = [each for each in report.results if each.outcome is outcome and each.reason]
        if its:
            print(f"\n{outcome.value}")
        for each in its:
            harmless = "" if each.case.promises else " (the proxy allows for it)"
            _wrapped("  ", f"{each.case.fact}{harmless}")
            _wrapped("      ", textwrap.shorten(each.reason, _REASON_MAX, placeholder=" …"))
            if each.where:
                _wrapped("      ", each.where)


def _wrapped(first: str, text: str) -> None:
    rest = " " * len(first)
    lines = textwrap.wrap(printable(text), _WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    print("\n".join(lines))
