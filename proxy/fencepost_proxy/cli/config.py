"""`fencepost config`: reference of all keys, and their effective values."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from fencepost_proxy.cli import proxy
from fencepost_proxy.config import reference

_DESCRIPTION: Final = """\
Explain configuration keys, or show their effective values.

Every key can be set in a TOML file (--config) or in the environment: limits.drain_seconds is
FENCEPOST_LIMITS__DRAIN_SECONDS. Some keys are also options of `fencepost proxy`.
Precedence: command line, environment, --command-config, file, default."""

_EXAMPLES: Final = """\
examples:
  fencepost config explain                          list every key with default and type
  fencepost config explain limits.drain_seconds     explain one key, table ([limits]) or topic config
  fencepost config explain --toml > fencepost.toml  write a template with every key commented out
  fencepost config show --config fencepost.toml     show effective values and their sources
  fencepost config show --changed                   show only values that differ from the default
"""

_EXPLAIN_EXAMPLES: Final = """\
examples:
  fencepost config explain
  fencepost config explain listen limits.frame_bytes_max
  fencepost config explain listen_tls
  fencepost config explain fencepost.check.expected.offsets
  fencepost config explain --toml > fencepost.toml
"""

_SHOW_EXAMPLES: Final = """\
examples:
  fencepost config show --config fencepost.toml
  FENCEPOST_LOG__LEVEL=debug fencepost config show --config fencepost.toml --changed
      print a valid config file; a comment on each line names the source of the value

Paths of password and key files are printed; their content is not. Exit code 2: the configuration is invalid.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Adds the `config` command and its subcommands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "config",
        help="explain configuration keys, or show effective values",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    explain = commands.add_parser(
        "explain",
        help="explain keys: meaning, type, unit, default",
        description="Explain keys: meaning, type, unit, default, environment variable, and whether SIGHUP applies it.",
        epilog=_EXPLAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument("key", metavar="KEY", nargs="*", help="key, table or topic config (default: list all)")
    explain.add_argument("--toml", action="store_true", help="print a config file template with every key")
    explain.set_defaults(run=_explain)

    show = commands.add_parser(
        "show",
        help="show effective values and their sources",
        description="Show the values that `fencepost proxy` would use with these options and this environment.",
        epilog=_SHOW_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    proxy.add_settings(show)
    show.add_argument("--changed", action="store_true", default=False, help="omit values that equal the default")
    show.add_argument("--json", action="store_true", default=False, help="print JSON")
    show.set_defaults(run=_show)
    return parser


def _explain(args: argparse.Namespace) -> int:
    if args.toml:
        if args.key:
            print("fencepost config explain: --toml takes no KEY (it prints all keys)", file=sys.stderr)
            return 2
        print(reference.example_file(), end="")
        return 0
    if not args.key:
        print(reference.list_keys())
        return 0
    try:
        print("\n\n".join(reference.explain(each) for each in args.key))
    except reference.NoSuchKey as error:
        print(f"fencepost config explain: {error}", file=sys.stderr)
        return 2
    return 0


def _show(args: argparse.Namespace) -> int:
    loaded = proxy.read_config(args)
    print(
        reference.as_json(loaded, changed=args.changed) if args.json else reference.show(loaded, changed=args.changed)
    )
    return 0
