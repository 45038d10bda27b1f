"""Plan for one request, and the knowledge it is based on: shared by `rewriting.py` and `closed.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from fencepost_policies.append import Check
from fencepost_proxy.expansion.history import Assignments, ExpansionHistory
from fencepost_proxy.topics.state import StateView, TopicConfigChange
from fencepost_proxy.topics.virtual_configs import FileConfigs, TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.schema import Message


@dataclass(frozen=True, slots=True)
class Known:
    """Knowledge of the cluster's topics. None of it is called after the answer is finished.

    `topic_id`: id of a topic's current incarnation, None if unknown. `state_topic_id`: None until the state topic was
    found or created. `fresh`: `view` is recent enough to rely on. `shared_producer_ids`: of fenced appends.
    `may_check_counts`: names of all topics that may have partition-count checks; None: any may.
    """

    view: StateView
    file_configs: FileConfigs
    topic_id: Callable[[str], UUID | None]
    state_topic: str
    state_topic_id: UUID | None = None
    fresh: bool = True
    shared_producer_ids: frozenset[int] = frozenset()
    may_check_counts: frozenset[bytes] | None = None

    def policy(self, topic: str) -> TopicPolicy | None:
        """A topic's policy; None if the virtual configs are outdated."""
        if not self.fresh:
            return None
        return self.view.topic_policy(topic, self.topic_id(topic), self.file_configs)

    def check(self, topic: str) -> Check | None:
        """The expected-offset check of a topic; None if the virtual configs are outdated."""
        policy = self.policy(topic)
        return None if policy is None else policy.check

    def is_count_checked(self, topic: str) -> bool:
        policy = self.policy(topic)
        return policy is not None and policy.checks_count

    def history(self, topic: str) -> ExpansionHistory:
        return self.view.history(topic, self.topic_id(topic))

    def is_state_topic(self, name: str | None, topic_id: UUID | None = None) -> bool:
        return name == self.state_topic or (topic_id is not None and topic_id == self.state_topic_id)


@dataclass(frozen=True, slots=True)
class Joins:
    """Checked partitions that a transaction is about to add: they are added as soon as Kafka has the request.

    With the id `MARKER`: partitions whose leader is about to write a transaction marker.
    """

    transactional_id: str
    partitions: tuple[TopicPartition, ...]


class ExpansionRequest(NamedTuple):
    """Expand a topic with partition-count checks; Kafka permits it to the client.

    `ordered`: keys must keep their order. `multiples_only`: only to multiples of the current count.
    `validate_only`: only report whether it would be done.
    """

    topic: str
    to_count: int
    assignments: Assignments | None
    ordered: bool = False
    multiples_only: bool = False
    validate_only: bool = False


class ExpansionOutcome(NamedTuple):
    """Answer to the client: Kafka's error code, 0 if the topic was expanded."""

    topic: str
    code: int
    message: str | None


@dataclass(frozen=True, slots=True)
class Expansions:
    """`first`: sent upstream before `Plan.forward`, for the same request; `finish_first` takes its answer.

    `requested`: the expansions requested, from the finished response. `report`: puts the outcomes, by topic, into the
    response, within `timeout_ms`.
    """

    first: Message | None
    finish_first: Callable[[Message], None]
    requested: Callable[[Message], tuple[ExpansionRequest, ...]]
    report: Callable[[Message, Mapping[str, ExpansionOutcome]], None]
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How to handle one decoded request.

    `forward`: always sent upstream instead of it, so Kafka decides on permissions and on the order of answers. It lacks
    the entries refused here, and may be an empty list.
    `finish`: completes Kafka's answer in place and returns the changes: store them, then send the answer.
    `joins`: pass these to the sequencers before the request is sent; `later`: the answer if they delay it.
    `expansions`: expansions to finish before the answer is sent.
    """

    forward: Message
    finish: Callable[[Message], list[TopicConfigChange]]
    joins: Joins | None = None
    later: Message | None = None
    expansions: Expansions | None = None
