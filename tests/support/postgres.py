"""A PostgreSQL server for one test or soak run, which can be killed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import free_port

_DATABASE_USER = "nobody" if os.getuid() == 0 else None  # PostgreSQL does not run as root
_SECONDS = 120


def missing_program() -> str | None:
    return next((each for each in ("initdb", "pg_ctl", "psql") if shutil.which(each) is None), None)


class Postgres:
    """A server in a directory."""

    def __init__(self, directory: Path) -> None:
        self._data, self._port = directory / "data", free_port()
        self.connection = f"host=127.0.0.1 port={self._port} user=shop dbname=postgres"
        shutil.chown(directory, _DATABASE_USER or os.getuid())
        self._run("initdb", "-D", str(self._data), "-U", "shop", "--auth=trust", "--no-sync")
        self.start()

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, user=_DATABASE_USER, cwd="/", timeout=_SECONDS)

    def start(self) -> None:
        options = f"-p {self._port} -c wal_level=logical -c unix_socket_directories='' -c fsync=off"
        log = self._data.parent / "log"
        self._run("pg_ctl", "-D", str(self._data), "-w", "-l", str(log), "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-D", str(self._data), "-m", mode, "stop")

    def execute(self, sql: str) -> None:
        command = ["psql", self.connection, "-qX", "-v", "ON_ERROR_STOP=1"]
        subprocess.run(command, input=sql, text=True, check=True, capture_output=True, timeout=_SECONDS)


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    directory = Path(f"/tmp/fencepost-postgres-{os.getpid()}")  # a test's own directory is closed to other users
    directory.mkdir(mode=0o755)
    server = None
    try:
        server = Postgres(directory)
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(directory)
