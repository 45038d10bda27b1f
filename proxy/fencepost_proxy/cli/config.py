"""`fencepost config`: reference of all keys, and their effective values."""

from __future__ import annotations

import argparse
from typing import Final

from fencepost_proxy.cli import proxy
from fencepost_proxy.cli.options import Subparsers, add_command
from fencepost_proxy.config import reference
from fencepost_proxy.errors import ConfigError

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
  fencepost config show --config fencepost.toml --changed    show only values that differ from the default
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


def add_parser(subparsers: Subparsers) -> None:
    """Adds the `config` command and its subcommands."""
    summary = "explain configuration keys, or show effective values"
    parser = add_command(subparsers, "config", None, summary, _DESCRIPTION, examples=_EXAMPLES)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    summary = "explain keys: meaning, type, unit, default"
    description = f"{summary.capitalize()}, environment variable, and whether SIGHUP applies it."
    explain = add_command(commands, "explain", _explain, summary, description, examples=_EXPLAIN_EXAMPLES)
    explain.add_argument("key", metavar="KEY", nargs="*", help="key, table or topic config (default: list all)")
    explain.add_argument("--toml", action="store_true", help="print a config file template with every key")

    summary = "show effective values and their sources"
    description = "Show the values that `fencepost proxy` would use with these options and this environment."
    show = add_command(commands, "show", _show, summary, description, examples=_SHOW_EXAMPLES)
    proxy.add_settings(show)
    show.add_argument("--changed", action="store_true", default=False, help="omit values that equal the default")
    show.add_argument("--json", action="store_true", default=False, help="print JSON")


def _explain(args: argparse.Namespace) -> int:
    """Raises ConfigError for an unknown key."""
    if args.toml and args.key:
        raise ConfigError("--toml takes no KEY (it prints all keys)")
    if args.toml:
        print(reference.example_file(), end="")
    else:
        print("\n\n".join(map(reference.explain, args.key)) or reference.list_keys())
    return 0


def _show(args: argparse.Namespace) -> int:
    shown = reference.as_json if args.json else reference.show
    print(shown(proxy.read_config(args), changed=args.changed))
    return 0
