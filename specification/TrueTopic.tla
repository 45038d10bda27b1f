----------------------------- MODULE TrueTopic -----------------------------
(***************************************************************************)
(* Conditional appends to one partition of a `true` topic, where other     *)
(* clients' appends keep their own producer id. Those move the log end,    *)
(* but not the sequence of the fence. So each process counts them: its     *)
(* sequence offset is the log end minus the fence's next sequence.         *)
(*                                                                         *)
(* Kafka compares the sequence only. An append that one process does not   *)
(* count can move a fenced one. The promises are weaker than those of a    *)
(* `required` topic, and the models name what is not promised.             *)
(*                                                                         *)
(* What a process does with answers and lookups is in FencedAppend.tla.    *)
(***************************************************************************)
EXTENDS PartitionLog

CONSTANTS
    Processes,
    Serving,        \* those that serve from the beginning; others start after a kill
    Conditional,    \* appends 1..n with an expected offset, of one record each
    Unconditional,  \* appends without one, under their own producer id
    Budget,
    Without         \* rules that are left out, by name

Rule(name) == name \notin Without

VARIABLES log, replicated, state, requests, responses, late, proc, append, faults

network == <<requests, responses, late>>
vars == <<log, replicated, state, network, proc, append, faults>>
Appends == Conditional \union Unconditional

\* `fencedLost`, `otherLost`: an append of that kind has no answer, and may be queued in a broker.
NewProcess == [phase |-> "down", end |-> 0, offset |-> 0, fencedLost |-> FALSE, otherLost |-> FALSE,
               takingOver |-> FALSE]
NewAppend == [status |-> "new", process |-> "", expected |-> -1, result |-> "none"]

Init ==
    /\ log = <<>> /\ replicated = 0 /\ state = Unknown
    /\ requests = [p \in Processes |-> <<>>] /\ responses = [p \in Processes |-> <<>>] /\ late = {}
    /\ proc = [p \in Processes |-> [NewProcess EXCEPT !.phase = IF p \in Serving THEN "unconfirmed" ELSE "down"]]
    /\ append = [a \in Appends |-> NewAppend]
    /\ faults = Budget

Fault(name) == faults[name] > 0 /\ faults' = [faults EXCEPT ![name] = @ - 1]
Live(p) == proc[p].phase # "down"
At(p, kind, status) == {a \in kind : append[a].process = p /\ append[a].status = status}
InFlight(p, kind) == At(p, kind, "sent")
NoneInFlight(p) == InFlight(p, Appends) = {}

(***************************************************************************)
(* Processes                                                               *)
(***************************************************************************)
Submit(p, a) ==
    /\ Live(p) /\ append[a].status = "new"
    /\ append' = [append EXCEPT ![a] = [NewAppend EXCEPT !.status = "queued", !.process = p,
                                                         !.expected = IF a \in Conditional THEN LogEnd(log) ELSE -1]]
    /\ UNCHANGED <<log, replicated, state, network, proc, faults>>

\* The log end and the fence's next sequence, of one moment.
Read(p) ==
    /\ NoneInFlight(p) /\ At(p, Conditional, "queued") # {}
    /\ LET next(end) == IF state = Unknown THEN end ELSE NextSequence(state)
           read(end) == [proc[p] EXCEPT !.phase = "open", !.end = end, !.offset = end - next(end)]
       IN  \/ /\ proc[p].phase = "unconfirmed"
              /\ proc' = [proc EXCEPT ![p] = IF Rule("log end and sequence are read together") THEN read(LogEnd(log))
                                             ELSE [@ EXCEPT !.phase = "half read", !.end = LogEnd(log)]]
           \/ proc[p].phase = "half read" /\ proc' = [proc EXCEPT ![p] = read(@.end)]
    /\ UNCHANGED <<log, replicated, state, network, append, faults>>

Request(p, a, kind) ==
    [kind |-> kind, append |-> a, from |-> p, expected |-> append[a].expected,
     seq |-> IF kind = "fenced" THEN append[a].expected - proc[p].offset ELSE -1]

