"""Maps `idempotence=` (the levels of KAFKA-5793) to a client library's own setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Idempotence = Literal["off", "safe", "required"] | bool

_LEVELS: Mapping[object, str] = {"off": "off", "safe": "safe", "required": "required"}


def configured(level: Idempotence | None, config: Mapping[str, Any], name: str, *, possible: bool) -> dict[str, bool]:
    """`{name: value}` for the library's idempotence setting `name`; empty if `level` is None.

    `possible`: whether the library's idempotent producer survives a refusal; `safe` is idempotent only then. Raises
    ValueError for an unknown level, and for a level that contradicts `config`.
    """
    if level is None:
        return {}
    known = "required" if level is True else "off" if level is False else _LEVELS.get(level)
    if known is None:
        raise ValueError(
            f"idempotence={level!r} is invalid (use 'off', 'safe', 'required', True for required, or False for off)"
        )
    requested = known == "required" or (known == "safe" and possible)
    stated = config.get(name)
    if stated is not None and (str(stated).lower() == "true") is not requested:
        raise ValueError(f"idempotence={level!r} contradicts {name}={stated!r} (remove one of them)")
    return {name: requested}
