"""How a connection moves to the primary worker, which alone may process some requests (`primary.py`).

1. A session of another worker receives such a request. It stops reading and waits until nothing is in progress.
2. It ends, and sends its state in a `MigratedConnection`: what was reported to the client, what the client has proved,
   and which pipelines have failed.
3. The primary worker continues the connection from the first byte of that request.
"""

from __future__ import annotations

from fencepost_proxy.session.cutter import INT32
from fencepost_proxy.session.failed_pipelines import FailedPipelines
from fencepost_proxy.session.messages import Migrate, MigratedConnection
from fencepost_proxy.session.pending_responses import Failed
from fencepost_proxy.session.proofs import Proofs
from fencepost_proxy.session.read_holds import ReadHolds
from fencepost_proxy.session.state import ConnectionState


def migrate(state: ConnectionState, holds: ReadHolds, proofs: Proofs, pipelines: FailedPipelines) -> None:
    """Call it while nothing is in progress: answers that this process owes keep the connection here."""
    if not state.upstream.between_frames or state.closing or state.client_closed or state.upstream_closed:
        return
    unread = state.client.give_back()
    if holds.taken_frame is not None:
        unread = INT32.pack(len(holds.taken_frame)) + holds.taken_frame + unread
    state.release_collected()
    migrated = MigratedConnection(
        local_host=state.local_host,
        client_id=state.client_id,
        opened_at=state.opened_at,
        may_write=tuple(proofs.may_write.items()),
        failed_pipelines=tuple(
            (*pipeline_key, failed.result, failed.after_bytes) for pipeline_key, failed in pipelines.failed.items()
        ),
        received_bytes=state.received_bytes - len(unread),
        login_ends=state.login_ends,
        unread=unread,
        software=state.software,
    )
    state.commands.append(Migrate(migrated))
    holds.needs_migration = False
    state.client_closed = state.upstream_closed = True


def take_over(migrated: MigratedConnection, state: ConnectionState, proofs: Proofs, pipelines: FailedPipelines) -> None:
    """Adopt the state of another process's session."""
    state.client_id = migrated.client_id
    state.software = migrated.software
    state.received_bytes = migrated.received_bytes
    state.login_ends = migrated.login_ends
    proofs.may_write = dict(migrated.may_write)
    pipelines.failed = {
        (partition, producer_id): Failed(result, after_bytes)
        for partition, producer_id, result, after_bytes in migrated.failed_pipelines
    }
