"""`idempotence=` of the producers: the levels of KAFKA-5793, as a client library can be told them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Idempotence = Literal["off", "safe", "required"] | bool

_LEVELS: Mapping[object, str] = {"off": "off", "safe": "safe", "required": "required"}


def configured(level: Idempotence | None, config: Mapping[str, Any], name: str, *, possible: bool) -> dict[str, bool]:
    """What `level` makes of the library's setting `name`, to be added to `config`; nothing where it is None.

    `possible` – whether an idempotent producer of this library lives through a refusal: `safe` is idempotent only then.
    Raises ValueError for an unknown level, and for one that `config` contradicts.
    """
    if level is None:
        return {}
    known = "required" if level is True else "off" if level is False else _LEVELS.get(level)
    if known is None:
        raise ValueError(f"idempotence={level!r}: it must be 'off', 'safe', 'required', True (required) or False (off)")
    wanted = known == "required" or (known == "safe" and possible)
    said = config.get(name)
    if said is not None and (str(said).lower() == "true") is not wanted:
        raise ValueError(f"idempotence={level!r} and {name}={said!r} contradict each other: leave one of them out")
    return {name: wanted}
