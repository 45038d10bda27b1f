"""Defects that the fuzzer must detect (`test_fuzz.py`)."""

from __future__ import annotations

import random
from typing import Any

from fencepost_proxy.sequencer.admitter import Admitter
from fencepost_proxy.sequencer.in_doubt import InDoubtResolver, Lookups
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.session import response_reader
from fencepost_proxy.session.batches import reading
from fencepost_proxy.session.batches.produce_exchange import ProduceExchange
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.control import control_messages as control
from fencepost_proxy.session.dispatcher import Dispatcher
from fencepost_proxy.session.frames.cutter import FrameCutter
from fencepost_proxy.session.produce import arrival
from fencepost_proxy.session.produce.admission import Admission
from fencepost_proxy.wire import primitives, produce
from fencepost_proxy.wire.apis import CREATE_TOPICS, DESCRIBE_CONFIGS
from tests.fuzz import large
from tests.fuzz.large import READ, Large
from tests.support.mutants import Change, Mutant, body, edit, put

_DEFECTS: dict[str, list[tuple[str, int, Change]]] = {
    "session": [
        ("views are stored", 600, edit(FrameCutter, "collected", ("bytes(here)", "here"))),
        (
            "responses out of order",
            200,
            body(
                ResponseQueue,
                "answer_front",
                "for pending_response in [each for each in self.to_client if each.done]:\n"
                "    self.to_client.remove(pending_response)\n"
                "    self.client_out += pending_response.chunks",
            ),
        ),
        ("memory is not released", 200, body(ConnectionState, "release_collected", "self.collecting_bytes = 0")),
        ("admissions are not returned", 200, body(Admission, "cancel_waiting", "self._holds.waiting_produce = None")),
        ("lost appends are not reported", 100, body(Dispatcher, "lost", "pass")),
        ("a partition is missing in a response", 300, body(ProduceExchange, "complete", "return bool(self.results)")),
    ],
    "sequencer": [
        ("success anywhere", 300, body(Lookups, "appended_elsewhere", "self._state.answer(pending, result)")),
        ("in-doubt appends are not resolved", 300, body(InDoubtResolver, "_resolve_later", "pass")),
        ("queued appends never time out", 200, body(PartitionSequencer, "_tick", "pass")),
        (
            "admitted twice",
            200,
            edit(
                Admitter,
                "_admit",
                ("appends.queue.popleft()", "if pending.append.record_count != 3: appends.queue.popleft()"),
            ),
        ),
    ],
    "wire": [("an index error is not caught", 500, put(produce, "MALFORMED", (ValueError,)))],
}


def _control(key: int, version: int, variant: int, elements: int = 20_000) -> dict[str, Any]:
    count = READ.index((key, version)) - variant
    return {"kind": "control", "count": count, "bytes": 0, "where": 0, "variant": variant, "elements": elements}


_UNLIMITED = 1 << 30
_ANY_NUMBER_OF_PARTITIONS = (put(arrival, "PARTITIONS_MAX", 100_000),)
_BATCHES_READ_HERE = (put(large, "HERE_BYTES_MAX", _UNLIMITED), put(reading, "HERE_STEPS_MAX", _UNLIMITED))
_CONTROL_READ_HERE = (put(control, "HERE_BYTES_MAX", _UNLIMITED),)
_LARGE = Large().frame(random.Random(1)) | {"version": 9, "acks": -1, "topic": 0, "transaction": False, "codec": 4}
_SLOW: dict[str, tuple[tuple[Change, ...], dict[str, Any]]] = {
    "65,536 partitions": (_ANY_NUMBER_OF_PARTITIONS, {"kind": "partitions", "topics": 1, "count": 65_536, "ours": 0}),
    "65,536 topics": (
        _ANY_NUMBER_OF_PARTITIONS,
        {"kind": "partitions", "topics": 65_536, "count": 65_536, "ours": 0, "topic": 2},
    ),
    "983,040 records": (
        _BATCHES_READ_HERE,
        {"kind": "records", "count": 65_536, "bytes": 0, "delta": 0, "ours": 2, "where": 0},
    ),
    "65,536 tagged fields of each partition": (
        (put(primitives, "TAGS_MAX", _UNLIMITED),),
        {"kind": "tags", "count": 65_536, "where": 1},
    ),
    "CreateTopics of 20,000 topics": (_CONTROL_READ_HERE, _control(CREATE_TOPICS, 7, 0)),
    "a DescribeConfigs response of 20,000 resources": (_CONTROL_READ_HERE, _control(DESCRIBE_CONFIGS, 4, 2)),
    "a Produce response of 100,000 partitions that names brokers": (
        (put(response_reader, "PRODUCED_HERE_BYTES_MAX", _UNLIMITED),),
        {"kind": "partitions", "topics": 1, "count": 100_000, "ours": 1, "topic": 2, "version": 12},
    ),
}

#: Each defect in code, and how many inputs detect it.
DEFECTS = [
    (Mutant(f"{target}-{name}", name, (target,), change), inputs)
    for target, defects in _DEFECTS.items()
    for name, inputs, change in defects
]
#: Each removed limit, and the frame that is slow without it.
SLOW = [
    (Mutant(name, "unlimited work in the event loop", ("large",), *limits), _LARGE | frame)
    for name, (limits, frame) in _SLOW.items()
]
