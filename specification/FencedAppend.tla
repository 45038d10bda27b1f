---------------------------- MODULE FencedAppend ----------------------------
(***************************************************************************)
(* Conditional appends to one partition of a `required` topic, through any *)
(* number of proxy processes.                                              *)
(*                                                                         *)
(* An append states its expected offset. Each process appends it under a   *)
(* producer id that all processes share, with the sequence                 *)
(*     expected offset - base,                                             *)
(* where the base belongs to the producer epoch and lies in the state      *)
(* topic. So Kafka's own check of sequences refuses an append whose        *)
(* expected offset is not the log end.                                     *)
(*                                                                         *)
(* The module has three parts: the processes (which follow the sequencer   *)
(* in proxy/fencepost_proxy/sequencer), Kafka and the network, and what    *)
(* docs/contract.md promises. Each action of a process takes what it sees  *)
(* as a parameter, so that traces of the real sequencer are replayed       *)
(* through the same actions (SequencerTrace.tla).                          *)
(*                                                                         *)
(* A process that is stopped (SIGSTOP) takes no step for any time. A       *)
(* request whose connection is lost may stay queued in a broker.           *)
(***************************************************************************)
EXTENDS PartitionLog

CONSTANTS
    Processes,      \* proxy processes
    Serving,        \* those that serve from the beginning; others may start later
    Earlier,        \* records in the log that an earlier process appended
    Bypassed,       \* records after those that bypassed the proxy
    Lost,           \* appends 1..Lost were sent in a pipeline whose connection was lost, and answered as unknown
    Appends,        \* 1..n: the appends that clients send, each at most once plus its retries
    Sizes,          \* number of records of each append
    Contents,       \* records of each append: equal values are equal records
    Named,          \* appends with a fencepost-write-id
    MaxEpoch,       \* epochs 0..MaxEpoch
    MaxBases,       \* records in the state topic
    Budget,         \* how often each fault may happen
    Forgetful,      \* a restarted or new leader may lack producers, as if their records had been deleted
    LogAppendTime,  \* message.timestamp.type=LogAppendTime: the broker rewrites batches
    Without         \* rules that are left out, by name; {} for the design

Rule(name) == name \notin Without

VARIABLES
    \* Kafka
    log, replicated, producers, leaderEpoch, stateTopic,
    \* the network, and requests in brokers: of each process's open connection in order, and of closed ones
    requests, responses, late,
    \* processes and appends
    proc, append,
    faults

kafka == <<log, replicated, producers, leaderEpoch, stateTopic>>
network == <<requests, responses, late>>
vars == <<kafka, network, proc, append, faults>>

Ids == 0..ProducerId(MaxEpoch)
Broker(epoch) == epoch % 2     \* two brokers lead in turn
Nothing == [kind |-> "nothing"]

NewProcess == [phase |-> "down", end |-> 0, epoch |-> 0, base |-> 0, view |-> 1, leader |-> 0,
               fresh |-> FALSE, confirmed |-> FALSE, proposal |-> <<>>, strays |-> 0]

NewAppend == [status |-> "new", result |-> "none", process |-> Nothing, expected |-> 0, after |-> 0,
              epoch |-> 0, seq |-> 0, sends |-> 0, acknowledged |-> "no", unknown |-> FALSE,
              lost |-> FALSE]

EarlierBatch == [kind |-> "fenced", base |-> 0, count |-> Earlier, epoch |-> 0, seq |-> 0, fenceBase |-> 0, append |-> 0,
                 content |-> "earlier", expected |-> 0, after |-> 0, from |-> Nothing, moved |-> FALSE]

\* Of one record each, after the earlier ones.
LostAppend(a) == [NewAppend EXCEPT !.status = "answered", !.result = "unknown", !.process = CHOOSE p \in Serving : TRUE,
                    !.expected = Earlier + a - 1, !.after = a - 1, !.seq = Earlier + a - 1, !.sends = 1, !.unknown = TRUE,
                    !.lost = TRUE]

Plain(base, count) == [kind |-> "plain", base |-> base, count |-> count, epoch |-> -1, content |-> "other"]

Init ==
    /\ log = (IF Earlier = 0 THEN <<>> ELSE <<EarlierBatch>>)
             \o (IF Bypassed = 0 THEN <<>> ELSE <<Plain(Earlier, Bypassed)>>)
    /\ replicated = Len(log) /\ leaderEpoch = 0
    /\ producers = Reload(log, Ids, Remembered)
    /\ stateTopic = <<[epoch |-> 0, base |-> 0]>>
    /\ requests = [p \in Processes |-> <<>>] /\ responses = [p \in Processes |-> <<>>]
    /\ proc = [p \in Processes |-> [NewProcess EXCEPT !.phase = IF p \in Serving THEN "unconfirmed" ELSE "down"]]
    /\ append = [a \in Appends |-> IF a <= Lost THEN LostAppend(a) ELSE NewAppend]
    /\ late = {[append |-> a, from |-> LostAppend(a).process, epoch |-> 0, seq |-> LostAppend(a).seq, count |-> Sizes[a],
                content |-> Contents[a], expected |-> LostAppend(a).expected, after |-> a - 1, broker |-> 0,
                strays |-> Bypassed, fenceBase |-> 0] : a \in 1..Lost}
    /\ faults = Budget

Fault(name) == faults[name] > 0 /\ faults' = [faults EXCEPT ![name] = @ - 1]

(***************************************************************************)
(* PART 1: processes                                                       *)
(***************************************************************************)
Live(p) == proc[p].phase # "down"
Alone(p) == {q \in Processes : Live(q)} = {p}
At(p, statuses) == {a \in Appends : append[a].process = p /\ append[a].status \in statuses}
InFlight(p) == At(p, {"sent"})
InDoubt(p) == At(p, {"in doubt"})

\* The log end once all appends in flight are appended.
EndOfAllSent(p) ==
    IF InFlight(p) = {} THEN proc[p].end
    ELSE LET last == CHOOSE a \in InFlight(p) : \A b \in InFlight(p) : append[b].expected <= append[a].expected
         IN  append[last].expected + Sizes[last]

Unconfirmed(state) == [state EXCEPT !.phase = IF @ = "open" THEN "unconfirmed" ELSE @, !.confirmed = FALSE, !.fresh = FALSE]

\* The appends that were sent after `a` in its pipeline, before its failure was known.
RECURSIVE SentAfter(_, _)
SentAfter(appends, a) ==
    LET next == {b \in Appends : appends[b].after = a /\ appends[b].process = appends[a].process}
    IN  next \union UNION {SentAfter(appends, b) : b \in next}

(* Answers an append. If it failed, those of its pipeline that are not sent fail too (PREDECESSOR_FAILED). *)
Answered(appends, a, result) ==
    LET failed == IF result = "success" THEN {} ELSE {b \in SentAfter(appends, a) : appends[b].status = "queued"}
    IN  [b \in Appends |->
            IF b = a THEN [appends[a] EXCEPT !.status = "answered", !.result = result,
                                             !.unknown = @ \/ result = "unknown"]
            ELSE IF b \in failed THEN [appends[b] EXCEPT !.status = "answered", !.result = "predecessor failed"]
            ELSE appends[b]]

(***************************************************************************)
(* A client submits an append, or sends one again whose outcome it does    *)
(* not know. `after`: the append of the same pipeline that it follows.     *)
(***************************************************************************)
Submit(p, a, expected, after) ==
    /\ Live(p)
    /\ append[a].status = "new"
    /\ append' = [append EXCEPT ![a] = [@ EXCEPT !.status = "queued", !.process = p, !.expected = expected,
                                                 !.after = after]]
    /\ UNCHANGED <<proc, requests>>

