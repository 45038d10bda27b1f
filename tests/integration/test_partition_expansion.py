"""Topics are expanded under load, with real Kafka, common admin tools and injected faults.

`check_log` verifies each run. Records partitioned by the old count lie before the thresholds, records partitioned by
the new count after them. No acknowledged record is lost.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiokafka.admin
import confluent_kafka.admin
import pytest
from kafka import KafkaAdminClient
from kafka.admin import ACL, ACLOperation, ACLPermissionType, ResourcePattern, ResourceType

from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.tools import run_tool
from fencepost_proxy.expansion.procedure import Step
from tests.kit.waiting import until
from tests.support.expanding import (
    INVALID_ASSIGNMENT,
    INVALID_PARTITIONS,
    NOT_LEADER,
    OK,
    POLICY_VIOLATION,
    TIMED_OUT,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC,
    check_log,
    counted,
    create_partitions,
    expand,
    expand_at_the_end,
    expansions,
    partition_count,
    writing,
)
from tests.support.fixtures import proxy_fixture
from tests.support.kafka import kafka_version, running_kafka, unique_topic
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log
from tests.support.transactions import Transactional

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(400)]

#: Longer than an admin client waits for its response.
_REPORTED_SECONDS = 130.0


#: Its timeout for open transactions leaves time for the test's steps on a busy machine.
expanding_proxy = proxy_fixture(config=counted(), arguments=("--status", "127.0.0.1:0"))


def status_of(proxy: ProxyProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(proxy.page("/status.json"))
    return found


def count_checked_topic(address: str, partitions: int = 1, replicas: int = 1, *, prefix: str = "expands") -> str:
    topic = unique_topic(prefix)
    with Connection(address) as connection:
        assert connection.create_topic(topic, partitions=partitions, replicas=replicas) == (OK, None)
    until(lambda: partition_count(address, topic) == partitions, f"{topic} to appear")
    return topic


def is_count_checked(address: str, topic: str) -> bool:
    """Whether the state topic records the start of the topic's partition-count checks."""
    stated = [json.loads(value) for value in Log(address).values("__fencepost_state") if value]
    return any(each.get("topic") == topic and "count" in each for each in stated)


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    return thread, found


# --- through any tool -------------------------------------------------------------------------------------------------


def by_kafka_topics(address: str, topic: str, count: int) -> None:
    arguments = ["--bootstrap-server", address, "--alter", "--topic", topic, "--partitions", str(count)]
    result = run_tool("kafka-topics", arguments, version=kafka_version(), timeout_seconds=180)
    assert result.exit_code == 0, result


def by_kafka_python(address: str, topic: str, count: int) -> None:
    admin = KafkaAdminClient(bootstrap_servers=address)
    try:
        admin.create_partitions({topic: count})
    finally:
        admin.close()


def by_aiokafka(address: str, topic: str, count: int) -> None:
    async def call() -> None:
        admin = aiokafka.admin.AIOKafkaAdminClient(bootstrap_servers=address)
        await admin.start()
        try:
            answer = await admin.create_partitions({topic: aiokafka.admin.NewPartitions(count)})
            assert [each[1] for each in answer.topic_errors] == [OK], answer
        finally:
            await admin.close()

    asyncio.run(call())


def by_confluent(address: str, topic: str, count: int) -> None:
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": address})
    for future in admin.create_partitions([confluent_kafka.admin.NewPartitions(topic, count)]).values():
        future.result(60)


TOOLS = [by_kafka_topics, by_kafka_python, by_aiokafka, by_confluent]


@pytest.mark.parametrize(
    ("prefix", "counts"),
    [pytest.param("doubles", (2, 4, 8), marks=pytest.mark.soak), ("expands", (2, 3, 8))],
)
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.brokers
def test_topic_expands_under_load_through_any_tool(
    kafka: KafkaCluster,
    expanding_proxy: ProxyProcess,
    tool: Callable[[str, str, int], None],
    prefix: str,
    counts: tuple[int, int, int],
) -> None:
    topic = count_checked_topic(expanding_proxy.bootstrap, prefix=prefix)

    with writing([expanding_proxy.bootstrap] * 3, topic) as writers:
        for count in counts:
            for writer in writers:
                writer.goes_on()
            tool(expanding_proxy.bootstrap, topic, count)
            assert partition_count(expanding_proxy.bootstrap, topic) == count
            for writer in writers:
                writer.goes_on()

    recorded = expansions(expanding_proxy.bootstrap, topic)
    assert [(each.from_count, each.to_count) for each in recorded] == list(zip((1, *counts), counts, strict=False))
    assert not any(each.unordered for each in recorded)
    assert [each.multiple for each in recorded] == ([True] * 3 if prefix == "doubles" else [True, False, False])
    assert recorded[0].thresholds > (0,)
    check_log(Log(kafka.bootstrap), topic, recorded, writers)
    assert sum(writer.codes[INVALID_PARTITIONS] for writer in writers) > 0, (
        "no writer was refused for its partition count"
    )


