"""A lock with a lease and a token: docs/recipes/lock.md has the format and the guarantee.

Leases are compared without synchronized clocks:

1. The holder counts its lease from before it sent its last record.
2. A waiter counts it from when it read that record, which is later. It takes the lock only after a read that began
   after the lease, and only if the log still ends there.
3. So, while clocks run equally fast, the waiter's lease ends after the holder's. A process that is stopped may
   continue after its lease. Its token protects other systems: it is smaller than the next holder's.
"""

from __future__ import annotations

import itertools
import json
from typing import NamedTuple

from fencepost._log_writer import LogWriterBase
from fencepost._steps import Pause, Steps, now
from fencepost.errors import LockHeldError, LockLostError, OffsetMismatchError
from fencepost.recipes._recipe import Method, Recipe
from fencepost.records import LogRecord, Record

ACQUIRE, RENEW, RELEASE = "acquire", "renew", "release"
#: Reads of a waiter per lease.
_READS_PER_LEASE = 20


class Holder(NamedTuple):
    """The holder that the log states. `token`: the offset of its first record."""

    token: int
    name: str
    lease_seconds: float


class LockBase(Recipe):
    """A lock that one process holds at a time, for `lease_seconds` after each `acquire` or `renew`.

    `log`: a LogWriter that nothing else uses, of a topic with `fencepost.check.expected.offsets=required`. `name`: of
    this process, for others to read. See docs/recipes/lock.md.
    """

    FORMAT = "lock/1"

    def __init__(self, log: LogWriterBase, name: str, *, lease_seconds: float = 10.0) -> None:
        super().__init__(log)
        if lease_seconds <= 0:
            raise ValueError(f"lease_seconds={lease_seconds} must be > 0")
        self.name = name
        self.lease_seconds = lease_seconds
        #: Of this process, from `acquire` until the lock is released or known to be lost. Greater than all before.
        self.token: int | None = None
        #: The newest holder that was read; None if the lock was released.
        self.holder: Holder | None = None
        self._lease_end = self._observed = 0.0

    @property
    def has_lease(self) -> bool:
        """Whether this process holds the lock by its own clock. It may be stopped right after the answer."""
        return self.token is not None and now() < self._lease_end

    def _acquire(self, timeout_seconds: float | None = None) -> Steps[int]:
        """Wait until the lock is free, then take it. Returns the token.

        `timeout_seconds`: by default `retry.total_seconds`. Raises LockHeldError after it, RuntimeError if this process
        holds the lock, and the errors of LogWriter. After InDoubtError, acquire again: it may have to wait for a lease.
        """
        if self.has_lease:
            raise RuntimeError(f"{self._where}: this process holds the lock (release it first)")
        self.token = None
        deadline = now() + (self._log.retry.total_seconds if timeout_seconds is None else timeout_seconds)
        for tries in itertools.count(1):
            begun = now()
            yield from self._read(self._passed)
            holder = self.holder
            if holder is None or begun >= self._observed + holder.lease_seconds:
                try:
                    self.token = yield from self._stated(ACQUIRE, None)
                except OffsetMismatchError:
                    pause = self._log.retry.jittered(tries)
                else:
                    self.holder = Holder(self.token, self.name, self.lease_seconds)
                    return self.token
            else:
                pause = holder.lease_seconds / _READS_PER_LEASE
            if now() + pause >= deadline:
                raise LockHeldError(self._log.topic, self._log.partition, *(holder or (None, None))[:2])
            yield Pause(pause)
        raise AssertionError("unreachable")

    acquire = Method(_acquire)

    def _renew(self) -> Steps[None]:
        """Prolong the lease by `lease_seconds` from now. The token stays. Call it several times per lease.

        Raises LockLostError if another process has acquired the lock, or this one has not. After InDoubtError, renew
        again.
        """
        yield from self._kept(RENEW)

    renew = Method(_renew)

    def _release(self) -> Steps[None]:
        """Give the lock back before its lease ends. Raises LockLostError as `renew`."""
        yield from self._kept(RELEASE)
        self.token = self.holder = None

    release = Method(_release)

    def _kept(self, kind: str) -> Steps[None]:
        """Append a record of the holder. Reading never passes another's `acquire` while this process has a token."""
        for tries in itertools.count(1):
            if self.token is None:
                raise self._lost(None)
            try:
                if not self._log.at_end:
                    yield from self._read(self._passed)
                if self.holder is None or self.holder.token != self.token:  # a release with unknown outcome is there
                    if kind == RELEASE:
                        return
                    self.token = None
                    raise self._lost(self.holder)
                yield from self._stated(kind, self.token)
                return
            except OffsetMismatchError:  # another's record, or an own one whose outcome was unknown
                if tries >= _READS_PER_LEASE:
                    raise

    def _stated(self, kind: str, token: int | None) -> Steps[int]:
        """Append a record. The lease counts from before it is sent."""
        begun = now()
        lease = {"lease_ms": int(self.lease_seconds * 1000)} if kind != RELEASE else {}
        value = {"holder": self.name, **lease, **({} if token is None else {"token": token})}
        offset = yield from self._write([Record(json.dumps(value).encode(), headers=(self._header(kind),))])
        self._lease_end, self._observed = begun + self.lease_seconds, now()
        return offset

    def _passed(self, record: LogRecord) -> None:
        kind = self._kind(record)
        try:
            stated = json.loads(record.value or b"")
            name, token = str(stated["holder"]), record.offset if kind == ACQUIRE else int(stated["token"])
            lease_seconds = 0.0 if kind == RELEASE else int(stated["lease_ms"]) / 1000
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise self._foreign(record, f"it is no record of a lock ({error!r})") from None
        if kind == ACQUIRE:
            holder = Holder(token, name, lease_seconds)
            if self.token is not None:
                self.token = None
                raise self._lost(holder)
        elif self.holder is None or token != self.holder.token or kind not in {RENEW, RELEASE}:
            raise self._foreign(record, f"it is of token {token}, which does not hold the lock")
        else:
            holder = self.holder._replace(lease_seconds=lease_seconds)
        self.holder = None if kind == RELEASE else holder
        self._observed = now()

    def _lost(self, holder: Holder | None) -> LockLostError:
        return LockLostError(self._log.topic, self._log.partition, *(holder or (None, None))[:2])

    @property
    def _where(self) -> str:
        return f"{self._log.topic}-{self._log.partition}"