\* The process that sent the first attempt looks it up before it sends another (`_mark_first_try_in_doubt`).
Retry(p, a) ==
    /\ Live(p)
    /\ append[a].status = "answered" /\ append[a].result \in {"unknown", "try again"}
    /\ append' = [append EXCEPT ![a] = [@ EXCEPT
            !.status = IF append[a].process = p /\ append[a].sends > 0 THEN "in doubt" ELSE "queued",
            !.process = p, !.after = 0, !.result = "none",
            !.sends = IF append[a].process = p THEN @ ELSE 0]]
    /\ UNCHANGED <<proc, requests>>

(***************************************************************************)
(* A read of the log end, the producer state and the state topic.          *)
(* `view`: the number of state-topic records that the process has read.    *)
(***************************************************************************)
\* The first record of an epoch counts, and the highest epoch.
Published(topic) ==
    LET highest == CHOOSE e \in {topic[i].epoch : i \in 1..Len(topic)} : \A j \in 1..Len(topic) : topic[j].epoch <= e
        all == {i \in 1..Len(topic) : topic[i].epoch = highest}
    IN  topic[CHOOSE i \in all : \A j \in all : 
        IF Rule("the first base of an epoch counts") /\ Rule("a new base has a new epoch") THEN i <= j ELSE i >= j]