#: The other tools do the same in this test.
_MOSTLY_LATER = [pytest.param(each, marks=[] if each is by_kafka_topics else pytest.mark.soak) for each in TOOLS]


@pytest.mark.parametrize(
    ("prefix", "counts"),
    [("doubles", (2, 4, 8)), pytest.param("expands", (2, 3, 8), marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("tool", _MOSTLY_LATER)
def test_topic_expands_under_load_on_three_brokers(  # noqa: PLR0917 - fixtures
    kafka3: KafkaCluster,
    tmp_path: Path,
    tool: Callable[[str, str, int], None],
    prefix: str,
    counts: tuple[int, int, int],
    say: Callable[[str], None],
) -> None:
    with ProxyProcess(kafka3.bootstrap, tmp_path, config=counted()) as proxy:
        topic = count_checked_topic(proxy.bootstrap, replicas=3, prefix=prefix)
        with writing([proxy.bootstrap] * 4, topic) as writers:
            for count in counts:
                for writer in writers:
                    writer.goes_on()
                tool(proxy.bootstrap, topic, count)
                for writer in writers:
                    writer.goes_on()
        recorded = expansions(proxy.bootstrap, topic)
        assert [(each.from_count, each.to_count) for each in recorded] == list(zip((1, *counts), counts, strict=False))
        check_log(Log(kafka3.bootstrap), topic, recorded, writers)
        held = re.findall(r"expansion ended .*?blocked_seconds=([\d.]+)", proxy.log)
        assert len(held) == len(counts)
        say(f"{tool.__name__}, three brokers, {prefix}: appends blocked for {', '.join(held)} s")


def test_append_block_time_is_logged_measured_and_shown(expanding_proxy: ProxyProcess) -> None:
    topic = count_checked_topic(expanding_proxy.bootstrap)

    assert expand(expanding_proxy.bootstrap, topic, 2) == (OK, None)

    [line] = [each for each in expanding_proxy.log.splitlines() if "expansion ended" in each and topic in each]
    assert "result=done" in line
    assert re.search(r" blocked_seconds=\d+\.\d+ ", line)
    for step in ("intent", "barriers", "transactions", "create", "leaders", "ends", "store"):
        assert re.search(rf"\b{step}=\d+\.\d+", line)
    shown = {each["topic"]: each for each in status_of(expanding_proxy)["expansions"]}
    assert (shown[topic]["from_count"], shown[topic]["to_count"], shown[topic]["state"]) == (1, 2, "done")
    assert shown[topic]["thresholds"] == [0]
    metrics = expanding_proxy.page("/metrics")
    assert 'fencepost_expansions_total{result="done"}' in metrics
    assert "fencepost_expansion_blocked_seconds_bucket" in metrics
    assert "fencepost_expansions_pending 0.0" in metrics


def test_expansion_to_non_multiple_is_refused_unless_allowed(expanding_proxy: ProxyProcess) -> None:
    topic, other = (
        count_checked_topic(expanding_proxy.bootstrap, 2, prefix="doubles"),
        count_checked_topic(expanding_proxy.bootstrap, 2),
    )

    for validate_only in (True, False):
        code, message = expand(expanding_proxy.bootstrap, topic, 3, validate_only=validate_only)
        assert code == INVALID_PARTITIONS
        assert (message or "").startswith(f"EXPANSION_NOT_A_MULTIPLE topic={topic} from=2 to=3: ")
        assert "expand it to 4, 6 or 8" in (message or "")
        assert "fencepost.ordered.partition.expansion=any" in (message or "")
        assert expand(expanding_proxy.bootstrap, topic, 6, validate_only=True) == (OK, None)
    assert f"topic={topic} step" not in expanding_proxy.log
    assert partition_count(expanding_proxy.bootstrap, topic) == 2

    assert expand(expanding_proxy.bootstrap, other, 3) == (OK, None)
    assert [each.multiple for each in expansions(expanding_proxy.bootstrap, other)] == [False]
    assert any(
        " WARNING " in line and f"topic={other} from=2 to=3" in line for line in expanding_proxy.log.splitlines()
    )
    with Connection(expanding_proxy.bootstrap) as connection:
        assert connection.alter_topic(topic, {"fencepost.ordered.partition.expansion": "any"}) == (OK, None)
    assert expand(expanding_proxy.bootstrap, topic, 3) == (OK, None)


# --- refused and unchecked expansions ---------------------------------------------------------------------------------


def test_validate_only_is_kafkas_answer_and_nothing_else(expanding_proxy: ProxyProcess) -> None:
    topic = count_checked_topic(expanding_proxy.bootstrap, 2)

    assert expand(expanding_proxy.bootstrap, topic, 3, validate_only=True) == (OK, None)
    code, message = expand(expanding_proxy.bootstrap, topic, 2, validate_only=True)

    assert (code, message) == (INVALID_PARTITIONS, "Topic already has 2 partition(s).")
    assert partition_count(expanding_proxy.bootstrap, topic) == 2
    assert f"topic={topic} step" not in expanding_proxy.log


@pytest.mark.parametrize(
    ("count", "assignments", "code"),
    [(2, None, INVALID_PARTITIONS), (1, None, INVALID_PARTITIONS), (3, [[99]], INVALID_ASSIGNMENT)],
)
def test_expansion_refused_by_kafka_is_relayed_unchanged(
    kafka: KafkaCluster, expanding_proxy: ProxyProcess, count: int, assignments: list[list[int]] | None, code: int
) -> None:
    topic = count_checked_topic(expanding_proxy.bootstrap, 2)

    reported = expand(expanding_proxy.bootstrap, topic, count, assignments=assignments)

    assert reported == expand(kafka.bootstrap, topic, count, assignments=assignments)
    assert reported[0] == code
    assert f"topic={topic} step" not in expanding_proxy.log
    with writing([expanding_proxy.bootstrap], topic) as [writer]:
        writer.goes_on()


def test_the_admins_assignments_are_kept(kafka: KafkaCluster, expanding_proxy: ProxyProcess) -> None:
    topic = count_checked_topic(expanding_proxy.bootstrap)
    [node_id] = kafka.node_ids

    assert expand(expanding_proxy.bootstrap, topic, 3, assignments=[[node_id], [node_id]]) == (OK, None)
    assert partition_count(kafka.bootstrap, topic) == 3


def test_unchecked_topics_expand_in_the_same_request(expanding_proxy: ProxyProcess) -> None:
    topic, plain = count_checked_topic(expanding_proxy.bootstrap), unique_topic("plain")
    with Connection(expanding_proxy.bootstrap) as connection:
        assert connection.create_topic(plain) == (OK, None)
        reported = create_partitions(connection, {plain: 4, topic: 2, "there-is-none": 5})

    assert {name: code for name, (code, _) in reported.items()} == {
        plain: OK,
        topic: OK,
        "there-is-none": UNKNOWN_TOPIC,
    }
    assert partition_count(expanding_proxy.bootstrap, plain) == 4
    assert expansions(expanding_proxy.bootstrap, topic) == [(1, 2, (0,), False, True)]
    assert expansions(expanding_proxy.bootstrap, plain) == []


def test_concurrent_expansion_is_refused_as_in_progress(kafka: KafkaCluster, expanding_proxy: ProxyProcess) -> None:
    topic = count_checked_topic(expanding_proxy.bootstrap)

    with Transactional(expanding_proxy.bootstrap, topic) as transaction:
        transaction.begin(topic)
        assert transaction.append(topic, b"t:0:1").error_code == OK  # makes the first expansion wait
        first, found = in_thread(lambda: expand(expanding_proxy.bootstrap, topic, 2))
        until(lambda: f"topic={topic} step=barriers" in expanding_proxy.log, "the first one to wait")
        code, message = expand(expanding_proxy.bootstrap, topic, 3)
        assert code == INVALID_PARTITIONS
        assert message == f"EXPANSION_IN_PROGRESS topic={topic} from=1 to=2: it continues automatically"
        transaction.end(commit=True)
        first.join(_REPORTED_SECONDS)

    assert found == [(OK, None)]
    assert partition_count(kafka.bootstrap, topic) == 2


def test_expansion_request_timeout_reports_that_it_continues(expanding_proxy: ProxyProcess) -> None:
    topic = count_checked_topic(expanding_proxy.bootstrap)

    with Transactional(expanding_proxy.bootstrap, topic) as transaction:
        transaction.begin(topic)
        assert transaction.append(topic, b"t:0:1").error_code == OK
        code, message = expand(expanding_proxy.bootstrap, topic, 2, timeout_ms=1_000)
        assert code == TIMED_OUT
        assert (message or "").startswith(f"EXPANSION_IN_PROGRESS topic={topic} from=1 to=2: the expansion continues")
        transaction.end(commit=True)

    until(lambda: expansions(expanding_proxy.bootstrap, topic), f"{topic} to be expanded")


# --- transactions -----------------------------------------------------------------------------------------------------


def test_overlapping_transactions_do_not_prevent_expansion(kafka: KafkaCluster, expanding_proxy: ProxyProcess) -> None:
    topic = count_checked_topic(expanding_proxy.bootstrap)
    ended: Counter[int] = Counter()

    def works(number: int) -> None:
        """Append until the partition count is refused, and retry blocked appends."""
        with Transactional(expanding_proxy.bootstrap, f"{topic}-{number}") as transaction:
            while True:
                for _ in range(2):
                    while (code := transaction.append(topic, b"t:0:1").error_code) == NOT_LEADER:
                        time.sleep(0.05)
                    if code == INVALID_PARTITIONS:
                        return
                    assert code == OK
                    time.sleep(0.05)
                transaction.end(commit=True)
                ended[number] += 1

    threads = [threading.Thread(target=works, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(ended) == len(threads), "transactions upon transactions")

    assert expand(expanding_proxy.bootstrap, topic, 2) == (OK, None)
    for thread in threads:
        thread.join(_REPORTED_SECONDS)
    check_log(Log(kafka.bootstrap), topic, expansions(expanding_proxy.bootstrap, topic), [])


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("commit", [True, False])
def test_open_transaction_finishes_while_expansion_waits(
    kafka: KafkaCluster,
    expanding_proxy: ProxyProcess,
    protocol: int,
    commit: bool,
) -> None:
    topic = count_checked_topic(expanding_proxy.bootstrap)

    with (
        Transactional(expanding_proxy.bootstrap, topic, protocol=protocol) as transaction,
        writing([expanding_proxy.bootstrap], topic) as writers,
    ):
        writers[0].goes_on()
        transaction.begin(topic)
        assert transaction.append(topic, b"t:0:1").error_code == OK
        thread, found = in_thread(lambda: expand(expanding_proxy.bootstrap, topic, 2))
        until(lambda: f"topic={topic} step=barriers" in expanding_proxy.log, "the expansion to wait")
        assert transaction.append(topic, b"t:1:1").error_code == OK, (
            "the open transaction cannot append, so it could never end"
        )
        assert not found
        transaction.end(commit=commit)
        thread.join(_REPORTED_SECONDS)
        writers[0].goes_on()

    assert found == [(OK, None)]
    check_log(Log(kafka.bootstrap), topic, expansions(expanding_proxy.bootstrap, topic), writers)


def test_unfinished_transaction_fails_expansion_and_topic_reopens(kafka: KafkaCluster, tmp_path: Path) -> None:
    with ProxyProcess(kafka.bootstrap, tmp_path, config=counted(wait_seconds=4.0)) as impatient:
        topic = count_checked_topic(impatient.bootstrap)
        with (
            Transactional(impatient.bootstrap, topic) as transaction,
            writing([impatient.bootstrap], topic) as writers,
        ):
            writers[0].goes_on()
            transaction.begin(topic)
            assert transaction.append(topic, b"t:0:1").error_code == OK
            code, message = expand(impatient.bootstrap, topic, 2)
            assert code == POLICY_VIOLATION
            assert message is not None
            assert message.startswith(f"EXPANSION_FAILED topic={topic} from=1 to=2: after 4 s")
            writers[0].goes_on()
            assert partition_count(kafka.bootstrap, topic) == 1
            transaction.end(commit=True)
            # The expansion succeeds now. Retry it, since four seconds may be short on a busy machine.
            expand_at_the_end(impatient.bootstrap, topic, 2)
            writers[0].goes_on()

        recorded = expansions(impatient.bootstrap, topic)
        assert [(each.from_count, each.to_count) for each in recorded] == [(1, 2)]
        check_log(Log(kafka.bootstrap), topic, recorded, writers)


# --- the topic itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("created_anew", [False, True])
def test_deleting_a_topic_ends_its_expansion(expanding_proxy: ProxyProcess, created_anew: bool) -> None:
    topic = count_checked_topic(expanding_proxy.bootstrap)

    with Transactional(expanding_proxy.bootstrap, topic) as transaction:
        transaction.begin(topic)
        assert transaction.append(topic, b"t:0:1").error_code == OK
        thread, found = in_thread(lambda: expand(expanding_proxy.bootstrap, topic, 2))
        until(lambda: f"topic={topic} step=barriers" in expanding_proxy.log, "the expansion to wait")
        with Connection(expanding_proxy.bootstrap) as connection:
            assert connection.delete_topic(topic) == OK
            if created_anew:
                until(lambda: connection.create_topic(topic)[0] == OK, "its name to be free")
        thread.join(_REPORTED_SECONDS)

    [(code, message)] = found  # type: ignore[misc]
    assert code == UNKNOWN_TOPIC
    assert "deleted" in message
    if created_anew:
        until(lambda: partition_count(expanding_proxy.bootstrap, topic) == 1, "the new one")
        with writing([expanding_proxy.bootstrap], topic) as [writer]:
            writer.goes_on()
        assert expand(expanding_proxy.bootstrap, topic, 2) == (OK, None)


def test_bypassing_expansion_is_recorded_as_unordered(kafka: KafkaCluster, expanding_proxy: ProxyProcess) -> None:
    topic = count_checked_topic(expanding_proxy.bootstrap)
    with writing([expanding_proxy.bootstrap], topic) as [writer]:
        writer.goes_on()
        until(lambda: is_count_checked(kafka.bootstrap, topic), "counting to begin")
        assert expand(kafka.bootstrap, topic, 3) == (OK, None)
        until(lambda: expansions(expanding_proxy.bootstrap, topic), "the expansion to be noticed")
        writer.goes_on()

    assert expansions(expanding_proxy.bootstrap, topic) == [(1, 3, (), True, True)]
    until(lambda: f"topic={topic} was=1 partitions=3" in expanding_proxy.log, "the report of it")
    [line] = [each for each in expanding_proxy.log.splitlines() if "UNORDERED_EXPANSION" in each and topic in each]
    assert " ERROR " in line
    shown = status_of(expanding_proxy)
    assert any(topic in each for each in shown["warnings"])  # type: ignore[attr-defined]
    assert 'fencepost_expansions_total{result="unordered"}' in expanding_proxy.page("/metrics")
    # Later expansions are ordered again.
    assert expand(expanding_proxy.bootstrap, topic, 5) == (OK, None)
    assert [each.unordered for each in expansions(expanding_proxy.bootstrap, topic)] == [True, False]


# --- rights -----------------------------------------------------------------------------------------------------------

AUTHORIZER = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}


def forbid_alter(address: str, topic: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=address)
    try:
        pattern = ResourcePattern(ResourceType.TOPIC, topic)
        anybody = {"principal": "User:ANONYMOUS", "host": "*", "resource_pattern": pattern}
        admin.create_acls(
            [
                ACL(operation=ACLOperation.ALL, permission_type=ACLPermissionType.ALLOW, **anybody),
                ACL(operation=ACLOperation.ALTER, permission_type=ACLPermissionType.DENY, **anybody),
            ]
        )
    finally:
        admin.close()
    until(lambda: expand(address, topic, 9, validate_only=True)[0] == TOPIC_AUTHORIZATION_FAILED, "the ACLs to hold")


def test_expansion_without_alter_permission_changes_nothing(tmp_path: Path) -> None:
    """Kafka checks the permission of the client and of the proxy. This test revokes it just before the proxy uses
    it."""
    go = tmp_path / "go"
    with (
        running_kafka(1, properties=AUTHORIZER) as kafka,
        ProxyProcess(
            kafka.bootstrap,
            tmp_path,
            config=counted(),
            module="tests.support.dying_proxy",
            environment={"STOP_AT": f"create:before:{go}"},
        ) as proxy,
    ):
        topic, other = count_checked_topic(proxy.bootstrap), count_checked_topic(proxy.bootstrap)
        forbid_alter(kafka.bootstrap, other)
        assert expand(proxy.bootstrap, other, 2) == (TOPIC_AUTHORIZATION_FAILED, None), (
            "the proxy must return Kafka's response"
        )
        assert f"topic={other} step" not in proxy.log

        with writing([proxy.bootstrap], topic) as [writer]:
            writer.goes_on()
            thread, found = in_thread(lambda: expand(proxy.bootstrap, topic, 2))
            until(lambda: Path(f"{go}.reached").exists(), "it to be about to create partitions")
            forbid_alter(kafka.bootstrap, topic)
            go.touch()
            thread.join(_REPORTED_SECONDS)
            writer.goes_on()
        [(code, message)] = found  # type: ignore[misc]
        assert code == TOPIC_AUTHORIZATION_FAILED
        assert "Give the proxy's own principal the right to ALTER the topic" in message
        assert expansions(proxy.bootstrap, topic) == []
        assert partition_count(kafka.bootstrap, topic) == 1


# --- several proxies --------------------------------------------------------------------------------------------------


def test_expansion_through_two_proxies_keeps_order(kafka: KafkaCluster, tmp_path: Path) -> None:
    with (
        ProxyProcess(kafka.bootstrap, tmp_path, config=counted()) as one,
        ProxyProcess(kafka.bootstrap, tmp_path, config=counted()) as other,
    ):
        topic = count_checked_topic(one.bootstrap)
        with writing([one.bootstrap, other.bootstrap, other.bootstrap], topic) as writers:
            for proxy, count in ((one, 2), (other, 3), (one, 8)):
                for writer in writers:
                    writer.goes_on()
                assert expand(proxy.bootstrap, topic, count) == (OK, None)
                for writer in writers:
                    writer.goes_on()
        # The other proxy may learn of the last expansion a moment later.
        recorded = until(
            lambda: expansions(other.bootstrap, topic), "all to be known", accept=lambda each: len(each) == 3
        )
        assert [each.to_count for each in recorded] == [2, 3, 8]
        check_log(Log(kafka.bootstrap), topic, recorded, writers)


def test_expansion_fails_after_waiting_for_paused_proxy(kafka: KafkaCluster, tmp_path: Path) -> None:
    with (
        ProxyProcess(kafka.bootstrap, tmp_path, config=counted(wait_seconds=5.0)) as one,
        ProxyProcess(kafka.bootstrap, tmp_path, config=counted(wait_seconds=5.0)) as other,
    ):
        topic = count_checked_topic(one.bootstrap)
        with writing([one.bootstrap], topic) as writers:
            writers[0].goes_on()
            other.pause()
            code, message = expand(one.bootstrap, topic, 2)
            assert code == POLICY_VIOLATION
            assert "have not closed the topic" in (message or "")
            writers[0].goes_on()
            other.resume()
            expand_at_the_end(one.bootstrap, topic, 2)
            writers[0].goes_on()
        check_log(Log(kafka.bootstrap), topic, expansions(one.bootstrap, topic), writers)


# --- processes killed at any step -------------------------------------------------------------------------------------

#: Every step that sends requests, and the moment at which a process reports a closed append barrier.
STOPS = [
    *(step.value for step in Step if step not in (Step.BARRIERS, Step.PROBE, Step.ABANDON)),
    "closed",
]


#: The point before one of these steps equals the point after the previous step.
LIKE_AFTER_ANOTHER = frozenset({"intent", "create", "leaders", "ends", "store"})


def _stop(step: str, when: str, *, survivor: bool) -> Any:
    long_form = when == "before" and (survivor or step in LIKE_AFTER_ANOTHER)
    name = f"{step}-{when}-{'another-goes-on' if survivor else 'starts-anew'}"
    return pytest.param(step, when, survivor, id=name, marks=[pytest.mark.soak] if long_form else [])


@pytest.mark.parametrize(
    ("step", "when", "survivor"),
    [_stop(step, when, survivor=other) for step in STOPS for other in (False, True) for when in ("before", "after")],
)
def test_expansion_killed_at_any_step_keeps_order(
    kafka: KafkaCluster,
    tmp_path: Path,
    step: str,
    when: str,
    survivor: bool,
) -> None:
    """A proxy is killed with SIGKILL at the step. It restarts, or another proxy continues: the topic is expanded, or
    unchanged and can be expanded."""
    dying = ProxyProcess(
        kafka.bootstrap,
        tmp_path,
        config=counted(),
        module="tests.support.dying_proxy",
        environment={"STOP_AT": f"{step}:{when}:die"},
    )
    other = ProxyProcess(kafka.bootstrap, tmp_path, config=counted()) if survivor else None
    try:
        topic = count_checked_topic(dying.bootstrap)
        goes_on = dying if other is None else other
        with writing([dying.bootstrap, goes_on.bootstrap], topic) as writers:
            for writer in writers:
                writer.goes_on()
            thread, found = in_thread(lambda: _reported_or_nothing(dying.bootstrap, topic, 3))
            until(lambda: not dying.running, "it to die")
            thread.join(_REPORTED_SECONDS)
            assert found == [None]
            dying.module, dying.environment = "fencepost_proxy", {}
            if other is None:
                dying.restart()
            address = goes_on.bootstrap
            begun = (step, when) not in {("validate", "before"), ("validate", "after"), ("intent", "before")}
            if begun:
                until(lambda: len(expansions(address, topic)) == 1, "the expansion to end")
            else:
                assert expand(address, topic, 3) == (OK, None)
            if other is not None:
                dying.restart()
            for writer in writers:
                writer.goes_on()
            expand_at_the_end(address, topic, 4)
            for writer in writers:
                writer.goes_on()
        recorded = expansions(address, topic)
        assert [(each.from_count, each.to_count, each.unordered) for each in recorded] == [(1, 3, False), (3, 4, False)]
        check_log(Log(kafka.bootstrap), topic, recorded, writers)
    finally:
        dying.close()
        if other is not None:
            other.close()


def _reported_or_nothing(address: str, topic: str, count: int) -> tuple[int, str | None] | None:
    try:
        return expand(address, topic, count)
    except Exception:
        return None


_BROKER_STOPS = [pytest.param(each, marks=[] if each in ("create", "store") else pytest.mark.soak) for each in STOPS]


@pytest.mark.parametrize("step", _BROKER_STOPS)
def test_the_broker_is_killed_at_a_step(tmp_path: Path, step: str) -> None:
    """The broker is killed and restarted while the proxy is paused at the step. The expansion still ends."""
    go = tmp_path / "go"
    with (
        running_kafka(1) as kafka,
        ProxyProcess(
            kafka.bootstrap,
            tmp_path,
            config=counted(wait_seconds=60.0),
            module="tests.support.dying_proxy",
            environment={"STOP_AT": f"{step}:before:{go}"},
        ) as proxy,
    ):
        topic = count_checked_topic(proxy.bootstrap)
        with writing([proxy.bootstrap], topic) as writers:
            writers[0].goes_on()
            thread, _ = in_thread(lambda: _reported_or_nothing(proxy.bootstrap, topic, 3))
            until(lambda: Path(f"{go}.reached").exists(), "it to be there")
            [node_id] = kafka.node_ids
            kafka.kill(node_id)
            go.touch()
            kafka.restart(node_id)
            thread.join(_REPORTED_SECONDS)

            def ended() -> bool:
                if expansions(proxy.bootstrap, topic):
                    return True
                # If the intent was not stored yet, the client got an error and sends the request again.
                return step in ("validate", "intent") and expand(proxy.bootstrap, topic, 3)[0] == OK

            until(lambda: partition_count(proxy.bootstrap, topic) > 0, "the topic to be there again")
            until(ended, "the expansion to end", seconds=90)
            writers[0].goes_on()
        recorded = expansions(proxy.bootstrap, topic)
        assert [(each.from_count, each.to_count, each.unordered) for each in recorded] == [(1, 3, False)]
        check_log(Log(kafka.bootstrap), topic, recorded, writers)
