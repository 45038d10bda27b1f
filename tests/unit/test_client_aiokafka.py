"""What a failed append of aiokafka means for its transaction, and a failed start for a log writer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors

from fencepost import Record, RetryPolicy, TransactionAbortedError, WriterFencedError
from fencepost._transaction import parts_of
from fencepost.aiokafka._writers import LogReader, LogWriter, _Transaction


async def _append(error: Exception, stopped_by: Exception | None) -> None:
    """One append that fails with `error`. `stopped_by`: what stopped the library's sender."""

    async def sender() -> None:
        if stopped_by is not None:
            raise errors.KafkaError("Unexpected error during batch delivery") from stopped_by

    task = asyncio.create_task(sender())
    await asyncio.wait([task])

    class Producer:
        _sender = SimpleNamespace(sender_task=task)

        def _refusal(self, *_: Any) -> None: ...

        async def send(self, *_: Any) -> asyncio.Future[Any]:
            outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            outcome.set_exception(error)
            return outcome

    configs = {"transactional_id": "w"}
    transaction = _Transaction(configs, SimpleNamespace(require=None, cluster_id="C"), 1.0)  # type: ignore[arg-type]
    transaction._producer = Producer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fencepost.aiokafka._writers.AIOKafkaProducer.send", Producer.send)
        await transaction.send(parts_of({("t", 0): (0, [Record(b"x")])})[0], b"write")


def _lookup_failed(cause: Exception) -> Exception:
    """What aiokafka makes of an error while it looks up the coordinator."""
    failed = errors.KafkaError(repr(cause))
    failed.__cause__ = cause
    return failed


STOPPED = errors.KafkaError("Unexpected error during batch delivery")


@pytest.mark.parametrize(
    ("error", "stopped_by", "raised"),
    [
        pytest.param(STOPPED, AttributeError("send"), TransactionAbortedError, id="connection to the coordinator lost"),
        pytest.param(
            STOPPED,
            _lookup_failed(errors.KafkaConnectionError()),
            TransactionAbortedError,
            id="no connection at the lookup",
        ),
        pytest.param(
            STOPPED, _lookup_failed(errors.ClusterAuthorizationFailedError()), errors.KafkaError, id="lookup refused"
        ),
        pytest.param(STOPPED, errors.CoordinatorNotAvailableError(), TransactionAbortedError, id="no coordinator"),
        pytest.param(STOPPED, errors.TopicAuthorizationFailedError("t"), errors.KafkaError, id="no permission"),
        pytest.param(STOPPED, errors.InvalidProducerEpoch(), WriterFencedError, id="fenced"),
        pytest.param(errors.MessageSizeTooLargeError(), None, errors.MessageSizeTooLargeError, id="too large"),
        pytest.param(errors.KafkaTimeoutError(), None, TransactionAbortedError, id="timeout"),
    ],
)
def test_stopped_sender_aborts_the_transaction(
    error: Exception, stopped_by: Exception | None, raised: type[Exception]
) -> None:
    with pytest.raises(raised) as caught:
        asyncio.run(_append(error, stopped_by))
    assert type(caught.value) is raised


@pytest.mark.parametrize("kind", ["writer", "reader"])
def test_start_waits_for_the_proxy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the blocking clients do, which connect at the first read."""
    started: list[str] = []

    def failing_first(name: str) -> Callable[[Any], Awaitable[None]]:
        async def start(client: Any) -> None:
            started.append(name)
            if started.count(name) == 1:
                raise errors.KafkaConnectionError("Unable to bootstrap")

        return start

    for name in ("AIOKafkaProducer", "AIOKafkaConsumer"):
        monkeypatch.setattr(f"aiokafka.{name}.start", failing_first(name))

    async def start() -> None:
        retry = RetryPolicy(attempt_seconds=1, total_seconds=30, pause_seconds=0.001)
        async with LogWriter("t", 0, retry=retry) if kind == "writer" else LogReader([("t", 0)], retry=retry):
            pass

    asyncio.run(start())
    assert started == ["AIOKafkaProducer"] * 2 * (kind == "writer") + ["AIOKafkaConsumer"] * 2
