"""Promises that hold in every run: the clients' history compared with the brokers' final logs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fencepost_policies.append import Check
from fencepost_proxy.types import TopicPartition
from tests.simulation.atomic import REFUSED
from tests.simulation.broker import LogBatch, Partition, is_commit
from tests.simulation.clients import RETRIABLE
from tests.simulation.clock import Connection
from tests.simulation.history import Try, Write
from tests.simulation.world import TOPIC, Proxy, World
from tests.support.sequencer_view import view_of
from tests.support.under_way import left_under_way

_ACTUAL = re.compile(r"^OFFSET_MISMATCH .*? actual=(-?\d+)( POSSIBLY_YOURS(?:: .*)?)?$")
_APPENDED_AT = re.compile(r"OFFSET_VIOLATION .* appended_at=(\d+)")
_HEADER_BYTES = 61
REFUSED_COMMIT = frozenset(REFUSED.values())


@dataclass(frozen=True)
class Appended:
    partition: Partition
    batch: LogBatch
    compacted: bool = False


def check(world: World) -> list[str]:
    """All violations, as sentences. Empty: the run is good."""
    landings = _landings(world)
    groups: dict[bytes, list[Write]] = {}
    for write in world.history.writes:
        groups.setdefault(write.payload, []).append(write)
    found = list(world.history.broken)
    for payload, writes in groups.items():
        found += _check_group(world, writes, landings.get(payload, []))
    for attempt in world.history.tries:
        found += _check_try(world, attempt)
    found += _check_pipelines(world, landings)
    found += _check_independent(world)
    found += _check_transactions(world)
    if world.scenario.airtight or world.scenario.unviolated:
        found += [f"FALSE VIOLATION: {v}" for v in world.history.violations]
    found += [
        f"CLOSED: a connection, for {fault.__name__}: {reason}"
        for reason, fault in world.history.closings
        if fault is not None and "acks=0" not in reason
    ]
    return found


def _check_transactions(world: World) -> list[str]:
    """A committed transaction has every conditional append at its offset; any other has nothing."""
    committed = _committed(world)
    found = []
    for transaction in world.history.transactions:
        there = [write for write in transaction.writes if write.payload in committed]
        reported = [end for end in transaction.ends if end.commits]
        codes = [code for end in reported for code in end.codes]
        for write in there:
            at = committed[write.payload]
            if write.expected is not None and at != write.expected:
                found.append(f"COMMITTED AT WRONG OFFSET: {write} lies at {at}, in a {transaction}")
        if there or 0 in codes:
            for write in transaction.writes:
                given_up = any(other.name == write.name and other.payload in committed for other in there)
                if write.expected is None or write.payload in committed or given_up:
                    continue
                if _was_failed(world, write):
                    last = write.tries[-1]
                    found.append(f"COMMITTED INCOMPLETE: {write} got {last.message}, in a {transaction}")
        if 0 in codes:
            missing = [w for w in transaction.writes if _got_success(w) and w.payload not in committed]
            found += [f"NOT COMMITTED: {write}, although a {transaction} committed" for write in missing]
        refused_it = any(code in REFUSED_COMMIT for code in codes)
        calm = not world.scenario.faults_max and not world.scenario.lossy_reads
        if refused_it and calm and all(map(_got_success, transaction.writes)):
            found.append(f"COMMIT REFUSED WITHOUT CAUSE: a {transaction}, of which all was appended")
        if there and (not reported or any(code in REFUSED_COMMIT for code in codes)):
            found.append(f"COMMITTED DESPITE REFUSAL: a {transaction} was answered {codes}")
    return found


def _committed(world: World) -> dict[bytes, int]:
    """Batches before a commit marker: payload → offset."""
    found: dict[bytes, int] = {}
    for partition in world.cluster.partitions.values():
        still_open: dict[int, list[LogBatch]] = {}
        for each in world.cluster.final_log(partition):
            if not each.header.is_transactional:
                continue
            if not each.header.is_control:
                still_open.setdefault(each.header.producer_id, []).append(each)
                continue
            for batch in still_open.pop(each.header.producer_id, []):
                if is_commit(each.data):
                    found[batch.data[_HEADER_BYTES:]] = batch.base
    return found


def _got_success(write: Write) -> bool:
    return any(attempt.result is not None and attempt.result.error_code == 0 for attempt in write.tries)


def _was_failed(world: World, write: Write) -> bool:
    """Whether the producer last got a refusal or an unknown outcome. After a crash, unknown ones do not count:
    the client may commit without knowing.
    """
    last = write.tries[-1] if write.tries else None
    if last is None or last.result is None:
        return False
    if last.result.error_code in RETRIABLE:
        return not {"crash", "roll", "state", "blind"} & set(world.scenario.faults)
    return True


def _landings(world: World) -> dict[bytes, list[Appended]]:
    found: dict[bytes, list[Appended]] = {}

    def record(partition: Partition, batch: LogBatch, *, compacted: bool = False) -> None:
        found.setdefault(batch.data[_HEADER_BYTES:], []).append(Appended(partition, batch, compacted))

    for partition in (*world.cluster.retired, *world.cluster.partitions.values()):
        for batch in world.cluster.final_log(partition):
            if batch.header.record_count == batch.count and len(batch.data) > _HEADER_BYTES:
                record(partition, batch)
    for partition, batch in world.history.compacted:
        record(partition, batch, compacted=True)
    return found


def checks_during(world: World, topic: str, since: float, until: float) -> set[Check]:
    """Checks that may apply to a topic in that time: the last acknowledged one, and those requested since."""
    if topic != TOPIC or not world.scenario.managed:
        return {world.checks[topic]}
    check_changes = [s for s in world.history.check_changes if s.queried_at <= until]
    reported = [s for s in check_changes if s.reported_at <= since]
    last = max(reported, key=lambda s: s.reported_at, default=None)
    found = {s.check for s in check_changes if last is None or s.queried_at >= last.queried_at}
    return found if last is not None else found | {Check.OFF}


def _checks_of(world: World, attempt: Try) -> set[Check]:
    until = float("inf") if attempt.answered_at is None else attempt.answered_at
    return checks_during(world, attempt.write.partition.topic, attempt.sent_at, until)


def _may_be_unchecked(world: World, write: Write) -> bool:
    """Whether some attempt may have been relayed unchecked."""
    return any(Check.OFF in _checks_of(world, attempt) for attempt in write.tries)


def refused(attempt: Try) -> bool:
    """Whether the response says that this attempt appended nothing."""
    result = attempt.result
    if result is None:
        return False
    if result.error_code == 44:
        # POSSIBLY_YOURS refers to an earlier attempt: this one appended nothing.
        return bool(attempt.message) and "OFFSET_VIOLATION" not in attempt.message
    if result.error_code == 6:
        return result.base_offset == -1
    if result.error_code == -1:  # inconclusive from Kafka; for a conditional append the log was read
        return attempt.write.expected is not None and attempt.write.kind != "transactional"
    return result.error_code in (32, 87, 45, 47, 48, 51, 2, 3, 10, 19)


def _check_group(world: World, writes: list[Write], appended_batch: list[Appended]) -> list[str]:
    """Check writes with equal records: one original and its copies."""
    found = []
    first = writes[0]
    tries = [attempt for write in writes for attempt in write.tries if not write.bypass]
    if any(write.bypass for write in writes):
        return []
    where = (
        ", ".join(f"{each.batch.base} of {each.partition.topic_id.int % 1000}" for each in appended_batch) or "nowhere"
    )
    lossy = any(p.lost_by_unclean for p in (*world.cluster.retired, *world.cluster.partitions.values()))
    lost_at = _last_loss(world)
    for write in writes:
        for attempt in write.tries:
            result = attempt.result
            if result is None or result.error_code != 0:
                continue
            is_checked = Check.OFF not in _checks_of(world, attempt)
            if is_checked and write.expected is not None and result.base_offset != write.expected:
                found.append(f"FALSE SUCCESS: {write} got 0 at {result.base_offset}")
            checked = write.expected is not None or write.honest
            if (
                checked
                and (not lossy or attempt.sent_at > lost_at)
                and result.base_offset not in [each.batch.base for each in appended_batch]
            ):
                found.append(f"FALSE SUCCESS: {write} got 0 at {result.base_offset}, but it lies {where}")
    reported = [w for w in writes if any(t.result is not None and t.result.error_code == 0 for t in w.tries)]
    if len(reported) > 1 and not _alike(world, reported):
        found.append(f"TWO SUCCESSES: {' and '.join(map(str, reported))}, one batch")
    possible = [attempt for attempt in tries if not refused(attempt)]
    if len(appended_batch) > len(possible):
        codes = [(a.result.error_code, a.message) if a.result else None for a in tries]
        found.append(f"REFUSED BUT APPENDED: {first} lies {where}, its attempts got {codes}")
    once = first.expected is not None or (first.kind == "idempotent" and _kafka_remembers(world))
    single = first.kind == "idempotent" and len(writes) == 1
    if any(_may_be_unchecked(world, write) for write in writes) and not single:
        once = False
    if (
        once
        and first.honest
        and len(appended_batch) > 1
        and len({id(each.partition) for each in appended_batch}) < len(appended_batch)
    ):
        found.append(f"APPENDED TWICE: {first} lies {where}")
    if world.scenario.airtight and first.expected is not None:
        elsewhere = [each.batch.base for each in appended_batch if each.batch.base != first.expected]
        found += [f"WRONG OFFSET: {first} lies at {base}" for base in elsewhere]
    if first.forbidden and (reported or appended_batch):
        found.append(f"NOT REFUSED: {first} is forbidden, and lies {where}")
    if not lossy:
        found += [each for write in writes for each in _check_refusals(world, write, appended_batch)]
    for attempt in tries:
        if attempt.result is None:
            continue
        if not lossy:
            found += _check_mismatch(attempt, appended_batch)
        violation = _APPENDED_AT.search(attempt.message)
        if violation and not attempt.message.startswith("PREDECESSOR_FAILED") and not lossy:
            at = int(violation.group(1))
            if at not in [each.batch.base for each in appended_batch]:
                found.append(f"WRONG OFFSET REPORTED: {first} was reported at {at}, but lies {where}")
    return found


def _last_loss(world: World) -> float:
    """From then on, success means that the batch is in the log. Only where no old leader lives on, from which the proxy
    could believe that nothing has changed."""
    partitions = world.cluster.partitions.values()
    if {"pause", "move"} & set(world.scenario.faults):
        return float("inf")
    return max((each.lost_at for each in partitions if each.lost_by_unclean), default=float("inf"))


def _check_refusals(world: World, write: Write, appended_batch: list[Appended]) -> list[str]:
    """A transactional batch is identified by its sequence: if it was appended, it is never refused."""
    forgetful = world.scenario.proxies > 1 or {"crash", "roll"} & set(world.scenario.faults)
    if write.kind != "transactional" or forgetful or not appended_batch:
        return []
    last = write.tries[-1]
    if not refused(last) or last.result is None or last.result.error_code == 6 or "POSSIBLY_YOURS" in last.message:
        return []
    return [f"RETRY REFUSED: {write} lies at {appended_batch[0].batch.base} and got {last.message}"]


def _check_mismatch(attempt: Try, appended_batch: list[Appended]) -> list[str]:
    """A mismatch must report equal records at the expected offset: an earlier attempt."""
    reported = _ACTUAL.match(attempt.message)
    write = attempt.write
    if reported is None or write.expected is None or int(reported.group(1)) <= write.expected or write.forbidden:
        return []
    there = [each for each in appended_batch if each.batch.base == write.expected and _readable(each)]
    if not there:
        return []
    if write.write_id is not None and write.honest and "too old for a retry" not in attempt.message:
        return [f"RETRY REFUSED: {write} lies there and names itself, an attempt got {attempt.message}"]
    if reported.group(2) is None:
        return [f"POSSIBLY_YOURS MISSING: equal records lie at {write.expected}, {write} got {attempt.message}"]
    return []


def _readable(appended: Appended) -> bool:
    """Whether no reader can have missed deleted records."""
    partition = appended.partition
    if appended.compacted:
        return False
    start = min(batch.base for replica in partition.replicas.values() for batch in replica.batches)
    return not partition.deleted and all(r.highest_start <= start for r in partition.replicas.values())


def _alike(world: World, reported: list[Write]) -> bool:
    """Known limit of LogAppendTime topics: two processes send equal batches without write-id, and neither Kafka's
    response nor the log shows whose batch is there. Both clients get success.
    """
    proxies = {t.proxy for w in reported for t in w.tries if t.result is not None and t.result.error_code == 0}
    return world.scenario.log_append_time and len(proxies) > 1 and all(w.write_id is None for w in reported)


def _kafka_remembers(world: World) -> bool:
    """Whether Kafka deduplicates reliably in this scenario, and no process forgets producers."""
    forgetful = {
        *("expire", "kill", "move", "crash", "delete", "recreate", "freeze"),
        *("compact", "reassign", "roll", "zombie"),
    }
    return not forgetful & set(world.scenario.faults) and world.scenario.proxies == 1


def _check_try(world: World, attempt: Try) -> list[str]:
    result, write = attempt.result, attempt.write
    if result is None or attempt.answered_at is None or write.bypass:
        return []
    found = []
    if world.scenario.name == "retries" and "OFFSET_MISMATCH" in attempt.message and attempt is not write.tries[0]:
        appended_before = any(t.result is None for t in write.tries) and "POSSIBLY_YOURS" in attempt.message
        if appended_before and write.honest and write.records[43:51] != b"\xff" * 8:
            found.append(f"RETRY REFUSED: {write} got {attempt.message}, and the process had its acknowledgement")
    checks = _checks_of(world, attempt)
    fenced = Check.OFF not in checks and (write.expected is not None or write.kind == "unconditional")
    fenced = fenced and write.kind != "transactional"
    if result.error_code == 45 and fenced and not _after_own_45(world, attempt):
        found.append(f"BARE 45: {write} got 45")
    loose = write.expected is None or write.kind == "transactional"
    if result.error_code == 0 and checks == {Check.REQUIRED} and loose:
        found.append(f"NOT REFUSED: {write} on a topic that requires expectations")
    if result.error_code == 44 and checks == {Check.OFF}:
        found.append(f"UNCHECKED BUT REFUSED: {write} on a topic that is not checked got {attempt.message}")
    reported = _ACTUAL.match(attempt.message)
    if reported and "record=" not in attempt.message:
        actual = int(reported.group(1))
        ends = _ends(world, write, attempt.sent_at, attempt.answered_at)
        if actual not in ends:
            found.append(f"WRONG LOG END: {write} got actual={actual} where the log ended at {sorted(ends)}")
    return found


def _after_own_45(world: World, attempt: Try) -> bool:
    """The pipeline's first batch has its own sequence, and Kafka found a gap: the pipeline fails with 45."""
    return any(
        other.result is not None and other.result.error_code == 45 and other.write.kind == "idempotent"
        for other in world.history.tries
        if other.connection is attempt.connection and other.write.partition == attempt.write.partition
    )


