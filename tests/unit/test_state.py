"""Records of the state topic, and the view that results."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost_policies.append import Check
from fencepost_proxy.errors import StateError
from fencepost_proxy.topics.fencing import FenceBase, encode_fence_base, encode_producer_id
from fencepost_proxy.topics.processes import encode_heartbeat, encode_heartbeat_tombstone, encode_process, heartbeat
from fencepost_proxy.topics.state import (
    StateView,
    TopicConfigChange,
    encode_topic_config,
    encode_topic_config_tombstone,
)
from fencepost_proxy.topics.virtual_configs import UNCHECKED, TopicPolicy
from fencepost_proxy.types import LogEndOffset, Offset, ProducerEpoch, ProducerId
from fencepost_proxy.wire.state_records import StateRecord

A, B, C = UUID(int=1), UUID(int=2), UUID(int=3)
ORDERS, ORDERS_ANEW = UUID(int=100), UUID(int=101)
CHECKED = {"fencepost.check.expected.offsets": "true"}
REQUIRED = {"fencepost.check.expected.offsets": "required"}


def view_of(*records: StateRecord, cluster: str = "cluster-1") -> StateView:
    view = StateView(cluster)
    for offset, record in enumerate(records):
        assert view.apply(Offset(offset), *record) is None
    return view


def no_file(_topic: str) -> dict[str, str]:
    return {}


def producer(proposal: UUID, producer_id: int, cluster: str = "cluster-1") -> StateRecord:
    return encode_producer_id(proposal, cluster, ProducerId(producer_id))


def base(proposal: UUID, epoch: int, offset: int, topic: UUID = ORDERS, partition: int = 0) -> StateRecord:
    return encode_fence_base(topic, partition, ProducerEpoch(epoch), proposal, LogEndOffset(offset))


def test_records_have_the_documented_form() -> None:
    assert producer(A, 4000) == (
        b"producer-id/00000000-0000-0000-0000-000000000001",
        b'{"cluster_id":"cluster-1","producer_id":4000}',
    )
    assert base(A, 5, 77, partition=3) == (
        b"fence-base/00000000-0000-0000-0000-000000000064/3/5/00000000-0000-0000-0000-000000000001",
        b'{"base":77}',
    )
    assert encode_topic_config("orders", ORDERS, CHECKED) == (
        b"topic-config/orders",
        b'{"configs":{"fencepost.check.expected.offsets":"true"},"topic_id":"00000000-0000-0000-0000-000000000064"}',
    )
    assert encode_topic_config_tombstone("orders") == (b"topic-config/orders", None)
    assert encode_process(A, 12) == (b"process/00000000-0000-0000-0000-000000000001", b'{"started_ms":12}')
    assert encode_heartbeat(A, 12) == (b"heartbeat/00000000-0000-0000-0000-000000000001", b'{"at_ms":12}')
    assert encode_heartbeat_tombstone(A) == (b"heartbeat/00000000-0000-0000-0000-000000000001", None)


# --- the processes ----------------------------------------------------------------------------------------------------


def test_heartbeat_record_names_its_process() -> None:
    assert heartbeat(encode_heartbeat(A, 12)) == (A, 12, {})
    assert heartbeat(encode_heartbeat(A, 12, {"host": "edge-1"})) == (A, 12, {"host": "edge-1"})
    assert heartbeat(StateRecord(encode_heartbeat(A, 12).key, b'{"about":7,"at_ms":12}')) == (A, 12, {})
    assert heartbeat(encode_heartbeat_tombstone(A)) == (A, None, {})
    assert heartbeat(encode_process(A, 12)) is None
    assert heartbeat(StateRecord(b"heartbeat/nobody", b"{}")) is None
    assert heartbeat(StateRecord(encode_heartbeat(A, 12).key, b"{}")) is None


def test_instance_ids_are_assigned_in_order_and_reused() -> None:
    processes = [UUID(int=1000 + i) for i in range(256)]
    view = view_of(*(encode_process(each, 0) for each in processes[:254]))
    assert [view.processes.instance_id(each) for each in processes[:3]] == [1, 2, 3]
    assert view.processes.instance_id(processes[255]) == 0  # not known
    assert view.processes.age(processes[0]) == 253
    view = view_of(*(encode_process(each, 0) for each in processes))
    assert (view.processes.instance_id(processes[0]), view.processes.instance_id(processes[255])) == (0, 1)


# --- the shared producer id -------------------------------------------------------------------------------------------


def test_the_first_proposal_of_a_producer_id_wins() -> None:
    assert view_of().producer_ids.get() is None
    assert view_of(producer(A, 10), producer(B, 20), producer(A, 30)).producer_ids.get() == 10


def test_another_clusters_state_is_not_served() -> None:
    with pytest.raises(StateError, match="belongs to cluster cluster-2, but this is cluster cluster-1"):
        view_of(producer(A, 10, cluster="cluster-2"))


def test_producer_ids_are_agreed_on_by_number() -> None:
    second = encode_producer_id(B, "cluster-1", ProducerId(20), 1)
    late = encode_producer_id(A, "cluster-1", ProducerId(30), 1)
    view = view_of(producer(A, 10), second, late)
    assert (view.producer_ids.get(), view.producer_ids.get(1), view.producer_ids.get(2)) == (10, 20, None)
    assert view.producer_ids.all == {10, 20}


def test_older_bases_are_dropped_for_a_newer_one() -> None:
    view = view_of(base(A, 5, 50), base(B, 6, 60), base(C, 40_000, 70))
    older = view.fence_bases.older(ORDERS, 0, ProducerEpoch(40_000))
    assert [each.key for each in older] == [base(A, 5, 50).key, base(B, 6, 60).key]
    assert all(each.value is None for each in older)
    dropped = view_of(base(A, 5, 50), base(B, 6, 60), base(C, 40_000, 70), *older)
    assert dropped.fence_bases.get(ORDERS, 0) == (40_000, 70)
    assert dropped.fence_bases.older(ORDERS, 0, ProducerEpoch(40_000)) == []


def test_older_bases_are_dropped_in_bounded_batches() -> None:
    """Older versions kept all of them."""
    view = view_of(*(base(A, epoch, 10) for epoch in range(5_000)))
    older = view.fence_bases.older(ORDERS, 0, ProducerEpoch(5_000))
    assert len(older) == 1_000
    assert sum(len(each.key) for each in older) < 200_000


def test_a_deleted_producer_id_is_not_served() -> None:
    with pytest.raises(StateError, match="was deleted"):
        view_of(producer(A, 10), StateRecord(producer(A, 10).key, None))


# --- fence bases ------------------------------------------------------------------------------------------------------


def test_fence_base_belongs_to_one_topic_id_partition() -> None:
    view = view_of(base(A, 5, 77))
    assert view.fence_bases.get(ORDERS, 0) == FenceBase(ProducerEpoch(5), LogEndOffset(77)) == (5, 77)
    assert view.fence_bases.get(ORDERS, 1) is None
    assert view.fence_bases.get(ORDERS_ANEW, 0) is None


def test_highest_epoch_wins_then_the_first_proposal() -> None:
    view = view_of(base(A, 5, 50), base(B, 6, 60), base(C, 6, 66), base(B, 5, 55), base(A, 10, 100), base(C, 9, 90))
    assert view.fence_bases.get(ORDERS, 0) == (10, 100)
    assert view_of(base(A, 5, 50), base(B, 6, 60), base(C, 6, 66)).fence_bases.get(ORDERS, 0) == (6, 60)


def test_what_a_deleted_topic_had_can_be_cleared() -> None:
    winner, loser = base(A, 5, 50), base(B, 5, 55)
    assert view_of(winner, loser, StateRecord(loser.key, None)).fence_bases.get(ORDERS, 0) == (5, 50)
    assert view_of(winner, StateRecord(winner.key, None)).fence_bases.get(ORDERS, 0) is None


# --- topic configs ----------------------------------------------------------------------------------------------------


def test_the_last_record_of_a_topics_configs_holds() -> None:
    set_, changed = encode_topic_config("orders", ORDERS, CHECKED), encode_topic_config("orders", ORDERS, REQUIRED)
    assert view_of(set_, changed).configs_set_on("orders", ORDERS) == REQUIRED
    assert view_of(changed, set_).configs_set_on("orders", ORDERS) == CHECKED
    assert view_of(set_, encode_topic_config_tombstone("orders")).configs_set_on("orders", ORDERS) == {}
    assert view_of(set_).configs_set_on("other", ORDERS) == {}


def test_configs_stored_for_an_internal_topic_are_ignored() -> None:
    stored = encode_topic_config("__consumer_offsets", ORDERS, CHECKED)
    assert view_of(stored).topic_policy("__consumer_offsets", ORDERS, lambda topic: {}) == UNCHECKED


def test_recreated_topic_inherits_checks_until_set() -> None:
    view = view_of(encode_topic_config("orders", ORDERS, REQUIRED))
    for topic_id in (ORDERS, ORDERS_ANEW, None):
        assert view.topic_policy("orders", topic_id, no_file).check is Check.REQUIRED
    assert (view.inherits("orders", ORDERS), view.inherits("orders", ORDERS_ANEW)) == (False, True)
    (decided,) = view.records_of([TopicConfigChange("orders", ORDERS_ANEW, REQUIRED)])
    view.apply(Offset(9), *decided)
    assert not view.inherits("orders", ORDERS_ANEW)


def test_recreated_topic_inherits_no_switched_off_check() -> None:
    switched_off = {
        "fencepost.check.expected.offsets": "false",
        "fencepost.check.partition.count": "true",
        "fencepost.partitioner": "none",
    }
    view = view_of(encode_topic_config("orders", ORDERS, switched_off))
    policy = view.topic_policy("orders", ORDERS_ANEW, lambda topic: CHECKED)
    assert (policy.check, policy.count_check) == (Check.ON, Check.ON)


def test_topic_config_overrides_file_and_file_overrides_default() -> None:
    def file(topic: str) -> dict[str, str]:
        return (
            {"fencepost.check.expected.offsets": "Required", "fencepost.expected.offsets.source": "base"}
            if topic == "orders"
            else {}
        )

    view = view_of(encode_topic_config("orders", ORDERS, {"fencepost.check.expected.offsets": "false"}))

    assert view.topic_policy("orders", ORDERS, file) == TopicPolicy(Check.OFF, source_is_base=True)
    assert view.topic_policy("orders", ORDERS_ANEW, file) == TopicPolicy(Check.REQUIRED, source_is_base=True)
    assert view.topic_policy("other", A, file) == UNCHECKED


def test_value_of_a_newer_version_is_refused() -> None:
    with pytest.raises(StateError, match=r"topic orders: .*'strictly'.* newer version"):
        view_of(encode_topic_config("orders", ORDERS, {"fencepost.check.expected.offsets": "strictly"}))


# --- records that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (None, b"{}", "unknown kind"),
        (b"later-kind/orders", b"{}", "unknown kind: 'later-kind/orders'"),
        (b"\xff", b"{}", "cannot be read"),
        (b"topic-config/orders", b"{not json", "cannot be read"),
        (b"topic-config/orders", b"[]", "not a JSON object"),
        (b"topic-config/orders", b'{"topic_id":"x","configs":{}}', "cannot be read"),
        (b"topic-config/orders", b'{"topic_id":"00000000-0000-0000-0000-000000000064"}', "cannot be read"),
        (b"topic-config/orders", b'{"topic_id":"00000000-0000-0000-0000-000000000064","configs":[]}', "cannot be read"),
        (b"producer-id/x", b'{"cluster_id":"cluster-1"}', "cannot be read"),
        (b"producer-id/x", b'{"cluster_id":"cluster-1","producer_id":Infinity}', "producer_id: expected int"),
        (b"fence-base/x", b'{"base":1}', "cannot be read"),
        (b"fence-base/00000000-0000-0000-0000-000000000064/0/0/x", b"\xff\xfe", "cannot be read"),
    ],
)
def test_unreadable_record_is_named_and_skipped(key: bytes | None, value: bytes, reason: str) -> None:
    view = view_of(encode_topic_config("orders", ORDERS, CHECKED))
    stated = view.apply(Offset(9), key, value)
    assert stated is not None
    assert reason in stated
    assert "record 9" in stated
    assert view.configs_set_on("orders", ORDERS) == CHECKED
    assert view.next_offset == 10


@given(st.binary(max_size=40), st.binary(max_size=40) | st.none())
def test_arbitrary_records_never_crash_the_view(key: bytes, value: bytes | None) -> None:
    for prefix in (b"", b"producer-id/", b"topic-config/", b"fence-base/"):
        try:
            StateView("cluster-1").apply(Offset(0), prefix + key, value)
        except StateError:
            assert prefix == b"producer-id/"
            assert value is None


def test_records_are_applied_in_their_order() -> None:
    view = view_of(producer(A, 10))
    with pytest.raises(ValueError, match="record 0 of the state topic comes after record 0"):
        view.apply(Offset(0), *producer(B, 20))


# --- changes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "records"),
    [
        (TopicConfigChange("new", A, REQUIRED), [encode_topic_config("new", A, REQUIRED)]),
        (
            TopicConfigChange("orders", ORDERS, {"fencepost.expected.offsets.source": "base"}),
            [encode_topic_config("orders", ORDERS, {**CHECKED, "fencepost.expected.offsets.source": "base"})],
        ),
        (TopicConfigChange("orders", ORDERS, CHECKED), []),
        (TopicConfigChange("orders", ORDERS, unset=frozenset(CHECKED)), [encode_topic_config_tombstone("orders")]),
        (TopicConfigChange("orders", ORDERS, unset=frozenset({"fencepost.expected.offsets.source"})), []),
        (
            TopicConfigChange("orders", ORDERS_ANEW, {"fencepost.expected.offsets.source": "base"}),
            [encode_topic_config("orders", ORDERS_ANEW, {**CHECKED, "fencepost.expected.offsets.source": "base"})],
        ),
        (
            TopicConfigChange("orders", ORDERS, deleted=True),
            [encode_topic_config_tombstone("orders"), StateRecord(base(A, 5, 50).key, None)],
        ),
        (
            TopicConfigChange(None, ORDERS, deleted=True),
            [encode_topic_config_tombstone("orders"), StateRecord(base(A, 5, 50).key, None)],
        ),
        (TopicConfigChange("orders", ORDERS_ANEW, deleted=True), []),
        (TopicConfigChange("orders", None, deleted=True), []),
        (
            TopicConfigChange("orders", ORDERS_ANEW, deleted=True, inherited_from=ORDERS),
            [encode_topic_config_tombstone("orders")],
        ),
        (TopicConfigChange("orders", ORDERS_ANEW, deleted=True, inherited_from=A), []),
        (TopicConfigChange("orders", ORDERS_ANEW, CHECKED), [encode_topic_config("orders", ORDERS_ANEW, CHECKED)]),
    ],
)
def test_what_is_stored_for_a_change(change: TopicConfigChange, records: list[StateRecord]) -> None:
    view = view_of(
        encode_topic_config("orders", ORDERS, CHECKED), base(A, 5, 50), base(A, 5, 50, topic=ORDERS_ANEW, partition=1)
    )
    if change.topic_id == ORDERS_ANEW and change.deleted:
        records = [*records, StateRecord(base(A, 5, 50, topic=ORDERS_ANEW, partition=1).key, None)]
    assert view.records_of([change]) == records


def test_config_change_without_topic_id_raises() -> None:
    with pytest.raises(ValueError, match="id of topic orders must be known"):
        view_of().records_of([TopicConfigChange("orders", None, CHECKED)])


_CHECK, _SOURCE = "fencepost.check.expected.offsets", "fencepost.expected.offsets.source"


@pytest.mark.parametrize(
    ("change", "effect"),
    [
        (TopicConfigChange("orders", ORDERS, {_CHECK: "required"}), {_CHECK: ("true", "required")}),
        (TopicConfigChange("orders", ORDERS, {_CHECK: "true"}), {}),
        # The file's value holds where the topic has none.
        (TopicConfigChange("orders", ORDERS, {_SOURCE: "header"}), {_SOURCE: ("base", "header")}),
        (TopicConfigChange("orders", ORDERS, unset=frozenset({_CHECK, _SOURCE})), {_CHECK: ("true", "false")}),
        (TopicConfigChange("orders", ORDERS, deleted=True), {_CHECK: ("true", "false")}),
        (TopicConfigChange("new", A, {_CHECK: "true", _SOURCE: "base"}), {_CHECK: ("false", "true")}),
        (TopicConfigChange(None, ORDERS, deleted=True), {}),
    ],
)
def test_effect_of_a_change_has_old_and_new_values(
    change: TopicConfigChange, effect: dict[str, tuple[str, str]]
) -> None:
    view = view_of(encode_topic_config("orders", ORDERS, CHECKED))
    assert view.effect_of(change, lambda topic: {_SOURCE: "Base"}) == effect
