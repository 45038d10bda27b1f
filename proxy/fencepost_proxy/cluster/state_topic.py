"""The state topic: creates it if needed, reads it to its end, follows it and appends to it.

Every proxy of a cluster follows the same topic. Each knows what the others stored within `lease_seconds`, or knows
that its view is out of date: `fresh_until` advances only after the leader reported the end offset and the proxy read
up to it. The lease starts when that request was sent, because records acknowledged earlier are below that end.

A deposed leader that is cut off from the other brokers, but not from this proxy, still responds as leader. Therefore,
if `min.insync.replicas` is above 1, other replicas are queried too, and none may know a later leader
(docs/decisions/0014 has the proof). With 1 this cannot be detected.

Fails closed. If the topic was created again, lost records or belongs to another cluster, the checks it stored may be
lost: `failure` is set, `fresh_until` no longer advances, and an operator must decide. If the topic is unreachable or
deleted, the proxy waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final
from uuid import UUID, uuid4

from fencepost_proxy import logs
from fencepost_proxy.cluster.appends import Appends
from fencepost_proxy.cluster.broker import (
    BACKOFF_SECONDS,
    BrokerConnection,
    OutcomeUnknown,
    PooledConnection,
    UpstreamUnavailable,
    deadline_in,
    remaining,
)
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.confirmed_leader import ConfirmedLeader
from fencepost_proxy.cluster.heartbeats import Heartbeats
from fencepost_proxy.cluster.metadata import Leader
from fencepost_proxy.cluster.producer_ids import ProducerIds
from fencepost_proxy.cluster.state_log import StateLog
from fencepost_proxy.cluster.state_topic_settings import StateTopicSettings
from fencepost_proxy.cluster.tasks import SharedCall, Tasks
from fencepost_proxy.config import Limits
from fencepost_proxy.errors import Error, Reason, StateError, error_name
from fencepost_proxy.native_view import NativeView
from fencepost_proxy.topics import hints
from fencepost_proxy.topics.fencing import encode_producer_id
from fencepost_proxy.types import Monotonic, Offset, ProducerId
from fencepost_proxy.wire.batch import fence_batch
from fencepost_proxy.wire.state_records import StateRecord
from fencepost_proxy.wire.uncompressed_batch import encode_uncompressed_batch

_log = logs.get("cluster.state_topic")
_limited_log = logs.RateLimitedLog(_log)

#: First sequence of a batch with a new producer id.
_ANY_SEQUENCE: Final = 77
_FETCH_WAIT_MAX_MS: Final = 250
_PROBE_AGAIN_SECONDS: Final = 0.1
#: Share of the lease after which it is renewed; the rest covers a leader change.
_RENEWED_AFTER: Final = 1 / 6
_CLIENT_ID: Final = "fencepost-state"

#: With base offset -1 these errors mean that nothing was appended: the batch may be sent again.
_NOT_APPENDED: Final = frozenset(
    {
        Error.UNKNOWN_TOPIC_OR_PARTITION,
        Error.LEADER_NOT_AVAILABLE,
        Error.NOT_LEADER_OR_FOLLOWER,
        Error.NOT_ENOUGH_REPLICAS,
        Error.KAFKA_STORAGE_ERROR,
    }
)


class StateTopic(NativeView, until=("read_until",)):
    """See the module. `kafka` must be started and use the same event loop.

    `on_change` is called with the records just applied to `view`, in order, once per Fetch response with records. That
    includes records read during `start` and proposals that lost.
    """

    def __init__(
        self,
        kafka: KafkaClient,
        *,
        name: str,
        lease_seconds: float,
        limits: Limits,
        on_change: Callable[[Sequence[StateRecord]], None] = lambda records: None,
    ) -> None:
        if kafka.cluster_id is None:
            raise ValueError("Kafka client is not started: start it before the state topic")
        self._kafka = kafka
        self._cluster_id = kafka.cluster_id
        self._appends = Appends(kafka)
        self._producer_ids = ProducerIds(kafka)
        self._confirmed_leader = ConfirmedLeader(kafka)
        self._log = StateLog(name, self._cluster_id)
        self._tp = self._log.tp
        self.settings = StateTopicSettings(kafka, name)
        self._lease_seconds = lease_seconds
        self._limits = limits
        self._on_change = on_change
        self.view = self._log.view
        #: Why `start` waits, as of the last attempt.
        self.waits_because: Reason | None = None
        self._topic_id: UUID | None = None
        #: Send times of the last Fetch that reached the end, and of the last end offset that replicas confirmed.
        self._read_as_of = self._confirmed_as_of = float("-inf")
        self.read_until = Monotonic(float("-inf"))
        self.failure: Reason | None = None  #: why the view can never be fresh again in this process
        self._proxied: PooledConnection | None = None
        self._waiting: list[tuple[Offset, asyncio.Future[None]]] = []
        self._tasks = Tasks()
        self._ends = SharedCall(self._tasks, "end of the state topic", self._query_end)
        self._loaded = asyncio.Event()
        self.heartbeats = Heartbeats(self, kafka, limits)

    @property
    def fresh_until(self) -> Monotonic:
        """Lease: how long the view of the state topic may be used, because it contains every record in force.

        Until this `time.monotonic()`.
        """
        return Monotonic(min(self.read_until, self.heartbeats.live_until))

    @property
    def fresh(self) -> bool:
        return time.monotonic() < self.fresh_until

    async def start(self) -> None:
        """Find or create the topic and read it to its end. Waits for Kafka indefinitely.

        Raises `StateError` if the topic is unusable.
        """
        while True:
            try:
                self._topic_id = await self.settings.open()
                self.waits_because = None
                break
            except UpstreamUnavailable as e:
                if e.error_code is not None:
                    raise
                self.waits_because = Reason(f"waiting for the state topic {self._tp.topic}: {e}", hints.NEW)
                _limited_log.warning("open", "waiting for the state topic", topic=self._tp.topic, reason=e)
                await asyncio.sleep(self._limits.reconnect_backoff_max_seconds)
        tailing = self._tasks.run(self._follow(), "state topic")
        loaded = asyncio.create_task(self._loaded.wait())
        try:
            await asyncio.wait({loaded, tailing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loaded.cancel()
        self._raise_failure()
        if tailing.done():
            await tailing
        if self._confirming:
            try:
                await self.read_to_end(timeout_seconds=self._limits.connect_timeout_seconds)
            except UpstreamUnavailable as e:
                self._log_unconfirmed(e)
        self._tasks.run(self._keep_fresh(), "lease on the state topic")
        _log.info("state topic loaded", topic=self._tp.topic, topic_id=self._topic_id, end=self._log.position)

    async def close(self) -> None:
        await self.heartbeats.close()
        await self._tasks.close()
        if self._proxied is not None:
            await self._proxied.close()
        self._release(None)

    async def append(
        self,
        records: Sequence[StateRecord],
        *,
        timeout_seconds: float | None = None,
        producer_id: ProducerId | None = None,
    ) -> list[Offset]:
        """Append the records in one batch with acks=all; return their offsets once `view` has them.

        `producer_id`: a new one; the batch uses it and does not start at sequence 0 (see `Heartbeats.enter`). The batch
        is sent again only if Kafka reported that nothing was appended.

        Raises `UpstreamUnavailable` if nothing was stored, and `StateError` after a failure. Raises `OutcomeUnknown` if
        the batch may have been or may still be stored, or was not read back in time: never send that proposal again.
        """
        if not records:
            return []
        deadline = deadline_in(self._limits.request_timeout_seconds if timeout_seconds is None else timeout_seconds)
        batch = encode_uncompressed_batch(records, timestamp_ms=int(time.time() * 1000))
        if producer_id is not None:
            fence = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": _ANY_SEQUENCE}
            batch = bytes(fence_batch(memoryview(batch), **fence))
        pause = BACKOFF_SECONDS
        while True:
            self._raise_failure()
            timeout_ms = max(1, int(remaining(deadline) * 1000))
            result = await self._appends.produce(self._tp, batch, timeout_ms=timeout_ms, topic_id=self._topic_id)
            if not result.error_code:
                break
            stated = f"{error_name(result.error_code)} ({result.error_message or 'no text'})"
            text = f"{self._tp.topic}: Produce returned {stated}"
            if result.error_code in (Error.REQUEST_TIMED_OUT, Error.NOT_ENOUGH_REPLICAS_AFTER_APPEND) or (
                result.base_offset >= 0
            ):
                raise OutcomeUnknown(text)
            if result.error_code == Error.OUT_OF_ORDER_SEQUENCE_NUMBER and producer_id is not None:
                raise StateError(
                    "this Kafka requires new producers to begin at sequence 0, but conditional appends need any first "
                    "sequence. Checked topics cannot be served: use a tested Kafka release",
                    hint=hints.RELEASE,
                )
            if result.error_code not in _NOT_APPENDED:
                raise UpstreamUnavailable(text, error_code=result.error_code)
            self.waits_because = Reason(f"nothing can be stored in {text}", hints.NOT_STORED)
            if remaining(deadline) <= pause:
                raise UpstreamUnavailable(text)
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._limits.reconnect_backoff_max_seconds)
        last = Offset(result.base_offset + len(records) - 1)
        await self._applied(last, deadline)
        return [Offset(result.base_offset + delta) for delta in range(len(records))]

    async def read_to_end(self, *, timeout_seconds: float) -> None:
        """Wait until `view` has all records stored before this call. Concurrent calls share a request.

        Raises `UpstreamUnavailable` on timeout, `StateError` after a failure.
        """
        deadline = deadline_in(timeout_seconds)
        self._raise_failure()
        try:
            queried_at, end = await self._ends.result(timeout_seconds)
        except TimeoutError:
            raise UpstreamUnavailable(f"{self._tp.topic}: its leader did not report the end offset in time") from None
        await self._applied(Offset(end - 1), deadline)
        self._raise_failure()
        self._confirmed_as_of = max(self._confirmed_as_of, queried_at)
        self._renew()

    async def _query_end(self) -> tuple[Monotonic, Offset]:
        """End offset of the topic at some time after the returned time."""
        queried_at = Monotonic(time.monotonic())
        return queried_at, await self._confirmed_leader.high_watermark(
            self._tp, in_sync=self.settings.in_sync, timeout_seconds=self._limits.connect_timeout_seconds
        )

    async def acquire_producer_id(self, number: int = 0, *, timeout_seconds: float | None = None) -> ProducerId:
        """The shared producer id of this cluster's fenced appends; proposes a new one if none is agreed on.

        `number`: 0 for the first; higher for partitions that have used the epochs of the previous ones.

        Raises `UpstreamUnavailable`, `StateError`.
        """
        deadline = deadline_in(self._limits.request_timeout_seconds if timeout_seconds is None else timeout_seconds)
        while (agreed := self.view.producer_ids.get(number)) is None:
            self._raise_failure()
            producer_id, _ = await self._producer_ids.init(timeout_seconds=remaining(deadline))
            # A unique name per proposal: see `topics/state.py`.
            proposal = encode_producer_id(uuid4(), self._cluster_id, producer_id, number)
            try:
                await self.append([proposal], timeout_seconds=remaining(deadline))
            except OutcomeUnknown:
                if not remaining(deadline):
                    raise
                await asyncio.sleep(_PROBE_AGAIN_SECONDS)
            if number and self.view.producer_ids.get(number) == producer_id:
                _log.warning(
                    "another producer id was acquired: a partition has used many epochs of the previous one",
                    producer_id=producer_id,
                    number=number,
                )
        return agreed

    # --- following ----------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        try:
            while True:
                try:
                    await self._fetch()
                except UpstreamUnavailable as e:
                    reason = f"the state topic {self._tp.topic} cannot be read: {e}"
                    self.waits_because = Reason(reason, hints.NOT_READ)
                    _limited_log.warning("fetch", "state topic cannot be read", topic=self._tp.topic, reason=e)
                    await self._read_again()
        except StateError as e:
            self._fail(Reason(str(e), e.hint))
        except Exception as e:
            _log.crash("state topic reader crashed", e)
            self._fail(Reason(f"following it crashed ({e!r}); restart this proxy", hints.CRASHED))

    async def _read_again(self) -> None:
        """After a failure: refresh metadata, which shows whether the topic is the same and its leader."""
        await asyncio.sleep(_PROBE_AGAIN_SECONDS)
        try:
            await self._kafka.refresh_metadata([self._tp.topic])
        except UpstreamUnavailable:
            return
        info = self._kafka.topic(self._tp.topic)
        if info is None:
            _limited_log.error(
                "missing",
                "state topic is missing: checked topics are not served (if it was deleted, its virtual configs are "
                "lost: decide which topics need checks, then restart every proxy)",
                topic=self._tp.topic,
                topic_id=self._topic_id,
            )
        elif info.topic_id != self._topic_id:
            raise StateError(
                f"{self._tp.topic} was deleted and created again: its virtual configs and producer id are lost. "
                "Decide which topics need checks, then restart every proxy",
                hint=hints.RESTART,
            )

    async def _connection(self, leader: Leader) -> BrokerConnection:
        address = self._kafka.brokers.get(leader.node_id)
        if address is None:
            raise UpstreamUnavailable(f"the leader, broker {leader.node_id}, is not in the cluster now")
        if self._proxied is None or self._proxied.address != address:
            if self._proxied is not None:
                await self._proxied.close()
            self._proxied = PooledConnection(
                address, limits=self._limits, client_id=_CLIENT_ID, access=self._kafka.access
            )
        return await self._proxied.connected(deadline_in(self._limits.connect_timeout_seconds))

    async def _fetch(self) -> None:
        leader = self._kafka.leader(self._tp)
        if leader is None:
            raise UpstreamUnavailable("no leader now")
        connection = await self._connection(leader)
        # A start needs the end offset, not further records.
        wait_max_ms = _FETCH_WAIT_MAX_MS if self._loaded.is_set() else 0
        call = self._log.fetch_call(connection, self._topic_id, leader, wait_max_ms=wait_max_ms)
        queried_at = time.monotonic()
        patience = deadline_in(_FETCH_WAIT_MAX_MS / 1000 + self._limits.connect_timeout_seconds)
        try:
            answer = await connection.request(*call, deadline=patience)
        except UpstreamUnavailable:
            # A hanging broker may be dead: only a new connection shows it.
            await connection.close()
            raise
        applied = self._log.apply(answer)
        for record in applied.records:
            self.heartbeats.observe(record, loaded=self._loaded.is_set())
        for reason in applied.skipped:
            _limited_log.warning("left out", "state record ignored", reason=reason)
        if applied.records:
            self._on_change(applied.records)
        self._release(self._log.position)
        if self._log.position >= applied.high_watermark:
            self._read_as_of = queried_at
            self._renew()
            self._loaded.set()

    # --- the lease ----------------------------------------------------------------------------------------------------

    @property
    def _confirming(self) -> bool:
        """Whether freshness needs confirmation by replicas. Not with one replica or min.insync.replicas=1."""
        if self.settings.in_sync == 1:
            return False
        info = self._kafka.topic(self._tp.topic)
        return info is None or info.replication_factor > 1

    def _renew(self) -> None:
        as_of = min(self._read_as_of, self._confirmed_as_of) if self._confirming else self._read_as_of
        self.read_until = Monotonic(as_of + self._lease_seconds)
        if self.fresh:
            self.waits_because = None

    async def _keep_fresh(self) -> None:
        """Query the end offset to renew the lease, unless another call did so."""
        while self.failure is None:
            often = self._lease_seconds * _RENEWED_AFTER
            due_in = self._confirmed_as_of + often - time.monotonic() if self._confirming else often
            if due_in > 0:
                await asyncio.sleep(due_in)
                continue
            try:
                await self.read_to_end(timeout_seconds=self._limits.connect_timeout_seconds)
            except UpstreamUnavailable as e:
                self._log_unconfirmed(e)
                await asyncio.sleep(_PROBE_AGAIN_SECONDS)
            except StateError:
                return

    def _log_unconfirmed(self, reason: UpstreamUnavailable) -> None:
        text = f"leader of the state topic {self._tp.topic} is not confirmed: {reason}"
        self.waits_because = Reason(text, hints.UNCONFIRMED)
        _limited_log.warning(
            "unconfirmed", "leader of the state topic is not confirmed", topic=self._tp.topic, reason=reason
        )

    def _fail(self, reason: Reason) -> None:
        self.failure = reason
        _log.error("state topic failed, checked topics are not served", topic=self._tp.topic, reason=reason)
        self._release(None)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise StateError(self.failure.text, hint=self.failure.hint)

    # --- waiting calls ------------------------------------------------------------------------------------------------

    async def _applied(self, offset: Offset, deadline: Monotonic) -> None:
        if offset < self._log.position:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((offset, waiter))
        done, _ = await asyncio.wait({waiter}, timeout=remaining(deadline))
        self._waiting = [each for each in self._waiting if each[1] is not waiter]
        if not done or offset >= self._log.position:
            raise OutcomeUnknown(f"{self._tp.topic}: stored at offset {offset}, but not read back in time")

    def _release(self, position: Offset | None) -> None:
        """Wake calls whose records were applied; None wakes all, because no more records will be applied."""
        for offset, waiter in self._waiting:
            if (position is None or offset < position) and not waiter.done():
                waiter.set_result(None)
