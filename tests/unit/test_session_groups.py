"""A session whose client is a group member: what is inspected, and the order of answers."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from uuid import UUID

import pytest

from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.expansion.assignment_filter import ASSIGNING, FOLLOWING, AssignmentFilter
from fencepost_proxy.expansion.queries import GatedPartitions, HasTasks, MayHave
from fencepost_proxy.expansion.watch import Watch
from fencepost_proxy.session.control.rewriters import RequestRewriters
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.session.frames.services import RELAYED_VERSIONS, relayed_versions_without
from fencepost_proxy.topics.planning import Known
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.control import (
    decode_request,
    encode_request_frame,
    encode_response_frame,
    parse_request_header,
)
from fencepost_proxy.wire.schema import Message
from tests.unit.test_assignment_filter import Expanded
from tests.unit.test_session import Talk as SessionTalk

P2 = TopicPartition("orders", 2)
_ASSIGNED = struct.pack(">hih", 0, 1, 6) + b"orders" + struct.pack(">iiii", 2, 0, 2, 0)
_CUT = struct.pack(">hih", 0, 1, 6) + b"orders" + struct.pack(">iii", 1, 0, 0)
_TASKS = _ASSIGNED[:-4] + struct.pack(">i", 5) + b"tasks"
_SYNC = Message(group_id="g", generation_id=3, member_id="m", protocol_type="consumer", assignments=[])


def _rewriters(assignment_filter: AssignmentFilter | None, state_topic_id: UUID | None = None) -> RequestRewriters:
    known = Known(StateView("cluster"), lambda topic: {}, lambda topic: None, "__state", state_topic_id)
    return RequestRewriters(AddressBook(1), lambda: known, frozenset[int], lambda nodes: None, assignment_filter)


class Talk(SessionTalk):
    """With the assignment filter of a process in which `orders` is expanded."""

    def __init__(self) -> None:
        self.watch = Watch()
        assignment_filter = AssignmentFilter(self.watch, Expanded(), lambda: self.now)
        super().__init__(_rewriters(assignment_filter), relayed_versions=relayed_versions_without(FOLLOWING))

    def query(self, api_key: int, version: int, correlation_id: int, message: Message) -> bytes:
        """It is forwarded unchanged; returns its bytes."""
        frame = encode_request_frame(api_key, version, correlation_id, "app", message)
        self.client(frame)
        assert self.upstream() == frame
        return frame

    def reported(self, api_key: int, version: int, correlation_id: int, message: Message) -> None:
        self.kafka(encode_response_frame(api_key, version, correlation_id, message))


def test_assignment_waits_for_gating_and_keeps_response_order() -> None:
    talk = Talk()
    talk.query(apis.SYNC_GROUP, 3, 1, _SYNC)
    talk.query(apis.HEARTBEAT, 3, 2, Message(group_id="g", generation_id=3, member_id="m"))
    talk.reported(apis.SYNC_GROUP, 3, 1, Message(assignment=_ASSIGNED))
    query = talk.next(m.GroupQuery)
    assert query.query_message == MayHave("g", "app", (P2,))
    talk.reported(apis.HEARTBEAT, 3, 2, Message())
    talk.silent()

    talk.report(m.Replied(query.token, GatedPartitions(frozenset({P2}))))
    first, second = (
        encode_response_frame(apis.SYNC_GROUP, 3, 1, Message(assignment=_CUT)),
        encode_response_frame(apis.HEARTBEAT, 3, 2, Message()),
    )
    assert talk.answer() == first + second
    talk.silent()


@pytest.mark.parametrize("end", [m.ClientLost(), m.UpstreamLost("it broke")])
def test_reply_after_the_end_changes_nothing(end: m.Event) -> None:
    talk = Talk()
    talk.query(apis.SYNC_GROUP, 3, 1, _SYNC)
    talk.reported(apis.SYNC_GROUP, 3, 1, Message(assignment=_ASSIGNED))
    query = talk.next(m.GroupQuery)
    talk.report(end)
    talk.commands.clear()
    talk.report(m.Replied(query.token, GatedPartitions(frozenset())))
    assert not [each for each in talk.commands if isinstance(each, m.ToUpstream)]


def test_notice_does_not_delay_the_response() -> None:
    talk = Talk()
    talk.query(apis.SYNC_GROUP, 3, 1, _SYNC)
    talk.reported(apis.SYNC_GROUP, 3, 1, Message(assignment=_TASKS))
    assert talk.next(m.Noticed).notice == HasTasks("g")
    assert talk.answer() == encode_response_frame(apis.SYNC_GROUP, 3, 1, Message(assignment=_TASKS))


def test_unreadable_version_is_relayed() -> None:
    talk = Talk()
    frame = struct.pack(">hhih", apis.OFFSET_FETCH, 0, 1, -1) + b"of ZooKeeper's time"
    talk.client(struct.pack(">i", len(frame)) + frame)
    assert talk.upstream() == struct.pack(">i", len(frame)) + frame


def test_group_requests_are_relayed_without_expansions() -> None:
    # Without ordered expansions, group requests are relayed as whole frames, except those whose answer may assign the
    # state topic.
    for api_key in FOLLOWING - {apis.CONSUMER_GROUP_HEARTBEAT}:
        assert api_key in RELAYED_VERSIONS
        assert api_key not in relayed_versions_without(FOLLOWING)
    assert relayed_versions_without(FOLLOWING).keys() == RELAYED_VERSIONS.keys() - FOLLOWING
    assert relayed_versions_without(ASSIGNING).keys() == RELAYED_VERSIONS.keys() - {
        apis.SYNC_GROUP,
        apis.CONSUMER_GROUP_HEARTBEAT,
        apis.SHARE_GROUP_HEARTBEAT,
        apis.STREAMS_GROUP_HEARTBEAT,
    }

    talk = Talk()
    frame = encode_request_frame(apis.HEARTBEAT, 4, 1, "app", Message(group_id="g", member_id="m"))
    assert talk.session.fast_path.take_up(memoryview(frame * 2), 100.0)[0] == 0
    talk.services.relayed_versions = RELAYED_VERSIONS
    assert talk.session.fast_path.take_up(memoryview(frame * 2), 100.0)[0] == 2 * len(frame)


def test_changed_heartbeat_is_sent_with_its_own_header() -> None:
    key = apis.CONSUMER_GROUP_HEARTBEAT
    changed = Message(group_id="g", member_id="m", member_epoch=1, topic_partitions=[])
    plan = SimpleNamespace(forward=changed)
    rewriters = _rewriters(SimpleNamespace(begin=lambda *_: plan))  # type: ignore[arg-type]
    frame = encode_request_frame(key, 1, 7, "app", Message(group_id="g", member_id="m", member_epoch=1))
    forwarded = rewriters.begin(key, 1, memoryview(frame)[4:], "local").forward
    assert forwarded == encode_request_frame(key, 1, 7, "app", changed)


@pytest.mark.parametrize("expanded", [False, True])
def test_the_state_topic_is_not_assigned(expanded: bool) -> None:
    """It is removed from subscriptions, owned partitions and assignments, with and without expansions."""
    state, other = UUID(int=9), UUID(int=8)
    rewriters = _rewriters(AssignmentFilter(Watch(), Expanded(), lambda: 100.0) if expanded else None, state)
    key = apis.CONSUMER_GROUP_HEARTBEAT
    both = [Message(topic_id=state, partitions=[0]), Message(topic_id=other, partitions=[0])]
    queried = Message(
        group_id="g", member_id="m", subscribed_topic_names=["__state", "others"], topic_partitions=both, member_epoch=1
    )
    rewriter = rewriters.begin(key, 1, memoryview(encode_request_frame(key, 1, 7, "app", queried))[4:], "local")
    assert rewriter.forward is not None
    assert rewriter.finish is not None
    sent = memoryview(rewriter.forward)[4:]
    forwarded = decode_request(key, 1, sent[parse_request_header(sent).body_offset :])
    assert forwarded.subscribed_topic_names == ["others"]
    assert [each.topic_id for each in forwarded.topic_partitions] == [other]

    reported = Message(member_id="m", member_epoch=2, assignment=Message(topic_partitions=both))
    answer = rewriter.finish(memoryview(encode_response_frame(key, 1, 7, reported))[4:]).answer
    assert answer == encode_response_frame(
        key, 1, 7, Message(member_id="m", member_epoch=2, assignment=Message(topic_partitions=both[1:]))
    )
    alone = Message(member_id="m", member_epoch=2)
    alone_ = rewriters.begin(key, 1, memoryview(encode_request_frame(key, 1, 8, "app", Message(group_id="g")))[4:], "")
    assert alone_.finish is not None
    frame = encode_response_frame(key, 1, 8, alone)
    assert alone_.finish(memoryview(frame)[4:]).answer == frame
