"""Produce requests that concern guarded partitions: from the frame, over their turns at the gates, to the one answer.

`Turn` (`turn.py`) is what is known of one such request. Here it goes its way: a ticket for each guarded partition, or a
refusal; the turns, one gate after the other; what passed is sent, and what Kafka says of it is told to the gates; the
gates' last words are put into one answer.

A request may name partitions that do not exist, or that cannot be appended to for long. Neither may cost other clients
more than at Kafka: what metadata does not show is answered before any partition is waited for (`_waits_for_metadata`),
and what is granted blocks its partition for `_BLOCKS_SECONDS` at most before it is sent ahead of the rest.

While a turn waits at a gate, nothing behind it is read, as a broker would not either (it handles one request of a
connection at a time). Once it is sent it is one of `_turns`, until the last of its partitions has a result.

A refusal tells where the log ends. So before it is told, or anything else that Kafka did not say itself, Kafka is asked
whether this client may write (`_prove_write`). Where clients log in it is asked before the first turn (`proofs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from fencepost_policies.append import Check, Refusal
from fencepost_proxy.errors import ClientProtocolError, Error, LimitError, UpstreamProtocolError
from fencepost_proxy.partitions.events import Answered, Lost, Offered, Sent, Ticket, Withdrawn
from fencepost_proxy.partitions.gate_state import sent_behind
from fencepost_proxy.session.connection import INT32
from fencepost_proxy.session.counted import pipeline_of
from fencepost_proxy.session.cutter import CutterState
from fencepost_proxy.session.doors import AtDoors
from fencepost_proxy.session.levels import MESSAGE_FORMAT, NOT_PERMITTED, downgraded, levelled_turn
from fencepost_proxy.session.messages import Count, ReadBatches, ToGate, TopicStale
from fencepost_proxy.session.producer_ids import refuse_producer_id
from fencepost_proxy.session.proofs import PROVES_NOTHING
from fencepost_proxy.session.reading import PARTITIONS_MAX, TOPICS_AT_ONCE, ManyPartitions, Readings
from fencepost_proxy.session.slots import Answer, Failed, Slot
from fencepost_proxy.session.turn import NOTHING_DENIED, Bid, Turn, make_ticket, refused
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import LIST_OFFSETS, PRODUCE
from fencepost_proxy.wire.control import decode_response, encode_request_frame, parse_response_header
from fencepost_proxy.wire.primitives import split_tags
from fencepost_proxy.wire.produce import (
    LEVEL_TAG,
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
from fencepost_proxy.wire.schema import Message
from fencepost_proxy.wire.shortcuts import names_producer

#: The first version whose answer says where the log starts.
LOG_START_OFFSET_FROM = 5
#: Beside them Kafka says nothing of the log either: it is another broker's, or there is none.
_WITHOUT_LOG_START = frozenset(
    {
        Error.UNKNOWN_TOPIC_OR_PARTITION,
        Error.LEADER_NOT_AVAILABLE,
        Error.TOPIC_AUTHORIZATION_FAILED,
        Error.CLUSTER_AUTHORIZATION_FAILED,
        Error.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        Error.UNKNOWN_TOPIC_ID,
        Error.INCONSISTENT_TOPIC_ID,
    }
)
#: One offset for each partition, and understood by every broker since 0.10.1.
_LIST_OFFSETS_VERSION = 1
#: Names topics by id: a stamped append cannot land in a topic that was deleted and created anew.
PRODUCE_BY_ID = 13
#: Answers that say that what is known of the topic (its id, its leaders) is out of date.
_STALE = frozenset({Error.UNKNOWN_TOPIC_OR_PARTITION, Error.NOT_LEADER_OR_FOLLOWER})
#: Clients give up at `timeout_ms`; what is not known by then is told a little earlier.
_ANSWER_BY = 0.9
#: Answers beside which no log start is worth a question of its own.
_TELLS_NOTHING = PROVES_NOTHING | {Error.NONE, Error.NOT_LEADER_OR_FOLLOWER, Error.REQUEST_TIMED_OUT}
#: Anybody may have them, without waiting for Kafka: what may have been appended is never told as "try again".
_NEEDS_NO_PROOF = PROVES_NOTHING | {Error.REQUEST_TIMED_OUT}
_LOGIN_IS_OVER = "its client's login has ended"
#: To try again is told without a proof, and without a reason, where Kafka has not given one so soon: it may hang.
_REASON_SECONDS = 1.0
#: For how long a granted append may block its partition while others of its request are waited for.
_BLOCKS_SECONDS = 0.02


class GuardedProduce(AtDoors):
    """Its state is the connection's: `_turn` that waits, `_turns` that are sent, `_answer_by` when to tell what."""

    __slots__ = ()

    # ---- a request, and what it wants of which gate

    def _produce(
        self,
        frame: memoryview,
        now: float,
        denied: Mapping[str, int] = NOTHING_DENIED,
        readings: Readings | None = None,
    ) -> None:
        """`denied` – topics that its client may not write, and Kafka's words, where it was asked first. `readings` –
        of its batches, where that took long."""
        around = self._around
        try:
            request = parse_produce_request(frame, partitions_max=PARTITIONS_MAX)
        except LimitError:
            many = ManyPartitions(frame)
            self._read_elsewhere(many.read, lambda: self._produce_many(frame, many))
            return
        self.client_id = request.client_id
        for topic in request.topics:
            policy = around.policy(topic.name)
            if policy is not None and (policy.guarded or policy.counted):
                continue  # they are refused one by one
            if any(names_producer(data.records, around.shared_producer_ids) for data in topic.partitions):
                raise refuse_producer_id()
        if (
            not self._owner
            and around.fresh(now)
            and any(self._is_owners(around.policy(t.name)) for t in request.topics)
        ):
            self._want_owner(frame)
            return
        if request.transactional_id is not None and self._is_to_be_proved(request):

            def done(allowed: bool) -> None:
                if allowed:
                    self._produce(frame, self._now)
                else:
                    self._deny_append(request)

            self._prove_use(request.transactional_id, request.correlation_id, request.client_id, done)
            return
        answer_by = due_by(now, request.timeout_ms)
        if around.clients_log_in and around.fresh(now):
            unproved = self._unproved(self._concerned(request, denied))
            if unproved:
                self._prove_write_first(
                    request, unproved, answer_by, lambda told: self._produce(frame, self._now, {**denied, **told})
                )
                return
        if readings is None and around.fresh(now):
            readings = self._wanted_readings(request, denied, now)
            if not readings.here():
                self._read_elsewhere(readings.elsewhere, lambda: self._produce(frame, self._now, denied, readings))
                return
        slot = Slot(PRODUCE, request.api_version, request.correlation_id, Answer.MADE_HERE)
        starts_at = self._received_bytes - self._client.unread_bytes - len(frame)
        turn = Turn(
            request,
            starts_at=starts_at,
            answer_by=answer_by,
            received_at=now,
            offered_at=now,
            denied=denied,
            readings=readings,
        )
        if self._failed_chains:
            # Whatever is read from here on was sent knowing of those.
            self._failed_chains = {c: f for c, f in self._failed_chains.items() if f.behind_bytes > starts_at}
        if not around.fresh(now):
            self._fail_closed(slot, turn)
        else:
            self._look_at_levels(turn, now)
            self._deny_topics(turn)
            if not self._waits_before_gates(turn, now):
                self._take_bids_inside(turn, now)
        # Only now: a request that could not be read leaves no slot behind that would have to give its memory back.
        slot.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        if request.acks != 0:
            self._to_client.append(slot)
        if not (turn.at_door or turn.tickets or turn.results or turn.counted or turn.levelled):
            self._forward_unread(slot, request, frame)
            return
        self._turn, self._turn_slot = turn, slot
        if not turn.at_door:
            self._chains_fail_at_door(slot, turn)
            self._to_gates(turn, now)

    def _wanted_readings(self, request: ProduceRequest, denied: Mapping[str, int], now: float) -> Readings:
        """What has to be known of its batches, before anything is decided about them."""
        around = self._around
        readings = Readings(around.header_names, around.decompressed_bytes_max, around.read_here_bytes_max)
        request, _ = levelled_turn(request, around.policy, now)  # which may take producer ids off
        for topic in request.topics:
            policy = around.policy(topic.name)
            if policy is None or topic.name in denied or topic.name == around.state_topic:
                continue
            if policy.guarded or policy.count_check is not Check.OFF:
                placed = policy.partitioner is not None and around.settles(topic.name, now)
                count = around.partition_count(topic.name, now) if placed else None
                for data in topic.partitions:
                    readings.want(TopicPartition(topic.name, data.partition), data.records, policy, count)
        return readings

    def _produce_many(self, frame: memoryview, many: ManyPartitions) -> None:
        """It has more partitions than are read. Its topics are looked at, not all at once."""
        around, request = self._around, many.said()
        if not around.fresh(self._now):
            self._close("the topic configs are not read yet, or again, and a request has many partitions", None)
            return
        if any(tag == LEVEL_TAG for tag, _ in split_tags(request.header_tags)):
            raise _too_many("it asks for a level of idempotence")
        end = many.looked_at + TOPICS_AT_ONCE
        for name in many.topics[many.looked_at : end]:
            if name == around.state_topic or around.policy(name) is not None:
                raise _too_many(f"topic {name} is one that this proxy checks")
        many.looked_at = end
        if end < len(many.topics):
            self._read_elsewhere(lambda: None, lambda: self._produce_many(frame, many))
            return
        self.client_id = request.client_id
        slot = Slot(PRODUCE, request.api_version, request.correlation_id, Answer.MADE_HERE)
        slot.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        if request.acks != 0:
            self._to_client.append(slot)
        self._forward_unread(slot, request, frame)

    def _read_elsewhere(self, read: Callable[[], None], done: Callable[[], None]) -> None:
        """Nothing behind its request is read meanwhile."""
        token = self._next_token = self._next_token + 1
        self._held = True
        self._reading = token, done
        self._commands.append(ReadBatches(token, read))

    def _batches_read(self, token: int) -> None:
        if self._reading is None or self._reading[0] != token:
            return
        (_, done), self._reading, self._held = self._reading, None, False
        if not (self.client_gone or self.upstream_gone or self._closing):
            done()

    def _look_at_door(self, now: float) -> None:
        """A door was opened, metadata has answered, or time has passed: may what waits there go in?"""
        turn = self._turn
        if turn is None or not turn.at_door:
            return
        if not self._around.fresh(now):
            turn.at_door = False
            assert self._turn_slot is not None
            self._fail_closed(self._turn_slot, turn)
        elif self._waits_before_gates(turn, now):
            return
        else:
            self._take_bids_inside(turn, now)
        assert self._turn_slot is not None
        self._chains_fail_at_door(self._turn_slot, turn)
        self._to_gates(turn, now)

    def _waits_before_gates(self, turn: Turn, now: float) -> bool:
        return (
            self._waits_for_metadata(turn, now)
            or self._waits_to_go_without(turn, now)
            or self._waits_at_door(turn, now)
        )

    def _waits_for_metadata(self, turn: Turn, now: float) -> bool:
        """False: all its partitions are known to exist, or were refused.

        Metadata may be older than an expansion: a partition is absent only if metadata that was asked for after the
        request came does not show it.
        """
        around = self._around
        absent: dict[TopicPartition, PartitionData] = {}
        stale: dict[str, None] = {}
        for topic in turn.request.topics:
            policy = None if topic.name in turn.denied else around.policy(topic.name)
            if policy is None or not policy.guarded or topic.name == around.state_topic:
                continue
            for data in topic.partitions:
                key = TopicPartition(topic.name, data.partition)
                exists = key in turn.results or around.partition_exists(key, turn.received_at)
                if exists is None:
                    stale[topic.name] = None
                if not exists:
                    absent[key] = data
        turn.at_door = bool(stale) and now < turn.received_at + self._wait_seconds(turn.request.timeout_ms)
        if turn.at_door:
            self._commands += [TopicStale(topic) for topic in stale]
            return True
        for key, data in absent.items():
            if key.topic in stale:
                message = f"TRY_AGAIN topic={key.topic}: metadata could not be read in time"
                self._refuse(turn, key, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "try_again", message))
            else:
                turn.results[key] = PartitionResult(key.partition, Error.UNKNOWN_TOPIC_OR_PARTITION)
                self._commands.append(Count("refusal", "unknown_partition"))
            turn.misread.append((key, pipeline_of(data)))
            if turn.levelled is not None:
                turn.levelled.safe.discard(key)
        turn.gate_seconds = max(turn.gate_seconds, now - turn.received_at)
        return False

    def _chains_fail_at_door(self, slot: Slot, turn: Turn) -> None:
        """What never came to its gate has failed as if it had: what follows it follows a hole."""
        if turn.levelled is not None:
            for key in turn.levelled.tries_again:
                chain = (key, turn.levelled.producers[key])
                self._failed_chains[chain] = Failed(turn.results[key])
                slot.chains.append(chain)
        for chain in turn.misread:
            self._failed_chains[chain] = Failed(turn.results[chain[0]])
            slot.chains.append(chain)
        for topic in turn.request.topics if turn.miscounted or turn.denied else ():
            policy = self._around.policy(topic.name)
            for data in topic.partitions if policy is not None and policy.guarded else ():
                key = TopicPartition(topic.name, data.partition)
                if key in turn.miscounted or topic.name in turn.denied:
                    chain = (key, pipeline_of(data))
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

    def _concerned(self, request: ProduceRequest, denied: Mapping[str, int]) -> dict[str, int]:
        """The topics that it may have to wait for, a partition of each."""
        around = self._around
        return {
            topic.name: topic.partitions[0].partition
            for topic in request.topics
            if topic.partitions
            and topic.name not in denied
            and topic.name != around.state_topic
            and around.policy(topic.name) is not None
        }

    def _deny_topics(self, turn: Turn) -> None:
        """Kafka has said so, and nothing here has a say in it: neither a level, nor a door, nor a gate."""
        for key in turn.partitions() if turn.denied else ():
            error_code = turn.denied.get(key.topic)
            if error_code is not None:
                turn.results[key] = PartitionResult(partition=key.partition, error_code=error_code)
                if turn.levelled is not None:
                    turn.levelled.safe.discard(key)

    def _fail_closed(self, slot: Slot, turn: Turn) -> None:
        """Whether a topic is guarded is not known: no append is let through, and each may be tried again.

        Its chains fail with it, as at a gate: A, expecting 15, comes while the configs are too old. B, expecting 16,
        was sent behind it and comes when they are not any more, and another writer has won 15.
        """
        message = "TRY_AGAIN the proxy has not (re)read its topic configs yet"
        for topic in turn.request.topics:
            for data in topic.partitions:
                result = PartitionResult(
                    partition=data.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
                )
                key = TopicPartition(topic.name, data.partition)
                chain = (key, pipeline_of(data))
                turn.results[key] = result
                self._failed_chains[chain] = Failed(result)
                slot.chains.append(chain)
        self._commands.append(Count("refusal", "not_ready"))

    def _take_bids_inside(self, turn: Turn, now: float) -> None:
        try:
            self._take_bids(turn, now)
        except ClientProtocolError:
            self._leave_door(turn, unsent=True)
            raise

    # ---- levels of idempotence

    def _look_at_levels(self, turn: Turn, now: float) -> None:
        """What the levels of its topics, and its own, forbid; and which of its batches may go without producer ids."""
        deadline = now + self._wait_seconds(turn.request.timeout_ms)
        turn.request, turn.levelled = levelled_turn(turn.request, self._policy_for(turn), deadline)
        if turn.levelled is not None:
            for key, refusal in turn.levelled.refused.items():
                self._refuse(turn, key, refusal)
            stripped = [key for key in turn.levelled.stripped if not self._is_behind_a_failed(turn, key)]
            self._commands += downgraded(stripped, NOT_PERMITTED)

    def _waits_to_go_without(self, turn: Turn, now: float) -> bool:
        """False: nothing of it goes without its producer id, or all that does may. See `levels.py` about the order."""
        levelled = turn.levelled
        if levelled is None or not levelled.safe:
            return False
        levelled.safe -= {key for key in levelled.safe if self._is_behind_a_failed(turn, key)}
        without = levelled.goes_without(self._around.idempotence, now)
        behind = [key for key in without if any(self._has_id_upstream(each, key) for each in self._turns.values())]
        if behind and now < levelled.deadline:
            turn.at_door = levelled.waits = True
            return True
        if levelled.waits:
            turn.at_door = levelled.waits = False
            turn.gate_seconds = now - turn.received_at
        for key in without:
            if key in behind:
                message = (
                    f"TRY_AGAIN topic={key.topic} partition={key.partition}: what was sent before is not answered yet"
                )
                self._refuse(turn, key, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "level_unknown", message))
                levelled.safe.discard(key)
                levelled.tries_again.add(key)
            else:
                levelled.give_up_id(key)
        self._commands += downgraded(set(without) & levelled.without, MESSAGE_FORMAT)
        return False

    def _is_behind_a_failed(self, turn: Turn, key: TopicPartition) -> bool:
        """Then it is refused like that one, which its client sends again first."""
        assert turn.levelled is not None
        failed = self._failed_chains.get((key, turn.levelled.producers[key]))
        if failed is None or turn.starts_at >= failed.behind_bytes:
            return False
        message = f"SENT_BEHIND_A_FAILED_BATCH {failed.result.error_message}"
        self._refuse(turn, key, Refusal(failed.result.error_code, "behind_refused", message))
        return True

    @staticmethod
    def _has_id_upstream(turn: Turn, key: TopicPartition) -> bool:
        return turn.levelled is not None and turn.levelled.has_id_upstream(key) and key not in turn.results

    def _send_without(self, slot: Slot, turn: Turn, keys: Sequence[TopicPartition], now: float) -> None:
        """Kafka takes no producer ids there, and has appended nothing: the same batches once more, without."""
        assert turn.levelled is not None
        for key in keys:
            self._around.idempotence.refused(key.topic, now)
            turn.levelled.give_up_id(key)
        self._commands += downgraded(keys, MESSAGE_FORMAT)
        for part in self._by_topic_id(turn.request_without(keys)):
            self._probes.append((self._slot_of_part(slot, turn, part), encode_produce_request(part)))
            if turn.counted is not None:
                turn.counted.was_sent()
        self._send_probes()

    def _note_acknowledged(self, ticket: Ticket, base_offset: int) -> None:
        """Of an append that kept its producer's own id."""
        append = ticket.append
        if append.producer_id >= 0:
            last_offset = base_offset + append.record_count - 1
            self._around.idempotence.acknowledged(ticket.partition, append.producer_id, last_offset)

    def _told(self, turn: Turn, key: TopicPartition, result: PartitionResult) -> PartitionResult:
        """Kafka's answer, as the client is to hear it: 45 only where records are lost that were acknowledged.

        If the log starts behind all that its producer was told, it is Kafka that has forgotten: 59, with which
        producers begin anew. Told once: one that sends the same batch again would do so for ever (kafka-python 3).
        """
        memory = self._around.idempotence
        memory.note_log_start(key, result.log_start_offset, self._now)
        ticket = turn.tickets.get(key)
        if ticket is not None:
            append = ticket.append
            batch, record_count = (append.producer_id, append.producer_epoch, append.base_sequence), append.record_count
            if ticket.stamp is not None:
                return result
        elif turn.levelled is not None and key in turn.levelled.own:
            batch, record_count = turn.levelled.own[key]
        else:
            return result
        producer_id = batch[0]
        if producer_id < 0:
            return result
        if result.error_code == Error.NONE:
            memory.acknowledged(key, producer_id, result.base_offset + record_count - 1)
        elif result.error_code == Error.OUT_OF_ORDER_SEQUENCE_NUMBER:
            start = result.log_start_offset if result.log_start_offset >= 0 else memory.log_start(key)
            if memory.is_gone(key, producer_id, start) and not memory.was_told(key, batch):
                message = (
                    f"PRODUCER_FORGOTTEN topic={key.topic} partition={key.partition}: all that this producer appended "
                    f"lies below the log start {start}, and nothing of it was lost otherwise"
                )
                return replace(result, error_code=Error.UNKNOWN_PRODUCER_ID, error_message=message)
        return result

    def _take_bids(self, turn: Turn, now: float) -> None:
        """A ticket for each guarded partition, or a refusal where its batch cannot be one."""
        around = self._around
        request = turn.request
        wait_seconds = self._wait_seconds(request.timeout_ms)
        refused_before = frozenset(turn.results)
        for topic in request.topics:
            if topic.name == around.state_topic:
                self._deny(turn, topic)
                continue
            policy = around.policy(topic.name)
            if policy is None or not policy.guarded:
                continue
            bid = self._bid(policy, request.transactional_id, now, now + wait_seconds)
            for data in topic.partitions:
                if TopicPartition(topic.name, data.partition) not in refused_before:
                    self._take_bid(turn, bid, topic, data)

    def _bid(self, policy: TopicPolicy, transactional_id: str | None, now: float, deadline: float) -> Bid:
        around = self._around
        return Bid(
            self.connection,
            policy,
            around.header_names,
            around.decompressed_bytes_max,
            around.shared_producer_ids,
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
        assert turn.readings is not None
        ticket = make_ticket(bid, key, data, turn.readings.of(key, data.records, bid.policy))
        if isinstance(ticket, Refusal):
            self._refuse(turn, key, ticket)
            turn.misread.append((key, pipeline_of(data)))
            return
        ticket.leader_epoch = self._around.leader_epoch(key)
        transactional_id = bid.transactional_id
        if ticket.append.transactional and transactional_id is not None:
            ticket.owns_partitions = self._around.transactions.owns(transactional_id, *ticket.producer)
            if self._is_ending(transactional_id, ticket):
                where = f"topic={topic.name} partition={data.partition}"
                message = f"TRY_AGAIN {where}: a commit of its transaction is on its way to Kafka"
                self._refuse(turn, key, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "try_again", message))
                return
        if turn.silent and ticket.append.expected_base_offset is not None:
            raise ClientProtocolError(f"an expectation for {key} with acks=0, which nobody could answer")
        if not self._falls_with_its_chain(turn, ticket):
            self._failed_chains.pop((key, ticket.pipeline), None)
            turn.tickets[key] = ticket

    def _falls_with_its_chain(self, turn: Turn, ticket: Ticket) -> bool:
        for pipeline in ticket.follows if self._failed_chains else ():
            failed = self._failed_chains.get((ticket.partition, pipeline))
            if failed is not None and turn.starts_at < failed.behind_bytes:
                told = sent_behind(ticket, failed.result)
                self._refuse(
                    turn, ticket.partition, Refusal(told.error_code, "behind_refused", told.error_message or "")
                )
                return True
        return False

    def _refuse(self, turn: Turn, key: TopicPartition, refusal: Refusal) -> None:
        turn.results[key] = refused(key, refusal)
        self._commands.append(Count("refusal", refusal.reason, key))

    # ---- its turns

    def _next_turn(self, now: float) -> None:
        turn = self._turn
        assert turn is not None
        while turn.to_offer and not (turn.refused and self._around.refuse_whole_requests):
            ticket = turn.to_offer.pop()
            if self._falls_with_its_chain(turn, ticket):
                continue  # while it waited for its turn at another gate
            if now >= turn.answer_by:
                where = f"topic={ticket.partition.topic} partition={ticket.partition.partition}"
                message = f"TRY_AGAIN {where}: the partitions before it took too long"
                self._refuse(turn, ticket.partition, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "try_again", message))
                assert self._turn_slot is not None
                self._chain_failed(self._turn_slot, ticket, turn.results[ticket.partition])
                continue
            turn.waiting_for, turn.offered_at = ticket, now
            if ticket.append.transactional:
                self._offers(ticket)
            self._commands.append(ToGate(ticket, Offered(ticket)))
            return
        turn.waiting_for = None
        self._send_turn(turn, now)

    def _turn_granted(self, ticket: Ticket, now: float) -> None:
        turn = self._turn
        if turn is not None and ticket is turn.waiting_for:
            if not turn.granted:
                turn.granted_at = now
            turn.granted.append(ticket)
            turn.gate_seconds += now - turn.offered_at
            self._around.gate_waited(now - turn.offered_at)
            if turn.alone:
                turn.alone = False
                self._offer_granted_again(turn)
            self._next_turn(now)
            return
        slot, sent = self._sent_turn_of(ticket)
        if slot is None or sent is None or slot.done or self.client_gone or self.upstream_gone:
            self._commands.append(ToGate(ticket, Withdrawn(ticket)))
            return
        # Kafka refused its stamp, the gate has looked at the log, and its expectation holds after all: once more.
        if self._without_id(sent, [ticket]):
            self._not_sent(slot, sent, ticket, f"the id of topic {ticket.partition.topic} is not known now")
            self._finish_turn(slot, sent)
            return
        if self._client.state is CutterState.PASSING:
            # A frame of the client's is half upstream, and ends when the client likes. Nothing can go between, and
            # the gate cannot wait for that.
            self._not_sent(slot, sent, ticket, "the client's next request is on its way")
            self._finish_turn(slot, sent)
            return
        if now >= self._login_ends:
            self._not_sent(slot, sent, ticket, _LOGIN_IS_OVER)
            self._finish_turn(slot, sent)
            return
        self._forward(slot, sent, sent.request_for(ticket))
        if ticket.append.transactional:
            self._sends(ticket)
        self._commands.append(ToGate(ticket, Sent(ticket)))

    def _turn_ended(self, ticket: Ticket, result: PartitionResult, reason: str | None, now: float) -> None:
        if reason is not None:
            expected = ticket.append.expected_base_offset
            self._commands.append(Count("refusal", reason, ticket.partition, expected, result.base_offset))
        self._around.idempotence.note_log_start(ticket.partition, result.log_start_offset, now)
        if ticket.append.transactional:
            self._has_landed(ticket, result)
        turn = self._turn
        if turn is not None and ticket is turn.waiting_for:
            turn.alone = False
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
            chain = (ticket.partition, ticket.pipeline)
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
        slot = self._turn_slot
        assert slot is not None
        first = not turn.sent
        sent = self._send_granted(slot, turn, now)
        if turn.to_offer:
            self._next_turn(now)
            return
        self._turn, self._turn_slot = None, None
        self._turns[slot] = turn
        if turn.sent:
            self._answer_by[slot] = turn.answer_by
        if sent and first:
            self._around.forwarded(max(0.0, now - turn.received_at - turn.gate_seconds))
        if not sent:
            self._made_here += not turn.sent
            self._finish_turn(slot, turn)

    def _send_granted(self, slot: Slot, turn: Turn, now: float) -> bool:
        """What is granted, and what needs no grant, goes upstream in one request; False if there is nothing."""
        if self._failed_chains:
            self._give_back_behind_failed(turn)
        if turn.granted and now >= self._login_ends:
            self._give_back_unsent(turn)
        if any(not self._around.may_send(ticket, now) for ticket in turn.granted):
            # A cold grant is no longer good after so long.
            self._offer_granted_again(turn)
            return False
        for ticket in self._without_id(turn, turn.granted):
            turn.granted.remove(ticket)
            self._not_sent(slot, turn, ticket, f"the id of topic {ticket.partition.topic} is not known now")
        request = turn.upstream_request()
        if request is None:
            return False
        turn.sent.update(turn.unsent())
        for ticket in turn.granted:
            if ticket.append.transactional:
                self._sends(ticket)
            self._commands.append(ToGate(ticket, Sent(ticket)))
        turn.granted = []
        self._forward(slot, turn, request)
        return True

    def _send_ahead(self, now: float) -> None:
        """What is granted goes upstream before the rest of its request, which is waited for too long.

        Not where a refusal of the rest would have to refuse it (`refusal_scope = "request"`): there it is given back
        until the slow one is granted, and then all are waited for in order.
        """
        turn, slot = self._turn, self._turn_slot
        if turn is None or slot is None or not turn.granted or turn.waiting_for is None:
            return
        if now < turn.granted_at + _BLOCKS_SECONDS:
            return
        if self._around.refuse_whole_requests:
            turn.alone = True
            self._offer_granted_again(turn)
            return
        if self._send_granted(slot, turn, now):
            self._turns[slot] = turn

    def _offer_granted_again(self, turn: Turn) -> None:
        for ticket in turn.granted:
            self._commands.append(ToGate(ticket, Withdrawn(ticket)))
        turn.to_offer = sorted([*turn.to_offer, *turn.granted], key=lambda t: t.partition, reverse=True)
        turn.granted = []

    def _give_back_behind_failed(self, turn: Turn) -> None:
        """A gate ends A and grants B, which was offered before the end of A was heard here: the two have crossed. Each
        is told before B goes up, but at no gate is B behind A any more.
        """
        for ticket in tuple(turn.granted):
            if self._falls_with_its_chain(turn, ticket):
                turn.granted.remove(ticket)
                self._commands.append(ToGate(ticket, Withdrawn(ticket)))

    def _give_back_unsent(self, turn: Turn) -> None:
        """Its client's login has ended while it waited. Kafka would end the connection, and say nothing of the append.

        Its client tries again: then its connection ends here, or it has logged in anew.
        """
        slot = self._turn_slot
        assert slot is not None
        for key in list(turn.unsent()):
            turn.results[key] = PartitionResult(
                partition=key.partition,
                error_code=Error.NOT_LEADER_OR_FOLLOWER,
                error_message=f"TRY_AGAIN {_LOGIN_IS_OVER}",
            )
        for ticket in turn.granted:
            self._chain_failed(slot, ticket, turn.results[ticket.partition])
            self._commands.append(ToGate(ticket, Withdrawn(ticket)))
            self._commands.append(Count("refusal", "try_again", ticket.partition))
        turn.granted = []

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
        upstream = self._slot_of_part(slot, turn, request)
        if turn.counted is not None:
            turn.counted.was_sent()
        self._from_upstream.append(upstream)
        self._upstream_out += encode_produce_request(request)

    def _slot_of_part(self, slot: Slot, turn: Turn, request: ProduceRequest) -> Slot:
        names: dict[UUID | None, str] = {topic.topic_id: topic.name for topic in request.topics}
        asked = {TopicPartition(topic.name, data.partition) for topic in request.topics for data in topic.partitions}
        return self._upstream_slot(slot, turn, request.api_version, names=names, asked=asked)

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
        turn.granted, turn.to_offer = [], []
        first = next(turn.refusals())
        slot = self._turn_slot
        assert slot is not None
        for key in turn.partitions():
            if key not in turn.results:
                message = f"WHOLE_REQUEST_REFUSED topic={key.topic} partition={key.partition}: {first.error_message}"
                result = turn.results[key] = PartitionResult(
                    partition=key.partition, error_code=first.error_code, error_message=message
                )
                if key in turn.tickets:
                    self._chain_failed(slot, turn.tickets[key], result)

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

    def _without_id(self, turn: Turn, granted: Sequence[Ticket]) -> list[Ticket]:
        """Granted appends that cannot be sent as they must be: the topic is gone, or was not looked up yet.

        Those that expect nothing and keep their own producer may go by name, as they would without us.
        """
        if not self._goes_by_id(turn.request):
            return []
        return [
            ticket
            for ticket in granted
            if (ticket.stamp is not None or ticket.append.expected_base_offset is not None)
            and self._around.topic_id(ticket.partition.topic) is None
        ]

    def _not_sent(self, slot: Slot, turn: Turn, ticket: Ticket, why: str) -> None:
        message = f"TRY_AGAIN {why}"
        result = turn.results[ticket.partition] = PartitionResult(
            partition=ticket.partition.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
        )
        self._chain_failed(slot, ticket, result)
        self._commands += [
            TopicStale(ticket.partition.topic),
            Count("refusal", "try_again", ticket.partition),
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
        again = [] if turn.levelled is None else self._to_send_without(slot, turn, answers)
        for key, result in answers.items():
            if key not in again:
                self._partition_answered(turn, key, self._told(turn, key, _for_names(result)))
        if again:
            self._send_without(slot, turn, again, self._now)
        self._finish_turn(slot, turn)
        waiting = self._turn
        if waiting is not None and waiting.levelled is not None and waiting.levelled.waits:
            self._look_at_door(self._now)

    def _to_send_without(
        self, slot: Slot, turn: Turn, answers: Mapping[TopicPartition, PartitionResult]
    ) -> list[TopicPartition]:
        """What was told as unknown may have been sent again by its client; what nobody waits for need not be."""
        assert turn.levelled is not None
        if slot.done or self.client_gone:
            return []
        safe = turn.levelled.safe
        format_error = Error.UNSUPPORTED_FOR_MESSAGE_FORMAT
        return [key for key, result in answers.items() if result.error_code == format_error and key in safe]

    def _partition_answered(self, turn: Turn, key: TopicPartition, result: PartitionResult) -> None:
        self._note_proof(key.topic, result.error_code)
        if result.error_code in _STALE:
            self._commands.append(TopicStale(key.topic))
        ticket = turn.tickets.get(key)
        if ticket is not None and key in turn.sent:
            ticket.may_write = self._has_proved(key.topic)
            if result.error_code:
                self._around.kafka_refused(result.error_code)
            self._commands.append(ToGate(ticket, Answered(ticket, result)))
        else:
            turn.results.setdefault(key, result)

    def _finish_turn(self, slot: Slot, turn: Turn) -> None:
        self._leave_door(turn)
        if slot not in self._turns or not turn.complete:
            return
        if not (self.client_gone or slot.done or turn.silent):
            if turn.asking:
                return
            untold = self._told_without_proof(turn)
            unproved = sorted({key.topic for key in untold})
            unknown = self._tell_log_starts(turn, unproved)
            if unproved:
                if all(turn.results[key].error_code == Error.NOT_LEADER_OR_FOLLOWER for key in untold):
                    turn.answer_by = min(turn.answer_by, self._now + _REASON_SECONDS)
                self._prove_write(slot, turn, unproved)
            if unknown:
                self._ask_log_starts(slot, turn, unknown)
            if turn.asking:
                return
        if turn.request.transactional_id is not None:
            if self._waits_for_notes(slot, turn):
                return
            self._let_go(turn)
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
            self._tell_later_instead(turn)
            message = "OUTCOME_UNKNOWN Kafka did not answer in time; it may have been appended"
            results = {
                key: PartitionResult(partition=key.partition, error_code=Error.REQUEST_TIMED_OUT, error_message=message)
                for key in turn.partitions()
            }
            message = "TRY_AGAIN Kafka did not say in time whether this client may write"
            untold = self._told_without_proof(turn)
            unproved = {
                key: PartitionResult(
                    partition=key.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
                )
                for key in untold
                if key not in turn.sent
            }
            # Without a proof, what was sent stays unknown: it may be in the log.
            known = {key: each for key, each in turn.results.items() if key not in turn.sent or key not in untold}
            told = Turn(turn.request, results=results | known | unproved)
            for key, ticket in turn.tickets.items():
                if key not in turn.results:
                    self._chain_failed(slot, ticket, results[key])
            self._commands.append(Count("refusal", "outcome_unknown"))
            self._end(slot, [encode_produce_response(told.response(), turn.request.api_version)])
            if turn.request.transactional_id is not None and turn.notes is None:
                # Too late to wait for it. What comes of these after all is looked at then.
                for transaction in self._failed(turn, told.results):
                    self._note_poison(slot, turn, transaction)
                turn.notes = None

    def _hurry(self, now: float) -> None:
        """The connection ends in a moment. What waits at a gate or a door is told to try again: nothing of it was sent.
        What was sent and is not answered is told as unknown, as when Kafka's time for it is up.
        """
        if not self._in_a_hurry(now):
            return
        self._no_short_ways()
        turn, slot = self._turn, self._turn_slot
        if turn is not None and slot is not None:
            self._give_turns_back()
            if slot in self._turns:
                self._answer_by[slot] = now
            # Of a transaction nothing is told that is not noted beforehand; its client sees the end, and tries again.
            elif not (turn.sent or self.client_gone or turn.silent or turn.request.transactional_id is not None):
                message = "TRY_AGAIN this proxy is shutting down"
                left = set(turn.partitions()) - turn.results.keys() | set(self._told_without_proof(turn))
                for key in left:
                    turn.results[key] = PartitionResult(
                        partition=key.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
                    )
                self._commands.append(Count("refusal", "try_again"))
                self._end(slot, [encode_produce_response(turn.response(), turn.request.api_version)])
        for slot in self._answer_by:
            self._answer_by[slot] = now

    def _give_up_waiting(self, turn: Turn) -> None:
        """A leader that stands still may never answer, and never break the connection either: others have to go on.

        What it does with the append when it wakes up, the gate can find in the log.
        """
        for ticket in turn.tickets.values():
            if ticket.partition in turn.sent and ticket.partition not in turn.results:
                ticket.may_write = self._has_proved(ticket.partition.topic)
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
            if turn.sent:  # in part: it goes on as one of `_turns`, until that is answered
                for key in turn.partitions():
                    if key not in turn.sent and key not in turn.results:
                        turn.results[key] = PartitionResult(
                            partition=key.partition,
                            error_code=Error.NOT_LEADER_OR_FOLLOWER,
                            error_message="TRY_AGAIN its connection ends, and it was not sent",
                        )
                assert slot is not None
                self._finish_turn(slot, turn)
                return
            self._let_go(turn)
            self._leave_door(turn, unsent=True)
        if slot is not None:
            self._around.release(slot.reserved_bytes)
            slot.reserved_bytes = 0

    # ---- who may know

    def _told_without_proof(self, turn: Turn) -> list[TopicPartition]:
        """The answers made here that tell of a topic for which this client has not proved WRITE: that it is guarded or
        grows, where its log ends, that it holds what the client has sent, that it is the proxy's own."""
        return [
            key
            for key, result in turn.results.items()
            if not (self._has_proved(key.topic) or key.topic in turn.said)
            and (
                key.topic == self._around.state_topic
                or (
                    result.error_code not in _NEEDS_NO_PROOF
                    and not (result.error_code == Error.NOT_LEADER_OR_FOLLOWER and self._now >= self._login_ends)
                    and (
                        key in turn.tickets
                        or key in turn.miscounted
                        or (turn.levelled is not None and key in turn.levelled.refused)
                    )
                )
            )
        ]

    def _prove_write(self, slot: Slot, turn: Turn, topics: Sequence[str]) -> None:
        """A refusal tells where the log ends, or how many partitions there are. Only who may write the topic learns
        that, and Kafka says who may.
        """
        turn.asking += 1

        def done(answers: dict[str, PartitionResult]) -> None:
            for topic, answer in answers.items():
                self._proved(turn, topic, answer)
            turn.asking -= 1
            self._finish_turn(slot, turn)

        names = dict.fromkeys(topics)
        partitions = {name: next(k.partition for k in turn.partitions() if k.topic == name) for name in names}
        self._answer_by[slot] = turn.answer_by
        self._ask_for_write(turn.request, partitions, done)

    def _proved(self, turn: Turn, topic: str, answer: PartitionResult) -> None:
        turn.said |= {topic}
        if answer.error_code not in PROVES_NOTHING:
            return
        for key in list(turn.results):
            if key.topic == topic:
                turn.results[key] = PartitionResult(partition=key.partition, error_code=answer.error_code)

    # ---- where the log starts

    def _tell_log_starts(self, turn: Turn, unproved: Collection[str]) -> list[TopicPartition]:
        """Puts the log start into refusals (KAFKA-5793), as Kafka does into its own. Given back is of which partitions
        nobody here knows it yet."""
        if turn.request.api_version < LOG_START_OFFSET_FROM:
            return []
        unknown = []
        memory = self._around.idempotence
        for key, result in turn.results.items():
            if not result.error_code or result.log_start_offset >= 0 or result.error_code in _WITHOUT_LOG_START:
                continue
            if not self._has_proved(key.topic):
                told_later = key.topic in unproved and result.error_code not in _TELLS_NOTHING
                if told_later and memory.recent_log_start(key, self._now) < 0:
                    unknown.append(key)
                continue
            asked = turn.starts_asked or result.error_code in _TELLS_NOTHING
            start = memory.log_start(key) if asked else memory.recent_log_start(key, self._now)
            if start >= 0:
                turn.results[key] = replace(result, log_start_offset=start)
            elif not asked:
                unknown.append(key)
        return [] if turn.starts_asked else unknown

    def _ask_log_starts(self, slot: Slot, turn: Turn, keys: Sequence[TopicPartition]) -> None:
        """On the client's own connection: who may not see the topic is told nothing of it. Once for each refusal."""
        turn.starts_asked = True
        turn.asking += 1
        topics = [
            Message(
                name=name,
                partitions=[Message(partition_index=key.partition, timestamp=-2) for key in keys if key.topic == name],
            )
            for name in dict.fromkeys(key.topic for key in keys)
        ]
        asked = Message(replica_id=-1, topics=topics)
        correlation_id = turn.request.correlation_id
        frame = encode_request_frame(LIST_OFFSETS, _LIST_OFFSETS_VERSION, correlation_id, turn.request.client_id, asked)
        upstream = Slot(LIST_OFFSETS, _LIST_OFFSETS_VERSION, correlation_id, Answer.MADE_FROM_RESPONSE)
        upstream.inner = True

        def on_response(frame: memoryview) -> None:
            offset = parse_response_header(frame, LIST_OFFSETS, _LIST_OFFSETS_VERSION).body_offset
            for topic in decode_response(LIST_OFFSETS, _LIST_OFFSETS_VERSION, frame[offset:]).topics:
                for each in topic.partitions:
                    if not each.error_code:
                        key = TopicPartition(topic.name, each.partition_index)
                        self._around.idempotence.note_log_start(key, each.offset, self._now)
            turn.asking -= 1
            self._finish_turn(slot, turn)

        upstream.on_response = on_response
        self._answer_by[slot] = turn.answer_by
        self._probes.append((upstream, [frame]))
        self._send_probes()


def _too_many(why: str) -> LimitError:
    return LimitError(
        f"a Produce request names more than {PARTITIONS_MAX} topics or partitions, and {why}; send smaller requests"
    )


def due_by(now: float, timeout_ms: int) -> float:
    return now + _ANSWER_BY * max(timeout_ms, 100) / 1000


def _for_names(result: PartitionResult) -> PartitionResult:
    """A client that names topics does not know UNKNOWN_TOPIC_ID; for it the topic is what is unknown."""
    if result.error_code in (Error.UNKNOWN_TOPIC_ID, Error.INCONSISTENT_TOPIC_ID):
        return replace(result, error_code=Error.UNKNOWN_TOPIC_OR_PARTITION)
    return result
