"""`fencepost config`: what can be set, and what is set."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final

from fencepost_proxy.cli import proxy
from fencepost_proxy.config import reference
from fencepost_proxy.topics.virtual_configs import VIRTUAL_CONFIGS

_DESCRIPTION: Final = """\
What can be set, and what is set. Every key can be given in a TOML file (--config), in the environment
(limits.drain_seconds is FENCEPOST_LIMITS__DRAIN_SECONDS), and some on the command line of `fencepost proxy`.
The command line wins over the environment, that over the file, and the file over the default."""

_EXAMPLES: Final = """\
examples:
  fencepost config explain                          every key, its default and its type
  fencepost config explain limits.drain_seconds     all about one key; a table ([limits]) or a topic config, too
  fencepost config explain --toml > fencepost.toml  a file to begin with: every key in it, commented
  fencepost config show --config fencepost.toml     what holds, and where each value comes from
  fencepost config show --changed                   only what is not the default
"""

_EXPLAIN_EXAMPLES: Final = """\
examples:
  fencepost config explain
  fencepost config explain listen limits.frame_bytes_max
  fencepost config explain listen_tls
  fencepost config explain check.expected.offsets
  fencepost config explain --toml > fencepost.toml
"""

_SHOW_EXAMPLES: Final = """\
examples:
  fencepost config show --config fencepost.toml
  FENCEPOST_LOG__LEVEL=debug fencepost config show --config fencepost.toml --changed
      every line says where its value comes from; the output is a file that could be used as it is

Files with passwords and keys are named, never opened. Exit code 2: the configuration is wrong, and stderr says where.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Adds `config` and its commands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "config",
        help="what can be set, and what is set",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    explain = commands.add_parser(
        "explain",
        help="what each key means, its type, unit and default",
        description="What each key means, its type, unit, default and variable, and whether SIGHUP changes it.",
        epilog=_EXPLAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument("key", metavar="KEY", nargs="*", help="keys, tables or topic configs (default: a list of all)")
    form = explain.add_mutually_exclusive_group()
    form.add_argument("--toml", action="store_true", help="a complete file, every key in it with its meaning")
    form.add_argument("--markdown", action="store_true", help="the reference page, docs/configuration.md")
    explain.set_defaults(run=_explain)

    show = commands.add_parser(
        "show",
        help="the values that hold, and where each comes from",
        description="The values that `fencepost proxy` would have with the same options in the same environment.",
        epilog=_SHOW_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    proxy.add_settings(show)
    show.add_argument("--changed", action="store_true", default=False, help="leave out what has its default")
    show.add_argument("--json", action="store_true", default=False, help="for programs")
    show.set_defaults(run=_show)
    return parser


def _topic_configs() -> Sequence[reference.TopicConfig]:
    return [
        reference.TopicConfig(each.name, each.values, each.default, each.documentation)
        for each in VIRTUAL_CONFIGS.values()
    ]


def _explain(args: argparse.Namespace) -> int:
    if args.toml or args.markdown:
        if args.key:
            print("fencepost config explain: --toml and --markdown are of all keys, so name none", file=sys.stderr)
            return 2
        print(reference.example_file(_topic_configs()) if args.toml else reference.markdown(), end="")
        return 0
    if not args.key:
        print(reference.list_keys(_topic_configs()))
        return 0
    try:
        print("\n\n".join(reference.explain(each, _topic_configs()) for each in args.key))
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
