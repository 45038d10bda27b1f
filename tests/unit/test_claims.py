"""Claims: a process has the epoch of a partition for itself, and pipelines while others live."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fencepost_policies.append import Check
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.metadata import Leader
from fencepost_proxy.metrics import Counts
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.services import claim_markers
from fencepost_proxy.services.claim_markers import ClaimMarkers
from fencepost_proxy.types import TopicPartition
from tests.support.batches import expecting
from tests.unit.test_sequencer import SHARED, TP, Talk, two_lost

LIMITS = g.SequencerLimits(claim_after_seconds=5.0, claim_after_waits=1, producer_epochs=16)


def talk(**more: Any) -> Talk:
    return Talk(sequencer=PartitionSequencer(TP, LIMITS), alone=False, **more)


def claimed(end: int = 10, epoch: int = 1) -> Talk:
    """The partition was claimed for the first append, which is sent."""
    current = talk()
    first = current.submit(expecting(end, b"a"))
    facts = {"epoch": epoch, "fence_base": (epoch, end), "claim": g.Claim.OURS, "may_claim": True}
    current.snapshot(end, next_sequence=0, **facts)
    assert current.admitted(first) == g.Fence(SHARED, epoch, 0)
    current.acknowledged(first, end)
    return current


def proposal_of(current: Talk) -> tuple[int, int, g.Claim]:
    proposed = current.next(g.PublishBase)
    current.silent()
    return proposed.producer_epoch, proposed.base, proposed.claim


@pytest.fixture
def current() -> Talk:
    return talk()


def test_claimed_partition_is_pipelined_while_others_live() -> None:
    current = claimed()
    first, second = (current.sends(expecting(at, b"b")) for at in (11, 12))
    assert second.placement.fence == g.Fence(SHARED, 1, 2)
    current.acknowledged(first, 11)
    current.acknowledged(second, 12)


def test_claimed_partition_is_not_pipelined_while_a_lost_append_may_be_queued() -> None:
    current = claimed()
    current.sequencer.state.fence.bases.claimed_at = current.now
    two_lost(current, 11)
    first, second = (current.submit(expecting(at, b"b"), connection=2) for at in (11, 12))
    there = {"epoch": 1, "fence_base": (1, 10), "claim": g.Claim.OURS, "leader_epoch": current.leader_epoch}
    current.snapshot(11, next_sequence=1, may_claim=True, **there)
    current.admitted(first)
    current.silent()
    current.acknowledged(first, 11)
    current.admitted(second)


@pytest.mark.parametrize("claim", [g.Claim.NONE, g.Claim.SHARED])
def test_shared_partition_is_not_pipelined(claim: g.Claim, current: Talk) -> None:
    first = current.submit(expecting(10, b"a"))
    current.snapshot(10, epoch=1, next_sequence=0, fence_base=(1, 10), claim=claim, may_claim=True)
    current.acknowledged(first, 10)
    current.sends(expecting(11, b"b"))
    current.submit(expecting(12, b"c"))
    current.silent()


def test_claim_does_not_outlive_its_config() -> None:
    """A process of an older release, which appends again without the config, knows of no claim."""
    current = claimed()
    current.report(g.Forget())
    first = current.submit(expecting(11, b"b"))
    current.snapshot(11, epoch=1, next_sequence=1, fence_base=(1, 10), claim=g.Claim.OURS)
    assert current.admitted(first) == g.Fence(SHARED, 1, 1)
    current.acknowledged(first, 11)
    current.sends(expecting(12, b"c"))
    current.submit(expecting(13, b"d"))
    current.silent()


def test_another_process_takes_over_at_once(current: Talk) -> None:
    """Its claim is after the next offset, which its marker takes."""
    pending = current.submit(expecting(12, b"a"))
    there = {"fence_base": (4, 10), "epoch": 4, "next_sequence": 2}
    current.snapshot(12, **there, claim=g.Claim.ANOTHERS, may_claim=True)
    assert proposal_of(current) == (5, 13, g.Claim.SHARED)
    current.report(g.BasePublished(True, ours=True))
    current.snapshot(13, epoch=5, next_sequence=0, fence_base=(5, 13), claim=g.Claim.SHARED, may_claim=True)
    assert current.next(g.ReadBatch) == g.ReadBatch(pending, 12)  # the marker


def test_marker_confirms_the_fence(current: Talk) -> None:
    """The first appends after a claim are pipelined already."""
    first = current.submit(expecting(10, b"a"), wait=60.0)
    current.snapshot(10, next_sequence=10, may_claim=True)
    current.acknowledged(first, 10)
    current.now += 10.0
    before = current.sends(expecting(11, b"a"), wait=60.0)
    waiting = [current.submit(expecting(at, b"a"), wait=60.0) for at in (13, 14)]
    current.acknowledged(before, 11)
    assert proposal_of(current) == (1, 13, g.Claim.OURS)
    current.report(g.BasePublished(True, ours=True))
    facts = {"fence_base": (1, 13), "claim": g.Claim.OURS, "may_claim": True, "leader_epoch": current.leader_epoch}
    current.snapshot(13, epoch=1, next_sequence=0, **facts)
    assert [current.admitted(each) for each in waiting] == [g.Fence(SHARED, 1, 0), g.Fence(SHARED, 1, 1)]


@pytest.mark.parametrize(("seconds", "claims"), [(6.0, False), (11.0, True)])
def test_each_claim_needs_twice_the_time_alone(seconds: float, claims: bool, current: Talk) -> None:
    current.sequencer.state.fence.bases._claims = 1
    first = current.submit(expecting(10, b"a"), wait=60.0)
    current.snapshot(10, next_sequence=10, may_claim=True)
    current.acknowledged(first, 10)
    current.now += seconds
    before = current.sends(expecting(11, b"a"), wait=60.0)
    following = current.submit(expecting(12, b"a"), wait=60.0)
    current.acknowledged(before, 11)
    if claims:
        assert proposal_of(current) == (1, 13, g.Claim.OURS)
    else:
        current.admitted(following)


@pytest.mark.parametrize("claim", [g.Claim.OURS, g.Claim.SHARED])
@pytest.mark.parametrize("state", [None, (4, 7)], ids=["no producer", "an older epoch"])
def test_claim_without_its_marker_is_not_used(claim: g.Claim, state: tuple[int, int] | None, current: Talk) -> None:
    """Otherwise the first append of its epoch would not be compared. The next claim has another epoch."""
    current.submit(expecting(13, b"a"))
    epoch, next_sequence = state or (0, None)
    current.snapshot(13, fence_base=(5, 13), epoch=epoch, next_sequence=next_sequence, claim=claim, may_claim=True)
    assert proposal_of(current) == (6, 14, g.Claim.SHARED)


def test_marker_must_be_replicated_before_the_first_append(current: Talk) -> None:
    """A leader without it would accept any first sequence."""
    pending = current.submit(expecting(13, b"a"))
    there = {"fence_base": (5, 13), "epoch": 5, "next_sequence": 0, "claim": g.Claim.SHARED, "may_claim": True}
    current.snapshot(13, **there, marker_is_replicated=False)
    current.silent()
    current.tick(1.0)
    current.snapshot(13, **there)
    assert current.admitted(pending) == g.Fence(SHARED, 5, 0)


def test_append_before_the_marker_needs_another_claim_and_is_no_violation(current: Talk) -> None:
    current.submit(expecting(12, b"a"))
    current.snapshot(12, fence_base=(4, 12), epoch=4, next_sequence=0, claim=g.Claim.ANOTHERS, may_claim=True)
    assert proposal_of(current) == (5, 13, g.Claim.SHARED)
    current.report(g.BasePublished(True, ours=True))
    current.snapshot(14, fence_base=(5, 13), epoch=5, next_sequence=0, claim=g.Claim.SHARED, may_claim=True)
    assert proposal_of(current) == (6, 15, g.Claim.SHARED)


@pytest.mark.parametrize("change", ["none", "not allowed", "too early", "disturbed", "true topic"])
def test_process_that_appends_alone_claims(change: str) -> None:
    current = talk(check=Check.ON if change == "true topic" else Check.REQUIRED)
    first = current.submit(expecting(10, b"a"), wait=60.0)
    current.snapshot(10, next_sequence=10, may_claim=change != "not allowed")
    current.acknowledged(first, 10)
    current.now += 1.0 if change == "too early" else 10.0
    before = current.sends(expecting(11, b"a"), wait=60.0)
    waiting = [current.submit(expecting(at, b"a"), wait=60.0) for at in (12, 13, 14)]
    if change == "disturbed":
        current.kafka(before, 45)
        current.snapshot(12, next_sequence=12, may_claim=True)
        return
    current.acknowledged(before, 11)
    if change == "none":
        assert proposal_of(current) == (1, 13, g.Claim.OURS)
    else:
        current.admitted(waiting[0])


@pytest.mark.parametrize(("epoch", "claim", "base"), [(13, g.Claim.SHARED, 13), (14, g.Claim.NONE, 12)])
def test_last_epoch_of_a_producer_id_has_no_marker(epoch: int, claim: g.Claim, base: int, current: Talk) -> None:
    current.submit(expecting(12, b"a"))
    there = {"fence_base": (epoch, 12), "epoch": epoch, "next_sequence": 0}
    current.snapshot(12, **there, claim=g.Claim.ANOTHERS, may_claim=True)
    assert proposal_of(current) == (epoch + 1, base, claim)


def test_last_epoch_waits_for_the_marker_before_it(current: Talk) -> None:
    """It would take the offset that the last epoch's only append expects."""
    current.submit(expecting(12, b"a"), wait=60.0)
    there = {"fence_base": (14, 13), "epoch": 13, "next_sequence": 0, "claim": g.Claim.SHARED, "may_claim": True}
    current.snapshot(12, **there)
    current.silent()
    current.tick(LIMITS.queued_seconds - 1)
    current.snapshot(12, **there)
    current.silent()
    current.tick(2)
    current.snapshot(12, **there)
    assert proposal_of(current) == (15, 12, g.Claim.NONE)


