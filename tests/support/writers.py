"""Conditional writers on raw sockets that continue after every error, and the history of their outcomes.

Every value is unique and contains its writer and expected offset.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.kit.checker import verify
from tests.kit.history import OK as ACCEPTED
from tests.kit.history import REFUSED, TRY_AGAIN, UNKNOWN, VIOLATION, History, Manner, Operation, Reported, listed
from tests.kit.stage import PATIENCE_SECONDS, Stage
from tests.kit.threads import Worker
from tests.support.messages import Closed as MessagesClosed
from tests.support.proxy import ProxyProcess
from tests.support.raw import Answer, Closed, Connection, Log, Logged, Producer, batch
from tests.support.three_brokers import leaders_listener

OK, NOT_LEADER, TIMED_OUT, POLICY_VIOLATION = 0, 6, 7, 44
#: Errors that a client retries after reading the leader. 3 and 5: a broker does not know the topic or leader yet.
RETRIABLE = frozenset({3, 5, NOT_LEADER})
#: Kafka's refusal before an append while too few replicas are in sync.
NOT_ENOUGH_REPLICAS = 19
#: Refusals of the proxy, and of Kafka for a batch's content.
_REFUSALS = frozenset({29, 32, POLICY_VIOLATION, 87})
_MISMATCH = re.compile(r"OFFSET_MISMATCH \S+ \S+ expected=(-?\d+) actual=(-?\d+)( record=\d+)?( POSSIBLY_YOURS)?")
_VIOLATION = re.compile(r"^OFFSET_VIOLATION .*\bappended_at=(\d+)")
_TRIES_MAX = 8
_numbers = itertools.count(1)


def value_of(writer: str, number: int, expected: int | None) -> bytes:
    return f"{writer}/{number}/{'' if expected is None else expected}".encode()


def expected_of(value: bytes) -> int | None:
    stated = value.rpartition(b"/")[2]
    return int(stated) if stated else None


def reported_by(answer: Answer) -> Reported:
    """The outcome in a Produce response, for one attempt."""
    message = answer.message or ""
    code = answer.error_code
    if code == OK:
        return Reported(ACCEPTED, offset=answer.base_offset)
    if code in _REFUSALS:
        return reported_by_message(message, code)
    retriable = code == NOT_ENOUGH_REPLICAS or (code == NOT_LEADER and "TRY_AGAIN" in message)
    return Reported(TRY_AGAIN if retriable else UNKNOWN, code=code, detail=message[:200])


def reported_by_message(message: str, code: int | str) -> Reported:
    """The outcome of a refusal with a visible message."""
    more: dict[str, Any] = {"code": code, "detail": message[:200]}
    if found := _VIOLATION.match(message):
        return Reported(VIOLATION, offset=int(found[1]), **more)
    found = _MISMATCH.search(message)
    # A contradictory expected offset gets another number: the offset that this record would have.
    actual = int(found[2]) if found and not found[3] else None
    yours = found[4] is not None if found else None
    return Reported(REFUSED, actual=actual, possibly_yours=yours, **more)


class Ledger(History):
    """The history of one topic, by value. The topic's name states its check."""

    def __init__(self, topic: str, *, may_lose: bool = False) -> None:
        super().__init__()
        self.name = topic
        self.topic(topic, "required" if "required" in topic else "true", may_lose=may_lose)
        self.by_value: dict[bytes, Operation] = {}

    def sent(
        self,
        value: bytes,
        *more: bytes,
        named: bool = False,
        idempotent: bool = False,
        pipeline_key: str = "",
    ) -> None:
        """`more` – values of further records of the batch."""
        self.by_value[value] = self.call(
            value.decode().rsplit("/", 2)[0],
            self.name,
            [each.decode() for each in (value, *more)],
            expected=expected_of(value),
            manner=Manner(named=named, idempotent=idempotent),
            pipeline_key=pipeline_key or None,
        )

    def note(self, value: bytes, answer: Answer, *, again: bool = False) -> None:
        """`again`: an earlier attempt has an unknown outcome. A refusal then covers every attempt of a named write, but
        of others only its own, unless it excludes that an earlier one was appended."""
        operation = self.by_value[value]
        operation.resends = operation.resends or again
        reported = reported_by(answer)
        refused = reported.outcome == REFUSED and not reported.possibly_yours
        if again and not operation.named:
            refused = refused and (answer.message or "").startswith("OFFSET_MISMATCH")
        if not again and answer.error_code not in (OK, TIMED_OUT):
            assert answer.error_code in RETRIABLE | {POLICY_VIOLATION, NOT_ENOUGH_REPLICAS}, answer
            if answer.error_code != POLICY_VIOLATION:
                reported = replace(reported, outcome=TRY_AGAIN)
        elif again and reported.outcome == TRY_AGAIN:
            reported = replace(reported, outcome=UNKNOWN)
        if reported.outcome == REFUSED and not refused:
            reported = replace(reported, outcome=UNKNOWN)
        self.reported(operation, reported)

    def append(self, connection: Connection, value: bytes) -> Answer:
        """Append it with the expected offset that it states."""
        self.sent(value)
        answer = connection.append(self.name, batch(value, expected=expected_of(value)))
        self.note(value, answer)
        return answer

    def accepted(self, writer: str) -> int:
        return self.counts()[writer, ACCEPTED]

    def is_unknown(self, value: bytes) -> bool:
        return self.by_value[value].outcome == UNKNOWN

    @property
    def lost(self) -> int:
        return sum(kind == "connection lost" for _, kind, _ in self.events)

    def __str__(self) -> str:
        return f"{listed(self.outcomes())}; {self.lost} connections lost; errors {listed(self.codes())}"

    def check(self, log: Log) -> None:
        self.read_log(log, self.name)
        verify(self)
        if self.topics[self.name].mode == "required":
            check_fences(log.batches(self.name))

    def misplaced(self, log: Log | None = None) -> int:
        """Records at another offset than expected, by this log, or the one that `check` has read."""
        if log is not None:
            self.read_log(log, self.name)
        entries = self.logs[self.name, 0]
        return sum(expected_of((each.id or "").encode()) not in (None, each.offset) for each in entries)


