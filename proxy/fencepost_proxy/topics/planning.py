"""What `rewriting.py` and `closed.py` share: a plan for one request, and what is known when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from fencepost_policies.append import Check
from fencepost_proxy.topics.expansions import Assignments, Growth
from fencepost_proxy.topics.state import StateView, TopicConfigChange
from fencepost_proxy.topics.virtual_configs import FileConfigs, TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.schema import Message


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the cluster's topics. Nothing in it is called after the answer is finished.

    A thread may ask it (`session.exchange.Exchanges`), while the event loop changes what it tells of.

    `topic_id` – the id of a topic's living incarnation, None where it is not known.
    `state_topic_id` – None until the state topic was found or created. `fresh` – whether `view` is recent enough to
    rely on. `shared_producer_ids` – of fenced appends.
    """

    view: StateView
    file_configs: FileConfigs
    topic_id: Callable[[str], UUID | None]
    state_topic: str
    state_topic_id: UUID | None = None
    fresh: bool = True
    shared_producer_ids: frozenset[int] = frozenset()

    def policy(self, topic: str) -> TopicPolicy | None:
        """What holds for a topic; None where the virtual configs are too old to say."""
        if not self.fresh:
            return None
        return self.view.topic_policy(topic, self.topic_id(topic), self.file_configs)

    def check(self, topic: str) -> Check | None:
        """What holds for a topic's appends; None where the virtual configs are too old to say."""
        policy = self.policy(topic)
        return None if policy is None else policy.check

    def is_counted(self, topic: str) -> bool:
        policy = self.policy(topic)
        return policy is not None and policy.counted

    def growth(self, topic: str) -> Growth:
        return self.view.growth(topic, self.topic_id(topic))

    def is_state_topic(self, name: str | None, topic_id: UUID | None = None) -> bool:
        return name == self.state_topic or (topic_id is not None and topic_id == self.state_topic_id)


@dataclass(frozen=True, slots=True)
class Joins:
    """Checked partitions that a transaction is about to add: it is on them as soon as Kafka has the request.

    With `MARKER` for its id: those whose leader is to write a transaction marker.
    """

    transactional_id: str
    partitions: tuple[TopicPartition, ...]


class ExpansionRequest(NamedTuple):
    """A counted topic is to grow; Kafka would let the client who wants it.

    `ordered` – keys must keep their order; `multiples_only` – so it grows to multiples of the count that it has now.
    `validate_only` – only say whether it would be done.
    """

    topic: str
    to_count: int
    assignments: Assignments | None
    ordered: bool = False
    multiples_only: bool = False
    validate_only: bool = False


class ExpansionOutcome(NamedTuple):
    """What to tell him: Kafka's error code, 0 where it has grown."""

    topic: str
    code: int
    message: str | None


@dataclass(frozen=True, slots=True)
class Expansions:
    """`first` – what goes upstream before `Plan.forward`, for the same request; `finish_first` takes its answer.

    `wanted` – of the finished response: what is to grow. `tell` – puts the outcomes, by topic, into the response; they
    have to be there within `timeout_ms`.
    """

    first: Message | None
    finish_first: Callable[[Message], None]
    wanted: Callable[[Message], tuple[ExpansionRequest, ...]]
    tell: Callable[[Message, Mapping[str, ExpansionOutcome]], None]
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with one decoded request.

    `forward` – what goes upstream in its place, always: Kafka itself then says what the client may do, and when the
    order of answers comes to it. An entry that is refused here is not in it; its list may have become empty.
    `finish` – completes Kafka's answer in place, and gives back what changed: store that, then send the answer.
    `joins` – ask the gates of those before the request goes upstream; `later` – the answer if they put it off.
    `expansions` – what is to grow before the answer is sent.
    """

    forward: Message
    finish: Callable[[Message], list[TopicConfigChange]]
    joins: Joins | None = None
    later: Message | None = None
    expansions: Expansions | None = None
