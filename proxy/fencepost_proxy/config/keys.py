"""The configuration keys as a list, derived from the dataclasses: their names and the values that they accept."""

from __future__ import annotations

import ast
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from math import inf
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from fencepost_proxy import config
from fencepost_proxy.config import NO_PATTERN_FOR, ProxyConfig
from fencepost_proxy.topics.virtual_configs import canonical, check_topic_config
from fencepost_proxy.types import Address, NodeId

#: Parts of a key's name: ("limits", "drain_seconds").
Parts = tuple[str, ...]

PREFIX: Final = "FENCEPOST_"
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_SHOWN_CHARACTERS: Final = 80
_PORT_MAX: Final = 65535


class InvalidValue(ValueError):
    """`problems` – the path within the value (empty: the whole value) and a message, for each error."""

    def __init__(self, text: str, problems: Iterable[tuple[Parts, str]] = ()) -> None:
        super().__init__(text)
        self.problems = tuple(problems) or (((), text),)


@dataclass(frozen=True, slots=True)
class ValueType:
    """Type of a key. `read` converts a TOML value to the field's value, and raises InvalidValue.

    `from_text` converts the text of an environment variable to a TOML value. `read` refuses what it cannot convert.
    """

    words: str
    read: Callable[[Any], Any]
    from_text: Callable[[str], object] = str


@dataclass(frozen=True, slots=True)
class Key:
    """`name` – as in `explain`. `table`, `field_name` – its place in ProxyConfig.

    `unit` – of a number, if the end of the name does not state it. `live` – SIGHUP changes the key (`Proxy.reload`).
    `option` – of `fencepost proxy`. `also` – another environment variable. `example` – for keys without a default.
    `least`, `most` – bounds of a number; without them, it must be above 0. `hidden` – for tests: accepted, but
    undocumented.
    """

    name: str
    table: str
    field_name: str
    kind: ValueType
    default: Any
    required: bool
    unit: str | None = None
    live: bool = False
    option: str | None = None
    also: str | None = None
    example: Any = None
    least: float | None = None
    most: float = inf
    hidden: bool = False

    @property
    def doc(self) -> str:
        return _docs()[self.name]

    @property
    def parts(self) -> Parts:
        return tuple(self.name.split("."))

    @property
    def is_number(self) -> bool:
        return "number" in self.kind.words

    @property
    def is_table(self) -> bool:
        return "table" in self.kind.words

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables; the documented one first."""
        return (variable(self.parts),) if self.also is None else (self.also, variable(self.parts))

    @property
    def bounds(self) -> str:
        return "above 0" if self.least is None else f"from {self.least} to {self.most}"

    @property
    def type(self) -> str:
        """`whole number of bytes, above 0`."""
        if not self.is_number:
            return self.kind.words
        unit = self.unit or f"of {self.field_name.removesuffix('_max').rpartition('_')[2]}"
        return f"{self.kind.words} {unit}{',' if self.least is None else ''} {self.bounds}"

    def of(self, config: ProxyConfig) -> Any:
        """The value, or None if its table is absent."""
        holder = getattr(config, self.table) if self.table else config
        return None if holder is None else getattr(holder, self.field_name)

    def read(self, value: object) -> Any:
        """The field's value. Raises InvalidValue."""
        read = self.kind.read(table(self.parts, value) if self.is_table else value)
        if self.is_number and not (read > 0 if self.least is None else self.least <= read <= self.most):
            raise InvalidValue(f"must be {self.bounds}, not {read!r}")
        return read


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the file. `optional`: its presence switches a feature on, such as TLS."""

    name: str
    holds: type[Any]
    optional: bool

    @property
    def doc(self) -> str:
        return " ".join((self.holds.__doc__ or "").split())

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(key for key in KEYS.values() if key.table == self.name)


def variable(parts: Parts) -> str:
    """Environment variable. Two underscores separate table and key."""
    return PREFIX + "__".join(parts).upper()


def dotted(parts: Parts) -> str:
    """As a TOML key, quoted where necessary."""
    return ".".join(each if _BARE.fullmatch(each) else f'"{each}"' for each in parts)


def shown(value: object) -> str:
    """The value as given, truncated to fit in a line."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    import difflib  # noqa: PLC0415 - for a mistake only

    spelt = {each.lower(): each for each in known}
    return next((spelt[each] for each in difflib.get_close_matches(name.lower(), spelt, n=1, cutoff=alike)), None)


@cache
def _docs() -> Mapping[str, str]:
    """Key -> the string after its field. Read from the source, when it is needed."""
    tables = {its.holds.__name__: f"{name}." for name, its in TABLES.items()} | {ProxyConfig.__name__: ""}
    found = {}
    for holder in ast.parse(inspect.getsource(config)).body:
        if isinstance(holder, ast.ClassDef) and holder.name in tables:
            for each, after in pairwise(holder.body):
                match each, after:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        found[tables[holder.name] + name] = " ".join(text.split())
    return found


# --- kinds ------------------------------------------------------------------------------------------------------------


