"""What only one of several worker processes may do, and how a connection comes to that one, the owner.

The session of another worker that comes to such a request reads no further and waits until nothing is under way. Then
it ends, and the owner goes on with its connections, from the first byte of that request: what was told to the client,
what it has proved, and which of its chains have failed goes along in a `MigratedConnection`.
"""

from __future__ import annotations

from fencepost_policies.append import Check
from fencepost_proxy.session.connection import INT32, Connection
from fencepost_proxy.session.messages import Migrate, MigratedConnection
from fencepost_proxy.session.pending_responses import Failed
from fencepost_proxy.session.services import Services
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.wire.apis import (
    ALTER_CONFIGS,
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    INCREMENTAL_ALTER_CONFIGS,
)

#: Requests that may change virtual configs, or make a topic grow: one process puts them in an order.
PRIMARY_APIS = frozenset({CREATE_TOPICS, DELETE_TOPICS, ALTER_CONFIGS, INCREMENTAL_ALTER_CONFIGS, CREATE_PARTITIONS})


class Migration(Connection):
    """`owner` – whether this process owns what only one may."""

    __slots__ = ("_primary", "_taken_frame")

    def __init__(
        self, connection: int, local_host: str, services: Services, opened_at: float, *, primary: bool
    ) -> None:
        super().__init__(connection, local_host, services, opened_at)
        self._primary = primary
        self._taken_frame: bytes | None = None  # what the owner is wanted for, where it was collected already

    @staticmethod
    def _needs_primary(policy: TopicPolicy | None) -> bool:
        """On `required` topics every append is stamped, and Kafka compares, whichever process sends it. Where batches
        keep producer ids of their own, only one gate that sees them all knows where the log ends.
        """
        return policy is not None and policy.check is Check.ON

    def _move_to_primary(self, frame: memoryview | None = None) -> None:
        """Nothing is read any more; `frame`, collected already, is the first that the owner gets."""
        self._primary_wanted = True
        if frame is not None:
            self._taken_frame = bytes(frame)
        self._pause_client()

    def _migrate(self) -> None:
        """Once nothing is under way. What waits for an answer waits for this process."""
        if (
            not self._nothing_under_way()
            or not self._upstream.between_frames
            or self._closing
            or self.client_closed
            or self.upstream_closed
        ):
            return
        unread = self._client.give_back()
        if self._taken_frame is not None:
            unread = INT32.pack(len(self._taken_frame)) + self._taken_frame + unread
        self._services.release(self._collecting_bytes)
        self._collecting_bytes = 0
        migrated = MigratedConnection(
            local_host=self.local_host,
            client_id=self.client_id,
            opened_at=self._opened_at,
            may_write=tuple(self._may_write.items()),
            failed_pipelines=tuple(
                (*pipeline_key, failed.result, failed.after_bytes)
                for pipeline_key, failed in self._failed_pipelines.items()
            ),
            received_bytes=self._received_bytes - len(unread),
            login_ends=self._login_ends,
            unread=unread,
            software=self.software,
        )
        self._commands.append(Migrate(migrated))
        self._primary_wanted = False
        self.client_closed = self.upstream_closed = True

    def _take_over(self, migrated: MigratedConnection) -> None:
        """What the session of another process knew of this connection."""
        self.client_id = migrated.client_id
        self.software = migrated.software
        self._may_write = dict(migrated.may_write)
        self._received_bytes = migrated.received_bytes
        self._login_ends = migrated.login_ends
        self._failed_pipelines = {
            (partition, producer_id): Failed(result, after_bytes)
            for partition, producer_id, result, after_bytes in migrated.failed_pipelines
        }
