"""What must hold of every run: the clients' history against the final logs of the brokers."""

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
from tests.support.under_way import left_under_way

_ACTUAL = re.compile(r"^OFFSET_MISMATCH .* actual=(-?\d+)( POSSIBLY_YOURS)?$")
_APPENDED_AT = re.compile(r"OFFSET_VIOLATION .* appended_at=(\d+)")
_HEADER_BYTES = 61
REFUSED_COMMIT = frozenset(REFUSED.values())


@dataclass(frozen=True)
class Landing:
    partition: Partition
    batch: LogBatch
    compacted: bool = False


def check(world: World) -> list[str]:
    """Everything that is wrong, as sentences; empty for a good run."""
    landings = _landings(world)
    groups: dict[bytes, list[Write]] = {}
    for write in world.history.writes:
        groups.setdefault(write.payload, []).append(write)
    found = list(world.history.broken)
    for payload, writes in groups.items():
        found += _check_group(world, writes, landings.get(payload, []))
    for attempt in world.history.tries:
        found += _check_try(world, attempt)
    found += _check_chains(world, landings)
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
    """Committed: every append that expected something lies there, and none was refused. Not committed: nothing is."""
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
                    found.append(f"COMMITTED INCOMPLETE: {write} was told {last.message}, in a {transaction}")
        if 0 in codes:
            missing = [w for w in transaction.writes if _told_success(w) and w.payload not in committed]
            found += [f"NOT COMMITTED: {write} was, as the client of a {transaction} was told" for write in missing]
        refused_it = any(code in REFUSED_COMMIT for code in codes)
        calm = not world.scenario.faults_max and not world.scenario.lossy_reads
        if refused_it and calm and all(map(_told_success, transaction.writes)):
            found.append(f"COMMIT REFUSED WITHOUT CAUSE: a {transaction}, of which all has landed")
        if there and (not reported or any(code in REFUSED_COMMIT for code in codes)):
            found.append(f"COMMITTED DESPITE REFUSAL: a {transaction} was answered {codes}")
    return found


def _committed(world: World) -> dict[bytes, int]:
    """By payload: what lies before a marker that commits it, and where."""
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


def _told_success(write: Write) -> bool:
    return any(attempt.result is not None and attempt.result.error_code == 0 for attempt in write.tries)


def _was_failed(world: World, write: Write) -> bool:
    """Its producer was told last that it is not there, or that this is not known. The latter of one that died since
    nobody need know: who commits then, commits what he does not know himself."""
    last = write.tries[-1] if write.tries else None
    if last is None or last.result is None:
        return False
    if last.result.error_code in RETRIABLE:
        return not {"crash", "roll", "state", "blind"} & set(world.scenario.faults)
    return True


def _landings(world: World) -> dict[bytes, list[Landing]]:
    found: dict[bytes, list[Landing]] = {}

    def note(partition: Partition, batch: LogBatch, *, compacted: bool = False) -> None:
        found.setdefault(batch.data[_HEADER_BYTES:], []).append(Landing(partition, batch, compacted))

    for partition in (*world.cluster.retired, *world.cluster.partitions.values()):
        for batch in world.cluster.final_log(partition):
            if batch.header.record_count == batch.count and len(batch.data) > _HEADER_BYTES:
                note(partition, batch)
    for partition, batch in world.history.compacted:
        note(partition, batch, compacted=True)
    return found


def checks_during(world: World, topic: str, since: float, until: float) -> set[Check]:
    """What a topic may have been checked for at some moment of that time: what an admin was told last before it, and
    whatever was asked for since."""
    if topic != TOPIC or not world.scenario.managed:
        return {world.checks[topic]}
    switches = [s for s in world.history.switches if s.queried_at <= until]
    reported = [s for s in switches if s.reported_at <= since]
    last = max(reported, key=lambda s: s.reported_at, default=None)
    found = {s.check for s in switches if last is None or s.queried_at >= last.queried_at}
    return found if last is not None else found | {Check.OFF}


def _checks_of(world: World, attempt: Try) -> set[Check]:
    until = float("inf") if attempt.answered_at is None else attempt.answered_at
    return checks_during(world, attempt.write.partition.topic, attempt.sent_at, until)


