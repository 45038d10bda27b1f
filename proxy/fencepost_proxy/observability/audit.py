"""The audit log: which client or operator changed something, or was refused. All its lines have the logger `audit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from fencepost_proxy import logs
from fencepost_proxy.observability.status import RefusalStatus
from fencepost_proxy.topics.planning import ExpansionOutcome, ExpansionRequest
from fencepost_proxy.topics.state import NotStored, TopicConfigChange
from fencepost_proxy.topics.unknown_configs import shown_name
from fencepost_proxy.topics.virtual_configs import weakens
from fencepost_proxy.transport.proxied_connection import ProxiedConnection
from fencepost_proxy.types import Address

_log = logs.get("audit")
#: Refused appends are normal where writers race: one line for each host, topic and reason.
_REFUSED_SECONDS: Final = 60.0
_limited_log = logs.RateLimitedLog(_log, interval_seconds=_REFUSED_SECONDS)


class Identity(NamedTuple):
    """A client. `principal`: of its last login with PLAIN or SCRAM; None if it is unknown."""

    peer: Address | None = None
    principal: str | None = None
    client_id: str | None = None

    @classmethod
    def of(cls, proxied: ProxiedConnection | None) -> Identity:
        session = None if proxied is None else proxied.session
        login = (None, None) if session is None else (session.state.principal, session.state.client_id)
        return cls(None if proxied is None else proxied.peer, *login)


def configs_stored(
    identity: Identity,
    changes: Sequence[TopicConfigChange],
    effects: Mapping[str | None, Mapping[str, tuple[str, str]]],
    failure: NotStored | None,
) -> None:
    """A warning if a check is weakened. `failure`: why they were not stored."""
    for each in changes:
        effect = effects.get(each.topic, {})
        weakened = not each.deleted and any(weakens(name, *values) for name, values in effect.items())
        log = _log.warning if weakened else _log.info
        log(
            "virtual configs changed" if failure is None else "virtual configs not changed",
            **identity._asdict(),
            topic=each.topic,
            set=dict(each.assign) or None,
            unset=sorted(map(shown_name, each.unset)) or None,
            topic_deleted=each.deleted or None,
            old={name: old for name, (old, _) in effect.items()} or None,
            new={name: new for name, (_, new) in effect.items()} or None,
            reason=None if failure is None else failure.reason,
        )


def expanded(identity: Identity, requests: Sequence[ExpansionRequest], outcomes: Sequence[ExpansionOutcome]) -> None:
    for request, outcome in zip(requests, outcomes, strict=True):
        if not request.validate_only:
            _log.info(
                "partitions not added" if outcome.code else "partitions added",
                **identity._asdict(),
                topic=request.topic,
                partitions=request.to_count,
                reason=outcome.message,
            )


def append_refused(refused: RefusalStatus) -> None:
    _limited_log.info(
        (refused.client and refused.client.host, refused.topic, refused.reason),
        "append refused",
        peer=refused.client,
        principal=refused.principal,
        client_id=refused.client_id,
        partition=f"{refused.topic}-{refused.partition}",
        reason=refused.reason,
        expected=refused.expected,
        log_end=refused.log_end_offset,
    )


def group_released(peer: str, group: str, topic: str, result: str) -> None:
    _log.warning("an operator released a group", peer=peer, group=group, topic=topic, result=result)


def action_refused(peer: str, path: str, reason: object) -> None:
    _log.warning("action refused", peer=peer, path=path, reason=reason)
