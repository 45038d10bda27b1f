"""Several proxies side by side: restarted, killed, and paused with requests in flight.

On `required` topics, Kafka's sequence check refuses every append at a wrong offset, from any process. On `true` topics,
producers with their producer ids can cause misplaced appends. The proxy reports these as violations, never as
successes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.fault_proxy import Cut, Hold
from tests.kit.stage import PATIENCE_SECONDS
from tests.kit.waiting import until
from tests.support.kafka import unique_topic
from tests.support.ports import free_port
from tests.support.proxy import ProxyProcess, probed
from tests.support.raw import Answer, Closed, Connection, batch
from tests.support.three_brokers import FENCED, Stage3, leaders_listener, required_topic
from tests.support.writers import (
    CONDITIONAL,
    OK,
    POLICY_VIOLATION,
    TIMED_OUT,
    UNCONDITIONAL,
    Ledger,
    Load,
    append_at_the_end,
    offsets,
    under_load,
    value_of,
)

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(900)]

NOT_LEADER = 6

Say = Callable[[str], None]
ONE_ROUND_AND_MANY = [1, pytest.param(10, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]


# --- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", ONE_ROUND_AND_MANY)
@pytest.mark.parametrize("kill", [False, True], ids=["SIGTERM", "kill -9"])
def test_a_rolling_restart_of_two_proxies(kill: bool, rounds: int, stage3: Stage3, say: Say) -> None:
    topic = stage3.create(required_topic())
    with under_load(stage3, topic) as load:
        for _ in range(rounds):
            roll(load, stage3.proxies, kill=kill)
    say(f"{'kill -9' if kill else 'SIGTERM'}: {load.ledger}")
    assert load.ledger.lost, "no connection was lost: the restart had no effect"


@pytest.mark.parametrize("kill", [False, True], ids=["SIGTERM", "kill -9"])
def test_rolling_restart_of_proxies_that_share_ports(kill: bool, stage3: Stage3, tmp_path: Path, say: Say) -> None:
    upstream, config = stage3.upstream, f"reuse_port = true\n{FENCED}"
    topic, checked = stage3.create(required_topic()), stage3.create(unique_topic("checked"))
    with (
        ProxyProcess(upstream, tmp_path, config=config) as first,
        ProxyProcess(upstream, tmp_path, config=config, port=first.port) as second,
    ):
        proxies = [first, second]
        with under_load(stage3, topic, proxies=proxies) as load:
            roll(load, proxies, kill=kill)
        append_at_the_end(stage3.log, first, "checked", Ledger(checked))
        warned = re.compile(rf"detected, not prevented.* names=.*{checked}")
        until(lambda: warned.search(first.log + second.log), f"a warning of {checked}")
    say(f"{'kill -9' if kill else 'SIGTERM'}: {load.ledger}")
    assert load.ledger.lost, "no connection was lost: the restart had no effect"


def roll(load: Load, proxies: Sequence[ProxyProcess], *, kill: bool) -> None:
    for proxy in proxies:
        if kill:
            proxy.kill()
        else:
            assert proxy.stop() == 0
        load.more()
        proxy.restart()
        load.more()


@pytest.mark.parametrize(
    ("kill", "rounds"),
    [
        (False, 1),
        pytest.param(False, 10, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
        pytest.param(True, 5, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
    ids=["SIGTERM", "SIGTERM often", "kill -9 often"],
)
def test_rolling_restart_with_unconditional_producers_reports_misplaced_appends(
    kill: bool, rounds: int, stage3: Stage3, say: Say
) -> None:
    topic = stage3.create(unique_topic("checked"))
    with under_load(stage3, topic, CONDITIONAL | UNCONDITIONAL) as load:
        for _ in range(rounds):
            roll(load, stage3.proxies, kill=kill)
    say(f"`true`: {load.ledger.misplaced()} misplaced and reported as such; {load.ledger}")


# --- paused proxies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", ONE_ROUND_AND_MANY)
@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_paused_proxy_misplaces_no_append_unreported(prefix: str, rounds: int, stage3: Stage3, say: Say) -> None:
    topic = stage3.create(unique_topic(prefix))
    kinds = CONDITIONAL if prefix == "required" else CONDITIONAL | UNCONDITIONAL
    with under_load(stage3, topic, kinds) as load:
        for run in range(2 * rounds):
            zombie = stage3.proxies[run % 2]
            zombie.pause()
            load.more(30)
            zombie.resume()
            load.more()
    say(f"{prefix}: {load.ledger.misplaced()} misplaced and reported as such; {load.ledger}")


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "not fenced"])
@pytest.mark.parametrize("where", ["unread by it", "sent on by it"])
def test_a_zombie_with_requests_in_its_sockets(where: str, fenced: bool, stage3: Stage3, say: Say) -> None:
    """A proxy with a confirmed fence pauses. A writer of another proxy takes the offset, then the first proxy
    resumes."""
    zombie, other = stage3.proxies if fenced else stage3.naive
    topic = stage3.create(required_topic())
    ledger = Ledger(topic)
    runs = 6
    codes: list[int] = []
    for run in range(runs):
        # The connections are older than the acknowledgement that confirms the fence, and than the pause.
        with (
            Connection(leaders_listener(zombie, topic)) as client,
            Connection(leaders_listener(other, topic)) as rival,
        ):
            client.api_versions()
            rival.api_versions()
            end = append_at_the_end(stage3.log, zombie, f"warm{run}", ledger) + 1
            late = [value_of(f"late{i}", run, end + i) for i in range(3)]
            held = stage3.pipes[1].add(Hold("request", late[0]))
            if where == "unread by it":
                zombie.pause()
            for i, value in enumerate(late):
                ledger.sent(value)
                client.send_produce({topic: {0: batch(value, expected=end + i)}})
            if where != "unread by it":
                held.wait_observed()
                zombie.pause()
            try:
                for i in range(4):
                    ledger.append(rival, value_of(f"rival{i}", run, end + i))
                if where != "unread by it":
                    held.release()
            finally:
                zombie.resume()
                held.release()
            for value in late:
                answer = client.receive_produce()[1][topic, 0]
                codes.append(answer.error_code)
                if fenced:
                    ledger.note(value, answer)
        stage3.pipes[1].forget_faults()
    misplaced = ledger.misplaced(stage3.log)
    title = "fenced" if fenced else "not fenced"
    say(f"{where}, {title}: {runs} runs, {misplaced} at a wrong offset; the zombie's clients got {codes}")
    if fenced:
        assert OK not in codes
        ledger.check(stage3.log)
    else:
        assert misplaced, "no append was misplaced without a fence: these runs prove nothing"


# --- an idempotent append and a conditional append through different proxies ------------------------------------------


@pytest.mark.parametrize("prefix", ["checked", "required"])
def test_append_of_dead_proxy_crosses_a_conditional_one(prefix: str, stage3: Stage3, say: Say) -> None:
    """1: Proxy 1 sends X, and dies. 2: Proxy 2 reads the log end and sends C for the same offset. 3: X is appended.
    4: If X is of an idempotent producer, then C is appended one offset too high, since its fence sequence was still the
    next one: a reported violation. On a `required` topic X is conditional, and C is refused."""
    dying, living = stage3.proxies
    topic = stage3.create(unique_topic(prefix))
    ledger = Ledger(topic)
    append_at_the_end(stage3.log, dying, "warm", ledger)
    end = append_at_the_end(stage3.log, living, "warm", ledger) + 1
    of_x = end if prefix == "required" else None
    x, c = value_of("x", 0, of_x), value_of("c", 0, end)
    with (
        Hold("request", x) as x_held,
        Hold("request", c) as c_held,
        Connection(leaders_listener(dying, topic)) as one,
        Connection(leaders_listener(living, topic)) as client,
    ):
        for held in (x_held, c_held):
            stage3.pipes[1].add(held)
        producer = one.init_producer_id() if of_x is None else None
        ledger.sent(x)
        one.send_produce({topic: {0: batch(x, expected=of_x, producer=producer)}})
        x_held.wait_observed()
        ledger.sent(c)
        client.send_produce({topic: {0: batch(c, expected=end)}})
        c_held.wait_observed()
        x_held.release()
        until(lambda: stage3.log.end(topic) == end + 1, "what was on its way to land")
        dying.kill()
        c_held.release()
        answer = client.receive_produce()[1][topic, 0]
    ledger.note(c, answer)
    say(f"answer {answer.error_code} {answer.message}")
    assert answer.error_code == POLICY_VIOLATION
    message = answer.message or ""
    assert message.startswith("OFFSET_VIOLATION" if of_x is None else "OFFSET_MISMATCH")
    if of_x is None:
        assert f"appended_at={end + 1}" in message
        assert offsets(stage3.log.batches(topic))[c] == end + 1
        until(
            lambda: any("OFFSET_VIOLATION" in line and topic in line for line in living.log.splitlines()),
            "the log line: it names the other writer, which is looked up first",
        )
    stage3.mend()
    for proxy in stage3.proxies:
        append_at_the_end(stage3.log, proxy, "after", ledger)
    ledger.check(stage3.log)
    assert ledger.misplaced() == (of_x is None)


# --- retries through another proxy ------------------------------------------------------------------------------------


def _that_counts(answer: Answer) -> Answer | None:
    """Not 6, with which the proxy reports that it could not read the log in time."""
    return None if answer.error_code == NOT_LEADER else answer


@pytest.mark.parametrize("how", ["the wire was cut", "the proxy was killed"])
@pytest.mark.parametrize("kind", ["named", "idempotent", "bare"])
def test_a_retry_through_another_proxy(how: str, kind: str, stage3: Stage3) -> None:
    """The first attempt was appended without a response, and other appends follow it. Only a write id identifies the
    retry."""
    first, second = stage3.proxies
    topic = stage3.create(required_topic())
    ledger = Ledger(topic)
    end = append_at_the_end(stage3.log, first, "warm", ledger) + 1
    value = value_of(kind, 0, end)
    name = value if kind == "named" else None
    ledger.sent(value, named=kind == "named", idempotent=kind == "idempotent")
    with Connection(leaders_listener(first, topic)) as client:
        producer = client.init_producer_id() if kind == "idempotent" else None
        records = batch(value, expected=end, write_id=name, producer=producer)
        if how == "the wire was cut":
            fault = stage3.pipes[1].add(Cut("response", value))
            client.send_produce({topic: {0: records}})
            fault.wait()
            with suppress(Closed, TimeoutError):
                assert client.receive_produce()[1][topic, 0].error_code in (OK, TIMED_OUT)
        else:
            with Hold("response", value) as held:
                stage3.pipes[1].add(held)
                client.send_produce({topic: {0: records}})
                held.wait()
                first.kill()
    append_at_the_end(stage3.log, second, "behind", ledger)
    with Connection(leaders_listener(second, topic)) as client:
        answer = until(lambda: _that_counts(client.append(topic, records)), "an answer that counts")
    ledger.note(value, answer, again=True)
    if kind == "named":
        assert (answer.error_code, answer.base_offset) == (OK, end)
    else:
        assert answer.error_code == POLICY_VIOLATION
        assert "POSSIBLY_YOURS" in (answer.message or "")
    assert offsets(stage3.log.batches(topic))[value] == end
    ledger.check(stage3.log)


def test_proxy_starting_with_partial_kafka_serves_once_healed(stage3: Stage3, tmp_path: Path) -> None:
    """Two of three brokers are down, so no record can be stored, and soon no leader is available."""
    status = f"127.0.0.1:{free_port()}"
    arguments = ("--status", status)
    for node_id in (2, 3):
        stage3.kafka.kill(node_id)
    with ThreadPoolExecutor(1) as pool:
        bootstrap = ",".join(pipe.address for pipe in stage3.pipes.values())
        starting = pool.submit(ProxyProcess, bootstrap, tmp_path, config=FENCED, arguments=arguments)
        try:
            until(lambda: probed(status, "/livez") == (200, "ok\n"), "a process")
            until(lambda: "__fencepost_state" in probed(status, "/readyz")[1], "it to say what it waits for")
            assert not starting.done()
        finally:
            stage3.mend()
        with starting.result(PATIENCE_SECONDS):
            until(lambda: probed(status, "/readyz")[0] == 200, "it to be ready")
