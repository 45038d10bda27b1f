"""`fencepost proxy` with a defect, which a proof must detect: `python -m tests.support.lying_proxy`.

`$LIE` is one of

    commits     every second validated commit of a transactional id goes to Kafka as an abort; its client gets success
    offsets     each TxnOffsetCommit of one partition goes to Kafka with offset 0
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from fencepost_proxy.cli.main import main
from fencepost_proxy.session.frames.pending_responses import PendingResponse
from fencepost_proxy.session.transactions.commits import EndTxnRequests
from fencepost_proxy.transport.proxied_connection import ClientSocket
from tests.support.mutants import Mutant, wrap

LIE = os.environ["LIE"]
#: The first EndTxn and the first TxnOffsetCommit with tagged fields, and the first with a leader epoch.
_END_TXN_FLEXIBLE, _OFFSETS_FLEXIBLE, _OFFSETS_EPOCH = 3, 3, 2
_TXN_OFFSET_COMMIT = (28).to_bytes(2)

_commits: Counter[str] = Counter()


def send_aborts(
    commit: Callable[..., Any], requests: EndTxnRequests, ended: PendingResponse, request: bytes, producer: Any
) -> Any:
    transactional_id, *_ = producer
    _commits[transactional_id] += 1
    if _commits[transactional_id] % 2 == 0:
        frame = bytearray(request)
        frame[-2 if ended.version >= _END_TXN_FLEXIBLE else -1] = False
        request = bytes(frame)
    return commit(requests, ended, request, producer)


def receive_other_offsets(received: Callable[..., None], client: ClientSocket, data: memoryview) -> None:
    """Clients send the whole request at once, and no other with it."""
    frame = bytes(data)
    if frame[4:6] == _TXN_OFFSET_COMMIT:
        # After the offset: leader epoch (int32) from version 2 on, metadata ("" or null), three lists of tagged fields.
        version = int.from_bytes(frame[6:8])
        rest = 4 * (version >= _OFFSETS_EPOCH) + (1 + 3 if version >= _OFFSETS_FLEXIBLE else 2)
        data[-rest - 8 : -rest] = bytes(8)
    received(client, data)


if __name__ == "__main__":
    commits = wrap(EndTxnRequests, "_commit", send_aborts)
    offsets = wrap(ClientSocket, "_received", receive_other_offsets)
    with Mutant(LIE, "see the module", (), commits if LIE == "commits" else offsets).live():
        sys.exit(main())