def offsets(batches: Iterable[Logged]) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for each in batches:
        for delta, value in enumerate(each.values):
            assert value is not None
            assert value not in found, f"{value!r} is in the log twice"
            found[value] = each.base_offset + delta
    return found


def check_fences(batches: Sequence[Logged]) -> None:
    """Offset and sequence advanced together: no new fence base was needed."""
    fences = {(each.producer_id, each.producer_epoch, each.base_offset - each.base_sequence) for each in batches}
    assert len(fences) <= 1, f"(producer id, epoch, sequence offset): {fences}"
    assert all(epoch == 0 and sequence_offset == 0 for _, epoch, sequence_offset in fences), fences


class Writer(Worker):
    """Appends conditionally at its last known log end.

    `pipeline_key`: number of batches in flight. `idempotent`: with a producer id. `named`: every write has a write-id.
    With either, batches with unknown outcomes are resent unchanged. Several writers may share a ledger. Uses the first
    of `proxies`, and changes to the next one when a connection fails. Not `conditional`: as an unconditional producer.
    """

    def __init__(
        self,
        name: str,
        proxies: Sequence[ProxyProcess],
        ledger: Ledger,
        *,
        pipeline_key: int = 1,
        idempotent: bool = False,
        named: bool = False,
        conditional: bool = True,
        pause_seconds: float = 0.0,
        timeout_ms: int = 4_000,
    ) -> None:
        super().__init__(name)
        self.topic = ledger.name
        self.ledger = ledger
        self._proxies = list(proxies)
        self._pipeline = pipeline_key
        self._idempotent = idempotent
        self._named = named
        self._conditional = conditional
        self._pause_seconds = pause_seconds
        self._timeout_ms = timeout_ms
        self._end = 0
        self._number = 0
        self._retries = itertools.count(1)
        self._producer: Producer | None = None
        self._again: list[tuple[bytes, bytes]] = []  # value and batch

    def work(self) -> None:
        while not self.over.is_set():
            with contextlib.suppress(Closed, MessagesClosed, OSError), self._connect() as connection:
                while not self.over.is_set():
                    if not self._round(connection):
                        break
            if not self.over.is_set():
                self._proxies.append(self._proxies.pop(0))
                time.sleep(0.05)

    def _connect(self) -> Connection:
        """Connect to the leader that the proxy reports."""
        proxy = self._proxies[0]
        address = leaders_listener(proxy, self.topic)
        connection = Connection(address, timeout_seconds=self._timeout_ms / 1000 + 2, enter=proxy.enter)
        if self._idempotent and self._producer is None:
            try:
                self._producer = connection.init_producer_id()
            except BaseException:
                connection.close()
                raise
        return connection

    def _round(self, connection: Connection) -> bool:
        """False: read the leader again."""
        again = self._again[: self._pipeline]
        fresh = [] if again else self._new_batches()
        requests = again or fresh
        pipeline_key = f"{self.name}/{self._number}" if self._pipeline > 1 else ""
        for value, _ in fresh:
            self.ledger.sent(value, named=self._named, idempotent=self._idempotent, pipeline_key=pipeline_key)
        answered = 0
        ends: list[int] = []
        read_again = False
        try:
            batches = [records for _, records in requests]
            answers = connection.pipeline(self.topic, batches, timeout_ms=self._timeout_ms)
            for (value, records), answer in zip(requests, answers, strict=True):
                answered += 1
                self._record(value, records, answer, again=bool(again))
                read_again = read_again or answer.error_code not in (OK, POLICY_VIOLATION)
                if answer.error_code == OK:
                    ends.append(answer.base_offset + 1)
                elif answer.error_code == POLICY_VIOLATION and answer.base_offset >= 0:
                    ends.append(answer.base_offset)
            if ends:
                self._end = max(ends)
        except (Closed, OSError):
            self.ledger.event("connection lost", self.name)
            if not again:
                for value, records in fresh[answered:]:
                    self._unresolved(value, records)
            raise
        time.sleep(0.05 if read_again else self._pause_seconds)
        return not read_again

    def _new_batches(self) -> list[tuple[bytes, bytes]]:
        made = []
        for i in range(self._pipeline):
            self._number += 1
            expected = self._end + i if self._conditional else None
            value = value_of(self.name, self._number, expected)
            producer = None
            if self._producer is not None:
                producer = self._producer
                self._producer = producer._replace(sequence=producer.sequence + 1)
            name = value if self._named else None
            made.append((value, batch(value, expected=expected, producer=producer, write_id=name)))
        return made

    def _record(self, value: bytes, records: bytes, answer: Answer, *, again: bool) -> None:
        # An unconditional idempotent producer never skips a sequence: a gap would end it.
        persists = self._idempotent and not self._conditional
        self.ledger.note(value, answer, again=again or (persists and answer.error_code != OK))
        if again:
            if answer.error_code == OK or (answer.error_code == POLICY_VIOLATION and not persists):
                self._again.remove((value, records))
            elif next(self._retries) % _TRIES_MAX == 0 and not persists:
                self._again.clear()  # the check of the log determines their outcome
        elif answer.error_code == TIMED_OUT or (persists and answer.error_code != OK):
            self._unresolved(value, records)

    def _unresolved(self, value: bytes, records: bytes) -> None:
        if self._idempotent or self._named:
            self._again.append((value, records))


