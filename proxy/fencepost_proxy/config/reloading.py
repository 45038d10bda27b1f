"""Which keys of a reloaded configuration a running proxy applies, and which need a restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.config.keys import KEYS, Key
from fencepost_proxy.config.reference import toml


@dataclass(frozen=True, slots=True)
class Changes:
    """`config` – the new configuration. `changed`, `left` – descriptions of changes; `left` needs a restart."""

    config: ProxyConfig
    changed: Sequence[str]
    left: Sequence[str]


def changes(running: ProxyConfig, read: ProxyConfig) -> Changes:
    """Raises Refused if the live changes conflict with keys that need a restart."""
    values: dict[str, dict[str, Any]] = {}
    changed, left = [], []
    for key in KEYS.values():
        before, after = key.of(running), key.of(read)
        if before == after:
            continue
        words = f"{key.name}: {_shown(before)} → {_shown(after)}"
        if key.live and _there(key, running) and _there(key, read):
            values.setdefault(key.table, {})[key.field_name] = after
            changed.append(words)
        else:
            left.append(words)
    left += [
        f"{name}: {'was added' if getattr(running, name) is None else 'was removed'}"
        for name in ("listen_tls", "upstream_tls", "control_sasl")
        if (getattr(running, name) is None) is not (getattr(read, name) is None)
    ]
    top = values.pop("", {})
    tables = {name: replace(getattr(running, name), **its) for name, its in values.items()}
    return Changes(replace(running, **top, **tables), changed, left)


def _there(key: Key, config: ProxyConfig) -> bool:
    """TLS cannot be switched on or off on a listener that clients are connected to."""
    return not key.table or getattr(config, key.table) is not None


def _shown(value: object) -> str:
    return "not set" if value is None else toml(value)
