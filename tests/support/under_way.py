"""Appends and commits of transactions that a process counts as in progress, compared with its requests."""

from __future__ import annotations

from fencepost_proxy.session.dispatcher import Dispatcher
from fencepost_proxy.transactions.table import Open, Table
from fencepost_proxy.wire.apis import END_TXN


def left_under_way(dispatcher: Dispatcher, table: Table) -> list[str]:
    """Conditional appends and commits without a request. They would block their transactions' commits indefinitely."""
    sessions = dispatcher.sessions.values()
    requested = {
        (t.transactional_id, *t.producer, t.partition, t.append.base_sequence)
        for session in sessions
        for produce in session.produce_requests
        for t in produce.pending_appends.values()
    }
    sent = [each for session in sessions for each in session.sent]
    ends_sent = sum(each.api_key == END_TXN and not each.inner for each in sent)
    commits_sent = [transaction for transaction in table if transaction.commits_sent]
    unacknowledged = [
        f"a commit has no request, perhaps of {transaction.transactional_id}"
        for transaction in commits_sent
        if sum(each.commits_sent for each in commits_sent) > ends_sent
    ]
    return unacknowledged + [
        f"{transaction.transactional_id} to {partition} (sequence {sequence}) is {state.name}"
        for transaction in table
        for (partition, sequence), state in transaction.open.items()
        if state in (Open.WAITING, Open.SENT)
        and (
            transaction.transactional_id,
            transaction.producer_id,
            transaction.producer_epoch,
            partition,
            sequence,
        )
        not in requested
    ]
