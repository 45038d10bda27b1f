"""Share groups (KIP-932): Kafka's own tools behave the same through the proxy and without it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from uuid import uuid4

import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.types import Address
from tests.kit.waiting import until
from tests.support.kafka import kafka_version, unique_topic
from tests.support.messages import RawConnection
from tests.support.proxy import ProxyProcess
from tests.support.tools import Command, at_both, run_script

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.timeout(600),
    pytest.mark.skipif(kafka_version() < "4.2", reason="share groups are complete from Kafka 4.2 on"),
]

SOURCES = Path(__file__).parents[1] / "java"
METADATA, CREATE_TOPICS, CREATE_PARTITIONS = 3, 19, 37
GROUP_HEARTBEAT, SHARE_FETCH, SHARE_ACKNOWLEDGE = 76, 78, 79
DENIED = 29


def run_tools(bootstrap: str, prefix: str, directory: Path) -> list[tuple[str, int, object]]:
    """(tool, exit code, what it printed) of each, without names and times."""
    topic, group = f"{prefix}-topic", f"{prefix}-group"
    here = ("--bootstrap-server", bootstrap)
    commands: list[Command] = [
        ("kafka-topics", "", (*here, "--create", "--topic", topic, "--partitions", "2")),
        ("kafka-configs", "", (
            *here, "--alter", "--entity-type", "groups", "--entity-name", group,
            "--add-config", "share.auto.offset.reset=earliest",
        )),
        ("kafka-console-producer", "a\\nb\\nc\\n", (*here, "--topic", topic)),
        ("kafka-console-share-consumer", "", (
            *here, "--topic", topic, "--group", group, "--max-messages", "3", "--timeout-ms", "90000",
        )),
        ("kafka-share-groups", "", (*here, "--list")),
        ("kafka-share-groups", "", (*here, "--describe", "--group", group, "--state")),
        ("kafka-share-groups", "", (*here, "--describe", "--group", group, "--offsets")),
        ("kafka-share-groups", "", (
            *here, "--reset-offsets", "--to-earliest", "--execute", "--group", group, "--topic", topic,
        )),
        ("kafka-verifiable-share-consumer", "", (
            *here, "--topic", topic, "--group-id", group, "--max-messages", "3", "--verbose",
        )),
        ("kafka-share-groups", "", (*here, "--delete-offsets", "--group", group, "--topic", topic)),
        ("kafka-share-groups", "", (*here, "--delete", "--group", group)),
        ("kafka-topics", "", (*here, "--delete", "--topic", topic)),
    ]  # fmt: skip
    ran = run_script(commands, directory / f"{prefix}.tools", pause_after={tool for tool, _, _ in commands})
    return [(tool, code, _normal(tool, text, prefix)) for tool, code, text in ran]


def _normal(tool: str, text: str, prefix: str) -> object:
    text = text.replace(prefix, "x")
    if tool == "kafka-console-share-consumer":
        return sorted(text.split())
    if tool == "kafka-verifiable-share-consumer":
        return _events(text)
    lines = [line for line in text.splitlines() if "x-" in line or "GROUP" in line or "rror" in line]
    # The producer chooses the partitions of the three records.
    return sorted({re.sub(r"\s+", " ", re.sub(r"\d+|\S+:\d+", "n", line)) for line in lines})


def _events(text: str) -> dict[str, object]:
    events = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {
        "names": sorted({each["name"] for each in events}),
        "values": sorted(each["value"] for each in events if each["name"] == "record_data"),
        "acknowledged": sum(each["count"] for each in events if each["name"] == "offsets_acknowledged"),
    }


def test_share_group_tools_behave_the_same_through_proxy(
    kafka: KafkaCluster, proxied: ProxyProcess, tmp_path: Path
) -> None:
    direct, through = at_both(
        lambda bootstrap: run_tools(bootstrap, unique_topic("share"), tmp_path), kafka.bootstrap, proxied.bootstrap
    )

    for one, other in zip(direct, through, strict=True):
        print(other)
        assert other == one
    consumed = {tool: printed for tool, _, printed in through}
    assert consumed["kafka-console-share-consumer"] == ["a", "b", "c"]
    assert {code for _, code, _ in through} == {0}


def test_state_topic_is_closed_to_share_consumers(kafka: KafkaCluster, proxied: ProxyProcess) -> None:
    with RawConnection(kafka.address(1)) as direct, RawConnection(Address.parse(proxied.bootstrap)) as connection:
        until(lambda: _topic_id(direct, "__fencepost_state") is not None, "the state topic")
        topics = [{"TopicId": _topic_id(direct, "__fencepost_state"), "Partitions": [{"PartitionIndex": 0}]}]
        body = {"GroupId": unique_topic("share"), "MemberId": str(uuid4()), "ShareSessionEpoch": 0, "Topics": topics}
        fetched = connection.query(SHARE_FETCH, 1, {**body, "MaxRecords": 1, "BatchSize": 1, "MaxBytes": 1 << 20})
        acknowledged = connection.query(SHARE_ACKNOWLEDGE, 1, {**body, "ShareSessionEpoch": 1})
    for answer in (fetched, acknowledged):
        (partition,) = answer["Responses"][0]["Partitions"]
        assert partition["ErrorCode"] == DENIED


def _topic_id(connection: RawConnection, topic: str) -> object:
    answer = connection.query(METADATA, 12, {"Topics": [{"Name": topic}], "AllowAutoTopicCreation": False})["Topics"][0]
    return None if answer["ErrorCode"] else answer["TopicId"]


def test_expanded_topic_is_not_gated_for_a_share_group(kafka: KafkaCluster, tmp_path: Path) -> None:
    config = '[topics."ordered-*"]\n"fencepost.ordered.partition.expansion" = "true"\n'
    topic, group = unique_topic("ordered"), unique_topic("share")
    with (
        ProxyProcess(kafka.bootstrap, tmp_path, config=config) as proxy,
        RawConnection(Address.parse(proxy.bootstrap)) as connection,
    ):
        made = {"Name": topic, "NumPartitions": 1, "ReplicationFactor": 1}
        assert (
            connection.query(CREATE_TOPICS, 7, {"Topics": [made], "timeoutMs": 30_000})["Topics"][0]["ErrorCode"] == 0
        )
        member = {"GroupId": group, "MemberId": str(uuid4()), "SubscribedTopicNames": [topic]}
        until(lambda: _assigned(connection, {**member, "MemberEpoch": 0}) == [0], "the partition")
        expanded = connection.query(
            CREATE_PARTITIONS, 3, {"Topics": [{"Name": topic, "Count": 3, "Assignments": None}], "TimeoutMs": 30_000}
        )
        assert expanded["Results"][0]["ErrorCode"] == 0
        until(lambda: _assigned(connection, {**member, "MemberEpoch": 0}) == [0, 1, 2], "the new partitions")
        warnings = [line for line in proxy.log.splitlines() if "share groups keep no order" in line]
    assert len(warnings) == 1
    assert group in warnings[0]
    assert topic in warnings[0]


def _assigned(connection: RawConnection, body: dict[str, object]) -> list[int]:
    answer = connection.query(GROUP_HEARTBEAT, 1, body)
    topics = [] if answer["ErrorCode"] or answer["Assignment"] is None else answer["Assignment"]["TopicPartitions"]
    return sorted(partition for topic in topics for partition in topic["Partitions"])
