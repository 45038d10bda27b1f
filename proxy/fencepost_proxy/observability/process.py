"""CPU time and waits, memory and files of this process, from Linux's `/proc`."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

from fencepost_proxy.metrics import ProcessNumbers

_OF_PROCESS: Final = Path("/proc/self")


def cpu_wait_seconds() -> float | None:
    """How long the calling thread was ready to run without a CPU. None if the system does not report it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def process_numbers() -> ProcessNumbers | None:
    """None on other systems."""
    try:
        # The fields after the program's name, which may contain anything.
        fields = (_OF_PROCESS / "stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return ProcessNumbers(
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            virtual_bytes=int(fields[20]),
            resident_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
            started_at=float(booted.split()[1]) + since_boot,
            open_files=len(os.listdir(_OF_PROCESS / "fd")) - 1,  # without the one that lists the directory
            open_files_max=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )
    except OSError:
        return None
