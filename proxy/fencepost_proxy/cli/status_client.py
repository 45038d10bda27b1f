"""Client of a running proxy's status page, shared by several commands."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from fencepost_proxy.config.secrets import secret
from fencepost_proxy.errors import ConfigError, FencepostError
from fencepost_proxy.types import Address

STATUS_HELP: Final = "status page of a running proxy (the proxy's own --status)"
STATUS_VARIABLE: Final = "FENCEPOST_STATUS"
#: The proxy's own variable for the key status_read_token_file.
READ_TOKEN_VARIABLE: Final = "FENCEPOST_STATUS_READ_TOKEN_FILE"
#: Default for commands that need a status page, without the variable.
STATUS_DEFAULT: Final = Address("127.0.0.1", 8080)
_SECONDS: Final = 30.0
_AT_ONCE: Final = 500
_WATCH_SECONDS: Final = 2.0
_CLEAR: Final = "\x1b[H\x1b[2J\x1b[3J"
_TONES: Final = {"good": "32", "bad": "31;1", "warn": "33", "title": "1", "soft": "2"}


class CannotQuery(FencepostError):
    """The address does not respond, or it is not the status page of a proxy of this version."""


class _WithTls(Address):
    __slots__ = ()

    def __str__(self) -> str:
        return f"https://{super().__str__()}"


def address(text: str) -> Address:
    """Argument type `HOST:PORT`, or the URL of a status page."""
    try:
        found = Address.parse(text.removeprefix("http://").removeprefix("https://").rstrip("/"))
        return _WithTls(*found) if text.startswith("https://") else found
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def url(status: Address) -> str:
    return str(status) if isinstance(status, _WithTls) else f"http://{status}"


def add_status(parser: argparse.ArgumentParser) -> None:
    """Adds `--status`, `--json` and `--watch`."""
    add = parser.add_argument
    add_address(parser)
    add("--json", action="store_true", help="print one JSON object; with --watch, one per line")
    add("--watch", nargs="?", type=_seconds, const=_WATCH_SECONDS, metavar="SECONDS",
        help=f"repeat every SECONDS seconds (default {_WATCH_SECONDS:g}) until Ctrl-C")  # fmt: skip


def add_address(parser: argparse.ArgumentParser) -> None:
    """Adds `--status`."""
    default = os.environ.get(STATUS_VARIABLE) or str(STATUS_DEFAULT)
    parser.add_argument("--status", type=address, metavar="HOST:PORT", default=default,
        help=f"{STATUS_HELP} (default: {STATUS_VARIABLE}, or {STATUS_DEFAULT})")  # fmt: skip


def _seconds(text: str) -> float:
    seconds = float(text)  # argparse reports a ValueError
    if not 0.2 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError("must be from 0.2 to 86400 seconds")
    return seconds


def show(
    args: argparse.Namespace,
    probe: Callable[[], tuple[dict[str, Any], int]],
    reported: Callable[[dict[str, Any]], str],
) -> int:
    """Prints the result of `probe`, once or repeatedly. Returns its exit status.

    Raises `CannotQuery` if the first call fails; later failures are printed to stderr.
    """
    found, code = probe()
    if args.watch is None:
        print(json.dumps(found, indent=2) if args.json else reported(found))
        return code
    while True:
        if args.json:
            print(json.dumps(found), flush=True)
        else:
            at = time.strftime("%H:%M:%S UTC", time.gmtime())
            print(f"{_CLEAR if sys.stdout.isatty() else ''}{painted(at, 'soft')}\n{reported(found)}\n", flush=True)
        while True:
            time.sleep(args.watch)
            try:
                found, code = probe()
                break
            except CannotQuery as error:
                print(f"fencepost: {error}", file=sys.stderr, flush=True)


def painted(text: str, tone: str) -> str:
    """Colours the text if stdout is a colour terminal and `NO_COLOR` (https://no-color.org) is not set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_TONES[tone]}m{text}\x1b[0m"


def query(status: Address, target: str, *, method: str = "GET", token: str | None = None) -> str:
    """Response body as text. `token` is for requests that change something. Raises `CannotQuery`."""
    # A proxy that runs imports this module for its options, and needs no HTTP client.
    from urllib.error import HTTPError  # noqa: PLC0415
    from urllib.request import Request, urlopen  # noqa: PLC0415

    source = f"{url(status)}{target}"
    try:
        if token is None and (file := os.environ.get(READ_TOKEN_VARIABLE)):
            token = secret(READ_TOKEN_VARIABLE, Path(file))
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        with urlopen(Request(source, method=method, headers=headers), timeout=_SECONDS) as answer:
            text: str = answer.read().decode()
            return text
    except HTTPError as error:
        raise CannotQuery(f"{source} responded {error.code}: {error.read().decode(errors='replace').strip()}") from None
    except ConfigError as error:
        raise CannotQuery(str(error)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        elsewhere = ", or give another address with --status HOST:PORT" if status == STATUS_DEFAULT else ""
        raise CannotQuery(
            f"no response from {source}: {reason} (check that the proxy runs with --status {status}{elsewhere})"
        ) from None


def status_page(status: Address) -> dict[str, Any]:
    """The content of `/status.json`. Raises `CannotQuery`."""
    try:
        page = json.loads(query(status, "/status.json"))
        if page["state"] and page["totals"] is not None:
            return dict(page)
    except (ValueError, KeyError, TypeError):
        pass
    raise CannotQuery(f"{status} is not the status page of a proxy of this version")


def listed(status: Address, what: str, **queried: str | None) -> Iterator[dict[str, Any]]:
    """All rows of `/{what}.json`, page by page. Raises `CannotQuery`."""
    given = urlencode({**{name: value for name, value in queried.items() if value is not None}, "limit": _AT_ONCE})
    target: str | None = f"/{what}.json?{given}"
    while target is not None:
        try:
            answer = json.loads(query(status, target))
            rows, target = list(answer["rows"]), answer["next"]
        except (ValueError, KeyError, TypeError):
            raise CannotQuery(f"{status} is not the status page of a proxy of this version") from None
        yield from rows
