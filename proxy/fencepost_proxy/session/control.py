"""Control messages: requests that are collected whole and rewritten, or answered by the proxy (`rewriters.py`).

Their answers are delayed until Kafka has answered, and until what follows from that is done: changes are stored
(`Store`, `Stored`), topics expanded (`Expand`, `Expanded`), or the progress of a group known (`GroupQuery`, `Replied`).
Before a transaction joins a partition, the partition's sequencer is informed, and may delay that.
"""

from __future__ import annotations

from collections.abc import Callable

from fencepost_proxy.expansion.queries import Query, Reply
from fencepost_proxy.session.checked_appends import CheckedAppends
from fencepost_proxy.session.core import Core
from fencepost_proxy.session.messages import Expand, GroupQuery, Noticed, Store
from fencepost_proxy.session.pending_responses import Answer, PendingResponse, inner_response
from fencepost_proxy.session.read_holds import MESSAGE_WORK_BYTES
from fencepost_proxy.session.response_queue import relayed_answer
from fencepost_proxy.session.rewriters import (
    LISTS_TOPICS,
    AnswerExpanded,
    Finished,
    RequestRewriter,
    RequestRewriters,
)
from fencepost_proxy.topics.planning import ExpansionOutcome
from fencepost_proxy.topics.state import NotStored
from fencepost_proxy.wire.api_versions import introduced
from fencepost_proxy.wire.apis import API_VERSIONS, DESCRIBE_TOPIC_PARTITIONS, FIND_COORDINATOR, METADATA

#: Control messages above it are decoded, planned and encoded in a thread (`ReadBatches`): that may take some
#: microseconds per byte.
HERE_BYTES_MAX = 4096
#: The same for a request that is only searched for the state topic, and for a Produce response.
SEARCHED_HERE_BYTES_MAX = 1 << 20
#: The same for a response of which most is skipped and copied.
SPLICED_HERE_BYTES_MAX = 1 << 15
#: Only searched, although their responses are rewritten.
_SEARCHED = frozenset({METADATA, FIND_COORDINATOR, DESCRIBE_TOPIC_PARTITIONS})


