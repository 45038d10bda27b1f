"""Child processes that end with their parent, even if the parent is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

#: Runs in the child before the real command. PR_SET_PDEATHSIG makes the kernel kill the child when its parent ends,
#: even by SIGKILL. The check after it covers a parent that ended before. A separate interpreter, because `preexec_fn`
#: may deadlock in a process with threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def supervised(command: list[str]) -> list[str]:
    """On Linux, a command that the kernel kills when the *thread* that starts it ends. Elsewhere unchanged."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


class SupervisedProcess:
    """A child process in its own session, so that Ctrl-C does not reach it. Its output is appended to a file.

    PDEATHSIG applies when the *thread* that started the child ends. Callers use short-lived threads (asyncio.to_thread,
    test fixtures), so each child is started by a dedicated thread that lives as long as the child. On other systems
    than Linux, a child survives a parent that is killed with -9.
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
                    supervised(command),
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
        """Also True while stopped by SIGSTOP."""
        return not self._ended.is_set()

    @property
    def exit_code(self) -> int | None:
        """Negative if ended by a signal. None while it runs."""
        return self._child.returncode

    def signal(self, number: signal.Signals) -> None:
        """Does nothing after the end: the process id may be reused."""
        self._child.send_signal(number)

    def stop_all_threads(self, timeout_seconds: float = 10.0) -> None:
        """Sends SIGSTOP and waits until all threads have stopped, which takes time on a busy machine.

        Does not wait on systems without /proc.
        """
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline and not self._stands_still():
            time.sleep(0.005)

    def _stands_still(self) -> bool:
        states = []
        for task in Path(f"/proc/{self._child.pid}/task").glob("*/stat"):
            with suppress(OSError):  # the thread has ended
                states.append(task.read_text().rpartition(")")[2].split()[0])
        return all(state in "TtZX" for state in states)

    def wait(self, timeout_seconds: float) -> bool:
        """Returns True if the process has ended."""
        return self._ended.wait(timeout_seconds)

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process
