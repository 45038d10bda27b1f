"""The hot path of the proxy in native code: `native/src`. Python decides everything that it leaves.

And that of the Spark sink, which `client/fencepost/spark/columns.py` describes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, final
from uuid import UUID

from fencepost_policies.append import Append
from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.sequencer.permits import IssuedPermit, PermitTerms
from fencepost_proxy.session.frames import request_template
from fencepost_proxy.session.frames.cutter import Watch
from fencepost_proxy.session.relay.native_calls import Proxied, Services, Watches
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition

#: See `proxy/fencepost_proxy/executor.py`.
INTERFACE: int
#: See `client/fencepost/spark/native.py`.
ENCODING_INTERFACE: int
__version__: str

def changed() -> None:
    """Something changed of what `Settings` with a `Shared` remembers of the services."""

def crc32c(*parts: bytes) -> int:
    """Of all parts together."""

def element_ends(data: bytes, at: int, count: int, layout: Sequence[tuple[int, int]]) -> list[int] | None:
    """As `wire.layouts.element_ends`; None where that raises. Other threads run meanwhile."""

class Maker(Protocol):
    """Makes a sequencer's object for an append that was sent by permission."""

    def permitted_append(self, source: Source, sent: SentAs, fence: Fence | None) -> PendingAppend: ...

#: When, monotonic seconds; requests in progress that Python keeps; bytes of the client before.
ReadUp = tuple[float, int, int]
Fence = tuple[int, int, int, int]
#: Template, topic settings, the request's frame with its length, partition, start and end of the batch there.
Source = tuple[RequestTemplate, TopicSettings, bytes, int, int, int]
#: Mode (0 conditional, 1 sequenced, 2 pass-through), offset, time of sending, leader epoch, alone, taken over.
SentAs = tuple[int, int, float, int, bool, bool]
Permitted = tuple[int, Source, SentAs, Fence | None]
#: Offset, record count, digest, write id; producer id, epoch and first sequence.
Remembered = tuple[int, int, bytes, bytes | None, tuple[int, int, int], tuple[int, float]]
#: Log end, sequence offset, since when; confirmed until, since, in which leader epoch.
TakenBack = tuple[
    tuple[int, int, float],
    tuple[float, float, int],
    list[Remembered],
    list[tuple[int, int, int]],
    list[Permitted | tuple[int, PendingAppend]],
    TopicSettings | None,
]
#: API key, version, correlation id; of appends: frame, where it starts, when the answer is due, and the
#: permit and number of each.
ReturnedRequest = tuple[int, int, int, tuple[bytes, int, float, list[tuple[Permit, int]]] | None]
#: Whether anything was received, bytes of frames done with, received bytes that are not, bytes that could not be sent,
#: errno of the other socket, errno of this one (0: the peer has closed).
Pumped = tuple[bool, int, bytes | None, bytes | None, int | None, int | None]
#: Of a frame that is relayed as it arrives: bytes left, watch, bytes before the next probe, what the last one raised.
Left = tuple[int, Watch | None, int, Exception | None]
#: Of a distribution: counts per bucket, and the sum.
Seconds = tuple[list[int], float]

@final
class MemoryBudget:
    """As `transport.memory_budget.MemoryBudget`."""

    def __new__(cls, bytes_max: int) -> MemoryBudget: ...
    def reserve(self, byte_count: int) -> bool: ...
    def release(self, byte_count: int) -> None: ...
    @property
    def reserved_bytes(self) -> int: ...
    def resize(self, bytes_max: int) -> None: ...

@final
class Shared:
    """Of services that report changes. `fresh_until`: monotonic seconds. `verify`: fail if one was not reported."""

    def __new__(cls, fresh_until: Callable[[], float], memory: MemoryBudget, verify: bool) -> Shared: ...

