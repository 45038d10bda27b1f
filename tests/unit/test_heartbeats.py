"""Which processes a proxy removes from the state topic: `cluster/state_topic.py`."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

from fencepost_proxy.cluster.state_topic import StateTopic
from fencepost_proxy.config import Limits
from fencepost_proxy.topics.state import encode_heartbeat
from fencepost_proxy.types import Monotonic


def test_process_that_was_suspended_removes_no_live_process() -> None:
    """1. P is suspended for 1000 s. 2. Q sends heartbeats. 3. P resumes and has not read them: for P, Q is silent.

    A tombstone for Q would let an expansion begin that does not wait for Q's appends.
    """
    state = StateTopic(cast("Any", SimpleNamespace(cluster_id="c")), name="state", lease_seconds=1.0, limits=Limits())
    live, dead, now = uuid4(), uuid4(), time.monotonic()
    for each in (live, dead):
        state._observe_record(encode_heartbeat(each, int((time.time() - 1000) * 1000)))
    state._fresh_until = Monotonic(now - 1)
    assert state._long_dead(now) == []

    state._loaded.set()
    state._observe_record(encode_heartbeat(live, int(time.time() * 1000)))
    state._fresh_until = Monotonic(now + 1)
    assert state._long_dead(now) == [dead]
