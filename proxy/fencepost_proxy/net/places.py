"""Where a process runs: by that, another one on the same machine can tell at once that it is gone.

Signs of life come every 20 seconds, so it takes a minute and a half until the others are sure. What is started again on
the same machine need not wait for that: no process of that number, or another one by now, is proof.
"""

from __future__ import annotations

import os
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_STATE, _STARTED = 0, 19  # of the fields of /proc/<pid>/stat behind the name, which may contain anything


@cache
def _machine() -> str | None:
    """Two processes with the same one see each other's process ids; None where that cannot be known (not Linux)."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return None
    return blake2b(f"{boot}/{namespace}".encode(), digest_size=8).hexdigest()


def own_place() -> str | None:
    """`machine/process id/when it was started`; None where nobody could make use of it."""
    machine, stat = _machine(), _stat(os.getpid())
    return None if machine is None or stat is None else f"{machine}/{os.getpid()}/{stat[_STARTED]}"


def is_gone(place: str) -> bool:
    """Certainly: a process that was there is not any more. False wherever that cannot be told from here."""
    machine, _, rest = place.partition("/")
    pid, _, started = rest.partition("/")
    if machine != _machine() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it is there, and another user's
    stat = _stat(int(pid))
    return stat is not None and (stat[_STARTED] != started or stat[_STATE] in "ZX")


def _stat(pid: int) -> list[str] | None:
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
