"""A Kafka with passwords and an authorizer: clients and the proxy are its users.

Any client of its plaintext listener may do everything, for test setup.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.types import Address
from tests.kit.waiting import until
from tests.support.kafka import running_kafka
from tests.support.messages import Fields, RawConnection
from tests.support.proxy import ProxyProcess

PASSWORD = "secret"
#: `admin` is a superuser. The tests that share the cluster give the others permissions on unique names.
USERS = (
    *("admin", "nobody", "describer", "reader", "writer", "leaving", "blind", "configurer", "grower"),
    *("owner", "topicless", "idless", "groupless", "other", "internal", "member", "stranger", "halfway"),
)
_SASL_HANDSHAKE, _SASL_AUTHENTICATE, _DESCRIBE_ACLS, _CREATE_ACLS = 17, 36, 29, 30
_DENY, _ALLOW = 2, 3


_PROPERTIES = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS;User:admin",
    "sasl.enabled.mechanisms": "PLAIN",
    # Permits reauthentication, but no test lasts long enough to require it.
    "listener.name.sasl.connections.max.reauth.ms": "86400000",
    "listener.name.sasl.plain.sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule required "
    + " ".join(f'user_{name}="{PASSWORD}"' for name in USERS)
    + ";",
}


@contextmanager
def secured_kafka() -> Iterator[KafkaCluster]:
    with running_kafka(properties=_PROPERTIES, listeners={"SASL": "SASL_PLAINTEXT"}) as cluster:
        yield cluster


@contextmanager
def proxy_of(kafka: KafkaCluster, directory: Path, config: str) -> Iterator[ProxyProcess]:
    """It logs in as `admin`, and its clients as themselves."""
    (secret := directory / "password").write_text(PASSWORD)
    login = f'\n[control_sasl]\nmechanism = "PLAIN"\nusername = "admin"\npassword_file = "{secret}"\n'
    with ProxyProcess(kafka.bootstrap_of("SASL"), directory, config=config + login) as proxy:
        yield proxy


class User(RawConnection):
    """A logged-in connection to Kafka or to the proxy."""

    def __init__(self, address: Address, name: str) -> None:
        super().__init__(address)
        assert self.log_in(name)["ErrorCode"] == 0

    def log_in(self, name: str) -> Fields:
        assert self.query(_SASL_HANDSHAKE, 1, {"Mechanism": "PLAIN"})["ErrorCode"] == 0
        return self.query(_SASL_AUTHENTICATE, 2, {"AuthBytes": f"\0{name}\0{PASSWORD}".encode()})


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
