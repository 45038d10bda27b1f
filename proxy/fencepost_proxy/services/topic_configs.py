"""Stores changes of virtual topic configs in the state topic."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from uuid import UUID

from fencepost_proxy import logs
from fencepost_proxy.cluster.authorized import REQUIRED
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.errors import Error, FencepostError
from fencepost_proxy.services.cluster_view import ClusterView
from fencepost_proxy.services.topic_warnings import TopicWarnings
from fencepost_proxy.topics.state import NotStored, TopicConfigChange
from fencepost_proxy.topics.virtual_configs import FileConfigs, TopicPolicy

_log = logs.get("services.topic_configs")

_STORE_SECONDS = 15.0


class StoredConfigs(NamedTuple):
    """`failure`: why the changes were not stored, or not in time; None once every process knows the new configs or has
    stopped serving. `effects`: by topic and config, the value before and after; empty where a change has no effect."""

    failure: NotStored | None
    effects: Mapping[str | None, Mapping[str, tuple[str, str]]]


@dataclass(eq=False)
class TopicConfigs:
    """`lease_seconds`: after this time every process knows what is stored, or has stopped serving."""

    cluster: ClusterView
    warnings: TopicWarnings
    file_configs: FileConfigs
    lease_seconds: float

    async def store(self, changes: Sequence[TopicConfigChange]) -> StoredConfigs:
        effects: dict[str | None, Mapping[str, tuple[str, str]]] = {}
        return StoredConfigs(await self._store_in_time(changes, effects), effects)

    async def _store_in_time(
        self, changes: Sequence[TopicConfigChange], effects: dict[str | None, Mapping[str, tuple[str, str]]]
    ) -> NotStored | None:
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                await self._store(changes, effects)
        except (FencepostError, TimeoutError, ValueError) as failure:
            error = str(failure) or f"not finished within {_STORE_SECONDS:g} s"
            denied = isinstance(failure, UpstreamUnavailable) and failure.error_code == Error.TOPIC_AUTHORIZATION_FAILED
            _log.error("virtual configs could not be stored", reason=error)
            return NotStored(error, denied)
        except Exception as failure:
            _log.crash("storing virtual configs crashed", failure)
            return NotStored("internal error, see the proxy's log")
        return None

    async def _store(
        self, changes: Sequence[TopicConfigChange], effects: dict[str | None, Mapping[str, tuple[str, str]]]
    ) -> None:
        state = self.cluster.membership.joined
        needed = self._operations(changes)
        changes = await self._with_topic_ids(changes, needed)
        await self.cluster.rights.require(needed)
        effects |= {each.topic: state.view.effect_of(each, self.file_configs) for each in changes}
        await self._forget_deleted(changes)
        records = state.view.records_of(changes)
        if records:
            await state.append(records)
        if not all(change.deleted for change in changes):
            # Even if nothing was stored: another client may have stored the same a moment ago.
            await asyncio.sleep(self.lease_seconds)
        for change in changes:
            if change.topic is not None and not change.deleted:
                self.warnings.changed(change.topic)
                self.warnings.check([change.topic])

    def _operations(self, changes: Sequence[TopicConfigChange]) -> dict[str, tuple[str, ...]]:
        """Operations of the proxy's own user that the changes need: to look up the topic, and for its checks."""
        needed = {}
        for each in changes:
            if each.topic is None or each.deleted:
                continue
            policy = TopicPolicy.of({**self.file_configs(each.topic), **each.assign})
            ordered = ("ALTER",) if policy.ordered else ()
            needed[each.topic] = (*REQUIRED, *ordered) if policy.read else ("DESCRIBE",)
        return needed

    async def _forget_deleted(self, changes: Sequence[TopicConfigChange]) -> None:
        """Before the client gets its response: a partition sequencer's state must not outlive the topic."""
        deleted = [change.topic for change in changes if change.deleted and change.topic is not None]
        if deleted:
            await self.cluster.kafka.refresh_metadata(deleted)
        for topic in deleted:
            self.cluster.lookups.observer.replaced(topic)

    async def _with_topic_ids(
        self, changes: Sequence[TopicConfigChange], needed: Mapping[str, Sequence[str]]
    ) -> list[TopicConfigChange]:
        """Looks up ids that no response contained, in one metadata request: an admin may change many topics at once.
        Retries, because brokers learn of a new topic one by one.
        """
        found: dict[str, UUID] = {}
        left = {each.topic: each.topic_id for each in changes if not each.deleted and each.topic is not None}
        while left:
            await self.cluster.kafka.refresh_metadata(list(left))
            if any(map(self.cluster.lookups.denied, left)):
                await self.cluster.rights.require(needed)
            for topic, reported in list(left.items()):
                known = self.cluster.lookups.topic_id(topic)
                if known is not None and (reported is None or known == reported):
                    found[topic] = known
                    del left[topic]
            if left:
                await asyncio.sleep(0.05)
        return [
            each if each.deleted or each.topic is None else replace(each, topic_id=found[each.topic])
            for each in changes
        ]