class ControlMessages:
    __slots__ = ("_appends", "_holds", "_queue", "_rewriters", "_services", "_state", "_threads")

    def __init__(self, core: Core, *, appends: CheckedAppends, rewriters: RequestRewriters) -> None:
        self._services = core.state.services
        self._state = core.state
        self._holds = core.holds
        self._queue = core.queue
        self._threads = core.threads
        self._appends = appends
        self._rewriters = rewriters

    def request(self, api_key: int, version: int, correlation_id: int, frame: memoryview) -> None:
        """`frame` – the whole request, without its length."""
        pending_response = PendingResponse(api_key, version, correlation_id, Answer.MADE_FROM_RESPONSE)
        large = self._takes_long(api_key, frame)
        self._threads.begin(
            large,
            lambda: self._rewriters.begin(api_key, version, frame, self._state.local_host),
            lambda rewriter: self._begin_rewriting(pending_response, frame, rewriter, large=large),
        )

    def _begin_rewriting(
        self, pending_response: PendingResponse, frame: memoryview, rewriter: RequestRewriter, *, large: bool
    ) -> None:
        """`large` – process its response in a thread, however short it is."""
        if pending_response.api_key == API_VERSIONS and self._state.software is None:
            client_id, self._state.software = introduced(frame)
            self._state.client_id = self._state.client_id or client_id
        self._queue.expect(pending_response)
        if rewriter.forward is None:
            assert rewriter.answer is not None
            pending_response.answer = Answer.MADE_HERE
            self._holds.quota -= MESSAGE_WORK_BYTES + len(frame)
            self._queue.end(pending_response, [rewriter.answer])
            return
        if rewriter.finish is None:
            pending_response.answer = relayed_answer(pending_response.api_key, pending_response.version)
        else:
            self._holds.quota -= MESSAGE_WORK_BYTES + len(frame)
            finish = rewriter.finish

            def on_response(response: memoryview) -> None:
                here_max = SPLICED_HERE_BYTES_MAX if pending_response.api_key in LISTS_TOPICS else HERE_BYTES_MAX
                is_large = large or len(response) > here_max

                def done(finished: Finished) -> None:
                    self._finish_rewriting(pending_response, finished, large=is_large)

                self._threads.answer(is_large, lambda: finish(response), done)

            pending_response.on_response = on_response
        if rewriter.joins is not None:
            self._appends.joins.request(pending_response, rewriter, rewriter.joins)
            return
        if rewriter.first is not None:
            self._send_first(pending_response, rewriter)
        self._queue.forward(pending_response, rewriter.forward)

    def _finish_rewriting(self, pending_response: PendingResponse, finished: Finished, *, large: bool) -> None:
        if finished.answer_expanded is not None:
            self._expand(pending_response, finished, finished.answer_expanded, large=large)
            return
        if finished.query_message is not None:
            self._query(pending_response, finished.query_message, finished.complete, large=large)
            return
        if finished.notice is not None:
            self._state.commands.append(Noticed(finished.notice))
        self._record_served(finished)
        if not finished.changes:
            self._queue.end(pending_response, [finished.answer])
            return

        def stored(failure: NotStored | None) -> None:
            if failure is None:
                self._queue.end(pending_response, [finished.answer])
            else:
                self._threads.end_with(pending_response, lambda: finished.answer_not_stored(failure), large=large)

        self._state.commands.append(Store(self._state.token(stored), finished.changes))

    def _send_first(self, pending_response: PendingResponse, rewriter: RequestRewriter) -> None:
        assert rewriter.first is not None
        finish_first = rewriter.finish_first

        def on_response(response: memoryview) -> None:
            self._threads.answer(len(response) > HERE_BYTES_MAX, lambda: finish_first(response), lambda _: None)

        first = inner_response(
            pending_response.api_key, pending_response.version, pending_response.correlation_id, on_response
        )
        self._queue.send(first, rewriter.first)

    def _expand(
        self, pending_response: PendingResponse, finished: Finished, answer: AnswerExpanded, *, large: bool
    ) -> None:
        if not finished.expansions:
            self._threads.end_with(pending_response, lambda: answer({}), large=large)
            return

        def expanded(outcomes: tuple[ExpansionOutcome, ...]) -> None:
            by_topic = {outcome.topic: outcome for outcome in outcomes}
            self._threads.end_with(pending_response, lambda: answer(by_topic), large=large)

        self._state.commands.append(Expand(self._state.token(expanded), finished.expansions, finished.timeout_ms))

    def _query(
        self,
        pending_response: PendingResponse,
        query_message: Query,
        complete: Callable[[Reply], bytes],
        *,
        large: bool,
    ) -> None:
        def replied(reply: Reply) -> None:
            self._threads.end_with(pending_response, lambda: complete(reply), large=large)

        self._state.commands.append(GroupQuery(self._state.token(replied), query_message))

    def _takes_long(self, api_key: int, frame: memoryview) -> bool:
        if len(frame) <= HERE_BYTES_MAX:
            return False
        if api_key not in self._services.relayed_versions and api_key not in _SEARCHED:
            return True
        if len(frame) > SEARCHED_HERE_BYTES_MAX:
            return True
        data = bytes(frame)
        return any(mark in data for mark in self._services.state_topic_marks)

    def _record_served(self, finished: Finished) -> None:
        """Record the partition counts that the client knows from now on."""
        services = self._services
        if finished.partition_counts and services.fresh(self._state.now):
            policies = ((topic, services.policy(topic), count) for topic, count in finished.partition_counts)
            counts = [(topic, count) for topic, policy, count in policies if policy is not None and policy.checks_count]
            if counts:
                services.record_served(self._state.connection, finished.client_id, counts)
