"""Messages with random contents, built and encoded by kio, independently of the code under test."""

from __future__ import annotations

import dataclasses
import datetime
import io
import random
import typing
import uuid
from functools import cache

from kio.schema.errors import ErrorCode
from kio.serial import entity_writer

#: APIs and versions of Kafka 4.4 that kio does not know yet, and those that only Kafka 3.9 has.
NOT_IN_KIO = frozenset({(18, 5), (28, 6), (42, 3), (88, 1), (89, 1), (93, 0), (94, 0)}) | frozenset(
    {(1, 0), (1, 1), (1, 2), (1, 3), (19, 0), (19, 1), (20, 0), (32, 0)}
)


@cache
def _hints(entity: type) -> dict[str, object]:
    return typing.get_type_hints(entity)


def made_up(entity: type, rng: random.Random, words: tuple[str, ...] = ()) -> object:
    """A kio message with random contents. If `words` is not empty, half of its strings are from there."""
    hints = _hints(entity)
    values = {}
    for field in dataclasses.fields(entity):
        values[field.name] = _value(hints[field.name], field.metadata.get("kafka_type"), rng, words)
    return entity(**values)


def _value(hint: object, kafka_type: str | None, rng: random.Random, words: tuple[str, ...]) -> object:
    arguments = typing.get_args(hint)
    if type(None) in arguments:
        if rng.random() < 0.3:
            return None
        return _value(next(each for each in arguments if each is not type(None)), kafka_type, rng, words)
    if typing.get_origin(hint) is tuple:
        return tuple(_value(arguments[0], kafka_type, rng, words) for _ in range(rng.randrange(4)))
    if dataclasses.is_dataclass(hint):
        return made_up(typing.cast(type, hint), rng, words)
    match kafka_type:
        case "string":
            if words and rng.random() < 0.5:
                return rng.choice(words)
            return "".join(rng.choices("abcdé☃_-.", k=rng.choice((0, 1, 5, 200))))
        case "bytes" | "records":
            return rng.randbytes(rng.choice((0, 1, 300)))
        case "uuid":
            return uuid.UUID(int=rng.getrandbits(128))
        case "bool":
            return rng.random() < 0.5
        case "error_code":
            return rng.choice(list(ErrorCode))
        case "float64":
            return rng.uniform(-1e9, 1e9)
        case "timedelta_i32" | "timedelta_i64":
            return datetime.timedelta(milliseconds=rng.randrange(2**31))
        case "datetime_i64":
            return datetime.datetime.fromtimestamp(rng.randrange(2**31), datetime.UTC)
        case str() if kafka_type.removeprefix("u").startswith("int"):
            bits = int(kafka_type.lstrip("uint"))
            low = 0 if kafka_type.startswith("u") else -(2 ** (bits - 1))
            return rng.randrange(low, low + 2**bits)
        case _:
            raise AssertionError(f"no value for {kafka_type} {hint}")


def by_kio(entity: type, rng: random.Random, words: tuple[str, ...] = ()) -> bytes:
    out = io.BytesIO()
    entity_writer(entity)(out, made_up(entity, rng, words))
    return out.getvalue()