SendConditional(p, a) ==
    /\ a \in At(p, Conditional, "queued")
    /\ proc[p].phase = "open" /\ append[a].expected = proc[p].end
    /\ InFlight(p, Conditional) = {}
    /\ Rule("fenced and other appends are not in flight together") => InFlight(p, Unconditional) = {}
    /\ Rule("conditional appends wait for others that may be queued") => ~proc[p].otherLost
    /\ Rule("conditional appends wait during a takeover") => ~proc[p].takingOver
    /\ append' = [append EXCEPT ![a].status = "sent"]
    /\ requests' = [requests EXCEPT ![p] = Append(@, Request(p, a, "fenced"))]
    /\ UNCHANGED <<log, replicated, state, responses, late, proc, faults>>

SendUnconditional(p, a) ==
    /\ a \in At(p, Unconditional, "queued") /\ Live(p)
    /\ Rule("fenced and other appends are not in flight together") => InFlight(p, Conditional) = {}
    /\ Rule("other appends wait for fenced ones that may be queued") => ~proc[p].fencedLost
    /\ Rule("other appends wait during a takeover") => ~proc[p].takingOver    \* not so today: see the contract
    /\ append' = [append EXCEPT ![a].status = "sent"]
    /\ requests' = [requests EXCEPT ![p] = Append(@, Request(p, a, "plain"))]
    /\ UNCHANGED <<log, replicated, state, responses, late, proc, faults>>

Refuse(p, a) ==
    /\ a \in At(p, Conditional, "queued") /\ NoneInFlight(p)
    /\ proc[p].phase = "open" /\ append[a].expected # proc[p].end
    /\ append' = [append EXCEPT ![a] = [@ EXCEPT !.status = "answered", !.result = "refused"]]
    /\ UNCHANGED <<log, replicated, state, network, proc, faults>>

ReceiveAnswer(p) ==
    /\ responses[p] # <<>>
    /\ LET answer == Head(responses[p])
           a == answer.append
           read == [proc[p] EXCEPT !.phase = IF @ = "down" THEN @ ELSE "unconfirmed"]
       IN  /\ answer.kind = "append" => IndexAt(log, answer.base) <= replicated
           /\ CASE a \in Unconditional ->
                    /\ append' = [append EXCEPT ![a] = [@ EXCEPT !.status = "answered", !.result = "success"]]
                    /\ proc' = [proc EXCEPT ![p] =
                         IF @.phase = "open" /\ answer.base = @.end
                         THEN [@ EXCEPT !.end = answer.base + 1, !.offset = @ + 1] ELSE read]
                [] a \in Conditional /\ answer.kind = "append" ->
                    LET moved == answer.base # append[a].expected
                    IN  /\ append' = [append EXCEPT ![a] = [@ EXCEPT !.status = "answered",
                              !.result = IF moved /\ Rule("the answer's offset is compared") THEN "violation" ELSE "success"]]
                        /\ proc' = [proc EXCEPT ![p] = IF moved THEN read
                                                       ELSE [@ EXCEPT !.end = answer.base + 1, !.fencedLost = FALSE]]
                [] a \in Conditional /\ answer.kind # "append" ->
                    /\ append' = [append EXCEPT ![a].status = "queued"]
                    /\ proc' = [proc EXCEPT ![p] = read]
    /\ responses' = [responses EXCEPT ![p] = Tail(@)]
    /\ UNCHANGED <<log, replicated, state, requests, late, faults>>

\* `limits.queued_seconds` pass. Assumption: nothing stays queued for longer.
QueueTimeEnds(p) ==
    /\ proc[p].fencedLost \/ proc[p].otherLost \/ proc[p].takingOver
    /\ Rule("no request is queued for longer than queued_seconds") => late = {}
    /\ proc' = [proc EXCEPT ![p] = [@ EXCEPT !.fencedLost = FALSE, !.otherLost = FALSE, !.takingOver = FALSE,
                                             !.phase = "unconfirmed"]]
    /\ NoneInFlight(p)
    /\ UNCHANGED <<log, replicated, state, network, append, faults>>

