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
(*   exclusive    one process appends under its claim's epoch, in a        *)
(*                pipeline                                                 *)
(*   shared       any process appends under the claim's epoch, one append  *)
(*                at a time                                                *)
(*   takeover     a process that has an append, and reads another one's    *)
(*                claim, begins a shared epoch: no waiting time            *)
(*   last epoch   of a producer id: it begins without a marker, as in      *)
(*                FencedAppend. A claim keeps away from it                 *)
(*                                                                         *)
(* What a process does with an unknown outcome is in FencedAppend.tla, and *)
(* unchanged. Here such an append ends as unknown.                         *)
(***************************************************************************)
EXTENDS PartitionLog

CONSTANTS
    Processes, Appends,   \* appends 1..n, of one record each
    MaxEpoch,             \* claims: epochs 1..MaxEpoch
    SharedEpochs,         \* of a producer id: its last ones, which no process claims for itself
    Budget,               \* how often each fault may happen
    Forgetful,            \* a restarted leader may lack producers, as if their records had been deleted
    Without               \* rules that are left out, by name; {} for the design

Rule(name) == name \notin Without

VARIABLES
    log, replicated, producers,
    published,     \* state topic: the claim with the highest epoch
    shared,        \* state topic: all that are in shared mode; a process may read an older one
    requests, responses, late,
    proc, append, faults

kafka == <<log, replicated, producers, published, shared>>
network == <<requests, responses, late>>
vars == <<kafka, network, proc, append, faults>>

Ids == 0..ProducerId(MaxEpoch)
\* `lostTo`: the end of the appends that it sent on lost connections.
NoClaim == [phase |-> "none", mode |-> "exclusive", epoch |-> 0, base |-> 0, end |-> 0, lostTo |-> 0]
NewAppend == [status |-> "new", process |-> "", expected |-> 0, after |-> 0]

Init ==
    /\ log = <<>> /\ replicated = 0
    /\ producers = [id \in Ids |-> Unknown]
    /\ published = [epoch |-> 0, base |-> 0, mode |-> "shared"] /\ shared = {}
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

IsInLog(epoch) == \E i \in 1..Len(log) : log[i].kind = "marker" /\ log[i].epoch = epoch
IsReplicated(epoch) == \E i \in 1..replicated : log[i].kind = "marker" /\ log[i].epoch = epoch

\* The log end is the base plus all sequences of the epoch.
Fits(epoch, base) ==
    LET state == producers[ProducerId(epoch)]
    IN  IF IsLastEpoch(epoch) THEN state.epoch < epoch /\ LogEnd(log) = base
        ELSE state.epoch = epoch /\ LogEnd(log) = base + NextSequence(state)

\* Assumption: a marker that is missing for limits.queued_seconds does not follow any more.
MarkerMayFollow(epoch) ==
    LET open == UNION {{requests[p][i] : i \in 1..Len(requests[p])} : p \in Processes}
    IN  \E each \in open \union late : each.kind = "marker" /\ each.epoch = epoch

\* A shared epoch begins only if the published one cannot be used, and is not this process's own.
MayClaim(p, mode) ==
    LET epoch == IF Rule("no two claims have one epoch") THEN published.epoch + 1 ELSE 1
        left == EpochsPerId - 1 - (epoch % EpochsPerId)
    IN  /\ epoch <= MaxEpoch
        /\ IsLastEpoch(epoch) /\ Rule("a last epoch begins once no marker can follow")
              => IsInLog(published.epoch) \/ ~MarkerMayFollow(published.epoch)
        /\ IF mode = "exclusive" THEN left >= SharedEpochs \/ ~Rule("the last epochs of a producer id are shared")
           ELSE published.epoch > 0 /\ (published.mode = "exclusive" \/ ~Fits(published.epoch, published.base))

\* The process stores an epoch and its base, and writes the marker.
Claim(p, mode) ==
    /\ proc[p].phase = "none" /\ InFlight(p) = {} /\ requests[p] = <<>>
    /\ MayClaim(p, mode)
    /\ LET epoch == IF Rule("no two claims have one epoch") THEN published.epoch + 1 ELSE 1
           marked == Rule("a claim is a marker") /\ ~IsLastEpoch(epoch)
           base == LogEnd(log) + (IF marked THEN 1 ELSE 0)
           record == [epoch |-> epoch, base |-> base]
       IN  /\ published' = [epoch |-> epoch, base |-> base, mode |-> mode]
           /\ shared' = IF mode = "shared" THEN shared \union {record} ELSE shared
           /\ proc' = [proc EXCEPT ![p] = IF IsLastEpoch(epoch) THEN NoClaim
                         ELSE [NoClaim EXCEPT !.phase = IF marked THEN "claiming" ELSE "claimed", !.mode = mode,
                                              !.epoch = epoch, !.base = base, !.end = base]]
           /\ requests' = IF marked THEN [requests EXCEPT ![p] = Append(@, Marker(p, epoch))] ELSE requests
    /\ UNCHANGED <<log, replicated, producers, responses, late, append, faults>>

(* The marker was sent, or appends have other answers than expected: the log end is read. An exclusive process goes on
   if its epoch is the last one, and the base fits. *)
ReadAfterClaim(p) ==
    /\ proc[p].phase = "claimed" /\ InFlight(p) = {}
    /\ IsInLog(proc[p].epoch) /\ Rule("a marker is replicated before the first append") => IsReplicated(proc[p].epoch)
    /\ LET state == producers[ProducerId(proc[p].epoch)]
           known == state.epoch = proc[p].epoch \/ ~Rule("a claim is a marker")
           fits == LogEnd(log) = proc[p].base + NextSequence(state) \/ ~Rule("the log end is read after the claim")
       IN  proc' = [proc EXCEPT ![p] =
                IF ~known \/ @.mode = "shared" \/ ~fits THEN NoClaim
                ELSE [@ EXCEPT !.phase = "exclusive",
                               !.end = IF Rule("the log end is read after the claim") THEN LogEnd(log) ELSE @]]
    /\ UNCHANGED <<kafka, network, append, faults>>

\* A process uses a base of the state topic, perhaps an older one. It reads the log end for each append.
UseShared(p, record) ==
    /\ proc[p].phase \in {"none", "shared"} /\ InFlight(p) = {}
    /\ record \in shared /\ Fits(record.epoch, record.base)
    /\ \/ IsReplicated(record.epoch) \/ IsLastEpoch(record.epoch)
       \/ ~Rule("a marker is replicated before the first append")
    /\ proc' = [proc EXCEPT ![p] = [NoClaim EXCEPT !.phase = "shared", !.mode = "shared", !.epoch = record.epoch,
                                                   !.base = record.base, !.end = LogEnd(log)]]
    /\ UNCHANGED <<kafka, network, append, faults>>

