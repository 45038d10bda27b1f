"""The scenarios of the simulation, and one run of a scenario."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
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
from tests.simulation.world import Scenario, World
from tests.support import executors

_END_SECONDS = 25.0
_REST_SECONDS = 12.0
_PROBE_SECONDS = 30.0

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("race", clients=("honest", "sequenced", "bare", "twin"), proxies=2),
        Scenario("pipelines", clients=("chain", "chain", "honest"), slow_requests=0.05),
        Scenario(
            "expansion-required",
            clients=("honest", "chain", "sequenced"),
            brokers=3,
            min_isr=2,
            proxies=2,
            partitions=2,
            faults=("cut", "cut", "snip", "kill", "pause", "move", "crash", "freeze", "blind"),
            faults_max=10,
            seconds=20.0,
            writes=25,
            slow_requests=0.05,
            barriers=3,
        ),
        Scenario(
            "expansion",
            check=Check.ON,
            clients=("honest", "plain", "idempotent", "idempotent-chain", "chain"),
            airtight=False,
            brokers=3,
            min_isr=2,
            faults=("cut", "cut", "snip", "kill", "pause", "move", "crash"),
            faults_max=10,
            seconds=20.0,
            writes=25,
            slow_requests=0.05,
            barriers=3,
        ),
        Scenario(
            "refused-pipelines",
            clients=("chain", "chain", "chain"),
            faults=("cut", "expire", "kill"),
            expiration_seconds=8.0,
            seconds=14.0,
            too_large=0.05,
        ),
        Scenario(
            "server-errors",
            check=Check.ON,
            clients=("honest", "chain", "plain", "idempotent", "sequenced"),
            brokers=3,
            min_isr=2,
            faults=("cut", "snip", "move", "kill"),
            airtight=False,
            server_errors=0.1,
            slow_requests=0.0,
        ),
        Scenario(
            "server-errors-required",
            clients=("honest", "chain", "sequenced", "bare"),
            proxies=2,
            faults=("cut", "cut", "snip"),
            server_errors=0.1,
            slow_requests=0.1,
        ),
        Scenario(
            "idle-pipelines",
            clients=("chain", "chain"),
            faults=("expire",),
            faults_max=40,
            expiration_seconds=3.0,
            seconds=25.0,
            think_max=6.0,
            slow_requests=0.0,
            too_large=0.25,
        ),
        Scenario(
            "resends",
            check=Check.ON,
            clients=("idempotent", "idempotent-chain", "idempotent"),
            brokers=3,
            min_isr=2,
            faults=("move", "move", "kill", "pause"),
            faults_max=20,
            too_large=0.2,
        ),
        Scenario(
            "retries",
            clients=("sequenced", "sequenced", "honest"),
            faults=("snip",),
            faults_max=20,
            slow_requests=0.0,
            lossy_reads=0.0,
            partitions=2,
        ),
        Scenario(
            "crowd",
            clients=("bare",) * 9,
            faults=("pause", "snip"),
            limits=SequencerLimits(queue_max=3, in_flight_max=2, remembered_batches_max=8, remembered_producers_max=2),
        ),
        Scenario(
            "one-broker",
            clients=("honest", "sequenced", "chain", "twin"),
            faults=("cut", "cut", "kill", "pause", "crash", "freeze", "state"),
            proxies=2,
            slow_requests=0.05,
        ),
        Scenario(
            "cluster",
            brokers=3,
            min_isr=2,
            proxies=2,
            clients=("honest", "sequenced", "chain", "several"),
            partitions=2,
            faults=("cut", "kill", "pause", "move", "move", "crash", "freeze"),
        ),
        Scenario(
            "unclean",
            brokers=3,
            proxies=1,
            clients=("honest", "chain"),
            faults=("kill", "kill", "pause", "move"),
            unclean=True,
            airtight=False,
        ),
        Scenario(
            "expiry",
            clients=("honest", "old", "sequenced", "chain"),
            proxies=2,
            faults=("expire", "expire", "cut", "kill", "delete"),
            expiration_seconds=8.0,
            seconds=14.0,
        ),
        Scenario(
            "log-append-time",
            clients=("honest", "sequenced", "twin", "chain"),
            proxies=2,
            faults=("cut", "kill", "expire", "pause"),
            # No request waits as long as the producer state lives (in reality a day).
            expiration_seconds=16.0,
            seconds=20.0,
            pause_max=2.0,
            log_append_time=True,
        ),
        Scenario(
            "recreated",
            clients=("honest", "chain", "sequenced"),
            faults=("recreate", "delete", "cut", "crash"),
            proxies=2,
        ),
        Scenario(
            "true-one",
            check=Check.ON,
            clients=("honest", "idempotent", "plain", "mixed", "chain"),
            faults=("cut", "cut", "pause"),
            slow_requests=0.04,
        ),
        Scenario(
            "true-cluster",
            check=Check.ON,
            brokers=3,
            min_isr=2,
            partitions=2,
            clients=("honest", "idempotent-chain", "mixed", "several"),
            faults=("cut", "kill", "pause", "move"),
        ),
        Scenario(
            "true-many",
            check=Check.ON,
            proxies=2,
            clients=("honest", "idempotent", "plain", "mixed"),
            faults=("cut", "kill", "pause", "crash", "freeze"),
            airtight=False,
        ),
        Scenario(
            "transactions",
            check=Check.ON,
            partitions=2,
            clients=("transactional", "transactional", "honest", "idempotent", "several"),
            faults=("cut", "kill", "pause"),
            airtight=False,
        ),
        Scenario(
            "calm-transactions",
            check=Check.ON,
            clients=("transactional-plain", "transactional-plain", "honest", "bare"),
            faults_max=0,
            slow_requests=0.0,
            transactions_v2=True,
        ),
        # ---- conditional transactions: committed as a whole or not at all
        Scenario(
            "atomic",
            check=Check.ON,
            partitions=3,
            clients=("atomic", "atomic", "atomic-liar", "honest", "several"),
            faults=("cut", "snip", "pause"),
            transaction_timeout=12.0,
            seconds=14.0,
            airtight=False,
        ),
        Scenario(
            "atomic-v2",
            check=Check.ON,
            partitions=3,
            clients=("atomic", "atomic", "atomic-liar", "honest", "mixed"),
            faults=("cut", "snip", "pause", "crash"),
            transactions_v2=True,
            transaction_timeout=12.0,
            seconds=14.0,
            airtight=False,
        ),
        Scenario(
            "atomic-bypassed",
            check=Check.ON,
            partitions=2,
            clients=("atomic", "atomic-liar", "bypass", "bypass", "honest"),
            faults=("cut", "state", "crash"),
            transaction_timeout=12.0,
            seconds=14.0,
            airtight=False,
        ),
        Scenario(
            "atomic-cluster",
            check=Check.ON,
            brokers=3,
            min_isr=2,
            proxies=2,
            partitions=3,
            clients=("atomic", "atomic-liar", "atomic-liar", "honest"),
            faults=("cut", "kill", "pause", "move", "crash", "freeze", "roll", "state", "blind"),
            faults_max=10,
            transaction_timeout=12.0,
            seconds=16.0,
            airtight=False,
        ),
        Scenario(
            "atomic-cluster-v2",
            check=Check.ON,
            brokers=3,
            min_isr=2,
            proxies=2,
            partitions=3,
            clients=("atomic", "atomic-liar", "atomic-liar", "honest"),
            faults=("cut", "kill", "pause", "move", "crash", "freeze", "roll", "state", "blind"),
            faults_max=10,
            transactions_v2=True,
            transaction_timeout=12.0,
            seconds=16.0,
            airtight=False,
        ),
        # Clients that bypass the proxy move admitted appends; no process forgets anything.
        Scenario(
            "atomic-bypassing",
            check=Check.ON,
            partitions=2,
            clients=("atomic", "atomic-patient", "bypass", "bypass", "bypass"),
            faults=("cut", "cut", "pause"),
            slow_requests=0.08,
            transaction_timeout=12.0,
            seconds=14.0,
            think_max=0.2,
            writes=16,
            airtight=False,
        ),
        # Commits through processes that did not handle the appends, some of which were appended at another offset.
        Scenario(
            "atomic-roaming",
            check=Check.ON,
            proxies=2,
            partitions=2,
            clients=("atomic-liar", "atomic-liar", "atomic", "bypass", "bypass"),
            faults=("cut", "cut", "snip", "pause", "freeze"),
            faults_max=14,
            slow_requests=0.06,
            transactions_v2=True,
            transaction_timeout=12.0,
            seconds=14.0,
            think_max=0.2,
            writes=14,
            airtight=False,
        ),
        # The same, where consecutive transactions have one epoch.
        Scenario(
            "atomic-roaming-v1",
            check=Check.ON,
            proxies=2,
            partitions=2,
            clients=("atomic-liar", "atomic-liar", "atomic", "bypass", "bypass"),
            faults=("cut", "cut", "snip", "pause", "freeze"),
            faults_max=20,
            slow_requests=0.06,
            transaction_timeout=12.0,
            seconds=14.0,
            think_max=0.2,
            writes=14,
            airtight=False,
        ),
        # Transactions use the same partitions in every order: none may deadlock.
        Scenario(
            "atomic-crossing",
            check=Check.ON,
            partitions=3,
            clients=("atomic-crossing",) * 4,
            faults_max=0,
            lossy_reads=0.0,
            slow_requests=0.0,
            transaction_timeout=60.0,
            seconds=10.0,
            think_max=0.05,
            airtight=False,
        ),
        # No faults, no bypassing: every transactional append is at its expected offset.
        Scenario(
            "atomic-calm",
            check=Check.ON,
            partitions=2,
            clients=("atomic", "atomic", "atomic", "bare"),
            faults_max=0,
            slow_requests=0.0,
            transactions_v2=True,
            transaction_timeout=60.0,
            think_max=0.1,
        ),
        Scenario(
            "atomic-crossing-v2",
            check=Check.ON,
            proxies=2,
            partitions=3,
            clients=("atomic-routed",) * 4,
            faults_max=0,
            slow_requests=0.0,
            transactions_v2=True,
            transaction_timeout=60.0,
            seconds=10.0,
            think_max=0.05,
            airtight=False,
        ),
        # No faults, but unauthorized clients use the transactions; no commit may be refused because of them.
        Scenario(
            "atomic-unauthorized",
            check=Check.ON,
            partitions=2,
            clients=("atomic", "atomic", "stranger", "stranger"),
            faults_max=0,
            lossy_reads=0.0,
            slow_requests=0.0,
            transaction_timeout=60.0,
            think_max=0.1,
            airtight=False,
        ),
        Scenario(
            "atomic-unauthorized-v2",
            check=Check.ON,
            proxies=2,
            partitions=2,
            clients=("atomic", "atomic", "stranger", "stranger"),
            faults_max=0,
            lossy_reads=0.0,
            slow_requests=0.0,
            transactions_v2=True,
            transaction_timeout=60.0,
            think_max=0.1,
            airtight=False,
        ),
        Scenario("refused-transactions", clients=("transactional", "honest"), faults=("cut",)),
        Scenario(
            "refused-transactions-v2",
            clients=("transactional", "transactional-plain", "honest"),
            faults=("cut",),
            transactions_v2=True,
        ),
        Scenario(
            "bypass-true",
            check=Check.ON,
            clients=("bypass", "honest", "sequenced", "chain"),
            faults=("cut", "kill"),
            airtight=False,
        ),
        Scenario(
            "bypass",
            clients=("bypass", "honest", "sequenced", "chain"),
            proxies=2,
            faults=("cut", "kill", "state"),
            airtight=False,
        ),
        # Each bypassing append costs an epoch, or uses the last one of the shared producer id.
        Scenario(
            "rotating",
            clients=("bypass", "bypass", "honest", "sequenced", "chain"),
            proxies=2,
            faults=("cut", "kill", "state"),
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
        Scenario(
            "liars",
            clients=("liar", "liar", "honest", "sequenced"),
            faults=("cut", "kill", "pause"),
        ),
        Scenario(
            "liars-true",
            check=Check.ON,
            clients=("liar", "liar", "honest", "idempotent"),
            faults=("cut", "kill", "pause"),
        ),
        Scenario(
            "whole-requests",
            check=Check.ON,
            partitions=3,
            clients=("several", "several", "honest"),
            faults=("cut", "pause"),
            refuse_whole_requests=True,
        ),
        # ---- acks=0, other APIs between appends, requests for several topics
        Scenario(
            "silent",
            check=Check.ON,
            others=(("notes", Check.OFF), ("audit", Check.REQUIRED)),
            clients=("silent", "silent", "silent-idempotent", "honest", "mixed"),
            faults=("cut", "snip", "pause", "state"),
        ),
        Scenario(
            "control-requests",
            others=(("notes", Check.OFF),),
            clients=("asking", "asking", "asking-plain", "chain"),
            proxies=2,
            faults=("cut", "snip", "pause", "state", "freeze"),
        ),
        Scenario(
            "wide",
            check=Check.ON,
            partitions=3,
            others=(("notes", Check.OFF), ("audit", Check.REQUIRED)),
            clients=("wide", "wide", "several", "mixed"),
            faults=("cut", "snip", "pause", "expire", "recreate"),
            airtight=False,
        ),
        # ---- clients log in: Kafka must confirm WRITE first
        Scenario(
            "logged-in",
            check=Check.ON,
            others=(("notes", Check.OFF), ("audit", Check.REQUIRED)),
            clients=("silent-idempotent", "asking", "honest", "mixed", "chain"),
            faults=("cut", "snip", "pause", "state"),
            clients_log_in=True,
        ),
        Scenario(
            "wide-logged-in",
            check=Check.ON,
            partitions=3,
            others=(("notes", Check.OFF), ("audit", Check.REQUIRED)),
            clients=("wide", "several", "chain", "mixed", "silent"),
            faults=("cut", "snip", "pause", "state"),
            airtight=False,
            clients_log_in=True,
        ),
        Scenario(
            "wide-required",
            partitions=3,
            proxies=2,
            clients=("wide", "wide", "several", "honest"),
            faults=("cut", "pause", "expire", "expire", "delete", "freeze"),
            # No request waits as long as the producer state lives.
            expiration_seconds=8.0,
            pause_max=1.0,
            seconds=14.0,
            slow_requests=0.1,
        ),
        # ---- pipelines and races
        Scenario(
            "mixed-pipelines",
            check=Check.ON,
            clients=("mixed-chain", "mixed-chain", "chain"),
            faults=("cut", "snip", "pause"),
            too_large=0.1,
        ),
        Scenario(
            "twins",
            proxies=2,
            clients=("bare", "sequenced", "sequenced", "twin", "twin", "chain"),
            faults=("cut", "snip", "pause"),
            pause_max=2.0,
            faults_max=80,
            slow_requests=0.25,
            writes=16,
            think_max=0.15,
        ),
        # ---- checks switched on and off
        Scenario(
            "config-changes",
            check=Check.ON,
            managed=True,
            proxies=3,
            clients=("plain", "honest", "idempotent", "chain", "asking-plain", "mixed"),
            faults=("state", "blind", "blind", "blind", "zombie", "freeze", "cut", "crash", "tidy"),
            faults_max=14,
            writes=14,
            seconds=24.0,
            think_max=1.5,
            airtight=False,
        ),
        # A proposal delayed in a broker's queue arrives after the agreement; the state topic is compacted.
        Scenario(
            "proposals",
            proxies=2,
            clients=("honest", "sequenced", "chain"),
            faults=("propose", "propose", "tidy", "crash", "cut"),
        ),
        # ---- compaction, expiry and other changes of the log
        Scenario(
            "compacted",
            brokers=3,
            min_isr=2,
            proxies=2,
            clients=("honest", "sequenced", "chain", "twin"),
            faults=("compact", "compact", "expire", "kill", "move", "cut", "tidy"),
            faults_max=14,
            expiration_seconds=8.0,
            seconds=14.0,
        ),
        Scenario(
            "compacted-true",
            check=Check.ON,
            clients=("honest", "idempotent", "plain", "chain"),
            faults=("compact", "compact", "expire", "kill", "cut"),
            faults_max=14,
            expiration_seconds=8.0,
            seconds=14.0,
        ),
        Scenario(
            "reassigned",
            brokers=3,
            min_isr=2,
            proxies=2,
            clients=("honest", "sequenced", "chain", "twin"),
            faults=("reassign", "reassign", "delete", "delete", "move", "cut", "pause"),
            faults_max=12,
        ),
        Scenario(
            "deleted",
            proxies=2,
            clients=("honest", "sequenced", "chain", "reborn"),
            faults=("purge", "purge", "purge", "cut", "cut", "freeze", "kill"),
            faults_max=100,
            lossy_reads=0.2,
            think_max=0.2,
            writes=16,
        ),
        Scenario(
            "retyped",
            clients=("honest", "sequenced", "twin", "chain"),
            faults=("retype", "retype", "cut", "pause"),
            pause_max=2.0,
        ),
        # ---- restarted processes and clients
        Scenario(
            "restarted-clients",
            proxies=2,
            clients=("reborn", "reborn-chain", "reborn", "honest"),
            faults=("cut", "snip", "crash", "freeze", "pause"),
            slow_requests=0.06,
        ),
        Scenario(
            "hanging",
            proxies=2,
            clients=("honest", "sequenced", "chain", "reborn"),
            faults=("hang", "cut", "snip", "crash"),
            seconds=24.0,
            think_max=2.5,
        ),
        Scenario(
            "rolling",
            brokers=3,
            min_isr=2,
            proxies=2,
            clients=("honest", "sequenced", "chain", "bare", "reborn"),
            faults=("roll", "zombie", "move", "cut"),
            seconds=16.0,
            think_max=1.2,
        ),
        # On a `true` topic, an unfenced batch of a dead process may arrive late: its successor's conditional appends
        # wait for it. A late fenced batch may follow unfenced ones: no client gets success.
        Scenario(
            "takeover",
            check=Check.ON,
            clients=("honest", "idempotent", "plain", "chain"),
            faults=("crash", "pause", "roll"),
            slow_requests=0.2,
            takeover_seconds=9.0,
            airtight=False,
            unviolated=True,
            seconds=22.0,
            think_max=1.5,
        ),
        Scenario(
            "stranded",
            check=Check.ON,
            partitions=2,
            clients=("stranding", "stranding", "honest", "bare", "chain"),
            faults=("cut", "pause"),
            slow_requests=0.1,
            think_max=0.2,
            writes=14,
            airtight=False,
            unviolated=True,
        ),
        Scenario(
            "calm-stranded",
            check=Check.ON,
            partitions=2,
            clients=("stranding", "stranding", "honest", "bare"),
            faults_max=0,
            slow_requests=0.0,
        ),
        # ---- limits
        Scenario(
            "bulky",
            check=Check.ON,
            others=(("notes", Check.OFF),),
            clients=("bulky",) * 6,
            faults=("pause", "snip", "cut"),
            memory_bytes=6000,
        ),
        # A thread reads large requests and those with several batches: their connection waits, others overtake it.
        Scenario(
            "read-elsewhere",
            clients=("honest", "several", "chain", "bulky", "liar"),
            partitions=2,
            faults=("cut", "kill", "pause", "snip", "crash"),
            proxies=2,
            read_here_bytes=110,
        ),
        Scenario(
            "queues",
            check=Check.ON,
            clients=("chain", "chain", "idempotent-chain", "bare", "bare", "plain", "plain"),
            faults=("snip", "pause"),
            slow_requests=0.2,
            think_max=0.05,
        ),
    )
}


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
