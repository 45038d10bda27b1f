"""What Kafka authorizes the proxy's own user to do with topics: the operations in Metadata, v10–13, to any broker."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fencepost_proxy.cluster.broker import BrokerConnection
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import Error
from fencepost_proxy.types import NO_TOPIC_ID, Monotonic
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message

#: Operations that a checked topic needs. Without the last, the proxy assumes Kafka's default configs.
CHECKED: Final = ("READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS")
#: Without these, the proxy cannot check appends.
REQUIRED: Final = ("READ", "WRITE", "DESCRIBE")
#: AclOperation codes, which are the bits of authorized operations.
_OPERATIONS: Final = {"READ": 3, "WRITE": 4, "ALTER": 7, "DESCRIBE": 8, "DESCRIBE_CONFIGS": 10}
_NOT_REPORTED: Final = -(1 << 31)


def missing(topic: Message, requested: Iterable[str]) -> list[str]:
    """Operations that the proxy may not do, as far as Kafka reports them."""
    bits = topic.topic_authorized_operations
    return [] if bits == _NOT_REPORTED else [each for each in requested if not bits >> _OPERATIONS[each] & 1]


def query_of(topics: Sequence[str] | None) -> Message:
    """The Metadata request for the operations on these topics (None: all)."""
    queried = None if topics is None else [Message(name=name, topic_id=NO_TOPIC_ID) for name in topics]
    return Message(topics=queried, allow_auto_topic_creation=False, include_topic_authorized_operations=True)


async def missing_operations(
    kafka: KafkaClient, topics: Mapping[str, Sequence[str]], *, timeout_seconds: float
) -> dict[str, tuple[str, ...]]:
    """Topic → which of the given operations the proxy may not do. Omits topics without a missing one, or that do not
    exist. Raises `UpstreamUnavailable`."""

    async def query(connection: BrokerConnection, deadline: Monotonic) -> Message:
        message = query_of(sorted(topics))
        return await connection.query(apis.METADATA, message, at_least=10, at_most=13, deadline=deadline)

    found = {}
    for topic in (await kafka.query_any(query, timeout_seconds)).topics:
        requested = topics.get(topic.name, ())
        if topic.error_code == Error.TOPIC_AUTHORIZATION_FAILED:
            found[topic.name] = tuple(requested)
        elif not topic.error_code and (lacking := missing(topic, requested)):
            found[topic.name] = tuple(lacking)
    return found


def principal_of(config: ProxyConfig) -> str:
    sasl = config.control_sasl
    return f"User:{sasl.username if sasl is not None and sasl.username else 'PRINCIPAL'}"


def tool_options(config: ProxyConfig) -> str:
    """Options of Kafka's tools. `admin.properties`: an administrator's login."""
    return f"--bootstrap-server {','.join(map(str, config.upstream))} --command-config admin.properties"


def allow_command(config: ProxyConfig, operations: Iterable[str], resource: str) -> str:
    """Shell command that gives the proxy's user these operations. `resource`: kafka-acls arguments."""
    requested = " ".join(f"--operation {_of_the_tool(each)}" for each in operations)
    return (
        f"kafka-acls {tool_options(config)} --add --allow-principal {shlex.quote(principal_of(config))} "
        f"{requested} {resource}"
    )


def _of_the_tool(operation: str) -> str:
    """Name in kafka-acls: DescribeConfigs for DESCRIBE_CONFIGS."""
    return "".join(word.capitalize() for word in operation.split("_"))