\* Whether the published base does not fit the log (`FenceBases.outside_log`). `state`: of the epoch's producer id.
OutsideLog(end, state, epoch, base) ==
    \/ end < base
    \/ IF IsLastEpoch(epoch) /\ Rule("last epoch serves one append")
       THEN end # base \/ state.epoch >= epoch
       ELSE /\ state # Unknown
            /\ \/ state.epoch > epoch
               \/ (IF state.epoch = epoch THEN NextSequence(state) ELSE 0) # end - base

NeedsRead(p) ==
    /\ InFlight(p) = {} /\ InDoubt(p) = {}
    /\ \/ proc[p].phase = "unconfirmed"
       \/ /\ proc[p].phase = "open" /\ ~proc[p].fresh
          /\ \E a \in At(p, {"queued"}) : append[a].expected # proc[p].end \/ ~proc[p].confirmed

TakeRead(p, end, states, published, view, leader, strays) ==
    /\ InFlight(p) = {} /\ proc[p].phase # "publishing"
    /\ LET outside == OutsideLog(end, states[ProducerId(published.epoch)], published.epoch, published.base)
           read == [proc[p] EXCEPT !.end = end, !.view = view, !.leader = leader, !.confirmed = FALSE, !.strays = strays]
           state == states[ProducerId(published.epoch)]
           next == IF Rule("a new base has a new epoch") THEN [epoch |-> published.epoch + 1, base |-> end]
                   ELSE [epoch |-> published.epoch, base |-> end - NextSequence(state)]
       IN  IF ~outside
           THEN proc' = [proc EXCEPT ![p] = [read EXCEPT !.phase = "open", !.fresh = TRUE,
                                                         !.epoch = published.epoch, !.base = published.base]]
           ELSE /\ next.epoch <= MaxEpoch
                /\ proc' = [proc EXCEPT ![p] =
                      IF Rule("base counts once it is stored")
                      THEN [read EXCEPT !.phase = "publishing", !.fresh = FALSE, !.proposal = <<next>>]
                      ELSE [read EXCEPT !.phase = "open", !.fresh = TRUE, !.proposal = <<next>>,
                                        !.epoch = next.epoch, !.base = next.base]]
    /\ UNCHANGED <<append, requests>>

\* The proposal is in the state topic. The process reads the log again, and takes the base that counts.
BaseStored(p, view) ==
    /\ proc[p].proposal # <<>>
    /\ proc' = [proc EXCEPT ![p] = [@ EXCEPT !.proposal = <<>>, !.view = view,
                                             !.phase = IF @ = "publishing" THEN "unconfirmed" ELSE @]]
    /\ UNCHANGED <<append, requests>>

(***************************************************************************)
(* Sends an append at the end of what is in flight. The fence is confirmed *)
(* by an acknowledgement, or the log end was read just now and nothing was *)
(* sent since.                                                             *)
(***************************************************************************)
\* An append without any answer, whose sequence is not used: it may still be appended.
MayBeQueued(p) == \E a \in At(p, {"answered"}) :
    append[a].result = "unknown" /\ append[a].lost /\ append[a].expected + Sizes[a] > proc[p].end

PredecessorIsSent(a) == IF append[a].after = 0 THEN TRUE ELSE append[append[a].after].status # "queued"

MaySend(p, a) ==
    /\ append[a].status = "queued" /\ append[a].process = p
    /\ InDoubt(p) = {}
    /\ proc[p].phase = "open" \/ (proc[p].phase = "unconfirmed" /\ ~Rule("log end is read while unconfirmed"))
    /\ append[a].expected = EndOfAllSent(p)
    /\ PredecessorIsSent(a)
    /\ IF InFlight(p) = {}
       THEN proc[p].confirmed \/ proc[p].fresh \/ ~Rule("log end is read while unconfirmed")
       ELSE /\ append[a].after \in InFlight(p)
            /\ proc[p].confirmed \/ ~Rule("one append in flight while unconfirmed")
            /\ Alone(p) \/ ~Rule("pipelines only while alone")
            /\ ~MayBeQueued(p) \/ ~Rule("no pipeline while a lost append may be queued")

Request(p, a) ==
    [append |-> a, from |-> p, epoch |-> append[a].epoch, seq |-> append[a].seq, count |-> Sizes[a],
     content |-> Contents[a], expected |-> append[a].expected, after |-> append[a].after,
     broker |-> Broker(proc[p].leader), strays |-> proc[p].strays, fenceBase |-> append[a].expected - append[a].seq]

