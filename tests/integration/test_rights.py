"""The proxy performs no unauthorized request, and its responses disclose nothing to unauthorized clients.

Each request goes to a Kafka with authorization and SASL, directly and through the proxy, for a checked topic with
virtual configs. Unauthorized clients get the same response from both. Groups and transactions: `test_group_rights.py`
and `test_kip98_rights.py`.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from fencepost_proxy.types import Address
from tests.kit.waiting import until
from tests.support.good_writer import LEAST, kept_rate
from tests.support.hostile import WITH_LOGINS
from tests.support.kafka import unique_topic
from tests.support.messages import Closed, Fields, RawConnection
from tests.support.raw import Record, batch
from tests.support.sasl_ssl import ADMIN, logging_in
from tests.support.secured import (
    ADD_PARTITIONS,
    ALTER,
    CONFIGS_READ,
    CONFIGS_WRITE,
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DESCRIBE,
    OK,
    PRODUCE,
    READ,
    TOPIC,
    WRITE,
    Sides,
    User,
    add,
    allow,
    codes,
    create_topic,
    deny,
    expand,
    produce,
)

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(400)]

FETCH, LIST_OFFSETS, METADATA, SASL_HANDSHAKE, DELETE_TOPICS, DELETE_RECORDS = 1, 2, 3, 17, 20, 21
OFFSET_FOR_LEADER_EPOCH, DESCRIBE_CONFIGS, ALTER_CONFIGS, INCREMENTAL_ALTER_CONFIGS = 23, 32, 33, 44
DESCRIBE_PRODUCERS, CONSUMER_HEARTBEAT, DESCRIBE_TOPIC_PARTITIONS = 61, 68, 75
DENIED, ILLEGAL_SASL_STATE, POLICY_VIOLATION = 29, 34, 44
SET = 0
STATE_TOPIC = "__fencepost_state"
#: Operations of each user on the scene's topic. For `blind`, Kafka allows WRITE and denies DESCRIBE.
MAY = {
    "describer": (DESCRIBE,),
    "reader": (READ,),
    "writer": (WRITE,),
    "expelled": (WRITE,),
    "blind": (WRITE,),
    "configurer": (CONFIGS_READ, CONFIGS_WRITE),
    "grower": (ALTER,),
}
CHECKS = {
    "fencepost.check.expected.offsets": "required",
    "fencepost.check.partition.count": "true",
    "fencepost.idempotence.level": "off",
}


class Scene(Sides):
    """A topic of one partition with one batch, with all checks on, and the permissions of `MAY`."""

    def __init__(self, sides: Sides) -> None:
        super().__init__(sides.kafka, sides.proxy)
        self.topic = unique_topic("rights")
        self.first = batch(b"first", expected=0, write_id=b"first")
        for user, operations in MAY.items():
            for operation in operations:
                allow(self.kafka, user, TOPIC, self.topic, operation)
        deny(self.kafka, "blind", TOPIC, self.topic, DESCRIBE)
        self.create(self.topic, CHECKS)
        self.accepts(self.first, 0)

    def accepts(self, records: bytes, offset: int) -> None:
        reported = self.produce("writer", self.topic, records)
        assert (reported["ErrorCode"], reported["BaseOffset"]) == (OK, offset)

    def denied(self, user: str, api_key: int, version: int, body: Fields) -> None:
        assert DENIED in codes(self.same(user, api_key, version, body)), (user, api_key, version)

    def configs(self) -> dict[str, str]:
        """All configs set on the topic, as the admin sees them."""
        reported = self.query("admin", self.through, DESCRIBE_CONFIGS, 4, _describe(self.topic))
        return {each["Name"]: each["Value"] for each in reported["Results"][0]["Configs"] if each["ConfigSource"] == 1}

    def set_check(self, name: str, value: str, user: str = "admin") -> None:
        altered = _alter(self.topic, {f"fencepost.check.{name}": value}, incremental=True)
        self.change(user, INCREMENTAL_ALTER_CONFIGS, 1, altered)

    def append(self, connection: RawConnection, records: bytes) -> Fields:
        body = produce(self.topic, records)
        found: Fields = connection.query(PRODUCE, 9, body)["Responses"][0]["PartitionResponses"][0]
        return found

    def expansions(self) -> list[Any]:
        return [
            each for each in json.loads(self.proxy.page("/status.json"))["expansions"] if each["topic"] == self.topic
        ]


@pytest.fixture(scope="module")
def still(sides: Sides) -> Scene:
    """A scene for tests that change nothing. Its topic keeps one record."""
    return Scene(sides)


@pytest.fixture
def scene(sides: Sides) -> Scene:
    return Scene(sides)


def _describe(topic: str, *names: str) -> Fields:
    resource = {"ResourceType": TOPIC, "ResourceName": topic, "ConfigurationKeys": list(names) or None}
    return {"Resources": [resource], "IncludeSynonyms": True, "IncludeDocumentation": True}


def _alter(topic: str, configs: Mapping[str, str], *, incremental: bool, validate_only: bool = False) -> Fields:
    more: Fields = {"ConfigOperation": SET} if incremental else {}
    set_to = [{"Name": name, "Value": value, **more} for name, value in configs.items()]
    resource = {"ResourceType": TOPIC, "ResourceName": topic, "Configs": set_to}
    return {"Resources": [resource], "ValidateOnly": validate_only}


# --- virtual configs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["nobody", "describer", "reader", "writer", "grower"])
def test_virtual_configs_require_describe_and_alter_configs_permission(still: Scene, user: str) -> None:
    before = still.configs()
    for version in (1, 2, 3, 4):
        for names in ((), ("fencepost.check.expected.offsets",), ("retention.ms", "fencepost.idempotence.level")):
            still.denied(user, DESCRIBE_CONFIGS, version, _describe(still.topic, *names))
    requested: tuple[dict[str, str], ...] = (
        {"fencepost.check.expected.offsets": "false"},
        {"fencepost.check.partition.count": "false", "retention.ms": "1000"},
        {"retention.ms": "1000"},
    )
    for configs in requested:
        for validate_only in (False, True):
            for version in (0, 1, 2):
                alter = _alter(still.topic, configs, incremental=False, validate_only=validate_only)
                still.denied(user, ALTER_CONFIGS, version, alter)
            for version in (0, 1):
                alter = _alter(still.topic, configs, incremental=True, validate_only=validate_only)
                still.denied(user, INCREMENTAL_ALTER_CONFIGS, version, alter)
    assert still.configs() == before
    assert CHECKS.items() <= before.items()


def test_permitted_client_describes_and_alters_virtual_configs(scene: Scene) -> None:
    """Proves that the test above can fail."""
    reported = scene.query("configurer", scene.through, DESCRIBE_CONFIGS, 4, _describe(scene.topic))
    assert CHECKS.items() <= {each["Name"]: each["Value"] for each in reported["Results"][0]["Configs"]}.items()
    scene.set_check("partition.count", "false", user="configurer")
    assert scene.configs()["fencepost.check.partition.count"] == "false"
    (line,) = [
        each
        for each in scene.proxy.log.splitlines()
        if "virtual configs changed" in each
        and "old=" in each
        and f"topic={scene.topic} " in each
        and "principal=configurer" in each
    ]
    assert " WARNING audit " in line
    assert re.search(
        r"old=.*fencepost.check.partition.count.*true.* new=.*fencepost.check.partition.count.*false", line
    )


def test_clients_of_the_legacy_call_do_not_reset_virtual_configs(scene: Scene) -> None:
    """They send the Kafka configs that the topic is to have, and know no others."""
    altered = _alter(scene.topic, {"retention.ms": "3600000"}, incremental=False)
    for user in ("admin", "configurer"):
        scene.change(user, ALTER_CONFIGS, 1, altered)
    assert {**CHECKS, "retention.ms": "3600000"}.items() <= scene.configs().items()
    refused = scene.produce("writer", scene.topic, batch(b"states nothing"))
    assert refused["ErrorCode"] == POLICY_VIOLATION


@pytest.mark.parametrize("user", ["nobody", "configurer"])
def test_refused_topic_creation_stores_no_virtual_configs(still: Scene, user: str) -> None:
    topic = unique_topic("not-mine")
    for version in (2, 5, 7):
        for validate_only in (True, False):
            still.denied(user, CREATE_TOPICS, version, create_topic(topic, CHECKS, validate_only=validate_only))
    still.create(topic)
    reported = still.query("admin", still.through, DESCRIBE_CONFIGS, 4, _describe(topic))
    assert not [each for each in reported["Results"][0]["Configs"] if each["ConfigSource"] == 1]


# --- contents of a refusal --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["nobody", "describer", "reader", "configurer"])
def test_unauthorized_writer_gets_the_errors_of_kafka(still: Scene, user: str) -> None:
    """The appends would be refused or are already in the log. The error discloses no check, log end offset or partition
    count."""
    known, stale = still.first, batch(b"stale", expected=1)
    for records in (batch(b"unconditional"), stale, batch(b"theirs", expected=77), known):
        for version in (3, 7, 8, 9, 12):
            still.denied(user, PRODUCE, version, produce(still.topic, records))
    still.denied(user, PRODUCE, 9, produce(still.topic, stale, partition=7))


def test_writer_without_describe_learns_only_the_log_end(scene: Scene) -> None:
    """Kafka also returns base offsets to clients with WRITE and without DESCRIBE."""
    with User(scene.direct, "blind") as direct:
        assert codes(direct.query(METADATA, 9, {"Topics": [{"Name": scene.topic}]})["Topics"]) == {DENIED}
        reported = scene.append(direct, batch(b"direct"))
    assert (reported["ErrorCode"], reported["BaseOffset"], reported["LogStartOffset"]) == (OK, 1, 0)
    refused = scene.produce("blind", scene.topic, batch(b"theirs", expected=77))
    assert (refused["ErrorCode"], refused["BaseOffset"], refused["LogStartOffset"]) == (POLICY_VIOLATION, 2, 0)
    scene.denied("blind", LIST_OFFSETS, 5, _list_offsets(scene.topic))


def _list_offsets(topic: str) -> Fields:
    queried = {"Name": topic, "Partitions": [{"PartitionIndex": 0, "Timestamp": -1}]}
    return {"ReplicaId": -1, "Topics": [queried]}


def test_revoked_permission_takes_effect_on_same_connection(scene: Scene) -> None:
    """The client learned the log end offset while it had WRITE. After Kafka has denied it once, refusals disclose
    nothing."""
    with User(scene.through, "expelled") as client, User(scene.direct, "expelled") as direct:
        assert scene.append(client, batch(b"theirs", expected=77))["BaseOffset"] == 1
        deny(scene.kafka, "expelled", TOPIC, scene.topic, WRITE)
        until(lambda: scene.append(direct, batch(b"direct"))["ErrorCode"] == DENIED, "the ACL to hold")
        end = scene.append(client, batch(b"theirs", expected=77))["BaseOffset"]
        reported = scene.append(client, batch(b"fits", expected=end))
        assert (reported["ErrorCode"], reported["BaseOffset"]) == (DENIED, -1)
        reported = scene.append(client, batch(b"theirs", expected=77))
        assert reported == scene.append(direct, batch(b"theirs", expected=77))


def test_connection_cannot_change_its_principal(still: Scene) -> None:
    """Kafka closes a connection that authenticates again as another user, directly and through the proxy."""
    for side in (still.direct, still.through):
        with User(side, "writer") as client:
            if side == still.through:
                assert still.append(client, batch(b"theirs", expected=77))["BaseOffset"] == 1
            assert "Cannot change principals" in client.log_in("nobody")["ErrorMessage"]
            with pytest.raises(Closed):
                still.append(client, batch(b"theirs", expected=77))


# --- clients without a login ------------------------------------------------------------------------------------------


def test_client_without_login_is_closed_and_changes_nothing(scene: Scene) -> None:
    """Requests that the proxy handles close the connection, as at Kafka, before and during a login. Nothing is
    changed."""
    before = scene.configs()
    new = unique_topic("not-mine")
    requests = [
        *((PRODUCE, 9, produce(scene.topic, records)) for records in (batch(b"x"), batch(b"x", expected=77))),
        (PRODUCE, 9, produce(scene.topic, batch(b"x", expected=1))),
        (PRODUCE, 9, produce(STATE_TOPIC, batch(b"x"))),
        (CREATE_PARTITIONS, 1, expand(scene.topic, 2)),
        (CREATE_TOPICS, 5, create_topic(new, CHECKS)),
        (DELETE_TOPICS, 4, {"TopicNames": [scene.topic], "TimeoutMs": 5_000}),
        (DELETE_TOPICS, 4, {"TopicNames": [STATE_TOPIC], "TimeoutMs": 5_000}),
        (DESCRIBE_CONFIGS, 4, _describe(scene.topic)),
        (
            INCREMENTAL_ALTER_CONFIGS,
            1,
            _alter(scene.topic, {"fencepost.check.expected.offsets": "false"}, incremental=True),
        ),
        (ALTER_CONFIGS, 1, _alter(scene.topic, {"fencepost.check.expected.offsets": "false"}, incremental=False)),
        (METADATA, 9, {"Topics": None}),
    ]
    for api_key, version, body in requests:
        for side in (scene.direct, scene.through):
            with RawConnection(side) as stranger, pytest.raises(Closed):
                assert stranger.query(api_key, version, body) is None
            with RawConnection(side) as halfway:
                assert halfway.query(SASL_HANDSHAKE, 1, {"Mechanism": "PLAIN"})["ErrorCode"] == OK
                assert codes(halfway.query(api_key, version, body)) <= {ILLEGAL_SASL_STATE, DENIED}
                with pytest.raises(Closed):
                    assert halfway.query(api_key, version, body) is None
    assert scene.configs() == before
    scene.accepts(batch(b"second", expected=1), 1)
    reported = scene.query("admin", scene.through, METADATA, 9, {"Topics": [{"Name": new}, {"Name": scene.topic}]})
    assert [len(topic["Partitions"]) for topic in reported["Topics"] if topic["Name"] == scene.topic] == [1]


@pytest.mark.parametrize("check", ["required", "true"])
def test_unauthorized_append_never_enters_a_partition_sequencer(scene: Scene, check: str) -> None:
    """Appends without a login, during a login, or without WRITE do not wait in the sequencer. An authorized append
    does."""
    scene.set_check("expected.offsets", check)
    before = _sequencer_waits(scene)
    for records in (batch(b"x"), batch(b"x", expected=1), batch(b"x", expected=77), scene.first):
        for acks in (-1, 1, 0):
            body = produce(scene.topic, records, acks=acks)
            for version in (7, 9):
                with RawConnection(scene.through) as stranger, pytest.raises(Closed):
                    stranger.query(PRODUCE, version, body)
            for side in (scene.direct, scene.through) if acks else ():
                with RawConnection(side) as half:
                    assert half.query(SASL_HANDSHAKE, 1, {"Mechanism": "PLAIN"})["ErrorCode"] == OK
                    assert codes(half.query(PRODUCE, 9, body)) == {ILLEGAL_SASL_STATE}
                    with pytest.raises(Closed):
                        half.query(PRODUCE, 9, body)
        with User(scene.through, "reader") as reader:
            for _ in range(3):
                assert scene.append(reader, records)["ErrorCode"] == DENIED
            with pytest.raises(Closed):
                reader.query(PRODUCE, 9, produce(scene.topic, records, acks=0))
    assert _sequencer_waits(scene) == before

    scene.accepts(batch(b"second", expected=1), 1)
    assert _sequencer_waits(scene) > before, "the metric does not count appends: this test proves nothing"


def _sequencer_waits(scene: Scene) -> int:
    """Number of appends that have entered a sequencer."""
    return int(scene.proxy.metrics()["fencepost_sequencer_wait_seconds_count"])


# --- topics that are expanded -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["nobody", "describer", "reader", "writer", "configurer"])
def test_expansion_without_alter_permission_is_not_started(still: Scene, user: str) -> None:
    for version in (0, 1, 2, 3):
        for count in (1, 2):
            for validate_only in (False, True):
                still.denied(user, CREATE_PARTITIONS, version, expand(still.topic, count, validate_only=validate_only))
    refused = still.produce("writer", still.topic, batch(b"x", expected=77))
    assert refused["ErrorCode"] == POLICY_VIOLATION, "the topic must accept and check appends"
    assert not still.expansions()


def test_pending_expansion_is_hidden_from_unauthorized_clients(scene: Scene) -> None:
    """The expansion waits for a transaction. Unauthorized expansions and appends get Kafka's errors."""
    scene.set_check("expected.offsets", "true")
    name = unique_topic("txn")
    producer = scene.init("admin", name)
    scene.add("admin", name, producer, scene.topic)
    records = batch(b"t", producer=producer, transactional=True)
    assert scene.produce("admin", scene.topic, records, name)["ErrorCode"] == OK
    with User(scene.through, "grower") as grower:
        with suppress(Closed):
            grower.query(CREATE_PARTITIONS, 1, expand(scene.topic, 2))

        def pending() -> list[Any]:
            return [each for each in scene.expansions() if each["state"] == "pending"]

        until(pending, "an expansion under way")
        again = scene.query("grower", scene.through, CREATE_PARTITIONS, 1, expand(scene.topic, 4))
        assert "EXPANSION_IN_PROGRESS" in again["Results"][0]["ErrorMessage"], (
            "no expansion is pending: this test proves nothing"
        )
        for user in ("nobody", "describer", "writer", "configurer"):
            for count in (1, 2, 4):
                for validate_only in (False, True):
                    scene.denied(user, CREATE_PARTITIONS, 1, expand(scene.topic, count, validate_only=validate_only))
        for user in ("nobody", "describer", "reader"):
            for records in (batch(b"x"), batch(b"x", expected=77)):
                scene.denied(user, PRODUCE, 9, produce(scene.topic, records))
    assert pending()
    assert scene.end("admin", name, producer, commit=False) == OK
    until(lambda: not pending(), "its end")