def table(parts: Parts, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidValue(f"must be a table ([{dotted(parts)}]), not {shown(value)}")
    return value


def _of_type(words: str, make: type, *more: type) -> Callable[[object], Any]:
    def read(value: object) -> Any:
        if not isinstance(value, (make, *more)) or (isinstance(value, bool) and make is not bool):
            raise InvalidValue(f"must be {words}, not {shown(value)}")
        return make(value)

    return read


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidValue(f"must be a text that is not empty, not {shown(value)}")
    return value


def _path(value: object) -> Path:
    if isinstance(value, Path):  # of `client_properties`
        return value
    text = _text(value)
    if "\n" in text or text.startswith("-----BEGIN"):
        # Not shown, since it is the secret itself.
        raise InvalidValue("must be the path of a file, not its content")
    return Path(text)


def _address(value: object) -> Address:
    text = _text(value)
    try:
        return Address.parse(text)
    except ValueError as error:
        raise InvalidValue(str(error)) from error


def _addresses(value: object) -> tuple[Address, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not value:
        raise InvalidValue('must be "HOST:PORT,HOST:PORT" or a list of such addresses')
    return tuple(map(_address, value))


def _one_of(choices: tuple[str, ...]) -> Callable[[object], str]:
    def read(value: object) -> str:
        if value not in choices:
            near = nearest(str(value), choices)
            hint = f"; did you mean {near!r}?" if near else ""
            raise InvalidValue(f"must be one of {', '.join(map(repr, choices))}, not {shown(value)}{hint}")
        return str(value)

    return read


def _each(read: Callable[[str, Any], tuple[Any, Any]]) -> Callable[[Mapping[str, Any]], Mapping[Any, Any]]:
    """Reads every item of a table, and reports the errors of all."""

    def read_all(values: Mapping[str, Any]) -> Mapping[Any, Any]:
        found: dict[Any, Any] = {}
        problems: list[tuple[Parts, str]] = []
        for name, value in values.items():
            try:
                key, item = read(name, value)
                if key in found:
                    raise InvalidValue(f"sets {key}, which is already set")
                found[key] = item
            except InvalidValue as wrong:
                problems += [((name, *where), text) for where, text in wrong.problems]
        if problems:
            raise InvalidValue("", problems)
        return found

    return read_all


def _broker_port(node: str, port: object) -> tuple[NodeId, int]:
    if not node.isascii() or not node.isdigit():
        raise InvalidValue("the key must be a broker id, for example 1 = 19093")
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= _PORT_MAX:
        raise InvalidValue(f"must be a port from 1 to {_PORT_MAX}, not {shown(port)}")
    return NodeId(int(node)), port


def _topic_config(name: str, setting: object) -> tuple[str, str]:
    if isinstance(setting, dict):
        raise InvalidValue(f'a config name with dots needs quotes: "{name}.…" = "…"')
    # TOML may have true without quotes; Kafka's configs are text.
    text = _text(str(setting).lower() if isinstance(setting, bool) else setting)
    if (problem := check_topic_config(name, text)) is not None:
        raise InvalidValue(problem)
    return canonical(name), text


_topic_configs = _each(_topic_config)


def _topic(glob: str, configs: object) -> tuple[str, Mapping[str, str]]:
    if glob.startswith(NO_PATTERN_FOR):
        raise InvalidValue(
            f"no pattern matches names that begin with {NO_PATTERN_FOR}: Kafka's internal topics are never "
            "checked. For other topics, set the config on the topic itself (kafka-configs --alter)"
        )
    return glob, _topic_configs(table(("topics", glob), configs))


def _parsed(text: str) -> object:
    """The number, or else the TOML value; the text itself if it is neither."""
    for read in (int, float, lambda text: tomllib.loads(f"value = {text}")["value"]):
        try:
            return read(text)
        except ValueError:
            pass
    return text


_KINDS: Final[Mapping[Any, ValueType]] = {
    bool: ValueType("true or false", _of_type("true or false", bool), lambda text: _parsed(text.lower())),
    int: ValueType("whole number", _of_type("a whole number", int), _parsed),
    float: ValueType("number", _of_type("a number", float, int), _parsed),
    str: ValueType("text", _text),
    Path: ValueType("path of a file", _path),
    Address: ValueType('"HOST:PORT"', _address),
    tuple[Address, ...]: ValueType('list of "HOST:PORT"', _addresses),
    Mapping[NodeId, int]: ValueType("table of broker id = port", _each(_broker_port), _parsed),
    Mapping[str, str]: ValueType("table", _topic_configs, _parsed),
    Mapping[str, Mapping[str, str]]: ValueType("table of tables", _each(_topic), _parsed),
}


def _kind(hint: Any) -> ValueType:
    if get_origin(hint) is not Literal:
        return _KINDS[hint]
    choices = get_args(hint)
    return ValueType(" or ".join(json.dumps(each) for each in choices), _one_of(choices))


# --- the list ---------------------------------------------------------------------------------------------------------


def _fields(holder: type[Any]) -> Iterator[tuple[Field[Any], Any]]:
    """Fields with their types, without None."""
    hints = get_type_hints(holder)
    for each in fields(holder):
        given = [one for one in get_args(hints[each.name]) if one is not NoneType]
        yield each, given[0] if NoneType in get_args(hints[each.name]) else hints[each.name]


def _keys(holder: type[Any], table_name: str = "") -> Iterator[Key]:
    for each, hint in _fields(holder):
        if is_dataclass(hint):
            continue
        kind = _kind(hint)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        name = f"{table_name}.{each.name}" if table_name else each.name
        required = default is MISSING
        yield Key(name, table_name, each.name, kind, None if required else default, required, **each.metadata)


TABLES: Final[Mapping[str, Table]] = {
    each.name: Table(each.name, hint, each.default is None)
    for each, hint in _fields(ProxyConfig)
    if is_dataclass(hint) and isinstance(hint, type)
}
_TOP: Final = tuple(_keys(ProxyConfig))
#: In the order of the file, including hidden keys: TOML requires tables last.
KEYS: Final[Mapping[str, Key]] = {
    key.name: key
    for key in (
        *(key for key in _TOP if not key.is_table),
        *(key for its in TABLES.values() for key in _keys(its.holds, its.name)),
        *(key for key in _TOP if key.is_table),
    )
}
SHOWN: Final = tuple(each for each in KEYS.values() if not each.hidden)
