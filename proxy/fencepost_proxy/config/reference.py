"""Texts about the keys: explanations, an example file and the current values."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fencepost_policies.append_policy import TopicConfig
from fencepost_proxy.config import TopicPattern
from fencepost_proxy.config.keys import SHOWN, TABLES, Key, Table, dotted
from fencepost_proxy.config.reading import Loaded, nearest
from fencepost_proxy.types import Address

_WIDTH: Final = 96
_ORIGIN_COLUMN: Final = 48
_TOPIC_TABLES: Final = ("topics", "unlisted_topics")


class NoSuchKey(LookupError):
    """No such key; the text has a suggestion."""


# --- values -----------------------------------------------------------------------------------------------------------


def toml(value: Any) -> str:
    """The value as TOML, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Address | Path | str):
        # JSON strings are TOML strings, except for this character.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inner = ", ".join(f"{dotted((str(name),))} = {toml(each)}" for name, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if value and isinstance(value[0], TopicPattern):
        return toml({each.glob: each.configs for each in value})
    return f"[{', '.join(map(toml, value))}]"


def json_value(value: Any) -> Any:
    """For JSON."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): json_value(each) for name, each in value.items()}
    if isinstance(value, tuple) and not isinstance(value, Address):
        if value and isinstance(value[0], TopicPattern):
            return {each.glob: json_value(each.configs) for each in value}
        return [json_value(each) for each in value]
    return str(value)


def type_of(key: Key) -> str:
    """`whole number of bytes, above 0`."""
    words = key.kind.words
    if key.unit is not None:
        words += f" {key.unit}" if key.unit.startswith(("per ", "of ")) else f" of {key.unit}"
    meaning = key.meaning
    if meaning.above is not None:
        words += f", above {meaning.above}"
    if meaning.least is not None:
        most = meaning.most
        words += f", at least {meaning.least}" if most is None else f" from {meaning.least} to {most}"
    return words


def default_of(key: Key) -> str:
    if key.required:
        return "required"
    return toml(key.default) if key.default or isinstance(key.default, bool | int | float) else "none"


def _example(key: Key) -> Any:
    return key.default if key.meaning.example is None else key.meaning.example


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")


# --- explain ----------------------------------------------------------------------------------------------------------


def explain(name: str, topic_configs: Sequence[TopicConfig[Any]]) -> str:
    """A key, a table or a topic config. Raises NoSuchKey."""
    for key in SHOWN:
        if name in (key.name, *key.variables):
            return _explain_key(key, topic_configs)
    if name in TABLES:
        return _explain_table(TABLES[name])
    for config in topic_configs:
        if name == config.name:
            return _explain_topic_config(config)
    ends = [key for key in SHOWN if key.field_name == name]
    if ends:
        return "\n\n".join(_explain_key(key, topic_configs) for key in ends)
    known = [*(key.name for key in SHOWN), *TABLES, *(each.name for each in topic_configs)]
    fields = {key.field_name: key.name for key in SHOWN}
    near = nearest(name, known) or fields.get(nearest(name, fields) or "")
    hint = f"did you mean {near}?" if near else "`fencepost config explain` lists them"
    raise NoSuchKey(f"unknown key {name!r}; {hint}")


def _facts(title: str, meaning: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [title, *textwrap.wrap(meaning, _WIDTH, initial_indent="    ", subsequent_indent="    "), ""]
    for name, text in rows:
        first, *more = text.splitlines()
        lines += [f"    {name:<12} {first}", *(f"{'':<17}{each}" for each in more)]
    return "\n".join(lines)


def _explain_key(key: Key, topic_configs: Sequence[TopicConfig[Any]]) -> str:
    rows = [
        ("type", type_of(key)),
        ("default", default_of(key)),
        ("in the file", "\n".join(_in_the_file(key))),
        ("environment", "\n".join(f"{each}={_as_text(key)}" for each in key.variables)),
    ]
    if key.meaning.option is not None:
        rows.append(("option", f"fencepost proxy {key.meaning.option} {_as_text(key)}"))
    rows.append(("SIGHUP", "applied without a restart" if key.meaning.live else "needs a restart"))
    if key.name in _TOPIC_TABLES:
        rows.append(("configs", "\n".join(each.name for each in topic_configs)))
    return _facts(key.name, sentence(key.meaning.doc), rows)


def _as_text(key: Key) -> str:
    """The value quoted for a shell."""
    example = _example(key)
    if isinstance(example, Mapping):
        return f"'{toml(example)}'"
    if isinstance(example, list | tuple) and not isinstance(example, Address):
        return ",".join(map(str, example))
    return toml(example).strip('"') or "…"


def _in_the_file(key: Key) -> Iterator[str]:
    example = _example(key)
    if key.name == "topics":
        for glob, configs in example.items():
            yield f"[{dotted((key.name, glob))}]"
            yield from (f"{dotted((name,))} = {toml(value)}" for name, value in configs.items())
    elif isinstance(example, Mapping):
        yield f"[{key.name}]"
        yield from (f"{dotted((name,))} = {toml(value)}" for name, value in example.items())
    else:
        if key.table:
            yield f"[{key.table}]"
        yield f"{key.field_name} = {toml(example)}"


def _explain_table(table: Table) -> str:
    lines = [f"[{table.name}]", *textwrap.wrap(table.doc, _WIDTH, initial_indent="    ", subsequent_indent="    "), ""]
    width = max(len(key.field_name) for key in SHOWN if key.table == table.name)
    for key in SHOWN:
        if key.table == table.name:
            default = default_of(key) if key.required else f"default {default_of(key)}"
            lines.append(f"    {key.field_name:<{width}}  {type_of(key)}; {default}")
    return "\n".join(lines)


def _explain_topic_config(config: TopicConfig[Any]) -> str:
    rows = [
        ("valid", config.valid),
        ("default", toml(config.default)),
        ("in the file", f'[topics."orders-*"]\n"{config.name}" = {toml(config.example)}'),
        ("on a topic", f"kafka-configs --alter --entity-type topics … --add-config {config.name}={config.example}"),
    ]
    return _facts(config.name, f"Topic config. {config.documentation}", rows)


def list_keys(topic_configs: Sequence[TopicConfig[Any]]) -> str:
    """All keys, one per line."""
    lines: list[str] = []
    width = max(len(key.name) for key in SHOWN) + 2
    before = None
    for key in SHOWN:
        if before is not None and key.table != before:
            lines.append("")
        before = key.table
        live = "↻" if key.meaning.live else " "
        lines.append(f"{key.name:<{width}}{live} {default_of(key):<26} {type_of(key)}")
    lines += ["", 'topic configs, in [topics."PATTERN"] and [unlisted_topics]:']
    lines += [f"{each.name:<{width}}  {toml(each.default):<26} {each.valid}" for each in topic_configs]
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


def example_file(topic_configs: Sequence[TopicConfig[Any]]) -> str:
    """Valid unchanged and with every key uncommented (except keys that exclude each other)."""
    lines = [_FILE_HEAD]
    table = ""
    for key in SHOWN:
        if key.table != table and key.table:
            table = key.table
            its = TABLES[table]
            lines += [*_comment(its.doc), f"{'#' if its.optional else ''}[{table}]", ""]
        default = "" if key.default is None or key.required or not key.default else ", default " + default_of(key)
        live = ", ↻" if key.meaning.live else ""
        lines += _comment(f"{sentence(key.meaning.doc)} ({type_of(key)}{default}{live})")
        if key.name == "topics":
            for each in topic_configs:
                lines += _comment(f"  {each.name} = {each.valid}, default {toml(each.default)}")
        setting = list(_in_the_file(key))
        if key.table:
            del setting[0]
        commented = not (key.required and not key.table)
        lines += [f"{'#' if commented else ''}{each}" for each in setting]
        lines.append("")
    return "\n".join(lines)


def _comment(text: str) -> list[str]:
    indent = "# " + " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(text.strip(), 118, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


# --- effective values -------------------------------------------------------------------------------------------------


def show(loaded: Loaded, *, changed: bool = False) -> str:
    """Every key with its value and origin, as TOML. `changed`: only keys that were set."""
    lines = []
    for key in SHOWN:
        origin = loaded.origin(key.name)
        if changed and key.name not in loaded.origins:
            continue
        value = key.of(loaded.config)
        if value is None:
            left = f"# {key.name} is not set"
            lines.append(left)
            continue
        left = f"{key.name} = {toml(value)}"
        lines.append(f"{left:<{_ORIGIN_COLUMN}}  # {origin}")
    return "\n".join(lines)


def as_json(loaded: Loaded, *, changed: bool = False) -> str:
    rows = [
        {
            "key": key.name,
            "value": json_value(key.of(loaded.config)),
            "from": loaded.origin(key.name),
            "reloads": key.meaning.live,
        }
        for key in SHOWN
        if not changed or key.name in loaded.origins
    ]
    return json.dumps(rows, indent=2)
