"""The configuration keys as a list, derived from the dataclasses: their names and the values that they accept."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from fencepost_proxy.config import Meaning, ProxyConfig, TopicPattern
from fencepost_proxy.types import Address, NodeId

#: Returns what is wrong with a virtual topic config, or None. Passed in, since virtual configs are in a higher layer.
CheckTopicConfig = Callable[[str, str], "str | None"]
#: Topic configs may be written without it.
_CONFIG_PREFIX = "fencepost."
#: Parts of a key's name: ("limits", "drain_seconds").
Parts = tuple[str, ...]

PREFIX: Final = "FENCEPOST_"
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_SHOWN_CHARACTERS: Final = 80
_PORT_MAX: Final = 65535
#: Fields with another name in the file.
_IN_THE_FILE: Final = {"topic_patterns": "topics"}
_UNITS: Final = (("_bytes_max", "bytes"), ("_per_second", "per second"), ("_seconds", "seconds"))


class InvalidValue(ValueError):
    """Errors in a value: for each, the path within the value (empty: the whole value) and a message."""

    def __init__(self, *problems: tuple[Parts, str]) -> None:
        super().__init__("; ".join(text for _, text in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class ValueType:
    """Type of a key. `read` converts a TOML value to the field's value, and raises InvalidValue.

    `from_text` converts the text of an environment variable to a TOML value. `read` refuses what it cannot convert.
    """

    words: str
    read: Callable[[Any, CheckTopicConfig | None], Any]
    from_text: Callable[[str], object] = str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Key:
    """`name` – as in `explain`. `field_name`, `table` – the field, and the name of its dataclass in ProxyConfig.

    `unit` – None if the value has no unit.
    """

    name: str
    table: str
    field_name: str
    kind: ValueType
    default: Any
    required: bool
    unit: str | None
    meaning: Meaning

    @property
    def parts(self) -> Parts:
        return tuple(self.name.split("."))

    @property
    def variable(self) -> str:
        """Environment variable. Two underscores separate table and key."""
        return variable(self.parts)

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables; the documented one first."""
        also = self.meaning.also
        return (self.variable,) if also is None else (also, self.variable)

    def of(self, config: ProxyConfig) -> Any:
        """The value, or None if its table is absent."""
        holder = getattr(config, self.table) if self.table else config
        return None if holder is None else getattr(holder, self.field_name)

    def read(self, value: object, check_topic_config: CheckTopicConfig | None) -> Any:
        """The field's value. Raises InvalidValue."""
        read = self.kind.read(value, check_topic_config)
        if isinstance(read, int | float) and (problem := self.meaning.problem(read)) is not None:
            raise InvalidValue(((), problem))
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


def variable(parts: Parts) -> str:
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


# --- kinds ------------------------------------------------------------------------------------------------------------


def _fail(text: str) -> InvalidValue:
    return InvalidValue(((), text))


def _text(value: object, _: CheckTopicConfig | None = None) -> str:
    if not isinstance(value, str) or not value:
        raise _fail(f"must be a text that is not empty, not {shown(value)}")
    return value


def _boolean(value: object, _: CheckTopicConfig | None) -> bool:
    if not isinstance(value, bool):
        raise _fail(f"must be true or false, not {shown(value)}")
    return value


