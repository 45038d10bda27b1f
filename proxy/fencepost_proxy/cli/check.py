"""`fencepost check`: tests a configuration against the real files, ports, servers and ACLs."""

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
from fencepost_proxy.preflight.findings import Finding, State, failed, ok

_SECONDS: Final = 60.0
_WIDTH: Final = 110
CONFIGURATION: Final = "configuration"

_DESCRIPTION: Final = """\
Check that a proxy with this configuration would work on this machine, and print a fix for each failure.

The command reads the files, binds each listener briefly, connects to every server in `upstream` and to every broker
that Kafka reports (with the configured TLS and SASL), and checks the proxy's ACLs. It changes nothing and accepts no
client.

exit code: 0 all checks passed (there may be warnings); 1 a check failed; 2 the configuration is invalid."""

_EXAMPLES: Final = """\
examples:
  fencepost check --config fencepost.toml
      run all checks

  fencepost check --config fencepost.toml --running
      check while this proxy runs: its own ports being in use is not a failure

  fencepost check --bootstrap-server kafka-1:9092 --json
      print {"result": "ok", "findings": [{"group": …, "what": …, "state": …, "reported": …, "todo": …}]}

sample output:
  Kafka
    ok       upstream kafka-1:9093: TLSv1.3, SASL SCRAM-SHA-512 as fencepost, cluster Ob4Y…
    FAILED   …
             → kafka-acls --bootstrap-server kafka-1:9093 --command-config admin.properties --add …
"""
_WORDS: Final = {State.OK: "ok", State.UNKNOWN: "unknown", State.WARNING: "warning", State.FAILED: "FAILED"}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Adds the `check` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "check",
        help="check a configuration: files, ports, connectivity, ACLs",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    proxy.add_settings(parser)
    add = parser.add_argument
    add("--running", action="store_true", default=False, help="expect this proxy's ports to be in use by it")
    add("--seconds", type=_seconds, default=_SECONDS, metavar="N", help=f"limit the whole check (default {_SECONDS:g})")
    add("--json", action="store_true", default=False, help="print JSON")
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
        _report(args, [failed(CONFIGURATION, each.key, str(each), "") for each in problems])
        return 2
    # The list reports failures; log lines would repeat them.
    logs.setup("error", stream=io.StringIO())
    from fencepost_proxy.preflight.checking import check  # noqa: PLC0415 - keeps `--help` fast

    try:
        with asyncio.Runner(loop_factory=proxy.loop_factory()) as runner:
            found = runner.run(check(loaded.config, seconds=args.seconds, running=args.running))
    except KeyboardInterrupt:
        print("fencepost check: interrupted", file=sys.stderr)
        return 130
    _report(args, [_configured(loaded), *found])
    return 1 if any(each.state is State.FAILED for each in found) else 0


def _configured(loaded: Loaded) -> Finding:
    given = len(loaded.origins)
    stated = f"{loaded.file or 'no file'}: valid, {given} key(s) set in file, environment or command line"
    return ok(CONFIGURATION, "keys", stated)


def _report(args: argparse.Namespace, found: Sequence[Finding]) -> None:
    worst = any(each.state is State.FAILED for each in found)
    if args.json:
        rows = [
            {
                "group": each.group,
                "what": each.what,
                "state": each.state.value,
                "reported": each.stated,
                "todo": each.todo,
            }
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
        # The text may come from a peer.
        for line in textwrap.wrap(
            printable(each.stated if each.group == CONFIGURATION else f"{each.what}: {each.stated}"),
            _WIDTH,
            initial_indent=f"  {_WORDS[each.state]:<9}",
            subsequent_indent=" " * 11,
            break_on_hyphens=False,
        ):
            print(line)
        if each.todo:
            # Not wrapped, so that a command can be copied.
            print(f"{'':<11}→ {printable(each.todo)}")
    counts = Counter(each.state for each in found)
    reported = ", ".join(f"{counts[state]} {_WORDS[state]}" for state in State if counts[state])
    print(f"\n{len(found)} checks: {reported}")