# --- the state topic --------------------------------------------------------------------------------------------------


def test_state_topic_is_closed_even_to_superusers(scene: Scene) -> None:
    with RawConnection(scene.kafka.address(1)) as kafka:
        (found,) = kafka.query(METADATA, 12, {"Topics": [{"Name": STATE_TOPIC}]})["Topics"]
        topic_id = found["TopicId"]
        assert found["ErrorCode"] == OK
    one = [{"Name": STATE_TOPIC, "Partitions": [{"PartitionIndex": 0, "Timestamp": -1}]}]
    refused: list[tuple[int, range, Fields]] = [
        (PRODUCE, range(3, 13), produce(STATE_TOPIC, batch(b"x"))),
        (LIST_OFFSETS, range(1, 12), {"ReplicaId": -1, "Topics": one}),
        (OFFSET_FOR_LEADER_EPOCH, range(2, 5), _epoch_end(STATE_TOPIC)),
        (DELETE_RECORDS, range(3), _delete_records(STATE_TOPIC)),
        (CREATE_TOPICS, range(2, 8), create_topic(STATE_TOPIC, {})),
        (CREATE_PARTITIONS, range(4), expand(STATE_TOPIC, 2)),
        (DESCRIBE_CONFIGS, range(1, 5), _describe(STATE_TOPIC)),
        (ALTER_CONFIGS, range(3), _alter(STATE_TOPIC, {"cleanup.policy": "delete"}, incremental=False)),
        (INCREMENTAL_ALTER_CONFIGS, range(2), _alter(STATE_TOPIC, {"cleanup.policy": "delete"}, incremental=True)),
        (DESCRIBE_PRODUCERS, range(1), {"Topics": [{"Name": STATE_TOPIC, "PartitionIndexes": [0]}]}),
        (DELETE_TOPICS, range(1, 6), {"TopicNames": [STATE_TOPIC], "TimeoutMs": 5_000}),
        (DELETE_TOPICS, range(6, 7), {"Topics": [{"Name": STATE_TOPIC}], "TimeoutMs": 5_000}),
        (DELETE_TOPICS, range(6, 7), {"Topics": [{"Name": None, "TopicId": topic_id}], "TimeoutMs": 5_000}),
        (FETCH, range(4, 13), _fetch({"Topic": STATE_TOPIC})),
        (FETCH, range(13, 16), _fetch({"TopicId": topic_id})),
        (METADATA, range(14), {"Topics": [{"Name": STATE_TOPIC}]}),
        (METADATA, range(12, 14), {"Topics": [{"Name": None, "TopicId": topic_id}]}),
        (DESCRIBE_TOPIC_PARTITIONS, range(1), {"Topics": [{"Name": STATE_TOPIC}]}),
    ]
    with User(scene.through, "admin") as admin:
        for api_key, versions, body in refused:
            for version in versions:
                reported = admin.query(api_key, version, body)
                assert codes(reported) - {OK} == {DENIED}, (api_key, version, reported)
                assert topic_id.bytes not in repr(reported).encode()
        assert STATE_TOPIC not in [topic["Name"] for topic in admin.query(METADATA, 12, {"Topics": None})["Topics"]]
        name = unique_topic("txn")
        producer = scene.init("admin", name)
        assert codes(admin.query(ADD_PARTITIONS, 3, add(name, producer, STATE_TOPIC))) == {DENIED}


