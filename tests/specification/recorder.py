"""Records what partition sequencers do, as traces for `specification/SequencerTrace.tla`.

A trace ends at the first event that the specification does not have, such as an append without an expected offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from fencepost_proxy.errors import Error
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.sequencer.fence import Phase
from fencepost_proxy.sequencer.in_doubt import IN_DOUBT
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.session import dispatcher
from fencepost_proxy.wire.batch import parse_batch_header
from fencepost_proxy.wire.produce import PartitionResult
from tests.simulation import watching

Event = dict[str, object]
_FENCE = {45: "gap", 47: "old epoch", 59: "gap", 90: "old epoch"}
_NOTHING = "Nothing"


class Trace:
    """Events of one sequencer. `sizes`, `contents`, `named`: of each append, by its number from 1 on."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.sizes: list[int] = []
        self.contents: list[str] = []
        self.named: set[int] = set()
        self.ended = False
        self.mismatched: set[int] = set()
        self.undecided: dict[int, Event] = {}
        self._numbers: dict[int, int] = {}
        self._pending: list[g.PendingAppend] = []  # keeps the ids of objects unique

    def number(self, pending: g.PendingAppend) -> int:
        return self._numbers.get(id(pending), 0)

    def add(self, name: str, *, undecided: int = 0, **fields: object) -> None:
        """`undecided`: the append of which this event says more later."""
        if self.ended:
            return
        self.events.append({"name": name, **fields})
        if undecided:
            self.undecided[undecided] = self.events[-1]
        self.changed()

    def changed(self) -> None:
        """After each event."""

    def end(self) -> None:
        self.ended = True

    def submitted(self, pending: g.PendingAppend) -> None:
        if pending.append.expected_base_offset is None or pending.append.transactional:
            self.end()
            return
        self._pending.append(pending)
        self.sizes.append(pending.append.record_count)
        self.contents.append(pending.digest.hex())
        number = self._numbers[id(pending)] = len(self.sizes)
        if pending.append.write_id is not None:
            self.named.add(number)
        self.add("submit", append=number, expected=pending.append.expected_base_offset, after=0)


