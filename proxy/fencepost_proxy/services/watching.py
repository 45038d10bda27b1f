"""Runs the queries of `transactions/watching.py`, and logs hanging transactions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from fencepost_proxy import logs
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.tasks import Spawn
from fencepost_proxy.cluster.watching import Queries
from fencepost_proxy.transactions.watched import WHY, Answer, HangingTransaction, Leaders, Query, TransactionsReport
from fencepost_proxy.transactions.watching import Pace, TransactionMonitor
from fencepost_proxy.types import TopicPartition

_log = logs.get("services.watching")
_limited_log = logs.RateLimitedLog(_log)

_REPORTED_AT_ONCE: Final = 20


class TransactionWatch:
    """Runs the queries of `TransactionMonitor`, and logs hanging transactions. `spawn` runs a task that ends with the
    process."""

    def __init__(
        self,
        kafka: KafkaClient,
        pace: Pace,
        spawn: Spawn,
        *,
        tick_seconds: float = 1.0,
        on_leaders: Callable[[Leaders], Awaitable[None]] | None = None,
    ) -> None:
        """`on_leaders` gets the leaders of all partitions that the proxy may describe, when they have changed."""
        self._on_leaders = on_leaders
        self._leaders: Leaders | None = None
        self._kafka = kafka
        self._queries = Queries(kafka)
        self._spawn = spawn
        self._tick_seconds = tick_seconds
        self._problems: dict[type[Query], str] = {}
        self._reported: set[tuple[TopicPartition, int]] = set()
        self.watching = TransactionMonitor(pace)

    async def run(self) -> None:
        while True:
            self.query()
            self._report()
            await asyncio.sleep(self._tick_seconds)

    def report(self, shown_max: int) -> TransactionsReport:
        return self.watching.report(time.monotonic(), time.time() * 1000, shown_max)

    def query(self) -> None:
        for query_message in self.watching.next(self._kafka.brokers, time.monotonic()):
            self._spawn(self._carry_out(query_message), f"watch {type(query_message).__name__}")

    async def _carry_out(self, query_message: Query) -> None:
        answer: Answer | None = None
        try:
            answer = await self._queries.query(query_message)
            self._problems.pop(type(query_message), None)
        except UpstreamUnavailable as error:
            self._problems[type(query_message)] = str(error)
            _limited_log.warning(
                ("watch", type(query_message)),
                "transaction lookup failed",
                queried=type(query_message).__name__,
                reason=error,
            )
        finally:
            self.watching.problem = next(iter(self._problems.values()), None)
            self.watching.answered(query_message, answer, time.monotonic())
        if isinstance(answer, Leaders) and answer is not self._leaders and self._on_leaders is not None:
            self._leaders = answer
            await self._on_leaders(answer)
        self.query()

    def _report(self) -> None:
        """Log each hanging transaction once, at most `_REPORTED_AT_ONCE` at a time; the status page lists all."""
        hanging = {_where(each): each for each in self.watching.hanging(time.monotonic())}
        new = sorted(hanging.keys() - self._reported)
        if len(new) > _REPORTED_AT_ONCE:
            _log.error("many hanging transactions", new=len(new), answered_here=_REPORTED_AT_ONCE)
        for where in new[:_REPORTED_AT_ONCE]:
            each = hanging[where]
            _log.error(
                "hanging transaction: read_committed consumers of its partition are stuck",
                partition=where[0],
                start_offset=each.start_offset,
                producer_id=each.producer_id,
                producer_epoch=each.producer_epoch,
                transactional_id=each.transactional_id or "unknown",
                why=WHY[each.why],
                to_end_it=abort_command("HOST:PORT", *where[0], each.start_offset),
            )
        for partition, start_offset in sorted(self._reported - hanging.keys())[:_REPORTED_AT_ONCE]:
            _log.info("transaction no longer hangs", partition=partition, start_offset=start_offset)
        self._reported = set(hanging)


def _where(hanging: HangingTransaction) -> tuple[TopicPartition, int]:
    return TopicPartition(hanging.topic, hanging.partition), hanging.start_offset


def abort_command(connect: str, topic: str, partition: int, start_offset: int) -> str:
    """Command that ends a hanging transaction. `connect`: HOST:PORT of the proxy or Kafka, and perhaps more options."""
    return (
        f"fencepost transactions abort --bootstrap-server {connect} --topic {topic} "
        f"--partition {partition} --start-offset {start_offset}"
    )
