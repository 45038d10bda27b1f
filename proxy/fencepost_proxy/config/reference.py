"""What is told of the keys: explained one by one, as an example file, as docs/configuration.md, and as they are now."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fencepost_proxy.config import TopicPattern
from fencepost_proxy.config.keys import SHOWN, TABLES, Key, Table, dotted
from fencepost_proxy.config.reading import Loaded, nearest
from fencepost_proxy.types import Address

_WIDTH: Final = 96
_ORIGIN_COLUMN: Final = 48
_TOPIC_TABLES: Final = ("topics", "unlisted_topics")


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A row of the table of virtual topic configs, which lives in a higher room."""

    name: str
    values: Sequence[str]
    default: str
    doc: str


class NoSuchKey(LookupError):
    """The text says what there is."""


# --- values -----------------------------------------------------------------------------------------------------------


def toml(value: Any) -> str:
    """As the file has it, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Address | Path | str):
        # JSON's strings are TOML's, but for this one character.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inner = ", ".join(f"{dotted((str(name),))} = {toml(each)}" for name, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if value and isinstance(value[0], TopicPattern):
        return toml({each.glob: each.configs for each in value})
    return f"[{', '.join(map(toml, value))}]"


def plain(value: Any) -> Any:
    """For JSON."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, tuple) and not isinstance(value, Address):
        if value and isinstance(value[0], TopicPattern):
            return {each.glob: plain(each.configs) for each in value}
        return [plain(each) for each in value]
    return str(value)


def type_of(key: Key) -> str:
    """`whole number of bytes, above 0`."""
    words = key.kind.words
    if key.unit is not None:
        words += f" {key.unit}" if key.unit.startswith(("per ", "of ")) else f" of {key.unit}"
    meaning = key.meaning
    if meaning["above"] is not None:
        words += f", above {meaning['above']}"
    if meaning["least"] is not None:
        most = meaning["most"]
        words += f", at least {meaning['least']}" if most is None else f" from {meaning['least']} to {most}"
    return words


def default_of(key: Key) -> str:
    if key.required:
        return "must be given"
    return toml(key.default) if key.default or isinstance(key.default, bool | int | float) else "none"


def _example(key: Key) -> Any:
    return key.default if key.meaning["example"] is None else key.meaning["example"]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")


# --- explain ----------------------------------------------------------------------------------------------------------


def explain(name: str, topic_configs: Sequence[TopicConfig]) -> str:
    """A key, a table or a topic config. Raises NoSuchKey."""
    for key in SHOWN:
        if name in (key.name, key.variable):
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
    raise NoSuchKey(f"there is no key {name!r}; {hint}")


