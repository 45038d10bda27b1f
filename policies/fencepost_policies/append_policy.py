"""The interface of an append policy: one check that a topic config switches on. docs/write-a-policy.md is its tutorial.

A policy is a pure function of an `Append`, its setting and the `Facts`, so it can be read and tested without sockets.
`registry.py` lists the policies. A listed policy has its virtual topic config, is documented by DescribeConfigs and
`fencepost config explain`, and decides how deep the batches of its topics are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, Generic, TypeVar

from fencepost_policies.append import Append, Facts, Refusal

S = TypeVar("S")

_INT64_MAX = (1 << 63) - 1


class InvalidConfigValue(ValueError):
    """An invalid value of a topic config. The message is for the admin and lists the valid ones."""


@dataclass(frozen=True, slots=True)
class TopicConfig(Generic[S]):
    """A virtual topic config. `default` is a text, as an admin would write it."""

    name: str
    default: str
    documentation: str

    @property
    def valid(self) -> str:
        """The valid values, for people."""
        raise NotImplementedError

    @property
    def example(self) -> str:
        raise NotImplementedError

    def parse(self, text: str | None) -> str:
        """The text in its normal form. Raises InvalidConfigValue."""
        raise NotImplementedError

    def setting(self, text: str | None) -> S:
        """What the text means. Raises InvalidConfigValue."""
        raise NotImplementedError

    def _invalid(self, text: str | None) -> InvalidConfigValue:
        return InvalidConfigValue(f"Invalid value {text!r} for configuration {self.name}: it must be {self.valid}")


@dataclass(frozen=True, slots=True)
class Choice(TopicConfig[S]):
    """One of a few words, in any case. `settings`: what each of them means."""

    settings: Mapping[str, S]

    @property
    def valid(self) -> str:
        *first, last = self.settings
        return f"{', '.join(first)} or {last}"

    @property
    def example(self) -> str:
        return tuple(self.settings)[-1]

    def parse(self, text: str | None) -> str:
        word = (text or "").strip().lower()
        if word not in self.settings:
            raise self._invalid(text)
        return word

    def setting(self, text: str | None) -> S:
        return self.settings[self.parse(text)]


@dataclass(frozen=True, slots=True)
class Milliseconds(TopicConfig[int | None]):
    """A duration. -1 means no limit; the setting is None then."""

    @property
    def valid(self) -> str:
        return "milliseconds from 1, or -1"

    @property
    def example(self) -> str:
        return "60000"

    def parse(self, text: str | None) -> str:
        digits = (text or "").strip()
        if re.fullmatch("-1|[0-9]{1,19}", digits) is None or not (digits == "-1" or 1 <= int(digits) <= _INT64_MAX):
            raise self._invalid(text)
        return str(int(digits))

    def setting(self, text: str | None) -> int | None:
        number = int(self.parse(text))
        return None if number == -1 else number


class Reads(Enum):
    """What a policy needs of a batch, besides its header of 61 bytes. The proxy relays batches that no policy reads."""

    #: Record headers: expected offset, partition count, write id.
    RECORD_HEADERS = auto()
    #: The timestamps of all records.
    TIMESTAMPS = auto()


class Stage(Enum):
    """When a policy decides. A new policy decides at ARRIVAL. Each of the other stages serves one policy: the code
    named here finds out its facts, and does what else follows from its decision.
    """

    #: First; the batch may be sent without its producer id (`session/levels.py`).
    PRODUCER_ID = auto()
    #: Once the batch is read. Facts: `now_ms`.
    ARRIVAL = auto()
    #: At the append barrier of the topic (`session/partition_counts.py`).
    BARRIER = auto()
    #: When the log end is known, or Kafka compares it (`sequencer/`).
    LOG_END = auto()


class AppendPolicy(Generic[S]):
    """Accepts (None) or refuses an append. Pure: no clock, no I/O, no memory.

    `config` switches it on; `more_configs` are its other ones. `off`: the setting with which it accepts everything.
    """

    config: ClassVar[TopicConfig[Any]]
    more_configs: ClassVar[tuple[TopicConfig[Any], ...]] = ()
    off: ClassVar[object] = None
    reads: ClassVar[frozenset[Reads]] = frozenset()
    stage: ClassVar[Stage] = Stage.ARRIVAL

    def check(self, append: Append, setting: S, facts: Facts) -> Refusal | None:
        """Refuse with a Kafka error code, a reason (the label in the metrics) and a message: `REASON topic=…`."""
        raise NotImplementedError