def _check_pipelines(world: World, landings: dict[bytes, list[Appended]]) -> list[str]:
    """A batch sent after a refused one must not be appended, unless its producer could have known of the refusal: the
    refusal left before the proxy received the batch.
    """
    found = []
    pipeline_keys: dict[tuple[Connection, TopicPartition], list[Try]] = {}
    for attempt in world.history.tries:
        ordered = attempt.write.kind != "unconditional"  # unconditional batches without producer id are independent
        if attempt.proxy is not None and attempt.connection is not None and attempt.write.honest and ordered:
            pipeline_keys.setdefault((attempt.connection, attempt.write.partition), []).append(attempt)
    for (connection, _), pipeline_key in pipeline_keys.items():
        for number, attempt in enumerate(pipeline_key):
            if not refused(attempt) or (attempt.write.kind == "idempotent" and not attempt.message):
                continue  # Kafka decides on gaps in a producer's own sequence
            if attempt.message.startswith("PREDECESSOR_FAILED"):
                continue  # after the first refusal the producer knows that the rest fails
            arrived = world.history.proxied_connections[connection][attempt.correlation_id]
            for other in pipeline_key[number + 1 :]:
                if other.starts_at >= arrived:
                    break
                write = other.write
                reported = other.result is not None and other.result.error_code == 0
                # An unknown outcome may be queued at a broker.
                fills = _lies_before(attempt.write, write, landings)  # an earlier attempt, answered with 7
                if reported and not (fills or _may_be_unchecked(world, write) or _copies(world, write)):
                    found.append(
                        f"APPENDED AFTER FAILURE: {write} is in the log, and {attempt.write} before it got "
                        f"{attempt.result.error_code if attempt.result else None} {attempt.message}"
                    )
    return found