Send(p, a) ==
    /\ MaySend(p, a)
    /\ append' = [append EXCEPT ![a] = [@ EXCEPT !.status = "sent", !.sends = @ + 1, !.acknowledged = "no",
            !.epoch = proc[p].epoch, !.seq = append[a].expected - proc[p].base]]
    /\ proc' = [proc EXCEPT ![p].fresh = FALSE]
    /\ requests' = [requests EXCEPT ![p] = Append(@, [Request(p, a) EXCEPT
            !.epoch = proc[p].epoch, !.seq = append[a].expected - proc[p].base, !.fenceBase = proc[p].base])]

(***************************************************************************)
(* The expected offset does not hold. Below the log end, what lies there   *)
(* is read: it may be an earlier attempt. `there`: that batch.             *)
(***************************************************************************)
TakeMismatch(p, a, there) ==
    /\ append[a].status = "queued" /\ append[a].process = p
    /\ proc[p].phase = "open" /\ (proc[p].fresh \/ proc[p].confirmed) /\ InFlight(p) = {} /\ InDoubt(p) = {}
    /\ append[a].expected # proc[p].end
    /\ PredecessorIsSent(a)
    /\ LET equal == there # Nothing /\ there.base = append[a].expected /\ there.content = Contents[a]
       IN  append' = Answered(append, a,
              IF append[a].expected > proc[p].end THEN "ahead"      \* OFFSET_MISMATCH, final for this attempt only
              ELSE IF ~equal THEN "refused"                         \* OFFSET_MISMATCH
              ELSE IF a \in Named \/ ~Rule("equal records are no proof") THEN "success"
              ELSE "possibly yours")
    /\ UNCHANGED <<proc, requests>>

(***************************************************************************)
(* Kafka's answer. Success and refusal are conclusive for a batch that was *)
(* sent once. A duplicate may be another append with the same sequences.   *)
(***************************************************************************)
TakeAnswer(p, answer) ==
    LET a == answer.append
        inDoubt == [append EXCEPT ![a] = [@ EXCEPT !.status = "in doubt",
                                                 !.acknowledged = IF answer.kind = "duplicate" THEN "duplicate" ELSE @]]
        moved == answer.base # append[a].expected
    IN  /\ append[a].status = "sent" /\ append[a].process = p
        /\ CASE answer.kind = "appended" /\ moved /\ Rule("the answer's offset is compared") ->
                  append' = Answered(append, a, "violation")        \* OFFSET_VIOLATION
             [] answer.kind = "appended" /\ ~(moved /\ Rule("the answer's offset is compared")) ->
                  append' = Answered(append, a, "success")
             [] answer.kind = "duplicate" ->
                  append' = IF Rule("a duplicate is read back") THEN inDoubt ELSE Answered(append, a, "success")
             [] answer.kind \in {"gap", "old epoch"} ->             \* decided again, after a read of the log end
                  append' = IF Rule("only the log refuses") THEN [append EXCEPT ![a].status = "queued"]
                            ELSE Answered(append, a, "refused")
             [] answer.kind = "rejected" ->                         \* 10, 87: Kafka's error, of this attempt only
                  append' = Answered(append, a, "rejected")
             [] answer.kind = "not leader" ->
                  append' = Answered(append, a, "try again")
             [] answer.kind = "inconclusive" -> append' = inDoubt     \* 7, 20, or an error with a base offset
        /\ proc' = [proc EXCEPT ![p] =
              IF answer.kind = "appended" /\ ~moved
              THEN [@ EXCEPT !.confirmed = ~(IsLastEpoch(append[a].epoch) /\ Rule("last epoch serves one append")),
                             !.phase = IF IsLastEpoch(append[a].epoch) /\ Rule("last epoch serves one append")
                                       THEN "unconfirmed" ELSE @,
                             !.end = append[a].expected + Sizes[a]]
              ELSE Unconfirmed(@)]
        /\ UNCHANGED requests

\* A connection to Kafka is lost: the outcome of what it has not answered is unknown. Each client has its own, so it may
\* be that of one append in flight alone.
LoseConnection(p, lost) ==
    /\ Live(p)
    /\ append' = [a \in Appends |->
            IF a \notin InFlight(p) \cap lost THEN append[a]
            ELSE IF Rule("a lost acknowledgement proves nothing") THEN [append[a] EXCEPT !.status = "in doubt", !.lost = TRUE]
            ELSE [append[a] EXCEPT !.status = "answered", !.result = "success"]]
    /\ proc' = [proc EXCEPT ![p] = IF Rule("a new connection is unconfirmed") THEN Unconfirmed(@) ELSE @]

(***************************************************************************)
(* An in-doubt append is looked up in the log at its expected offset, in   *)
(* order, while nothing is in flight (the table in in_doubt.py).           *)
(* `there`: the batch at that offset. `end`: the log end after that read.  *)
(***************************************************************************)
FirstInDoubt(p, a) == /\ InFlight(p) = {} /\ a \in InDoubt(p)
                      /\ \A b \in InDoubt(p) : append[b].expected >= append[a].expected