GiveUp(p) ==
    /\ proc[p].phase \in {"exclusive", "shared"} /\ InFlight(p) = {}
    /\ proc' = [proc EXCEPT ![p] = NoClaim]
    /\ UNCHANGED <<kafka, network, append, faults>>

(***************************************************************************)
(* Appends                                                                 *)
(***************************************************************************)
Send(p, a) ==
    /\ append[a].status = "new" /\ \A b \in Appends : b < a => append[b].status # "new"
    /\ \/ proc[p].phase \in {"exclusive", "shared"} /\ InFlight(p) = {}
       \/ /\ proc[p].phase = "exclusive"
          /\ proc[p].lostTo <= proc[p].end \/ ~Rule("no pipeline while a lost append may be queued")
       \/ proc[p].phase = "shared" /\ ~Rule("shared mode sends one append at a time")
    /\ LET expected == EndOfAllSent(p)
           after == IF InFlight(p) = {} THEN 0
                    ELSE CHOOSE b \in InFlight(p) : append[b].expected + 1 = expected
       IN  /\ append' = [append EXCEPT ![a] = [status |-> "sent", process |-> p, expected |-> expected, after |-> after]]
           /\ requests' = [requests EXCEPT ![p] = Append(@,
                [kind |-> "fenced", from |-> p, append |-> a, epoch |-> proc[p].epoch, seq |-> expected - proc[p].base,
                 base |-> proc[p].base, expected |-> expected, after |-> after])]
    /\ UNCHANGED <<kafka, responses, late, proc, faults>>