@final
class Settings:
    """What all connections of a process share.

    `names`: record headers with expected offset, partition count and write id. `producer_ids_end`: greater producer ids
    are for Python. `seconds`: bounds of the distributions. `throttled_at`: `wire/throttle.py`.
    `shared`: None if changes of the services are not reported by `changed`; then they are queried each time.
    """

    def __new__(
        cls,
        services: Services,
        names: tuple[bytes, bytes, bytes],
        digest_seed: int,
        producer_ids_end: int,
        seconds: tuple[float, ...],
        throttled_at: dict[int, tuple[int, ...]],
        shared: Shared | None,
    ) -> Settings: ...
    def take_counts(self) -> tuple[list[tuple[int, int, int]], int, int, int, Seconds, Seconds]:
        """Since the last call: requests by API key and version, admitted appends, bytes to Kafka and to clients,
        request and response seconds."""

@final
class TopicSettings:
    """What holds of a topic. Permits rely on `policy` and `topic_id` by identity."""

    def __new__(
        cls,
        policy: TopicPolicy,
        topic_id: UUID,
        topic_id_bytes: bytes,
        required: bool,
        source_is_base: bool,
        topic: bytes,
        cluster_id: bytes | None,
    ) -> TopicSettings: ...
    @property
    def policy(self) -> TopicPolicy: ...
    @property
    def topic_id(self) -> UUID: ...

@final
class RequestTemplate:
    """See `session/frames/request_template.py`. `maker`: makes the sequencer's objects for appends in flight."""

    topic_settings: TopicSettings | None
    def __new__(cls, start: request_template.RequestTemplate, maker: Maker) -> RequestTemplate: ...
    @property
    def timeout_ms(self) -> int: ...
    @property
    def topic_name(self) -> str: ...
    @property
    def topic(self) -> bytes: ...
    @property
    def maker(self) -> Maker: ...
    def permit(self, partition: int, permit: Permit) -> None: ...

@final
class Permit:
    """What may be appended to one partition without its sequencer."""

    def __new__(cls, issuer: IssuedPermit, partition: TopicPartition, terms: PermitTerms) -> Permit: ...
    @property
    def issuer(self) -> IssuedPermit: ...
    @property
    def partition(self) -> TopicPartition: ...
    @property
    def live(self) -> bool: ...
    @property
    def idle(self) -> bool: ...
    @property
    def log_end(self) -> int: ...
    @property
    def sequence_offset(self) -> int: ...
    def adopt(self, pending: PendingAppend, append: Append, connection: int, sent: tuple[int, int, float, int]) -> None:
        """An append that was sent before, and its batch. `sent`: mode, offset or -1, time of sending, leader epoch."""

    def may_complete_adopted(self, pending: PendingAppend, base_offset: int, append_time_ms: int) -> bool: ...
    def complete_adopted(self, base_offset: int, now: float) -> None: ...
    def take_back(self) -> TakenBack: ...
    def keep(self, id: int, pending: PendingAppend) -> None: ...
    def kept(self, id: int) -> PendingAppend | None:
        """The object that `keep` got, once."""

