"""The rows as JSON, for other implementations of the contract and for client libraries: `contract/cases/TABLE.json`.

`python -m tests.pages` writes them. `contract/schema.json` describes their form.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from fencepost_proxy.preflight.conformance.requests import kafka_configs
from tests.contract.rows import (
    CONFIGS,
    OTHER,
    SECOND,
    SHARED,
    Batch,
    Begin,
    Bypass,
    DeleteRecords,
    End,
    Faulty,
    Part,
    Pipelined,
    Reply,
    Row,
    Send,
    Step,
    appended,
    filling,
    send,
)
from tests.contract.sentences import PAGE, by_row
from tests.contract.tables import TABLES
from tests.support import raw

_BUILT_AT_MS: Final = 1_700_000_000_000
_PROXYS: Final = "the proxy's"
_KIND = re.compile(r"(PREDECESSOR_FAILED )?([A-Z_]{2,})\b")
_OTHER_OUTCOMES: Final = {"OFFSET_VIOLATION": "appended", "OUTCOME_UNKNOWN": "unknown"}
_WITH_NUMBERS: Final = ("OFFSET_MISMATCH", "OFFSET_VIOLATION", "INVALID_PARTITION_COUNT")


def page(table: str) -> str:
    numbers = by_row(PAGE.read_text("utf-8"), [f"{table}/{row.name}" for row in TABLES[table]])
    cases = [_Case(f"{table}/{row.name}").made(row, numbers) for row in TABLES[table]]
    return "[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n"


@dataclass(frozen=True)
class _Case:
    name: str

    @property
    def topic(self) -> str:
        return "case-" + re.sub(r"\W+", "-", self.name)

    def place(self, partition: int) -> tuple[str, int]:
        return (f"{self.topic}-second", 0) if partition == SECOND else (self.topic, partition)

    def made(self, row: Row, numbers: Mapping[str, list[str]]) -> dict[str, Any]:
        topics = [self._topic(row, self.topic, row.topic)]
        if row.second is not None:
            topics.append(self._topic(row, self.place(SECOND)[0], row.second))
        before = (send(filling(row), appended(0)),) if row.length else ()
        return {
            "name": self.name,
            "sentences": numbers[self.name],
            "needs": sorted(set(_needs(row))),
            "topics": topics,
            "steps": [self._step(step) for step in (*before, *row.steps)],
            "logs": [self._log(partition, row) for partition in row.logs],
        }

    def _topic(self, row: Row, name: str, configs: str) -> dict[str, Any]:
        shown = {key.removeprefix("!"): value for key, value in CONFIGS[configs].items()}
        return {"name": name, "partitions": row.partitions, "configs": {**shown, **kafka_configs(row.settings)}}

    def _log(self, partition: int, row: Row) -> dict[str, Any]:
        start = max((step.before for step in row.steps if isinstance(step, DeleteRecords)), default=0)
        batches = sorted(row.logs[partition].items())
        values = [
            [at + i, value.decode("ascii")]
            for at, (values, _) in batches
            if at >= start
            for i, value in enumerate(values)
        ]
        topic, number = self.place(partition)
        return {"topic": topic, "partition": number, "records": values}

    def _step(self, step: Step) -> dict[str, Any]:
        match step:
            case Send():
                return {"produce": [self._request(step)]}
            case Pipelined(sends):
                return {"produce": [self._request(each) for each in sends]}
            case Faulty(request, response):
                return {"produce": [self._request(request)], "kafka_response": response}
            case Bypass(batch, at):
                return {"append_at_kafka": self._batch(batch), "at": at}
            case DeleteRecords(before):
                return {"delete_records_before": before}
            case Begin(producer):
                return {"begin_transaction": f"{self.topic}-{producer}", "producer": producer}
            case End(producer, marker_at, commit):
                return {"end_transaction": f"{self.topic}-{producer}", "commit": commit, "marker_at": marker_at}

    def _request(self, request: Send) -> dict[str, Any]:
        made: dict[str, Any] = {"connection": request.via, "version": request.version, "acks": request.acks}
        made["timeout_ms"] = request.timeout_ms
        if request.transactional_id is not None:
            made["transactional_id"] = f"{self.topic}-{request.transactional_id}"
        if request.count is not None:
            made["field_253"] = base64.b64encode(request.count).decode()
        if request.level is not None:
            made["field_254"] = base64.b64encode(request.level).decode()
        if request.closes:
            made["closes"] = True
        made["partitions"] = [self._part(request, part) for part in request.parts]
        return made

    def _part(self, request: Send, part: Part) -> dict[str, Any]:
        topic, number = self.place(part.partition)
        made = {"topic": topic, "partition": number, "batch": self._batch(part.batch)}
        if part.reply is not None and request.acks and not request.closes:
            made["answer"] = self._answer(part.reply, request.version, f"topic={topic} partition={number}")
        return made

    def _batch(self, batch: Batch) -> dict[str, Any]:
        # Compressed bytes depend on the library.
        plain = replace(batch, codec=0)
        built = plain.build(_BUILT_AT_MS, lambda producer: (_fixed(producer), 0), self.topic)
        made: dict[str, Any] = {"bytes": base64.b64encode(built).decode()}
        if batch.spoil is not None:
            assert not batch.codec
            return made
        if batch.codec:
            made["codec"] = batch.codec
        made["records"] = [_record(each, self.topic) for each in batch.records]
        if isinstance(batch.producer, str):
            made["producer"] = _PROXYS if batch.producer == SHARED else batch.producer
        if batch.records[0].timestamp_ms is None:
            made["age_ms"] = batch.age_ms
            if batch.resent:
                made["resent"] = True
        return made

    def _answer(self, reply: Reply, version: int, where: str) -> dict[str, Any]:
        made: dict[str, Any] = {"code": reply.code, "base_offset": reply.base_offset}
        if version >= 5:
            made["log_start_offset"] = reply.log_start
        if reply.message is not None and version >= 8:
            made["message"] = reply.message.replace("{where}", where).replace("{topic}", self.topic)
            made["error"] = _error(made["message"])
        return made


def _needs(row: Row) -> Iterator[str]:
    """What a reader needs besides one proxy of a new cluster, with its default configuration."""
    if row.scope == "request":
        yield 'refusal_scope = "request"'
    if row.old_format:
        yield "topics of message format 0.10"
    if row.topic.startswith("newer"):
        yield "topic configs of a newer version"
    for step in row.steps:
        match step:
            case Bypass():
                yield "appends at Kafka"
            case Faulty():
                yield "lost or late responses of Kafka"
            case Begin() | End():
                yield "transactions"
    for request in row.sends:
        if request.via == OTHER:
            yield "a second proxy"
        if any(part.batch.producer == SHARED for part in request.parts):
            yield "the proxy's producer id"


def _fixed(producer: str | int) -> int:
    """0 is replaced by its id."""
    return producer if isinstance(producer, int) else 0


def _record(record: raw.Record, topic: str) -> dict[str, Any]:
    """For people, and for clients that make batches: text has one character for each byte."""
    made: dict[str, Any] = {"value": record.value.decode("latin-1")}
    if record.key is not None:
        made["key"] = record.key.decode("latin-1")
    if record.all_headers:
        made["headers"] = [
            [name, None if value is None else value.decode("latin-1").replace("{topic}", topic)]
            for name, value in record.all_headers
        ]
    if record.timestamp_ms is not None:
        made["timestamp_ms"] = record.timestamp_ms
    return made


def _error(message: str) -> dict[str, Any]:
    """What a client library reads from a message; numbers as the message has them."""
    made: dict[str, Any] = {"outcome": "refused"}
    if (found := _KIND.match(message)) is not None:
        made["kind"] = found[2]
        if found[1]:
            made["predecessor"] = True
        elif found[2] in _OTHER_OUTCOMES:
            made["outcome"] = _OTHER_OUTCOMES[found[2]]
        if found[2] in _WITH_NUMBERS:
            made.update(re.findall(r"\b(expected|actual|record|appended_at)=(-?\d+)", message))
    if "POSSIBLY_YOURS" in message:
        made["possibly_yours"] = True
    return made
