"""Requests and responses that the proxy decodes and changes, except Produce: one `RequestRewriter` each.

What is changed is decided elsewhere (`topics/rewriting.py`, `addresses.py`, `wire/api_versions.py`); this module
applies it to one request of one connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fencepost_policies.values import value
from fencepost_proxy.addresses import AddressBook, learn_brokers, rewrite_response
from fencepost_proxy.errors import ConfigError, Error, UpstreamProtocolError
from fencepost_proxy.expansion.assignment_filter import FOLLOWING, AssignmentFilter
from fencepost_proxy.expansion.queries import Notice, Query, Reply
from fencepost_proxy.session.frames.cutter import LENGTH_BYTES
from fencepost_proxy.topics.closed import (
    CLOSED_APIS,
    hide,
    leave_out_of_assignment,
    leave_out_of_subscription,
    marks,
    mentions,
    plan_closed,
)
from fencepost_proxy.topics.idempotence import make_up_producer_id
from fencepost_proxy.topics.planning import ExpansionOutcome, ExpansionRequest, Joins, Known, Plan
from fencepost_proxy.topics.rewriting import plan_request
from fencepost_proxy.topics.state import NotStored, TopicConfigChange
from fencepost_proxy.types import NodeId
from fencepost_proxy.wire.api_versions import restricted_api_versions, unsupported_api_versions
from fencepost_proxy.wire.apis import (
    API_VERSIONS,
    APIS,
    CONSUMER_GROUP_HEARTBEAT,
    DESCRIBE_CLUSTER,
    DESCRIBE_CONFIGS,
    DESCRIBE_QUORUM,
    DESCRIBE_TOPIC_PARTITIONS,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    METADATA,
    SHARE_GROUP_HEARTBEAT,
    Handling,
)
from fencepost_proxy.wire.control import (
    RequestHeader,
    codec_versions,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    encode_response_frame,
    parse_request_header,
    parse_response_header,
    replace_body,
)
from fencepost_proxy.wire.node_endpoints import ENDPOINTS_FROM
from fencepost_proxy.wire.schema import Message
from fencepost_proxy.wire.spliced import ConfigList, TopicList

_NAMES_BROKERS = (METADATA, FIND_COORDINATOR, DESCRIBE_CLUSTER, DESCRIBE_QUORUM, *ENDPOINTS_FROM)
#: Their responses may be long: most of it is copied (`wire/spliced.py`).
LISTS_TOPICS = frozenset({METADATA, DESCRIBE_TOPIC_PARTITIONS})

AnswerExpanded = Callable[[Mapping[str, ExpansionOutcome]], bytes]


@value
class Finished:
    """`answer` is the response frame with its length; `changes` must be stored before it is sent.

    `expansions` – topics to expand first, within `timeout_ms`; then `answer_expanded` makes the answer. With a
    `query_message`, `complete` makes the answer from the reply. `notice` – for the group progress tracker.
    `partition_counts` – of topics with count checks, as the answer reports them to the client `client_id`.
    """

    answer: bytes
    changes: tuple[TopicConfigChange, ...] = ()
    answer_not_stored: Callable[[NotStored], bytes] = lambda failure: b""
    expansions: tuple[ExpansionRequest, ...] = ()
    timeout_ms: int = 0
    answer_expanded: AnswerExpanded | None = None
    query_message: Query | None = None
    complete: Callable[[Reply], bytes] = lambda reply: b""
    notice: Notice | None = None
    partition_counts: tuple[tuple[str, int], ...] = ()
    client_id: str | None = None


@value
class RequestRewriter:
    """What to do with one request.

    `forward` – the request frame to send upstream, None if `answer` is the response. `finish` makes the client's answer
    from the response frame; None: the response is relayed unchanged. Frames returned include their length, frames
    received do not. `joins` – partitions about to be added to a transaction; `answer_later` makes the retriable error
    if that must be postponed, before it has any effect. `first` – a frame that is sent upstream before, for the same
    request; `finish_first` gets its response.
    """

    forward: bytes | None
    answer: bytes | None = None
    finish: Callable[[memoryview], Finished] | None = None
    joins: Joins | None = None
    first: bytes | None = None
    finish_first: Callable[[memoryview], None] = lambda response: None
    answer_later: Callable[[], bytes] = lambda: b""


class RequestRewriters:
    """`known` and `shared_producer_ids` are called again for each request.

    `begin`, and the callables of a `RequestRewriter` and a `Finished`, may run in a thread. They read shared state
    there, and change it only by `in_loop`, which calls a function in the event loop and returns its result.

    `open_listeners` gets brokers that are new or have moved; after it returns, clients may learn their addresses.
    `own_addresses` – False: clients get the brokers' own addresses. `some_are_safe` – whether any topic has
    `fencepost.idempotence.level=safe`.
    """

    def __init__(
        self,
        book: AddressBook,
        known: Callable[[], Known],
        shared_producer_ids: Callable[[], frozenset[int]],
        open_listeners: Callable[[Sequence[NodeId]], None],
        groups: AssignmentFilter | None = None,
        *,
        own_addresses: bool = True,
        some_are_safe: Callable[[], bool] = lambda: False,
        make_up_producer_id: Callable[[], int] = make_up_producer_id,
        in_loop: Callable[[Callable[[], Any]], Any] = lambda call: call(),
    ) -> None:
        self._in_loop = in_loop
        self._own_addresses = own_addresses
        self._some_are_safe = some_are_safe
        self._make_up_producer_id = make_up_producer_id
        self._groups = groups
        self._book = book
        self._known = known
        self._shared_producer_ids = shared_producer_ids
        self._open_listeners = open_listeners

    def begin(self, api_key: int, version: int, frame: memoryview, local_host: str) -> RequestRewriter:
        """Raises ClientProtocolError for an unreadable request."""
        known = self._known()
        header = parse_request_header(frame)
        handling = APIS[api_key].handling
        if api_key == API_VERSIONS and not APIS[API_VERSIONS].serves(version):
            return RequestRewriter(None, answer=_answer_to(header, unsupported_api_versions()))
        if handling & Handling.REWRITE_REQUEST:
            request = decode_request(api_key, version, frame[header.body_offset :])
            plan = plan_request(api_key, version, request, known)
            assert plan is not None, f"no plan for {APIS[api_key].name}"
            return self._planned(header, frame, plan, local_host)
        named = bool(handling & Handling.INSPECT_REQUEST) and mentions(frame, known)
        if named and api_key in CLOSED_APIS:
            request = decode_request(api_key, version, frame[header.body_offset :])
            return self._planned(header, frame, plan_closed(api_key, request, known), local_host)
        if named and api_key in (CONSUMER_GROUP_HEARTBEAT, SHARE_GROUP_HEARTBEAT):
            request = decode_request(api_key, version, frame[header.body_offset :])
            leave_out_of_subscription(request, known)
            body = encode_request(api_key, version, request)
            frame = memoryview(replace_body(frame, header.body_offset, body))[LENGTH_BYTES:]
        if self._groups is not None and api_key in FOLLOWING and _can_be_read(api_key, version):
            return self._of_a_group(self._groups, header, frame, known)
        forward = replace_body(frame, len(frame), b"")
        if not handling & Handling.REWRITE_RESPONSE:
            return RequestRewriter(forward)
        if api_key == INIT_PRODUCER_ID and self._some_are_safe():
            request = decode_request(api_key, version, frame[header.body_offset :])
            if request.transactional_id is None:
                return RequestRewriter(forward, finish=lambda response: self._idempotent_or_not(header, response))
        if api_key == CONSUMER_GROUP_HEARTBEAT:
            return RequestRewriter(forward, finish=lambda response: self._reported_assignment(header, response, known))
        if api_key in LISTS_TOPICS:
            by_name = named and known.state_topic.encode() in bytes(frame)
            return RequestRewriter(
                forward,
                finish=lambda response: self._listed(header, response, known, local_host, named=named, by_name=by_name),
            )
        return RequestRewriter(forward, finish=lambda response: self._rewrite(header, response, local_host))

    def _reported_assignment(self, header: RequestHeader, frame: memoryview, known: Known) -> Finished:
        if not mentions(frame, known):
            return Finished(replace_body(frame, len(frame), b""))
        response, offset = _decode(header, frame)
        leave_out_of_assignment(response, known)
        return Finished(_encode(header, frame, offset, response))

    def _of_a_group(
        self, assignment_filter: AssignmentFilter, header: RequestHeader, frame: memoryview, known: Known
    ) -> RequestRewriter:
        request = decode_request(header.api_key, header.api_version, frame[header.body_offset :])
        plan = self._in_loop(
            lambda: assignment_filter.begin(header.api_key, header.api_version, header.client_id, request)
        )
        if plan.forward is None:
            forward = replace_body(frame, len(frame), b"")
        else:
            body = encode_request(header.api_key, header.api_version, plan.forward)
            forward = replace_body(frame, header.body_offset, body)

        def finish(frame: memoryview) -> Finished:
            response, offset = _decode(header, frame)
            cut = header.api_key == CONSUMER_GROUP_HEARTBEAT and mentions(frame, known)
            if cut:
                leave_out_of_assignment(response, known)
            outcome = self._in_loop(lambda: plan.finish(response))

            def complete(reply: Reply) -> bytes:
                self._in_loop(lambda: outcome.complete(reply))
                return _encode(header, frame, offset, response)

            if outcome.query_message is not None:
                return Finished(b"", query_message=outcome.query_message, complete=complete)
            if outcome.changed or cut:
                return Finished(_encode(header, frame, offset, response))
            return Finished(replace_body(frame, len(frame), b""), notice=outcome.notice)

        return RequestRewriter(forward, finish=finish)

    def _planned(self, header: RequestHeader, frame: memoryview, plan: Plan, local_host: str) -> RequestRewriter:
        body = encode_request(header.api_key, header.api_version, plan.forward)
        expanded_topics = plan.expansions

        def finish(frame: memoryview) -> Finished:
            if header.api_key == DESCRIBE_CONFIGS:  # with its plan, configs and resources are only added
                listed = ConfigList(header.api_key, header.api_version, bytes(frame))
                added = Message(results=listed.results())
                plan.finish(added)
                return Finished(listed.encoded_with(added.results))
            response, offset = _decode(header, frame)
            self._readdress(header.api_key, response, local_host)
            changes = tuple(plan.finish(response))
            if expanded_topics is not None:
                kept = bytes(frame)  # its answer is made after the expansion
                return Finished(
                    b"",
                    expansions=expanded_topics.requested(response),
                    timeout_ms=expanded_topics.timeout_ms,
                    answer_expanded=lambda outcomes: expanded(memoryview(kept), offset, response, outcomes),
                )

            def answer_not_stored(failure: NotStored) -> bytes:
                _report_not_stored(response, changes, failure)
                return _encode(header, frame, offset, response)

            return Finished(
                _encode(header, frame, offset, response), changes=changes, answer_not_stored=answer_not_stored
            )

        def expanded(
            frame: memoryview, offset: int, response: Message, outcomes: Mapping[str, ExpansionOutcome]
        ) -> bytes:
            assert expanded_topics is not None
            expanded_topics.report(response, outcomes)
            return _encode(header, frame, offset, response)

        forward = replace_body(frame, header.body_offset, body)
        if expanded_topics is None or expanded_topics.first is None:
            if plan.joins is None:
                return RequestRewriter(forward, finish=finish)
            later = plan.later
            assert later is not None

            def answer_later() -> bytes:
                return encode_response_frame(header.api_key, header.api_version, header.correlation_id, later)

            return RequestRewriter(forward, finish=finish, joins=plan.joins, answer_later=answer_later)
        finish_first = expanded_topics.finish_first
        first = encode_request(header.api_key, header.api_version, expanded_topics.first)
        return RequestRewriter(
            forward,
            finish=finish,
            first=replace_body(frame, header.body_offset, first),
            finish_first=lambda frame: finish_first(_decode(header, frame)[0]),
        )

    def _listed(
        self, header: RequestHeader, frame: memoryview, known: Known, local_host: str, *, named: bool, by_name: bool
    ) -> Finished:
        topics = TopicList(header.api_key, header.api_version, bytes(frame))
        self._readdress(header.api_key, topics.before, local_host)
        for index in topics.containing(marks(known)):
            entry = Message(topics=[topics.element(index)])
            if hide(entry, known, queried=named, by_name=by_name):
                topics.replace(index, entry.topics)
        counts: tuple[tuple[str, int], ...] = ()
        if header.api_key == METADATA and known.may_check_counts != frozenset():
            reported = topics.partition_counts(known.may_check_counts)
            counts = tuple(each for each in reported if known.is_count_checked(each[0]))
        answer = topics.encoded(changed_before=self._own_addresses)
        return Finished(answer, partition_counts=counts, client_id=header.client_id)

    def _rewrite(self, header: RequestHeader, frame: memoryview, local_host: str) -> Finished:
        api_key = header.api_key
        if api_key == API_VERSIONS:
            offset = parse_response_header(frame, api_key, header.api_version).body_offset
            body = restricted_api_versions(header.api_version, bytes(frame[offset:]))
            return Finished(replace_body(frame, offset, body))
        response, offset = _decode(header, frame)
        self._readdress(api_key, response, local_host)
        if api_key == INIT_PRODUCER_ID and response.producer_id in self._shared_producer_ids():
            raise UpstreamProtocolError(
                f"Kafka assigned a client producer id {response.producer_id}, which this proxy uses for fenced appends"
            )
        return Finished(_encode(header, frame, offset, response))

    def _readdress(self, api_key: int, response: Message, local_host: str) -> None:
        if api_key not in _NAMES_BROKERS or not self._own_addresses:
            return
        new = learn_brokers(api_key, response, self._book)
        if new:
            self._in_loop(lambda: self._open_listeners(new))
        try:
            rewrite_response(api_key, response, self._book, local_host)
        except (ConfigError, LookupError) as error:
            # No listener could be opened for this broker. Its own address would let clients bypass the proxy.
            raise UpstreamProtocolError(f"a response names a broker without an address here: {error}") from error

    def _idempotent_or_not(self, header: RequestHeader, frame: memoryview) -> Finished:
        """A client that may not be idempotent still gets a producer id, for `safe` topics only: there its batches are
        appended without it (`batches/levels.py`). On other topics they are refused with Kafka's error from here.

        Kafka decides about batches that the proxy does not read: brokers that require the permission to be idempotent
        check it again at the append. Others (2.8 and later require WRITE, on any topic) accept them as idempotent.
        """
        response, offset = _decode(header, frame)
        if response.error_code == Error.CLUSTER_AUTHORIZATION_FAILED:
            response.error_code = Error.NONE
            response.producer_id, response.producer_epoch = self._make_up_producer_id(), 0
            return Finished(_encode(header, frame, offset, response))
        return self._rewrite(header, frame, "")


def _can_be_read(api_key: int, version: int) -> bool:
    """Some old versions have no schema, for example OffsetFetch v0, which dates from ZooKeeper's time."""
    versions = codec_versions(api_key)
    return versions is not None and versions[0] <= version <= versions[1]