def _epoch_end(topic: str) -> Fields:
    return {"ReplicaId": -2, "Topics": [{"Topic": topic, "Partitions": [{"Partition": 0, "LeaderEpoch": 0}]}]}


def _delete_records(topic: str) -> Fields:
    return {"Topics": [{"Name": topic, "Partitions": [{"PartitionIndex": 0, "Offset": 0}]}], "TimeoutMs": 5_000}


def _fetch(topic: Fields) -> Fields:
    partition = {"Partition": 0, "FetchOffset": 0, "PartitionMaxBytes": 1000, "CurrentLeaderEpoch": -1}
    requested = topic | {"Partitions": [partition]}
    return {"ReplicaId": -1, "MaxWaitMs": 1, "MinBytes": 0, "MaxBytes": 1000, "SessionEpoch": -1, "Topics": [requested]}


@pytest.mark.parametrize("subscription", ["names", "pattern"])
def test_a_group_is_not_assigned_the_state_topic(scene: Scene, subscription: str) -> None:
    """A superuser subscribes to the state topic and another one. At Kafka, the group is assigned both."""
    with RawConnection(scene.kafka.address(1)) as kafka:
        topics = kafka.query(METADATA, 12, {"Topics": [{"Name": each} for each in (STATE_TOPIC, scene.topic)]})[
            "Topics"
        ]
        ids = {each["Name"]: each["TopicId"] for each in topics}
    everything = {ids[STATE_TOPIC], ids[scene.topic]}
    assert _assigned(scene.direct, everything, scene.topic, subscription) == everything
    assert _assigned(scene.through, {ids[scene.topic]}, scene.topic, subscription) == {ids[scene.topic]}


