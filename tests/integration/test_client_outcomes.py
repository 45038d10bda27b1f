"""What each client's user observes of a refusal, and whether the same producer object can continue.

The table "After a refusal" in docs/other-clients.md must equal the outcomes that these tests observe. They also verify
its sections on pipelined appends and on appends with and without an expected offset.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.fault_proxy import FaultProxy, Hold
from tests.support.fixtures import proxy_fixture
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log, batch
from tests.support.senders import CLIENTS, Client, JavaProducers, Observed, create_topic, documented, free_proxy_port

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.no_cover,
    # kafka-python leaves the socket of a failed connection attempt to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

REFUSALS = "## After a refusal"
#: Outcomes after a proxy restart: two records without an expected offset, one with, one without.
MIXED = {
    "Java (default: idempotent)": ("yes", "yes", "yes", "yes"),
    "kafka-python (default: idempotent)": ("`OutOfOrderSequenceNumberError`", "yes", "yes", "yes"),
    "aiokafka, `enable_idempotence=True`": ("`OutOfOrderSequenceNumber`", "`OutOfOrderSequenceNumber`", "yes", "yes"),
    "confluent-kafka, `enable.idempotence=true`": ("`OUT_OF_ORDER_SEQUENCE_NUMBER`", *["`KafkaException`"] * 3),
    "`fencepost.confluent`": ("`OUT_OF_ORDER_SEQUENCE_NUMBER`", *["`KafkaException`"] * 3),
}
_CHECKED = """
[limits]
takeover_seconds = 0.5
[topics."outcome-*"]
"fencepost.check.expected.offsets" = "true"
"""
each_client = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name.replace("`", ""))


IDEMPOTENT = [client for client in CLIENTS if client.idempotent]


#: Tests kill and restart this proxy on the same ports.
mortal_proxy = proxy_fixture(config=_CHECKED, port=free_proxy_port)


@dataclass
class Front:
    """A proxy that clients reach only through two fault proxies: for its bootstrap address and for its broker."""

    bootstrap: str
    broker: FaultProxy
    proxy: ProxyProcess


@pytest.fixture(scope="module")
def front(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    # The fault proxies use the proxy's ports on another loopback address, which the proxy advertises.
    host, port = "127.0.0.2", free_proxy_port()
    config = f'advertised_host = "{host}"\n{_CHECKED}'
    with ExitStack() as stack:
        directory = tmp_path_factory.mktemp("front")
        proxy = stack.enter_context(ProxyProcess(kafka.bootstrap, directory, config=config, port=port))
        bootstrap, broker = (
            stack.enter_context(FaultProxy(("127.0.0.1", each), host=host, port=each)) for each in (port, port + 2)
        )
        yield Front(bootstrap.address, broker, proxy)


def _yes(*observed: Observed) -> str:
    return "yes" if all(each.error is None for each in observed) else "**no**"


@each_client
def test_refusal_matches_the_documented_client_outcome(
    client: Client,
    mortal_proxy: ProxyProcess,
    kafka: KafkaCluster,
    java: JavaProducers,
    unique_topic: Callable[..., str],
) -> None:
    topic = create_topic(mortal_proxy.bootstrap, unique_topic("outcome"), partitions=2)
    queried: list[tuple[int, str, Observed]] = []

    def send(expected: int | None, partition: int = 0, *, while_down: Callable[[], None] | None = None) -> Observed:
        value = f"{len(queried)}: {expected}"
        sending = producer.send(topic, value, partition=partition, expected=expected)
        if while_down is not None:
            while_down()
        observed = sending.get()
        print(f"    partition {partition} expected {expected!s:>4} -> {observed}")
        queried.append((partition, value, observed))
        return observed

    with closing(client.open(mortal_proxy.bootstrap, java)) as producer:
        assert send(0).offset == 0
        assert send(0, 1).offset == 0
        refusal = send(7)
        same, other = send(1), send(1, 1)
        unconditional = send(None), send(None, 1)
        send(7)
        mortal_proxy.kill()  # after the refusal; the next send starts while no proxy listens
        after_the_kill = [
            send(3, while_down=mortal_proxy.restart),
            send(None),
            send(3, 1),
            send(None, 1),
        ]
    assert refusal.error is not None
    if "OFFSET_MISMATCH" in refusal.shown:
        assert f"OFFSET_MISMATCH topic={topic} partition=0 expected=7 actual=1" in refusal.shown
    elif client.library == "confluent-kafka" and not client.ours:
        assert "msg.offset()=1 " in refusal.shown
    elif client.ours:
        assert refusal.shown.endswith("expected offset 7, but the log end offset is 1")
    rest = same, other, *unconditional, *after_the_kill
    assert all(each.error is None for each in rest) or all(each.error is not None for each in rest)
    row = {"client": client.name, "exception": _brief(refusal), "can send again": _yes(*rest)}
    print(f"| {' | '.join(row.values())} |")
    log = Log(kafka.bootstrap)
    for partition in (0, 1):
        # The log equals the reports: each success is at its offset, and refused records are absent.
        reported = {
            observed.offset: value.encode()
            for where, value, observed in queried
            if where == partition and observed.error is None
        }
        assert reported == dict(enumerate(log.values(topic, partition)))
    if client.ours:
        assert row == {"client": client.name, "exception": "`OffsetMismatchError`", "can send again": "yes"}
    else:
        assert row in list(documented(REFUSALS))
    gc.collect()


@pytest.mark.parametrize("client", IDEMPOTENT, ids=lambda client: client.name.replace("`", ""))
def test_mixed_expectations_across_proxy_kill_match_documentation(
    client: Client,
    mortal_proxy: ProxyProcess,
    kafka: KafkaCluster,
    java: JavaProducers,
    unique_topic: Callable[..., str],
) -> None:
    """Kafka receives an idempotent producer's sequences only in appends without an expected offset.

    The conditional appends leave sequence gaps, which the proxy corrects while it remembers the producer.
    """
    topic, log = create_topic(mortal_proxy.bootstrap, unique_topic("outcome-mixed")), Log(kafka.bootstrap)
    reported: list[Observed] = []

    def send(expected: int | None) -> Observed:
        reported.append(producer.send(topic, f"{len(reported)}", expected=expected).get())
        return reported[-1]

    with closing(client.open(mortal_proxy.bootstrap, java)) as producer:
        for expected in (None, 1, 2, None, 4):
            send(expected)
        assert reported == [Observed(offset) for offset in range(5)]
        mortal_proxy.kill()
        mortal_proxy.restart()
        outcomes = (
            _short(send(None)),
            _short(send(None)),
            _short(send(log.end(topic))),
            _short(send(None)),
        )
    print(f"    {client.name}: {outcomes}")
    appended = {observed.offset: b"%d" % n for n, observed in enumerate(reported) if observed.error is None}
    assert appended == dict(enumerate(log.values(topic)))
    assert outcomes == MIXED[client.name]
    gc.collect()


def _short(observed: Observed) -> str:
    return "yes" if observed.error is None else f"`{observed.error}`"


@each_client
def test_no_pipelined_record_is_appended_after_a_gap(
    client: Client, front: Front, kafka: KafkaCluster, java: JavaProducers, unique_topic: Callable[..., str]
) -> None:
    """A rival takes the first record's offset. The others expect offsets that would match without the first."""
    topic = create_topic(front.proxy.bootstrap, unique_topic("outcome-chain"))
    with (
        Connection(front.proxy.bootstrap) as raw,
        closing(client.open(front.bootstrap, java, **client.one_record_a_batch())) as producer,
    ):
        for offset in range(3):
            assert producer.send(topic, "warm", expected=offset).get().offset == offset
        assert raw.append(topic, batch(b"rival", expected=3)).error_code == 0
        # Clients that pipeline get no response before all three requests are sent.
        with front.broker.add(Hold("request", b"pipelined ", count=3 if client.pipelines else 1)):
            sent = [producer.send(topic, f"pipelined {i}", expected=3 + i) for i in range(3)]
            first, *others = [each.get() for each in sent]
        then = producer.send(topic, "next", expected=Log(kafka.bootstrap).end(topic)).get()
    assert first.error is not None
    appended_batch = [value.decode() for value in Log(kafka.bootstrap).values(topic)[4:] if value is not None]
    print(f"    {client.name}: {_brief(first)}, then {[*map(_brief, others)]}, then {then}")
    assert (then.error is None) == client.goes_on
    appended = [f"pipelined {i}" for i, each in enumerate(others, 1) if each.error is None]
    assert appended_batch == appended + (["next"] if then.error is None else [])
    if client.pipelines or not client.goes_on:
        assert not appended
        assert {each.error for each in others} == {first.error}
    else:
        assert [each.offset for each in others] == [4, 5]
    if client.pipelines and "OFFSET_MISMATCH" in first.shown:
        assert all("PREDECESSOR_FAILED" in each.shown for each in others)


def _brief(observed: Observed) -> str:
    if observed.error is None:
        return f"appended at {observed.offset}"
    word = next((word for word in ("PREDECESSOR_FAILED", "OFFSET_MISMATCH") if word in observed.shown), None)
    return f"`{observed.error}: {word} …`" if word else f"`{observed.error}`"


def test_the_table_has_one_row_for_each_client() -> None:
    assert [row["client"] for row in documented(REFUSALS)] == [client.name for client in CLIENTS if not client.ours]
    assert [*MIXED] == [client.name for client in IDEMPOTENT]
