"""Builds a configuration from a file, the environment and the command line, or lists all errors.

The command line overrides the environment, the environment overrides client.properties, these override the file, and
the file overrides the defaults, for each key. A key whose value is a table (`topics`, `unlisted_topics`,
`broker_ports`) is overridden as a whole. Client properties replace [upstream_tls] and [control_sasl] of the file, since
parts of both would not match.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fencepost_proxy.config import Problem, ProxyConfig, Refused
from fencepost_proxy.config.client_properties import ClientProperties, read_client_properties
from fencepost_proxy.config.keys import (
    KEYS,
    PREFIX,
    SHOWN,
    TABLES,
    InvalidValue,
    Key,
    Parts,
    Table,
    dotted,
    nearest,
    table,
    variable,
)
from fencepost_proxy.config.locating import lines_of

DEFAULT: Final = "default"
COMMAND_LINE: Final = "command line"
#: Names the file for every command that takes --config.
FILE_VARIABLE: Final = f"{PREFIX}CONFIG"
_LINE: Final = re.compile(r"\(at line (\d+), column \d+\)|\(at end of document\)")
#: Likely mistakes, by words of the parser's message.
_FORGOTTEN: Final = {
    "Invalid value": "; a text needs quotes",
    "at the end of a table declaration": "; a name with more than letters, digits, - and _ needs quotes: "
    '[topics."orders-*"]',
}
#: Variables that Kubernetes sets for a service named fencepost or fencepost-status.
_OF_KUBERNETES: Final = re.compile(
    r"_SERVICE_(HOST|PORT)(_|$)|_PORT$|_PORT_\d+_(TCP|UDP|SCTP)(_|$)|^PORT(_|$)|^SERVICE_"
)
#: Similarity to a key from which a variable counts as a typing error: other software uses similar names.
_ALIKE: Final = 0.84
#: The proxy's address for the image of the Spark jobs, not a misspelt FENCEPOST_BOOTSTRAP_SERVER.
_OF_SPARK_JOBS: Final = f"{PREFIX}BOOTSTRAP"
_SECURITY: Final = ("upstream_tls", "control_sasl")
_ABSENT: Final = object()
#: Former keys, and what replaces them.
REMOVED: Final = {
    "workers": "was removed: run several proxies with reuse_port = true (docs/operations.md, several proxies on one "
    "host)",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """`origins` – of each key that was set: `fencepost.toml:3`, `environment FENCEPOST_LISTEN`, `command line`.

    `ignored` – client properties without an effect.
    """

    config: ProxyConfig
    origins: Mapping[str, str]
    file: Path | None = None
    ignored: tuple[str, ...] = ()

    def origin(self, key: str) -> str:
        return self.origins.get(key, DEFAULT)


@dataclass(frozen=True, slots=True)
class _Source:
    """`document` – as parsed from TOML. `name` – the source. `origins` – more exact origins, of tables and keys."""

    document: Mapping[str, Any]
    name: str
    origins: Mapping[Parts, str]

    def value(self, parts: Parts) -> Any:
        """_ABSENT if it is not given."""
        at: Any = self.document
        for part in parts:
            if not isinstance(at, Mapping) or part not in at:
                return _ABSENT
            at = at[part]
        return at

    def problem(self, parts: Parts, text: str) -> Problem:
        return Problem(dotted(parts), text, self.where(parts))

    def where(self, parts: Parts) -> str:
        return next((self.origins[parts[:n]] for n in range(len(parts), 0, -1) if parts[:n] in self.origins), self.name)


def read(
    file: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    command_config: Path | None = None,
) -> Loaded:
    """The file's settings, overridden by the client.properties in `command_config`, by the environment, and then by
    `overrides` (same keys and types as in TOML).

    Raises Refused with all errors: file and line or variable, the key, and the allowed values.
    """
    problems: list[Problem] = []
    sources = [_Source(overrides or {}, COMMAND_LINE, {}), _from_environment(environment or {}, problems)]
    properties = ClientProperties(None, ()) if command_config is None else read_client_properties(command_config)
    if properties.document is not None:
        sources.append(_Source(properties.document, str(command_config), {}))
    if file is not None:
        sources.append(_from_file(file, without=() if properties.document is None else _SECURITY))
    for source in sources:
        problems += _unknown(source)
    origins: dict[str, str] = {}
    values: dict[str, dict[str, Any]] = {"": {}, **{name: {} for name in TABLES}}
    for key in KEYS.values():
        given = _first(sources, key.parts)
        if given is None:
            continue
        origins[key.name] = given.where(key.parts)
        try:
            values[key.table][key.field_name] = key.read(given.value(key.parts))
        except InvalidValue as wrong:
            problems += [given.problem((*key.parts, *path), text) for path, text in wrong.problems]
    config = _built(values, sources, str(file or ""), problems)
    if problems or config is None:
        raise Refused(sorted(problems, key=_in_order))
    return Loaded(config, origins, file, properties.ignored)


def _built(
    values: Mapping[str, dict[str, Any]], sources: Sequence[_Source], file: str, problems: list[Problem]
) -> ProxyConfig | None:
    """Adds to `problems`. Values with errors are not compared with others of their table."""
    wrong = {problem.key.partition(".")[0] for problem in problems}
    top = {"upstream": (), **values[""]}
    for name, its in TABLES.items():
        source = _first(sources, (name,))
        if source is None or name in wrong:
            continue
        missing = [key for key in its.keys if key.required and key.field_name not in values[name]]
        problems += [source.problem(key.parts, "must be given") for key in missing]
        if not missing:
            top[name] = its.holds(**values[name])
    try:
        return ProxyConfig(**top)
    except Refused as refused:
        for problem in refused.problems:
            parts = tuple(problem.key.split("."))
            if parts[0] in TABLES or wrong <= TABLES.keys():
                # A missing key is reported for its table, or else for the file.
                source = _first(sources, parts) or _first(sources, parts[:1])
                problems.append(problem._replace(where=source.where(parts) if source else file))
        return None


def _first(sources: Iterable[_Source], parts: Parts) -> _Source | None:
    """The source of highest precedence that gives this key or table."""
    return next((each for each in sources if each.value(parts) is not _ABSENT), None)


def _in_order(problem: Problem) -> tuple[str, int]:
    """By file, then by line."""
    where, _, line = problem.where.rpartition(":")
    return (where, int(line)) if line.isdigit() else (problem.where, 0)


# --- sources ----------------------------------------------------------------------------------------------------------


def _from_file(file: Path, without: Sequence[str]) -> _Source:
    """Raises Refused if the file is not TOML. `without` – tables that another source replaces."""
    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
        document = tomllib.loads(text)
    except OSError as e:
        raise Refused([Problem("", f"cannot be read: {e.strerror}", str(file))]) from e
    except UnicodeDecodeError as e:
        raise Refused([Problem("", "is not UTF-8 text", str(file))]) from e
    except tomllib.TOMLDecodeError as e:
        at = _LINE.search(str(e))
        line = "" if at is None else f":{at[1] or len(text.splitlines())}"
        hint = next((stated for words, stated in _FORGOTTEN.items() if words in str(e)), "")
        raise Refused([Problem("", f"is not TOML: {e}{hint}", f"{file}{line}")]) from e
    origins = {parts: f"{file}:{line}" for parts, line in lines_of(text).items()}
    return _Source({name: value for name, value in document.items() if name not in without}, str(file), origins)


def _from_environment(environment: Mapping[str, str], problems: list[Problem]) -> _Source:
    """Variables with the prefix. An empty one counts as not set, since compose files cannot omit it."""
    document: dict[str, Any] = {}
    origins: dict[Parts, str] = {}
    known: dict[str, Key | Table] = {variable((name,)): its for name, its in TABLES.items()}
    known |= {name: key for key in KEYS.values() for name in key.variables}
    # In this order, the variable of a table precedes those of its keys.
    for name, text in sorted(environment.items()):
        if not name.startswith(PREFIX) or not text or name in (FILE_VARIABLE, _OF_SPARK_JOBS):
            continue
        found, where = known.get(name), f"environment {name}"
        if found is None:
            shown = [each for each, of in known.items() if isinstance(of, Table) or not of.hidden]
            problems += [Problem("", problem, where) for problem in _unknown_variable(name, shown)]
        elif isinstance(found, Table):
            try:
                document[found.name] = {**tomllib.loads(f"value = {text}")["value"]}
                origins[found.name,] = where
            except (tomllib.TOMLDecodeError, TypeError):
                example = f"{{ {found.keys[0].field_name} = … }}"
                problems.append(Problem(found.name, f"must be a TOML table on one line: {example}", where))
        else:
            if found.parts in origins:
                other = origins[found.parts].removeprefix("environment ")
                problems.append(Problem(found.name, f"is also set by {other}: keep one", where))
            holder = document.setdefault(found.table, {}) if found.table else document
            holder[found.field_name] = found.kind.from_text(text.strip())
            origins[found.parts] = where
    by_default = {
        key.parts: f"environment {variable(key.parts)}" for key in KEYS.values() if (key.table,) not in origins
    }
    return _Source(document, "environment", by_default | origins)


def _unknown_variable(name: str, known: Sequence[str]) -> Iterator[str]:
    if _OF_KUBERNETES.search(name.removeprefix(PREFIX)):
        return
    removed = REMOVED.get(name.removeprefix(PREFIX).lower())
    near = nearest(name, known, _ALIKE)
    if removed is not None:
        yield removed
    elif near is not None:
        yield f"there is no such key; did you mean {near}?"
    # Two underscores mark a key in a table; other software's variables do not contain them.
    elif "__" in name:
        yield "there is no such key; `fencepost config explain` lists them"


def _unknown(source: _Source) -> Iterator[Problem]:
    """Keys that do not exist, and tables that are none."""
    top = [key.name for key in SHOWN if not key.table] + list(TABLES)
    for name, value in source.document.items():
        if name in TABLES:
            try:
                inner = table((name,), value)
            except InvalidValue as wrong:
                yield source.problem((name,), str(wrong))
                continue
            known = [key.field_name for key in TABLES[name].keys]
            for each in inner:
                if each not in known:
                    yield source.problem((name, each), f"unknown key; {_hint(each, known)}")
        elif name in REMOVED:
            yield source.problem((name,), REMOVED[name])
        elif name not in KEYS:
            # Perhaps the key of a table, given without it.
            full = None if nearest(name, top) else nearest(name, [key.field_name for key in SHOWN if key.table], 0.8)
            belongs = [f"{full} belongs in [{key.table}]" for key in SHOWN if key.table and key.field_name == full]
            yield source.problem((name,), f"unknown key; {belongs[0] if belongs else _hint(name, top)}")


def _hint(name: str, allowed: Sequence[str]) -> str:
    near = nearest(name, allowed)
    return f"did you mean {near!r}?" if near else f"allowed here: {', '.join(sorted(allowed))}"
