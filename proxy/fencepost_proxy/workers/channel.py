"""Messages between the supervisor and its workers: one packet each, optionally with open sockets.

Messages are pickles, because both ends are this program and share a private socket pair. A large message is sent as a
memory file, so a packet is sent completely or not at all, and can be forwarded without reading it.
"""

from __future__ import annotations

import asyncio
import copyreg
import os
import pickle
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from fencepost_proxy import logs

_limited_log = logs.RateLimitedLog(logs.get("workers.channel"))

_PACKET_BYTES_MAX: Final = 32 * 1024
_SOCKETS_MAX: Final = 4
#: Packets queued for a process that does not read; further ones are refused.
_WAITING_MAX: Final = 200
_INLINE: Final = b"i"
_IN_FILE: Final = b"b"


def _read_only(items: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    """Constructor for pickles: the class itself has no importable name."""
    return MappingProxyType(items)


copyreg.pickle(MappingProxyType, lambda found: (_read_only, (dict(found),)))


@dataclass(slots=True)
class Packet:
    """The holder of the packet owns `descriptors`; `sockets`, `forward` and `close` release them."""

    kind: str
    data: bytes
    descriptors: list[int]

    @classmethod
    def of(cls, kind: str, message: object = None, sockets: Sequence[socket.socket] = ()) -> Packet:
        """The packet takes ownership of `sockets`."""
        data = pickle.dumps(message)
        descriptors = [each.detach() for each in sockets]
        if len(data) < _PACKET_BYTES_MAX:
            return cls(kind, _INLINE + data, descriptors)
        file = os.memfd_create("fencepost", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(file), "wb") as writer:
            writer.write(data)
        return cls(kind, _IN_FILE, [*descriptors, file])

    def message(self) -> Any:
        """Return the message. Call it once."""
        if self.data[:1] == _INLINE:
            return pickle.loads(self.data[1:])
        with os.fdopen(self.descriptors.pop(), "rb") as file:
            file.seek(0)
            return pickle.load(file)

    def sockets(self) -> list[socket.socket]:
        """Return the packet's sockets. Call it once, after `message` and instead of `close`."""
        taken, self.descriptors = self.descriptors, []
        return [socket.socket(fileno=each) for each in taken]

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class TornPacket(OSError):
    """A packet's sockets were not received: this process has no file descriptors left."""


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_packet(sock: socket.socket, packet: Packet) -> None:
    """Send a packet and release its descriptors; on `OSError` the caller still owns them."""
    head = b"%s\0%c" % (packet.kind.encode(), len(packet.descriptors))
    socket.send_fds(sock, [head + packet.data], packet.descriptors)
    packet.close()


def receive_packet(sock: socket.socket) -> Packet | None:
    """Receive a packet; None if the other end closed. Raises `TornPacket` (its sockets are closed) and `OSError`."""
    data, descriptors, _, _ = socket.recv_fds(sock, 2 * _PACKET_BYTES_MAX, _SOCKETS_MAX)
    if not data:
        return None
    for each in descriptors:
        os.set_inheritable(each, False)
    kind, _, rest = data.partition(b"\0")
    packet = Packet(kind.decode(), rest[1:], list(descriptors))
    if len(descriptors) != rest[0]:
        packet.close()
        raise TornPacket(f"{len(descriptors)} of {rest[0]} sockets were received: raise the limit of open files")
    return packet


class Channel:
    """One end, in an event loop. `on_packet` takes ownership of each packet. `close` does not call `on_end`."""

    def __init__(
        self, sock: socket.socket, on_packet: Callable[[Packet], None], on_end: Callable[[], None] = lambda: None
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._on_packet = on_packet
        self._on_end = on_end
        self._waiting: deque[Packet] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)
        self._closed = False

    def send(self, packet: Packet) -> bool:
        """Send a packet; False if it was closed instead."""
        if self._closed or len(self._waiting) >= _WAITING_MAX:
            packet.close()
            return False
        self._waiting.append(packet)
        if len(self._waiting) == 1:
            self._write()
        return not self._closed

    def _write(self) -> None:
        while self._waiting:
            try:
                send_packet(self._sock, self._waiting[0])
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock, self._write)
                return
            except OSError:
                self._end()
                return
            self._waiting.popleft()
        self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            packet = receive_packet(self._sock)
        except (BlockingIOError, InterruptedError):
            return
        except TornPacket as error:
            _limited_log.error("torn", "connections closed during migration to another worker", reason=error)
            return
        except OSError:
            packet = None
        if packet is None:
            self._end()
        else:
            self._on_packet(packet)

    def _end(self) -> None:
        if not self._closed:
            self.close()
            self._on_end()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        while self._waiting:
            self._waiting.popleft().close()
