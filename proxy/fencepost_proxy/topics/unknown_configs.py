"""Topic configs that this version does not know: a newer version of the proxy set them.

A process meets them in the state topic during a rolling upgrade, and after a rollback. It keeps them unchanged there.

The stored name of a config begins with `MUST_BE_UNDERSTOOD` if a process that ignored it could accept an append that
the config refuses. A process that does not know such a config refuses all appends to the topic. Any other unknown
config is ignored. The versions that introduced a config decide which of both it is (`virtual_configs.stored_name`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fencepost_policies.append import Append, Facts, Refusal, where
from fencepost_policies.append_policy import AppendPolicy
from fencepost_proxy.errors import Error

#: No config name begins with it, so no client and no configuration file can set such a name.
MUST_BE_UNDERSTOOD: Final = "!"
UNKNOWN_CONFIG_DOCUMENTATION: Final = (
    "This version of the proxy does not know this config: a newer version set it. It can only be deleted."
)


def shown_name(stored: str) -> str:
    return stored.removeprefix(MUST_BE_UNDERSTOOD)


def must_be_understood(stored: Iterable[str]) -> tuple[str, ...]:
    """Shown names of those configs that must be understood, and are not: known ones are kept without the prefix."""
    return tuple(sorted(map(shown_name, (name for name in stored if name.startswith(MUST_BE_UNDERSTOOD)))))


class _NotUnderstood(AppendPolicy[tuple[str, ...]]):
    """Refuses every append. `setting`: names of the configs that are not understood.

    The error is retriable, since the append may pass once this process is updated, or through another one.
    """

    def check(self, append: Append, setting: tuple[str, ...], facts: Facts) -> Refusal | None:
        return Refusal(
            Error.NOT_LEADER_OR_FOLLOWER,
            "unknown_config",
            f"TRY_AGAIN {where(append)}: this proxy does not know the topic config {', '.join(setting)}, which a newer "
            "version set (update this proxy)",
        )


NOT_UNDERSTOOD: Final = _NotUnderstood()
