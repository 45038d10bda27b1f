"""Reports topics with configs that this version does not know (`topics/unknown_configs.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fencepost_proxy import logs
from fencepost_proxy.observability.status import Problem
from fencepost_proxy.services.topic_warnings import some
from fencepost_proxy.topics.hints import UNKNOWN_CONFIGS
from fencepost_proxy.topics.unknown_configs import must_be_understood, shown_name

_log = logs.get("services.unknown_configs")
_limited_log = logs.RateLimitedLog(_log)


class _Unknown(NamedTuple):
    topics: int
    names: str
    configs: str


def _unknown(configs: Mapping[str, Sequence[str]], *, refused: bool) -> _Unknown | None:
    """None if there are no such topics. `configs`: by topic, the stored names of configs."""
    found = {topic: names for topic, names in configs.items() if bool(must_be_understood(names)) is refused}
    shown = {shown_name(name) for names in found.values() for name in names}
    return _Unknown(len(found), some(sorted(found)), some(sorted(shown))) if found else None


def log(configs: Mapping[str, Sequence[str]]) -> None:
    """For topics whose configs have changed."""
    if (unknown := _unknown(configs, refused=True)) is not None:
        _limited_log.warning(
            "refused",
            "appends to topics are refused: they have configs that this version does not know (update this proxy, or "
            "delete the configs)",
            **unknown._asdict(),
        )
    if (unknown := _unknown(configs, refused=False)) is not None:
        _limited_log.warning(
            "ignored",
            "topics have configs that this version does not know, and ignores (update this proxy, or delete the "
            "configs)",
            **unknown._asdict(),
        )


def problems(configs: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    if (unknown := _unknown(configs, refused=True)) is not None:
        what = f"Appends to {unknown.names} are refused: this version does not know {unknown.configs}"
        yield Problem(True, f"{what}, which a newer version set", UNKNOWN_CONFIGS)
    if (unknown := _unknown(configs, refused=False)) is not None:
        what = f"This version does not know, and ignores, {unknown.configs} on {unknown.names}"
        yield Problem(False, f"{what}; a newer version set that", UNKNOWN_CONFIGS)
