"""Conditional writers on raw sockets that continue after every error, and a ledger of their outcomes.

Every value is unique and contains its writer and expected offset. So the log alone shows whether a record is at the
wrong offset, duplicated, or present although refused.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.kit.stage import PATIENCE_SECONDS, Stage
from tests.support.messages import Closed as MessagesClosed
from tests.support.proxy import ProxyProcess
from tests.support.raw import Answer, Closed, Connection, Log, Logged, Producer, batch, produce_request
from tests.support.three_brokers import leaders_listener

OK, TIMED_OUT, POLICY_VIOLATION = 0, 7, 44
#: Errors that a client retries after reading the leader. 3 and 5: a broker does not know the topic or leader yet.
RETRIABLE = frozenset({3, 5, 6})
#: Kafka's refusal before an append while too few replicas are in sync.
NOT_ENOUGH_REPLICAS = 19
_TRIES_MAX = 8
_numbers = itertools.count(1)


def value_of(writer: str, number: int, expected: int | None) -> bytes:
    return f"{writer}/{number}/{'' if expected is None else expected}".encode()


def expected_of(value: bytes) -> int | None:
    stated = value.rpartition(b"/")[2]
    return int(stated) if stated else None


@dataclass
class Ledger:
    """Outcomes of one or several writers."""

    accepted: dict[bytes, int] = field(default_factory=dict)  # value → reported offset
    refused: set[bytes] = field(default_factory=set)
    unknown: set[bytes] = field(default_factory=set)
    violated: dict[bytes, int] = field(default_factory=dict)
    codes: Counter[int] = field(default_factory=Counter)
    retries: Counter[int] = field(default_factory=Counter)
    learned_absent: set[bytes] = field(default_factory=set)  # named writes that a retry reported as refused
    lost: int = 0  # connections

    def sent(self, value: bytes) -> None:
        self.unknown.add(value)

    def note(self, value: bytes, answer: Answer, *, again: bool = False, named: bool = False) -> None:
        """`again`: an earlier attempt has an unknown outcome, and a refusal covers only its own attempt, or every
        attempt of a `named` write."""
        (self.retries if again else self.codes)[answer.error_code] += 1
        message = answer.message or ""
        if answer.error_code == OK:
            self.unknown.discard(value)
            self.accepted[value] = answer.base_offset
        elif message.startswith("OFFSET_VIOLATION"):
            self.unknown.discard(value)
            self.violated[value] = answer.base_offset
        elif answer.error_code == TIMED_OUT or again:
            self.unknown.add(value)
            if named and answer.error_code == POLICY_VIOLATION and "POSSIBLY_YOURS" not in message:
                self.learned_absent.add(value)
        else:
            assert answer.error_code in RETRIABLE | {POLICY_VIOLATION, NOT_ENOUGH_REPLICAS}, answer
            if "POSSIBLY_YOURS" in message:
                return  # one of the proxy's attempts may have been appended
            self.unknown.discard(value)
            self.refused.add(value)

    def take(self, *others: Ledger) -> Ledger:
        """Add other ledgers to this one. Return itself."""
        for each in others:
            self.accepted |= each.accepted
            self.refused |= each.refused
            self.unknown |= each.unknown
            self.violated |= each.violated
            self.codes.update(each.codes)
            self.retries.update(each.retries)
            self.learned_absent |= each.learned_absent
            self.lost += each.lost
        return self

    def __str__(self) -> str:
        return (
            f"{len(self.accepted)} accepted, {len(self.refused)} refused, {len(self.unknown)} unknown, "
            f"{len(self.violated)} violated, {self.lost} connections lost, answers {dict(sorted(self.codes.items()))}, "
            f"to retries {dict(sorted(self.retries.items()))}"
        )

    # ---- against the log

    def misplaced(self, log: Log, topic: str, *, may_lose: bool = False) -> list[bytes]:
        """Records at another offset than expected. Raises AssertionError if a reported outcome is wrong.

        `may_lose`: Kafka lost a part of the log (an unclean election).
        """
        there = offsets(log.batches(topic))
        for value, offset in (self.accepted | self.violated).items():
            assert (may_lose and value not in there) or there.get(value) == offset, (
                f"{value!r} was reported at {offset}, the log has it at {there.get(value)}"
            )
        appeared = self.refused & there.keys()
        assert not appeared, f"refused, and in the log: {appeared}"
        appeared = self.learned_absent & there.keys()
        assert not appeared, f"reported as absent, and in the log: {appeared}"
        unknown = there.keys() - self.accepted.keys() - self.violated.keys() - self.unknown
        assert not unknown, f"no writer wrote {unknown}"
        return [value for value, offset in there.items() if expected_of(value) not in (None, offset)]

    def check(self, log: Log, topic: str, *, may_lose: bool = False) -> None:
        """Accepted records are at their expected offsets; those with unknown outcomes are there or absent."""
        assert not self.violated
        wrong = {value: offset for value, offset in self.accepted.items() if expected_of(value) not in (None, offset)}
        assert not wrong, f"accepted at another offset than expected: {wrong}"
        if not may_lose:
            winners = Counter(self.accepted.values())
            assert not [offset for offset, count in winners.items() if count > 1], "two appends won one offset"
        assert self.misplaced(log, topic, may_lose=may_lose) == []
        check_fences(log.batches(topic))


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


class Writer:
    """Appends conditionally at its last known log end, in a separate thread, until `stop`.

    `chain`: number of batches in flight. `idempotent`: with a producer id. `named`: every write has a write-id. With
    either, batches with unknown outcomes are resent unchanged. Uses the first of `proxies`, and changes to the next one
    when a connection fails. Not `conditional`: as an unconditional producer.
    """

    def __init__(
        self,
        name: str,
        proxies: Sequence[ProxyProcess],
        topic: str,
        *,
        pipeline_key: int = 1,
        idempotent: bool = False,
        named: bool = False,
        conditional: bool = True,
        pause_seconds: float = 0.0,
        timeout_ms: int = 4_000,
    ) -> None:
        self.name = name
        self.topic = topic
        self.ledger = Ledger()
        self._proxies = list(proxies)
        self._pipeline = pipeline_key
        self._idempotent = idempotent
        self._named = named
        self._conditional = conditional
        self._pause_seconds = pause_seconds
        self._timeout_ms = timeout_ms
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._end = 0
        self._number = 0
        self._producer: Producer | None = None
        self._again: list[tuple[bytes, bytes]] = []  # value and batch
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), f"{self.name} hangs"
        self.raise_failure()

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                with contextlib.suppress(Closed, MessagesClosed, OSError), self._connect() as connection:
                    while not self._stop.is_set():
                        if not self._round(connection):
                            break
                if not self._stop.is_set():
                    self._proxies.append(self._proxies.pop(0))
                    time.sleep(0.05)
        except BaseException as failure:
            self._failure = failure

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
        for value, _ in fresh:
            self.ledger.sent(value)
        answered = 0
        ends: list[int] = []
        read_again = False
        try:
            wire = [
                connection.frame(produce_request({self.topic: {0: records}}, -1, self._timeout_ms), 9)[1]
                for _, records in requests
            ]
            connection.socket.sendall(b"".join(wire))
            for value, records in requests:
                answer = connection.receive_produce()[1][self.topic, 0]
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
            self.ledger.lost += 1
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
        self.ledger.note(value, answer, again=again or (persists and answer.error_code != OK), named=self._named)
        if again:
            if answer.error_code == OK or (answer.error_code == POLICY_VIOLATION and not persists):
                self._again.remove((value, records))
            elif self.ledger.retries.total() % _TRIES_MAX == 0 and not persists:
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
        each.join()


def await_more(stage: Stage, topic: str, writers: Sequence[Writer], appends: int) -> None:
    """Of all together: the winner is random, and pipelined appends win seldom. A failed writer ends the wait."""
    end = stage.log.end(topic)

    def moved() -> bool:
        for each in writers:
            each.raise_failure()
        return stage.log.end(topic) >= end + appends

    stage.until(moved, f"{appends} more appends to {topic}")


def append_at_the_end(
    log: Log, proxy: ProxyProcess, topic: str, name: str, ledger: Ledger, *, within_seconds: float = PATIENCE_SECONDS
) -> int:
    """The next correct append succeeds without a reset; return its offset.

    Error 6 is permitted while a leader moves; 44 only if other appends moved the log end.
    """
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