def _unguarded(world: World, write: Write) -> bool:
    """Some try of it may have passed as it was: then it is between its producer and Kafka."""
    return any(Check.OFF in _checks_of(world, attempt) for attempt in write.tries)


def refused(attempt: Try) -> bool:
    """It was told that this try has appended nothing."""
    result = attempt.result
    if result is None:
        return False
    if result.error_code == 44:
        # POSSIBLY_YOURS speaks of an earlier try: this one has appended nothing.
        return bool(attempt.message) and "OFFSET_VIOLATION" not in attempt.message
    if result.error_code == 6:
        return result.base_offset == -1
    if result.error_code == -1:  # Kafka says it of anything; of an append with an expectation the log was read
        return attempt.write.expected is not None and attempt.write.kind != "transactional"
    return result.error_code in (32, 87, 45, 47, 48, 51, 2, 3, 10, 19)


def _check_group(world: World, writes: list[Write], appended_batch: list[Landing]) -> list[str]:
    """Writes with equal records: one, and those who copied it."""
    found = []
    first = writes[0]
    tries = [attempt for write in writes for attempt in write.tries if not write.bypass]
    if any(write.bypass for write in writes):
        return []
    where = (
        ", ".join(f"{each.batch.base} of {each.partition.topic_id.int % 1000}" for each in appended_batch) or "nowhere"
    )
    lossy = any(p.lost_by_unclean for p in (*world.cluster.retired, *world.cluster.partitions.values()))
    for write in writes:
        for attempt in write.tries:
            result = attempt.result
            if result is None or result.error_code != 0:
                continue
            is_checked = Check.OFF not in _checks_of(world, attempt)
            if is_checked and write.expected is not None and result.base_offset != write.expected:
                found.append(f"FALSE SUCCESS: {write} was told 0 at {result.base_offset}")
            checked = write.expected is not None or write.honest
            if checked and not lossy and result.base_offset not in [each.batch.base for each in appended_batch]:
                found.append(f"FALSE SUCCESS: {write} was told 0 at {result.base_offset}, but it lies {where}")
    reported = [w for w in writes if any(t.result is not None and t.result.error_code == 0 for t in w.tries)]
    if len(reported) > 1 and not _alike(world, reported):
        found.append(f"TWO SUCCESSES: {' and '.join(map(str, reported))}, one batch")
    possible = [attempt for attempt in tries if not refused(attempt)]
    if len(appended_batch) > len(possible):
        told_codes = [(a.result.error_code, a.message) if a.result else None for a in tries]
        found.append(f"REFUSED BUT APPENDED: {first} lies {where}, its tries were told {told_codes}")
    once = first.expected is not None or (first.kind == "idempotent" and _kafka_remembers(world))
    if any(_unguarded(world, write) for write in writes) and not (first.kind == "idempotent" and len(writes) == 1):
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
        found.append(f"NOT REFUSED: {first} breaks the rules, and lies {where}")
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


def _check_refusals(world: World, write: Write, appended_batch: list[Landing]) -> list[str]:
    """By its producer's sequence a batch of a transaction names itself: it is never told that it is not there."""
    forgetful = world.scenario.proxies > 1 or {"crash", "roll"} & set(world.scenario.faults)
    if write.kind != "transactional" or forgetful or not appended_batch:
        return []
    last = write.tries[-1]
    if not refused(last) or last.result is None or last.result.error_code == 6 or "POSSIBLY_YOURS" in last.message:
        return []
    return [f"RETRY REFUSED: {write} lies at {appended_batch[0].batch.base} and was told {last.message}"]


def _check_mismatch(attempt: Try, appended_batch: list[Landing]) -> list[str]:
    """A mismatch where equal records lie at that very offset: an earlier try, which it has to tell."""
    reported = _ACTUAL.match(attempt.message)
    write = attempt.write
    if reported is None or write.expected is None or int(reported.group(1)) <= write.expected or write.forbidden:
        return []
    there = [each for each in appended_batch if each.batch.base == write.expected and _readable(each)]
    if not there:
        return []
    if write.write_id is not None and write.honest:
        return [f"RETRY REFUSED: {write} lies there and names itself, a try was told {attempt.message}"]
    if reported.group(2) is None:
        return [f"POSSIBLY_YOURS MISSING: equal records lie at {write.expected}, {write} was told {attempt.message}"]
    return []


