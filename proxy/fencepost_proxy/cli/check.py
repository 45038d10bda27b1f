"""`fencepost check`: tests a configuration against the real files, ports, servers and ACLs."""

from __future__ import annotations

import argparse
import io
import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from fencepost_proxy import logs
from fencepost_proxy.cli import proxy
from fencepost_proxy.cli.options import Subparsers, add_command, seconds
from fencepost_proxy.cli.tables import printable
from fencepost_proxy.config import Refused
from fencepost_proxy.config.reading import Loaded
from fencepost_proxy.preflight.findings import Finding, Group, State

_SECONDS: Final = 60.0
_WIDTH: Final = 110
CONFIGURATION: Final = Group("configuration")

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


def add_parser(subparsers: Subparsers) -> None:
    """Adds the `check` command."""
    summary = "check a configuration: files, ports, connectivity, ACLs"
    parser = add_command(subparsers, "check", run, summary, _DESCRIPTION, examples=_EXAMPLES)
    proxy.add_settings(parser)
    add = parser.add_argument
    add("--running", action="store_true", default=False, help="expect this proxy's ports to be in use by it")
    add("--timeout", "--seconds", type=seconds, default=_SECONDS, metavar="SECONDS", help="limit the whole check "
        f"(default {_SECONDS:g}; --seconds: the same)")  # fmt: skip
    add("--json", action="store_true", default=False, help="print JSON")


def run(args: argparse.Namespace) -> int:
    try:
        loaded = proxy.read_config(args)
    except Refused as refused:
        _report(args, [CONFIGURATION.failed(each.key, str(each)) for each in refused.problems])
        return 2
    # The list reports failures; log lines would repeat them.
    logs.setup("error", stream=io.StringIO())
    from fencepost_proxy.preflight.checking import check  # noqa: PLC0415 - keeps `--help` fast

    found = proxy.run_in_loop(check(loaded.config, seconds=args.timeout, running=args.running))
    _report(args, [_configured(loaded), *found])
    return 1 if any(each.state is State.FAILED for each in found) else 0


def _configured(loaded: Loaded) -> Finding:
    given = len(loaded.origins)
    stated = f"{loaded.file or 'no file'}: valid, {given} key(s) set in file, environment or command line"
    return CONFIGURATION.ok("keys", stated)


def _report(args: argparse.Namespace, found: Sequence[Finding]) -> None:
    worst = any(each.state is State.FAILED for each in found)
    if args.json:
        print(json.dumps({"result": "failed" if worst else "ok", "findings": list(map(asdict, found))}, indent=2))
        return
    by_group: dict[str, list[Finding]] = {}
    for each in found:
        by_group.setdefault(each.group, []).append(each)
    for group, its in by_group.items():
        print(group)
        for each in its:
            _print(each)
    counts = Counter(each.state for each in found)
    reported = ", ".join(f"{counts[state]} {_WORDS[state]}" for state in State if counts[state])
    print(f"\n{len(found)} checks: {reported}")


def _print(each: Finding) -> None:
    # The text may come from a peer.
    stated = printable(each.reported if each.group == CONFIGURATION.name else f"{each.what}: {each.reported}")
    first, rest = f"  {_WORDS[each.state]:<9}", " " * 11
    for line in textwrap.wrap(stated, _WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False):
        print(line)
    if each.todo:
        # Not wrapped, so that a command can be copied.
        print(f"{rest}→ {printable(each.todo)}")
