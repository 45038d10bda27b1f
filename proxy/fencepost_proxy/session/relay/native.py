"""The native module, if it is installed: `native/`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from fencepost_policies.idempotence_level import MADE_UP_IDS_FROM
from fencepost_proxy.executor import EXECUTOR, VERIFY
from fencepost_proxy.metrics import ADDED_SECONDS
from fencepost_proxy.session.frames.services import Services
from fencepost_proxy.wire.batch_digest import SEED
from fencepost_proxy.wire.throttle import THROTTLED_AT

if TYPE_CHECKING:
    import fencepost_native as native

MODULE = EXECUTOR.module


def shared(fresh_until: Callable[[], float], memory: object) -> native.Shared | None:
    """For services whose every change is reported by `native_view`. `memory` – the native budget of memory."""
    if MODULE is None:
        return None
    made: native.Shared = MODULE.Shared(fresh_until, memory, VERIFY)
    return made


def settings_for(services: Services, shared: native.Shared | None = None) -> tuple[ModuleType, native.Settings] | None:
    """What its connections share; None without the module."""
    if MODULE is None:
        return None
    names = services.header_names
    return MODULE, MODULE.Settings(
        services,
        (names.expected_offset, names.partition_count, names.write_id),
        SEED,
        MADE_UP_IDS_FROM,
        ADDED_SECONDS,
        dict(THROTTLED_AT),
        shared,
    )