def _readable(landing: Landing) -> bool:
    """Nothing was deleted that a look might have met."""
    partition = landing.partition
    if landing.compacted:
        return False
    start = min(batch.base for replica in partition.replicas.values() for batch in replica.batches)
    return not partition.deleted and all(r.highest_start <= start for r in partition.replicas.values())


def _alike(world: World, reported: list[Write]) -> bool:
    """The known limit of LogAppendTime topics: of equal batches without a write-id, sent by two processes, neither
    Kafka's answers nor its log tell which one lies there. Both are told success."""
    proxies = {t.proxy for w in reported for t in w.tries if t.result is not None and t.result.error_code == 0}
    return world.scenario.log_append_time and len(proxies) > 1 and all(w.write_id is None for w in reported)


def _kafka_remembers(world: World) -> bool:
    """Whether Kafka's own deduplication can be relied on in this scenario, and no process forgets its own."""
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
        landed_before = any(t.result is None for t in write.tries) and "POSSIBLY_YOURS" in attempt.message
        if landed_before and write.honest and write.records[43:51] != b"\xff" * 8:
            found.append(f"RETRY REFUSED: {write} was told {attempt.message}, and the process had its acknowledgement")
    checks = _checks_of(world, attempt)
    fenced = Check.OFF not in checks and (write.expected is not None or write.kind == "plain")
    fenced = fenced and write.kind != "transactional"
    if result.error_code == 45 and fenced and not _behind_an_own_45(world, attempt):
        found.append(f"BARE 45: {write} was told 45")
    loose = write.expected is None or write.kind == "transactional"
    if result.error_code == 0 and checks == {Check.REQUIRED} and loose:
        found.append(f"NOT REFUSED: {write} on a topic that requires expectations")
    if result.error_code == 44 and checks == {Check.OFF}:
        found.append(f"UNCHECKED BUT REFUSED: {write} on a topic that is not guarded was told {attempt.message}")
    reported = _ACTUAL.match(attempt.message)
    if reported and "record=" not in attempt.message:
        actual = int(reported.group(1))
        ends = _ends(world, write, attempt.sent_at, attempt.answered_at)
        if actual not in ends:
            found.append(f"WRONG LOG END: {write} was told actual={actual} where the log ended at {sorted(ends)}")
    return found


def _behind_an_own_45(world: World, attempt: Try) -> bool:
    """The head of its chain keeps its producer's sequences, and Kafka found a gap in them: all of it falls with 45."""
    return any(
        other.result is not None and other.result.error_code == 45 and other.write.kind == "idempotent"
        for other in world.history.tries
        if other.connection is attempt.connection and other.write.partition == attempt.write.partition
    )


def _check_chains(world: World, landings: dict[bytes, list[Landing]]) -> list[str]:
    """What a producer sent behind a batch that was refused, before it could know of that, must not be there: it would
    follow a hole. As far as anybody but the producer can know: what had arrived when the refusal left."""
    found = []
    pipeline_keys: dict[tuple[Connection, TopicPartition], list[Try]] = {}
    for attempt in world.history.tries:
        ordered = attempt.write.kind != "plain"  # nobody promises those anything
        if attempt.proxy is not None and attempt.connection is not None and attempt.write.honest and ordered:
            pipeline_keys.setdefault((attempt.connection, attempt.write.partition), []).append(attempt)
    for (connection, _), pipeline_key in pipeline_keys.items():
        for number, attempt in enumerate(pipeline_key):
            if not refused(attempt) or (attempt.write.kind == "idempotent" and not attempt.message):
                continue  # between Kafka and a producer of its own a hole is what Kafka makes of it
            if attempt.message.startswith("PREDECESSOR_FAILED"):
                continue  # who has the answer of the chain's head knows that all behind it falls
            arrived = world.history.proxied_connections[connection][attempt.correlation_id]
            for other in pipeline_key[number + 1 :]:
                if other.starts_at >= arrived:
                    break
                write = other.write
                reported = other.result is not None and other.result.error_code == 0
                # One whose outcome is unknown may lie in a broker's queue: nobody can call it back.
                fills = _lies_before(attempt.write, write, landings)  # an earlier try of it, which was told 7
                if reported and not (fills or _unguarded(world, write) or _copies(world, write)):
                    found.append(
                        f"APPENDED AFTER FAILURE: {write} is there, and {attempt.write} before it was told "
                        f"{attempt.result.error_code if attempt.result else None} {attempt.message}"
                    )
    return found