def _decode(header: RequestHeader, frame: memoryview) -> tuple[Message, int]:
    offset = parse_response_header(frame, header.api_key, header.api_version).body_offset
    return decode_response(header.api_key, header.api_version, frame[offset:]), offset


def _encode(header: RequestHeader, frame: memoryview, offset: int, response: Message) -> bytes:
    return replace_body(frame, offset, encode_response(header.api_key, header.api_version, response))


def _answer_to(header: RequestHeader, response: Message) -> bytes:
    head = memoryview(header.correlation_id.to_bytes(4, "big", signed=True))
    return replace_body(head, len(head), encode_response(header.api_key, header.api_version, response))


def _report_not_stored(response: Message, changes: Sequence[TopicConfigChange], failure: NotStored) -> None:
    """Kafka has done its part, and the proxy has not: the client must know, and whether to repeat the request."""
    code, again = Error.REQUEST_TIMED_OUT, ". Try again."
    if failure.denied:
        code, again = Error.TOPIC_AUTHORIZATION_FAILED, ""
    topics = {change.topic for change in changes if not change.deleted}
    for entry in (*getattr(response, "topics", ()), *getattr(response, "responses", ())):
        name = getattr(entry, "name", None) or getattr(entry, "resource_name", None)
        if name in topics and entry.error_code == Error.NONE:
            entry.error_code = code
            stated = f"Kafka applied this, but the virtual configs are not stored: {failure.reason}{again}"
            entry.error_message = stated