\* Another append of this process is answered with success at that offset: the batch belongs to that one.
IsOwned(p, a, offset) == /\ Rule("a batch belongs to one append")
                         /\ \E b \in Appends \ {a} : append[b].result = "success" /\ append[b].process = p
                                                     /\ append[b].expected = offset

Outcome(p, a, there) ==
    LET same == /\ there.kind = "fenced" /\ there.base = append[a].expected /\ there.content = Contents[a]
                /\ there.epoch = append[a].epoch /\ there.seq = append[a].seq
        onlySendWasADuplicate == append[a].acknowledged = "duplicate" /\ append[a].sends = 1 /\ ~append[a].unknown
        mine == CASE there.from = Nothing -> IF append[a].acknowledged = "duplicate" THEN "yes" ELSE "perhaps"
                  [] IsOwned(p, a, there.base) \/ onlySendWasADuplicate -> "no"
                  [] OTHER -> IF there.from = p \/ ~Rule("batches carry an instance id") THEN "yes" ELSE "no"
    IN  IF ~same THEN IF there.kind # "fenced" \/ there.epoch < append[a].epoch THEN "unknown" ELSE "sequence lost"
        ELSE IF mine = "yes" \/ a \in Named THEN "success"
        ELSE IF mine = "perhaps" THEN "unknown" ELSE "sequence lost"

TakeLookup(p, a, there) ==
    /\ FirstInDoubt(p, a) /\ there # Nothing
    /\ LET outcome == Outcome(p, a, there)
       IN  append' = IF outcome = "sequence lost" THEN [append EXCEPT ![a].status = "queued"]
                     ELSE Answered(append, a, outcome)
    /\ proc' = [proc EXCEPT ![p] = Unconfirmed(@)]
    /\ UNCHANGED requests

\* Nothing lies there, and the partition still waits for this fence: the process sends the batch again, unchanged.
Resend(p, a) ==
    /\ FirstInDoubt(p, a)
    /\ append' = [append EXCEPT ![a] = [@ EXCEPT !.status = "sent", !.sends = @ + 1]]
    /\ proc' = [proc EXCEPT ![p] = Unconfirmed(@)]
    /\ requests' = [requests EXCEPT ![p] = Append(@, Request(p, a))]

\* The log cannot be read in time, or nothing can be sent again: 7 OUTCOME_UNKNOWN.
GiveUp(p, a) ==
    /\ append[a].status = "in doubt" /\ append[a].process = p
    /\ append' = Answered(append, a, "unknown")
    /\ proc' = [proc EXCEPT ![p] = Unconfirmed(@)]
    /\ UNCHANGED requests