def _number(value: object, _: CheckTopicConfig | None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _fail(f"must be a number, not {shown(value)}")
    return float(value)


def _whole(value: object, _: CheckTopicConfig | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _fail(f"must be a whole number, not {shown(value)}")
    return value


def _path(value: object, _: CheckTopicConfig | None) -> Path:
    if isinstance(value, Path):  # of `client_properties`
        return value
    text = _text(value)
    if "\n" in text or text.startswith("-----BEGIN"):
        # Not shown, since it is the secret itself.
        raise _fail("must be the path of a file, not its content")
    return Path(text)


def _address(value: object, _: CheckTopicConfig | None = None) -> Address:
    try:
        return Address.parse(_text(value))
    except InvalidValue:
        raise
    except ValueError as error:
        raise _fail(str(error)) from error


def _addresses(value: object, _: CheckTopicConfig | None) -> tuple[Address, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not value:
        raise _fail('must be "HOST:PORT,HOST:PORT" or a list of such addresses')
    return tuple(_address(each) for each in value)


def _one_of(choices: tuple[str, ...]) -> Callable[[object, CheckTopicConfig | None], str]:
    def read(value: object, _: CheckTopicConfig | None) -> str:
        if value not in choices:
            raise _fail(f"must be one of {', '.join(map(repr, choices))}, not {shown(value)}{_meant(value, choices)}")
        return str(value)

    return read


def _meant(value: object, choices: tuple[str, ...]) -> str:
    import difflib  # noqa: PLC0415 - for a mistake only

    spelt = {each.lower(): each for each in choices}
    near = difflib.get_close_matches(str(value).lower(), spelt, n=1)
    return f"; did you mean {spelt[near[0]]!r}?" if near else ""


def table(parts: Parts, value: object) -> Mapping[str, object]:
    """Raises InvalidValue."""
    if not isinstance(value, dict):
        raise _fail(f"must be a table ([{dotted(parts)}]), not {shown(value)}")
    return value


def _broker_ports(value: object, _: CheckTopicConfig | None) -> Mapping[NodeId, int]:
    ports: dict[NodeId, int] = {}
    problems: list[tuple[Parts, str]] = []
    for node, port in table(("broker_ports",), value).items():
        if not node.isascii() or not node.isdigit():
            problems.append(((node,), "the key must be a broker id, for example 1 = 19093"))
        elif isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= _PORT_MAX:
            problems.append(((node,), f"must be a port from 1 to {_PORT_MAX}, not {shown(port)}"))
        else:
            ports[NodeId(int(node))] = port
    if problems:
        raise InvalidValue(*problems)
    return MappingProxyType(ports)


def _topic_configs(parts: Parts) -> Callable[[object, CheckTopicConfig | None], Mapping[str, str]]:
    def read(value: object, check: CheckTopicConfig | None) -> Mapping[str, str]:
        configs: dict[str, str] = {}
        problems: list[tuple[Parts, str]] = []
        for name, setting in table(parts, value).items():
            # TOML may have true without quotes; Kafka's configs are text.
            text = str(setting).lower() if isinstance(setting, bool) else setting
            canonical = name if name.startswith(_CONFIG_PREFIX) else _CONFIG_PREFIX + name
            if isinstance(setting, dict):
                problems.append(((name,), f'a config name with dots needs quotes: "{name}.…" = "…"'))
            elif not isinstance(text, str) or not text:
                problems.append(((name,), f"must be a text that is not empty, not {shown(setting)}"))
            elif check is not None and (problem := check(name, text)) is not None:
                problems.append(((name,), problem))
            elif canonical in configs:
                problems.append(((name,), f"is given twice, with and without {_CONFIG_PREFIX!r}"))
            else:
                configs[canonical] = text
        if problems:
            raise InvalidValue(*problems)
        return MappingProxyType(configs)

    return read


def _topics(value: object, check: CheckTopicConfig | None) -> tuple[TopicPattern, ...]:
    patterns: list[TopicPattern] = []
    problems: list[tuple[Parts, str]] = []
    for glob, configs in table(("topics",), value).items():
        try:
            patterns.append(TopicPattern(glob, _topic_configs(("topics", glob))(configs, check)))
        except InvalidValue as wrong:
            problems.extend(((glob, *where), text) for where, text in wrong.problems)
    if problems:
        raise InvalidValue(*problems)
    return tuple(patterns)


def _toml_of_text(text: str) -> object:
    """A TOML value, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _boolean_of_text(text: str) -> object:
    return {"true": True, "false": False}.get(text.lower(), text)


def _number_of_text(text: str) -> object:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            pass
    return text


def _kind(hint: Any, name: str) -> ValueType:
    """The kind for a field's type. Each type needs an entry here."""
    if name == "topics":
        return ValueType("table of tables", _topics, _toml_of_text)
    if name == "unlisted_topics":
        return ValueType("table", _topic_configs((name,)), _toml_of_text)
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return ValueType(" or ".join(json.dumps(each) for each in choices), _one_of(choices), choices=choices)
    kinds: dict[Any, ValueType] = {
        bool: ValueType("true or false", _boolean, _boolean_of_text),
        int: ValueType("whole number", _whole, _number_of_text),
        float: ValueType("number", _number, _number_of_text),
        str: ValueType("text", _text),
        Path: ValueType("path of a file", _path),
        Address: ValueType('"HOST:PORT"', _address),
        tuple[Address, ...]: ValueType('list of "HOST:PORT"', _addresses),
        Mapping[NodeId, int]: ValueType("table of broker id = port", _broker_ports, _toml_of_text),
    }
    return kinds[hint]


# --- the list ---------------------------------------------------------------------------------------------------------


def _without_none(hint: Any) -> Any:
    if get_origin(hint) is not UnionType and NoneType not in get_args(hint):
        return hint
    (one,) = (each for each in get_args(hint) if each is not NoneType)
    return one


def _unit(name: str, kind: ValueType, given: str | None) -> str | None:
    if given is not None or kind.words not in ("whole number", "number"):
        return given
    for ending, unit in _UNITS:
        if name.endswith(ending):
            return unit
    what, per, each = name.removesuffix("_max").partition("_per_")
    return what.rpartition("_")[2] + (f" per {each}" if per else "") if name.endswith("_max") else None


def _key_of(each: Field[Any], hint: Any, table_name: str) -> Key:
    name = _IN_THE_FILE.get(each.name, each.name)
    kind = _kind(_without_none(hint), name)
    meaning: Meaning = each.metadata["meaning"]
    default = each.default_factory() if each.default_factory is not MISSING else each.default
    return Key(
        f"{table_name}.{name}" if table_name else name,
        table_name,
        each.name,
        kind,
        None if default is MISSING else default,
        default is MISSING,
        _unit(name, kind, meaning.unit),
        meaning,
    )


def _walk() -> Iterator[Key | Table]:
    """Keys without a table first, tables of tables last, as TOML requires."""
    hints = get_type_hints(ProxyConfig)
    later: list[Key] = []
    for each in fields(ProxyConfig):
        if not is_dataclass(_without_none(hints[each.name])) and each.metadata:
            key = _key_of(each, hints[each.name], "")
            if "table" in key.kind.words:
                later.append(key)
            else:
                yield key
    for each in fields(ProxyConfig):
        holds = _without_none(hints[each.name])
        if is_dataclass(holds) and isinstance(holds, type):
            yield Table(each.name, holds, each.default is None)
            inner = get_type_hints(holds)
            yield from (_key_of(one, inner[one.name], each.name) for one in fields(holds))
    yield from later


_ALL: Final = tuple(_walk())
TABLES: Final[Mapping[str, Table]] = MappingProxyType({each.name: each for each in _ALL if isinstance(each, Table)})
#: In the order of the file, including hidden keys.
KEYS: Final[Mapping[str, Key]] = MappingProxyType({each.name: each for each in _ALL if isinstance(each, Key)})
SHOWN: Final = tuple(each for each in KEYS.values() if not each.meaning.hidden)
