"""Reads `.properties` files as `java.util.Properties` and Kafka's tools do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

_SEPARATED: Final = re.compile(r"((?:\\.|[^\\=: \t\f])*)([ \t\f]*[=:]?[ \t\f]*)(.*)", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_ESCAPED: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


class Property(NamedTuple):
    """`line`: from 1. `is_separated`: a separator follows the name; otherwise the line has only a name."""

    name: str
    value: str
    line: int
    is_separated: bool


def properties_of(data: bytes) -> Iterator[Property]:
    """In the order of the file, whose encoding is ISO 8859-1. Values are stripped, as Kafka does with passwords."""
    pending: str | None = None
    began = 0
    # The last line may end with a backslash.
    for number, line in enumerate((*re.split(r"\r\n|\r|\n", data.decode("latin-1")), ""), 1):
        part = line.lstrip(" \t\f")
        if pending is None:
            if not part or part[0] in "#!":
                continue
            began = number
        continues = (len(part) - len(part.rstrip("\\"))) % 2
        pending = (pending or "") + part[: len(part) - continues]
        if not continues:
            found = _SEPARATED.fullmatch(pending)
            assert found is not None
            name, value = (_ESCAPE.sub(_unescaped, each) for each in (found[1], found[3]))
            yield Property(name, value.strip(), began, bool(found[2]))
            pending = None


def token_file(url: str) -> Path:
    """The file with the OAuth token, from `sasl.oauthbearer.token.endpoint.url`. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path:
        raise ValueError(
            "must be file:///PATH of a file with the token (tokens are not fetched from a server: let a sidecar or a "
            "Kubernetes volume write the file)"
        )
    return Path(unquote(parts.path))


def _unescaped(found: re.Match[str]) -> str:
    escaped = found[1]
    return chr(int(escaped[1:], 16)) if len(escaped) > 1 else _ESCAPED.get(escaped, escaped)