def _assigned(side: Address, requested: set[uuid.UUID], topic: str, subscription: str) -> set[uuid.UUID]:
    """All assigned topics, once the requested ones are among them."""
    who = {"GroupId": unique_topic("group"), "MemberId": str(uuid.uuid4()), "RebalanceTimeoutMs": 60_000}
    first: Fields = {"SubscribedTopicNames": [STATE_TOPIC, topic], "TopicPartitions": []}
    if subscription == "pattern":
        first |= {"SubscribedTopicNames": None, "SubscribedTopicRegex": f"{STATE_TOPIC}|{topic}"}
    epoch, observed = 0, set[uuid.UUID]()
    with User(side, "admin") as member:

        def assigned() -> bool:
            nonlocal epoch
            reported = member.query(CONSUMER_HEARTBEAT, 1, who | {"MemberEpoch": epoch} | (first if not epoch else {}))
            if reported["ErrorCode"] == OK:
                epoch = reported["MemberEpoch"]
                if reported["Assignment"] is not None:
                    observed.update(each["TopicId"] for each in reported["Assignment"]["TopicPartitions"])
            return requested <= observed

        until(assigned, "an assignment")
    return observed


# --- the status page --------------------------------------------------------------------------------------------------


def test_status_page_and_log_show_no_secrets(scene: Scene) -> None:
    secret = {each: f"{each}-{uuid.uuid4().hex}" for each in ("value", "key", "header", "write", "password")}
    headers = [("header", secret["header"].encode())]
    record = Record(secret["value"].encode(), key=secret["key"].encode(), headers=headers)
    write_id = secret["write"].encode()
    for records in (
        *(batch(record, expected=expected, write_id=write_id) for expected in (1, 77)),
        batch(record, Record(b"x", expected=secret["value"].encode())),
        batch(record),
    ):
        scene.produce("writer", scene.topic, records)
    with RawConnection(scene.through) as stranger:
        assert stranger.query(17, 1, {"Mechanism": "PLAIN"})["ErrorCode"] == OK
        reported = stranger.query(36, 2, {"AuthBytes": f"\0writer\0{secret['password']}".encode()})
        assert reported["ErrorCode"] != OK
    texts = {path: scene.proxy.page(path) for path in ("/status.json", "/metrics", "/readyz", "/livez")}
    texts["log"] = scene.proxy.log
    assert scene.topic in texts["/status.json"], "the page does not show the topic: this test proves nothing"
    for where, text in texts.items():
        for what, word in secret.items():
            assert word not in text, (where, what)


@pytest.mark.parametrize("way", sorted(WITH_LOGINS))
def test_good_writer_keeps_half_rate_despite_client_that_logs_in(sides: Sides, way: str) -> None:
    """See `test_hostile_writers.py`."""
    topics = {str(address): unique_topic("checked") for address in (sides.direct, sides.through)}
    for topic in topics.values():
        sides.create(topic)
    assert kept_rate(topics, way, enter=logging_in(ADMIN)) >= LEAST
