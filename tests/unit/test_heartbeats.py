"""Which processes a proxy removes from the state topic: `cluster/heartbeats.py`."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from fencepost_proxy.cluster.heartbeats import Heartbeats, Instance
from fencepost_proxy.config import Limits
from fencepost_proxy.topics.processes import encode_heartbeat, encode_heartbeat_tombstone


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


def test_other_processes_are_listed_until_they_report_their_end() -> None:
    own, live, dead = uuid4(), uuid4(), uuid4()
    processes = SimpleNamespace(
        identity=lambda process: None, instance_id={own: 7, live: 8, dead: 9}.get, age=lambda process: 0
    )
    topic: Any = SimpleNamespace(read_until=0.0, view=SimpleNamespace(next_offset=1, processes=processes))
    heartbeats = Heartbeats(topic, cast("Any", None), Limits())
    assert heartbeats.instances(time.monotonic()) == []
    heartbeats.process, heartbeats.about = own, {"host": "a", "version": "1", "status": "0.0.0.0:8080"}
    now_ms = int(time.time() * 1000)
    heartbeats.observe(encode_heartbeat(dead, now_ms - 95_000), loaded=False)
    heartbeats.observe(encode_heartbeat(live, now_ms, {"host": "b", "version": "2"}), loaded=True)

    this, other, silent = heartbeats.instances(time.monotonic())

    assert this == Instance(7, "a", "1", "0.0.0.0:8080", 0.0, live=True, this=True)
    assert (other.instance_id, other.host, other.version, other.status, other.live) == (8, "b", "2", None, True)
    assert (silent.instance_id, silent.host, silent.live) == (9, None, False)
    assert silent.heartbeat_seconds == pytest.approx(95, abs=5)
    heartbeats.observe(encode_heartbeat_tombstone(dead), loaded=True)
    assert len(heartbeats.instances(time.monotonic())) == 2
    assert heartbeats._about.keys() == {live}
