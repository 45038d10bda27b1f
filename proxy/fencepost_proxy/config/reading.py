"""Builds a configuration from a file, the environment and the command line, or lists all errors.

The command line overrides the environment, the environment overrides client.properties, these override the file, and
the file overrides the defaults, for each key. A key whose value is a table (`topics`, `unlisted_topics`,
`broker_ports`) is overridden as a whole. Client properties replace [upstream_tls] and [control_sasl] of the file, since
parts of both would not match.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from fencepost_proxy.config import Problem, ProxyConfig, Refused
from fencepost_proxy.config.client_properties import ClientProperties, read_client_properties
from fencepost_proxy.config.keys import (
    KEYS,
    PREFIX,
    SHOWN,
    TABLES,
    CheckTopicConfig,
    InvalidValue,
    Key,
    Parts,
    Table,
    dotted,
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


def load(
    file: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    check_topic_config: CheckTopicConfig | None = None,
    command_config: Path | None = None,
) -> ProxyConfig:
    """The configuration that `read` returns, without origins."""
    return read(
        file,
        overrides,
        environment=environment,
        check_topic_config=check_topic_config,
        command_config=command_config,
    ).config


def read(
    file: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    check_topic_config: CheckTopicConfig | None = None,
    command_config: Path | None = None,
) -> Loaded:
    """The file's settings, overridden by the client.properties in `command_config`, by the environment, and then by
    `overrides` (same keys and types as in TOML).

    Raises Refused with all errors: file and line or variable, the key, and the allowed values.
    """
    layers: list[_Layer] = [_Given(overrides or {}, COMMAND_LINE)]
    problems: list[Problem] = []
    if environment:
        layers.append(_Environment(environment, problems))
    properties = ClientProperties(None, ()) if command_config is None else read_client_properties(command_config)
    if properties.document is not None:
        layers.append(_Given(properties.document, str(command_config)))
    if file is not None:
        layers.append(_File(file, without=() if properties.document is None else _SECURITY))
    return replace(_Reader(layers, problems, check_topic_config).loaded(file), ignored=properties.ignored)


class _Layer:
    """One source. `document` – parsed like TOML; `where` – describes the origin of a key."""

    document: Mapping[str, object]

    def where(self, parts: Parts) -> str:
        raise NotImplementedError

    def has(self, parts: Parts) -> bool:
        at: object = self.document
        for part in parts:
            if not isinstance(at, Mapping) or part not in at:
                return False
            at = at[part]
        return True

    def value(self, parts: Parts) -> object:
        at: Any = self.document
        for part in parts:
            at = at[part]
        return at


class _Given(_Layer):
    def __init__(self, document: Mapping[str, object], origin: str) -> None:
        self.document, self._origin = document, origin

    def where(self, parts: Parts) -> str:
        return self._origin


class _File(_Layer):
    """Raises Refused if the file is not TOML. `without` – tables that another source replaces."""

    def __init__(self, file: Path, without: Sequence[str] = ()) -> None:
        self._file = file
        try:
            self._text = file.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
            found = tomllib.loads(self._text)
            self.document = {name: value for name, value in found.items() if name not in without}
        except OSError as e:
            raise Refused([Problem("", f"cannot be read: {e.strerror}", str(file))]) from e
        except UnicodeDecodeError as e:
            raise Refused([Problem("", "is not UTF-8 text", str(file))]) from e
        except tomllib.TOMLDecodeError as e:
            at = _LINE.search(str(e))
            line = "" if at is None else f":{at[1] or len(self._text.splitlines())}"
            hint = next((stated for words, stated in _FORGOTTEN.items() if words in str(e)), "")
            raise Refused([Problem("", f"is not TOML: {e}{hint}", f"{file}{line}")]) from e

    def where(self, parts: Parts) -> str:
        for length in range(len(parts), 0, -1):
            line = self._lines.get(parts[:length])
            if line is not None:
                return f"{self._file}:{line}"
        return str(self._file)

    @cached_property
    def _lines(self) -> Mapping[Parts, int]:
        return lines_of(self._text)


class _Environment(_Layer):
    """Variables with the prefix. An empty one counts as not set, since compose files cannot omit it."""

    def __init__(self, environment: Mapping[str, str], problems: list[Problem]) -> None:
        document: dict[str, Any] = {}
        names: dict[str, Key | Table] = {name: each for each in KEYS.values() for name in each.variables}
        names |= {variable((name,)): TABLES[name] for name in TABLES}
        self._named: dict[str, str] = {}
        for name in sorted(environment):
            text = environment[name]
            if not name.startswith(PREFIX) or not text or name in (FILE_VARIABLE, _OF_SPARK_JOBS):
                continue
            found = names.get(name)
            if found is None:
                shown = [each for each, of in names.items() if isinstance(of, Table) or not of.meaning.hidden]
                problem = self._unknown(name, shown)
                if problem is not None:
                    problems.append(Problem("", problem, f"environment {name}"))
            elif isinstance(found, Table):
                try:
                    document[found.name] = {**tomllib.loads(f"value = {text}")["value"], **document.get(found.name, {})}
                except (tomllib.TOMLDecodeError, TypeError):
                    example = f"{{ {next(each for each in SHOWN if each.table == found.name).field_name} = … }}"
                    stated = f"must be a TOML table on one line: {example}"
                    problems.append(Problem(found.name, stated, f"environment {name}"))
            else:
                if (other := self._named.setdefault(found.name, name)) != name:
                    problems.append(Problem(found.name, f"is also set by {other}: keep one", f"environment {name}"))
                value = found.kind.from_text(text.strip())
                if not found.table:
                    document[found.name] = value
                else:
                    document.setdefault(found.table, {})[found.field_name] = value
        self.document = document

    @staticmethod
    def _unknown(name: str, known: Sequence[str]) -> str | None:
        if _OF_KUBERNETES.search(name.removeprefix(PREFIX)):
            return None
        near = nearest(name, known, _ALIKE)
        if near is not None:
            return f"there is no such key; did you mean {near}?"
        # Two underscores mark a key in a table; other software's variables do not contain them.
        return "there is no such key; `fencepost config explain` lists them" if "__" in name else None

    def where(self, parts: Parts) -> str:
        for length in range(min(2, len(parts)), 0, -1):
            name = ".".join(parts[:length])
            if name in KEYS or (name in TABLES and length == len(parts)):
                return f"environment {self._named.get(name, variable(parts[:length]))}"
        return "environment"


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    import difflib  # noqa: PLC0415 - for a mistake only

    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=alike)), None)


class _Reader:
    """`layers` – highest precedence first."""

    def __init__(
        self, layers: Sequence[_Layer], problems: list[Problem], check_topic_config: CheckTopicConfig | None
    ) -> None:
        self._layers = layers
        self._problems = problems
        self._check_topic_config = check_topic_config

    def loaded(self, file: Path | None) -> Loaded:
        self._find_unknown()
        origins: dict[str, str] = {}
        values: dict[str, dict[str, Any]] = {"": {}, **{name: {} for name in TABLES}}
        for key in KEYS.values():
            layer = next((each for each in self._layers if each.has(key.parts)), None)
            if layer is None:
                continue
            origins[key.name] = layer.where(key.parts)
            try:
                values[key.table][key.field_name] = key.read(layer.value(key.parts), self._check_topic_config)
            except InvalidValue as wrong:
                for path, text in wrong.problems:
                    self._fail(layer, (*key.parts, *path), text)
        top = values[""]
        for name in TABLES:
            found = self._table(name, values[name])
            if found is not None:
                top[name] = found
        config = self._whole(top)
        if self._problems or config is None:
            raise Refused(sorted(self._problems, key=_in_order))
        return Loaded(config, origins, file)

    def _fail(self, layer: _Layer, parts: Parts, text: str) -> None:
        self._problems.append(Problem(dotted(parts), text, layer.where(parts)))

    def _find_unknown(self) -> None:
        top = [each.name for each in SHOWN if not each.table] + list(TABLES)
        for layer in self._layers:
            for name, value in layer.document.items():
                if name in TABLES:
                    try:
                        inner = table((name,), value)
                    except InvalidValue as wrong:
                        self._fail(layer, (name,), str(wrong))
                        continue
                    known = [each.name for each in fields(TABLES[name].holds)]
                    for each in inner:
                        self._known(layer, (name, each), known)
                elif name not in KEYS:
                    self._known(layer, (name,), top)

    def _known(self, layer: _Layer, parts: Parts, allowed: Sequence[str]) -> None:
        *above, name = parts
        if name in allowed:
            return
        near = nearest(name, allowed)
        if near is None and not above:
            # The key of a table, given without it.
            full = nearest(name, [each.field_name for each in SHOWN if each.table], 0.8)
            tables = [each.table for each in SHOWN if each.table and each.field_name == full]
            if full is not None:
                text = f"unknown key; {full} belongs in [{tables[0]}]"
                self._fail(layer, parts, text)
                return
        hint = f"did you mean {near!r}?" if near else f"allowed here: {', '.join(sorted(allowed))}"
        self._fail(layer, parts, f"unknown key; {hint}")

    def _table(self, name: str, values: Mapping[str, Any]) -> Any:
        """The dataclass; None if the table is absent or has errors."""
        its = TABLES[name]
        layer = next((each for each in self._layers if each.has((name,))), None)
        if layer is None or self._wrong(name):
            return None
        for key in KEYS.values():
            if key.table == name and key.required and key.field_name not in values:
                self._fail(layer, key.parts, "must be given")
        return None if self._wrong(name) else self._made(its.holds, values, (name,))

    def _whole(self, values: dict[str, Any]) -> ProxyConfig | None:
        if any(not problem.key or problem.key.split(".")[0] not in TABLES for problem in self._problems):
            return None
        values.setdefault("upstream", ())
        config: ProxyConfig | None = self._made(ProxyConfig, values, ())
        return config

    def _wrong(self, table_name: str) -> bool:
        return any(problem.key.split(".")[0] == table_name for problem in self._problems)

    def _made(self, make: Callable[..., Any], values: Mapping[str, Any], above: Parts) -> Any:
        try:
            return make(**values)
        except Refused as refused:
            for problem in refused.problems:
                parts = tuple(problem.key.split("."))
                layer = next((each for each in self._layers if each.has(parts)), None)
                layer = layer or next((each for each in self._layers if above and each.has(above)), None)
                # A missing key is reported for the file, if there is one.
                layer = layer or next((each for each in self._layers if isinstance(each, _File)), None)
                where = "" if layer is None else layer.where(parts)
                self._problems.append(problem._replace(where=where))
            return None


def _in_order(problem: Problem) -> tuple[str, int]:
    """By file, then by line."""
    where, _, line = problem.where.rpartition(":")
    return (where, int(line)) if line.isdigit() else (problem.where, 0)
