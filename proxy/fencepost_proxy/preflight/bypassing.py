"""Whether Kafka's ACLs let clients append to checked topics without the proxy, and the commands that prevent it.

A client that appends through the proxy has its own principal and the proxy's address. So WRITE from the proxies' hosts
alone prevents direct appends. Kafka compares a host as one address, or `*` for all (StandardAuthorizerData.java).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, NamedTuple

from fencepost_proxy.cluster.authorized import allow_command, tool_options
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.preflight.findings import Finding, Group, some
from fencepost_proxy.wire.schema import Message

BYPASSING: Final = Group("Appends that bypass the proxy")
WHAT: Final = "checked topics"
ANY: Final = "*"
_EVERY_USER: Final = "User:*"
_TOPIC: Final = 2
_PREFIXED: Final = 4
_DENY, _ALLOW = 2, 3
#: Operations that include appends: ALL and WRITE.
_WRITES: Final = {2: "All", 4: "Write"}
_ALL: Final = 2
#: What a user with ALL keeps from everywhere: consumers may read at Kafka.
_READS: Final = ("Read", "Describe", "DescribeConfigs")
#: Findings of one check; the next check shows the rest.
_SHOWN_MAX: Final = 20
_OF_KAFKA: Final = (
    "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "kafka.security.authorizer.AclAuthorizer",
)
#: Configs of brokers that decide; Kafka conceals the values of the last two.
AUTHORIZER_CONFIGS: Final = ("authorizer.class.name", "allow.everyone.if.no.acl.found")


class Acl(NamedTuple):
    """One ACL of topics."""

    pattern_type: int
    resource: str
    principal: str
    host: str
    operation: int
    permission: int

    def matches(self, topic: str) -> bool:
        if self.pattern_type == _PREFIXED:
            return topic.startswith(self.resource)
        return self.resource in (topic, ANY)


@dataclass(frozen=True, slots=True)
class Authorizer:
    """`acls`: None if the proxy may not read them. `name`: its class, None if unknown.
    `allows_without_acl`: whether topics without ACLs are open to every user; None if unknown."""

    acls: Sequence[Acl] | None
    name: str | None
    allows_without_acl: bool | None


def acls_of(answer: Message) -> list[Acl]:
    """The ACLs of topics in a DescribeAcls response."""
    return [
        Acl(each.pattern_type, each.resource_name, acl.principal, acl.host, acl.operation, acl.permission_type)
        for each in answer.resources
        if each.resource_type == _TOPIC
        for acl in each.acls
    ]


def permitting(acls: Iterable[Acl], topic: str) -> list[Acl]:
    """The ACLs that let a user append to the topic, without those that a DENY covers."""
    writes = [acl for acl in acls if acl.operation in _WRITES and acl.matches(topic)]
    denied = [acl for acl in writes if acl.permission == _DENY]
    return [
        acl
        for acl in writes
        if acl.permission == _ALLOW
        and not any(each.principal in (acl.principal, _EVERY_USER) and each.host in (acl.host, ANY) for each in denied)
    ]


def bypassing(
    authorizer: Authorizer | None, config: ProxyConfig, topics: Sequence[str], hosts: Sequence[str]
) -> list[Finding]:
    """`authorizer`: None if Kafka has none. `topics`: the checked ones, and the state topic. `hosts`: addresses of this
    proxy, as brokers see them."""
    if not topics:
        return []
    if authorizer is None:
        stated = "can be bypassed: Kafka has no authorizer, so any client that reaches a broker can append to "
        stated += some(topics)
        todo = "let only the proxies reach the brokers (firewall), or set authorizer.class.name: docs/security.md"
        return [BYPASSING.warning(WHAT, stated, todo)]
    if authorizer.acls is None:
        stated = "whether Kafka prevents direct appends is unknown: the proxy may not read ACLs"
        return [BYPASSING.unknown(WHAT, stated, allow_command(config, ("DESCRIBE",), "--cluster"))]
    if authorizer.name not in (None, *_OF_KAFKA):
        stated = f"whether Kafka prevents direct appends is unknown: {authorizer.name} may not decide by Kafka's ACLs"
        return [BYPASSING.unknown(WHAT, stated)]
    found = [*_open(authorizer, topics), *_permissions(authorizer.acls, config, topics, hosts)]
    if len(found) > _SHOWN_MAX:
        rest = f"{len(found) - _SHOWN_MAX} more ACLs allow direct appends"
        return [*found[:_SHOWN_MAX], BYPASSING.warning(WHAT, rest, "run the commands above, then check again")]
    return found or [_prevented(authorizer, config, topics)]


def _open(authorizer: Authorizer, topics: Sequence[str]) -> Iterator[Finding]:
    assert authorizer.acls is not None
    without = [topic for topic in topics if not any(acl.matches(topic) for acl in authorizer.acls)]
    if not without or authorizer.allows_without_acl is False:
        return
    name = "allow.everyone.if.no.acl.found"
    todo = f"add an ACL to each topic, or remove {name} from the brokers"
    if authorizer.allows_without_acl:
        yield BYPASSING.warning(WHAT, f"can be bypassed: {name} is set, and no ACL is on {some(without)}", todo)
    else:
        yield BYPASSING.unknown(
            WHAT, f"unless brokers have {name}=false, all users can append to {some(without)}", todo
        )


def _permissions(
    acls: Sequence[Acl], config: ProxyConfig, topics: Sequence[str], hosts: Sequence[str]
) -> Iterator[Finding]:
    """One finding for each ACL."""
    user = _proxy_user(config)
    by_acl: dict[Acl, list[str]] = {}
    for topic in topics:
        for acl in permitting(acls, topic):
            if acl.principal != user and _address(acl.host) not in map(_address, hosts):
                by_acl.setdefault(acl, []).append(topic)
    for acl, its in sorted(by_acl.items()):
        stated = f"WRITE on {_resource(acl, its)} is allowed to {acl.principal} from host {acl.host}"
        todo = _prevent(config, acl, hosts)
        if acl.host == ANY:
            yield BYPASSING.warning(WHAT, f"{stated}: can bypass the proxy", todo)
        else:
            yield BYPASSING.unknown(WHAT, f"{stated}: can bypass the proxy unless only proxies run there", todo)


def _prevented(authorizer: Authorizer, config: ProxyConfig, topics: Sequence[str]) -> Finding:
    assert authorizer.acls is not None
    if authorizer.name is None:
        stated = "ACLs prevent direct appends if they decide; the proxy may not read which authorizer the brokers have"
        return BYPASSING.unknown(WHAT, stated, allow_command(config, ("DESCRIBE_CONFIGS",), "--cluster"))
    user = _proxy_user(config)
    users = sorted({acl.principal for topic in topics for acl in permitting(authorizer.acls, topic)} - {user})
    from_here = f", and {some(users)} from this host only" if users else ""
    stated = (
        f"bypassing is prevented by Kafka: only the proxy's user and super users may WRITE{from_here}: {some(topics)}"
    )
    return BYPASSING.ok(WHAT, stated)


def _proxy_user(config: ProxyConfig) -> str | None:
    """The proxy's own user, if it logs in by name."""
    sasl = config.control_sasl
    return f"User:{sasl.username}" if sasl is not None and sasl.username else None