\* Any other answer than a new append ends what the process knows: it reads again.
ReadsAgain(state) == IF state.phase \in {"claimed", "exclusive"} THEN [state EXCEPT !.phase = "claimed"] ELSE NoClaim

\* The answer for another append with its sequences is read back, and does not belong to it.
ReceiveAnswer(p) ==
    /\ responses[p] # <<>>
    /\ LET answer == Head(responses[p])
           a == answer.append
           appended == answer.kind = "append" /\ answer.base = append[a].expected
       IN  /\ answer.kind = "append" => answer.index <= replicated
           /\ IF a = 0
              THEN /\ append' = append
                   /\ proc' = [proc EXCEPT ![p] = IF answer.epoch # @.epoch \/ @.phase # "claiming" THEN @
                                                 ELSE [@ EXCEPT !.phase = "claimed"]]
              ELSE /\ append' = [append EXCEPT ![a].status =
                        IF appended THEN "success"
                        ELSE IF answer.kind \in {"append", "inconclusive"} THEN "unknown" ELSE "refused"]
                   /\ proc' = [proc EXCEPT ![p] =
                        IF ~appended THEN ReadsAgain(@)
                        ELSE IF @.phase = "exclusive" THEN [@ EXCEPT !.end = answer.base + 1]
                        ELSE IF @.phase = "claimed" THEN @ ELSE NoClaim]
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
    /\ UNCHANGED <<replicated, published, shared, proc, append, faults>>

HandleRequest == \E p \in Processes :
    /\ requests[p] # <<>> /\ Handle(Head(requests[p]))
    /\ requests' = [requests EXCEPT ![p] = Tail(@)]
    /\ responses' = [responses EXCEPT ![p] = Append(@, Handled(Head(requests[p])).answer)]
    /\ UNCHANGED late

HandleLateRequest == \E request \in late :
    Handle(request) /\ late' = late \ {request} /\ UNCHANGED <<requests, responses>>

Replicate == /\ replicated < Len(log) /\ replicated' = Len(log)
             /\ UNCHANGED <<log, producers, published, shared, network, proc, append, faults>>

(* The process keeps its claim, and reads the log end. The marker is not sent again: if the read does not show it, the
   process claims with another epoch. Each client has its own connection, so that of one append may be lost alone. *)
AfterLoss(state, lost) ==
    LET ends == {append[a].expected + 1 : a \in lost} \union {state.lostTo}
    IN  IF state.phase = "claiming" /\ ~Rule("a marker is never sent again") THEN state
        ELSE IF state.phase = "claiming" THEN [state EXCEPT !.phase = "claimed"]
        ELSE [ReadsAgain(state) EXCEPT !.lostTo = CHOOSE e \in ends : \A other \in ends : other <= e]

ConnectionLost == \E p \in Processes : \E lost \in {Appends \union {0}} \union {{a} : a \in InFlight(p)} :
    LET OfAppend(each) == IF each.kind = "marker" THEN 0 ELSE each.append
        Stays(each) == OfAppend(each) \notin lost
        IsOther(answer) == answer.append \notin lost
    IN  /\ Fault("connections")
        /\ proc' = [proc EXCEPT ![p] = AfterLoss(@, lost \intersect InFlight(p))]
        /\ append' = [a \in Appends |-> IF a \in lost \intersect InFlight(p) THEN [append[a] EXCEPT !.status = "unknown"]
                                        ELSE append[a]]
        /\ late' = late \union {each \in {requests[p][i] : i \in 1..Len(requests[p])} : ~Stays(each)}
        /\ requests' = [requests EXCEPT ![p] = IF proc'[p].phase = "claiming" THEN <<Marker(p, proc[p].epoch)>>
                                               ELSE SelectSeq(@, Stays)]
        /\ responses' = [responses EXCEPT ![p] = SelectSeq(@, IsOther)]
        /\ UNCHANGED kafka

