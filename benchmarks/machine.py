"""Describes the machine, and measures the resources a process used. Linux only: reads /proc."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from fencepost_proxy.executor import load

_PROC = Path("/proc")
#: Before a run, for so long, other programs may use so many cores.
_OBSERVED_SECONDS = 2.0
_BUSY_CORES = 0.15
#: Kernel clock id of a process's CPU time in nanoseconds, including ended threads (`clock_getcpuclockid(3)`).
#: /proc/PID/stat has a resolution of 10 ms.
_PROCESS_CPU_CLOCK = 2


def family(pid: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(after_name[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        each = waiting.pop()
        found.append(each)
        waiting += children.get(each, [])
    return found


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of these processes so far."""
    return sum(time.clock_gettime((~pid << 3) | _PROCESS_CPU_CLOCK) for pid in pids)


def _status_kb(pid: int, name: str) -> int:
    for line in (_PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise ValueError(f"{name} of process {pid} is unknown")


def rss_bytes(pids: list[int]) -> int:
    return 1024 * sum(_status_kb(pid, "VmRSS") for pid in pids)


def rss_peak_bytes(pids: list[int]) -> int:
    """Peak since the start, or since `forget_peak`."""
    return 1024 * sum(_status_kb(pid, "VmHWM") for pid in pids)


def forget_peak(pids: list[int]) -> None:
    for pid in pids:
        (_PROC / str(pid) / "clear_refs").write_text("5")


def descriptors_max() -> int:
    """Raise the limit of open files, also for child processes, to the maximum. Returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def command_line(pid: int) -> list[str]:
    return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")


def facts() -> dict[str, str]:
    model = "unknown"
    memory = "unknown"
    for line in (_PROC / "cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    for line in (_PROC / "meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            memory = f"{int(line.split()[1]) / (1 << 20):.0f} GiB"
            break
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "CPU": model,
        "memory": memory,
        "kernel": platform.release(),
        # BBR paces loopback connections by timers, which can double a relay's CPU time.
        "TCP congestion control": (_PROC / "sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "load when it began": f"{os.getloadavg()[0]:.2f}",
    }


def busy() -> str:
    """Empty if other programs leave this machine alone: each needs what the measured ones would get."""
    before = _busy_seconds()
    time.sleep(_OBSERVED_SECONDS)
    cores = (_busy_seconds() - before) / _OBSERVED_SECONDS
    return f"before the run, other programs used {cores:.2f} cores" if cores > _BUSY_CORES else ""


def print_heading(title: str) -> None:
    """Of a result that is only printed, as Markdown; a busy machine is stated with it."""
    print(f"\n## {title}\n", flush=True)
    if stated := busy():
        print(f"**Not for publication: {stated}**\n", flush=True)


def _busy_seconds() -> float:
    """Of all cores, since the machine started: user, nice, system, and interrupts."""
    user, nice, system, _idle, _waiting, *interrupts = (
        int(each) for each in (_PROC / "stat").read_text().splitlines()[0].split()[1:8]
    )
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def versions() -> dict[str, str]:
    found = {"Python": sys.version.split()[0]}
    for package in ("fencepost", "uvloop", "crc32c", "cramjam"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    # Processes under test inherit FENCEPOST_NATIVE.
    found["fencepost"] += f" ({load()})"
    return found


def commit() -> str:
    """Commit of the work tree, with `+` for uncommitted changes outside `benchmarks/results`."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = [line for line in _git("status", "--porcelain").splitlines() if "benchmarks/results/" not in line]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.rstrip("\n")
