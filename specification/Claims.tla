------------------------------- MODULE Claims -------------------------------
(***************************************************************************)
(* A process claims a partition of a `required` topic, then appends to it  *)
(* in a pipeline, while other processes live (fencepost.claims=true).      *)
(*                                                                         *)
(* A claim is a transaction marker under the shared producer id, with an   *)
(* epoch that no other claim has. Kafka appends it at one offset that      *)
(* consumers do not receive. From then on it refuses everything of a lower *)
(* epoch, also requests that wait in a queue, and the first append of the  *)
(* new epoch must have sequence 0: it is compared.                         *)
(*                                                                         *)
(* The process first stores the epoch and its base, the offset after the   *)
(* one that the marker is to take. If another append comes before the      *)
(* marker, the base does not fit, and the process claims again.            *)
(*                                                                         *)
(*   exclusive    one process appends under its claim's epoch, in a       *)
(*                pipeline                                                 *)
(*   shared       the claim's base is in the state topic. Any process      *)
(*                appends under its epoch, one append at a time, as today  *)
(*   takeover     another process claims: no waiting time                  *)
(*   rotation     the last epoch of a producer id is never appended under. *)
(*                Its marker closes the id; then the next id begins. Not   *)
(*                built: there the last epochs are as in FencedAppend      *)
(*                                                                         *)
(* What a process does with an unknown outcome is in FencedAppend.tla, and *)
(* unchanged. Here such an append ends as unknown.                         *)
(***************************************************************************)
EXTENDS PartitionLog

CONSTANTS
    Processes, Appends,   \* appends 1..n, of one record each
    MaxEpoch,             \* claims: epochs 1..MaxEpoch
    Budget,               \* how often each fault may happen
    Forgetful,            \* a restarted leader may lack producers, as if their records had been deleted
    Without               \* rules that are left out, by name; {} for the design

Rule(name) == name \notin Without

VARIABLES
    log, replicated, producers,
    nextEpoch,     \* state topic: the next epoch that no claim has
    shared,        \* state topic: the bases of claims in shared mode, stored before their markers; a process may read
                   \* an older one
    requests, responses, late,
    proc, append, faults

kafka == <<log, replicated, producers, nextEpoch, shared>>
network == <<requests, responses, late>>
vars == <<kafka, network, proc, append, faults>>

Ids == 0..ProducerId(MaxEpoch)
NoClaim == [phase |-> "none", mode |-> "exclusive", epoch |-> 0, base |-> 0, end |-> 0]
NewAppend == [status |-> "new", process |-> "", expected |-> 0, after |-> 0]

Init ==
    /\ log = <<>> /\ replicated = 0
    /\ producers = [id \in Ids |-> Unknown]
    /\ nextEpoch = 1 /\ shared = {[epoch |-> 0, base |-> 0]}
    /\ requests = [p \in Processes |-> <<>>] /\ responses = [p \in Processes |-> <<>>] /\ late = {}
    /\ proc = [p \in Processes |-> NoClaim]
    /\ append = [a \in Appends |-> NewAppend]
    /\ faults = Budget

Fault(name) == faults[name] > 0 /\ faults' = [faults EXCEPT ![name] = @ - 1]
InFlight(p) == {a \in Appends : append[a].status = "sent" /\ append[a].process = p}
EndOfAllSent(p) ==
    LET ends == {append[a].expected + 1 : a \in InFlight(p)} \union {proc[p].end}
    IN  CHOOSE e \in ends : \A other \in ends : other <= e

(***************************************************************************)
(* Claims                                                                  *)
(***************************************************************************)
Marker(p, epoch) == [kind |-> "marker", from |-> p, epoch |-> epoch]

\* The marker of a producer id's last epoch is in the log: everything under that id gets 47.
IsClosed(id) == \E i \in 1..replicated : log[i].kind = "marker" /\ log[i].epoch = (id + 1) * EpochsPerId - 1

MayUse(epoch) ==
    /\ epoch <= MaxEpoch
    /\ (epoch % EpochsPerId = 0 /\ Rule("an old producer id is closed first")) => IsClosed(ProducerId(epoch) - 1)

\* The log end is the base plus all sequences of the epoch.
Fits(state, base) == LogEnd(log) = base + NextSequence(state)

\* The process stores an epoch and its base, and writes the marker. The last epoch only closes its id.
Claim(p, mode) ==
    /\ proc[p].phase = "none" /\ InFlight(p) = {} /\ requests[p] = <<>>
    /\ MayUse(nextEpoch)
    /\ nextEpoch' = IF Rule("no two claims have one epoch") THEN nextEpoch + 1 ELSE nextEpoch
    /\ IF Rule("a claim is a marker")
       THEN /\ proc' = [proc EXCEPT ![p] = [phase |-> IF IsLastEpoch(nextEpoch) THEN "closing" ELSE "claiming",
                                            mode |-> mode, epoch |-> nextEpoch, base |-> LogEnd(log) + 1,
                                            end |-> LogEnd(log) + 1]]
            /\ requests' = [requests EXCEPT ![p] = Append(@, Marker(p, nextEpoch))]
       ELSE /\ proc' = [proc EXCEPT ![p] = [phase |-> "claimed", mode |-> mode, epoch |-> nextEpoch,
                                            base |-> LogEnd(log), end |-> LogEnd(log)]]
            /\ requests' = requests
    /\ shared' = IF mode = "shared" /\ ~IsLastEpoch(nextEpoch)
                 THEN shared \union {[epoch |-> nextEpoch, base |-> LogEnd(log) + 1]} ELSE shared
    /\ UNCHANGED <<log, replicated, producers, responses, late, append, faults>>

