"""Whether Kafka's ACLs let clients append without the proxy: what `fencepost check` makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fencepost_proxy.config import ControlSasl, ProxyConfig
from fencepost_proxy.preflight.bypassing import Acl, Authorizer, acls_of, bypassing, permitting
from fencepost_proxy.preflight.findings import Finding, State
from fencepost_proxy.types import Address
from fencepost_proxy.wire.schema import Message

LITERAL, PREFIXED = 3, 4
DENY, ALLOW = 2, 3
ALL, READ, WRITE = 2, 3, 4
HERE, ELSEWHERE = "10.0.0.5", "10.0.0.9"
STANDARD = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
CONFIG = ProxyConfig((Address("kafka", 9092),), control_sasl=ControlSasl("PLAIN", "proxy", Path("password")))


def acl(
    principal: str = "User:app",
    host: str = "*",
    *,
    on: str = "orders",
    pattern: int = LITERAL,
    operation: int = WRITE,
    permission: int = ALLOW,
) -> Acl:
    return Acl(pattern, on, principal, host, operation, permission)


def found(
    *acls: Acl,
    topics: Sequence[str] = ("orders",),
    hosts: Sequence[str] = (HERE,),
    name: str | None = STANDARD,
    allows_without_acl: bool | None = False,
) -> list[Finding]:
    return bypassing(Authorizer(acls, name, allows_without_acl), CONFIG, topics, hosts)


@pytest.mark.parametrize(
    ("acls", "can_write"),
    [
        ([acl()], True),
        ([acl(operation=ALL)], True),
        ([acl(operation=READ)], False),
        ([acl(on="*")], True),
        ([acl(on="ord", pattern=PREFIXED)], True),
        ([acl(on="ord")], False),
        ([acl(on="orders-2")], False),
        ([acl(), acl(permission=DENY)], False),
        ([acl(), acl(permission=DENY, operation=ALL, on="*")], False),
        ([acl(), acl("User:*", permission=DENY)], False),
        ([acl(), acl(permission=DENY, operation=READ)], True),
        ([acl(), acl("User:other", permission=DENY)], True),
        ([acl(), acl(host=ELSEWHERE, permission=DENY)], True),
        ([acl(host=ELSEWHERE), acl(permission=DENY)], False),
        ([acl("User:*"), acl(permission=DENY)], True),
        ([acl(permission=DENY)], False),
    ],
)
def test_acls_are_combined_as_kafka_does(acls: list[Acl], can_write: bool) -> None:
    assert bool(permitting(acls, "orders")) is can_write


def test_write_from_every_host_can_bypass() -> None:
    (finding,) = found(acl(), acl(host=HERE))
    assert finding.state is State.WARNING
    assert finding.reported == "WRITE on orders is allowed to User:app from host *: can bypass the proxy"
    tool = "kafka-acls --bootstrap-server kafka:9092 --command-config admin.properties"
    assert finding.todo == (
        f"{tool} --add --allow-principal User:app --allow-host {HERE} --operation Write --topic orders && "
        f"{tool} --remove --force --allow-principal User:app --allow-host '*' --operation Write --topic orders"
    )


def test_write_from_the_proxys_host_alone_is_prevention() -> None:
    (finding,) = found(acl(host=HERE), acl("User:proxy"))
    assert finding.state is State.OK
    assert "bypassing is prevented by Kafka" in finding.reported
    assert "may WRITE, and User:app from this host only: orders" in finding.reported


def test_write_from_another_host_is_unknown() -> None:
    (finding,) = found(acl(host=ELSEWHERE))
    assert finding.state is State.UNKNOWN
    assert f"to User:app from host {ELSEWHERE}: can bypass the proxy unless only proxies run there" in finding.reported


def test_addresses_are_compared_by_value() -> None:
    (finding,) = found(acl(host="0:0:0:0:0:0:0:1"), hosts=["::1"])
    assert finding.state is State.OK


def test_patterns_and_all_operations_are_replaced_as_they_are() -> None:
    (every,) = found(acl(on="*", operation=ALL), topics=("orders", "payments"))
    assert "WRITE on all topics (orders, payments) is allowed" in every.reported
    first, reads, removed = every.todo.split(" && ")
    assert first.endswith(f"--allow-host {HERE} --operation All --topic '*'")
    assert "--allow-host '*' --operation Read --operation Describe" in reads
    assert "--remove --force" in removed
    assert removed.endswith("--operation All --topic '*'")
    (some,) = found(acl("User:*", on="ord", pattern=PREFIXED))
    assert "topics that begin with ord (orders)" in some.reported
    assert some.todo.endswith("--topic ord --resource-pattern-type prefixed")
    assert "--allow-principal 'User:*'" in some.todo


@pytest.mark.parametrize(
    ("allows_without_acl", "state"), [(True, State.WARNING), (None, State.UNKNOWN), (False, State.OK)]
)
def test_topics_without_acls(allows_without_acl: bool | None, state: State) -> None:
    (finding,) = found(acl(on="other"), allows_without_acl=allows_without_acl)
    assert finding.state is state
    (finding,) = found(acl(host=HERE), allows_without_acl=allows_without_acl)
    assert finding.state is State.OK, "it has an ACL, so the setting does not matter"


def test_what_cannot_be_known_is_never_called_prevented() -> None:
    for authorizer in (
        Authorizer(None, STANDARD, False),
        Authorizer([], "com.example.Ranger", False),
        Authorizer([], None, False),
    ):
        (finding,) = bypassing(authorizer, CONFIG, ["orders"], [HERE])
        assert finding.state is State.UNKNOWN
    (no_authorizer,) = bypassing(None, CONFIG, ["orders"], [HERE])
    assert no_authorizer.state is State.WARNING
    assert bypassing(None, CONFIG, [], [HERE]) == []


def test_findings_are_bounded() -> None:
    many = found(*(acl(f"User:{number}") for number in range(50)))
    assert len(many) == 21
    assert "30 more ACLs" in many[-1].reported


def test_acls_of_other_resources_are_left_out() -> None:
    entry = Message(principal="User:app", host="*", operation=WRITE, permission_type=ALLOW)
    resources = [
        Message(resource_type=kind, resource_name="orders", pattern_type=LITERAL, acls=[entry]) for kind in (2, 3)
    ]
    assert acls_of(Message(resources=resources)) == [acl()]
