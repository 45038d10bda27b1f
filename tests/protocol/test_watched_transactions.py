"""Transactions on the status page and in the metrics, over a real socket."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from fencepost_proxy.metrics import Metrics
from fencepost_proxy.transactions.watched import (
    MARKERS_MISSING,
    UNKNOWN_TO_COORDINATOR,
    HangingTransaction,
    LaggingPartition,
    OpenTransaction,
    PartitionProducers,
    TransactionsReport,
)
from tests.protocol.test_status_server import READY, get, status_server
from tests.support.page import Case, needs_node, rendered

OBSERVED = TransactionsReport(
    producer_ids=30_001,
    partitions=10_011,
    partitions_unreadable=2,
    partitions_left_out=0,
    lagging_partitions=1,
    lag_total=7,
    lag_max=7,
    lag_seconds_max=61.0,
    transactional_ids={"Empty": 5, "PrepareCommit": 1},
    open_transactions=1,
    oldest_seconds=75.0,
    hanging_by_reason={UNKNOWN_TO_COORDINATOR: 1, MARKERS_MISSING: 1},
    open=(OpenTransaction("<b>evil</b>", 4, 0, "PrepareCommit", 2, 75.0, 60_000, 1, ("t-0",), MARKERS_MISSING),),
    hanging=(HangingTransaction("orders", 3, 41, 7, 1, 0, 1, 90.0, "pay-1", UNKNOWN_TO_COORDINATOR),),
    lagging=(LaggingPartition("orders", 3, 41, 48, 7, 61.0),),
    most_producers=(PartitionProducers("orders", 3, 12),),
    sweep_seconds=67.0,
    sweep_age_seconds=5.0,
    requests=900,
    problem="broker 3: no answer",
)


@needs_node
async def test_page_shows_hanging_transactions_and_escapes_names() -> None:
    async with status_server(lambda: replace(READY, transactions=OBSERVED)) as address:
        status = json.loads((await get(address, "/status.json"))[2])
        (page,) = await asyncio.to_thread(rendered, [Case("/", status)])
        for text in (
            "orders-3",
            "its coordinator does not know of it",
            "its markers are not written",
            "30,001",
            "1 min",
            "no answer",
        ):
            assert text in page.read.text
        assert "<b>evil" not in page.html
        assert "<b>evil</b>" in page.read.text
        (hanging,) = status["transactions"]["hanging"]
        assert (hanging["topic"], hanging["start_offset"], hanging["why"]) == ("orders", 41, UNKNOWN_TO_COORDINATOR)


@needs_node
async def test_page_without_transaction_watch_omits_transactions() -> None:
    async with status_server() as address:
        status = json.loads((await get(address, "/status.json"))[2])
        assert status["transactions"] is None
        (page,) = await asyncio.to_thread(rendered, [Case("/", status)])
        assert "Transactions of the cluster" not in page.read.text
        assert b"fencepost_kafka" not in (await get(address, "/metrics"))[2]


async def test_transaction_metrics_follow_the_kip_without_transactional_ids() -> None:
    metrics = Metrics()
    metrics.transactions = lambda: OBSERVED

    async with status_server(metrics=metrics) as address:
        text = (await get(address, "/metrics"))[2].decode()
        for line in (
            "fencepost_kafka_producer_ids 30001.0",
            'fencepost_kafka_partition_producer_ids{partition="3",topic="orders"} 12.0',
            'fencepost_kafka_last_stable_offset{partition="3",topic="orders"} 41.0',
            'fencepost_kafka_last_stable_offset_lag{partition="3",topic="orders"} 7.0',
            "fencepost_kafka_last_stable_offset_stuck_seconds_max 61.0",
            'fencepost_kafka_transactional_ids{state="Empty"} 5.0',
            "fencepost_kafka_open_transaction_age_seconds_max 75.0",
            'fencepost_kafka_hanging_transactions{reason="unknown_to_coordinator"} 1.0',
            "fencepost_watch_requests_total 900.0",
        ):
            assert f"\n{line}\n" in text
        assert "evil" not in text
