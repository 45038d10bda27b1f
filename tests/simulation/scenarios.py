"""The scenarios of the simulation, and one run of a scenario."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any
from unittest.mock import patch
from uuid import UUID

from fencepost_policies.append import Check
from fencepost_proxy.sequencer.events import SequencerLimits
from fencepost_proxy.transactions import table
from tests.simulation.atomic import HABITS, Atomic
from tests.simulation.checkers import check, check_bounds, check_rest
from tests.simulation.clients import Admin, Client, Probe
from tests.simulation.history import History
from tests.simulation.unauthorized import KIND, Unauthorized
from tests.simulation.world import LIMITS, Scenario, World
from tests.support import executors

_END_SECONDS = 25.0
_REST_SECONDS = 12.0
_PROBE_SECONDS = 30.0

_ATOMIC: dict[str, Any] = {"airtight": False, "transaction_timeout": 12.0, "seconds": 14.0}
_CALM: dict[str, Any] = {"faults_max": 0, "slow_requests": 0.0}
_CLUSTER: dict[str, Any] = {"brokers": 3, "min_isr": 2}
_OTHERS: dict[str, Any] = {"others": (("notes", Check.OFF), ("audit", Check.REQUIRED))}
#: Producer state that expires during the run.
_EXPIRING: dict[str, Any] = {"expiration_seconds": 8.0, "seconds": 14.0}


def _required(name: str, clients: str, faults: str = "cut", **more: Any) -> Scenario:
    """`clients`, `faults` – kinds, which may be repeated."""
    return Scenario(name, clients=tuple(clients.split()), faults=tuple(faults.split()), **more)


def _true(name: str, clients: str, faults: str = "cut", **more: Any) -> Scenario:
    return _required(name, clients, faults, check=Check.ON, **more)


#: Many appends are late, and resolved from the log before their answers arrive.
_LATE: dict[str, Any] = {"slow_requests": 0.1, "limits": replace(LIMITS, answer_seconds=0.1, late_read_seconds=0.1)}

#: Writers that append long enough for claims.
_CLAIMS: dict[str, Any] = {
    "claims": True,
    "limits": replace(LIMITS, claim_after_seconds=0.1, claim_after_waits=1, claim_doublings=0, bases_burst=100),
    "writes": 40,
    "think_max": 0.1,
    "seconds": 12.0,
    "faults_max": 10,
}

_SCENARIOS = (
    _required("race", "honest sequenced bare twin", proxies=2),
    _required("late", "chain honest sequenced twin", "cut kill move pause", **_CLUSTER, **_LATE, proxies=2),
    _true(
        "late-true",
        "honest idempotent-chain idempotent plain chain",
        "cut kill move",
        **_CLUSTER,
        **_LATE,
        airtight=False,
    ),
    _required("throttled", "chain honest several", "cut snip", throttled=0.2, partitions=2),
    _true("throttled-true", "chain idempotent-chain plain honest", "cut snip", throttled=0.2, airtight=False),
    _required("pipelines", "chain chain honest", slow_requests=0.05),
    _required(
        "expansion-required",
        "honest chain sequenced",
        "cut cut snip kill pause move crash freeze blind",
        **_CLUSTER,
        proxies=2,
        partitions=2,
        writes=25,
        faults_max=10,
        seconds=20.0,
        slow_requests=0.05,
        barriers=3,
    ),
    _true(
        "expansion",
        "honest plain idempotent idempotent-chain chain",
        "cut cut snip kill pause move crash",
        **_CLUSTER,
        writes=25,
        faults_max=10,
        seconds=20.0,
        airtight=False,
        slow_requests=0.05,
        barriers=3,
    ),
    _required("refused-pipelines", "chain chain chain", "cut expire kill", **_EXPIRING, too_large=0.05),
    _true(
        "server-errors",
        "honest chain plain idempotent sequenced",
        "cut snip move kill",
        **_CLUSTER,
        airtight=False,
        slow_requests=0.0,
        server_errors=0.1,
    ),
    _required(
        "server-errors-required",
        "honest chain sequenced bare",
        "cut cut snip",
        proxies=2,
        slow_requests=0.1,
        server_errors=0.1,
    ),
    _required(
        "idle-pipelines",
        "chain chain",
        "expire",
        faults_max=40,
        seconds=25.0,
        expiration_seconds=3.0,
        slow_requests=0.0,
        too_large=0.25,
        think_max=6.0,
    ),
    _true(
        "resends",
        "idempotent idempotent-chain idempotent",
        "move move kill pause",
        **_CLUSTER,
        faults_max=20,
        too_large=0.2,
    ),
    _required(
        "retries", "sequenced sequenced honest", "snip", partitions=2, faults_max=20, slow_requests=0.0, lossy_reads=0.0
    ),
    _required(
        "crowd",
        "bare bare bare bare bare bare bare bare bare",
        "pause snip",
        limits=SequencerLimits(queue_max=3, in_flight_max=2, remembered_producers_max=2, remembered_batches_max=8),
    ),
    _required(
        "one-broker",
        "honest sequenced chain twin",
        "cut cut kill pause crash freeze state",
        proxies=2,
        slow_requests=0.05,
    ),
    _required(
        "cluster",
        "honest sequenced chain several",
        "cut kill pause move move crash freeze",
        **_CLUSTER,
        proxies=2,
        partitions=2,
    ),
    _required("unclean", "honest chain", "kill kill pause move", brokers=3, unclean=True, airtight=False),
    _required("lost-records", "sequenced sequenced chain", "lose", airtight=False, faults_max=20, slow_requests=0.0),
    _required("expiry", "honest old sequenced chain", "expire expire cut kill delete", **_EXPIRING, proxies=2),
    # No request waits as long as the producer state lives (in reality a day).
    _required(
        "log-append-time",
        "honest sequenced twin chain",
        "cut kill expire pause",
        proxies=2,
        seconds=20.0,
        expiration_seconds=16.0,
        log_append_time=True,
        pause_max=2.0,
    ),
    _required("recreated", "honest chain sequenced", "recreate delete cut crash", proxies=2),
    _true("true-one", "honest idempotent plain mixed chain", "cut cut pause", slow_requests=0.04),
    _true("true-cluster", "honest idempotent-chain mixed several", "cut kill pause move", **_CLUSTER, partitions=2),
    _true("true-many", "honest idempotent plain mixed", "cut kill pause crash freeze", proxies=2, airtight=False),
    _true(
        "transactions",
        "transactional transactional honest idempotent several",
        "cut kill pause",
        partitions=2,
        airtight=False,
    ),
    _true("calm-transactions", "transactional-plain transactional-plain honest bare", **_CALM, transactions_v2=True),
    # ---- conditional transactions: committed as a whole or not at all
    _true("atomic", "atomic atomic atomic-liar honest several", "cut snip pause", **_ATOMIC, partitions=3),
    _true(
        "atomic-v2",
        "atomic atomic atomic-liar honest mixed",
        "cut snip pause crash",
        **_ATOMIC,
        partitions=3,
        transactions_v2=True,
    ),
    _true("atomic-bypassed", "atomic atomic-liar bypass bypass honest", "cut state crash", **_ATOMIC, partitions=2),
    _true(
        "atomic-cluster",
        "atomic atomic-liar atomic-liar honest",
        "cut kill pause move crash freeze roll state blind",
        **_CLUSTER,
        proxies=2,
        partitions=3,
        faults_max=10,
        seconds=16.0,
        airtight=False,
        transaction_timeout=12.0,
    ),
    _true(
        "atomic-cluster-v2",
        "atomic atomic-liar atomic-liar honest",
        "cut kill pause move crash freeze roll state blind",
        **_CLUSTER,
        proxies=2,
        partitions=3,
        faults_max=10,
        seconds=16.0,
        airtight=False,
        transactions_v2=True,
        transaction_timeout=12.0,
    ),
    # Clients that bypass the proxy move admitted appends; no process forgets anything.
    _true(
        "atomic-bypassing",
        "atomic atomic-patient bypass bypass bypass",
        "cut cut pause",
        **_ATOMIC,
        partitions=2,
        writes=16,
        slow_requests=0.08,
        think_max=0.2,
    ),
    # Commits through processes that did not handle the appends, some of which were appended at another offset.
    _true(
        "atomic-roaming",
        "atomic-liar atomic-liar atomic bypass bypass",
        "cut cut snip pause freeze",
        **_ATOMIC,
        proxies=2,
        partitions=2,
        writes=14,
        faults_max=14,
        slow_requests=0.06,
        transactions_v2=True,
        think_max=0.2,
    ),
    # The same, where consecutive transactions have one epoch.
    _true(
        "atomic-roaming-v1",
        "atomic-liar atomic-liar atomic bypass bypass",
        "cut cut snip pause freeze",
        **_ATOMIC,
        proxies=2,
        partitions=2,
        writes=14,
        faults_max=20,
        slow_requests=0.06,
        think_max=0.2,
    ),
    # Transactions use the same partitions in every order: none may deadlock.
    _true(
        "atomic-crossing",
        "atomic-crossing atomic-crossing atomic-crossing atomic-crossing",
        **_CALM,
        partitions=3,
        seconds=10.0,
        airtight=False,
        lossy_reads=0.0,
        transaction_timeout=60.0,
        think_max=0.05,
    ),
    # No faults, no bypassing: every transactional append is at its expected offset.
    _true(
        "atomic-calm",
        "atomic atomic atomic bare",
        **_CALM,
        partitions=2,
        transactions_v2=True,
        transaction_timeout=60.0,
        think_max=0.1,
    ),
    _true(
        "atomic-crossing-v2",
        "atomic-routed atomic-routed atomic-routed atomic-routed",
        **_CALM,
        proxies=2,
        partitions=3,
        seconds=10.0,
        airtight=False,
        transactions_v2=True,
        transaction_timeout=60.0,
        think_max=0.05,
    ),
    # No faults, but unauthorized clients use the transactions; no commit may be refused because of them.
    _true(
        "atomic-unauthorized",
        "atomic atomic stranger stranger",
        **_CALM,
        partitions=2,
        airtight=False,
        lossy_reads=0.0,
        transaction_timeout=60.0,
        think_max=0.1,
    ),
    _true(
        "atomic-unauthorized-v2",
        "atomic atomic stranger stranger",
        **_CALM,
        proxies=2,
        partitions=2,
        airtight=False,
        lossy_reads=0.0,
        transactions_v2=True,
        transaction_timeout=60.0,
        think_max=0.1,
    ),
    _required("refused-transactions", "transactional honest"),
    _required("refused-transactions-v2", "transactional transactional-plain honest", transactions_v2=True),
    _true("bypass-true", "bypass honest sequenced chain", "cut kill", airtight=False),
    _required("bypass", "bypass honest sequenced chain", "cut kill state", proxies=2, airtight=False),
    # Each bypassing append costs an epoch, or uses the last one of the shared producer id.
    _required(
        "rotating",
        "bypass bypass honest sequenced chain",
        "cut kill state",
        proxies=2,
        airtight=False,
        limits=SequencerLimits(
            queue_max=50,
            in_flight_max=4,
            unconfirmed_send_seconds=0.5,
            resolve_seconds=3.0,
            queued_seconds=9.0,
            producer_epochs=6,
        ),
    ),
    # ---- claims
    _required(
        "claims",
        "chain chain sequenced honest",
        "cut snip pause crash freeze",
        **_CLAIMS,
        proxies=2,
        slow_requests=0.05,
    ),
    _required(
        "claims-cluster",
        "chain honest sequenced chain",
        "cut kill pause move crash freeze state blind",
        **_CLUSTER,
        **_CLAIMS,
        proxies=3,
        partitions=2,
        slow_requests=0.05,
    ),
    _required(
        "claims-expiring",
        "chain sequenced chain",
        "expire cut crash delete",
        **_CLAIMS,
        proxies=2,
        expiration_seconds=8.0,
    ),
    _required(
        "claims-rotating",
        "chain honest sequenced chain",
        "cut kill crash freeze",
        **{**_CLAIMS, "limits": replace(_CLAIMS["limits"], producer_epochs=8)},
        proxies=2,
        slow_requests=0.05,
    ),
    _required("liars", "liar liar honest sequenced", "cut kill pause"),
    _true("liars-true", "liar liar honest idempotent", "cut kill pause"),
    _true("whole-requests", "several several honest", "cut pause", partitions=3, refuse_whole_requests=True),
    # ---- acks=0, other APIs between appends, requests for several topics
    _true("silent", "silent silent silent-idempotent honest mixed", "cut snip pause state", **_OTHERS),
    _required(
        "control-requests",
        "asking asking asking-plain chain",
        "cut snip pause state freeze",
        proxies=2,
        others=(("notes", Check.OFF),),
    ),
    _true("wide", "wide wide several mixed", "cut snip pause expire recreate", **_OTHERS, partitions=3, airtight=False),
    # Connections end while a part of their request is sent, and the rest waits for its sequencers.
    _true(
        "sent-ahead",
        "wide wide several",
        partitions=3,
        faults_max=40,
        airtight=False,
        slow_requests=0.3,
        think_max=0.1,
    ),
    # First attempts stay queued in a broker until their retries are about to be sent.
    _true(
        "late-retries",
        "mixed mixed mixed mixed mixed mixed",
        writes=16,
        faults_max=80,
        airtight=False,
        slow_requests=0.2,
        lossy_reads=0.5,
        think_max=0.1,
    ),
    # ---- clients log in: Kafka must confirm WRITE first
    _true(
        "logged-in",
        "silent-idempotent asking honest mixed chain",
        "cut snip pause state",
        **_OTHERS,
        clients_log_in=True,
    ),
    _true(
        "wide-logged-in",
        "wide several chain mixed silent",
        "cut snip pause state",
        **_OTHERS,
        partitions=3,
        airtight=False,
        clients_log_in=True,
    ),
    # No request waits as long as the producer state lives.
    _required(
        "wide-required",
        "wide wide several honest",
        "cut pause expire expire delete freeze",
        **_EXPIRING,
        proxies=2,
        partitions=3,
        slow_requests=0.1,
        pause_max=1.0,
    ),
    # ---- pipelines and races
    _true("mixed-pipelines", "mixed-chain mixed-chain chain", "cut snip pause", too_large=0.1),
    _required(
        "twins",
        "bare sequenced sequenced twin twin chain",
        "cut snip pause",
        proxies=2,
        writes=16,
        faults_max=80,
        slow_requests=0.25,
        pause_max=2.0,
        think_max=0.15,
    ),
    # ---- checks switched on and off
    _true(
        "config-changes",
        "plain honest idempotent chain asking-plain mixed",
        "state blind blind blind zombie freeze cut crash tidy",
        proxies=3,
        writes=14,
        faults_max=14,
        seconds=24.0,
        airtight=False,
        think_max=1.5,
        managed=True,
    ),
    # A proposal delayed in a broker's queue arrives after the agreement; the state topic is compacted.
    _required("proposals", "honest sequenced chain", "propose propose tidy crash cut", proxies=2),
    # ---- compaction, expiry and other changes of the log
    _required(
        "compacted",
        "honest sequenced chain twin",
        "compact compact expire kill move cut tidy",
        **_CLUSTER,
        **_EXPIRING,
        proxies=2,
        faults_max=14,
    ),
    _true(
        "compacted-true", "honest idempotent plain chain", "compact compact expire kill cut", **_EXPIRING, faults_max=14
    ),
    _required(
        "reassigned",
        "honest sequenced chain twin",
        "reassign reassign delete delete move cut pause",
        **_CLUSTER,
        proxies=2,
        faults_max=12,
    ),
    _required(
        "deleted",
        "honest sequenced chain reborn",
        "purge purge purge cut cut freeze kill",
        proxies=2,
        writes=16,
        faults_max=100,
        lossy_reads=0.2,
        think_max=0.2,
    ),
    _required("retyped", "honest sequenced twin chain", "retype retype cut pause", pause_max=2.0),
    # ---- restarted processes and clients
    _required(
        "restarted-clients",
        "reborn reborn-chain reborn honest",
        "cut snip crash freeze pause",
        proxies=2,
        slow_requests=0.06,
    ),
    _required(
        "hanging", "honest sequenced chain reborn", "hang cut snip crash", proxies=2, seconds=24.0, think_max=2.5
    ),
    _required(
        "rolling",
        "honest sequenced chain bare reborn",
        "roll zombie move cut",
        **_CLUSTER,
        proxies=2,
        seconds=16.0,
        think_max=1.2,
    ),
    # On a `true` topic, an unfenced batch of a dead process may arrive late: its successor's conditional appends
    # wait for it. A late fenced batch may follow unfenced ones: no client gets success.
    _true(
        "takeover",
        "honest idempotent plain chain",
        "crash pause roll",
        seconds=22.0,
        airtight=False,
        unviolated=True,
        slow_requests=0.2,
        think_max=1.5,
        takeover_seconds=9.0,
    ),
    _true(
        "stranded",
        "stranding stranding honest bare chain",
        "cut pause",
        partitions=2,
        writes=14,
        airtight=False,
        unviolated=True,
        slow_requests=0.1,
        think_max=0.2,
    ),
    _true("calm-stranded", "stranding stranding honest bare", **_CALM, partitions=2),
    # ---- limits
    _true(
        "bulky",
        "bulky bulky bulky bulky bulky bulky",
        "pause snip cut",
        others=(("notes", Check.OFF),),
        memory_bytes=6000,
    ),
    # A thread reads large requests and those with several batches: their connection waits, others overtake it.
    _required(
        "read-elsewhere",
        "honest several chain bulky liar",
        "cut kill pause snip crash",
        proxies=2,
        partitions=2,
        read_here_bytes=110,
    ),
    _true(
        "queues", "chain chain idempotent-chain bare bare plain plain", "snip pause", slow_requests=0.2, think_max=0.05
    ),
)
SCENARIOS = {scenario.name: scenario for scenario in _SCENARIOS}


@dataclass(frozen=True)
class Outcome:
    scenario: str
    seed: int
    found: tuple[str, ...]
    tries: int
    accepted: int
    refused: int
    unknown: int
    events: int
    digest: str
    trace: tuple[str, ...] = ()
    executor: str = ""


def run(scenario: Scenario, seed: int, *, tracing: bool = False) -> Outcome:
    """One run: activity under faults, then no faults, then one more append through every sequencer.

    Even seeds use native code, if it is built (`support/executors.py`).
    """
    ids = Random(seed)
    with (
        patch.object(table, "uuid4", lambda: UUID(int=ids.getrandbits(128), version=4)),
        executors.executing(executors.of_seed(seed)),
    ):
        return _run(scenario, seed, tracing=tracing)


def _run(scenario: Scenario, seed: int, *, tracing: bool) -> Outcome:
    history = History()
    world = World(scenario, seed, history, tracing=tracing)
    sim = world.sim
    clients = [_make(world, f"{kind}-{number}", kind) for number, kind in enumerate(scenario.clients)]
    if scenario.managed:
        Admin(world)
    world.schedule_faults()
    found: list[str] = []
    end = sim.now + scenario.seconds
    while sim.now < end and not found:
        sim.run(min(end, sim.now + 1.0))
        found += check_bounds(world)
    world.heal()
    for client in clients:
        client.writes_left = min(client.writes_left, 1)
    deadline = sim.now + _END_SECONDS
    while sim.now < deadline and not all(client.done for client in clients):
        sim.run(sim.now + 0.5)
    found += [f"STUCK: {client.name} still waits for an answer" for client in clients if not client.done]
    sim.run(sim.now + 4.0)
    if not found:
        found += _probe(world)
        found += _commit_once_more(world, [client for client in clients if isinstance(client, Atomic)])
    sim.run(sim.now + _REST_SECONDS)
    if not found:
        found += check_rest(world)
    if world.barriers is not None:
        found += world.barriers.rest()
    found += check(world)
    codes = [attempt.result.error_code if attempt.result else None for attempt in history.tries]
    digest = f"{sim.events}/{sim.rng.getrandbits(64):016x}/{sim.written:08x}"
    return Outcome(
        scenario.name,
        seed,
        tuple(found),
        len(codes),
        codes.count(0),
        codes.count(44),
        codes.count(7) + codes.count(None),
        sim.events,
        digest,
        tuple(sim.trace),
        executors.current(),
    )


def _make(world: World, name: str, kind: str) -> Atomic | Client | Unauthorized:
    makes: type[Atomic | Client | Unauthorized] = Client
    if kind in HABITS:
        makes = Atomic
    elif kind == KIND:
        makes = Unauthorized
    return makes(world, name, kind, world.scenario.writes)


def _commit_once_more(world: World, clients: list[Atomic]) -> list[str]:
    """Commit a transaction over all partitions through each process."""
    found: list[str] = []
    for client in clients[:1]:
        for proxy in world.proxies:
            client.once_more(proxy.number)
            deadline = world.sim.now + _PROBE_SECONDS
            while not client.done and world.sim.now < deadline:
                world.sim.run(world.sim.now + 0.1)
            if not client.committed:
                found.append(f"STUCK: no transaction of {client.name} gets through proxy {proxy.number}")
    return found


def _probe(world: World) -> list[str]:
    """Send a valid append through each sequencer of each process."""
    found: list[str] = []
    for proxy in world.proxies:
        for name in world.names:
            done: list[bool] = []
            probe = Probe(world, proxy.number, name, done.append)
            probe.send()
            deadline = world.sim.now + _PROBE_SECONDS
            while not done and world.sim.now < deadline:
                world.sim.run(world.sim.now + 0.1)
            if not probe.accepted:
                found.append(f"STUCK: no append to {name} gets through proxy {proxy.number}: {probe.last}")
    return found