(***************************************************************************)
(* PART 2: Kafka, the network, and faults                                  *)
(***************************************************************************)
\* Offsets that moved without the fence. Kafka cannot compare a fenced append with them.
Strays(batches) == Cardinality({i \in 1..Len(batches) :
    batches[i].kind # "fenced" \/ batches[i].base # batches[i].expected})

ClientSubmits == \E p \in Processes, a \in Appends :
    /\ \A b \in Appends : b < a => append[b].status # "new"
    /\ \/ Submit(p, a, LogEnd(log), 0)
       \/ \E b \in At(p, {"queued", "sent"}) : Submit(p, a, append[b].expected + Sizes[b], b)
    /\ UNCHANGED <<kafka, responses, late, faults>>

ClientRetries == \E p \in Processes, a \in Appends :
    Fault("retries") /\ Retry(p, a) /\ UNCHANGED <<kafka, responses, late>>

ReadLogEnd == \E p \in Processes : \E view \in proc[p].view..Len(stateTopic) :
    /\ At(p, {"queued"}) # {} /\ NeedsRead(p)
    /\ TakeRead(p, LogEnd(log), producers, Published(SubSeq(stateTopic, 1, view)), view, leaderEpoch, Strays(log))
    /\ UNCHANGED <<kafka, responses, late, faults>>

StoreBase == \E p \in Processes :
    /\ Len(stateTopic) < MaxBases
    /\ BaseStored(p, Len(stateTopic) + 1)
    /\ stateTopic' = Append(stateTopic, proc[p].proposal[1])
    /\ UNCHANGED <<log, replicated, producers, leaderEpoch, responses, late, faults>>

SendAppend == \E p \in Processes, a \in Appends : Send(p, a) /\ UNCHANGED <<kafka, responses, late, faults>>

Committed(i) == IF i # 0 /\ i <= replicated THEN log[i] ELSE Nothing

Refuse == \E p \in Processes, a \in Appends :
    LET i == IndexAt(log, append[a].expected)
    IN  /\ append[a].status = "queued"
        /\ i = 0 \/ i <= replicated
        /\ TakeMismatch(p, a, Committed(i))
        /\ UNCHANGED <<kafka, responses, late, faults>>

ViewIsCurrent(p) == ~Live(p) \/ proc[p].view = Len(stateTopic)

\* The leader's answer to a request, and its log after it.
Handled(request) ==
    LET id == ProducerId(request.epoch)
        decision == Decision(producers[id], request.epoch, request.seq, request.count)
        batch == [kind |-> "fenced", base |-> LogEnd(log), count |-> request.count, epoch |-> request.epoch,
                  seq |-> request.seq, fenceBase |-> request.fenceBase, append |-> request.append, content |-> request.content,
                  expected |-> request.expected, after |-> request.after,
                  from |-> IF LogAppendTime THEN Nothing ELSE request.from,
                  moved |-> Strays(log) > request.strays]
        base == CASE decision = "append" -> LogEnd(log)
                  [] decision = "duplicate" -> BaseOfDuplicate(producers[id], request.seq, request.count)
                  [] OTHER -> -1
    IN  IF request.broker # Broker(leaderEpoch)
        THEN [batch |-> <<>>, answer |-> [append |-> request.append, kind |-> "not leader", base |-> -1]]
        ELSE [batch |-> IF decision = "append" THEN <<batch>> ELSE <<>>,
              answer |-> [append |-> request.append, base |-> base,
                          kind |-> IF decision # "append" THEN decision
                                   ELSE IF LogAppendTime THEN "duplicate" ELSE "appended"]]

Handle(request) ==
    /\ log' = log \o Handled(request).batch
    /\ producers' = IF Handled(request).batch = <<>> THEN producers ELSE Learn(producers, Handled(request).batch[1])
    /\ UNCHANGED <<replicated, leaderEpoch, stateTopic, proc, append, faults>>

HandleRequest == \E p \in Processes :
    /\ requests[p] # <<>>
    /\ Handle(Head(requests[p]))
    /\ requests' = [requests EXCEPT ![p] = Tail(@)]
    /\ responses' = [responses EXCEPT ![p] = Append(@, Handled(Head(requests[p])).answer)]
    /\ UNCHANGED late

\* The leader refuses a batch for what it contains (10, 87), before it compares the sequence.
RejectRequest == \E p \in Processes :
    /\ Fault("rejections")
    /\ requests[p] # <<>>
    /\ requests' = [requests EXCEPT ![p] = Tail(@)]
    /\ responses' = [responses EXCEPT ![p] = Append(@, [append |-> Head(requests[p]).append, kind |-> "rejected", base |-> -1])]
    /\ UNCHANGED <<kafka, late, proc, append>>

\* In any order: more than Kafka does.
HandleLateRequest == \E request \in late :
    Handle(request) /\ late' = late \ {request} /\ UNCHANGED <<requests, responses>>

Replicate == /\ replicated < Len(log) /\ replicated' = Len(log)
             /\ UNCHANGED <<log, producers, leaderEpoch, stateTopic, network, proc, append, faults>>

\* Kafka answers an append once its replicas have it (acks=all).
ReceiveAnswer == \E p \in Processes :
    /\ responses[p] # <<>>
    /\ Head(responses[p]).base >= 0 => IndexAt(log, Head(responses[p]).base) <= replicated
    /\ TakeAnswer(p, Head(responses[p]))
    /\ responses' = [responses EXCEPT ![p] = Tail(@)]
    /\ UNCHANGED <<kafka, late, faults>>

ConnectionLost == \E p \in Processes : \E lost \in {Appends} \union {{a} : a \in InFlight(p)} :
    LET Stays(each) == each.append \notin lost
    IN  /\ Fault("connections")
        /\ LoseConnection(p, lost)
        /\ late' = late \union {each \in {requests[p][i] : i \in 1..Len(requests[p])} : ~Stays(each)}
        /\ requests' = [requests EXCEPT ![p] = SelectSeq(@, Stays)]
        /\ responses' = [responses EXCEPT ![p] = SelectSeq(@, Stays)]
        /\ UNCHANGED kafka

LookUp == \E p \in Processes, a \in Appends :
    LET i == IndexAt(log, append[a].expected)
    IN  /\ \/ TakeLookup(p, a, Committed(i))
           \/ /\ i = 0 /\ LogEnd(log) = append[a].expected
              /\ ProducerId(append[a].epoch) \in Ids
              /\ Decision(producers[ProducerId(append[a].epoch)], append[a].epoch, append[a].seq, Sizes[a]) = "append"
              /\ append[a].epoch = Published(SubSeq(stateTopic, 1, proc[p].view)).epoch
              /\ append[a].sends < 3 /\ append[a].after = 0
              /\ Resend(p, a)
           \/ GiveUp(p, a)
        /\ UNCHANGED <<kafka, responses, late, faults>>

\* The process ends: its clients get no answer, and what it sent may stay queued.
Kill == \E p \in Processes :
    /\ Fault("kills") /\ Live(p)
    /\ proc' = [proc EXCEPT ![p] = NewProcess]
    /\ append' = [a \in Appends |-> IF a \in At(p, {"queued", "sent", "in doubt"})
            THEN [append[a] EXCEPT !.status = "answered", !.result = "unknown", !.process = Nothing, !.sends = 0,
                                   !.unknown = TRUE]
            ELSE append[a]]
    /\ late' = late \union {requests[p][i] : i \in 1..Len(requests[p])}
    /\ requests' = [requests EXCEPT ![p] = <<>>] /\ responses' = [responses EXCEPT ![p] = <<>>]
    /\ UNCHANGED kafka

Start == \E p \in Processes :
    /\ Fault("starts") /\ ~Live(p)
    /\ proc' = [proc EXCEPT ![p] = [NewProcess EXCEPT !.phase = "unconfirmed"]]
    /\ UNCHANGED <<kafka, network, append>>

\* Assumption: otherwise the last epoch closes no producer id (docs/specification.md).
LastEpochIsUnused ==
    \/ LET epoch == Published(stateTopic).epoch IN IsLastEpoch(epoch) /\ producers[ProducerId(epoch)].epoch < epoch
    \/ \E p \in Processes : proc[p].proposal # <<>> /\ IsLastEpoch(proc[p].proposal[1].epoch)

\* A client that bypasses the proxy, or an append that was in progress when the check was switched on.
Bypass ==
    /\ Fault("bypasses")
    /\ Rule("a last epoch is used before the log moves") => ~LastEpochIsUnused
    /\ log' = Append(log, Plain(LogEnd(log), 1))
    /\ UNCHANGED <<replicated, producers, leaderEpoch, stateTopic, network, proc, append>>

(* A replica forgets producers when it restarts after their records were deleted. A restart drops the requests that are
   queued there. Assumption: each process has read the state topic to its end by then. *)
ForgetsAt(broker) ==
    /\ Forgetful
    /\ \A p \in Processes : \A i \in 1..Len(requests[p]) : requests[p][i].broker # broker
    /\ Rule("views are current when a producer is forgotten") => \A p \in Processes : ViewIsCurrent(p)
    /\ producers' = [id \in Ids |-> Unknown]
    /\ late' = {request \in late : request.broker # broker}

(* Another replica leads. It has everything that was acknowledged, and rebuilds the producers from its log. The old
   leader answers 6 with a base offset to what was not replicated. *)
Elect ==
    /\ Fault("elections")
    /\ leaderEpoch' = leaderEpoch + 1
    /\ \E n \in replicated..Len(log) : log' = SubSeq(log, 1, n)
    /\ \/ producers' = Reload(log', Ids, Remembered) /\ late' = late
       \/ ForgetsAt(Broker(leaderEpoch'))
    /\ responses' = [p \in Processes |-> [i \in 1..Len(responses[p]) |->
            IF responses[p][i].base >= LogEnd(SubSeq(log, 1, replicated))
            THEN [responses[p][i] EXCEPT !.kind = "inconclusive", !.base = -1] ELSE responses[p][i]]]
    /\ UNCHANGED <<replicated, stateTopic, requests, proc, append>>