(***************************************************************************)
(* Kafka, and faults                                                       *)
(***************************************************************************)
Handled(request) ==
    LET decision == IF request.kind = "plain" THEN "append" ELSE Decision(state, 0, request.seq, 1)
        batch == [kind |-> request.kind, base |-> LogEnd(log), count |-> 1, epoch |-> 0, seq |-> request.seq,
                  append |-> request.append, expected |-> request.expected]
    IN  [batch |-> IF decision = "append" THEN <<batch>> ELSE <<>>,
         answer |-> [append |-> request.append, kind |-> decision, base |-> LogEnd(log)]]

Handle(request) ==
    /\ log' = log \o Handled(request).batch
    /\ state' = IF Handled(request).batch = <<>> THEN state ELSE Learn([id \in {0} |-> state], Handled(request).batch[1])[0]
    /\ UNCHANGED <<replicated, proc, append, faults>>

HandleRequest == \E p \in Processes :
    /\ requests[p] # <<>> /\ Handle(Head(requests[p]))
    /\ requests' = [requests EXCEPT ![p] = Tail(@)]
    /\ responses' = [responses EXCEPT ![p] = Append(@, Handled(Head(requests[p])).answer)]
    /\ UNCHANGED late

HandleLateRequest == \E request \in late :
    Handle(request) /\ late' = late \ {request} /\ UNCHANGED <<requests, responses>>

Replicate == /\ replicated < Len(log) /\ replicated' = Len(log)
             /\ UNCHANGED <<log, state, network, proc, append, faults>>

Unanswered(p) == [a \in Appends |-> IF a \in InFlight(p, Appends)
    THEN [append[a] EXCEPT !.status = "answered", !.result = "unknown"] ELSE append[a]]

Lost(p) ==
    /\ late' = late \union {requests[p][i] : i \in 1..Len(requests[p])}
    /\ requests' = [requests EXCEPT ![p] = <<>>] /\ responses' = [responses EXCEPT ![p] = <<>>]
    /\ append' = Unanswered(p)
    /\ UNCHANGED <<log, replicated, state>>

ConnectionLost == \E p \in Processes :
    /\ Fault("connections") /\ Live(p) /\ ~NoneInFlight(p) /\ Lost(p)
    /\ proc' = [proc EXCEPT ![p] = [@ EXCEPT !.phase = "unconfirmed",
            !.fencedLost = @ \/ InFlight(p, Conditional) # {}, !.otherLost = @ \/ InFlight(p, Unconditional) # {}]]

Kill == \E p, q \in Processes :
    /\ Fault("kills") /\ Live(p) /\ ~Live(q) /\ Lost(p)
    /\ proc' = [proc EXCEPT ![p] = NewProcess, ![q] = [NewProcess EXCEPT !.phase = "unconfirmed", !.takingOver = TRUE]]

Next ==
    \/ \E p \in Processes, a \in Appends :
          Submit(p, a) \/ SendConditional(p, a) \/ SendUnconditional(p, a) \/ Refuse(p, a)
    \/ \E p \in Processes : Read(p) \/ ReceiveAnswer(p) \/ QueueTimeEnds(p)
    \/ HandleRequest \/ HandleLateRequest \/ Replicate \/ ConnectionLost \/ Kill

Spec == Init /\ [][Next]_vars

(***************************************************************************)
(* What docs/contract.md promises                                          *)
(***************************************************************************)
Fenced == {i \in 1..Len(log) : log[i].kind = "fenced"}

\* "The same MUST hold" (G2) as for `required`: no append is accepted at another offset.
AppendedWhereExpected == \A i \in Fenced : log[i].base = log[i].expected

\* "the append is in the log at the wrong offset, and its producer MUST receive OFFSET_VIOLATION, never success" (G13).
SuccessIsInTheLog == \A a \in Conditional : append[a].result = "success" =>
    \E i \in Fenced : log[i].append = a /\ log[i].base = append[a].expected /\ i <= replicated

TypeOK == \A p \in Processes : proc[p].phase \in {"down", "unconfirmed", "half read", "open"}
=============================================================================
