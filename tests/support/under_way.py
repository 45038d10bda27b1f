"""Finds records of appends and commits in progress that no request accounts for."""

from __future__ import annotations

from fencepost_proxy.session.dispatcher import Dispatcher
from fencepost_proxy.transactions.table import Open, Table


def left_under_way(dispatcher: Dispatcher, table: Table) -> list[str]:
    """Conditional appends and commits without a request: they would block the commit of their transactions
    indefinitely."""
    requests = [
        produce
        for session in dispatcher.sessions.values()
        for produce in (session._waiting_produce, *session._produce_in_flight.values())
        if produce is not None
    ]
    requested = {
        (t.transactional_id, *t.producer, t.partition, t.append.base_sequence)
        for produce in requests
        for t in produce.pending_appends.values()
    }
    commits = [each for session in dispatcher.sessions.values() for each in session._commits.values()]
    unacknowledged = [
        f"{transaction.transactional_id} has a commit without a request"
        for transaction in table._transactions.values()
        if transaction.commits_sent > sum(each is transaction for each in commits)
    ]
    return unacknowledged + [
        f"{transaction.transactional_id} to {partition} (sequence {sequence}) is {state.name}"
        for key, transaction in table._transactions.items()
        for (partition, sequence), state in transaction.open.items()
        if state in (Open.WAITING, Open.SENT) and (*key, partition, sequence) not in requested
    ]
