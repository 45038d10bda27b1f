"""Control messages: requests that are collected whole and changed, or answered, on their way (`exchange.py` says how).

What such an answer depends on is waited for here: that Kafka has answered, and that what follows of its answer is
stored (`Store`, `Stored`). And who has to know of it beforehand is told: that a transaction joins a partition, its gate
hears before Kafka does.
"""

from __future__ import annotations

from collections.abc import Callable

from fencepost_proxy.partitions.events import TransactionJoined, TransactionJoins
from fencepost_proxy.session.exchange import Exchanges
from fencepost_proxy.session.handover import OWNERS_APIS, Handover
from fencepost_proxy.session.messages import Store, ToPartition
from fencepost_proxy.session.slots import Answer, Slot
from fencepost_proxy.session.surroundings import Surroundings
from fencepost_proxy.topics.planning import Joins


class ControlMessages(Handover):
    """`exchanges` – what is to be done with each of them."""

    __slots__ = ("_exchanges", "_joins", "_next_token", "_stores")

    def __init__(
        self,
        connection: int,
        local_host: str,
        around: Surroundings,
        exchanges: Exchanges,
        opened_at: float,
        *,
        owner: bool,
    ) -> None:
        super().__init__(connection, local_host, around, opened_at, owner=owner)
        self._exchanges = exchanges
        self._joins: dict[Slot, Joins] = {}
        self._stores: dict[int, Callable[[str | None], None]] = {}
        self._next_token = 0

    def _control_message(self, api_key: int, version: int, correlation_id: int, frame: memoryview) -> None:
        """`frame` – the whole request, without its length."""
        slot = Slot(api_key, version, correlation_id, Answer.MADE_FROM_RESPONSE)
        if not self._owner and api_key in OWNERS_APIS:
            self._want_owner(frame)
            return
        exchange = self._exchanges.begin(api_key, version, frame, self.local_host)
        if not self._owner and exchange.joins is not None:
            self._want_owner(frame)
            return
        slot.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        self._to_client.append(slot)
        if exchange.forward is None:
            assert exchange.answer is not None
            slot.answer = Answer.MADE_HERE
            self._made_here += 1
            self._end(slot, [exchange.answer])
            return
        if exchange.finish is None:
            slot.answer = Answer.RELAYED
        else:
            finish = exchange.finish

            def on_response(response: memoryview) -> None:
                finished = finish(response)
                if not finished.changes:
                    self._end(slot, [finished.answer])
                    return
                token = self._next_token = self._next_token + 1

                def stored(error: str | None) -> None:
                    self._end(slot, [finished.answer if error is None else finished.answer_not_stored(error)])

                self._stores[token] = stored
                self._commands.append(Store(token, finished.changes))

            slot.on_response = on_response
        if exchange.joins is not None:
            self._join(slot, exchange.joins)
        self._from_upstream.append(slot)
        self._upstream_out.append(exchange.forward)
        self._around.forwarded(0.0)

    def _stored(self, token: int, error: str | None) -> None:
        self._stores.pop(token)(error)

    # ---- transactions

    def _join(self, slot: Slot, joins: Joins) -> None:
        """The gates hear of it before Kafka does: from then on its marker may come at any time."""
        finish = slot.on_response
        assert finish is not None

        def on_response(response: memoryview) -> None:
            self._tell_joined(self._joins.pop(slot), answered=True)
            finish(response)

        slot.on_response = on_response
        self._joins[slot] = joins
        for partition in joins.partitions:
            self._commands.append(ToPartition(partition, TransactionJoins(joins.transactional_id)))

    def _leave_joins(self) -> None:
        """Nobody will hear whether these were added."""
        for joins in self._joins.values():
            self._tell_joined(joins, answered=False)
        self._joins.clear()

    def _tell_joined(self, joins: Joins, *, answered: bool) -> None:
        for partition in joins.partitions:
            self._commands.append(ToPartition(partition, TransactionJoined(joins.transactional_id, answered)))
