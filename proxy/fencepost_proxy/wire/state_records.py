"""Format of state-topic records. Their meaning is in `topics/state.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

_Value = TypeVar("_Value")


class StateRecord(NamedTuple):
    """A record for the state topic. `value` None is a tombstone."""

    key: bytes
    value: bytes | None


def record(key: str, value: Mapping[str, object]) -> StateRecord:
    return StateRecord(key.encode(), json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def tombstone(key: str) -> StateRecord:
    return StateRecord(key.encode(), None)


def object_of(value: bytes | None) -> Mapping[str, Any] | None:
    """The JSON object in a record, None for a tombstone. Raises ValueError for anything else."""
    if value is None:
        return None
    parsed = json.loads(value)
    if not isinstance(parsed, dict):
        raise ValueError("not a JSON object")
    return parsed


def typed(value: Mapping[str, Any], name: str, kind: type[_Value]) -> _Value:
    """The value of a field. Raises ValueError if it is missing or of another type."""
    found = value.get(name)
    if not isinstance(found, kind):
        raise ValueError(f"{name}: expected {kind.__name__}, found {found!r:.80}")
    return found