\* The claim is acknowledged. The log end is read after that, and the read shows the claim.
ReadAfterClaim(p) ==
    /\ proc[p].phase = "claimed"
    /\ LET state == producers[ProducerId(proc[p].epoch)]
           known == state.epoch = proc[p].epoch \/ ~Rule("a claim is a marker")
           fits == LogEnd(log) = proc[p].base \/ ~Rule("the log end is read after the claim")
       IN  proc' = [proc EXCEPT ![p] =
                IF ~known THEN NoClaim
                ELSE IF @.mode = "shared" \/ ~fits THEN NoClaim
                ELSE [@ EXCEPT !.phase = "exclusive"]]
    /\ UNCHANGED <<kafka, network, append, faults>>

\* A process uses a base of the state topic, perhaps an older one. It reads the log end for each append.
UseShared(p, record) ==
    /\ proc[p].phase \in {"none", "shared"} /\ InFlight(p) = {}
    /\ record \in shared
    /\ Fits(producers[ProducerId(record.epoch)], record.base)
    /\ \/ \E i \in 1..replicated : log[i].kind = "marker" /\ log[i].epoch = record.epoch
       \/ ~Rule("a marker is replicated before the first append")
    /\ producers[ProducerId(record.epoch)].epoch = record.epoch
    /\ record.epoch > 0
    /\ proc' = [proc EXCEPT ![p] = [phase |-> "shared", mode |-> "shared", epoch |-> record.epoch, base |-> record.base,
                                    end |-> LogEnd(log)]]
    /\ UNCHANGED <<kafka, network, append, faults>>

GiveUp(p) ==
    /\ proc[p].phase \in {"exclusive", "shared", "closing"} /\ InFlight(p) = {}
    /\ proc' = [proc EXCEPT ![p] = NoClaim]
    /\ UNCHANGED <<kafka, network, append, faults>>

(***************************************************************************)
(* Appends                                                                 *)
(***************************************************************************)
Send(p, a) ==
    /\ append[a].status = "new" /\ \A b \in Appends : b < a => append[b].status # "new"
    /\ \/ proc[p].phase = "exclusive"
       \/ proc[p].phase = "shared" /\ (InFlight(p) = {} \/ ~Rule("shared mode sends one append at a time"))
    /\ LET expected == EndOfAllSent(p)
           after == IF InFlight(p) = {} THEN 0
                    ELSE CHOOSE b \in InFlight(p) : append[b].expected + 1 = expected
       IN  /\ append' = [append EXCEPT ![a] = [status |-> "sent", process |-> p, expected |-> expected, after |-> after]]
           /\ requests' = [requests EXCEPT ![p] = Append(@,
                [kind |-> "fenced", from |-> p, append |-> a, epoch |-> proc[p].epoch, seq |-> expected - proc[p].base,
                 base |-> proc[p].base, expected |-> expected, after |-> after])]
    /\ UNCHANGED <<kafka, responses, late, proc, faults>>

