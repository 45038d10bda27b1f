"""`fencepost completion`: what a shell needs to complete this command's words."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_SHELLS: Final = ("bash", "zsh", "fish")

_DESCRIPTION: Final = """\
Prints a script by which a shell completes commands, options, their values and file names after `fencepost`.
It says what this version knows: make it anew after an upgrade."""

_EXAMPLES: Final = """\
examples:
  source <(fencepost completion bash)
      in this bash; for every one to come, with the package bash-completion:
      fencepost completion bash > ~/.local/share/bash-completion/completions/fencepost

  fencepost completion zsh > ~/.zfunc/_fencepost
      where ~/.zshrc has  fpath+=~/.zfunc; autoload -Uz compinit; compinit

  fencepost completion fish > ~/.config/fish/completions/fencepost.fish
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "completion",
        help="completion of this command in bash, zsh and fish",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=_SHELLS)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    import shtab  # noqa: PLC0415 - for this command only

    from fencepost_proxy.cli.main import command_parser  # noqa: PLC0415 - it imports this module

    whole = command_parser()
    for action in _actions(whole):
        if action.type is Path:
            directory = "DIR" in str(action.metavar)
            action.complete = shtab.DIRECTORY if directory else shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(whole, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those of commands within commands, too."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