@pytest.mark.parametrize(("epoch", "claims"), [(11, True), (12, False)])
def test_last_epochs_of_a_producer_id_are_not_claimed(epoch: int, claims: bool, current: Talk) -> None:
    first = current.submit(expecting(10, b"a"), wait=60.0)
    current.snapshot(10, epoch=epoch, next_sequence=0, fence_base=(epoch, 10), may_claim=True)
    current.acknowledged(first, 10)
    current.now += 10.0
    before = current.sends(expecting(11, b"a"), wait=60.0)
    following = current.submit(expecting(12, b"a"), wait=60.0)
    current.acknowledged(before, 11)
    if claims:
        assert proposal_of(current) == (epoch + 1, 13, g.Claim.OURS)
    else:
        current.admitted(following)


@pytest.mark.parametrize(
    ("answer", "permitted"),
    [(3, True), (31, False), (29, False), (UpstreamUnavailable("gone"), False)],
    ids=["no such partition", "cluster denied", "topic denied", "no answer"],
)
def test_right_to_write_markers_is_asked_before_a_claim(
    answer: int | Exception, permitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a marker for a partition that does not exist. A refusal is remembered."""
    asked: list[TopicPartition] = []

    async def write(kafka: Any, leader: int, at: TopicPartition, *_: Any, **options: Any) -> int:
        asked.append(at)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(claim_markers, "write_abort_marker", write)
    counts = Counts()
    kafka: Any = SimpleNamespace(leader=lambda _: Leader(1, 0))
    markers = ClaimMarkers(kafka, lambda _: True, counts)
    assert asyncio.run(markers.permitted(TP)) == permitted
    asyncio.run(markers.permitted(TP))
    assert asked == [TopicPartition(TP.topic, (1 << 31) - 1)] * (2 if isinstance(answer, Exception) else 1)
    assert counts == ({} if permitted or isinstance(answer, Exception) else {"denied": 2})