\* Any other answer than a new append ends what the process knows: it claims again, or reads again.
ReceiveAnswer(p) ==
    /\ responses[p] # <<>>
    /\ LET answer == Head(responses[p])
           a == answer.append
           appended == answer.kind = "append" /\ answer.base = append[a].expected
       IN  /\ answer.kind = "append" => answer.index <= replicated
           /\ IF a = 0
              THEN /\ append' = append
                   /\ proc' = [proc EXCEPT ![p] =
                        IF answer.epoch # @.epoch \/ @.phase # "claiming" THEN @
                        ELSE IF answer.kind = "append" THEN [@ EXCEPT !.phase = "claimed"] ELSE NoClaim]
              ELSE /\ append' = [append EXCEPT ![a].status =
                        IF appended THEN "success"
                        ELSE IF answer.kind \in {"append", "duplicate", "inconclusive"} THEN "unknown" ELSE "refused"]
                   /\ proc' = [proc EXCEPT ![p] =
                        IF ~appended THEN NoClaim
                        ELSE IF @.phase = "exclusive" THEN [@ EXCEPT !.end = answer.base + 1]
                        ELSE [@ EXCEPT !.phase = "none"]]
    /\ responses' = [responses EXCEPT ![p] = Tail(@)]
    /\ UNCHANGED <<kafka, requests, late, faults>>

(***************************************************************************)
(* Kafka, and faults                                                       *)
(***************************************************************************)
Handled(request) ==
    LET id == ProducerId(request.epoch)
        state == producers[id]
        decision == IF request.kind = "marker" THEN MarkerDecision(state, request.epoch)
                   ELSE Decision(state, request.epoch, request.seq, 1)
        batch == IF request.kind = "marker"
                 THEN [kind |-> "marker", base |-> LogEnd(log), count |-> 1, epoch |-> request.epoch]
                 ELSE [kind |-> "fenced", base |-> LogEnd(log), count |-> 1, epoch |-> request.epoch, seq |-> request.seq,
                       append |-> request.append, expected |-> request.expected, after |-> request.after,
                       fenceBase |-> request.base]
    IN  [batch |-> IF decision = "append" THEN <<batch>> ELSE <<>>,
         answer |-> [append |-> IF request.kind = "marker" THEN 0 ELSE request.append, kind |-> decision,
                     epoch |-> request.epoch, base |-> LogEnd(log), index |-> Len(log) + 1]]

Handle(request) ==
    /\ log' = log \o Handled(request).batch
    /\ producers' = IF Handled(request).batch = <<>> THEN producers ELSE Learn(producers, Handled(request).batch[1])
    /\ UNCHANGED <<replicated, nextEpoch, shared, proc, append, faults>>

HandleRequest == \E p \in Processes :
    /\ requests[p] # <<>> /\ Handle(Head(requests[p]))
    /\ requests' = [requests EXCEPT ![p] = Tail(@)]
    /\ responses' = [responses EXCEPT ![p] = Append(@, Handled(Head(requests[p])).answer)]
    /\ UNCHANGED late

HandleLateRequest == \E request \in late :
    Handle(request) /\ late' = late \ {request} /\ UNCHANGED <<requests, responses>>

Replicate == /\ replicated < Len(log) /\ replicated' = Len(log)
             /\ UNCHANGED <<log, producers, nextEpoch, shared, network, proc, append, faults>>

\* After a lost connection an exclusive process claims again, and a claim without an acknowledgement is given up.
AfterLoss(state) ==
    CASE state.phase = "claiming" -> IF Rule("a claim without an acknowledgement is given up") THEN NoClaim ELSE state
      [] state.phase = "exclusive" -> IF Rule("a new connection needs a new claim") THEN NoClaim ELSE state
      [] OTHER -> NoClaim

Unanswered(p, appends) ==
    [a \in Appends |-> IF a \in InFlight(p) THEN [appends[a] EXCEPT !.status = "unknown"] ELSE appends[a]]

ConnectionLost == \E p \in Processes :
    /\ Fault("connections")
    /\ proc' = [proc EXCEPT ![p] = AfterLoss(@)]
    /\ append' = Unanswered(p, append)
    /\ late' = late \union {requests[p][i] : i \in 1..Len(requests[p])}
    /\ requests' = [requests EXCEPT ![p] = IF AfterLoss(proc[p]).phase = "claiming"
                                           THEN <<Marker(p, proc[p].epoch)>> ELSE <<>>]
    /\ responses' = [responses EXCEPT ![p] = <<>>]
    /\ UNCHANGED kafka

