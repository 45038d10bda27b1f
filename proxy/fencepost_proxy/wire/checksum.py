"""CRC-32C, which record batches have: by native code, or by the package crc32c, whose import takes 4 MB."""

from __future__ import annotations

from collections.abc import Callable

from fencepost_proxy.executor import EXECUTOR


def _load() -> Callable[..., int]:
    if EXECUTOR.module is not None:
        of_bytes: Callable[..., int] = EXECUTOR.module.crc32c
        return lambda *parts: of_bytes(*map(bytes, parts))
    from crc32c import crc32c as crc  # noqa: PLC0415

    def of_parts(*parts: bytes | memoryview) -> int:
        value = 0
        for part in parts:
            value = crc(part, value)
        return value

    return of_parts


#: Of all parts together: bytes or memoryviews.
crc32c = _load()