@final
class Connection:
    """The requests of one connection that need no decision.

    `due`: when the first answer to appends is due. `missing`: set if the last `take_up` stopped at an append without a
    permit: its partitions, empty if `RequestTemplate.topic_settings` do not hold. `watches`: None if Python relays
    frames that arrive in pieces. `others_are_open`: Python waits for an answer to another request than Produce.
    """

    template: RequestTemplate | None
    others_are_open: bool
    watches: Watches | None
    ticking: bool
    def __new__(
        cls, settings: Settings, connection: int, opened_at: float, may_write: dict[str, float]
    ) -> Connection: ...
    def __len__(self) -> int: ...
    @property
    def missing(self) -> list[int] | None: ...
    @property
    def awaits_appends(self) -> bool: ...
    @property
    def due(self) -> float | None: ...
    @property
    def collecting_since(self) -> float | None: ...
    def take_passing(self) -> tuple[Left | None, Left | None]:
        """What Python relays from now on, after `return_requests`: of the client's frame, and of the broker's."""

    @property
    def client_received_at(self) -> float: ...
    @property
    def upstream_received_at(self) -> float: ...
    def take_collected(self) -> bytes | None: ...
    def take_up(self, data: bytes, read: ReadUp) -> tuple[int, int, bytes | None]:
        """Bytes done with, those of them that are whole frames, and what to send."""

    def take_down(self, data: bytes, now: float) -> tuple[int, bytes | None]: ...
    def pump_up(self, from_: int, to: int, limit: int, read: ReadUp) -> Pumped:
        """`limit`: bytes to receive at most, 0 for no limit."""

    def pump_down(self, from_: int, to: int, limit: int, now: float) -> Pumped: ...
    def connect(self, proxied: Proxied, client_tls: Tls | None, upstream_tls: Tls | None) -> None: ...
    def disconnect(self) -> None: ...
    def start_reading(self, client_fd: int, upstream_fd: int, login_ends: float, received: int) -> None: ...
    def stop_reading(self) -> int | None: ...
    def client_readable(self) -> None: ...
    def upstream_readable(self) -> None: ...
    def return_requests(self) -> list[ReturnedRequest]: ...

@final
class TlsContext:
    """Certificates, keys and versions. ValueError: rustls does not support them."""

    @staticmethod
    def listener(
        certificates: bytes,
        key: bytes,
        min_version: str,
        clients: tuple[bool, Callable[[list[bytes]], int | None]] | None,
    ) -> TlsContext:
        """`certificates`, `key`: PEM. `clients`: whether their certificates are required, and what verifies them."""

    @staticmethod
    def upstream(trusted: list[bytes], identity: tuple[bytes, bytes] | None, min_version: str) -> TlsContext:
        """`trusted`: DER. `identity`: certificates and key, PEM."""

    def connection(self, server_name: str | None) -> Tls: ...

@final
class Tls:
    """TLS on one nonblocking socket, whose descriptor each call gets. OSError: `failure` has the reason."""

    def advance(self, record: bytes) -> bool:
        """Continues the handshake. Returns whether it is complete; then `flush`."""

    def flush(self, fd: int) -> None: ...
    def recv(self, fd: int) -> bytes: ...
    def send(self, fd: int, data: bytes) -> int: ...
    def end(self, fd: int) -> None: ...
    def expect(self, fd: int, byte_count: int) -> None: ...
    def wake_at(self, fd: int, byte_count: int) -> None: ...
    #: Plaintext bytes that one key encrypts.
    key_bytes_max: int
    @property
    def unflushed_bytes(self) -> int: ...
    @property
    def overhead_bytes(self) -> int: ...
    @property
    def carried(self) -> bytes:
        """Received ciphertext of an incomplete record."""

    @property
    def is_tls13(self) -> bool: ...
    @property
    def failure(self) -> tuple[int | None, str | None, str] | None:
        """The peer's alert, OpenSSL's name of another reason, and a description."""

#: For each value 0 if it is null (None: none is), 64-bit offsets, and the bytes from the first offset to the last.
Column = tuple[bytes | None, bytes, bytes]

def bodies(
    begin: int,
    key: Column | None,
    value: Column,
    headers: tuple[bytes, Column, Column] | None,
    time: tuple[bytes, bytes, bytes] | None,
) -> tuple[bytes, bytes]:
    """The end of each body as 64-bit numbers, and the bodies. `begin`: where the first one starts.

    `headers`: 64-bit counts, names, values. `time`: encoded name, for each row 0 if it has none, 64-bit values.
    """

def batch(header: bytes | None, first: bytes, bodies: Column, delta: int, last: bytes) -> bytes: ...
def java_partitions(keys: Column, partition_count: int) -> bytes:
    """32-bit numbers."""

def hash_sum(bodies: Column, seeds: bytes, bytes_max: int) -> int:
    """Without the bodies that are longer."""
