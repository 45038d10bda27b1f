"""Control messages: requests that are collected whole and rewritten, or answered by the proxy (`rewriters.py`).

Their answers are delayed until Kafka has answered, and until what follows from that is done: changes are stored
(`Store`, `Stored`), topics expanded (`Expand`, `Expanded`), or the progress of a group known (`GroupQuery`, `Replied`).
Before a transaction joins a partition, the partition's sequencer is informed, and may delay that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fencepost_proxy.session.connection.in_progress import InProgress
from fencepost_proxy.session.connection.read_holds import MESSAGE_WORK_BYTES, ReadHolds
from fencepost_proxy.session.connection.response_queue import ResponseQueue, relayed_answer
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.connection.threads import ThreadWork
from fencepost_proxy.session.control.rewriters import LISTS_TOPICS, Finished, RequestRewriters
from fencepost_proxy.session.frames.messages import Command, Expand, GroupQuery, Noticed, Store
from fencepost_proxy.session.frames.pending_responses import Answer, PendingResponse
from fencepost_proxy.session.frames.services import Observation, Topics
from fencepost_proxy.session.frames.steps import Steps, Wait
from fencepost_proxy.session.produce.checked_appends import CheckedAppends
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


@dataclass(slots=True, eq=False)
class ControlMessages:
    _state: ConnectionState
    _holds: ReadHolds
    _queue: ResponseQueue
    _in_progress: InProgress
    _threads: ThreadWork
    _topics: Topics
    _observation: Observation
    _appends: CheckedAppends
    _rewriters: RequestRewriters

    def serve(self, api_key: int, version: int, correlation_id: int, frame: memoryview) -> Steps[None]:
        """`frame` – the whole request, without its length. If it is large, its response is made in a thread, too."""
        pending_response = PendingResponse(api_key, version, correlation_id, Answer.MADE_FROM_RESPONSE)
        large = self._takes_long(api_key, frame)
        rewriter = yield from self._threads.request(
            large, lambda: self._rewriters.begin(api_key, version, frame, self._state.local_host)
        )
        if api_key == API_VERSIONS and self._state.software is None:
            client_id, self._state.software = introduced(frame)
            self._state.client_id = self._state.client_id or client_id
        self._queue.expect(pending_response)
        if rewriter.forward is None:
            assert rewriter.answer is not None
            pending_response.answer = Answer.MADE_HERE
            self._holds.quota -= MESSAGE_WORK_BYTES + len(frame)
            self._queue.end(pending_response, [rewriter.answer])
            return
        finish = rewriter.finish
        if finish is None:
            pending_response.answer = relayed_answer(api_key, version)
            self._queue.forward(pending_response, rewriter.forward)
            return
        self._holds.quota -= MESSAGE_WORK_BYTES + len(frame)
        if rewriter.joins is not None:
            response = yield from self._appends.joins.send(pending_response, rewriter.forward, rewriter.joins)
            if response is None:
                pending_response.answer = Answer.MADE_HERE
                self._queue.end(pending_response, [rewriter.answer_later()])
                return
        else:
            if rewriter.first is not None:
                self._in_progress.begin(self._send_first(pending_response, rewriter.first, rewriter.finish_first))
            response = yield self._queue.request(pending_response, rewriter.forward)
        large = large or len(response) > (SPLICED_HERE_BYTES_MAX if api_key in LISTS_TOPICS else HERE_BYTES_MAX)
        finished = yield from self._threads.answer(large, lambda: finish(response))
        yield from self._finish(pending_response, finished, large=large)

    def _finish(self, pending_response: PendingResponse, finished: Finished, *, large: bool) -> Steps[None]:
        """`large` – make its answer in a thread, however short it is."""
        if (answer_expanded := finished.answer_expanded) is not None:
            outcomes: tuple[ExpansionOutcome, ...] = ()
            if finished.expansions:
                outcomes = yield self._done(lambda token: Expand(token, finished.expansions, finished.timeout_ms))
            by_topic = {outcome.topic: outcome for outcome in outcomes}
            yield from self._threads.end_with(pending_response, lambda: answer_expanded(by_topic), large=large)
            return
        if (query := finished.query_message) is not None:
            reply = yield self._done(lambda token: GroupQuery(token, query))
            yield from self._threads.end_with(pending_response, lambda: finished.complete(reply), large=large)
            return
        if finished.notice is not None:
            self._state.commands.append(Noticed(finished.notice))
        self._record_served(finished)
        if finished.changes:
            failure: NotStored | None = yield self._done(lambda token: Store(token, finished.changes))
            if failure is not None:
                make = partial(finished.answer_not_stored, failure)
                yield from self._threads.end_with(pending_response, make, large=large)
                return
        self._queue.end(pending_response, [finished.answer])

    def _done(self, command: Callable[[int], Command]) -> Wait:
        """Until the command with this token is done."""
        return Wait(lambda resume: self._state.commands.append(command(self._state.token(resume))), outlives=True)

    def _send_first(
        self, pending_response: PendingResponse, request: bytes, finish: Callable[[memoryview], None]
    ) -> Steps[None]:
        names = pending_response.api_key, pending_response.version, pending_response.correlation_id
        response: memoryview = yield Wait(self._queue.query(*names, request))
        yield from self._threads.answer(len(response) > HERE_BYTES_MAX, lambda: finish(response))

    def _takes_long(self, api_key: int, frame: memoryview) -> bool:
        if len(frame) <= HERE_BYTES_MAX:
            return False
        if api_key not in self._topics.relayed_versions and api_key not in _SEARCHED:
            return True
        if len(frame) > SEARCHED_HERE_BYTES_MAX:
            return True
        data = bytes(frame)
        return any(mark in data for mark in self._topics.state_topic_marks)

    def _record_served(self, finished: Finished) -> None:
        """Record the partition counts that the client knows from now on."""
        if finished.partition_counts and self._topics.fresh(self._state.now):
            policies = ((topic, self._topics.policy(topic), count) for topic, count in finished.partition_counts)
            counts = [(topic, count) for topic, policy, count in policies if policy is not None and policy.checks_count]
            if counts:
                self._observation.record_served(self._state.connection, finished.client_id, counts)