def _check_independent(world: World) -> list[str]:
    """A batch without producer id and expected offset fails only after an earlier conditional one of its connection."""
    expecting = {
        (attempt.connection, attempt.write.partition): attempt.starts_at
        for attempt in reversed(world.history.tries)
        if attempt.write.expected is not None
    }
    return [
        f"FAILED WITH ANOTHER: {attempt.write} got {attempt.message}"
        for attempt in world.history.tries
        if attempt.write.kind == "unconditional"
        and attempt.message.startswith("PREDECESSOR_FAILED")
        and attempt.starts_at <= expecting.get((attempt.connection, attempt.write.partition), float("inf"))
    ]


def _lies_before(one: Write, other: Write, landings: dict[bytes, list[Appended]]) -> bool:
    return any(
        each.partition is later.partition and each.batch.base < later.batch.base
        for each in landings.get(one.payload, [])
        for later in landings.get(other.payload, [])
    )


def _copies(world: World, write: Write) -> bool:
    return sum(other.payload == write.payload for other in world.history.writes) > 1


def _ends(world: World, write: Write, since: float, until: float) -> set[int]:
    """Log ends of all leaders from `since` to `until`."""
    ends: set[int] = set()
    retired = [p for p in world.cluster.retired if p.name == write.partition]
    for partition in (*retired, world.cluster.partitions[write.partition]):
        current: dict[int, int] = {}
        for at, node, end in partition.ends:
            if at > until:
                break
            if at >= since:
                ends.update(current.values())
            if end < 0:
                current.pop(node, None)
            else:
                current[node] = end
            if at >= since and end >= 0:
                ends.add(end)
        ends.update(current.values())
    return ends


