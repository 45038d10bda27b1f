"""Produce requests that concern guarded partitions: from the frame, over their turns at the gates, to the one answer.

`Turn` (`turn.py`) is what is known of one such request. Here it goes its way: a ticket for each guarded partition, or a
refusal; the turns, one gate after the other; what passed is sent, and what Kafka says of it is told to the gates; the
gates' last words are put into one answer.

While a turn waits at a gate, nothing behind it is read, as a broker would not either (it handles one request of a
connection at a time). Once it is sent it is one of `_turns`, until the last of its partitions has a result.

A refusal tells where the log ends. So before it is told, Kafka is asked whether this client may write (`_prove_write`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

from fencepost_policies.append import Refusal
from fencepost_proxy.errors import ClientProtocolError, Error, UpstreamProtocolError
from fencepost_proxy.partitions.events import Answered, Lost, Offered, Sent, Ticket, Withdrawn
from fencepost_proxy.partitions.gate_state import sent_behind
from fencepost_proxy.session.connection import INT32
from fencepost_proxy.session.counted import producer_of
from fencepost_proxy.session.cutter import CutterState
from fencepost_proxy.session.doors import AtDoors
from fencepost_proxy.session.messages import Count, ToGate, TopicStale
from fencepost_proxy.session.slots import Answer, Failed, Slot
from fencepost_proxy.session.turn import Bid, Turn, make_ticket, refused
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import PRODUCE
from fencepost_proxy.wire.produce import (
    PartitionData,
    PartitionResult,
    ProduceRequest,
    ProduceResponse,
    TopicData,
    encode_produce_request,
    encode_produce_response,
    parse_produce_request,
    parse_produce_response,
)

#: Names topics by id: a stamped append cannot land in a topic that was deleted and created anew.
PRODUCE_BY_ID = 13
#: Answers that say that what is known of the topic (its id, its leaders) is out of date.
_STALE = frozenset({Error.UNKNOWN_TOPIC_OR_PARTITION, Error.NOT_LEADER_OR_FOLLOWER})
#: Clients give up at `timeout_ms`; what is not known by then is told a little earlier.
_ANSWER_BY = 0.9
#: Answers that say neither where a log ends nor how it is guarded: anybody may have them, without waiting for Kafka.
_TELLS_NOTHING = frozenset({Error.NONE, Error.NOT_LEADER_OR_FOLLOWER, Error.REQUEST_TIMED_OUT})


class GuardedProduce(AtDoors):
    """Its state is the connection's: `_turn` that waits, `_turns` that are sent, `_answer_by` when to tell what."""

    __slots__ = ()

    # ---- a request, and what it wants of which gate

    def _produce(self, frame: memoryview, now: float) -> None:
        around = self._around
        request = parse_produce_request(frame)
        self.client_id = request.client_id
        if (
            not self._owner
            and around.fresh(now)
            and any(self._is_owners(around.policy(t.name)) for t in request.topics)
        ):
            self._want_owner(frame)
            return
        slot = Slot(PRODUCE, request.api_version, request.correlation_id, Answer.MADE_HERE)
        starts_at = self._received_bytes - self._client.unread_bytes - len(frame)
        turn = Turn(
            request, starts_at=starts_at, answer_by=due_by(now, request.timeout_ms), received_at=now, offered_at=now
        )
        if not around.fresh(now):
            self._fail_closed(turn)
        elif not self._waits_at_door(turn, now):
            self._take_bids_inside(turn, now)
        # Only now: a request that could not be read leaves no slot behind that would have to give its memory back.
        slot.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        if request.acks != 0:
            self._to_client.append(slot)
        if not turn.tickets and not turn.results and turn.counted is None:
            self._forward_unread(slot, request, frame)
            return
        self._turn, self._turn_slot = turn, slot
        if not turn.at_door:
            self._chains_fail_at_door(slot, turn)
            self._to_gates(turn, now)

    def _look_at_door(self, now: float) -> None:
        """A door was opened, metadata has answered, or time has passed: may what waits there go in?"""
        turn = self._turn
        if turn is None or not turn.at_door:
            return
        if not self._around.fresh(now):
            turn.at_door = False
            self._fail_closed(turn)
        elif self._waits_at_door(turn, now):
            return
        else:
            self._take_bids_inside(turn, now)
        assert self._turn_slot is not None
        self._chains_fail_at_door(self._turn_slot, turn)
        self._to_gates(turn, now)

    def _chains_fail_at_door(self, slot: Slot, turn: Turn) -> None:
        """What never came to its gate has failed as if it had: what follows it follows a hole."""
        for topic in turn.request.topics if turn.miscounted else ():
            policy = self._around.policy(topic.name)
            for data in topic.partitions if policy is not None and policy.guarded else ():
                key = TopicPartition(topic.name, data.partition)
                if key in turn.miscounted:
                    chain = (key, producer_of(data))
                    self._failed_chains[chain] = Failed(turn.results[key])
                    slot.chains.append(chain)

    def _to_gates(self, turn: Turn, now: float) -> None:
        turn.to_offer = [turn.tickets[key] for key in sorted(turn.tickets, reverse=True)]
        self._next_turn(now)

    def _forward_unread(self, slot: Slot, request: ProduceRequest, frame: memoryview) -> None:
        """It was collected because it might have named a guarded topic; it does not."""
        if request.acks != 0:
            self._to_client.pop()
            self._around.release(slot.reserved_bytes)
            slot = self._produce_slot(request.api_version, request.correlation_id)
            self._to_client.append(slot)
            self._from_upstream.append(slot)
        else:
            self._around.release(slot.reserved_bytes)
        self._upstream_out += [INT32.pack(len(frame)), frame]
        self._around.forwarded(0.0)

    def _fail_closed(self, turn: Turn) -> None:
        """Whether a topic is guarded is not known: no append is let through, and each may be tried again."""
        message = "TRY_AGAIN the proxy has not (re)read its topic configs yet"
        for key in turn.partitions():
            turn.results[key] = PartitionResult(
                partition=key.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
            )
        self._commands.append(Count("refusal", "not_ready"))

    def _take_bids_inside(self, turn: Turn, now: float) -> None:
        try:
            self._take_bids(turn, now)
        except ClientProtocolError:
            self._leave_door(turn, unsent=True)
            raise

    def _take_bids(self, turn: Turn, now: float) -> None:
        """A ticket for each guarded partition, or a refusal where its batch cannot be one."""
        around = self._around
        request = turn.request
        wait_seconds = min(around.gate_wait_max_seconds, max(request.timeout_ms, 0) / 3000)
        for topic in request.topics:
            if topic.name == around.state_topic:
                self._deny(turn, topic)
                continue
            policy = around.policy(topic.name)
            if policy is None or not policy.guarded:
                continue
            bid = self._bid(policy, request.transactional_id, now, now + wait_seconds)
            for data in topic.partitions:
                if TopicPartition(topic.name, data.partition) not in turn.miscounted:
                    self._take_bid(turn, bid, topic, data)

    def _bid(self, policy: TopicPolicy, transactional_id: str | None, now: float, deadline: float) -> Bid:
        around = self._around
        return Bid(
            self.connection,
            policy,
            around.header_names,
            around.decompressed_bytes_max,
            around.shared_producer_id,
            now,
            deadline,
            around.tag,
            self._opened_at,
            around.alone(now),
            around.taken_over(now),
            transactional_id,
        )

    def _deny(self, turn: Turn, topic: TopicData) -> None:
        """The proxy's own topic: what a client wrote there could unguard others."""
        message = f"{topic.name} is where the proxy keeps its state; it is closed to clients"
        for data in topic.partitions:
            refusal = Refusal(Error.TOPIC_AUTHORIZATION_FAILED, "state_topic", message)
            self._refuse(turn, TopicPartition(topic.name, data.partition), refusal)

    def _take_bid(self, turn: Turn, bid: Bid, topic: TopicData, data: PartitionData) -> None:
        key = TopicPartition(topic.name, data.partition)
        if key in turn.tickets or key in turn.results:
            raise ClientProtocolError(f"a Produce request names {key} twice")
        ticket = make_ticket(bid, key, data)
        if isinstance(ticket, Refusal):
            self._refuse(turn, key, ticket)
            return
        ticket.leader_epoch = self._around.leader_epoch(key)
        if turn.silent and ticket.append.expected_base_offset is not None:
            raise ClientProtocolError(f"an expectation for {key} with acks=0, which nobody could answer")
        if not self._falls_with_its_chain(turn, ticket):
            self._failed_chains.pop((key, ticket.append.producer_id), None)
            turn.tickets[key] = ticket

    def _falls_with_its_chain(self, turn: Turn, ticket: Ticket) -> bool:
        failed = self._failed_chains.get((ticket.partition, ticket.append.producer_id))
        if failed is None or turn.starts_at >= failed.behind_bytes:
            return False
        told = sent_behind(ticket, failed.result)
        self._refuse(turn, ticket.partition, Refusal(told.error_code, "behind_refused", told.error_message or ""))
        return True

    def _refuse(self, turn: Turn, key: TopicPartition, refusal: Refusal) -> None:
        turn.results[key] = refused(key, refusal)
        self._commands.append(Count("refusal", refusal.reason))

    # ---- its turns

    def _next_turn(self, now: float) -> None:
        turn = self._turn
        assert turn is not None
        while turn.to_offer and not (turn.refused and self._around.refuse_whole_requests):
            ticket = turn.to_offer.pop()
            if self._falls_with_its_chain(turn, ticket):
                continue  # while it waited for its turn at another gate
            turn.waiting_for, turn.offered_at = ticket, now
            self._commands.append(ToGate(ticket, Offered(ticket)))
            return
        turn.waiting_for = None
        self._send_turn(turn, now)

    def _turn_granted(self, ticket: Ticket, now: float) -> None:
        turn = self._turn
        if turn is not None and ticket is turn.waiting_for:
            turn.granted.append(ticket)
            turn.gate_seconds += now - turn.offered_at
            self._around.gate_waited(now - turn.offered_at)
            self._next_turn(now)
            return
        slot, sent = self._sent_turn_of(ticket)
        if slot is None or sent is None or slot.done or self.client_gone or self.upstream_gone:
            self._commands.append(ToGate(ticket, Withdrawn(ticket)))
            return
        # Kafka refused its stamp, the gate has looked at the log, and its expectation holds after all: once more.
        if ticket in self._without_id(sent):
            self._not_sent(sent, ticket, f"the id of topic {ticket.partition.topic} is not known now")
            self._finish_turn(slot, sent)
            return
        if self._client.state is CutterState.PASSING:
            # A frame of the client's is half upstream, and ends when the client likes. Nothing can go between, and
            # the gate cannot wait for that.
            self._not_sent(sent, ticket, "the client's next request is on its way")
            self._finish_turn(slot, sent)
            return
        self._forward(slot, sent, sent.request_for(ticket))
        self._commands.append(ToGate(ticket, Sent(ticket)))

    def _turn_ended(self, ticket: Ticket, result: PartitionResult, reason: str | None, now: float) -> None:
        if reason is not None:
            self._commands.append(Count("refusal", reason))
        turn = self._turn
        if turn is not None and ticket is turn.waiting_for:
            turn.results[ticket.partition] = result
            if self._turn_slot is not None:
                self._chain_failed(self._turn_slot, ticket, result)
            self._next_turn(now)
            return
        slot, sent = self._sent_turn_of(ticket)
        if slot is not None and sent is not None:
            sent.results.setdefault(ticket.partition, result)
            self._chain_failed(slot, ticket, result)
            self._finish_turn(slot, sent)

    def _chain_failed(self, slot: Slot, ticket: Ticket, result: PartitionResult) -> None:
        if result.error_code and not slot.done:
            chain = (ticket.partition, ticket.append.producer_id)
            self._failed_chains[chain] = Failed(result)
            slot.chains.append(chain)

    def _sent_turn_of(self, ticket: Ticket) -> tuple[Slot, Turn] | tuple[None, None]:
        self._no_short_ways()
        for slot, turn in self._turns.items():
            if turn.tickets.get(ticket.partition) is ticket:
                return slot, turn
        return None, None

    def _no_short_ways(self) -> None:
        """See `ShortWay`: what was sent by it becomes one of `_turns`."""
        raise NotImplementedError

    # ---- what passed is sent

    def _send_turn(self, turn: Turn, now: float) -> None:
        """All verdicts are there: forward what passed, answer what did not."""
        if turn.refused and self._around.refuse_whole_requests:
            self._refuse_the_rest(turn)
        stale = [ticket for ticket in turn.granted if not self._around.may_send(ticket, now)]
        if stale:
            # It waited so long for another gate that a cold grant is no longer good: ask again, in order.
            for ticket in turn.granted:
                self._commands.append(ToGate(ticket, Withdrawn(ticket)))
            turn.to_offer = sorted(turn.granted, key=lambda t: t.partition, reverse=True)
            turn.granted = []
            self._next_turn(now)
            return
        for ticket in self._without_id(turn):
            turn.granted.remove(ticket)
            self._not_sent(turn, ticket, f"the id of topic {ticket.partition.topic} is not known now")
        slot = self._turn_slot
        assert slot is not None
        self._turn, self._turn_slot = None, None
        request = turn.upstream_request()
        self._turns[slot] = turn
        if request is None:
            self._made_here += 1
            self._finish_turn(slot, turn)
            return
        turn.sent = True
        self._around.forwarded(max(0.0, now - turn.received_at - turn.gate_seconds))
        for ticket in turn.granted:
            self._commands.append(ToGate(ticket, Sent(ticket)))
        self._forward(slot, turn, request)
        self._answer_by[slot] = turn.answer_by

    def _forward(self, slot: Slot, turn: Turn, request: ProduceRequest) -> None:
        """Sends (a part of) a turn upstream; `slot` is where its client waits."""
        for part in self._by_topic_id(request):
            self._forward_part(slot, turn, part)

    def _forward_part(self, slot: Slot, turn: Turn, request: ProduceRequest) -> None:
        for topic in request.topics:
            for data in topic.partitions:
                ticket = turn.tickets.get(TopicPartition(topic.name, data.partition))
                if ticket is not None:
                    ticket.topic_id = topic.topic_id
        version = request.api_version
        names: dict[UUID | None, str] = {topic.topic_id: topic.name for topic in request.topics}
        asked = {TopicPartition(topic.name, data.partition) for topic in request.topics for data in topic.partitions}
        upstream = self._upstream_slot(slot, turn, version, names=names, asked=asked)
        if turn.counted is not None:
            turn.counted.was_sent()
        self._from_upstream.append(upstream)
        self._upstream_out += encode_produce_request(request)

    def _upstream_slot(
        self,
        slot: Slot,
        turn: Turn,
        version: int,
        *,
        names: dict[UUID | None, str],
        asked: set[TopicPartition],
    ) -> Slot:
        """For what is sent upstream of a turn; its client waits at `slot`."""
        upstream = Slot(PRODUCE, version, slot.correlation_id, Answer.MADE_FROM_RESPONSE)
        upstream.inner = True

        def on_response(frame: memoryview) -> None:
            self._turn_answered(slot, turn, parse_produce_response(frame, version), names, asked)

        upstream.on_response = on_response
        return upstream

    def _refuse_the_rest(self, turn: Turn) -> None:
        """`refusal_scope = "request"`, KIP-27's literal reading: one mismatch refuses the whole request."""
        for ticket in turn.granted:
            self._commands.append(ToGate(ticket, Withdrawn(ticket)))
        turn.granted = []
        first = next(result for result in turn.results.values() if result.error_code)
        for key in turn.partitions():
            if key not in turn.results:
                message = f"WHOLE_REQUEST_REFUSED topic={key.topic} partition={key.partition}: {first.error_message}"
                turn.results[key] = PartitionResult(
                    partition=key.partition, error_code=first.error_code, error_message=message
                )

    def _goes_by_id(self, request: ProduceRequest) -> bool:
        """By id where the brokers can: a topic that was deleted and created anew is another topic.

        Not for transactions: versions from 12 on mean transactions v2, which is the client's to choose.
        """
        return request.transactional_id is None and self._around.produce_version_max() >= PRODUCE_BY_ID

    def _by_topic_id(self, request: ProduceRequest) -> list[ProduceRequest]:
        """One request by id; and one by name for the unguarded topics beside it whose ids are not known here."""
        if not self._goes_by_id(request):
            return [request]
        ids = {topic.name: self._around.topic_id(topic.name) for topic in request.topics}
        known = tuple(replace(topic, topic_id=ids[topic.name]) for topic in request.topics if ids[topic.name])
        others = tuple(topic for topic in request.topics if not ids[topic.name])
        parts = []
        if known:
            parts.append(replace(request, api_version=PRODUCE_BY_ID, topics=known))
        if others:
            parts.append(replace(request, topics=others))
        return parts

    def _without_id(self, turn: Turn) -> list[Ticket]:
        """Granted appends that cannot be sent as they must be: the topic is gone, or was not looked up yet.

        Those that expect nothing and keep their own producer may go by name, as they would without us.
        """
        if not self._goes_by_id(turn.request):
            return []
        return [
            ticket
            for ticket in turn.granted
            if (ticket.stamp is not None or ticket.append.expected_base_offset is not None)
            and self._around.topic_id(ticket.partition.topic) is None
        ]

    def _not_sent(self, turn: Turn, ticket: Ticket, why: str) -> None:
        message = f"TRY_AGAIN {why}"
        turn.results[ticket.partition] = PartitionResult(
            partition=ticket.partition.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
        )
        self._commands += [
            TopicStale(ticket.partition.topic),
            Count("refusal", "try_again"),
            ToGate(ticket, Withdrawn(ticket)),
        ]

    # ---- what became of it

    def _turn_answered(
        self,
        slot: Slot,
        turn: Turn,
        response: ProduceResponse,
        names: dict[UUID | None, str],
        asked: set[TopicPartition],
    ) -> None:
        turn.throttle_time_ms = response.throttle_time_ms
        slot.answered_at = self._now
        answers = {
            TopicPartition(topic.name or names.get(topic.topic_id, ""), result.partition): result
            for topic in response.topics
            for result in topic.partitions
        }
        if answers.keys() != asked:
            raise UpstreamProtocolError(f"the broker answered for {sorted(answers)}, asked were {sorted(asked)}")
        if turn.counted is not None:
            turn.counted.was_answered()
        for key, result in answers.items():
            self._partition_answered(turn, key, _for_names(result))
        self._finish_turn(slot, turn)

    def _partition_answered(self, turn: Turn, key: TopicPartition, result: PartitionResult) -> None:
        if result.error_code != Error.TOPIC_AUTHORIZATION_FAILED:
            self._may_write[key.topic] = None
        if result.error_code in _STALE:
            self._commands.append(TopicStale(key.topic))
        ticket = turn.tickets.get(key)
        if ticket is not None and ticket in turn.granted:
            ticket.may_write = key.topic in self._may_write
            self._commands.append(ToGate(ticket, Answered(ticket, result)))
        else:
            turn.results.setdefault(key, result)

    def _finish_turn(self, slot: Slot, turn: Turn) -> None:
        self._leave_door(turn)
        if slot not in self._turns or not turn.complete:
            return
        if not (self.client_gone or slot.done or turn.silent):
            unproved = sorted({key.topic for key in self._told_without_proof(turn)})
            if unproved:
                self._prove_write(slot, turn, unproved)
                return
        del self._turns[slot]
        self._answer_by.pop(slot, None)
        if turn.silent:
            self._around.release(slot.reserved_bytes)
            failed = next((r for r in turn.results.values() if r.error_code), None)
            if failed is not None:
                raise ClientProtocolError(f"an append with acks=0 failed: {failed.error_message or failed.error_code}")
        elif not slot.done:
            self._end(slot, [encode_produce_response(turn.response(), turn.request.api_version)])

    def _tell_what_is_unknown(self, now: float) -> None:
        """What was sent and is not known in time is told as unknown; the gate goes on settling it."""
        for slot, deadline in list(self._answer_by.items()):
            if deadline > now:
                continue
            self._no_short_ways()
            del self._answer_by[slot]
            turn = self._turns[slot]
            self._give_up_waiting(turn)
            if turn.silent:
                continue
            message = "OUTCOME_UNKNOWN Kafka did not answer in time; it may have been appended"
            results = {
                key: PartitionResult(partition=key.partition, error_code=Error.REQUEST_TIMED_OUT, error_message=message)
                for key in turn.partitions()
            }
            message = "TRY_AGAIN Kafka did not say in time whether this client may write"
            unproved = {
                key: PartitionResult(
                    partition=key.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
                )
                for key in self._told_without_proof(turn)
            }
            told = Turn(turn.request, results=results | turn.results | unproved)
            self._commands.append(Count("refusal", "outcome_unknown"))
            self._end(slot, [encode_produce_response(told.response(), turn.request.api_version)])

    def _give_up_waiting(self, turn: Turn) -> None:
        """A leader that stands still may never answer, and never break the connection either: others have to go on.

        What it does with the append when it wakes up, the gate can find in the log.
        """
        for ticket in turn.granted:
            if turn.sent and ticket.partition not in turn.results:
                ticket.may_write = ticket.partition.topic in self._may_write
                self._commands.append(ToGate(ticket, Lost(ticket)))
                if turn.counted is not None:
                    turn.counted.in_doubt = True  # the gate may send it once more by itself

    def _give_turns_back(self) -> None:
        """The request that waits at a gate will not be sent any more."""
        turn, self._turn = self._turn, None
        slot, self._turn_slot = self._turn_slot, None
        if turn is not None:
            for ticket in (*turn.granted, turn.waiting_for):
                if ticket is not None:
                    self._commands.append(ToGate(ticket, Withdrawn(ticket)))
            self._leave_door(turn, unsent=True)
        if slot is not None:
            self._around.release(slot.reserved_bytes)
            slot.reserved_bytes = 0

    # ---- who may know

    def _told_without_proof(self, turn: Turn) -> list[TopicPartition]:
        """The refusals that tell of a topic for which this client has not proved WRITE."""
        return [
            key
            for key, result in turn.results.items()
            if result.error_code not in _TELLS_NOTHING
            and (key in turn.tickets or key in turn.miscounted)
            and key.topic not in self._may_write
        ]

    def _prove_write(self, slot: Slot, turn: Turn, topics: Sequence[str]) -> None:
        """A refusal tells where the log ends, or how many partitions there are. Only who may write the topic learns
        that, and Kafka says who may.

        A Produce request without a record batch: authorisation comes first (29), then Kafka finds nothing to append
        (87). Nothing can be written by it.
        """
        if turn.proving:
            return
        turn.proving = True
        names = dict.fromkeys(topics)
        partitions = {name: next(k.partition for k in turn.partitions() if k.topic == name) for name in names}
        version = min(9, turn.request.api_version)
        probe = replace(
            turn.request,
            api_version=version,
            transactional_id=None,
            acks=1,
            topics=tuple(
                TopicData(name, None, (PartitionData(partition, memoryview(b""), b""),), b"")
                for name, partition in partitions.items()
            ),
        )
        upstream = Slot(PRODUCE, version, probe.correlation_id, Answer.MADE_FROM_RESPONSE)
        upstream.inner = True

        def on_response(frame: memoryview) -> None:
            for topic in parse_produce_response(frame, version).topics:
                for result in topic.partitions:
                    self._proved(turn, topic.name, result)
            turn.proving = False
            self._finish_turn(slot, turn)

        upstream.on_response = on_response
        self._answer_by[slot] = turn.answer_by
        self._probes.append((upstream, encode_produce_request(probe)))
        self._send_probes()

    def _send_probes(self) -> None:
        """Not into the middle of a frame of the client's that is being streamed."""
        if self._client.state is CutterState.PASSING:
            return
        while self._probes:
            upstream, chunks = self._probes.pop(0)
            self._from_upstream.append(upstream)
            self._upstream_out += chunks

    def _proved(self, turn: Turn, topic: str, answer: PartitionResult) -> None:
        self._may_write[topic] = None
        if answer.error_code != Error.TOPIC_AUTHORIZATION_FAILED:
            return
        for key, result in list(turn.results.items()):
            if key.topic == topic and result.error_code:
                turn.results[key] = PartitionResult(partition=key.partition, error_code=answer.error_code)


def due_by(now: float, timeout_ms: int) -> float:
    return now + _ANSWER_BY * max(timeout_ms, 100) / 1000


def _for_names(result: PartitionResult) -> PartitionResult:
    """A client that names topics does not know UNKNOWN_TOPIC_ID; for it the topic is what is unknown."""
    if result.error_code in (Error.UNKNOWN_TOPIC_ID, Error.INCONSISTENT_TOPIC_ID):
        return replace(result, error_code=Error.UNKNOWN_TOPIC_OR_PARTITION)
    return result
