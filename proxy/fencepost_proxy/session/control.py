"""Control messages: requests that are collected whole and rewritten, or answered by the proxy (`rewriters.py`).

Their answers are delayed until Kafka has answered, and until what follows from that is done: changes are stored
(`Store`, `Stored`), topics expanded (`Expand`, `Expanded`), or the progress of a group known (`GroupQuery`, `Replied`).
Before a transaction joins a partition, the partition's sequencer is informed, and may delay that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from fencepost_proxy.expansion.queries import Query, Reply
from fencepost_proxy.session.connection import MESSAGE_WORK_BYTES
from fencepost_proxy.session.messages import Expand, GroupQuery, Noticed, ReadBatches, Store
from fencepost_proxy.session.migration import PRIMARY_APIS, Migration
from fencepost_proxy.session.pending_responses import Answer, PendingResponse
from fencepost_proxy.session.reading import Work
from fencepost_proxy.session.rewriters import AnswerExpanded, Finished, RequestRewriter, RequestRewriters
from fencepost_proxy.session.services import Services
from fencepost_proxy.topics.planning import ExpansionOutcome, Joins
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.api_versions import introduced
from fencepost_proxy.wire.apis import API_VERSIONS, DESCRIBE_TOPIC_PARTITIONS, FIND_COORDINATOR, METADATA

_T = TypeVar("_T")

#: Control messages above it are decoded, planned and encoded in a thread (`ReadBatches`): that may take some
#: microseconds per byte.
HERE_BYTES_MAX = 4096
#: The same for a request that is only searched for the state topic, and for a Produce response.
SEARCHED_HERE_BYTES_MAX = 1 << 20
PRODUCED_HERE_BYTES_MAX = 1 << 16
#: Only searched, although their responses are rewritten.
_SEARCHED = frozenset({METADATA, FIND_COORDINATOR, DESCRIBE_TOPIC_PARTITIONS})


@dataclass(slots=True)
class Joining:
    """A request that adds partitions to a transaction and is not sent yet. `waiting` – for these sequencers."""

    pending_response: PendingResponse
    rewriter: RequestRewriter
    joins: Joins
    waiting: set[TopicPartition]
    until: float


class ControlMessages(Migration):
    """`rewriters` – make the `RequestRewriter` of each message."""

    __slots__ = ("_expansions", "_joining", "_joins", "_queries_open", "_rewriters", "_stores")

    def __init__(
        self,
        connection: int,
        local_host: str,
        services: Services,
        rewriters: RequestRewriters,
        opened_at: float,
        *,
        primary: bool,
    ) -> None:
        super().__init__(connection, local_host, services, opened_at, primary=primary)
        self._rewriters = rewriters
        self._joining: Joining | None = None
        self._joins: dict[PendingResponse, Joins] = {}
        self._queries_open: dict[int, Callable[[Reply], None]] = {}
        self._stores: dict[int, Callable[[str | None], None]] = {}
        self._expansions: dict[int, Callable[[Mapping[str, ExpansionOutcome]], None]] = {}

    def _control_message(self, api_key: int, version: int, correlation_id: int, frame: memoryview) -> None:
        """`frame` – the whole request, without its length."""
        pending_response = PendingResponse(api_key, version, correlation_id, Answer.MADE_FROM_RESPONSE)
        if not self._primary and api_key in PRIMARY_APIS:
            self._move_to_primary(frame)
            return
        large = self._takes_long(api_key, frame)
        self._work(
            large,
            lambda: self._rewriters.begin(api_key, version, frame, self.local_host),
            lambda rewriter: self._begin_rewriting(pending_response, frame, rewriter, large=large),
            reads_on=False,
        )

    def _begin_rewriting(
        self, pending_response: PendingResponse, frame: memoryview, rewriter: RequestRewriter, *, large: bool
    ) -> None:
        """`large` – process its response in a thread, however short it is."""
        if not self._primary and rewriter.joins is not None:
            self._move_to_primary(frame)
            return
        if pending_response.api_key == API_VERSIONS and self.software is None:
            client_id, self.software = introduced(frame)
            self.client_id = self.client_id or client_id
        pending_response.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        self._to_client.append(pending_response)
        if rewriter.forward is None:
            assert rewriter.answer is not None
            pending_response.answer = Answer.MADE_HERE
            self._quota -= MESSAGE_WORK_BYTES + len(frame)
            self._end(pending_response, [rewriter.answer])
            return
        if rewriter.finish is None:
            pending_response.answer = Answer.RELAYED
        else:
            self._quota -= MESSAGE_WORK_BYTES + len(frame)
            finish = rewriter.finish

            def on_response(response: memoryview) -> None:
                is_large = large or len(response) > HERE_BYTES_MAX

                def done(finished: Finished) -> None:
                    self._finish_rewriting(pending_response, finished, large=is_large)

                self._work(is_large, lambda: finish(response), done)

            pending_response.on_response = on_response
        if rewriter.joins is not None:
            self._request_join(pending_response, rewriter, rewriter.joins)
            return
        if rewriter.first is not None:
            self._send_first(pending_response, rewriter)
        self._from_upstream.append(pending_response)
        self._upstream_out.append(rewriter.forward)
        self._services.forwarded(0.0)

    def _finish_rewriting(self, pending_response: PendingResponse, finished: Finished, *, large: bool) -> None:
        if finished.answer_expanded is not None:
            self._expand(pending_response, finished, finished.answer_expanded, large=large)
            return
        if finished.query_message is not None:
            self._query(pending_response, finished.query_message, finished.complete, large=large)
            return
        if finished.notice is not None:
            self._commands.append(Noticed(finished.notice))
        self._record_served(finished)
        if not finished.changes:
            self._end(pending_response, [finished.answer])
            return
        token = self._next_token = self._next_token + 1

        def stored(error: str | None) -> None:
            if error is None:
                self._end(pending_response, [finished.answer])
            else:
                self._end_with(pending_response, lambda: finished.answer_not_stored(error), large=large)

        self._stores[token] = stored
        self._commands.append(Store(token, finished.changes))

    def _send_first(self, pending_response: PendingResponse, rewriter: RequestRewriter) -> None:
        assert rewriter.first is not None
        first = PendingResponse(
            pending_response.api_key,
            pending_response.version,
            pending_response.correlation_id,
            Answer.MADE_FROM_RESPONSE,
        )
        first.inner = True
        finish_first = rewriter.finish_first

        def on_response(response: memoryview) -> None:
            self._work(len(response) > HERE_BYTES_MAX, lambda: finish_first(response), lambda _: None)

        first.on_response = on_response
        self._from_upstream.append(first)
        self._upstream_out.append(rewriter.first)

    def _expand(
        self, pending_response: PendingResponse, finished: Finished, answer: AnswerExpanded, *, large: bool
    ) -> None:
        if not finished.expansions:
            self._end_with(pending_response, lambda: answer({}), large=large)
            return
        token = self._next_token = self._next_token + 1
        self._expansions[token] = lambda outcomes: self._end_with(
            pending_response, lambda: answer(outcomes), large=large
        )
        self._commands.append(Expand(token, finished.expansions, finished.timeout_ms))

    def _expanded(self, token: int, outcomes: tuple[ExpansionOutcome, ...]) -> None:
        self._expansions.pop(token)({outcome.topic: outcome for outcome in outcomes})

    def _query(
        self,
        pending_response: PendingResponse,
        query_message: Query,
        complete: Callable[[Reply], bytes],
        *,
        large: bool,
    ) -> None:
        token = self._next_token = self._next_token + 1
        self._queries_open[token] = lambda reply: self._end_with(pending_response, lambda: complete(reply), large=large)
        self._commands.append(GroupQuery(token, query_message))

    def _replied(self, token: int, reply: Reply) -> None:
        self._queries_open.pop(token)(reply)

    # ---- work that takes long

    def _takes_long(self, api_key: int, frame: memoryview) -> bool:
        if len(frame) <= HERE_BYTES_MAX:
            return False
        if api_key not in self._services.relayed_versions and api_key not in _SEARCHED:
            return True
        if len(frame) > SEARCHED_HERE_BYTES_MAX:
            return True
        data = bytes(frame)
        return any(mark in data for mark in self._services.state_topic_marks)

    def _end_with(self, pending_response: PendingResponse, make: Callable[[], bytes], *, large: bool) -> None:
        self._work(large, make, lambda answer: self._end(pending_response, [answer]))

    def _work(self, large: bool, make: Callable[[], _T], done: Callable[[_T], None], *, reads_on: bool = True) -> None:
        """Passes the result of `make` to `done`: now, or for `large` work from a thread.

        Meanwhile no other response of this connection is processed; if `reads_on` is False, no other request instead.
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
        """No later request is read meanwhile."""
        token = self._next_token = self._next_token + 1
        self._paused = True
        self._reading = token, done
        self._commands.append(ReadBatches(token, read))

    def _batches_read(self, token: int) -> None:
        finished = self._finishing.pop(token, None)
        if finished is not None:
            # Also after the client disconnected: what Kafka has done may have to be stored.
            finished()
            self._answer_front()
            return
        if self._reading is None or self._reading[0] != token:
            return
        (_, done), self._reading, self._paused = self._reading, None, False
        if not (self.client_closed or self.upstream_closed or self._closing):
            done()

    def _record_served(self, finished: Finished) -> None:
        """Record the partition counts that the client knows from now on."""
        services = self._services
        if finished.partition_counts and services.fresh(self._now):
            policies = ((topic, services.policy(topic), count) for topic, count in finished.partition_counts)
            counts = [(topic, count) for topic, policy, count in policies if policy is not None and policy.checks_count]
            if counts:
                services.record_served(self.connection, finished.client_id, counts)

    def _stored(self, token: int, error: str | None) -> None:
        self._stores.pop(token)(error)

    # ---- transactions

    def _request_join(self, pending_response: PendingResponse, rewriter: RequestRewriter, joins: Joins) -> None:
        raise NotImplementedError

    def _query_to_join(self, pending_response: PendingResponse, rewriter: RequestRewriter, joins: Joins) -> None:
        """The sequencers must agree before Kafka gets it: after that, the transaction marker may come at any time."""
        until = self._now + self._services.sequencer_wait_max_seconds
        self._joining = Joining(pending_response, rewriter, joins, set(joins.partitions), until)
        self._paused = True
        for partition in joins.partitions:
            self._sequencers.join(partition, joins.transactional_id, self.connection)

    def _may_join(self, partition: TopicPartition) -> None:
        joining = self._joining
        if joining is None or self.client_closed or self.upstream_closed:
            return
        joining.waiting.discard(partition)
        if joining.waiting:
            return
        self._joining, self._paused = None, False
        self._join(joining.pending_response, joining.joins)
        assert joining.rewriter.forward is not None
        self._from_upstream.append(joining.pending_response)
        self._upstream_out.append(joining.rewriter.forward)
        self._services.forwarded(0.0)

    def _join_later(self, now: float) -> None:
        """Appends to its partitions are in doubt for too long: return a retriable error; nothing has been added."""
        joining = self._joining
        if joining is None or joining.until > now or self.client_closed:
            return
        self._joining, self._paused = None, False
        self._report_joined(joining.joins, answered=True)
        joining.pending_response.answer = Answer.MADE_HERE
        self._end(joining.pending_response, [joining.rewriter.answer_later()])

    def _join(self, pending_response: PendingResponse, joins: Joins) -> None:
        finish = pending_response.on_response
        assert finish is not None

        def on_response(response: memoryview) -> None:
            self._report_joined(self._joins.pop(pending_response), answered=True)
            finish(response)

        pending_response.on_response = on_response
        self._joins[pending_response] = joins

    def _leave_joins(self) -> None:
        """Whether these were added stays unknown; what was not sent will not be."""
        joining, self._joining, self._paused = self._joining, None, False
        if joining is not None:
            self._report_joined(joining.joins, answered=True)
        for joins in self._joins.values():
            self._report_joined(joins, answered=False)
        self._joins.clear()

    def _report_joined(self, joins: Joins, *, answered: bool) -> None:
        for partition in joins.partitions:
            self._sequencers.joined(partition, joins.transactional_id, answered=answered)
