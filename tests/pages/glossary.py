"""`docs/glossary.md`: the definition of a term is the first sentence of the docstring that owns it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Final

from tests.support.docs import ROOT

_HEAD: Final = """\
# Glossary

Terms that Fencepost adds to Kafka's own. Kafka's terms (base offset, log end offset, leader epoch, high watermark,
producer id, coordinator, rebalance) keep their meaning. Topic configs and error codes are in
[the contract](contract.md).

The page is generated from docstrings, which `tests/pages/glossary.py` names: change a definition there, then run
`python -m tests.pages`.

| term | meaning |
|---|---|
"""
_PROXY: Final = "proxy/fencepost_proxy/"
_POLICIES: Final = "policies/fencepost_policies/"
#: Term → the file, and in it the name of what has the docstring; without a name, the file has it.
TERMS: Final[Mapping[str, str]] = {
    "abort-only transaction": f"{_PROXY}topics/abort_only.py",
    "append": f"{_POLICIES}append.py Append",
    "append barrier": f"{_PROXY}expansion/barrier.py",
    "append mode": f"{_PROXY}sequencer/events.py AppendMode",
    "append policy": f"{_POLICIES}append_policy.py",
    "assignment filter": f"{_PROXY}expansion/assignment_filter.py",
    "checked topic": f"{_PROXY}services/checked_topics.py",
    "commit tag": "client/fencepost/spark/commit_tags.py",
    "conditional append": f"{_POLICIES}conditional_publish.py",
    "drain": f"{_PROXY}server.py Proxy.drain",
    "expected offset": f"{_PROXY}wire/statements.py",
    "fence": f"{_PROXY}sequencer/events.py Fence",
    "fence base": f"{_PROXY}sequencer/fence_bases.py",
    "fence confirmed": f"{_PROXY}sequencer/fence.py PartitionFence.is_confirmed",
    "fenced append": f"{_PROXY}wire/batch.py fence_batch",
    "gated assignment": f"{_PROXY}expansion/gating.py",
    "heartbeat": f"{_PROXY}topics/processes.py encode_heartbeat",
    "idempotence level": f"{_POLICIES}idempotence_level.py",
    "in-doubt append": f"{_PROXY}sequencer/in_doubt.py",
    "instance": f"{_PROXY}topics/processes.py",
    "instance id": f"{_PROXY}topics/processes.py Processes.instance_id",
    "lease": f"{_PROXY}cluster/state_topic.py StateTopic.fresh_until",
    "log-end snapshot": f"{_PROXY}sequencer/events.py LogEndSnapshot",
    "ordered partition expansion": f"{_PROXY}expansion/procedure.py",
    "partition sequencer": f"{_PROXY}sequencer/sequencer.py",
    "pending append": f"{_PROXY}sequencer/events.py PendingAppend",
    "permit": f"{_PROXY}sequencer/permits.py",
    "pipelined append": f"{_PROXY}session/connection/failed_pipelines.py",
    "post-expansion grace period": f"{_PROXY}expansion/counts.py Counts.in_grace_period",
    "prior partition": f"{_PROXY}expansion/history.py Expansion.prior_partitions",
    "relayed": f"{_PROXY}session/connection/response_queue.py relayed",
    "resolver": f"{_PROXY}sequencer/in_doubt.py InDoubtResolver",
    "shared producer id": f"{_PROXY}topics/fencing.py SharedProducerIds",
    "source of the expected offset": f"{_PROXY}wire/batch_scan.py _expected",
    "state topic": f"{_PROXY}topics/state.py",
    "takeover": f"{_PROXY}services/membership.py Membership.taken_over",
    "threshold": f"{_PROXY}expansion/history.py Expansion.thresholds",
    "violation": f"{_PROXY}sequencer/events.py Violation",
    "virtual config": f"{_PROXY}topics/virtual_configs.py",
    "write id": f"{_PROXY}sequencer/events.py AppendedBatch.has_write_id_of",
}


def definition_in(docstring: str, term: str) -> str:
    """The first sentence, without the term at its beginning."""
    sentence = " ".join(re.split(r"(?<=[.!?])\s|\n\n", docstring, maxsplit=1)[0].split())
    definition = re.sub(rf"^[\w ]*\b{re.escape(term)}s?( \([^)]*\))?: ", "", sentence, flags=re.IGNORECASE)
    return definition[0].upper() + definition[1:]


def docstring_of(source: str) -> str:
    """Of a row of `TERMS`."""
    path, _, name = source.partition(" ")
    *outer, last = name.split(".")
    node: ast.AST = ast.parse((ROOT / path).read_text("utf-8"))
    for each in outer if last else ():
        node = _named(node, each)
    found = dict(_docstrings(node)).get(last) if last else ast.get_docstring(node)  # type: ignore[arg-type]
    assert found, f"{source} has no docstring, but the glossary takes a definition from there"
    return found


def _named(node: ast.AST, name: str) -> ast.AST:
    return next(each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == name)


def _docstrings(node: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Of functions and classes in a module or class, and the strings after fields."""
    field = None
    for each in ast.iter_child_nodes(node):
        match each:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield each.name, ast.get_docstring(each)
            case ast.Expr(value=ast.Constant(value=str(text))) if field is not None:
                yield field, text
        field = each.target.id if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) else None


def page() -> str:
    rows = (f"| {term} | {definition_in(docstring_of(source), term)} |\n" for term, source in TERMS.items())
    return _HEAD + "".join(rows)
