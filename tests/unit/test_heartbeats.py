"""Which processes a proxy removes from the state topic: `cluster/heartbeats.py`."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

from fencepost_proxy.cluster.heartbeats import Heartbeats
from fencepost_proxy.config import Limits
from fencepost_proxy.topics.processes import encode_heartbeat


def test_process_that_was_suspended_removes_no_live_process() -> None:
    """1. P is suspended for 1000 s. 2. Q sends heartbeats. 3. P resumes and has not read them: for P, Q is silent.

    A tombstone for Q would let an expansion begin that does not wait for Q's appends.
    """
    topic: Any = SimpleNamespace(read_until=0.0)
    heartbeats = Heartbeats(topic, cast("Any", None), Limits())
    live, dead, now = uuid4(), uuid4(), time.monotonic()
    for each in (live, dead):
        heartbeats.observe(encode_heartbeat(each, int((time.time() - 1000) * 1000)), loaded=False)
    topic.read_until = now - 1
    assert heartbeats._long_dead(now) == []

    heartbeats.observe(encode_heartbeat(live, int(time.time() * 1000)), loaded=True)
    topic.read_until = now + 1
    assert heartbeats._long_dead(now) == [dead]
