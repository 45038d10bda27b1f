"""Checks what Kafka authorizes the Kafka client to do, without changing anything.

The configuration file and the state topic, read to its end, define the checked topics. For existing topics, Metadata
returns the authorized operations. Everything else is tried with a request that has no effect: with `validate_only`, or
for a topic, group or transactional id that does not exist, which Kafka reports to authorized clients only. One effect
remains: a producer id is allocated, as at each start of a proxy.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from ipaddress import ip_address
from typing import Final

from fencepost_policies.append import Check
from fencepost_policies.conditional_publish import CHECK_EXPECTED_OFFSETS
from fencepost_proxy.cluster.authorized import CHECKED, REQUIRED, allow_command, missing, query_of, tool_options
from fencepost_proxy.cluster.broker import BrokerConnection, UpstreamUnavailable, deadline_in
from fencepost_proxy.cluster.configs import TOPICS_DESCRIBED_AT_ONCE, described_topics
from fencepost_proxy.cluster.metadata import ClusterMetadata, Leader
from fencepost_proxy.cluster.state_log import read_stored
from fencepost_proxy.cluster.state_topic_settings import created_with
from fencepost_proxy.cluster.transactions import MARKERS_DENIED, marker_error
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import Error, StateError, error_name
from fencepost_proxy.preflight.bypassing import AUTHORIZER_CONFIGS, Acl, Authorizer, acls_of, bypassing
from fencepost_proxy.preflight.findings import Finding, Group, State, some
from fencepost_proxy.services.unknown_configs import problems
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.topics.virtual_configs import TopicPolicy, durability_warnings
from fencepost_proxy.transactions.watched import abort_marker, marker_probe
from fencepost_proxy.types import NodeId
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message

ACLS: Final = Group("Kafka ACLs of the proxy")
#: A group and transactional id that do not exist.
_NO_GROUP: Final = "fencepost-check"
_DESCRIBE_GROUPS: Final = 15
_DESCRIBE_ACLS: Final = 29
_BROKER_RESOURCE: Final = 4
_ANY: Final = 1
#: Topics in one command; the next check lists the rest.
_IN_ONE_COMMAND_MAX: Final = 50
#: Source of a topic's checks.
OF_THE_FILE: Final = "topics in the file"
OF_ADMINS: Final = "topics set by admins"


async def rights(
    connection: BrokerConnection,
    config: ProxyConfig,
    cluster: ClusterMetadata,
    proxied_connections: Mapping[NodeId, BrokerConnection],
) -> list[Finding]:
    """`proxied_connections`: connections to reachable brokers. Failed requests become findings, never exceptions."""
    query = _Probe(connection, config, cluster, proxied_connections)
    about_cluster = (query.authorizer, query.state_topic, query.stored, query.producer_ids, query.broker_configs)
    return [
        finding
        for probe in (
            *about_cluster,
            query.topics,
            query.markers,
            query.groups,
            query.transactional_ids,
            query.bypassing,
        )
        for finding in await _tried(probe)
    ]


async def _tried(probe: Callable[[], Awaitable[list[Finding]]]) -> list[Finding]:
    try:
        return await probe()
    except UpstreamUnavailable as error:
        return [ACLS.unknown("one of the checks", f"request failed: {error}")]


class _Probe:
    def __init__(
        self,
        connection: BrokerConnection,
        config: ProxyConfig,
        cluster: ClusterMetadata,
        proxied_connections: Mapping[NodeId, BrokerConnection],
    ) -> None:
        self._connection = connection
        self._config = config
        self._cluster = cluster
        self._proxied_connections = proxied_connections
        self._state: Message | None = None  # its metadata, if it exists and is readable
        self._set: StateView | None = None  # configs set by admins, None if unknown
        self._open = False  # Kafka has no authorizer
        self._acls: list[Acl] | None = None  # of topics, None if unknown
        self._checked: list[str] = []
        self._policies = [TopicPolicy.of(each) for each in config.given_configs]

    async def _query(self, api_key: int, message: Message, *, at_least: int = 0, at_most: int) -> Message:
        deadline = deadline_in(self._config.limits.request_timeout_seconds)
        return await self._connection.query(api_key, message, at_least=at_least, at_most=at_most, deadline=deadline)

    def _replicate(self, topic: Message) -> str:
        """Shell command that adds replicas on more brokers."""
        partitions = []
        for each in topic.partitions:
            others = sorted(self._cluster.brokers.keys() - set(each.replica_nodes))
            replicas = [*each.replica_nodes, *others][: max(3, len(each.replica_nodes))]
            partitions.append({"topic": topic.name, "partition": each.partition_index, "replicas": replicas})
        plan = shlex.quote(json.dumps({"version": 1, "partitions": partitions}))
        tool = (
            f"kafka-reassign-partitions {tool_options(self._config)} --execute --reassignment-json-file replicas.json"
        )
        return f"echo {plan} > replicas.json; {tool}"

    def _allow(self, operations: Iterable[str], resource: str) -> str:
        """Shell command."""
        return allow_command(self._config, operations, resource)

    # ---- authorizer

    async def authorizer(self) -> list[Finding]:
        anything = ("resource_type_filter", "pattern_type_filter", "operation", "permission_type")
        names = ("resource_name_filter", "principal_filter", "host_filter")
        message = Message(**dict.fromkeys(anything, _ANY), **dict.fromkeys(names))
        answer = await self._query(_DESCRIBE_ACLS, message, at_least=1, at_most=3)
        self._open = answer.error_code == Error.SECURITY_DISABLED
        self._acls = None if answer.error_code else acls_of(answer)
        return [ACLS.ok("authorizer", "none: all operations are allowed")] if self._open else []

    # ---- the state topic

    async def state_topic(self) -> list[Finding]:
        name, brokers = self._config.state_topic, len(self._cluster.brokers)
        what = f"state topic {name}"
        todo = self._allow(("CREATE", "READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS"), f"--topic {name}")
        (topic,) = await self._described([name])
        if topic.error_code == Error.TOPIC_AUTHORIZATION_FAILED and self._open:
            stated = "hidden although Kafka has no authorizer: is upstream a proxy?"
            return [ACLS.failed(what, stated, "set upstream to Kafka's own brokers")]
        if topic.error_code == Error.TOPIC_AUTHORIZATION_FAILED:
            return [ACLS.failed(what, "the proxy may not DESCRIBE it", todo)]
        if topic.error_code == Error.UNKNOWN_TOPIC_OR_PARTITION:
            self._set = StateView(self._cluster.cluster_id or "")
            return [await self._creating(name, what, todo, brokers), *await self._not_there_yet(name, what, todo)]
        if topic.error_code:
            return [ACLS.unknown(what, f"Metadata returned {error_name(topic.error_code)}")]
        lacking = missing(topic, ("READ", "WRITE"))
        if "READ" not in lacking:
            self._state = topic
        if lacking:
            return [ACLS.failed(what, f"the proxy may not {' and '.join(lacking)} it", todo)]
        found = [ACLS.ok(what, "exists, and may be read and written")]
        if "DESCRIBE_CONFIGS" in missing(topic, ("DESCRIBE_CONFIGS",)):
            stated = "its configs may not be read: min.insync.replicas=2 and cleanup.policy=compact are assumed"
            found.append(ACLS.warning(what, stated, self._allow(("DESCRIBE_CONFIGS",), f"--topic {name}")))
        if _replicas(topic) < min(3, brokers):
            stated = f"it has {_replicas(topic)} replica(s): if they are lost, so are all virtual configs"
            found.append(ACLS.warning(what, stated, self._replicate(topic)))
        return found

    async def _creating(self, name: str, what: str, todo: str, brokers: int) -> Finding:
        replicas, configs = created_with(brokers)
        requested = Message(
            name=name,
            num_partitions=1,
            replication_factor=replicas,
            assignments=[],
            configs=[Message(name=key, value=value) for key, value in configs.items()],
        )
        timeout_ms = int(self._config.limits.request_timeout_seconds * 1000)
        message = Message(topics=[requested], timeout_ms=timeout_ms, validate_only=True)
        answer = await self._query(apis.CREATE_TOPICS, message, at_least=2, at_most=7)
        code, stated = answer.topics[0].error_code, answer.topics[0].error_message
        if not code or code == Error.TOPIC_ALREADY_EXISTS:
            return ACLS.ok(what, f"does not exist yet, and may be created ({replicas} replica(s))")
        if code in (Error.TOPIC_AUTHORIZATION_FAILED, Error.CLUSTER_AUTHORIZATION_FAILED):
            return ACLS.failed(what, "does not exist yet, and the proxy may not create it", todo)
        if code == Error.INVALID_REPLICATION_FACTOR:
            return ACLS.failed(what, f"cannot be created: {stated}", "wait until all brokers are up")
        return ACLS.failed(
            what,
            f"Kafka would not create it: {error_name(code)}, {stated or 'without a reason'}",
            f"create it yourself: one partition, {', '.join(f'{key}={value}' for key, value in configs.items())}",
        )

    async def _not_there_yet(self, name: str, what: str, todo: str) -> list[Finding]:
        """Kafka refuses unauthorized clients even if the topic does not exist."""
        may_not = []
        partition = Message(
            partition=0, current_leader_epoch=-1, fetch_offset=0, last_fetched_epoch=-1, partition_max_bytes=1
        )
        fetch = Message(
            replica_id=-1,
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=1,
            session_epoch=-1,
            topics=[Message(topic=name, partitions=[partition])],
            forgotten_topics_data=[],
            rack_id="",
        )
        read = await self._query(apis.FETCH, fetch, at_least=9, at_most=12)
        if read.responses and read.responses[0].partitions[0].error_code == Error.TOPIC_AUTHORIZATION_FAILED:
            may_not.append("READ")
        data = [Message(name=name, partition_data=[Message(index=0, records=b"")])]
        produce = Message(transactional_id=None, acks=-1, timeout_ms=1_000, topic_data=data)
        written = await self._query(apis.PRODUCE, produce, at_least=3, at_most=12)
        if written.responses[0].partition_responses[0].error_code == Error.TOPIC_AUTHORIZATION_FAILED:
            may_not.append("WRITE")
        if not may_not:
            return []
        return [ACLS.failed(what, f"once it exists, the proxy may not {' and '.join(may_not)} it", todo)]

    async def stored(self) -> list[Finding]:
        """Read the configs set by admins, for `topics`."""
        what = "configs set by admins"
        if self._state is None:
            return [] if self._set is not None else [ACLS.unknown(what, "unknown: the state topic is not readable")]
        name, partition = self._config.state_topic, self._state.partitions[0]
        leader = Leader(partition.leader_id, partition.leader_epoch)
        proxied = self._proxied_connections.get(leader.node_id)
        if proxied is None:
            return [ACLS.unknown(what, f"unknown: the leader of {name} ({leader.node_id}) is unreachable")]
        try:
            self._set = await read_stored(
                proxied,
                leader,
                name,
                self._state.topic_id,
                self._cluster.cluster_id or "",
                timeout_seconds=self._config.limits.request_timeout_seconds,
            )
        except StateError as error:
            return [ACLS.failed(what, f"no proxy can start with this state topic: {error}", error.hint)]
        return []

    # ---- the cluster

    async def producer_ids(self) -> list[Finding]:
        what = "a producer id"
        message = Message(transactional_id=None, transaction_timeout_ms=0, producer_id=-1, producer_epoch=-1)
        answer = await self._query(apis.INIT_PRODUCER_ID, message, at_most=4)
        if answer.error_code == Error.CLUSTER_AUTHORIZATION_FAILED:
            todo = self._allow(("IDEMPOTENT_WRITE",), "--cluster")
            return [ACLS.failed(what, "Kafka refuses one, and fenced appends need it", todo)]
        if answer.error_code:
            return [ACLS.unknown(what, f"InitProducerId returned {error_name(answer.error_code)}; retry in a moment")]
        return [ACLS.ok(what, "allowed (IDEMPOTENT_WRITE)")]

    async def broker_configs(self) -> list[Finding]:
        what = "broker configs"
        message = Message(
            resources=[
                Message(
                    resource_type=_BROKER_RESOURCE, resource_name="", configuration_keys=["producer.id.expiration.ms"]
                )
            ]
        )
        answer = await self._query(apis.DESCRIBE_CONFIGS, message, at_least=1, at_most=4)
        code = answer.results[0].error_code
        if code == Error.CLUSTER_AUTHORIZATION_FAILED:
            stated = "may not be read: the proxy assumes Kafka's default of producer.id.expiration.ms (1 day)"
            return [ACLS.warning(what, stated, self._allow(("DESCRIBE_CONFIGS",), "--cluster"))]
        return [ACLS.ok(what, "may be read (DESCRIBE_CONFIGS)")]

    # ---- topics

    async def topics(self) -> list[Finding]:
        observed = sorted(await self._described(None), key=lambda each: each.name)
        topics = [each for each in observed if each.name != self._config.state_topic and not each.is_internal]
        checked: dict[str, list[tuple[Message, TopicPolicy]]] = {OF_THE_FILE: [], OF_ADMINS: []}
        switched_off: list[str] = []
        others: list[Message] = []
        for each in topics:
            of_file = TopicPolicy.of(self._config.configs_for(each.name))
            policy = of_file
            if self._set is not None:
                policy = self._set.topic_policy(each.name, each.topic_id, self._config.configs_for)
            if not policy.read:
                others.append(each)
                if of_file.read:
                    switched_off.append(each.name)
            else:
                checked[OF_THE_FILE if policy == of_file else OF_ADMINS].append((each, policy))
        self._policies += [policy for _, policy in checked[OF_ADMINS]]
        self._checked = sorted(each.name for its in checked.values() for each, policy in its if policy.is_checked)
        found = [finding for what, its in checked.items() for finding in await self._checked_topics(what, its)]
        found += await self._hidden({each.name for each in topics})
        if switched_off:
            found.append(ACLS.ok(OF_ADMINS, f"unchecked despite the file: {some(switched_off)}"))
        if not checked[OF_THE_FILE] and not self._open:
            found += self._not_there(self._config)
        if self._set is not None:
            found += [ACLS.warning(OF_ADMINS, each.what, each.do) for each in problems(self._set.unknown_configs)]
        return [*found, *self._others(others, any_visible=bool(topics)), *self._watched(observed)]

    def _others(self, others: Sequence[Message], *, any_visible: bool) -> Iterator[Finding]:
        """Topics on which checks may be enabled later: without these rights, that is refused."""
        free = [each for each in others if not missing(each, REQUIRED)]
        stated = f"checks can be enabled on {len(free)} of {len(others)} visible topics (READ, WRITE)"
        if not any_visible:
            stated = "none visible to the proxy (DESCRIBE): checks cannot be enabled on any"
        todo = ""
        if not self._open and (not any_visible or len(free) < len(others)):
            todo = self._allow(CHECKED, "--topic PREFIX --resource-pattern-type prefixed")
            stated += "; the command is for topics to check later, PREFIX is the start of their names"
        if not any_visible and not self._open:
            yield ACLS.unknown("other topics", stated, todo)
        elif others:
            yield Finding(ACLS.name, "other topics", State.OK, stated, todo)

    def _not_there(self, config: ProxyConfig) -> Iterator[Finding]:
        patterns = [*config.topics.items(), ("*", config.unlisted_topics)]
        for glob, configs in patterns:
            policy = TopicPolicy.of(configs)
            if not policy.read:
                continue
            stated = f"no topic matches {glob} yet, so its ACLs are unknown"
            resource, exact = _topics_of(glob)
            stated += "" if exact else "; Kafka has no such pattern, so the command covers more topics"
            requested = (*CHECKED, *(("ALTER",) if policy.ordered else ()))
            yield ACLS.unknown(OF_THE_FILE, stated, self._allow(requested, resource))

    def _watched(self, observed: Sequence[Message]) -> list[Finding]:
        what = "transaction watch"
        if self._config.status is None or not self._config.watch_transactions or not observed:
            return []  # shown on the status page only
        unread = [each.name for each in observed if missing(each, ("READ",))]
        if not unread:
            return [ACLS.ok(what, f"all {len(observed)} visible topics may be read (READ)")]
        stated = f"without READ, open and hanging transactions are not visible: {some(unread)} "
        stated += "(watch_transactions = false disables the watch)"
        return [ACLS.warning(what, stated, self._allow(("READ", "DESCRIBE"), "--topic '*'"))]

    async def _hidden(self, observed: Set[str]) -> list[Finding]:
        """Topics with configs set by admins that are not visible to the proxy: deleted, or not authorized."""
        names = sorted(() if self._set is None else self._set.topic_configs.keys() - observed)
        hidden = []
        for start in range(0, len(names), TOPICS_DESCRIBED_AT_ONCE):
            for each in await self._described(names[start : start + TOPICS_DESCRIBED_AT_ONCE]):
                if each.error_code == Error.TOPIC_AUTHORIZATION_FAILED:
                    hidden.append(each.name)
        if not hidden:
            return []
        stated = f"the proxy may not DESCRIBE them, if they still exist: {some(hidden)}"
        todo = self._allow(CHECKED, _each(hidden))
        return [ACLS.warning(OF_ADMINS, stated, todo)]

    async def _checked_topics(self, what: str, is_checked: Sequence[tuple[Message, TopicPolicy]]) -> list[Finding]:
        found = []
        lacking: dict[tuple[str, ...], list[str]] = {}
        blind: list[str] = []
        for topic, policy in is_checked:
            requested = ("READ", "WRITE", *(("ALTER",) if policy.ordered else ()))
            if absent := missing(topic, requested):
                lacking.setdefault(tuple(absent), []).append(topic.name)
            if missing(topic, ("DESCRIBE_CONFIGS",)):
                blind.append(topic.name)
        for operations, names in lacking.items():
            stated = f"the proxy may not {' and '.join(operations)}: {some(names)}"
            found.append(ACLS.failed(what, stated, self._allow(operations, _each(names))))
        if blind:
            stated = f"Kafka configs may not be read, so defaults are assumed: {some(blind)}"
            found.append(ACLS.warning(what, stated, self._allow(("DESCRIBE_CONFIGS",), _each(blind))))
        if is_checked and not lacking:
            names = [topic.name for topic, _ in is_checked]
            found.append(ACLS.ok(what, f"all required operations on {len(is_checked)} topic(s): {some(names)}"))
        shared = [topic.name for topic, policy in is_checked if policy.check is Check.ON]
        if shared and self._config.reuse_port:
            stated = f"with reuse_port, wrong offsets are detected, not prevented: {some(shared)}"
            todo = f"set {CHECK_EXPECTED_OFFSETS.name}=required, or use one proxy without reuse_port for these topics"
            found.append(ACLS.warning(what, stated, todo))
        return found + await self._losing(what, [topic for topic, policy in is_checked if policy.is_checked])

    async def _losing(self, what: str, topics: Sequence[Message]) -> list[Finding]:
        """Warn if Kafka may lose acknowledged appends."""
        by_reason: dict[tuple[str, str], list[str]] = {}
        for start in range(0, len(topics), TOPICS_DESCRIBED_AT_ONCE):
            of_name = {each.name: each for each in topics[start : start + TOPICS_DESCRIBED_AT_ONCE]}
            deadline = deadline_in(self._config.limits.request_timeout_seconds)
            for name, facts in (await described_topics(self._connection, list(of_name), deadline)).items():
                if facts.assumed:
                    continue
                for each in durability_warnings(
                    replication_factor=_replicas(of_name[name]),
                    min_insync_replicas=facts.min_insync_replicas,
                    unclean_leader_election=facts.unclean_leader_election,
                ):
                    by_reason.setdefault(each, []).append(name)
        return [
            ACLS.warning(what, f"{state}: {some(names)}", todo) for (state, todo), names in sorted(by_reason.items())
        ]

    async def markers(self) -> list[Finding]:
        """After `topics`, which has the configs set by admins."""
        what = "claims"
        if not any(policy.claims for policy in self._policies):
            return []
        probe = abort_marker(*marker_probe(self._config.state_topic))
        answer = await self._query(apis.WRITE_TXN_MARKERS, probe, at_most=1)
        if marker_error(answer) in MARKERS_DENIED:
            stated = "the proxy may not write transaction markers: topics with fencepost.claims=true have no claims"
            return [ACLS.warning(what, stated, self._allow(("ALTER",), "--cluster"))]
        return [ACLS.ok(what, "transaction markers may be written (ALTER on the cluster)")]

    async def _described(self, names: Sequence[str] | None) -> list[Message]:
        answer = await self._query(apis.METADATA, query_of(names), at_least=10, at_most=13)
        return list(answer.topics)

    # ---- direct appends

    async def bypassing(self) -> list[Finding]:
        topics = [*self._checked, *([self._config.state_topic] if self._checked and self._state is not None else ())]
        authorizer = None if self._open or not topics else await self._authorizer()
        hosts = {each.local_host for each in (*self._proxied_connections.values(), self._connection)}
        if self._config.broker is not None:
            with suppress(ValueError):  # a sidecar reaches its broker from this address too
                hosts.add(str(ip_address(self._config.broker.host)))
        return bypassing(authorizer, self._config, topics, sorted(hosts))

    async def _authorizer(self) -> Authorizer:
        """Its configs are read from the broker of this connection: brokers answer for themselves alone."""
        name, everyone = AUTHORIZER_CONFIGS
        node_id = next((node for node, each in self._proxied_connections.items() if each is self._connection), None)
        configs: dict[str, str | None] | None = None
        if node_id is not None:
            resource = Message(
                resource_type=_BROKER_RESOURCE, resource_name=str(node_id), configuration_keys=list(AUTHORIZER_CONFIGS)
            )
            answer = await self._query(apis.DESCRIBE_CONFIGS, Message(resources=[resource]), at_least=1, at_most=4)
            if not answer.results[0].error_code:
                configs = {each.name: each.value for each in answer.results[0].configs}
        if configs is None:
            return Authorizer(self._acls, None, None)
        # Kafka conceals the value: it is a config of the authorizer, unknown to the broker.
        value = configs.get(everyone, "false")
        return Authorizer(self._acls, configs.get(name), None if value is None else value == "true")

    # ---- groups and transactions

    async def groups(self) -> list[Finding]:
        what, ordered = "consumer groups", any(policy.ordered for policy in self._policies)
        message = Message(groups=[_NO_GROUP], include_authorized_operations=False)
        answer = await self._query(_DESCRIBE_GROUPS, message, at_most=6)
        if answer.groups[0].error_code != Error.GROUP_AUTHORIZATION_FAILED:
            return [ACLS.ok(what, "all may be described")]
        stated = "not all groups may be described; groups of topics with ordered expansion need it"
        todo = self._allow(("DESCRIBE",), "--group '*'")
        if ordered:
            return [ACLS.warning(what, stated, todo)]
        return [ACLS.unknown(what, f"{stated}. No topic has it, so nothing depends on this")]

    async def transactional_ids(self) -> list[Finding]:
        what = "transactional ids"
        message = Message(transactional_ids=[_NO_GROUP])
        answer = await self._query(apis.DESCRIBE_TRANSACTIONS, message, at_most=0)
        code = answer.transaction_states[0].error_code
        if code != Error.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return [ACLS.ok(what, "all may be described")]
        stated = "not all may be described: commits of the others on checked topics cannot be validated, and their "
        stated += "transactions are not shown"
        return [ACLS.warning(what, stated, self._allow(("DESCRIBE",), "--transactional-id '*'"))]


def _replicas(topic: Message) -> int:
    return min((len(each.replica_nodes) for each in topic.partitions), default=0)


def _each(names: Sequence[str]) -> str:
    return " ".join(f"--topic {each}" for each in names[:_IN_ONE_COMMAND_MAX])


def _topics_of(glob: str) -> tuple[str, bool]:
    """kafka-acls arguments for the topics of a glob, and whether they match exactly these or more."""
    start = re.split(r"[*?[]", glob, maxsplit=1)[0]
    if start == glob:
        return f"--topic {shlex.quote(glob)}", True
    exact = glob == f"{start}*"
    return (f"--topic {shlex.quote(start)} --resource-pattern-type prefixed" if start else "--topic '*'"), exact


#: APIs that the proxy itself uses, with the versions it supports.
NEEDED: Final[Mapping[int, tuple[int, int]]] = {
    apis.PRODUCE: (3, 13),
    apis.FETCH: (9, 13),
    apis.LIST_OFFSETS: (5, 7),
    apis.METADATA: (10, 13),
    apis.FIND_COORDINATOR: (3, 6),
    apis.CREATE_TOPICS: (2, 7),
    apis.INIT_PRODUCER_ID: (0, 4),
    apis.OFFSET_FOR_LEADER_EPOCH: (2, 4),
    apis.DESCRIBE_CONFIGS: (1, 4),
    apis.CREATE_PARTITIONS: (0, 3),
    apis.DESCRIBE_PRODUCERS: (0, 0),
    apis.DESCRIBE_TRANSACTIONS: (0, 0),
}
