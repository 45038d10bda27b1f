"""Seeded defects: each breaks one rule of the proxy, and the simulation must detect it.

`python -m tests.simulation.mutants` tries all and writes tests/simulation/mutants.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fencepost_proxy.expansion.barrier import AppendBarrier
from fencepost_proxy.sequencer import appends as sequencer_appends_module
from fencepost_proxy.sequencer import fence as fence_module
from fencepost_proxy.sequencer import fence_bases as fence_bases_module
from fencepost_proxy.sequencer import kafka_answers as kafka_answers_module
from fencepost_proxy.sequencer import retry_cache as retry_cache_module
from fencepost_proxy.sequencer import transactions as transactions_module
from fencepost_proxy.sequencer.admitter import Admitter
from fencepost_proxy.sequencer.appends import Appends
from fencepost_proxy.sequencer.events import AppendedBatch, PendingAppend
from fencepost_proxy.sequencer.fence import PartitionFence
from fencepost_proxy.sequencer.fence_bases import FenceBases
from fencepost_proxy.sequencer.in_doubt import InDoubtResolver, Lookups
from fencepost_proxy.sequencer.kafka_answers import KafkaAnswers
from fencepost_proxy.sequencer.queued_in_brokers import QueuedInBrokers
from fencepost_proxy.sequencer.retry_cache import RetryCache
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.sequencer.transactions import PartitionTransactions
from fencepost_proxy.session.batches import reading as reading_module
from fencepost_proxy.session.batches.produce_exchange import ProduceExchange
from fencepost_proxy.session.connection.failed_pipelines import FailedPipelines
from fencepost_proxy.session.connection.proofs import Proofs
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.dispatcher import Dispatcher
from fencepost_proxy.session.produce import drafts as drafts_module
from fencepost_proxy.session.produce.admission import Admission
from fencepost_proxy.session.produce.arrival import Arrival
from fencepost_proxy.session.produce.completion import Completion
from fencepost_proxy.session.produce.drafts import Drafts
from fencepost_proxy.session.produce.forwarding import Forwarding
from fencepost_proxy.session.relay.fast_path import FastPath
from fencepost_proxy.session.response_reader import ResponseReader
from fencepost_proxy.session.session import Session
from fencepost_proxy.session.transactions.appends import TransactionalAppends
from fencepost_proxy.session.transactions.commits import EndTxnRequests
from fencepost_proxy.topics.fencing import FenceBaseRecords, SharedProducerIds
from fencepost_proxy.transactions import commit_validator as validator_module
from fencepost_proxy.transactions.commit_validator import CommitValidator
from tests.simulation import world
from tests.simulation.scenarios import SCENARIOS, run
from tests.support.executors import PYTHON, executing
from tests.support.mutants import Mutant, body, edit, put, wrap

_EXPANSIONS = ("expansion", "expansion-required")


def _cancel_sent(client_lost: Callable[..., None], self: Session, now: float) -> None:
    for produce in self._queue.in_flight:
        for key, pending in produce.pending_appends.items():
            if key in produce.sent and key not in produce.results:
                self.state.sequencers.cancel(pending)
    client_lost(self, now)


def _admit_its_connection_first(advance: Callable[..., None], self: Admitter, now: float) -> None:
    appends = self._state.appends
    if appends.in_flight:
        holder = appends.in_flight[-1].connection
        appends.queue = type(appends.queue)(sorted(appends.queue, key=lambda each: each.connection != holder))
    advance(self, now)


MUTANTS = (
    # ---- comparison
    Mutant(
        "no-fence",
        "appends are sent unfenced: only the sequencer compares",
        ("race", "one-broker"),
        edit(PartitionFence, "put_on", ("limits.fencing", "False")),
        edit(InDoubtResolver, "_may_resend", ("self._state.log.limits.fencing", "False")),
        rule="Kafka itself compares",
    ),
    Mutant(
        "high-watermark-for-log-end",
        "the high watermark is used as the log end",
        ("cluster",),
        edit(
            world.ControlCall,
            "log_end",
            ("partition.replicas[self.node].log_end", "partition.replicas[self.node].high_watermark"),
        ),
        rule="the log end is the leader's log end offset",
    ),
    Mutant(
        "no-wrap",
        "sequences do not wrap",
        ("race",),
        *(put(module, "SEQUENCE_MODULUS", 1 << 40) for module in (fence_module, fence_bases_module)),
        rule="sequence = (expected − sequence offset) mod 2³¹",
    ),
    Mutant(
        "base-offset-not-compared",
        "a response's base offset is not compared",
        ("bypass", "bypass-true"),
        edit(KafkaAnswers, "_fenced_success", ("result.base_offset != pending.placement.at", "False")),
        rule="0 means success only at the expected offset",
    ),
    Mutant(
        "duplicate-is-success",
        "a duplicate is reported as success",
        ("race", "one-broker"),
        edit(KafkaAnswers, "_fenced_success", ("result.log_append_time_ms != -1", "False")),
        rule="the batch there may be another writer's: rule 5",
    ),
    Mutant(
        "log-append-time-not-read-back",
        "with LogAppendTime, a 0 is not read back",
        ("log-append-time",),
        body(KafkaAnswers, "_fenced_success", "self._state.appended(pending, result.log_append_time_ms, -1, now)"),
        rule="new appends and duplicates look alike: rule 4",
    ),
    Mutant(
        "violation-not-reported",
        "a violation is reported as a mismatch",
        ("bypass", "bypass-true"),
        body(
            Lookups,
            "appended_elsewhere",
            "fence = self._state.fence\n"
            "fence.unconfirm()\n"
            "refusal = offset_mismatch(pending.append, result.base_offset, fence.log_start, possibly_yours=False)\n"
            "self._state.refuse(pending, refusal)",
        ),
        rule="44 without OFFSET_VIOLATION means nothing appended",
    ),
    Mutant(
        "end-moves-by-one",
        "an append advances the known log end by too few records",
        ("pipelines", "race"),
        edit(
            PartitionFence,
            "appended",
            ("max(self.log_end, end)", "self.log_end + 1"),
        ),
        rule="the log end advances by the batch's record count",
    ),
    # ---- confirmed and unconfirmed fences
    Mutant(
        "confirmed-indefinitely",
        "a confirmed fence stays confirmed",
        ("idle-pipelines",),
        body(PartitionFence, "is_confirmed", "return self.phase is Phase.OPEN and self.confirmed_until > 0"),
        rule="confirmation lasts a quarter of producer.id.expiration.ms",
    ),
    Mutant(
        "unconfirmed-pipeline",
        "appends are pipelined while the fence is unconfirmed",
        ("idle-pipelines", "refused-pipelines"),
        edit(
            Admitter,
            "fits_with_in_flight",
            ("pending.context.alone", "True"),
            ("self._state.fence.is_confirmed(pending, now)", "True"),
        ),
        rule="pipeline only with a confirmed fence: rule 13",
    ),
    Mutant(
        "any-timestamp",
        "batches with old or missing timestamps are fenced",
        ("expiry",),
        body(PartitionFence, "too_old", "return None"),
        rule="fence only fresh timestamps: rules 2, 3",
    ),
    Mutant(
        "unfenced-with-fenced",
        "unfenced appends are sent while fenced ones are in flight",
        ("true-one", "liars-true"),
        edit(
            Admitter,
            "fits_with_in_flight",
            ("all(other.placement.kind is AppendMode.PASS_THROUGH for other in in_flight)", "True"),
        ),
        rule="an unfenced append moves the log end",
    ),
    Mutant(
        "sequence-offset-not-updated",
        "unfenced appends do not change the sequence offset",
        ("true-one", "liars-true"),
        body(KafkaAnswers, "_pass_through_success", "self._state.answer(pending, result)"),
        body(PartitionFence, "appended_unfenced", "pass"),
        rule="every unfenced append changes the sequence offset: rule 6",
    ),
    # ---- fence base
    Mutant(
        "base-never-published",
        "appends outside the fence sequence are not noticed",
        ("bypass",),
        body(FenceBases, "outside_log", "return None"),
        rule="publish a new fence base: rule 6",
    ),
    Mutant(
        "epoch-not-raised",
        "the new fence base keeps the old epoch",
        ("bypass",),
        wrap(
            world.ControlCall,
            "_publish",
            lambda publish, call, effect: publish(
                call, replace(effect, producer_epoch=max(0, effect.producer_epoch - 1))
            ),
        ),
        rule="a new fence base needs a new epoch: rule 6",
    ),
    Mutant(
        "epoch-not-adopted",
        "the partition's current epoch is not adopted",
        ("bypass-true",),
        edit(PartitionFence, "read", ("self.epoch = state.producer_epoch", "self.epoch = published_epoch")),
        rule="adopt what DescribeProducers reports: rule 15",
    ),
    Mutant(
        "epochs-run-out",
        "a producer id is not replaced after its last epoch",
        ("rotating",),
        edit(FenceBases, "_new_base", ("epoch + 1", "min(epoch + 1, self._log.limits.producer_epochs - 1)")),
        rule="continue with the next producer id",
    ),
    # ---- claims
    Mutant(
        "claim-without-its-marker",
        "a claim's base is used before its marker is in the log",
        ("claims", "claims-cluster"),
        edit(
            FenceBases,
            "outside_log",
            ("self._lacks_marker(snapshot)", "False"),
        ),
        rule="a claim holds once its marker is in the log",
    ),
    Mutant(
        "claim-of-another-ignored",
        "a process appends under the claim of another",
        ("claims", "claims-cluster"),
        edit(FenceBases, "outside_log", ("snapshot.claim is Claim.ANOTHERS", "False")),
        rule="only its process appends under a claim",
    ),
    Mutant(
        "shared-claim-pipelined",
        "appends are pipelined under a shared claim",
        ("claims", "claims-cluster"),
        edit(PartitionFence, "read", ("snapshot.claim is Claim.OURS", "snapshot.claim is not Claim.NONE")),
        rule="a shared partition has one append in flight",
    ),
    Mutant(
        "claim-ended-without-marker",
        "the epoch after a claim begins without a marker",
        ("claims", "claims-cluster", "claims-rotating"),
        edit(FenceBases, "_next_claim", ("snapshot.claim is Claim.NONE or is_last", "True")),
        rule="only a marker ends a claim",
    ),
    Mutant(
        "claim-of-a-marked-base",
        "the base of a claim leaves no offset for its marker",
        ("claims",),
        edit(FenceBases, "_new_base", ("(claim is not Claim.NONE)", "0")),
        edit(FenceBases, "claims", ("log_end + 1", "log_end")),
        rule="a marker takes an offset",
    ),
    Mutant(
        "base-not-read",
        "published fence bases are not read",
        ("bypass",),
        body(FenceBaseRecords, "get", "return None"),
        rule="adopt the published base after error 47: rule 6",
    ),
    Mutant(
        "fence-errors-relayed",
        "45 and 47 are relayed to the client",
        ("race", "one-broker", "true-many"),
        *(put(module, "FENCE_ERRORS", frozenset()) for module in (kafka_answers_module, sequencer_appends_module)),
        rule="no bare 45 for a fenced append",
    ),
    # ---- in-doubt appends
    Mutant(
        "timeout-is-final",
        "7, 20 and errors with a base offset are final",
        ("cluster", "one-broker"),
        edit(
            KafkaAnswers,
            "answered",
            ("in_doubt and not (may_be_final and pending.placement.kind is AppendMode.PASS_THROUGH)", "False"),
            ("self._state.answer(pending, result)", 'self._state.try_again(pending, "")'),
        ),
        rule="an error after the append is no refusal: rule 1",
    ),
    Mutant(
        "first-attempt-ignored",
        "a retry is sent to the log end, although its first attempt was appended since the last read",
        ("late-retries",),
        body(Admitter, "_first_try_decides", "return None"),
        rule="only the log decides: rule 1",
    ),
    Mutant(
        "resend-error-is-final",
        "an error for a resend is final",
        ("resends",),
        body(
            InDoubtResolver,
            "resent",
            "if pending not in self._state.appends.in_doubt:\n"
            "    return\n"
            "if result is None:\n"
            "    self._resolve_later(pending, now)\n"
            "else:\n"
            "    self._resolved(pending, now)\n"
            "    self._state.answer(pending, result)",
        ),
        rule="only the log decides: rule 1",
    ),
    Mutant(
        "no-second-read",
        "the log is not read again for in-doubt appends",
        ("one-broker", "cluster"),
        edit(InDoubtResolver, "read_again", ("self._resolve_again", "False")),
        rule="in-doubt appends are always resolved",
    ),
    Mutant(
        "client-loss-releases",
        "the append of a lost client leaves the sequencer",
        ("true-one", "liars-true"),
        wrap(Session, "_client_lost", _cancel_sent),
        edit(
            Appends,
            "cancel",
            ("pending in self.queue", "pending in self.in_flight"),
            ("self.queue.remove(pending)", "self.in_flight.remove(pending)"),
        ),
        rule="a lost client does not release its append",
    ),
    # ---- retries
    Mutant(
        "retry-not-recognized",
        "a producer's retry is not recognized",
        ("retries",),
        body(RetryCache, "retry_of", "return None"),
        body(Admitter, "_is_known_retry", "return False"),
        rule="recognize retries before comparing offsets",
    ),
    Mutant(
        "retry-without-digest",
        "a retry is recognized by its sequence only",
        ("liars", "liars-true"),
        edit(RetryCache, "retry_of", ("appended_batch.digest == pending.digest", "True")),
        rule="the same sequence with other records is another batch",
    ),
    Mutant(
        "memory-outlives-its-leader",
        "what is remembered under one leader is believed under the next",
        ("lost-records",),
        body(AppendedBatch, "holds_for", "return True"),
        rule="memory is never stronger than the log",
    ),
    Mutant(
        "equality-is-success",
        "equal records count as the client's append",
        ("race", "one-broker"),
        body(AppendedBatch, "has_write_id_of", "return self.digest == pending.digest"),
        rule="equal records do not prove success: rule 5",
    ),
    Mutant(
        "write-id-alone",
        "a write-id alone proves success",
        ("liars",),
        edit(
            Lookups,
            "_end_mismatch_read",
            ("isinstance(result, Found) and (there is None or there.digest != pending.digest)", "there is None"),
        ),
        edit(
            Lookups,
            "_proved",
            ("there.same_times and there.has_write_id_of(pending)", "there.has_write_id_of(pending)"),
        ),
        rule="the records must be equal too",
    ),
    Mutant(
        "write-id-ignored",
        "write-ids are ignored",
        ("one-broker", "race"),
        body(AppendedBatch, "has_write_id_of", "return False"),
        rule="a named write is recognized while it is in the log",
    ),
    Mutant(
        "possibly-yours-omitted",
        "POSSIBLY_YOURS is omitted",
        ("race", "one-broker"),
        edit(
            Lookups,
            "_refusal",
            (
                "offset_mismatch(\n"
                "pending.append, actual, log_start, possibly_yours=possibly_yours, why=why, reason=reason)",
                "offset_mismatch(pending.append, actual, log_start)",
            ),
        ),
        rule="report an equal batch at the expected offset: rule 14",
    ),
    Mutant(
        "old-actual",
        "a remembered log end is reported",
        ("race", "one-broker"),
        edit(Admitter, "_decide", ("fence.end_as_of < pending.submitted_at", "False")),
        rule="actual was the log end during the call",
    ),
    # ---- transactions, topics
    Mutant(
        "open-transactions-ignored",
        "open transactions are ignored",
        ("calm-transactions",),
        edit(
            PartitionTransactions,
            "another_is_open",
            ("snapshot.open_transactions - {pending.append.producer_id}", "False"),
        ),
        body(PartitionTransactions, "believe_from", "pass"),
        rule="a marker takes an offset: rule 7",
    ),
    Mutant(
        "joins-not-recorded",
        "a transaction that adds the partition is not recorded",
        ("calm-stranded",),
        body(PartitionTransactions, "believe_from", "pass"),
        rule="markers come even where nothing was written: rule 7",
    ),
    Mutant(
        "joins-at-once",
        "a transaction adds the partition while fenced appends are in flight",
        ("stranded",),
        edit(
            PartitionSequencer,
            "_finish",
            ("self.state.appends.fenced_unanswered", "False"),
        ),
        rule="its marker would move them by one",
    ),
    Mutant(
        "joins-never",
        "AddPartitionsToTxn is delayed indefinitely",
        ("atomic",),
        body(PartitionTransactions, "let_join", "pass"),
        rule="it proceeds once all fenced appends are answered",
    ),
    Mutant(
        "transactions-deadlock",
        "a transaction that holds a partition waits for another one",
        ("atomic-crossing",),
        body(PartitionTransactions, "may_not_wait", "return False"),
        rule="two would wait for each other",
    ),
    Mutant(
        "transactions-deadlock-across-processes",
        "partitions that a transaction holds through another process are ignored",
        ("atomic-crossing-v2",),
        edit(PartitionTransactions, "may_not_wait", ("waited and not pending.context.alone", "False")),
        rule="with several processes the wait is limited",
    ),
    Mutant(
        "joined-counts-as-written",
        "a transaction without records on the partition blocks others",
        ("atomic-crossing",),
        edit(
            PartitionTransactions,
            "another_is_open",
            ("not joined.isdisjoint(snapshot.ending_transactions)", "bool(joined)"),
        ),
        rule="two that added each other's partitions would deadlock",
    ),
    Mutant(
        "open-records-ignored",
        "another transaction's records do not block a transaction",
        ("atomic-calm",),
        edit(
            PartitionTransactions,
            "another_is_open",
            (
                "pending.append.expected_base_offset is None",
                "pending.append.expected_base_offset is None or pending.append.transactional",
            ),
        ),
        rule="they do until its marker is read back",
    ),
    Mutant(
        "previous-marker-ignored",
        "a transactional append relies on a log end read before it arrived",
        ("atomic-calm",),
        body(PartitionTransactions, "is_known", "return True"),
        rule="its producer's previous marker may have come since",
    ),
    Mutant(
        "ending-ignored",
        "an ending transaction is not waited for",
        ("atomic-calm",),
        edit(
            PartitionTransactions,
            "another_is_open",
            ("pending.transactional_id in snapshot.ending_transactions", "False"),
            ("not joined.isdisjoint(snapshot.ending_transactions)", "False"),
        ),
        rule="its markers are still to come",
    ),
    Mutant(
        "own-batch-not-recognized",
        "a transactional batch at its expected offset is not recognized",
        ("atomic", "atomic-v2"),
        body(Lookups, "_is_itself", "return False"),
        rule="its sequence identifies it",
    ),
    Mutant(
        "taken-sequence-ignored",
        "a transactional batch at another offset is not searched for",
        ("atomic-bypassing",),
        body(Lookups, "_sequence_is_taken", "return False"),
        rule="44 alone means nothing appended",
    ),
    Mutant(
        "refused-while-queued",
        "a batch is refused while an earlier attempt may be queued",
        ("atomic", "atomic-bypassing"),
        body(QueuedInBrokers, "contains", "return False"),
        rule="it could be appended after its refusal",
    ),
    Mutant(
        "transactional-duplicate-is-success",
        "in a transaction, a duplicate is reported as success",
        ("atomic-bypassed", "atomic-cluster"),
        edit(
            KafkaAnswers,
            "_pass_through_success",
            ("pending.append.transactional and result.log_append_time_ms != -1", "False"),
        ),
        rule="an earlier transaction's batch may have its sequence",
    ),
    # ---- commits
    Mutant(
        "commits-not-validated",
        "a commit is relayed without validation",
        ("atomic", "atomic-v2"),
        body(CommitValidator, "begin", "return PASS"),
        rule="the commit validator decides",
    ),
    Mutant(
        "transactional-id-not-authorized",
        "any client may use any transactional id",
        ("atomic-unauthorized",),
        body(Proofs, "prove_use", "self.may_use = transactional_id\nreturn True\nyield"),
        rule="Kafka authorizes the use of a transactional id",
    ),
    Mutant(
        "anothers-producer-id",
        "an authorized transactional id admits any producer id",
        ("atomic-unauthorized", "atomic-unauthorized-v2"),
        body(PartitionTransactions, "is_anothers_producer", "return False"),
        rule="Kafka would add the batch to that producer's open transaction",
    ),
    Mutant(
        "abort-only-not-read",
        "refusals by other processes are not read",
        ("atomic-cluster", "atomic-cluster-v2"),
        edit(CommitValidator, "handle", ("each.transactional_id == self._transactional_id", "False")),
        rule="abort-only transactions are in the state topic",
    ),
    Mutant(
        "reported-before-stored",
        "a refusal is reported before it is stored",
        ("atomic-cluster", "atomic-cluster-v2"),
        body(TransactionalAppends, "record", "yield from ()"),
        rule="every process must refuse the commit",
    ),
    Mutant(
        "log-not-read-back",
        "appends that this process did not handle are not read back",
        ("atomic-roaming",),
        body(CommitValidator, "_batches", "return None"),
        rule="each batch in the log states its expected offset",
    ),
    Mutant(
        "undecided-is-pass",
        "an undecided commit passes",
        ("atomic-cluster", "atomic-cluster-v2", "atomic-v2"),
        body(validator_module, "_later", "return PASS"),
        rule="an undecided commit is postponed",
    ),
    Mutant(
        "abort-only-not-cleared",
        "abort-only records are not cleared",
        ("atomic-crossing",),
        body(world.AbortOnlyRecords, "clear_abort_only", "self._reported(connection, requested.token, True)"),
        rule="the next transaction may have the same epoch",
    ),
    Mutant(
        "pending-indefinitely",
        "an append whose request has ended stays pending",
        ("atomic-roaming", "atomic-cluster"),
        body(TransactionalAppends, "end_appends", "pass"),
        rule="an unreported outcome delays no commit",
    ),
    Mutant(
        "lost-commits-waited-for",
        "a commit whose connection broke is waited for indefinitely",
        ("atomic-roaming-v1", "atomic-roaming"),
        edit(
            EndTxnRequests,
            "_commit",
            ("self._transactions.commit_unacknowledged(transaction, self._state.now)", "pass"),
        ),
        rule="the next transaction may have the same epoch",
    ),
    Mutant(
        "results-not-released",
        "only appends without a result are released",
        ("atomic-roaming", "atomic-cluster"),
        edit(
            TransactionalAppends,
            "end_appends",
            (
                "produce.pending_appends.values()",
                "[pending for key, pending in produce.pending_appends.items() if key not in produce.results]",
            ),
        ),
        rule="an unreported outcome delays no commit",
    ),
    Mutant(
        "reported-with-unknown-outcome",
        "a refusal is reported with an unknown outcome before it is stored",
        ("atomic-roaming", "atomic-cluster", "atomic-cluster-v2"),
        edit(Completion, "answer_unknown_outcomes", ("self._transactions.answer_later_instead(produce)", "pass")),
        rule="every process must refuse the commit",
    ),
    Mutant(
        "transactions-on-required",
        "`required` topics accept transactions",
        ("refused-transactions-v2",),
        body(transactions_module, "not_supported", "return None"),
        rule="no unfenced appends there: rule 7",
    ),
    Mutant(
        "by-name",
        "appends are sent by topic name",
        ("recreated",),
        body(Forwarding, "_sent_by_id", "return False"),
        rule="a recreated topic is another topic: rule 11",
    ),
    Mutant(
        "client-acks-kept",
        "conditional appends keep the client's acks",
        ("cluster", "resends"),
        edit(
            ProduceExchange,
            "upstream_acks",
            (
                "ACKS_ALL if acks == 0 or not self.pending_appends.keys().isdisjoint(keys) else acks",
                "acks",
            ),
        ),
        rule="acks=all, or a truncation assigns an offset twice",
    ),
    # ---- refusals
    Mutant(
        "crc-not-checked",
        "corrupt batches are fenced",
        ("liars", "liars-true"),
        body(reading_module, "verify_crc", "return True"),
        rule="fencing would make a wrong CRC valid",
    ),
    Mutant(
        "shared-id-accepted",
        "clients may use the shared producer id",
        ("liars", "liars-true"),
        edit(drafts_module, "checked_append", ("header.producer_id in shared_producer_ids", "False")),
        rule="refuse client batches under it: rule 9",
    ),
    Mutant(
        "contradiction-accepted",
        "contradictory expected offsets are accepted",
        ("liars", "liars-true"),
        edit(reading_module, "append_of", ("scan.contradiction", "None")),
        rule="an expected offset that contradicts its place is a mismatch",
    ),
    # ---- order and limits
    Mutant(
        "responses-out-of-order",
        "responses are sent as soon as they are ready",
        ("pipelines", "refused-pipelines"),
        body(
            ResponseQueue,
            "answer_front",
            "for pending_response in [each for each in self.to_client if each.done]:\n"
            "    self.to_client.remove(pending_response)\n"
            "    self.client_out += pending_response.chunks",
        ),
        rule="responses keep the order of their requests",
    ),
    Mutant(
        "queue-unbounded",
        "a sequencer's queue is unbounded",
        ("crowd",),
        edit(Admitter, "submit", ("len(queue) >= self._state.log.limits.queue_max", "False")),
        rule="a partition's queue is bounded",
    ),
    Mutant(
        "remembers-everything",
        "a sequencer remembers every batch",
        ("crowd",),
        body(retry_cache_module, "_bound", "pass"),
        rule="bounded memory",
    ),
    Mutant(
        "admitted-after-disconnect",
        "an append admitted for a disconnected client is not canceled",
        ("crowd", "pipelines", "one-broker"),
        edit(Dispatcher, "_carry_out", ("self._work.append((sequencer, sequencer.cancel, (pending,)))", "pass")),
        body(Admission, "cancel_waiting", "pass"),
        rule="no stuck sequencer",
    ),
    Mutant(
        "canceled-stays-admitted",
        "a canceled append stays admitted",
        ("whole-requests", "true-cluster"),
        edit(Appends, "cancel", ("self.admitted = None", "return")),
        rule="no stuck sequencer",
    ),
    Mutant(
        "memory-not-released",
        "a request's memory is not released",
        ("race",),
        edit(
            ResponseQueue,
            "end",
            ("pending_response.done = True", "pending_response.done = True; pending_response.reserved_bytes = 0"),
        ),
        rule="bounded memory",
    ),
    # ---- pipelines and queues
    Mutant(
        "pipeline-continues",
        "appends after a failed batch are accepted",
        ("pipelines", "queues"),
        body(FailedPipelines, "fail_with", "pass"),
        rule="a pipeline fails as a whole: rule 13",
    ),
    Mutant(
        "sent-successors-retried",
        "appends sent after a failed batch are sent again",
        ("mixed-pipelines",),
        body(Appends, "sent_after", "return iter(())"),
        rule="a pipeline fails as a whole: rule 13",
    ),
    Mutant(
        "pipelined-with-other-processes",
        "appends are pipelined while other processes serve",
        ("control-requests", "twins", "restarted-clients"),
        body(world.Proxy, "alone", "return True"),
        rule="another writer's batch may take the failed one's offset: rule 13",
    ),
    Mutant(
        "last-come-first-served",
        "the newest append is admitted first",
        ("queues", "crowd"),
        edit(
            Admitter,
            "submit",
            ("queue.append(pending)", "queue.appendleft(pending)"),
        ),
        rule="a sequencer is fair",
    ),
    Mutant(
        "one-connection-first",
        "a connection with appends in flight is preferred",
        ("queues", "pipelines"),
        wrap(Admitter, "advance", _admit_its_connection_first),
        rule="a sequencer is fair",
    ),
    Mutant(
        "waits-indefinitely",
        "queued appends do not time out",
        ("hanging", "one-broker"),
        edit(
            Admitter,
            "answer_late",
            ("[each for each in self._state.appends.queue if each.placement.deadline <= now]", "[]"),
        ),
        rule="a sequencer answers in time",
    ),
    Mutant(
        "unconfirmed-admission-never-stale",
        "an append admitted with an unconfirmed fence may be sent at any time",
        ("wide-required", "wide", "cluster"),
        body(PartitionSequencer, "may_send", "return pending is self.state.appends.admitted"),
        rule="unconfirmed: send soon after the read: rule 12",
    ),
    # ---- agreement between processes
    Mutant(
        "lease-ignored",
        "configs are used beyond their lease",
        ("config-changes",),
        body(world.Proxy, "fresh", "return self._fresh_until > 0"),
        rule="a view of the configs has a lease: rule 10",
    ),
    Mutant(
        "leader-unconfirmed",
        "a cut-off leader of the state topic is trusted",
        ("config-changes",),
        put(world.Proxy, "requires_confirmation", False),
        rule="another replica confirms it: rule 10",
    ),
    Mutant(
        "config-change-reported-early",
        "a config change is reported immediately",
        ("config-changes",),
        put(world.Proxy, "lease_seconds", 0.0),
        rule="report it after the lease: rule 10",
    ),
    Mutant(
        "last-producer-id-wins",
        "the last proposed producer id wins",
        ("proposals",),
        edit(
            SharedProducerIds,
            "apply",
            (
                "self._by_number.setdefault(number, ProducerId(producer_id))",
                "self._by_number.update({number: ProducerId(producer_id)})",
            ),
        ),
        rule="the lowest offset wins, permanently: rule 9",
    ),
    Mutant(
        "one-instance-id-for-all",
        "all processes have the same instance id",
        ("twins",),
        body(world.World, "next_instance_id", "return 7"),
        rule="an instance id belongs to one process",
    ),
    Mutant(
        "instance-id-ignored",
        "the instance id in a fence is ignored",
        ("twins",),
        body(InDoubtResolver, "_is_from_here", "return True"),
        rule="what is not proved is no success: rule 5",
    ),
    # ---- log reads and takeovers
    Mutant(
        "read-without-brackets",
        "log end and sequence are read at different moments",
        ("race", "one-broker", "cluster"),
        edit(world.ControlCall, "_end_after", ("end != before", "False")),
        rule="bracketed reads only: rule 6",
    ),
    Mutant(
        "queued-not-waited-for",
        "appends that may still be queued are not waited for",
        ("true-one", "true-cluster"),
        body(QueuedInBrokers, "block", "return False"),
        rule="separate them from unfenced appends: rule 8",
    ),
    Mutant(
        "takeover-not-waited-for",
        "a successor process appends immediately",
        ("takeover",),
        body(world.Proxy, "taken_over", "return True"),
        rule="wait after a takeover: rule 8",
    ),
    Mutant(
        "takeover-not-detected",
        "an append at another offset is reported as success",
        ("takeover", "true-many"),
        body(
            Lookups,
            "appended_elsewhere",
            "self._state.accept(pending, self._state.retries.add(pending, result.log_append_time_ms, now))",
        ),
        rule="detect it after a takeover: rule 8",
    ),
    # ---- acks=0, other messages
    Mutant(
        "no-independent-batches",
        "batches without a producer id form one pipeline",
        ("config-changes", "bulky"),
        body(PendingAppend, "pipeline", "return self.append.producer_id"),
        rule="Kafka answers such batches independently",
    ),
    Mutant(
        "acks-0-answered",
        "acks=0 gets a response",
        ("silent",),
        body(ProduceExchange, "silent", "return False"),
        rule="acks=0 has no response",
    ),
    Mutant(
        "acks-0-fails-silently",
        "an append with acks=0 fails silently",
        ("silent",),
        edit(Completion, "answer", ("failed is not None", "False")),
        rule="acks=0: an error closes the connection",
    ),
    Mutant(
        "acks-0-expects",
        "an append with acks=0 and an expected offset is sent",
        ("silent",),
        edit(Drafts, "_take_draft", ("produce.silent and pending.append.expected_base_offset is not None", "False")),
        rule="acks=0: an expected offset closes the connection",
    ),
    Mutant(
        "relayed-responses-overtake",
        "a relayed response overtakes earlier ones",
        ("control-requests",),
        body(ResponseReader, "is_blocked", "return False"),
        rule="responses keep the order of their requests",
    ),
    Mutant(
        "memory-wait-never-ends",
        "a connection that waits for memory is not resumed",
        ("bulky",),
        body(Session, "needs_ticks", "return bool(self._queue.answer_by) or self.state.client_closed"),
        rule="no stuck connection",
    ),
    # ---- decisions of a sequencer
    Mutant(
        "expected-offset-not-compared",
        "any expected offset is admitted",
        ("race", "liars"),
        edit(Admitter, "_decide", ("expected == end", "True")),
        rule="0 means success only at the expected offset",
    ),
    Mutant(
        "statements-not-checked",
        "an append without a required expected offset is admitted",
        ("liars", "config-changes", "race"),
        edit(Admitter, "submit", ("check_statements(pending.append, pending.check)", "None")),
        rule="what the policy refuses is refused",
    ),
    Mutant(
        "error-is-success",
        "an error is reported as success",
        ("one-broker",),
        edit(
            KafkaAnswers,
            "answered",
            ("error == Error.NONE", "pending.placement.kind.fenced"),
            ("self._fenced_success(pending, result, now)", "self._state.appended(pending, -1, -1, now)"),
        ),
        rule="an error is no success",
    ),
    # ---- fast path
    # tests/unit/test_fast_path.py compares the fast path with the ordinary one, for defects that no run here shows.
    Mutant(
        "fast-path-without-lease",
        "the fast path uses expired configs",
        ("config-changes",),
        edit(FastPath, "take_up", ("services.fresh(now)", "True")),
        rule="a view of the configs has a lease: rule 10",
    ),
    Mutant(
        "unchecked-stays-unchecked",
        "a topic that was unchecked stays unchecked",
        ("config-changes",),
        edit(FastPath, "_may_relay_appends", ("self._services.policy(template.topic_name) is None", "True")),
        rule="the current configs apply",
    ),
    Mutant(
        "any-topic-matches",
        "a request that starts like the previous one may name any topic",
        ("wide", "wide-required"),
        edit(FastPath, "_may_relay_appends", ("frame[start:topic_end] != template.prefix", "False")),
        rule="the whole beginning identifies a request",
    ),
    Mutant(
        "fast-path-overtakes",
        "a fast-path response overtakes earlier ones",
        ("pipelines", "control-requests"),
        edit(
            FastPath,
            "take_down",
            ("pending_response is not to_client[0] or (len(to_client) > 1 and to_client[1].done)", "False"),
            ("del to_client[0], from_upstream[0]", "to_client.remove(from_upstream.pop(0))"),
        ),
        rule="responses keep the order of their requests",
    ),
    # ---- append barriers
    Mutant(
        "closed-barrier-counts-as-empty",
        "a closed barrier counts as empty",
        _EXPANSIONS,
        edit(AppendBarrier, "empty", ("not self._entered", "True")),
        rule="an expansion waits for requests inside the barrier",
    ),
    Mutant(
        "barrier-never-closes",
        "a closed barrier admits requests",
        _EXPANSIONS,
        edit(AppendBarrier, "admits", ("self.closed_at is None", "True")),
        rule="nothing is appended during an expansion",
    ),
    Mutant(
        "barrier-without-in-doubt",
        "an append whose connection broke leaves the barrier",
        _EXPANSIONS,
        edit(AppendBarrier, "leave", ("in_doubt", "False")),
        rule="a broker may have it queued",
    ),
    Mutant(
        "new-process-barrier-empty",
        "a new process starts with an empty barrier",
        _EXPANSIONS,
        edit(AppendBarrier, "__init__", ("self._clear_at = clear_at", 'self._clear_at = float("-inf")')),
        rule="its predecessor's requests may be queued",
    ),
    Mutant(
        "barrier-fails-no-pipeline",
        "a refusal at the barrier fails no pipeline",
        _EXPANSIONS,
        body(Arrival, "_fail_pipelines", "pass"),
        rule="its successors would follow a sequence gap",
    ),
    Mutant(
        "barrier-left-when-sent",
        "a request leaves the barrier when it is sent",
        _EXPANSIONS,
        edit(
            Admission,
            "_send_admitted",
            (
                "produce.sent.update(unsent)",
                "produce.sent.update(unsent); self._barriers.leave(produce, unsent=True)",
            ),
        ),
        rule="it leaves when Kafka has answered",
    ),
    Mutant(
        "inconclusive-error-is-final",
        "an inconclusive error is a refusal",
        ("server-errors", "server-errors-required"),
        put(kafka_answers_module, "IN_DOUBT", kafka_answers_module.IN_DOUBT - kafka_answers_module.MAY_BE_FINAL),
        rule="only the log decides after it",
    ),
    Mutant(
        "repeated-error-without-a-read",
        "a repeated error is final without a read",
        ("server-errors",),
        edit(
            InDoubtResolver,
            "_resent_fenced",
            ("self._resolve_first(now)", "self._resolved(pending, now); self._state.answer(pending, result)"),
        ),
        rule="the log is read after the second",
    ),
    Mutant(
        "sent-ahead-reported-unsent",
        "when a connection ends, appends sent ahead are reported as not sent",
        ("sent-ahead",),
        edit(
            Admission,
            "cancel_waiting",
            ("key not in produce.sent and key not in produce.results", "key not in produce.results"),
        ),
        rule="they may be in the log",
    ),
)


# ---------------------------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True)
class Rule:
    """One rule of the fence. `elsewhere` – tests of its parts outside the simulated core."""

    text: str
    elsewhere: tuple[str, ...] = ()


_PRODUCER_STATE = "tests/integration/test_producer_state.py"
_STATE_TOPIC = "tests/integration/test_state_topic.py"

RULES = {
    1: Rule(
        "An error is final only for a batch that was sent once and answered; for an in-doubt append the log decides"
    ),
    2: Rule("Only batches with fresh timestamps are fenced: Kafka forgets a producer by its timestamps"),
    3: Rule("Batches without a timestamp are not fenced"),
    4: Rule(
        "With LogAppendTime every 0 is read back; a change of that config is noticed",
        (f"{_PRODUCER_STATE}::test_log_append_time_comes_and_goes",),
    ),
    5: Rule("Another writer's batch is never reported as the client's; what cannot be read is unknown"),
    6: Rule("A sequence offset comes from a bracketed read or from the published base; a new base has a new epoch"),
    7: Rule("Markers pass no sequencer: `required` topics refuse transactions; an open one makes the log end unknown"),
    8: Rule("Requests that a dead process left in a broker's queue are waited for, or detected"),
    9: Rule(
        "Of several proposals the first wins, permanently; no client uses the shared producer id",
        (
            f"{_STATE_TOPIC}::test_another_clusters_records_are_not_taken",
            f"{_STATE_TOPIC}::test_deleted_topic_is_waited_for_and_replacement_refused",
            f"{_STATE_TOPIC}::test_lost_records_are_not_overlooked",
        ),
    ),
    10: Rule(
        "No append passes on configs older than their lease; enabling a check is acknowledged after the lease",
        (
            "tests/integration/test_races.py::test_no_append_is_sent_with_expired_configs",
            "tests/integration/test_cut_off_leader.py::test_switched_on_check_applies_despite_old_leader_configs",
        ),
    ),
    11: Rule("A recreated topic is another topic: appends name it by id"),
    12: Rule("With an unconfirmed fence: read log end and state, send soon after, one append at a time"),
    13: Rule(
        "Pipeline only with a confirmed fence, and while no lost append may be queued; appends sent after a failed "
        "batch fail with it",
        (
            "tests/unit/test_sequencer.py::test_no_pipeline_while_a_lost_append_may_be_queued",
            "tests/unit/test_claims.py::test_claimed_partition_is_not_pipelined_while_a_lost_append_may_be_queued",
        ),
    ),
    14: Rule("A mismatch states whether equal records are at the expected offset"),
    15: Rule(
        "The partition's current epoch is adopted",
        ("tests/integration/test_bypassing_writers.py::test_bypassing_fence_with_huge_epoch_is_recovered",),
    ),
    16: Rule(
        "A replica may restore an older sequence: no sequence offset is inferred from it. (Scenarios `compacted` and "
        "`compacted-true` compact, expire and restart. Kafka drops a producer's last batch and keeps an older one only "
        "with tombstones, which the model does not have.)",
        (f"{_PRODUCER_STATE}::test_a_log_that_is_compacted",),
    ),
    17: Rule(
        "Enabling a check warns the operator where Kafka itself may lose an accepted append",
        (
            "tests/unit/test_virtual_configs.py::test_durability_warnings_follow_replication_settings",
            "tests/integration/test_leader_changes.py::test_weak_replication_settings_are_warned_about",
        ),
    ),
    18: Rule(
        "A producer unknown to a partition may start at any sequence: Kafka's leniency, relied on",
        ("proxy/fencepost_proxy/preflight/conformance/appends.py::unknown_producer_starts_at_any_sequence",),
    ),
}


def rules_of(one: Mutant) -> list[int]:
    stated = re.search(r"rules? ([0-9, ]+)$", one.rule)
    return [] if stated is None else [int(number) for number in stated.group(1).split(",")]


def _table_of_rules() -> str:
    rows = []
    for number, rule in RULES.items():
        broken = ", ".join(f"`{one.name}`" for one in MUTANTS if number in rules_of(one))
        elsewhere = "<br>".join(f"`{test}`" for test in rule.elsewhere)
        rows.append(f"| {number} | {rule.text} | {broken} | {elsewhere} |")
    return "\n".join(rows)


# -------------------------------------------------------------------------------------------------------------- running


def hunt(one: Mutant, seeds: int) -> tuple[str, int, str] | None:
    """(scenario, seed, finding) of the first run that fails with the mutant and passes without it, or None."""
    for seed in range(seeds):
        for name in one.where:
            found = shown(one, name, seed)
            if found is not None:
                return name, seed, found
    return None


def shown(one: Mutant, name: str, seed: int) -> str | None:
    """What fails in that run with the mutant, and not without it."""
    with one.live():
        found = _found(name, seed)
    return found if found is not None and _found(name, seed) is None else None


def _found(name: str, seed: int) -> str | None:
    try:
        with executing(PYTHON):
            outcome = run(SCENARIOS[name], seed)
    except (TypeError, AttributeError):
        raise  # the mutant does not fit the code: its crash proves nothing
    except Exception as error:
        return f"CRASH: {type(error).__name__}: {error}"
    return outcome.found[0] if outcome.found else None


def row(one: Mutant, where: str, label: str) -> str:
    return f"| `{one.name}` | {one.breaks} | {one.rule} | {where} | {label} |"


def page(rows: list[str]) -> str:
    table = "\n".join(rows)
    return (
        "# Mutants\n\n"
        "Defects that the simulation must detect. Each breaks one rule. `make mutants` generates this page from\n"
        "`tests/simulation/mutants.py`. *Caught by*: the first scenario and seed that fail with the defect and pass\n"
        "without it. `python -m tests.simulation` replays a seed without the defect.\n\n"
        "| mutant | defect | rule | caught by | as |\n|---|---|---|---|---|\n" + table + "\n\n"
        "## The rules of the fence\n\n"
        "The mutants that break each rule, and tests of its parts outside the simulated core (state topic client,\n"
        "brokers' configs).\n\n"
        "| # | rule | broken by | tests elsewhere |\n|---|---|---|---|\n" + _table_of_rules() + "\n"
    )


def main() -> int:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    rows = []
    survivors = 0
    for one in MUTANTS:
        caught = hunt(one, seeds)
        survivors += caught is None
        where = "**not caught**" if caught is None else f"{caught[0]}, seed {caught[1]}"
        label = "" if caught is None else caught[2].split(":")[0]
        print(f"{one.name:<40}{where:<32}{'' if caught is None else caught[2][:90]}", flush=True)
        rows.append(row(one, where, label))
    Path(__file__).with_suffix(".md").write_text(page(rows))
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
