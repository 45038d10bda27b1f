"""`fencepost check`: whether all of a configuration works here, before anybody depends on it."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from fencepost_proxy import logs
from fencepost_proxy.cli import proxy
from fencepost_proxy.cli.tables import printable
from fencepost_proxy.config import Refused
from fencepost_proxy.config.reading import Loaded
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.net.findings import Finding, State, failed, ok

_SECONDS: Final = 60.0
_WIDTH: Final = 110
CONFIGURATION: Final = "configuration"

_DESCRIPTION: Final = """\
Says whether a proxy with this configuration would work here, and what to do where it would not. It reads the files,
binds the listeners for a moment, connects to every server of `upstream` and to every broker that Kafka names (with TLS
and login as configured), and asks Kafka what it lets the proxy do. It changes nothing, and serves nobody.

exit code: 0 a proxy would work (there may be warnings); 1 something failed; 2 the configuration itself is wrong."""

_EXAMPLES: Final = """\
examples:
  fencepost check --config fencepost.toml
      all of it, with what to do for each failure

  fencepost check --config fencepost.toml --running
      of a proxy that runs already: its ports are taken, by itself

  fencepost check --upstream kafka-1:9092 --json
      for programs: {"result": "ok", "findings": [{"group": …, "what": …, "state": …, "said": …, "todo": …}]}

a list looks like this:
  Kafka
    ok       upstream kafka-1:9093   TLSv1.3, SASL SCRAM-SHA-512 as fencepost, cluster Ob4Y…
  what Kafka lets the proxy do
    FAILED   state topic __fencepost_state   is not there yet, and the proxy may not create it
             → kafka-acls --bootstrap-server kafka-1:9093 --command-config admin.properties --add …
"""
_WORDS: Final = {State.OK: "ok", State.UNKNOWN: "unknown", State.WARNING: "warning", State.FAILED: "FAILED"}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Adds `check` to the command; `run` takes what it parses."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "check",
        help="does this configuration work here, and may the proxy do what it needs",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    proxy.add_settings(parser)
    add = parser.add_argument
    add("--running", action="store_true", default=False, help="this very proxy runs, so its ports are to be taken")
    add(
        "--seconds", type=_seconds, default=_SECONDS, metavar="N", help=f"at most, for all of it (default {_SECONDS:g})"
    )
    add("--json", action="store_true", default=False, help="for programs, on stdout")
    parser.set_defaults(run=run)
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return seconds


def run(args: argparse.Namespace) -> int:
    try:
        loaded = proxy.read_config(args)
    except ConfigError as error:
        problems = error.problems if isinstance(error, Refused) else ()
        _tell(args, [failed(CONFIGURATION, each.key, str(each), "") for each in problems])
        return 2
    # What fails is told in the list, and not twice.
    logs.setup("error", stream=io.StringIO())
    from fencepost_proxy.net.checking import check  # noqa: PLC0415 - `--help` need not load what talks to Kafka

    try:
        with asyncio.Runner(loop_factory=proxy.loop_factory()) as runner:
            found = runner.run(check(loaded.config, seconds=args.seconds, running=args.running))
    except KeyboardInterrupt:
        print("fencepost check: given up", file=sys.stderr)
        return 130
    _tell(args, [_configured(loaded), *found])
    return 1 if any(each.state is State.FAILED for each in found) else 0


def _configured(loaded: Loaded) -> Finding:
    given = len(loaded.origins)
    said = f"{loaded.file or 'no file'}: valid, {given} key(s) given there, in the environment or on the command line"
    return ok(CONFIGURATION, "keys", said)


def _tell(args: argparse.Namespace, found: Sequence[Finding]) -> None:
    worst = any(each.state is State.FAILED for each in found)
    if args.json:
        rows = [
            {"group": each.group, "what": each.what, "state": each.state.value, "said": each.said, "todo": each.todo}
            for each in found
        ]
        print(json.dumps({"result": "failed" if worst else "ok", "findings": rows}, indent=2))
        return
    groups = list(dict.fromkeys(each.group for each in found))
    group = ""
    for each in sorted(found, key=lambda each: groups.index(each.group)):
        if each.group != group:
            group = each.group
            print(group)
        # Some of it comes from Kafka, or from a stranger at its address.
        for line in textwrap.wrap(
            printable(each.said if each.group == CONFIGURATION else f"{each.what}: {each.said}"),
            _WIDTH,
            initial_indent=f"  {_WORDS[each.state]:<9}",
            subsequent_indent=" " * 11,
            break_on_hyphens=False,
        ):
            print(line)
        if each.todo:
            # Commands stay on one line.
            print(f"{'':<11}→ {printable(each.todo)}")
    counts = Counter(each.state for each in found)
    told = ", ".join(f"{counts[state]} {_WORDS[state]}" for state in State if counts[state])
    print(f"\n{len(found)} checks: {told}")