@contextlib.contextmanager
def writing(*writers: Writer) -> Iterator[Sequence[Writer]]:
    """Run the writers; check afterwards that none failed or hangs."""
    for each in writers:
        each.start()
    try:
        yield writers
    finally:
        for each in writers:
            each.stop()
    for each in writers:
        each.join(PATIENCE_SECONDS)


def await_more(stage: Stage, writers: Sequence[Writer], appends: int) -> None:
    """Of all together: the winner is random, and pipelined appends win seldom. A failed writer ends the wait."""
    topic = writers[0].topic
    end = stage.log.end(topic)

    def moved() -> bool:
        for each in writers:
            each.raise_error()
        return stage.log.end(topic) >= end + appends

    stage.until(moved, f"{appends} more appends to {topic}")


#: Settings of writers that compete for the same offsets.
CONDITIONAL: Mapping[str, Mapping[str, Any]] = {
    "single": {},
    "chain": {"pipeline_key": 6},
    "idempotent": {"idempotent": True},
    "idempotent-chain": {"pipeline_key": 4, "idempotent": True},
    "named": {"named": True},
    "named-chain": {"pipeline_key": 4, "named": True, "idempotent": True},
}
#: These expect no offset.
UNCONDITIONAL: Mapping[str, Mapping[str, Any]] = {
    "plain": {"conditional": False, "pause_seconds": 0.01},
    "own-id": {"conditional": False, "idempotent": True, "pause_seconds": 0.01},
}


