"""`fencepost proxy` with an injected fault, which proves that a test detects it: `python -m tests.support.lying_proxy`.

`$LIE` is one of

    commits     every third commit that the validator decides on is sent to Kafka as an abort, and reported as success
    offsets     every TxnOffsetCommit of one partition is sent to Kafka with offset 0
"""

from __future__ import annotations

import itertools
import os
import sys

from fencepost_proxy.cli.main import main
from fencepost_proxy.net.proxied_connection import ClientSocket
from fencepost_proxy.session.session import Session
from fencepost_proxy.session.transactions import Ending

LIE = os.environ["LIE"]
#: The first EndTxn and TxnOffsetCommit versions with tagged fields, and the first with a leader epoch.
_END_TXN_FLEXIBLE, _OFFSETS_FLEXIBLE, _OFFSETS_EPOCH = 3, 3, 2
_TXN_OFFSET_COMMIT = (28).to_bytes(2)
_LATER = 3

_ends = itertools.count(1)
_forward_end, _received = Session._forward_end, ClientSocket._received


def forward_aborts(self: Session, ending: Ending) -> None:
    if ending.commits and next(_ends) % _LATER == 0:
        frame = bytearray(ending.frame)
        frame[-2 if ending.pending_response.version >= _END_TXN_FLEXIBLE else -1] = False
        ending.frame = bytes(frame)
    _forward_end(self, ending)


def receive_other_offsets(self: ClientSocket, data: memoryview) -> None:
    """Each read has one whole TxnOffsetCommit, because clients send it alone."""
    frame = bytes(data)
    if frame[4:6] == _TXN_OFFSET_COMMIT:
        # After the offset: leader epoch (int32) from version 2 on, metadata ("" or null), and tagged fields thrice.
        version = int.from_bytes(frame[6:8])
        after = 4 * (version >= _OFFSETS_EPOCH) + (1 + 3 if version >= _OFFSETS_FLEXIBLE else 2)
        data[-after - 8 : -after] = bytes(8)
    _received(self, data)


if LIE == "commits":
    Session._forward_end = forward_aborts  # type: ignore[method-assign]
else:
    ClientSocket._received = receive_other_offsets  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())
