"""Status notifications to systemd for units of `Type=notify` (sd_notify(3))."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(state: str) -> None:
    """Sends `READY=1`, `STOPPING=1` or `STATUS=…`. Does nothing without a service manager."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    # "@" marks a Linux abstract socket, which has no file.
    name = "\0" + path[1:] if path[0] == "@" else path
    # A failed notification must not stop the proxy.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
        manager.setblocking(False)
        manager.sendto(state.encode(), name)
