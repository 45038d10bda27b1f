"""`fencepost completion`: shell completion scripts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fencepost_proxy.cli.options import Subparsers, add_command

_SHELLS: Final = ("bash", "zsh", "fish")

_DESCRIPTION: Final = """\
Print a shell script that completes commands, options, values and file names of `fencepost`.
Generate it again after an upgrade."""

_EXAMPLES: Final = """\
examples:
  source <(fencepost completion bash)
      for this shell only

  fencepost completion bash > ~/.local/share/bash-completion/completions/fencepost
      for every new shell (needs the package bash-completion)

  fencepost completion zsh > ~/.zfunc/_fencepost
      needs  fpath+=~/.zfunc; autoload -Uz compinit; compinit  in ~/.zshrc

  fencepost completion fish > ~/.config/fish/completions/fencepost.fish
"""


def add_parser(subparsers: Subparsers) -> None:
    summary = "print a completion script for bash, zsh or fish"
    parser = add_command(subparsers, "completion", run, summary, _DESCRIPTION, examples=_EXAMPLES)
    parser.add_argument("shell", choices=_SHELLS)


def run(args: argparse.Namespace) -> int:
    import shtab  # noqa: PLC0415 - only this command needs it

    from fencepost_proxy.cli.main import command_parser  # noqa: PLC0415 - it imports this module

    whole = command_parser()
    for action in _actions(whole):
        if action.type is Path:
            directory = "DIR" in str(action.metavar)
            action.complete = shtab.DIRECTORY if directory else shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(whole, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All actions, including those of subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
