"""A running proxy's status page, for commands that ask it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from fencepost_proxy.errors import FencepostError
from fencepost_proxy.types import Address

STATUS_HELP: Final = "the status page of a running proxy (what it was given as --status)"
#: Where commands ask that only a status page can answer.
STATUS_DEFAULT: Final = Address("127.0.0.1", 8080)
_SECONDS: Final = 30.0
_AT_ONCE: Final = 500
_WATCH_SECONDS: Final = 2.0
_CLEAR: Final = "\x1b[H\x1b[2J\x1b[3J"
_TONES: Final = {"good": "32", "bad": "31;1", "warn": "33", "title": "1", "soft": "2"}


class CannotAsk(FencepostError):
    """Nobody there, or somebody else."""


def address(text: str) -> Address:
    """For `type=` of an argument."""
    try:
        return Address.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_status(parser: argparse.ArgumentParser) -> None:
    """What commands have in common that show a status page."""
    add = parser.add_argument
    add("--status", type=address, metavar="HOST:PORT", default=STATUS_DEFAULT, help=f"{STATUS_HELP}; default "
        f"{STATUS_DEFAULT}")  # fmt: skip
    add("--json", action="store_true", help="for programs: one JSON object on stdout, with --watch one a line")
    add("--watch", nargs="?", type=_seconds, const=_WATCH_SECONDS, metavar="SECONDS",
        help=f"show it again and again, every so many seconds (default {_WATCH_SECONDS:g}), until Ctrl-C")  # fmt: skip


def _seconds(text: str) -> float:
    seconds = float(text)  # a ValueError is argparse's to tell
    if not 0.2 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError("from 0.2 to 86400 seconds")
    return seconds


def show(
    args: argparse.Namespace,
    look: Callable[[], tuple[dict[str, Any], int]],
    told: Callable[[dict[str, Any]], str],
) -> int:
    """Prints what `look` finds, once or again and again; its exit status. Raises CannotAsk the first time only."""
    found, code = look()
    if args.watch is None:
        print(json.dumps(found, indent=2) if args.json else told(found))
        return code
    while True:
        if args.json:
            print(json.dumps(found), flush=True)
        else:
            at = time.strftime("%H:%M:%S UTC", time.gmtime())
            print(f"{_CLEAR if sys.stdout.isatty() else ''}{painted(at, 'soft')}\n{told(found)}\n", flush=True)
        while True:
            time.sleep(args.watch)
            try:
                found, code = look()
                break
            except CannotAsk as error:
                print(f"fencepost: {error}", file=sys.stderr, flush=True)


def painted(text: str, tone: str) -> str:
    """In colour on a terminal that has any; https://no-color.org is respected."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_TONES[tone]}m{text}\x1b[0m"


def ask(status: Address, target: str, *, method: str = "GET", token: str | None = None) -> str:
    """The page's text. `token` – for what changes something. Raises CannotAsk."""
    url = f"http://{status}{target}"
    try:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        with urlopen(Request(url, method=method, headers=headers), timeout=_SECONDS) as answer:
            text: str = answer.read().decode()
            return text
    except HTTPError as error:
        raise CannotAsk(f"{url} answered {error.code}: {error.read().decode(errors='replace').strip()}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        elsewhere = " At another address: --status HOST:PORT" if status == STATUS_DEFAULT else ""
        raise CannotAsk(
            f"no answer from {url} ({reason}). Does the proxy run, with --status {status}?{elsewhere}"
        ) from None


def status_page(status: Address) -> dict[str, Any]:
    """`/status.json`. Raises CannotAsk."""
    try:
        page = json.loads(ask(status, "/status.json"))
        if page["state"] and page["totals"] is not None:
            return dict(page)
    except (ValueError, KeyError, TypeError):
        pass
    raise CannotAsk(f"what answers at {status} is not the status page of a proxy of this version")


def listed(status: Address, what: str, **asked: str | None) -> Iterator[dict[str, Any]]:
    """All rows of `/what.json`, answer by answer. Raises CannotAsk."""
    given = urlencode({**{name: value for name, value in asked.items() if value is not None}, "limit": _AT_ONCE})
    target: str | None = f"/{what}.json?{given}"
    while target is not None:
        try:
            answer = json.loads(ask(status, target))
            rows, target = list(answer["rows"]), answer["next"]
        except (ValueError, KeyError, TypeError):
            raise CannotAsk(f"what answers at {status} is not the status page of a proxy of this version") from None
        yield from rows
