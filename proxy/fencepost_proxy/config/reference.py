"""Texts about the keys: explanations, an example file and the current values."""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fencepost_policies.append_policy import TopicConfig
from fencepost_proxy.config.keys import SHOWN, TABLES, Key, Table, dotted, nearest
from fencepost_proxy.config.reading import Loaded
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.topics.virtual_configs import VIRTUAL_CONFIGS
from fencepost_proxy.types import Address

_WIDTH: Final = 96
_ORIGIN_COLUMN: Final = 48
_TOPIC_TABLES: Final = ("topics", "unlisted_topics")


# --- values -----------------------------------------------------------------------------------------------------------


def toml(value: Any) -> str:
    """The value as TOML, on one line."""
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, Address | Path | str):
        # JSON strings are TOML strings, except for this character.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inner = ", ".join(f"{dotted((str(name),))} = {toml(each)}" for name, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    return f"[{', '.join(map(toml, value))}]"


def default_of(key: Key) -> str:
    if key.required:
        return "required"
    return "none" if key.default in (None, {}) else toml(key.default)


def _example(key: Key) -> Any:
    return key.default if key.example is None else key.example


# --- explain ----------------------------------------------------------------------------------------------------------


def explain(name: str) -> str:
    """A key, a table or a topic config. Raises ConfigError with a suggestion if there is none."""
    for key in SHOWN:
        if name in (key.name, *key.variables):
            return _explain_key(key)
    if name in TABLES:
        return _explain_table(TABLES[name])
    if name in VIRTUAL_CONFIGS:
        return _explain_topic_config(VIRTUAL_CONFIGS[name])
    fields = {key.field_name: key.name for key in SHOWN}
    if name in fields:
        return "\n\n".join(_explain_key(key) for key in SHOWN if key.field_name == name)
    known = [*(key.name for key in SHOWN), *TABLES, *VIRTUAL_CONFIGS]
    near = nearest(name, known) or fields.get(nearest(name, fields) or "")
    hint = f"did you mean {near}?" if near else "`fencepost config explain` lists them"
    raise ConfigError(f"unknown key {name!r}; {hint}")