class RecordingSequencer(PartitionSequencer):
    """A partition sequencer that records its calls and answers. It changes nothing."""

    recorded: list[Trace]
    new_trace: type[Trace] = Trace

    def submit(self, pending: g.PendingAppend, now: float) -> list[g.Effect]:
        trace = self._trace
        trace.submitted(pending)
        known = self.state.retries.unresolved(pending) is not None
        effects = super().submit(pending, now)
        waits = pending in self.state.appends.queue or pending is self.state.appends.admitted
        answers = [each.result.error_code for each in effects if isinstance(each, g.Answer) and each.pending is pending]
        if known or Error.NONE in answers or not (waits or answers):
            trace.end()  # a retry
        return self._answered(effects)

    def sent(self, pending: g.PendingAppend, now: float) -> list[g.Effect]:
        trace, fence = self._trace, pending.placement.fence
        number = trace.number(pending)
        if not number or fence is None or fence.producer_id < 0:
            trace.end()
        elif not trace.ended:
            in_flight = self.state.appends.in_flight
            if in_flight:
                submitted = next(e for e in trace.events if e["name"] == "submit" and e["append"] == number)
                submitted["after"] = trace.number(in_flight[-1])
            trace.add("sent", append=number, epoch=fence.producer_epoch, seq=fence.base_sequence)
        return self._answered(super().sent(pending, now))

    def answered(self, pending: g.PendingAppend, result: PartitionResult, now: float) -> list[g.Effect]:
        if pending in self.state.appends.in_flight:
            kind = _kind(result)
            self._trace.add("answered", append=self._trace.number(pending), kind=kind, base=result.base_offset)
        return self._answered(super().answered(pending, result, now))

    def lost(self, pending: g.PendingAppend, now: float) -> list[g.Effect]:
        if pending in self.state.appends.in_flight:
            self._trace.add("lost", append=self._trace.number(pending))
        return self._answered(super().lost(pending, now))

    def cancel(self, pending: g.PendingAppend, now: float) -> list[g.Effect]:
        """In the specification as if it was answered: its client has disconnected."""
        self._trace.add("answer", append=self._trace.number(pending), code="try again")
        return self._answered(super().cancel(pending, now))

    def handle(self, event: g.Event, now: float) -> list[g.Effect]:
        trace = self._trace
        match event:
            case g.LogEndRead(snapshot) if self.state.fence.phase is Phase.READING:
                state = snapshot.producer_state
                trace.add(
                    "read",
                    end=snapshot.log_end_offset,
                    state=-1 if state is None else state.producer_epoch,
                    next=0 if state is None else state.next_sequence,
                    epoch=snapshot.fence_base[0],
                    base=snapshot.fence_base[1],
                )
            case g.BatchRead(pending, result):
                in_doubt = pending in self.state.appends.in_doubt
                effects = super().handle(event, now)
                self._looked_up(pending, result, in_doubt=in_doubt)
                return self._answered(effects)
            case g.Resent() | g.BasePublished() | g.Forget():
                trace.end()
        return self._answered(super().handle(event, now))

    @property
    def _trace(self) -> Trace:
        found = self.__dict__.get("trace")
        if found is None:
            found = self.__dict__["trace"] = self.new_trace()
            self.recorded.append(found)
        assert isinstance(found, Trace)
        return found

    def _looked_up(self, pending: g.PendingAppend, result: g.BatchReadResult, *, in_doubt: bool) -> None:
        trace, there = self._trace, self._there(pending, result)
        if in_doubt:
            if there is not None and pending not in self.state.appends.in_doubt:
                trace.add("lookup", append=trace.number(pending), there=there)
        elif (decided := trace.undecided.get(trace.number(pending))) is not None and there is not None:
            decided["there"] = there
            del trace.undecided[trace.number(pending)]
            trace.changed()

    def _decided(self, pending: g.PendingAppend) -> None:
        """The expected offset does not hold. What lies there is read later: `Trace.undecided`."""
        trace, number = self._trace, self._trace.number(pending)
        if not number or number in trace.mismatched:
            return
        trace.mismatched.add(number)
        is_read = pending in self.state.appends.being_read
        trace.add("mismatch", undecided=number if is_read else 0, append=number, there=_NOTHING)

    def _there(self, pending: g.PendingAppend, result: g.BatchReadResult) -> Event | None:
        expected = pending.append.expected_base_offset
        if not isinstance(result, g.Found) or expected is None:
            return None
        header = parse_batch_header(result.batch)
        there = self.state.log.decode(result, header.base_offset, pending)
        same = header.instance_id == pending.context.instance_id
        return {
            "kind": "fenced",
            "base": header.base_offset,
            "content": "" if there is None else there.digest.hex(),
            "epoch": header.producer_epoch,
            "seq": header.base_sequence,
            "from": "P" if same else "other",
        }

    def _answered(self, effects: list[g.Effect]) -> list[g.Effect]:
        for pending in self.state.appends.being_read:
            self._decided(pending)
        for each in effects:
            if isinstance(each, g.Answer) and each.reason == "offset_mismatch":
                self._decided(each.pending)
            if isinstance(each, g.Answer):
                number = self._trace.number(each.pending)
                if not number or each.reason == "timestamp_too_old":  # the specification has no timestamps
                    self._trace.end()
                    continue
                code = "success" if each.result.error_code == Error.NONE else "failed"
                if each.result.error_code in IN_DOUBT:
                    code = "unknown"
                elif each.result.error_code == Error.NOT_LEADER_OR_FOLLOWER:
                    code = "try again"
                if each.reason == "predecessor_failed":
                    code = "predecessor failed"
                self._trace.add("answer", append=number, code=code)
        return effects


def _kind(result: PartitionResult) -> str:
    error = result.error_code
    if error == Error.NONE:
        return "appended" if result.log_append_time_ms == -1 else "duplicate"
    if error in IN_DOUBT or result.base_offset != -1:
        return "inconclusive"
    return _FENCE.get(error, "not leader" if error == Error.NOT_LEADER_OR_FOLLOWER else "rejected")


@contextmanager
def recording() -> Iterator[list[Trace]]:
    """All sequencers that are created meanwhile record their traces."""
    traces: list[Trace] = []
    recorder = type("Recording", (RecordingSequencer, watching.WatchedSequencer), {"recorded": traces})
    # The dispatcher calls methods of its class; the simulation's dispatcher creates the other one.
    with patch.object(dispatcher, "PartitionSequencer", recorder), patch.object(watching, "WatchedSequencer", recorder):
        yield traces