def _check_independent(world: World) -> list[str]:
    """Kafka answers batches without a producer id one by one. So does a proxy where nothing is expected: such a batch
    may only fall with one that expected something, and that was sent before it on its connection."""
    expecting = {
        (attempt.connection, attempt.write.partition): attempt.starts_at
        for attempt in reversed(world.history.tries)
        if attempt.write.expected is not None
    }
    return [
        f"FAILED WITH ANOTHER: {attempt.write} was told {attempt.message}"
        for attempt in world.history.tries
        if attempt.write.kind == "plain"
        and attempt.message.startswith("PREDECESSOR_FAILED")
        and attempt.starts_at <= expecting.get((attempt.connection, attempt.write.partition), float("inf"))
    ]


def _lies_before(one: Write, other: Write, landings: dict[bytes, list[Landing]]) -> bool:
    return any(
        each.partition is later.partition and each.batch.base < later.batch.base
        for each in landings.get(one.payload, [])
        for later in landings.get(other.payload, [])
    )


def _copies(world: World, write: Write) -> bool:
    return sum(other.payload == write.payload for other in world.history.writes) > 1


def _ends(world: World, write: Write, since: float, until: float) -> set[int]:
    """Where the log ended, for whoever led it, at any moment from `since` to `until`."""
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
    """No queue or memory beyond its limit, at any moment that it is looked at."""
    limits = world.scenario.limits
    found = []
    for proxy in world.proxies:
        if proxy.live and proxy.running:
            found += proxy.dispatcher.overdue()
        if proxy.free_bytes < 0:
            found.append(f"MEMORY: proxy {proxy.number} has given away more than it has")
        found += _check_under_way(proxy)
        for sequencer in proxy.dispatcher.sequencers.values():
            if sequencer.waiting > limits.queue_max + limits.in_flight_max:
                found.append(f"UNBOUNDED: {sequencer.waiting} wait at {sequencer.partition}")
            if (
                len(sequencer.memory.appended_batch) > limits.remembered_batches_max
                or len(sequencer.memory.fenced) > limits.remembered_producers_max
            ):
                found.append(f"UNBOUNDED: {sequencer.partition} remembers too much")
    return found


def _check_under_way(proxy: Proxy) -> list[str]:
    left = left_under_way(proxy.dispatcher, proxy.transactions) if proxy.live else []
    return [f"STUCK: at proxy {proxy.number} what is under way of {each} for ever: no request has it" for each in left]


def check_rest(world: World) -> list[str]:
    """After everybody is gone nothing may be left."""
    found = []
    for proxy in world.proxies:
        found += _check_under_way(proxy)
        for sequencer in proxy.dispatcher.sequencers.values():
            if not sequencer.idle:
                found.append(
                    f"STUCK: sequencer {sequencer.partition} of proxy {proxy.number} is {sequencer.phase.name}: "
                    f"queue {sequencer.waiting}, "
                    f"in flight {len(sequencer._in_flight)}, in doubt {len(sequencer._in_doubt_appends)}, "
                    f"being read {len(sequencer._being_read)}, "
                    f"granted {sequencer._admitted is not None}"
                )
        if proxy.dispatcher.sessions:
            found.append(f"STUCK: proxy {proxy.number} has {len(proxy.dispatcher.sessions)} sessions left")
        elif proxy.free_bytes != world.scenario.memory_bytes:
            lost = world.scenario.memory_bytes - proxy.free_bytes
            found.append(f"MEMORY: proxy {proxy.number} has lost {lost} bytes")
        if proxy.dispatcher.needs_ticks and not found:
            found.append(f"STUCK: proxy {proxy.number} still wants ticks")
    return found