def _facts(title: str, meaning: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [title, *textwrap.wrap(meaning, _WIDTH, initial_indent="    ", subsequent_indent="    "), ""]
    for name, text in rows:
        first, *more = text.splitlines()
        lines += [f"    {name:<12} {first}", *(f"{'':<17}{each}" for each in more)]
    return "\n".join(lines)


def _explain_key(key: Key) -> str:
    rows = [
        ("type", key.type),
        ("default", default_of(key)),
        ("in the file", "\n".join(_in_the_file(key))),
        ("environment", "\n".join(f"{each}={_as_text(key)}" for each in key.variables)),
    ]
    if key.option is not None:
        rows.append(("option", f"fencepost proxy {key.option} {_as_text(key)}"))
    rows.append(("SIGHUP", "applied without a restart" if key.live else "needs a restart"))
    if key.name in _TOPIC_TABLES:
        rows.append(("configs", "\n".join(VIRTUAL_CONFIGS)))
    return _facts(key.name, key.doc, rows)


def _as_text(key: Key) -> str:
    """The value quoted for a shell."""
    example = _example(key)
    if isinstance(example, Mapping):
        return f"'{toml(example)}'"
    return ",".join(example) if isinstance(example, list) else toml(example).strip('"')


def _in_the_file(key: Key) -> Iterator[str]:
    example = _example(key)
    if isinstance(example, Mapping):
        for name, items in example.items() if key.name == "topics" else [("", example)]:
            yield f"[{dotted((key.name, name) if name else (key.name,))}]"
            yield from (f"{dotted((each,))} = {toml(value)}" for each, value in items.items())
    else:
        if key.table:
            yield f"[{key.table}]"
        yield f"{key.field_name} = {toml(example)}"


def _explain_table(table: Table) -> str:
    lines = [f"[{table.name}]", *textwrap.wrap(table.doc, _WIDTH, initial_indent="    ", subsequent_indent="    "), ""]
    width = max(len(key.field_name) for key in table.keys)
    for key in table.keys:
        default = default_of(key) if key.required else f"default {default_of(key)}"
        lines.append(f"    {key.field_name:<{width}}  {key.type}; {default}")
    return "\n".join(lines)


def _explain_topic_config(config: TopicConfig[Any]) -> str:
    rows = [
        ("valid", config.valid),
        ("default", toml(config.default)),
        ("in the file", f'[topics."orders-*"]\n"{config.name}" = {toml(config.example)}'),
        (
            "on a topic",
            "kafka-configs.sh --bootstrap-server PROXY:19092 --alter --entity-type topics --entity-name TOPIC "
            f"--add-config {config.name}={config.example}",
        ),
    ]
    return _facts(config.name, f"Topic config. {config.documentation}", rows)


def list_keys() -> str:
    """All keys, one per line."""
    lines: list[str] = []
    width = max(len(key.name) for key in SHOWN) + 2
    before = ""
    for key in SHOWN:
        if key.table != before:
            lines.append("")
        before = key.table
        lines.append(f"{key.name:<{width}}{'↻' if key.live else ' '} {default_of(key):<26} {key.type}")
    lines += ["", 'topic configs, in [topics."PATTERN"] and [unlisted_topics]:']
    lines += [f"{each.name:<{width}}  {toml(each.default):<26} {each.valid}" for each in VIRTUAL_CONFIGS.values()]
    lines += [
        "",
        "↻ can be changed by SIGHUP; the others need a restart.",
        "`fencepost config explain KEY` explains one key.",
    ]
    return "\n".join(lines)


# --- an example file --------------------------------------------------------------------------------------------------

_FILE_HEAD: Final = """\
# Fencepost configuration with every key: `fencepost proxy --config FILE`.
#
# To set a key, remove the # before it. The value shown is the default, or an example if there is no default.
# Keys marked ↻ can be changed by SIGHUP; the others need a restart.
# `fencepost check --config FILE` tests the configuration.
"""


def example_file() -> str:
    """Valid unchanged and with every key uncommented (except keys that exclude each other)."""
    lines = [_FILE_HEAD]
    table = ""
    for key in SHOWN:
        if key.table not in (table, ""):
            table = key.table
            lines += [*_comment(TABLES[table].doc), f"{'#' if TABLES[table].optional else ''}[{table}]", ""]
        default = f", default {default_of(key)}" if key.default else ""
        lines += _comment(f"{key.doc} ({key.type}{default}{', ↻' if key.live else ''})")
        if key.name == "topics":
            for each in VIRTUAL_CONFIGS.values():
                lines += _comment(f"  {each.name} = {each.valid}, default {toml(each.default)}")
        mark = "" if key.required and not key.table else "#"
        lines += [f"{mark}{each}" for each in _in_the_file(key) if each != f"[{key.table}]"]
        lines.append("")
    return "\n".join(lines)


def _comment(text: str) -> list[str]:
    indent = "# " + " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(text.strip(), 118, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


# --- effective values -------------------------------------------------------------------------------------------------


def _rows(loaded: Loaded, changed: bool) -> Iterator[tuple[Key, str | None, str]]:
    """Each key with its value as TOML and its origin. `changed`: only keys that were set."""
    for key in SHOWN:
        if not changed or key.name in loaded.origins:
            value = key.of(loaded.config)
            yield key, None if value is None else toml(value), loaded.origin(key.name)


def show(loaded: Loaded, *, changed: bool = False) -> str:
    """Every key with its value and origin, as TOML."""
    return "\n".join(
        f"# {key.name} is not set" if value is None else f"{f'{key.name} = {value}':<{_ORIGIN_COLUMN}}  # {origin}"
        for key, value, origin in _rows(loaded, changed)
    )


def as_json(loaded: Loaded, *, changed: bool = False) -> str:
    rows = [
        {
            "key": key.name,
            "value": None if value is None else tomllib.loads(f"value = {value}")["value"],
            "from": origin,
            "reloads": key.live,
        }
        for key, value, origin in _rows(loaded, changed)
    ]
    return json.dumps(rows, indent=2)
