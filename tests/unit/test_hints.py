"""What an operator can do: errors and reasons have a hint, from the failed connection to the status page."""

from __future__ import annotations

import errno
import socket
import ssl
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fencepost_proxy.cluster import hints
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.tls_failures import NotTls, of_broker
from fencepost_proxy.errors import FencepostError, Reason, StateError
from fencepost_proxy.observability import readiness
from fencepost_proxy.services.process_status import ProcessStatus
from fencepost_proxy.topics.closed import CLOSED, denied_message
from fencepost_proxy.topics.hints import RECREATE
from fencepost_proxy.topics.planning import Known
from fencepost_proxy.types import Address, NodeId

UPSTREAM = [Address("k", 9092)]


def _untrusted(code: int) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError()
    error.verify_code, error.verify_message = code, "stated"
    return error


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)"), hints.NOTHING_LISTENS),
        (OSError("Multiple exceptions: [Errno 111] Connect call failed"), hints.NOTHING_LISTENS),
        (OSError(errno.EHOSTUNREACH, "No route to host"), hints.NO_RESPONSE),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), hints.UNKNOWN_HOST),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), hints.NO_NAME_SERVER),
    ],
)
def test_failed_connect_has_a_hint(error: OSError, hint: str) -> None:
    assert hints.of_connect(error) == hint


@pytest.mark.parametrize(
    ("error", "kind", "hint"),
    [
        (_untrusted(20), "untrusted", hints.CA_FILE),
        (_untrusted(62), "hostname_mismatch", hints.HOSTNAME),
        (NotTls("no TLS"), "not_tls", hints.NO_TLS),
        (ConnectionResetError("{} closed"), "left", hints.PERHAPS_NO_TLS),
    ],
)
def test_failed_handshake_has_a_hint(error: OSError, kind: str, hint: str) -> None:
    found = of_broker(error)
    assert (found.kind, found.hint) == (kind, hint)


def test_expired_certificate_is_counted_as_untrusted() -> None:
    assert of_broker(_untrusted(10)) == ("untrusted", "its certificate is not valid now: stated", "")


def test_sidecars_have_hints_of_their_own() -> None:
    assert "broker_tls" in hints.FOR_SIDECAR[hints.PERHAPS_NO_TLS]
    assert "127.0.0.1" in hints.FOR_SIDECAR[hints.HOSTNAME]
    assert hints.NOTHING_LISTENS not in hints.FOR_SIDECAR


@pytest.mark.parametrize(
    ("why", "text", "hint"),
    [
        (None, "waiting for Kafka at k:9092", "Is Kafka up, and is upstream its address? fencepost check"),
        (Reason("late", ""), "waiting for Kafka at k:9092: late", "Is Kafka up, and is upstream its address? fence"),
        (Reason("no", hints.NOTHING_LISTENS), "waiting for Kafka at k:9092: no", "Nothing listens there: is Kafka"),
        (Reason("no", hints.TLS), "waiting for Kafka at k:9092: no", "Add the table [upstream_tls]. fencepost check"),
    ],
)
def test_proxy_without_kafka_shows_the_last_failure(why: Reason | None, text: str, hint: str) -> None:
    found = readiness.without_kafka(UPSTREAM, why)
    assert found.text == text
    assert found.hint.startswith(hint)


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (UpstreamUnavailable("s: Produce returned TOPIC_AUTHORIZATION_FAILED", error_code=29), "Run fencepost check"),
        (UpstreamUnavailable("k:9092: no answer to Fetch in time", hint=hints.SLOW), "Run fencepost check"),
        (StateError("s lost records (read up to offset 7, it starts at 9)", hint=RECREATE), "delete the state topic"),
    ],
)
def test_start_that_fails_has_the_hint_of_its_cause(error: FencepostError, hint: str) -> None:
    found = readiness.starting(readiness.unusable("s"), error)
    assert found.text == f"the state topic s cannot be used: {error}"
    assert hint in found.hint


def test_proxy_is_recognized_by_its_response() -> None:
    assert CLOSED in denied_message(cast(Known, SimpleNamespace(state_topic="s")))


def _state(failure: Reason | None = None, *, unacknowledged: bool = False, waits: Reason | None = None) -> Any:
    return SimpleNamespace(
        failure=failure, waits_because=waits, heartbeats=SimpleNamespace(unacknowledged=unacknowledged)
    )


def _sidecar(problem: Reason | None, *, queried: bool = True) -> Any:
    return SimpleNamespace(problem=problem, queried=queried)


BROKEN, LATE, ELSEWHERE = Reason("broken", "mend it"), Reason("late", "wait"), Reason("elsewhere", "move it")


def test_start_shows_what_it_waits_for() -> None:
    assert readiness.before_serving(None, None, None)[0].text == "reading the state topic"
    assert readiness.before_serving(None, None, _state(waits=LATE)) == [LATE]
    assert readiness.before_serving(None, BROKEN, _state(waits=LATE)) == [BROKEN]
    assert readiness.before_serving(_sidecar(ELSEWHERE), BROKEN, None) == [ELSEWHERE, BROKEN]
    assert readiness.before_serving(_sidecar(ELSEWHERE, queried=False), BROKEN, None) == [BROKEN]


def test_serving_proxy_is_ready_while_its_view_is_fresh() -> None:
    assert readiness.while_serving(_sidecar(None), _state(), fresh=True) == []
    assert readiness.while_serving(_sidecar(ELSEWHERE), _state(BROKEN), fresh=True) == [BROKEN]
    assert readiness.while_serving(_sidecar(ELSEWHERE), _state(), fresh=True) == [ELSEWHERE]
    (heartbeat,) = readiness.while_serving(None, _state(unacknowledged=True), fresh=True)
    assert "WRITE" in heartbeat.hint
    (stale,) = readiness.while_serving(None, None, fresh=False)
    assert stale.text == "the state topic was not read recently enough: appends are blocked"
    (explained,) = readiness.while_serving(None, _state(waits=LATE), fresh=False)
    assert (explained.text, explained.hint) == (f"{stale} (late)", "wait")


def test_broker_without_listener_makes_the_proxy_unready() -> None:
    """Not a broker that has left the cluster."""
    closed = Reason("cannot listen", hints.LISTENER)
    stand_in: Any = SimpleNamespace(
        ends=False,
        bootstrap=Address("127.0.0.1", 19092),
        listeners=SimpleNamespace(problems={NodeId(1): closed, NodeId(2): Reason("cannot listen, either", "")}),
        cluster=SimpleNamespace(
            kafka=SimpleNamespace(cluster_id="cluster", brokers={NodeId(0): None, NodeId(1): None}),
            membership=SimpleNamespace(state=_state(), fresh=lambda _: True),
            sidecar=None,
        ),
    )
    assert ProcessStatus.not_ready(stand_in) == (closed,)