\* The last epoch's marker, sent a second time because its acknowledgement was lost.
CloseAgain == \E p \in Processes :
    /\ ~Rule("the marker of a last epoch is sent once")
    /\ proc[p].phase = "none" /\ requests[p] = <<>> /\ IsLastEpoch(nextEpoch - 1)
    /\ proc' = [proc EXCEPT ![p] = [NoClaim EXCEPT !.phase = "closing", !.epoch = nextEpoch - 1]]
    /\ requests' = [requests EXCEPT ![p] = <<Marker(p, nextEpoch - 1)>>]
    /\ UNCHANGED <<kafka, responses, late, append, faults>>

\* The process dies or stops for long: the same for Kafka. A new one begins without a claim.
Elect ==
    /\ Fault("elections")
    /\ \E n \in replicated..Len(log) : log' = SubSeq(log, 1, n)
    /\ producers' = Reload(log', Ids, Remembered)
    /\ responses' = [p \in Processes |-> [i \in 1..Len(responses[p]) |->
            IF responses[p][i].index > replicated THEN [responses[p][i] EXCEPT !.kind = "inconclusive"] ELSE responses[p][i]]]
    /\ UNCHANGED <<replicated, nextEpoch, shared, requests, late, proc, append>>

Restart ==
    /\ Fault("restarts")
    /\ late' = {} /\ requests' = [p \in Processes |-> <<>>] /\ responses' = [p \in Processes |-> <<>>]
    /\ proc' = [p \in Processes |-> IF proc[p].phase = "exclusive" THEN AfterLoss(proc[p]) ELSE NoClaim]
    /\ append' = [a \in Appends |-> IF append[a].status = "sent" THEN [append[a] EXCEPT !.status = "unknown"] ELSE append[a]]
    /\ replicated' = Len(log)
    /\ \/ producers' = Reload(log, Ids, 1)
       \/ Forgetful /\ producers' = [id \in Ids |-> Unknown]
    /\ UNCHANGED <<log, nextEpoch, shared>>

\* producer.id.expiration.ms passes: no request stays queued for so long, and a claim is relied on for a part of it.
Expire ==
    /\ Fault("expiries")
    /\ late = {} /\ \A p \in Processes : requests[p] = <<>>
    /\ producers' = [id \in Ids |-> Unknown]
    /\ proc' = [p \in Processes |-> IF Rule("a claim ends in time") THEN NoClaim ELSE proc[p]]
    /\ UNCHANGED <<log, replicated, nextEpoch, shared, network, append>>

Next ==
    \/ \E p \in Processes, mode \in {"exclusive", "shared"} : Claim(p, mode)
    \/ \E p \in Processes : ReadAfterClaim(p) \/ GiveUp(p) \/ ReceiveAnswer(p)
    \/ \E p \in Processes, record \in shared : UseShared(p, record)
    \/ \E p \in Processes, a \in Appends : Send(p, a)
    \/ HandleRequest \/ HandleLateRequest \/ Replicate \/ ConnectionLost \/ CloseAgain \/ Elect \/ Restart \/ Expire

Spec == Init /\ [][Next]_vars

(***************************************************************************)
(* What docs/contract.md promises, and what claims add                     *)
(***************************************************************************)
Fenced == {i \in 1..Len(log) : log[i].kind = "fenced"}

\* "An append MUST NOT be accepted at an offset other than expected: Kafka compares each one" (G1).
AppendedWhereExpected == \A i \in Fenced : log[i].base = log[i].expected

\* "The batch is in the log at its expected offset" (A2).
SuccessIsInTheLog == \A a \in Appends : append[a].status = "success" =>
    \E i \in Fenced : log[i].append = a /\ log[i].base = append[a].expected /\ i <= replicated

(* "a successor MAY be appended although its predecessor was refused. Each batch MUST still be at exactly its expected
   offset" (R8): with claims it cannot, not even if the predecessor's outcome is unknown. *)
NothingFollowsAMissingAppend == \A i \in Fenced :
    log[i].after # 0 => \E j \in Fenced : j < i /\ log[j].append = log[i].after

\* Once a claim is in the log, nothing of an earlier one follows.
ClaimsDoNotReturn == \A i, j \in 1..Len(log) : i < j => log[i].epoch <= log[j].epoch

TypeOK == \A p \in Processes : proc[p].phase \in {"none", "claiming", "closing", "claimed", "exclusive", "shared"}
=============================================================================
