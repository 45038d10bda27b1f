---------------------------- MODULE PartitionLog ----------------------------
(***************************************************************************)
(* One partition's log in Kafka, and what its leader remembers of the      *)
(* producers that wrote to it. Pure operators: the other modules have the  *)
(* variables.                                                              *)
(*                                                                         *)
(* Sources: UnifiedLog, ProducerStateManager, ProducerAppendInfo. Each     *)
(* fact is a case of tests/conformance/cases.py, which runs on real Kafka. *)
(***************************************************************************)
EXTENDS Integers, Sequences, FiniteSets

CONSTANTS
    Remembered,   \* batches of a producer that a leader recognizes (Kafka: 5)
    EpochsPerId   \* epochs of one producer id (Kafka: 32,768)

(***************************************************************************)
(* A batch in the log has at least these fields:                           *)
(*   base, count   its first offset, and its number of records             *)
(*   kind          "fenced": under a shared producer id                    *)
(*                 "plain":  any other records                             *)
(*                 "marker": a transaction marker, one offset              *)
(*   epoch, seq    of a fenced batch; the epoch of a marker                *)
(*                                                                         *)
(* Epochs are numbered through all shared producer ids: epoch number n is  *)
(* epoch n % EpochsPerId of producer id n \div EpochsPerId.                *)
(***************************************************************************)
ProducerId(epoch) == epoch \div EpochsPerId
IsLastEpoch(epoch) == epoch % EpochsPerId = EpochsPerId - 1

LogEnd(log) == IF log = <<>> THEN 0 ELSE log[Len(log)].base + log[Len(log)].count

\* The number of the batch that holds an offset; 0: none.
IndexAt(log, offset) ==
    LET holds == {i \in 1..Len(log) : log[i].base <= offset /\ offset < log[i].base + log[i].count}
    IN  IF holds = {} THEN 0 ELSE CHOOSE i \in holds : TRUE

(***************************************************************************)
(* Producer state: the epoch, and the last batches. A leader that knows    *)
(* nothing of a producer has Unknown. After a marker the epoch is known,   *)
(* and no batch.                                                           *)
(***************************************************************************)
Unknown == [epoch |-> -1, batches |-> <<>>]

Last(sequence, count) ==
    IF Len(sequence) <= count THEN sequence ELSE SubSeq(sequence, Len(sequence) - count + 1, Len(sequence))

NextSequence(state) ==
    IF state.batches = <<>> THEN 0
    ELSE LET last == state.batches[Len(state.batches)] IN last.seq + last.count

\* The leader's check, under the log's lock. It does not see what a batch contains.
Decision(state, epoch, seq, count) ==
    IF state = Unknown THEN "append"
    ELSE IF /\ epoch = state.epoch
            /\ \E i \in 1..Len(state.batches) : state.batches[i].seq = seq /\ state.batches[i].count = count
         THEN "duplicate"                                      \* 0, with the offset of the batch that is there
    ELSE IF epoch < state.epoch THEN "old epoch"               \* 47 INVALID_PRODUCER_EPOCH
    ELSE IF seq = (IF epoch > state.epoch THEN 0 ELSE NextSequence(state)) THEN "append"
    ELSE "gap"                                                 \* 45 OUT_OF_ORDER_SEQUENCE_NUMBER

BaseOfDuplicate(state, seq, count) ==
    LET i == CHOOSE i \in 1..Len(state.batches) : state.batches[i].seq = seq /\ state.batches[i].count = count
    IN  state.batches[i].base

\* A marker of an equal epoch is accepted: it takes an offset, and forgets no batch.
MarkerDecision(state, epoch) == IF epoch < state.epoch THEN "old epoch" ELSE "append"

\* What a leader learns from a batch that it appends or reads back.
Learn(producers, batch) ==
    IF batch.kind = "plain" THEN producers
    ELSE LET id == ProducerId(batch.epoch)
             known == IF producers[id].epoch = batch.epoch THEN producers[id].batches ELSE <<>>
             learned == IF batch.kind = "marker" THEN known
                        ELSE Last(Append(known, [seq |-> batch.seq, count |-> batch.count, base |-> batch.base]),
                                  Remembered)
         IN  [producers EXCEPT ![id] = [epoch |-> batch.epoch, batches |-> learned]]

RECURSIVE LearnAll(_, _)
LearnAll(producers, batches) ==
    IF batches = <<>> THEN producers ELSE LearnAll(Learn(producers, Head(batches)), Tail(batches))

\* The producers after a reload from the log: a restart keeps only each producer's last batch, a replica knows as many
\* as the leader.
Reload(log, ids, batchesKept) ==
    LET all == LearnAll([id \in ids |-> Unknown], log)
    IN  [id \in ids |-> [all[id] EXCEPT !.batches = Last(@, batchesKept)]]
=============================================================================
