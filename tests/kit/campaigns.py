"""The command line of every campaign: arguments from a table, a directory for logs, progress, and the exit status."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

Arguments = Mapping[str, Mapping[str, Any]]


class Campaign:
    """`options` – the arguments. `say` prints progress. `directory` – for logs."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        # Client libraries log every lost connection.
        logging.basicConfig(level=logging.CRITICAL)
        self.options = options
        self.directory: Path = options.directory or Path(tempfile.mkdtemp(prefix=f"fencepost-{name}-"))
        self.directory.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)


def campaign(
    name: str,
    prove: Callable[[Campaign], bool],
    arguments: Arguments,
    *,
    only_one: Arguments | None = None,
    keep: bool = False,
    words: Sequence[str] | None = None,
) -> int:
    """The exit status: 1 if `prove` returns False.

    `only_one` – arguments that exclude each other. `keep` – whether the logs are kept in any case. Those of a failed
    campaign are.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tests.{name}")
    for flag, settings in arguments.items():
        parser.add_argument(flag, **settings)
    if only_one:
        alternatives = parser.add_mutually_exclusive_group()
        for flag, settings in only_one.items():
            alternatives.add_argument(flag, **settings)
    parser.add_argument("--directory", type=Path, help="for logs, which are then kept")
    parser.add_argument("--keep", action="store_true", default=keep, help="keep the logs also if all holds")
    this = Campaign(name, parser.parse_args(words))
    holds = prove(this)
    if holds and not this.options.keep and this.options.directory is None:
        shutil.rmtree(this.directory, ignore_errors=True)
    else:
        print(f"the logs are in {this.directory}")
    return 0 if holds else 1


def leave(status: int) -> NoReturn:
    """Exit without the client libraries' shutdown, which would wait for stopped brokers."""
    sys.stdout.flush()
    os._exit(status)