\* A process learns of the new leader, and connects to it.
LearnLeader == \E p \in Processes :
    /\ Live(p) /\ proc[p].leader # leaderEpoch /\ requests[p] = <<>> /\ InFlight(p) = {}
    /\ proc' = [proc EXCEPT ![p] = [IF Rule("a new leader is unconfirmed") THEN Unconfirmed(@) ELSE @
                                    EXCEPT !.leader = leaderEpoch]]
    /\ UNCHANGED <<kafka, network, append, faults>>

\* The leader restarts, and leads again: it drops all queued requests, and knows each producer's last batch.
Restart ==
    /\ Fault("restarts")
    /\ leaderEpoch' = leaderEpoch + 2
    /\ requests' = [p \in Processes |-> <<>>] /\ responses' = [p \in Processes |-> <<>>]
    /\ append' = [a \in Appends |->
            IF append[a].status = "sent" THEN [append[a] EXCEPT !.status = "in doubt"] ELSE append[a]]
    /\ proc' = [p \in Processes |-> IF Rule("a new connection is unconfirmed") \/ ~Live(p) THEN Unconfirmed(proc[p])
                                    ELSE [proc[p] EXCEPT !.leader = leaderEpoch']]
    /\ replicated' = Len(log) /\ log' = log
    /\ late' = {request \in late : request.broker # Broker(leaderEpoch)}
    /\ \/ producers' = Reload(log, Ids, 1)
       \/ /\ Forgetful /\ producers' = [id \in Ids |-> Unknown]
          /\ Rule("views are current when a producer is forgotten") => \A p \in Processes : ViewIsCurrent(p)
    /\ UNCHANGED stateTopic

(* Kafka forgets producers after producer.id.expiration.ms. A process relies on its last append for a quarter of
   that, and on a read for a second. No request stays queued for the remaining time. *)
Expire ==
    /\ Fault("expiries")
    /\ \/ ~Rule("no request is queued until producers expire")
       \/ late = {} /\ \A p \in Processes : requests[p] = <<>>
    /\ producers' = [id \in Ids |-> Unknown]
    /\ \A p \in Processes : ViewIsCurrent(p)
    /\ proc' = [p \in Processes |-> IF Rule("a confirmation ends in time") THEN Unconfirmed(proc[p]) ELSE proc[p]]
    /\ UNCHANGED <<log, replicated, leaderEpoch, stateTopic, network, append>>

Next == \/ ClientSubmits \/ ClientRetries \/ ReadLogEnd \/ StoreBase \/ SendAppend \/ Refuse \/ HandleRequest
        \/ RejectRequest \/ HandleLateRequest \/ Replicate \/ ReceiveAnswer \/ ConnectionLost \/ LookUp \/ Kill \/ Start \/ Bypass
        \/ Elect \/ LearnLeader \/ Restart \/ Expire

Spec == Init /\ [][Next]_vars

(***************************************************************************)
(* PART 3: what docs/contract.md promises                                  *)
(***************************************************************************)
Fenced == {i \in 1..Len(log) : log[i].kind = "fenced"}
Range(a) == append[a].expected..(append[a].expected + Sizes[a] - 1)
Successes == {a \in Appends : append[a].result = "success"}

(* "An append MUST NOT be accepted at an offset other than expected: Kafka compares each one" (G1). If a client bypasses the
   proxy, "the proxy cannot prevent the write" (G7). It may move appends whose log end was read before it, and those may move
   others in turn. *)
AppendedWhereExpected == \A i \in Fenced : log[i].base = log[i].expected \/ log[i].moved

(* "The batch is in the log at its expected offset" (A2). With writers that bypass the proxy, too: "the append is in the log
   at the wrong offset, and its producer MUST receive OFFSET_VIOLATION, never success" (G13). *)
SuccessIsInTheLog == \A a \in Successes :
    \E i \in Fenced : log[i].base = append[a].expected /\ log[i].content = Contents[a] /\ i <= replicated

(* "A retry, not appended again" (A3) and "equality is not proof" (G12): no two appends own the same records. *)
NoTwoOwnARecord == \A a, b \in Successes : a # b => Range(a) \intersect Range(b) = {}

(* "append nothing of this attempt" (A1). With equal records the batch may belong to another append that was answered with
   success. *)
RefusedIsNotInTheLog == \A a \in Appends : append[a].result = "refused" =>
    \A i \in Fenced : log[i].append = a => \E b \in Successes : append[b].expected = log[i].base

(* "An earlier batch of the same producer and connection failed" (A29), so this attempt is not appended. An attempt whose
   predecessor had no answer "may be in the log" (A29). *)
NothingFollowsARefusedAppend == \A i \in Fenced :
    LET a == log[i].after
    IN  a # 0 => append[a].unknown \/ append[a].sends > 1 \/ append[a].result \notin {"refused", "rejected"}

(* "An epoch has one base", and "Kafka refuses everything under the old id: older epochs by their epoch, the last epoch by
   its sequence" (fence_bases.py): once an epoch is in use, nothing that was sent under another base is appended. *)
AnEpochHasOneBase == \A i, j \in Fenced : i < j =>
    log[i].epoch < log[j].epoch \/ (log[i].epoch = log[j].epoch /\ log[i].fenceBase = log[j].fenceBase)

TypeOK == \A a \in Appends : append[a].result \in {"none", "success", "refused", "ahead", "possibly yours", "unknown",
                                                    "try again", "rejected", "violation", "predecessor failed"}
=============================================================================
