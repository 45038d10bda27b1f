"""Process identity: lets another process on the same machine detect immediately that a process is dead.

Heartbeats come every 20 seconds, so other instances need 90 seconds to consider a process dead. On the same machine a
missing or reused process id proves it without that wait.
"""

from __future__ import annotations

import os
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_STATE, _STARTED = 0, 19  # fields of /proc/<pid>/stat after the name, which may contain any character


@cache
def _machine() -> str | None:
    """Id of this boot and process-id namespace, in which processes see each other. None if unknown (not Linux)."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return None
    return blake2b(f"{boot}/{namespace}".encode(), digest_size=8).hexdigest()


def own_identity() -> str | None:
    """`machine/process id/start time`; None if unknown."""
    machine, stat = _machine(), _stat(os.getpid())
    return None if machine is None or stat is None else f"{machine}/{os.getpid()}/{stat[_STARTED]}"


def is_dead(identity: str) -> bool:
    """Whether the process is certainly dead; False if unknown."""
    machine, _, rest = identity.partition("/")
    pid, _, started = rest.partition("/")
    if machine != _machine() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it exists and belongs to another user
    stat = _stat(int(pid))
    return stat is not None and (stat[_STARTED] != started or stat[_STATE] in "ZX")


def _stat(pid: int) -> list[str] | None:
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
