"""Every reason why a process is not ready has an advice. The reasons are read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import fencepost_proxy
from fencepost_proxy.observability import advice
from fencepost_proxy.topics.closed import denied_message
from fencepost_proxy.topics.planning import Known

ROOT = Path(fencepost_proxy.__file__).parent
#: Where `ProxyApp._not_ready` and the supervisor take reasons from, each by the place that says them.
SOURCES = {"failure", "problem", "waits_because", "_waits_because"}


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def texts(node: ast.AST) -> Iterator[str]:
    """The possible values, with `…` for each inserted value; nothing for None and for other names."""
    match node:
        case ast.Constant(value=str() as text):
            yield text
        case ast.JoinedStr(values=values):
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in values)
        case ast.IfExp(body=body, orelse=other):
            yield from texts(body)
            yield from texts(other)
        case ast.BinOp(left=left):
            yield from texts(left)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            for each in elements:
                yield from texts(each)
        case ast.BoolOp(values=values):
            for each in values:
                yield from texts(each)


def function(file: str, name: str) -> ast.AST:
    for each in ast.walk(tree(file)):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == name:
            return each
    raise AssertionError(f"{file} has no {name}")


def returned(file: str, name: str) -> Iterator[str]:
    """And the values of local names that the function returns."""
    named: dict[str, ast.expr] = {}
    for each in ast.walk(function(file, name)):
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            named[each.targets[0].id] = each.value
    yield from given_back(file, name)
    for each in ast.walk(function(file, name)):
        if isinstance(each, ast.Return) and each.value is not None:
            for inner in ast.walk(each.value):
                if isinstance(inner, ast.Name) and inner.id in named:
                    yield from texts(named[inner.id])


def given_back(file: str, name: str) -> Iterator[str]:
    for each in ast.walk(function(file, name)):
        if isinstance(each, ast.Return) and each.value is not None:
            yield from texts(each.value)


def set_as(file: str, attribute: str) -> Iterator[str]:
    for each in ast.walk(tree(file)):
        match each:
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=value) if name == attribute:
                yield from texts(value)
            case ast.AnnAssign(target=ast.Attribute(attr=name), value=ast.AST() as value) if name == attribute:
                yield from texts(value)


def given_to(file: str, name: str, keyword: str | None = None) -> Iterator[str]:
    """First arguments of calls of `name`, or those named `keyword`."""
    for each in ast.walk(tree(file)):
        if not isinstance(each, ast.Call):
            continue
        called = each.func.attr if isinstance(each.func, ast.Attribute) else getattr(each.func, "id", "")
        if called != name:
            continue
        if keyword is None:
            yield from texts(each.args[0]) if each.args else ()
        else:
            for argument in each.keywords:
                yield from texts(argument.value) if argument.arg == keyword else ()


def reasons() -> set[str]:
    sources = [str(each.relative_to(ROOT)) for each in ROOT.rglob("*.py")]
    own = {*returned("server.py", "_not_ready"), *given_back("services/sidecar.py", "_validate")}
    own |= {*set_as("services/sidecar.py", "problem"), *set_as("cluster/state_topic.py", "waits_because")}
    own |= {*given_to("cluster/state_topic.py", "_fail"), *returned("workers/supervisor.py", "_snapshot")}
    own |= {*given_to("workers/supervisor.py", "replace", "not_ready")}
    stated = {text for file in sources for text in given_to(file, "StateError")}
    whats = {text for each in _until_kafka_can() for text in texts(each)}
    assert len(whats) == 2, whats
    waiting = {f"{what}: …" for what in whats}
    assert len(stated) > 8, stated
    # Of a state topic that cannot be relied on: a running process reports it unchanged, a starting one adds a prefix.
    at_a_start = {f"the state topic __fencepost_state cannot be used: {each}" for each in stated}
    return {each for each in own | stated | waiting | at_a_start if any(map(str.isalpha, each))}


def _until_kafka_can() -> Iterator[ast.AST]:
    for each in ast.walk(tree("server.py")):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "_until_kafka_can":
            yield each.args[1]


REASONS = sorted(reasons())
#: A proxy's answer to any client that requests the state topic, another proxy too.
BY_A_PROXY = denied_message(cast(Known, SimpleNamespace(state_topic="s")))


@pytest.mark.parametrize("reason", REASONS)
def test_every_not_ready_reason_has_advice(reason: str) -> None:
    assert advice.of_not_ready(reason) != advice.NOT_READY_ELSE


def test_what_is_unknown_leads_to_the_log() -> None:
    assert advice.of_not_ready("a reason of tomorrow") == advice.NOT_READY_ELSE
    assert "The log gives the reason" in advice.NOT_READY_ELSE


def test_reasons_cover_every_source_of_unreadiness() -> None:
    """A missing source would remove its reasons from the test above."""
    queried = {
        each.attr
        for each in ast.walk(function("server.py", "_not_ready"))
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Attribute | ast.Name)
    }
    states = {"_to_end", "_control", "cluster_id", "config", "upstream", "_bootstrap", "_state", "_sidecar", "queried"}
    states |= {"heartbeats"}
    assert queried - states - {"unacknowledged", "fresh"} == SOURCES
    for begins in (
        "waiting for Kafka",
        "it is shutting down",
        "reading the state topic",
        "the state topic was not read",
        "the heartbeat of this process",
        "the primary worker",
        "cannot read the broker's advertised",
        "following it crashed",
        "leader of the state topic",
    ):
        assert any(each.startswith(begins) for each in REASONS), begins
    assert any("does not advertise this sidecar" in each for each in REASONS)


@pytest.mark.parametrize(
    ("reason", "helps"),
    [
        ("waiting for Kafka at k:9092: k:9092: cannot connect: Connect call failed", "Nothing listens there"),
        ("waiting for Kafka at k:9092: k:9092: certificate is not trusted (upstream_tls.ca_file)", "as PEM"),
        ("waiting for Kafka at k:9092", "Is Kafka up, and is upstream its address? fencepost check"),
        ("the state topic s cannot be used: s lost records (read up to offset 7, it starts at 9)", "delete the state"),
        ("the state topic s cannot be used: s: Produce answered error 29", "Run fencepost check"),
        (
            f"the state topic s cannot be used: CreateTopics answered error 29 ({BY_A_PROXY})",
            "set it to Kafka's own brokers",
        ),
        ("s was deleted and created again: what it held is gone", "restart every proxy"),
        ("it is shutting down", "the proxy was stopped"),
        ("the state topic was not read recently enough: appends are blocked", "the state topic have a leader"),
        ("the heartbeat of this process could not be stored yet: appends are blocked", "WRITE"),
        ("the primary worker is starting", "Wait a moment"),
    ],
)
def test_the_advice_is_about_what_went_wrong(reason: str, helps: str) -> None:
    assert helps in advice.of_not_ready(reason)


@pytest.mark.parametrize(
    ("stated", "helps"),
    [
        ("it closed the connection during the TLS handshake: EOF; does it speak TLS (upstream_tls)?", "broker_tls"),
        ("its certificate is for another name: IP (upstream_tls.check_hostname)", "127.0.0.1"),
        ("cannot connect: Connect call failed", "nothing listens there"),
    ],
)
def test_sidecar_advice_names_its_brokers_listener(stated: str, helps: str) -> None:
    assert helps in advice.of_connection(stated, of_sidecar=True)


def test_warnings_have_an_advice() -> None:
    stated = {*returned("workers/supervisor.py", "_snapshot"), *generated("workers/supervisor.py", "_snapshot")}
    stated = {each for each in stated if each.startswith("worker")} | {*generated("services/expansions.py", "warnings")}
    assert len(stated) == 2, stated
    for each in stated:
        assert advice.of_warning(each), each


def generated(file: str, name: str) -> Iterator[str]:
    for each in ast.walk(function(file, name)):
        if isinstance(each, ast.GeneratorExp):
            yield from texts(each.elt)
