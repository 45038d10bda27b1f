"""Requests that only the primary worker may process, and how a connection moves there.

1. A session of another worker receives such a request. It stops reading and waits until nothing is in progress.
2. It ends, and sends its state in a `MigratedConnection`: what was reported to the client, what the client has proved,
   and which pipelines have failed.
3. The primary worker continues the connection from the first byte of that request.
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

#: Requests that may change virtual configs or expand a topic: one process must order them.
PRIMARY_APIS = frozenset({CREATE_TOPICS, DELETE_TOPICS, ALTER_CONFIGS, INCREMENTAL_ALTER_CONFIGS, CREATE_PARTITIONS})


class Migration(Connection):
    """`primary` – whether this is the primary worker."""

    __slots__ = ("_primary", "_taken_frame")

    def __init__(
        self, connection: int, local_host: str, services: Services, opened_at: float, *, primary: bool
    ) -> None:
        super().__init__(connection, local_host, services, opened_at)
        self._primary = primary
        self._taken_frame: bytes | None = None  # the request to migrate for, if it is already collected

    @staticmethod
    def _needs_primary(policy: TopicPolicy | None) -> bool:
        """On `required` topics every append is fenced, and Kafka compares the sequences of all processes. Elsewhere,
        batches may keep their own producer ids, and only a single sequencer that gets them all knows the log end.
        """
        return policy is not None and policy.check is Check.ON

    def _move_to_primary(self, frame: memoryview | None = None) -> None:
        """Stop reading; `frame`, already collected, is the first that the primary worker gets."""
        self._needs_migration = True
        if frame is not None:
            self._taken_frame = bytes(frame)
        self._pause_client()

    def _migrate(self) -> None:
        """Once nothing is in progress: answers that this process owes keep it here."""
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
        self._needs_migration = False
        self.client_closed = self.upstream_closed = True

    def _take_over(self, migrated: MigratedConnection) -> None:
        """Adopt the state of another process's session."""
        self.client_id = migrated.client_id
        self.software = migrated.software
        self._may_write = dict(migrated.may_write)
        self._received_bytes = migrated.received_bytes
        self._login_ends = migrated.login_ends
        self._failed_pipelines = {
            (partition, producer_id): Failed(result, after_bytes)
            for partition, producer_id, result, after_bytes in migrated.failed_pipelines
        }
