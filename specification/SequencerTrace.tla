--------------------------- MODULE SequencerTrace ---------------------------
(***************************************************************************)
(* Replays recorded calls and effects of real partition sequencers through *)
(* the process's actions of FencedAppend.tla. Kafka is what the trace      *)
(* says: its variables do not change.                                      *)
(*                                                                         *)
(* A trace is accepted if each of its events is a step of the              *)
(* specification. The specification may allow more than the code does.     *)
(***************************************************************************)
EXTENDS FencedAppend

CONSTANT Traces
VARIABLES trace, at
traceVars == <<vars, trace, at>>

P == CHOOSE p \in Processes : TRUE
TraceInit == Init /\ trace \in 1..Len(Traces) /\ at = 1
Event == Traces[trace][at]
Unchanged == UNCHANGED <<kafka, responses, late, faults, trace>>

\* An append that waits too long, or whose client has disconnected, is answered 6 or not at all.
Cancel(a) == /\ append[a].status = "queued"
               /\ append' = [append EXCEPT ![a] = [@ EXCEPT !.status = "answered", !.result = "try again"]]
               /\ UNCHANGED <<proc, requests>>

Same == UNCHANGED <<proc, append, requests>>

\* The code that the client of an append gets must be one that its result in the specification allows.
Answer(a, code) ==
    CASE append[a].status = "answered" /\ append[a].result = "success" -> code = "success" /\ Same
      [] append[a].status = "answered" /\ append[a].result # "success" -> code # "success" /\ Same
      [] append[a].status = "queued" -> code \in {"try again", "predecessor failed"} /\ Cancel(a)
      [] append[a].status = "in doubt" -> code = "unknown" /\ GiveUp(P, a)
      [] OTHER -> FALSE

Step ==
    LET e == Event
        state == [epoch |-> e.state, batches |-> <<[seq |-> e.next - 1, count |-> 1, base |-> 0]>>]
        published == [epoch |-> e.epoch, base |-> e.base]
    IN  CASE e.name = "submit" -> Submit(P, e.append, e.expected, e.after)
          [] e.name = "read" -> TakeRead(P, e.end, [id \in Ids |-> IF e.state < 0 THEN Unknown ELSE state], published, 1,
                                         0, 0)
          [] e.name = "sent" -> /\ Send(P, e.append)
                                /\ append'[e.append].epoch = e.epoch /\ append'[e.append].seq = e.seq
          [] e.name = "answered" -> TakeAnswer(P, e)
          [] e.name = "lost" -> IF append[e.append].status = "sent" THEN LoseConnection(P, {e.append}) /\ UNCHANGED requests ELSE Same
          [] e.name = "lookup" -> TakeLookup(P, e.append, e.there)
          [] e.name = "mismatch" -> TakeMismatch(P, e.append, e.there)
          [] e.name = "answer" -> Answer(e.append, e.code)

TraceStep == /\ at <= Len(Traces[trace]) /\ Step /\ at' = at + 1 /\ Unchanged
TraceSpec == TraceInit /\ [][TraceStep]_traceVars

Accepted == at <= Len(Traces[trace]) => ENABLED TraceStep
=============================================================================
