"""The interface of an append policy: one check that a topic config switches on. docs/write-a-policy.md is its tutorial.

A policy is a pure function of an `Append`, its setting and the `Facts`, so it can be read and tested without sockets.
`refusal_of` calls all policies. Three checks are no policies, because they need more than the batch. The code that has
it calls a function for each: expected offsets, which Kafka compares (`sequencer/`), partition counts, which wait for
expansions (`partition_counts.py`), and idempotence levels, which may remove producer ids (`levels.py`).

`registry.py` lists all checks. From it follow the virtual topic configs and their documentation, how deep batches are
read, what `fencepost topics` and the status page show, and the series of `fencepost_refusals_total`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from fencepost_policies.append import Append, Facts, Refusal
from fencepost_policies.fields import Reads

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


class AppendCheck(Generic[S]):
    """What the proxy can check of appends to a topic, switched on by `config`; `more_configs` say how.

    `reads`: what it needs of a batch besides its header of 61 bytes. The proxy relays batches of which no check reads
    anything. `reasons`: labels of its refusals in `fencepost_refusals_total`.
    """

    config: ClassVar[TopicConfig[Any]]
    more_configs: ClassVar[tuple[TopicConfig[Any], ...]] = ()
    reads: ClassVar[tuple[Reads, ...]] = ()
    reasons: ClassVar[tuple[str, ...]] = ()

    @property
    def off(self) -> S:
        """The setting with which it accepts everything."""
        off: S = self.config.setting(self.config.default)
        return off


class AppendPolicy(AppendCheck[S]):
    """A check that decides from the batch alone. Pure: no clock, no I/O, no memory."""

    def check(self, append: Append, setting: S, facts: Facts) -> Refusal | None:
        """None accepts. Refuse with a Kafka error code, a reason and a message: `REASON topic=…`. The setting is on."""
        raise NotImplementedError


#: Policies that are on, with their settings.
Policies = tuple[tuple[AppendPolicy[Any], Any], ...]


def refusal_of(append: Append, policies: Policies, facts: Facts) -> Refusal | None:
    """The first refusal by one of the policies."""
    return next(filter(None, (policy.check(append, setting, facts) for policy, setting in policies)), None)