@dataclass(frozen=True)
class Load:
    stage: Stage
    ledger: Ledger
    writers: Sequence[Writer]

    def more(self, appends: int = 10) -> None:
        await_more(self.stage, self.writers, appends)


@contextlib.contextmanager
def under_load(
    stage: Stage,
    topic: str,
    kinds: Mapping[str, Mapping[str, Any]] = CONDITIONAL,
    *,
    proxies: Sequence[ProxyProcess] = (),
) -> Iterator[Load]:
    """Run writers of these kinds during the block, repair what it broke, and compare their responses with the log.

    Every second one begins with the last proxy.
    """
    ledger, there = Ledger(topic), list(proxies or stage.proxies)
    order = itertools.cycle((there, there[::-1]))
    load = Load(stage, ledger, [Writer(kind, next(order), ledger, **settings) for kind, settings in kinds.items()])
    with writing(*load.writers):
        load.more(20)
        yield load
        stage.mend()
        load.more(60)
    stage.await_in_sync(topic, len(stage.partition(topic)["ReplicaNodes"]))
    for proxy in stage.proxies:
        append_at_the_end(stage.log, proxy, "after", ledger)
    ledger.check(stage.log)
    assert ledger.outcomes()[ACCEPTED]
    assert ledger.outcomes()[REFUSED]


def append_at_the_end(
    log: Log, proxy: ProxyProcess, name: str, ledger: Ledger, *, within_seconds: float = PATIENCE_SECONDS
) -> int:
    """The next correct append succeeds without a reset; return its offset.

    Error 6 is permitted while a leader moves; 44 only if other appends moved the log end.
    """
    topic = ledger.name
    deadline = time.monotonic() + within_seconds
    last: object = None
    while True:
        assert time.monotonic() < deadline, f"{topic} accepts no append through {proxy.bootstrap}; last: {last}"
        end = log.end(topic)
        value = value_of(f"{name}-{proxy.port}", next(_numbers), end)
        ledger.sent(value)
        try:
            address = leaders_listener(proxy, topic)
            with Connection(address, timeout_seconds=10.0, enter=proxy.enter) as connection:
                answer = connection.append(topic, batch(value, expected=end))
        except (OSError, Closed, MessagesClosed) as error:
            last = error
            time.sleep(0.1)
            continue
        last = answer
        ledger.note(value, answer)
        if answer.error_code == OK:
            assert answer.base_offset == end
            return end
        assert answer.error_code != POLICY_VIOLATION or answer.base_offset != end, answer
        time.sleep(0.1)
