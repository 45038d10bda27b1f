"""Control messages: requests that are collected whole and changed, or answered, on their way (`exchange.py` says how).

What such an answer depends on is waited for here: that Kafka has answered, that what follows of its answer is stored
(`Store`, `Stored`), that topics have grown (`Expand`, `Expanded`), that it is known how far a group is (`Ask`,
`Replied`). And who has to know of it beforehand is
told: that a transaction joins a partition, its gate hears before Kafka does, and may put it off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from fencepost_proxy.groups.questions import Question, Reply
from fencepost_proxy.partitions.events import TransactionJoined, TransactionJoins
from fencepost_proxy.session.connection import MESSAGE_WORK_BYTES
from fencepost_proxy.session.exchange import AnswerExpanded, Exchange, Exchanges, Finished
from fencepost_proxy.session.handover import OWNERS_APIS, Handover
from fencepost_proxy.session.messages import Ask, Expand, Noticed, ReadBatches, Store, ToPartition
from fencepost_proxy.session.reading import Work
from fencepost_proxy.session.slots import Answer, Slot
from fencepost_proxy.session.surroundings import Surroundings
from fencepost_proxy.topics.planning import ExpansionOutcome, Joins
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.api_versions import introduced
from fencepost_proxy.wire.apis import API_VERSIONS, DESCRIBE_TOPIC_PARTITIONS, FIND_COORDINATOR, METADATA

_T = TypeVar("_T")

#: A control message above it is read, planned and written in a thread (`ReadBatches`): each of its bytes may take some
#: microseconds.
HERE_BYTES_MAX = 4096
#: The same for a request that is only searched for the state topic, and for a Produce response.
SEARCHED_HERE_BYTES_MAX = 1 << 20
PRODUCED_HERE_BYTES_MAX = 1 << 16
#: Only searched, though their responses do not pass.
_SEARCHED = frozenset({METADATA, FIND_COORDINATOR, DESCRIBE_TOPIC_PARTITIONS})


@dataclass(slots=True)
class Joining:
    """A request that adds partitions to a transaction and has not been sent. `waiting` – for these gates."""

    slot: Slot
    exchange: Exchange
    joins: Joins
    waiting: set[TopicPartition]
    until: float


class ControlMessages(Handover):
    """`exchanges` – what is to be done with each of them."""

    __slots__ = ("_asks", "_exchanges", "_expansions", "_joining", "_joins", "_stores")

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
        self._joining: Joining | None = None
        self._joins: dict[Slot, Joins] = {}
        self._asks: dict[int, Callable[[Reply], None]] = {}
        self._stores: dict[int, Callable[[str | None], None]] = {}
        self._expansions: dict[int, Callable[[Mapping[str, ExpansionOutcome]], None]] = {}

    def _control_message(self, api_key: int, version: int, correlation_id: int, frame: memoryview) -> None:
        """`frame` – the whole request, without its length."""
        slot = Slot(api_key, version, correlation_id, Answer.MADE_FROM_RESPONSE)
        if not self._owner and api_key in OWNERS_APIS:
            self._want_owner(frame)
            return
        large = self._takes_long(api_key, frame)
        self._work(
            large,
            lambda: self._exchanges.begin(api_key, version, frame, self.local_host),
            lambda exchange: self._begin_exchange(slot, frame, exchange, large=large),
            reads_on=False,
        )

    def _begin_exchange(self, slot: Slot, frame: memoryview, exchange: Exchange, *, large: bool) -> None:
        """`large` – its response is to be worked on in a thread, however short."""
        if not self._owner and exchange.joins is not None:
            self._want_owner(frame)
            return
        if slot.api_key == API_VERSIONS and self.software is None:
            client_id, self.software = introduced(frame)
            self.client_id = self.client_id or client_id
        slot.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        self._to_client.append(slot)
        if exchange.forward is None:
            assert exchange.answer is not None
            slot.answer = Answer.MADE_HERE
            self._quota -= MESSAGE_WORK_BYTES + len(frame)
            self._end(slot, [exchange.answer])
            return
        if exchange.finish is None:
            slot.answer = Answer.RELAYED
        else:
            self._quota -= MESSAGE_WORK_BYTES + len(frame)
            finish = exchange.finish

            def on_response(response: memoryview) -> None:
                is_large = large or len(response) > HERE_BYTES_MAX

                def done(finished: Finished) -> None:
                    self._finish_exchange(slot, finished, large=is_large)

                self._work(is_large, lambda: finish(response), done)

            slot.on_response = on_response
        if exchange.joins is not None:
            self._wants_to_join(slot, exchange, exchange.joins)
            return
        if exchange.first is not None:
            self._send_first(slot, exchange)
        self._from_upstream.append(slot)
        self._upstream_out.append(exchange.forward)
        self._around.forwarded(0.0)

    def _finish_exchange(self, slot: Slot, finished: Finished, *, large: bool) -> None:
        if finished.answer_expanded is not None:
            self._expand(slot, finished, finished.answer_expanded, large=large)
            return
        if finished.question is not None:
            self._ask(slot, finished.question, finished.complete, large=large)
            return
        if finished.notice is not None:
            self._commands.append(Noticed(finished.notice))
        self._note_served(finished)
        if not finished.changes:
            self._end(slot, [finished.answer])
            return
        token = self._next_token = self._next_token + 1

        def stored(error: str | None) -> None:
            if error is None:
                self._end(slot, [finished.answer])
            else:
                self._end_with(slot, lambda: finished.answer_not_stored(error), large=large)

        self._stores[token] = stored
        self._commands.append(Store(token, finished.changes))

    def _send_first(self, slot: Slot, exchange: Exchange) -> None:
        assert exchange.first is not None
        first = Slot(slot.api_key, slot.version, slot.correlation_id, Answer.MADE_FROM_RESPONSE)
        first.inner = True
        finish_first = exchange.finish_first

        def on_response(response: memoryview) -> None:
            self._work(len(response) > HERE_BYTES_MAX, lambda: finish_first(response), lambda _: None)

        first.on_response = on_response
        self._from_upstream.append(first)
        self._upstream_out.append(exchange.first)

    def _expand(self, slot: Slot, finished: Finished, answer: AnswerExpanded, *, large: bool) -> None:
        if not finished.expansions:
            self._end_with(slot, lambda: answer({}), large=large)
            return
        token = self._next_token = self._next_token + 1
        self._expansions[token] = lambda outcomes: self._end_with(slot, lambda: answer(outcomes), large=large)
        self._commands.append(Expand(token, finished.expansions, finished.timeout_ms))

    def _expanded(self, token: int, outcomes: tuple[ExpansionOutcome, ...]) -> None:
        self._expansions.pop(token)({outcome.topic: outcome for outcome in outcomes})

    def _ask(self, slot: Slot, question: Question, complete: Callable[[Reply], bytes], *, large: bool) -> None:
        token = self._next_token = self._next_token + 1
        self._asks[token] = lambda reply: self._end_with(slot, lambda: complete(reply), large=large)
        self._commands.append(Ask(token, question))

    def _replied(self, token: int, reply: Reply) -> None:
        self._asks.pop(token)(reply)

    # ---- what takes long

    def _takes_long(self, api_key: int, frame: memoryview) -> bool:
        if len(frame) <= HERE_BYTES_MAX:
            return False
        if api_key not in self._around.passes and api_key not in _SEARCHED:
            return True
        if len(frame) > SEARCHED_HERE_BYTES_MAX:
            return True
        data = bytes(frame)
        return any(mark in data for mark in self._around.state_topic_marks)

    def _end_with(self, slot: Slot, make: Callable[[], bytes], *, large: bool) -> None:
        self._work(large, make, lambda answer: self._end(slot, [answer]))

    def _work(self, large: bool, make: Callable[[], _T], done: Callable[[_T], None], *, reads_on: bool = True) -> None:
        """`done` is given what `make` makes, here and now or, where that takes long, in a thread.

        Meanwhile nothing else of this connection's requests is read (`reads_on` False), or of its responses.
        """
        if not large:
            done(make())
            return
        work = Work(make)
        if reads_on:
            token = self._next_token = self._next_token + 1
            self._finishing[token] = lambda: done(work.result())
            self._commands.append(ReadBatches(token, work.run))
        else:
            self._read_elsewhere(work.run, lambda: done(work.result()))

    def _read_elsewhere(self, read: Callable[[], None], done: Callable[[], None]) -> None:
        """Nothing behind its request is read meanwhile."""
        token = self._next_token = self._next_token + 1
        self._held = True
        self._reading = token, done
        self._commands.append(ReadBatches(token, read))

    def _batches_read(self, token: int) -> None:
        finished = self._finishing.pop(token, None)
        if finished is not None:
            # Also where its client is gone: what Kafka has done may have to be stored.
            finished()
            self._answer_front()
            return
        if self._reading is None or self._reading[0] != token:
            return
        (_, done), self._reading, self._held = self._reading, None, False
        if not (self.client_gone or self.upstream_gone or self._closing):
            done()

    def _note_served(self, finished: Finished) -> None:
        """Which partition counts its client knows from now on."""
        around = self._around
        if finished.partition_counts and around.fresh(self._now):
            policies = ((topic, around.policy(topic), count) for topic, count in finished.partition_counts)
            counts = [(topic, count) for topic, policy, count in policies if policy is not None and policy.counted]
            if counts:
                around.note_served(self.connection, finished.client_id, counts)

    def _stored(self, token: int, error: str | None) -> None:
        self._stores.pop(token)(error)

    # ---- transactions

    def _wants_to_join(self, slot: Slot, exchange: Exchange, joins: Joins) -> None:
        raise NotImplementedError

    def _ask_to_join(self, slot: Slot, exchange: Exchange, joins: Joins) -> None:
        """The gates hear of it before Kafka does, and say when: from then on its marker may come at any time."""
        until = self._now + self._around.gate_wait_max_seconds
        self._joining = Joining(slot, exchange, joins, set(joins.partitions), until)
        self._held = True
        for partition in joins.partitions:
            self._commands.append(ToPartition(partition, TransactionJoins(joins.transactional_id, self.connection)))

    def _may_join(self, partition: TopicPartition) -> None:
        joining = self._joining
        if joining is None or self.client_gone or self.upstream_gone:
            return
        joining.waiting.discard(partition)
        if joining.waiting:
            return
        self._joining, self._held = None, False
        self._join(joining.slot, joining.joins)
        assert joining.exchange.forward is not None
        self._from_upstream.append(joining.slot)
        self._upstream_out.append(joining.exchange.forward)
        self._around.forwarded(0.0)

    def _join_later(self, now: float) -> None:
        """Appends are in doubt where it wants to join: its client is to try again, and nothing has been added."""
        joining = self._joining
        if joining is None or joining.until > now or self.client_gone:
            return
        self._joining, self._held = None, False
        self._tell_joined(joining.joins, answered=True)
        joining.slot.answer = Answer.MADE_HERE
        self._end(joining.slot, [joining.exchange.answer_later()])

    def _join(self, slot: Slot, joins: Joins) -> None:
        finish = slot.on_response
        assert finish is not None

        def on_response(response: memoryview) -> None:
            self._tell_joined(self._joins.pop(slot), answered=True)
            finish(response)

        slot.on_response = on_response
        self._joins[slot] = joins

    def _leave_joins(self) -> None:
        """Nobody will hear whether these were added; what has not been sent will not be."""
        joining, self._joining, self._held = self._joining, None, False
        if joining is not None:
            self._tell_joined(joining.joins, answered=True)
        for joins in self._joins.values():
            self._tell_joined(joins, answered=False)
        self._joins.clear()

    def _tell_joined(self, joins: Joins, *, answered: bool) -> None:
        for partition in joins.partitions:
            self._commands.append(ToPartition(partition, TransactionJoined(joins.transactional_id, answered)))
