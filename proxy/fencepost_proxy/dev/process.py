"""A child process that never outlives us, however we end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

#: Run in the child before the real command: PR_SET_PDEATHSIG makes the kernel kill it when its parent is gone, also
#: when that was killed with -9. Checking the parent afterwards closes the gap in which it died before this was set.
#: An interpreter of its own instead of `preexec_fn`, which may deadlock in a process with threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def guarded(command: list[str]) -> list[str]:
    """The same command, killed by the kernel when the *thread* that starts it ends. On Linux; elsewhere unchanged."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


class GuardedProcess:
    """One child in its own session (Ctrl-C in our terminal does not reach it), its output appended to a file.

    Linux kills a child with PDEATHSIG when the thread that started it ends. Callers start brokers from short-lived
    threads (asyncio.to_thread, test fixtures), so each child gets a thread that starts it and lives as long as it does.
    Elsewhere than on Linux a child outlives a parent that was killed with -9.
    """

    def __init__(self, command: list[str], *, output: Path, environment: dict[str, str] | None = None) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        threading.Thread(
            target=self._run, args=(command, output, environment), name=f"child {output}", daemon=True
        ).start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def _run(self, command: list[str], output: Path, environment: dict[str, str] | None) -> None:
        try:
            with output.open("ab") as file:
                self._process = subprocess.Popen(
                    guarded(command),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            self._error = error
            self._ended.set()
            self._started.set()
            return
        self._started.set()
        self._process.wait()
        self._ended.set()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        """True also while it is stopped by SIGSTOP."""
        return not self._ended.is_set()

    @property
    def exit_code(self) -> int | None:
        """Negative: ended by that signal. None while it runs."""
        return self._child.returncode

    def signal(self, number: signal.Signals) -> None:
        """Does nothing where it has ended: its id may by now be somebody else's."""
        self._child.send_signal(number)

    def stop_all_threads(self, timeout_seconds: float = 10.0) -> None:
        """SIGSTOP, and waits until it has worked: on a busy machine threads run on until one of them is scheduled.

        Where there is no /proc, nothing is waited for.
        """
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline and not self._stands_still():
            time.sleep(0.005)

    def _stands_still(self) -> bool:
        states = []
        for task in Path(f"/proc/{self._child.pid}/task").glob("*/stat"):
            with suppress(OSError):  # that thread has ended
                states.append(task.read_text().rpartition(")")[2].split()[0])
        return all(state in "TtZX" for state in states)

    def wait(self, timeout_seconds: float) -> bool:
        """True once it has ended."""
        return self._ended.wait(timeout_seconds)

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process
