"""Clients and proxies that are users of Kafka, and their permissions.

`admin` is a superuser, as is any client of the plaintext listener, for test setup. Others: `sasl_ssl.OTHER_USERS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.types import Address
from tests.kit.waiting import until
from tests.support.messages import Fields, RawConnection
from tests.support.proxy import ProxyProcess
from tests.support.raw import Log, Producer
from tests.support.sasl_ssl import ADMIN, password, plain

PRODUCE, CREATE_TOPICS, INIT_PRODUCER_ID, ADD_PARTITIONS, END_TXN, CREATE_PARTITIONS = 0, 19, 22, 24, 26, 37
_SASL_HANDSHAKE, _SASL_AUTHENTICATE, _DESCRIBE_ACLS, _CREATE_ACLS = 17, 36, 29, 30
#: Resource types and operations of ACLs.
TOPIC, GROUP, TRANSACTIONAL_ID = 2, 3, 5
READ, WRITE, ALTER, DESCRIBE, CONFIGS_READ, CONFIGS_WRITE = 3, 4, 7, 8, 10, 11
_DENY, _ALLOW = 2, 3
OK, NOT_LEADER = 0, 6
#: A coordinator or the leader of a new topic is not available yet.
_LATER = frozenset({3, NOT_LEADER, 7, 14, 15, 16, 51})


@contextmanager
def proxy_of(
    kafka: KafkaCluster, directory: Path, config: str, *, arguments: tuple[str, ...] = ()
) -> Iterator[ProxyProcess]:
    """It logs in as `admin`, and its clients as themselves."""
    (secret := directory / "password").write_text(password(ADMIN))
    login = f'\n[control_sasl]\nmechanism = "PLAIN"\nusername = "{ADMIN}"\npassword_file = "{secret}"\n'
    with ProxyProcess(kafka.bootstrap_of("LOOPBACK"), directory, config=config + login, arguments=arguments) as proxy:
        yield proxy


class User(RawConnection):
    """A logged-in connection to Kafka or to the proxy."""

    def __init__(self, address: Address, name: str) -> None:
        super().__init__(address)
        assert self.log_in(name)["ErrorCode"] == 0

    def log_in(self, name: str) -> Fields:
        assert self.query(_SASL_HANDSHAKE, 1, {"Mechanism": "PLAIN"})["ErrorCode"] == OK
        return self.query(_SASL_AUTHENTICATE, 2, {"AuthBytes": plain(name)})


def allow(kafka: KafkaCluster, user: str, kind: int, name: str, operation: int) -> None:
    _create_acl(kafka, user, (kind, name), operation, _ALLOW)


def deny(kafka: KafkaCluster, user: str, kind: int, name: str, operation: int) -> None:
    _create_acl(kafka, user, (kind, name), operation, _DENY)


def _create_acl(kafka: KafkaCluster, user: str, resource: tuple[int, str], operation: int, permission: int) -> None:
    """Wait until the ACL applies: the broker has it shortly after the controller."""
    kind, name = resource
    acl = {
        "ResourceType": kind,
        "ResourceName": name,
        "ResourcePatternType": 3,
        "Principal": f"User:{user}",
        "Host": "*",
        "Operation": operation,
        "PermissionType": permission,
    }
    with RawConnection(kafka.address(1)) as admin:
        assert admin.query(_CREATE_ACLS, 2, {"Creations": [acl]})["Results"][0]["ErrorCode"] == 0
        this = {
            "ResourceTypeFilter": kind,
            "ResourceNameFilter": name,
            "PatternTypeFilter": 3,
            "PrincipalFilter": acl["Principal"],
            "HostFilter": acl["Host"],
            "Operation": operation,
            "PermissionType": permission,
        }
        until(lambda: admin.query(_DESCRIBE_ACLS, 2, this)["Resources"], "the ACL at the broker")


@dataclass
class Sides:
    """Kafka's listener with logins, and that of a proxy in front of it."""

    kafka: KafkaCluster
    proxy: ProxyProcess

    @property
    def direct(self) -> Address:
        return self.kafka.address(1, "LOOPBACK")

    @property
    def through(self) -> Address:
        return Address.parse(self.proxy.bootstrap)

    @property
    def log(self) -> Log:
        return Log(str(self.kafka.address(1)))

    def query(self, user: str, side: Address, api_key: int, version: int, body: Fields) -> Fields:
        """The first response that is final."""

        def answer() -> Fields | None:
            with User(side, user) as connection:
                reported = connection.query(api_key, version, body)
            return None if codes(reported) & _LATER else reported

        found: Fields = until(answer, "a final response")
        return found

    def same(self, user: str, api_key: int, version: int, body: Fields, *expected: int) -> Fields:
        """The response that Kafka and the proxy both give. `expected` – all its error codes."""
        direct, proxied = (self.query(user, side, api_key, version, body) for side in (self.direct, self.through))
        assert direct == proxied, (user, api_key, version)
        assert not expected or codes(direct) == set(expected), (user, api_key, version, direct)
        return direct

    def change(self, user: str, api_key: int, version: int, body: Fields) -> Fields:
        """A request through the proxy that succeeds."""
        reported = self.query(user, self.through, api_key, version, body)
        assert codes(reported) == {OK}, reported
        return reported

    def create(self, topic: str, configs: Mapping[str, str] | None = None) -> None:
        self.change("admin", CREATE_TOPICS, 5, create_topic(topic, configs or {}))
        assert self.log.end(topic) == 0

    def produce(
        self, user: str, topic: str, records: bytes, name: str | None = None, side: Address | None = None
    ) -> Fields:
        reported = self.query(user, side or self.through, PRODUCE, 9, produce(topic, records, name=name))
        found: Fields = reported["Responses"][0]["PartitionResponses"][0]
        return found

    def init(self, user: str, name: str) -> Producer:
        reported = self.change(user, INIT_PRODUCER_ID, 4, init(name))
        return Producer(reported["ProducerId"], reported["ProducerEpoch"], 0)

    def add(self, user: str, name: str, producer: Producer, *topics: str) -> None:
        self.change(user, ADD_PARTITIONS, 3, add(name, producer, *topics))

    def end(self, user: str, name: str, producer: Producer, *, commit: bool) -> int:
        return int(self.query(user, self.through, END_TXN, 3, end(name, producer, commit=commit))["ErrorCode"])