def _facts(title: str, meaning: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [title, *textwrap.wrap(meaning, _WIDTH, initial_indent="    ", subsequent_indent="    "), ""]
    for name, text in rows:
        first, *more = text.splitlines()
        lines += [f"    {name:<12} {first}", *(f"{'':<17}{each}" for each in more)]
    return "\n".join(lines)


def _explain_key(key: Key, topic_configs: Sequence[TopicConfig]) -> str:
    rows = [
        ("type", type_of(key)),
        ("default", default_of(key)),
        ("in the file", "\n".join(_in_the_file(key))),
        ("environment", f"{key.variable}={_as_text(key)}"),
    ]
    if key.option is not None:
        rows.append(("option", f"fencepost proxy {key.option} {_as_text(key)}"))
    rows.append(("SIGHUP", "changes it in a running proxy" if key.live else "says that it needs a restart"))
    if key.name in _TOPIC_TABLES:
        rows.append(("there are", "\n".join(each.name for each in topic_configs)))
    return _facts(key.name, _sentence(key.doc), rows)


def _as_text(key: Key) -> str:
    """As a shell wants it."""
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


def _explain_topic_config(config: TopicConfig) -> str:
    values = " or ".join(map(toml, config.values))
    rows = [
        ("type", values),
        ("default", toml(config.default)),
        ("in the file", f'[topics."orders-*"]\n"{config.name}" = {toml(config.values[-1])}'),
        ("on a topic", f"kafka-configs --alter --entity-type topics … --add-config {config.name}={config.values[-1]}"),
    ]
    return _facts(config.name, f"A topic config. {config.doc}", rows)


def list_keys(topic_configs: Sequence[TopicConfig]) -> str:
    """All of them, a line each."""
    lines: list[str] = []
    width = max(len(key.name) for key in SHOWN) + 2
    before = None
    for key in SHOWN:
        if before is not None and key.table != before:
            lines.append("")
        before = key.table
        live = "↻" if key.live else " "
        lines.append(f"{key.name:<{width}}{live} {default_of(key):<26} {type_of(key)}")
    lines += ["", 'topic configs, in [topics."GLOB"] and [unlisted_topics]:']
    lines += [
        f"{each.name:<{width}}  {toml(each.default):<26} {' or '.join(map(toml, each.values))}"
        for each in topic_configs
    ]
    lines += [
        "",
        "↻ SIGHUP changes it in a running proxy; the others need a restart.",
        "fencepost config explain KEY tells all of one.",
    ]
    return "\n".join(lines)


# --- an example file --------------------------------------------------------------------------------------------------

_FILE_HEAD: Final = """\
# A configuration file of Fencepost with every key there is: `fencepost proxy --config FILE`.
#
# Lines that begin with # and no blank are keys that are not set: with their default, or with an example where there is
# none. Take the # away to set one. ↻: SIGHUP changes it in a running proxy; the others need a restart.
# `fencepost check --config FILE` says whether all of it works here.
"""


def example_file(topic_configs: Sequence[TopicConfig]) -> str:
    """Loads as it is, and with every # before a key taken away, too (but for what excludes each other)."""
    lines = [_FILE_HEAD]
    table = ""
    for key in SHOWN:
        if key.table != table and key.table:
            table = key.table
            its = TABLES[table]
            lines += [*_comment(its.doc), f"{'#' if its.optional else ''}[{table}]", ""]
        default = "" if key.default is None or key.required or not key.default else ", default " + default_of(key)
        live = ", ↻" if key.live else ""
        lines += _comment(f"{_sentence(key.doc)} ({type_of(key)}{default}{live})")
        if key.name == "topics":
            for each in topic_configs:
                lines += _comment(
                    f"  {each.name} = {' or '.join(map(toml, each.values))}, default {toml(each.default)}"
                )
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


# --- the reference page -----------------------------------------------------------------------------------------------

_PAGE_HEAD: Final = """\
# Configuration

Made from `proxy/fencepost_proxy/config/__init__.py` by `fencepost config explain --markdown`; change it there.

One TOML file, `fencepost proxy --config FILE`; no key but `upstream` must be given. An unknown key is an error, since
a misspelt guard would guard nothing; all errors are told at once, each with its line.

| to | command |
|---|---|
| have a key explained | `fencepost config explain limits.drain_seconds` |
| begin with a file that has every key in it, commented | `fencepost config explain --toml > fencepost.toml` |
| see what holds, and where each value comes from | `fencepost config show --config fencepost.toml` |
| know whether it works with this Kafka, on this machine | `fencepost check --config fencepost.toml` |

## Which value wins

The command line, then the environment, then the file, then the default; key by key. `topics`, `unlisted_topics` and
`broker_ports` come from one of them as a whole.

A variable is called `FENCEPOST_`, then the key in capital letters, with `__` for the dot: `limits.drain_seconds` is
`FENCEPOST_LIMITS__DRAIN_SECONDS`. Its value is the bare text (`FENCEPOST_LISTEN=0.0.0.0:19092`), a list is separated
by commas (`FENCEPOST_UPSTREAM=kafka-1:9092,kafka-2:9092`), a table is TOML on one line (`FENCEPOST_BROKER_PORTS='{ 1
= 20001 }'`; `FENCEPOST_UPSTREAM_TLS='{}'` for an empty one). An empty variable is none. One with `__` in it that is
no key is an error, and so is one that looks like a slip; others are left alone, what Kubernetes sets for a service
that is called `fencepost` among them. `FENCEPOST_CONFIG` names the file where no `--config` is given. Secrets are in
files, whose paths these keys hold.

## What SIGHUP changes

A running proxy reads file and environment anew at SIGHUP, and tells in one line what it has changed and what needs a
restart. Keys with ↻ change; everything else stays as it was until a restart. A file with an error changes nothing,
and the log says where the error is. Certificates, keys and passwords are read again without being told, too, when
their files change. With `--workers`, the signal goes to the first process, which tells the others.

## What `fencepost check` looks at

It asks and tries, and changes nothing (Kafka gives out one producer id, as at each start of a proxy): it can be run
beside a Kafka that works, and beside a proxy that runs (`fencepost check --running`, since ports are taken then).
Each line of its list says what to do where something is wrong; `fencepost check --json` says the same to programs. It
ends within a minute (`fencepost check --seconds 10`). Exit code: 0, a proxy would work, though there may be warnings;
1, something failed; 2, the configuration is wrong.

- **files**: certificates, keys and secrets can be read and belong together, by whom else they can be read, when
  certificates end, whether they are for `advertised_host`
- **Kafka**: every server of `upstream`, and every broker at the address that Kafka tells: name, connection, TLS,
  login, when its certificate ends; that all are one cluster; its release; that brokers have the APIs that the proxy
  itself uses; of a sidecar, that its broker sends clients to it
- **Kafka ACLs of the proxy**: see, create, read and write the state topic; get a producer id; read brokers'
  settings; read, write and describe the topics that the file guards, and those on which admins have set a check
  (*topics in the file*, *topics set by admins*: the state topic is read), and add partitions to those that grow in
  order; read all topics, for the transaction watch; describe groups and transactional ids. What is missing is told as
  the `kafka-acls` command that allows it; `admin.properties` there is the login of an administrator
- **what Kafka itself may lose** of guarded topics: too few replicas, `min.insync.replicas`, unclean leader elections
- **this machine**: every listener's address is free, `advertised_host` is known, open files are enough for
  `limits.connections_max`

Where Kafka has no answer without something being done, it is *unknown*: rights on topics that are not there yet.

"""


def markdown() -> str:
    """docs/configuration.md."""
    lines = [_PAGE_HEAD + "## Keys\n"]
    before: str | None = None
    for key in SHOWN:
        heading = key.table or ("tables" if "table" in key.kind.words else "")
        if heading != before:
            if key.table:
                lines += ["", f"## [{key.table}]", "", TABLES[key.table].doc]
            elif heading:
                lines += ["", "## Tables of names and values"]
            lines += ["", "| key | type | default | meaning |", "|---|---|---|---|"] if before is not None else _COLUMNS
            before = heading
        name = key.field_name if key.table else key.name
        option = f" Option `{key.option}`." if key.option else ""
        cells = (f"`{name}`{' ↻' if key.live else ''}", _code(type_of(key)), _code(default_of(key)))
        lines.append(f"| {' | '.join(cells)} | {_cell(_sentence(key.doc) + option)} |")
    return "\n".join([*lines, "", _TOPICS_NOTE])


_COLUMNS: Final = ["| key | type | default | meaning |", "|---|---|---|---|"]
_TOPICS_NOTE: Final = """\
```toml
[topics."orders-*"]                          # the first glob that matches a topic decides alone
"check.expected.offsets" = "required"        # names with dots need quotes

[unlisted_topics]
"idempotence.level" = "required"
```

The topic configs are those of [the contract](contract.md#topic-configs); `fencepost config explain
check.expected.offsets` explains one. What an admin sets on a topic wins over the file.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`" if '"' in text or text[:1] in "[{" or text[:1].isdigit() or text in ("true", "false") else text


# --- as they are ------------------------------------------------------------------------------------------------------


def show(loaded: Loaded, *, changed: bool = False) -> str:
    """Every key with its value and where that comes from, as TOML. `changed`: only what was given."""
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
        {"key": key.name, "value": plain(key.of(loaded.config)), "from": loaded.origin(key.name), "reloads": key.live}
        for key in SHOWN
        if not changed or key.name in loaded.origins
    ]
    return json.dumps(rows, indent=2)