def check_bounds(world: World) -> list[str]:
    """Queues and memory stay within their limits."""
    limits = world.scenario.limits
    found = []
    for proxy in world.proxies:
        if proxy.live and proxy.running:
            found += proxy.dispatcher.overdue()
        if proxy.free_bytes < 0:
            found.append(f"MEMORY: proxy {proxy.number} has assigned more than it has")
        found += _check_under_way(proxy)
        for sequencer in proxy.dispatcher.sequencers.values():
            if sequencer.waiting > limits.queue_max + limits.in_flight_max:
                found.append(f"UNBOUNDED: {sequencer.waiting} wait at {sequencer.partition}")
            if (
                len(sequencer.state.retries.appended_batch) > limits.remembered_batches_max
                or len(sequencer.state.retries.fenced) > limits.remembered_producers_max
            ):
                found.append(f"UNBOUNDED: {sequencer.partition} remembers too much")
    return found


def _check_under_way(proxy: Proxy) -> list[str]:
    left = left_under_way(proxy.dispatcher, proxy.transactions) if proxy.live else []
    return [f"STUCK: at proxy {proxy.number} {each} stays pending without a request" for each in left]


def check_rest(world: World) -> list[str]:
    """After all clients have disconnected, nothing is left."""
    found = []
    for proxy in world.proxies:
        found += _check_under_way(proxy)
        for sequencer in proxy.dispatcher.sequencers.values():
            if not sequencer.idle:
                view = view_of(sequencer, world.sim.now)
                found.append(
                    f"STUCK: sequencer {sequencer.partition} of proxy {proxy.number} is {sequencer.phase.name}: "
                    f"queue {sequencer.waiting}, in flight {len(view.in_flight)}, in doubt {len(view.in_doubt)}, "
                    f"being read {len(view.being_read)}, admitted {view.admitted is not None}"
                )
        if proxy.dispatcher.sessions:
            found.append(f"STUCK: proxy {proxy.number} has {len(proxy.dispatcher.sessions)} sessions left")
        elif proxy.free_bytes != world.scenario.memory_bytes:
            lost = world.scenario.memory_bytes - proxy.free_bytes
            found.append(f"MEMORY: proxy {proxy.number} has lost {lost} bytes")
        if proxy.dispatcher.needs_ticks and not found:
            found.append(f"STUCK: proxy {proxy.number} still needs ticks")
    return found