def codes(answer: Any) -> set[int]:
    """All error codes in a response."""
    if isinstance(answer, dict):
        own = {value for name, value in answer.items() if name.endswith("ErrorCode")}
        return own.union(*map(codes, answer.values())) if answer else own
    return set().union(*map(codes, answer)) if isinstance(answer, list) else set()


# --- requests ---------------------------------------------------------------------------------------------------------


def create_topic(topic: str, configs: Mapping[str, str], *, validate_only: bool = False) -> Fields:
    set_to = [{"Name": name, "Value": value} for name, value in configs.items()]
    requested = {"Name": topic, "NumPartitions": 1, "ReplicationFactor": 1, "Assignments": [], "Configs": set_to}
    return {"Topics": [requested], "timeoutMs": 30_000, "validateOnly": validate_only}


def expand(topic: str, count: int, *, validate_only: bool = False) -> Fields:
    requested = {"Name": topic, "Count": count, "Assignments": None}
    return {"Topics": [requested], "TimeoutMs": 5_000, "ValidateOnly": validate_only}


def produce(topic: str, records: bytes, partition: int = 0, *, acks: int = -1, name: str | None = None) -> Fields:
    data = [{"Name": topic, "PartitionData": [{"Index": partition, "Records": records}]}]
    return {"TransactionalId": name, "Acks": acks, "TimeoutMs": 10_000, "TopicData": data}


def init(name: str | None) -> Fields:
    return {"TransactionalId": name, "TransactionTimeoutMs": 600_000, "ProducerId": -1, "ProducerEpoch": -1}


def of_producer(name: str, producer: Producer) -> Fields:
    return {"TransactionalId": name, "ProducerId": producer.id, "ProducerEpoch": producer.epoch}


def end(name: str, producer: Producer, *, commit: bool) -> Fields:
    return of_producer(name, producer) | {"Committed": commit}


def add(name: str, producer: Producer, *topics: str) -> Fields:
    fields: Fields = {f"V3AndBelow{key}": value for key, value in of_producer(name, producer).items()}
    return fields | {"V3AndBelowTopics": [{"Name": topic, "Partitions": [0]} for topic in topics]}
