"""What only one of several worker processes may do, and how a connection comes to that one, the owner.

The session of another worker that comes to such a request reads no further and waits until nothing is under way. Then
it ends, and the owner goes on with its connections, from the first byte of that request: what was told to the client,
what it has proved, and which of its chains have failed goes along in a `Handed`.
"""

from __future__ import annotations

from fencepost_policies.append import Check
from fencepost_proxy.session.connection import INT32, Connection
from fencepost_proxy.session.messages import Handed, HandOver
from fencepost_proxy.session.slots import Failed
from fencepost_proxy.session.surroundings import Surroundings
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.wire.apis import (
    ALTER_CONFIGS,
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    INCREMENTAL_ALTER_CONFIGS,
)

#: Requests that may change virtual configs, or make a topic grow: one process puts them in an order.
OWNERS_APIS = frozenset({CREATE_TOPICS, DELETE_TOPICS, ALTER_CONFIGS, INCREMENTAL_ALTER_CONFIGS, CREATE_PARTITIONS})


class Handover(Connection):
    """`owner` – whether this process owns what only one may."""

    __slots__ = ("_owner", "_taken_frame")

    def __init__(
        self, connection: int, local_host: str, around: Surroundings, opened_at: float, *, owner: bool
    ) -> None:
        super().__init__(connection, local_host, around, opened_at)
        self._owner = owner
        self._taken_frame: bytes | None = None  # what the owner is wanted for, where it was collected already

    @staticmethod
    def _is_owners(policy: TopicPolicy | None) -> bool:
        """On `required` topics every append is stamped, and Kafka compares, whichever process sends it. Where batches
        keep producer ids of their own, only one gate that sees them all knows where the log ends.
        """
        return policy is not None and policy.check is Check.ON

    def _want_owner(self, frame: memoryview | None = None) -> None:
        """Nothing is read any more; `frame`, collected already, is the first that the owner gets."""
        self._owner_wanted = True
        if frame is not None:
            self._taken_frame = bytes(frame)
        self._pause_client()

    def _hand_over(self) -> None:
        """Once nothing is under way. What waits for an answer waits for this process."""
        if (
            not self._nothing_under_way()
            or not self._upstream.between_frames
            or self._closing
            or self.client_gone
            or self.upstream_gone
        ):
            return
        unread = self._client.give_back()
        if self._taken_frame is not None:
            unread = INT32.pack(len(self._taken_frame)) + self._taken_frame + unread
        self._around.release(self._collecting_bytes)
        self._collecting_bytes = 0
        handed = Handed(
            local_host=self.local_host,
            client_id=self.client_id,
            opened_at=self._opened_at,
            may_write=tuple(self._may_write.items()),
            failed_chains=tuple(
                (*chain, failed.result, failed.behind_bytes) for chain, failed in self._failed_chains.items()
            ),
            received_bytes=self._received_bytes - len(unread),
            login_ends=self._login_ends,
            unread=unread,
            software=self.software,
        )
        self._commands.append(HandOver(handed))
        self._owner_wanted = False
        self.client_gone = self.upstream_gone = True

    def _take_over(self, handed: Handed) -> None:
        """What the session of another process knew of this connection."""
        self.client_id = handed.client_id
        self.software = handed.software
        self._may_write = dict(handed.may_write)
        self._received_bytes = handed.received_bytes
        self._login_ends = handed.login_ends
        self._failed_chains = {
            (partition, producer_id): Failed(result, behind_bytes)
            for partition, producer_id, result, behind_bytes in handed.failed_chains
        }