def _resource(acl: Acl, topics: Sequence[str]) -> str:
    if acl.pattern_type == _PREFIXED:
        return f"topics that begin with {acl.resource} ({some(topics)})"
    return f"all topics ({some(topics)})" if acl.resource == ANY else acl.resource


def _address(host: str) -> str:
    """In one form: Java writes IPv6 without `::`."""
    try:
        return str(ip_address(host))
    except ValueError:
        return host


def _prevent(config: ProxyConfig, acl: Acl, hosts: Sequence[str]) -> str:
    """Shell commands. A DENY would not do: it precedes every ALLOW."""
    resource = f"--topic {shlex.quote(acl.resource)}"
    resource += " --resource-pattern-type prefixed" if acl.pattern_type == _PREFIXED else ""
    tool, user = f"kafka-acls {tool_options(config)}", f"--allow-principal {shlex.quote(acl.principal)}"
    here, there = (" ".join(f"--allow-host {shlex.quote(host)}" for host in each) for each in (hosts, [acl.host]))
    operation = f"--operation {_WRITES[acl.operation]}"
    commands = [f"{tool} --add {user} {here} {operation} {resource}"]
    if acl.operation == _ALL:
        reads = " ".join(f"--operation {each}" for each in _READS)
        commands.append(f"{tool} --add {user} {there} {reads} {resource}")
    commands.append(f"{tool} --remove --force {user} {there} {operation} {resource}")
    return " && ".join(commands)