\* The read does not show the marker: the process gives this claim up. Then it, or another one, claims.
MarkerIsMissing == \E p \in Processes :
    /\ proc[p].phase = "claimed" /\ InFlight(p) = {} /\ ~IsInLog(proc[p].epoch)
    /\ proc' = [proc EXCEPT ![p] = NoClaim]
    /\ UNCHANGED <<kafka, network, append, faults>>

\* The process dies or stops for long: the same for Kafka. A new one begins without a claim.
Elect ==
    /\ Fault("elections")
    /\ \E n \in replicated..Len(log) : log' = SubSeq(log, 1, n)
    /\ producers' = Reload(log', Ids, Remembered)
    /\ responses' = [p \in Processes |-> [i \in 1..Len(responses[p]) |->
            IF responses[p][i].index > replicated THEN [responses[p][i] EXCEPT !.kind = "inconclusive"] ELSE responses[p][i]]]
    /\ UNCHANGED <<replicated, published, shared, requests, late, proc, append>>

Restart ==
    /\ Fault("restarts")
    /\ late' = {} /\ requests' = [p \in Processes |-> <<>>] /\ responses' = [p \in Processes |-> <<>>]
    /\ proc' = [p \in Processes |-> ReadsAgain(proc[p])]
    /\ append' = [a \in Appends |-> IF append[a].status = "sent" THEN [append[a] EXCEPT !.status = "unknown"] ELSE append[a]]
    /\ replicated' = Len(log)
    /\ \/ producers' = Reload(log, Ids, 1)
       \/ Forgetful /\ producers' = [id \in Ids |-> Unknown]
    /\ UNCHANGED <<log, published, shared>>

\* producer.id.expiration.ms passes: no request stays queued for so long, and a claim is relied on for a part of it.
Expire ==
    /\ Fault("expiries")
    /\ late = {} /\ \A p \in Processes : requests[p] = <<>>
    /\ producers' = [id \in Ids |-> Unknown]
    /\ proc' = [p \in Processes |-> IF Rule("a claim ends in time") THEN NoClaim ELSE proc[p]]
    /\ UNCHANGED <<log, replicated, published, shared, network, append>>

Next ==
    \/ \E p \in Processes, mode \in {"exclusive", "shared"} : Claim(p, mode)
    \/ \E p \in Processes : ReadAfterClaim(p) \/ GiveUp(p) \/ ReceiveAnswer(p)
    \/ \E p \in Processes, record \in shared : UseShared(p, record)
    \/ \E p \in Processes, a \in Appends : Send(p, a)
    \/ HandleRequest \/ HandleLateRequest \/ Replicate \/ ConnectionLost \/ MarkerIsMissing \/ Elect \/ Restart \/ Expire

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

(* "An earlier batch of the same producer and connection failed" (A29), so this attempt is not appended. An attempt whose
   predecessor had no answer "may be in the log" (A29). *)
NothingFollowsARefusedAppend == \A i \in Fenced : log[i].after # 0 => append[log[i].after].status # "refused"

\* Once a claim is in the log, nothing of an earlier one follows.
ClaimsDoNotReturn == \A i, j \in 1..Len(log) : i < j => log[i].epoch <= log[j].epoch

TypeOK == \A p \in Processes : proc[p].phase \in {"none", "claiming", "claimed", "exclusive", "shared"}
=============================================================================
