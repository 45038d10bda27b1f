"""The status page: its first lines, escaping, accessibility and size."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import pytest

from fencepost_proxy.cluster.heartbeats import Instance
from fencepost_proxy.cluster.metadata import NO_NODE, Leader, PartitionInfo, TopicInfo
from fencepost_proxy.config import Limits
from fencepost_proxy.errors import Reason
from fencepost_proxy.observability.diagnosis import diagnose, of_process, state_of
from fencepost_proxy.observability.lists import Lists, Refusals
from fencepost_proxy.observability.status import (
    AbortOnlyStatus,
    BrokerStatus,
    CheckedTopicStatus,
    ClientStatus,
    ExpansionStatus,
    GatedStatus,
    Listed,
    PageRequest,
    PartitionStatus,
    Problem,
    RefusalStatus,
    SoftwareStatus,
    StatusSnapshot,
    ViolationStatus,
    What,
)
from fencepost_proxy.observability.status_server import json_value, list_json, status_json
from fencepost_proxy.sequencer.events import SequencerLimits
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.services.process_status import ProcessStatus
from fencepost_proxy.session.frames.messages import Count
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.transactions.watched import (
    WHY,
    FindLeaders,
    HangingTransaction,
    LaggingPartition,
    Leaders,
    OpenTransaction,
)
from fencepost_proxy.transactions.watching import Pace, TransactionMonitor
from fencepost_proxy.types import Address, LeaderEpoch, NodeId, TopicPartition
from fencepost_proxy.wire.api_versions import Software, introduced
from fencepost_proxy.wire.apis import API_VERSIONS
from fencepost_proxy.wire.control import encode_request_frame
from fencepost_proxy.wire.schema import Message
from tests.support.page import FILES, Case, Rendered, needs_node, rendered
from tests.support.status import AGED, REQUIRED

NOW = 1_800_000_000.0
NOW_MS = int(NOW * 1000)
#: What a peer may call itself, a topic, a group.
EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>&amp;\x1b[2J\N{RIGHT-TO-LEFT OVERRIDE}"
HEALTHY = StatusSnapshot(version="1", uptime_seconds=1.0, cluster_id="c", bootstrap=Address("proxy", 19092))
NOTHING_OPEN = TransactionMonitor(Pace(1.0)).report(0.0, 0.0, 0)
EMPTY: Mapping[What, Listed] = dict.fromkeys(
    ("topics", "partitions", "refusals", "software", "clients", "expansions", "groups"), Listed()
)


def overview(snapshot: StatusSnapshot = HEALTHY, lists: Mapping[What, Listed] = EMPTY) -> Case:
    return Case("/", json_value(status_json(snapshot, lists, NOW)))


def list_page(what: What, listed: Listed, query: str = "", **requested: Any) -> Case:
    return Case(f"/{what}{query}", json_value(list_json(f"/{what}.json", PageRequest(what, **requested), listed)))


def shown(case: Case) -> Rendered:
    (found,) = rendered([case])
    return found


# --- is it well? ------------------------------------------------------------------------------------------------------


@needs_node
def test_healthy_state_shows_no_problems() -> None:
    found = shown(overview())
    assert found.title == "✓ Healthy – Fencepost"
    assert found.read.sections["state"] == "✓ HealthyServing; no problems found."
    assert "problems" not in found.read.sections
    assert found.asked == ["/status.json?limit=20"]


@needs_node
def test_unready_page_shows_reason_and_action() -> None:
    found = shown(overview(replace(HEALTHY, not_ready=(Reason("nothing is read", "Wait a moment."),))))
    assert "Not ready" in found.title
    assert ("div", {"class": "is-bad"}) in found.read.tags
    assert "Not ready: nothing is read" in found.read.sections["problems"]
    assert "Wait a moment." in found.read.sections["problems"]


@needs_node
@pytest.mark.parametrize(("answer", "why"), [(None, "fetch failed"), ("boom", "HTTP status 500: boom")])
def test_page_without_response_says_so(answer: object, why: str) -> None:
    found = shown(Case("/topics", answer))
    assert found.title == "No response – Fencepost"
    assert "No response from the proxy since" in found.read.text
    assert why in found.read.text
    assert ("p", {"id": "lost", "role": "alert"}) in found.read.tags


@needs_node
def test_page_shows_all_figures() -> None:
    snapshot = replace(
        HEALTHY, executor="native 1", uptime_seconds=3_700.0, connections=12_345, connections_max=20_000,
        buffered_bytes_max=256 * 1024**2, certificate_days={"listener": 41.3}, bytes_to_kafka=5 * 1024**3,
        added_seconds=(4e-5, 0.0025), state_lease_seconds=4.26, refusals={"offset_mismatch": 1_000}, violations=2,
    )  # fmt: skip
    lists = dict(EMPTY) | {"topics": Listed(1_234, ())}
    assert shown(overview(snapshot, lists)).read.sections["figures"] == (
        "clients connect to proxy:19092 · cluster c · up for 1 h 1 min · fencepost 1 (native 1)"
        "connections12,345 of 20,000requests in flight0to Kafka5.0 GiBto clients0 Bbuffered in memory0 B of 256.0 MiB"
        "time added (median, p99)< 40 µs · < 2.5 msconfig lease left4.3 slistener certificate expires in41 d 7 h"
    ).replace("config lease", "checked topics1,234refusals1,000offset violations2config lease")


HISTORY = {
    "seconds_ago": (10.0, 5.0, 0.0), "requests": (10.0, 40.0, 12.5), "to_kafka": (0.0, 2048.0, 1024.0),
    "to_clients": (0.0, 0.0, 0.0), "refusals": (0.0, 12.0, 0.0), "added_p99": (None, 0.0001, 0.0025),
    "loop_late": (0.005, 0.25, None), "cpu": (0.1, 0.2, 0.15), "cpu_wait": (0.0, 0.0, 0.5),
}  # fmt: skip


@needs_node
def test_page_draws_the_last_fifteen_minutes() -> None:
    read = shown(overview(replace(HEALTHY, history=HISTORY))).read
    assert read.sections["history"] == (
        "Last 15 minutesrequests/s12.5 max 40to Kafka, per s1.0 KiB max 2.0 KiBto clients, per s0 B max 0 B"
        "refusals/min0 max 12time added, p99< 2.5 ms max < 2.5 msevent loop delay– max < 250 msCPU used15 % max 20 %"
        "waits for a CPU50 % max 50 %"
    )
    requests, *_, late, _, _ = [attributes["points"] for tag, attributes in read.tags if tag == "polyline"]
    assert requests == "178.0,24.0 179.0,0.0 180.0,22.0"
    assert late == "178.0,31.4 179.0,0.0", "an unknown value has no point"
    assert next(attributes["aria-label"] for tag, attributes in read.tags if tag == "svg") == (
        "requests/s in the last 15 minutes: now 12.5, at most 40"
    )


@needs_node
def test_page_without_history_draws_nothing() -> None:
    assert "history" not in shown(overview()).read.sections


@needs_node
def test_page_lists_the_proxies_of_the_cluster() -> None:
    instances = (
        Instance(3, "edge-1", "1.2", "0.0.0.0:8080", 0.0, live=True, this=True),
        Instance(4, EVIL, None, None, 12.0, live=True),
        Instance(0, "edge-3", "1.1", "10.0.0.3:8080", 95.0, live=False),
    )
    read = shown(overview(replace(HEALTHY, instances=instances))).read
    text = read.sections["instances"]
    assert text.startswith("Proxies of the cluster")
    assert "edge-131.20.0.0.0:8080this process" in text
    assert text.endswith("edge-3–1.110.0.0.3:8080none for 1 min: dead or cut off")
    assert not [tag for tag, _ in read.tags if tag == "img"]


@needs_node
def test_transactions_have_a_page() -> None:
    case = overview(replace(HEALTHY, transactions=replace(NOTHING_OPEN, open_transactions=3, oldest_seconds=90.0)))
    found = shown(replace(case, path="/transactions"))
    assert found.asked == ["/status.json?limit=20"]
    assert found.read.sections["transactions"].startswith("Transactions of the clusteropen3oldest1 min")
    assert "state" not in found.read.sections
    assert "watch_transactions is false" in shown(replace(overview(), path="/transactions")).read.text


def problems_of(**process: Any) -> list[Problem]:
    broker = BrokerStatus(NodeId(1), Address("kafka-1", 9092), Address("proxy", 19094))
    given: dict[str, Any] = {
        "connections": 3,
        "buffered_bytes": 0,
        "brokers": (broker,),
        "certificate_ends": [("listen_tls", NOW + 90 * 86_400)],
        **process,
    }
    return list(of_process(Limits(address_connections_max=100), now=NOW, **given))


def test_healthy_process_reports_no_problems() -> None:
    assert not problems_of(most_from=("10.0.0.7", 89))
    # Where one address may have all connections, only the total is reported.
    assert not list(of_process(Limits(), connections=3, buffered_bytes=0, brokers=(), certificate_ends=(), now=NOW))


@pytest.mark.parametrize(
    ("process", "bad", "what"),
    [
        ({"connections": 1_800}, False, "1,800 of 2,000 client connections"),
        ({"connections": 2_000}, True, "2,000 of 2,000 client connections"),
        ({"most_from": ("10.0.0.7", 90)}, False, "90 of 100 client connections from one address, 10.0.0.7"),
        ({"most_from": ("fe80::1", 100)}, True, "100 of 100 client connections from one address, fe80::1"),
        ({"buffered_bytes": 268_435_456}, True, "bytes for buffered requests"),
        ({"certificate_ends": [("listen_tls", NOW + 5 * 86_400)]}, False, "certificate of listen_tls expires in 5 d"),
        ({"certificate_ends": [("listen_tls", NOW - 1)]}, True, "certificate of listen_tls has expired"),
        (
            {"brokers": (BrokerStatus(NodeId(2), Address("kafka-2", 9092), Address("p", 1), 0, "refused"),)},
            True,
            "Broker 2 (kafka-2:9092) cannot be reached: refused",
        ),
        ({"refused": {"Broker 2 (k:9092)": 14}}, True, "Broker 2 (k:9092) closes new connections before its first"),
        ({"cpu_wait": 0.15}, False, "gets no CPU: its event loop waited for one during 15% of the last minute"),
        ({"cpu_wait": 0.6}, True, "gets no CPU: its event loop waited for one during 60% of the last minute"),
        (
            {"led_by": {NO_NODE: [TopicPartition("t", number) for number in range(7)]}},
            True,
            "Partitions without a leader: t-0, t-1, t-2, t-3, t-4 and 2 more",
        ),
    ],
)
def test_what_a_process_finds_wrong_has_an_advice(process: dict[str, Any], bad: bool, what: str) -> None:
    (found,) = problems_of(**process)
    assert (found.bad, what in found.what) == (bad, True), found
    assert found.do


DOWN = BrokerStatus(NodeId(2), Address("kafka-2", 9092), Address("p", 1), 0, "refused")
ORDERS = [TopicPartition("orders", 3)]


@pytest.mark.parametrize(
    ("led_by", "clients"),
    [
        ({NodeId(2): ORDERS}, "Clients wait for orders-3. "),
        ({NodeId(2): ()}, "Its partitions have other leaders, or none. "),
        ({NO_NODE: ORDERS}, "Its partitions have other leaders, or none. "),
    ],
)
def test_unreachable_broker_says_which_partitions_wait(
    led_by: Mapping[NodeId, list[TopicPartition]], clients: str
) -> None:
    *leaderless, broker = problems_of(brokers=(DOWN,), led_by=led_by)
    assert broker.do.startswith(clients)
    assert ["orders-3" in each.what for each in leaderless] == [True] * (NO_NODE in led_by)


def test_partitions_are_grouped_by_what_an_operator_must_know() -> None:
    """Checked topics by their present metadata, other topics by an earlier sweep."""

    def partition(leader: int) -> PartitionInfo:
        return PartitionInfo(Leader(NodeId(leader), LeaderEpoch(0)), (NodeId(1),), (NodeId(1),))

    orders = TopicInfo("orders", UUID(int=1), {0: partition(1), 1: partition(2), 2: partition(-1)})
    metadata = SimpleNamespace(known=SimpleNamespace(topics={"orders": orders}))
    process: Any = SimpleNamespace(cluster=SimpleNamespace(kafka=SimpleNamespace(metadata=metadata)))
    reachable = replace(DOWN, node_id=NodeId(1), problem=None)

    led_by = ProcessStatus._led_by(process, (reachable, DOWN), (TopicPartition("orders", 0), TopicPartition("logs", 7)))

    assert led_by == {
        NodeId(2): [TopicPartition("orders", 1)],
        NO_NODE: [TopicPartition("logs", 7), TopicPartition("orders", 2)],
    }


def test_sweep_reports_partitions_without_a_leader() -> None:
    monitor = TransactionMonitor(Pace(1.0))
    leaders = {NodeId(-1): ORDERS, NodeId(1): [TopicPartition("orders", 4)]}
    monitor.next([NodeId(1)], 0.0)
    monitor.answered(FindLeaders(), Leaders(leaders), 1.0)
    assert monitor.report(1.0, 0.0, 0).leaderless == tuple(ORDERS)


def old_transaction(age_seconds: float, timeout_ms: int, *, stuck: str | None = None) -> tuple[Problem, ...]:
    one = OpenTransaction("nightly", 7, 0, "Ongoing", 1, age_seconds, timeout_ms, 1, ("views-0", "clicks-1"), stuck)
    lagging = (LaggingPartition("clicks", 1, 5, 9, 4, age_seconds),)
    report = replace(NOTHING_OPEN, open_transactions=1, open=(one,), lagging=lagging)
    return diagnose(replace(HEALTHY, transactions=report), [], [], NOW)


def test_old_transaction_is_a_warning_before_its_timeout() -> None:
    (found,) = old_transaction(31.0, 60_000)
    assert (found.bad, found.page) == (False, "/transactions")
    assert found.what == (
        "Transaction nightly has been open for 31 s and holds back read_committed consumers of clicks-1"
    )
    assert "Kafka aborts it after 60 s" in found.do
    assert not old_transaction(29.0, 60_000)
    assert not old_transaction(20.0, 10_000), "the shortest timeouts"
    assert not old_transaction(299.0, 3_600_000)
    assert old_transaction(301.0, 3_600_000)
    assert not old_transaction(301.0, 3_600_000, stuck="overdue"), "reported as hanging"


def stops_appends(
    *, age_seconds: float = 12.0, refused_seconds: float = 3.0, reason: str = "transaction_open", partition: int = 1
) -> tuple[Problem, ...]:
    one = OpenTransaction("a; rm -rf /", 7, 0, "Ongoing", 1, age_seconds, 900_000, 1, ("clicks-1",), None)
    refused = RefusalStatus("clicks", partition, reason, at_ms=int((NOW - refused_seconds) * 1000))
    report = replace(NOTHING_OPEN, open_transactions=1, open=(one,))
    lists = {**EMPTY, "refusals": Listed(1, (refused,))}
    problems: Any = status_json(replace(HEALTHY, transactions=report), lists, NOW)["problems"]
    return tuple(problems)


def test_transaction_that_stops_appends_is_named_with_the_command() -> None:
    (found,) = stops_appends()
    assert found.bad
    assert found.what == ("Transaction a; rm -rf / has been open for 12 s and stops conditional appends to clicks-1")
    assert "Kafka aborts it after 900 s" in found.do
    assert "fencepost transactions abort 'a; rm -rf /' --bootstrap-server " in found.do
    assert not stops_appends(age_seconds=9.0)
    assert not stops_appends(refused_seconds=31.0)
    assert not stops_appends(reason="try_again")
    assert not stops_appends(partition=2)


PENDING = ExpansionStatus("clicks", 2, 4, "pending", NOW_MS - 40_000, "barriers", "process(es) 7")
LAGS = GatedStatus("reports; rm -rf /", "clicks", 2, "behind", 12, ("partition 0: committed 5, threshold 9",), 900.0)


def test_only_overlong_waits_are_reported() -> None:
    young = diagnose(HEALTHY, [replace(PENDING, at_ms=NOW_MS - 2_000)], [replace(LAGS, seconds=60.0)], NOW)
    assert not young

    blocked, waits = diagnose(HEALTHY, [PENDING], [LAGS, replace(LAGS, partition=3)], NOW)
    assert blocked.bad
    assert "clicks blocked for 40 s by its expansion to 4 partitions" in blocked.what
    assert "The expansion waits: process(es) 7." in blocked.do
    assert not waits.bad
    # What is pasted into a shell does only what it says.
    assert "fencepost expansions open clicks 'reports; rm -rf /' --status " in waits.do


def test_transaction_delaying_an_expansion_is_named_if_known() -> None:
    def observed(*partitions: str) -> StatusSnapshot:
        one = OpenTransaction("nightly", 7, 0, "Ongoing", 1, 40.0, 60_000, 1, partitions, None)
        return replace(HEALTHY, transactions=replace(NOTHING_OPEN, open_transactions=1, open=(one,)))

    (named,) = diagnose(observed("views-0", "clicks-1"), [PENDING], [], NOW)
    assert "Open on that topic: transaction nightly." in named.do
    (unnamed,) = diagnose(observed("clicks-of-others-1"), [PENDING], [], NOW)
    assert "nightly" not in unnamed.do


def test_violation_is_bad_for_an_hour_then_warning() -> None:
    last = ViolationStatus("orders", 3, 57, NOW_MS - 60_000)
    (fresh,) = diagnose(replace(HEALTHY, violations=2, last_violation=last), [], [], NOW)
    (old,) = diagnose(replace(HEALTHY, violations=2, last_violation=last), [], [], NOW + 7_200)
    assert (fresh.bad, old.bad) == (True, False)
    assert "the last one at orders-3" in fresh.what
    (once,) = diagnose(replace(HEALTHY, violations=1), [], [], NOW)
    assert once.what.endswith(": 1")


def test_the_worst_comes_first_and_decides() -> None:
    snapshot = replace(
        HEALTHY,
        warnings=(Reason("check it", "now"),),
        problems=(Problem(False, "mild", ""), Problem(True, "bad", "act")),
    )
    problems = diagnose(snapshot, [], [], NOW)
    assert [each.what for each in problems] == ["bad", "mild", "check it"]
    assert state_of(snapshot, problems) == "degraded"
    assert state_of(snapshot, problems[1:]) == "warning"
    assert state_of(snapshot, ()) == "healthy"
    assert state_of(replace(snapshot, not_ready=(Reason("x", "y"),)), ()) == "not_ready"


# --- what is shown is only text ---------------------------------------------------------------------------------------

REFUSAL = RefusalStatus(EVIL, 0, EVIL, NOW_MS - 1_000, 3, 57, EVIL, Address("10.0.0.7", 51_000))
ROWS: Mapping[What, tuple[Any, ...]] = {
    "topics": (CheckedTopicStatus(EVIL, REQUIRED, 6, 1, last_refusal=REFUSAL, refusals=1),),
    "partitions": (PartitionStatus(EVIL, 0, None, EVIL, 57, 0, 1, 1, REFUSAL),),
    "refusals": (REFUSAL,),
    "software": (SoftwareStatus(EVIL, EVIL, 3), SoftwareStatus(None, None, 1)),
    "clients": (ClientStatus(EVIL, Address(EVIL, 1), EVIL, EVIL, NodeId(1), 5.0, 1.0),),
    "expansions": (
        ExpansionStatus(EVIL, 1, 2, "pending", NOW_MS, EVIL, EVIL),
        ExpansionStatus(EVIL, 1, 2, "unordered", NOW_MS, thresholds=(1,) * 20),
    ),
    "groups": (GatedStatus(EVIL, EVIL, 1, EVIL, 3, (EVIL,) * 9, 900.0),),
}


@cache
def every_page() -> list[Rendered]:
    evil = replace(
        HEALTHY,
        version=EVIL,
        cluster_id=EVIL,
        not_ready=(Reason(EVIL, EVIL),),
        warnings=(Reason(EVIL, EVIL),),
        problems=(Problem(True, EVIL, EVIL),),
        refusals={EVIL: 3},
        brokers=(BrokerStatus(NodeId(1), Address(EVIL, 1), Address(EVIL, 2), 1, EVIL),),
        abort_only_transactions=(AbortOnlyStatus(EVIL, 1, 2, EVIL, 3.0),),
        transactions=replace(
            NOTHING_OPEN,
            hanging_by_reason={"overdue": 1},
            problem=EVIL,
            open=(OpenTransaction(EVIL, 7, 0, EVIL, 1, 40.0, 60_000, 1, (EVIL,), "overdue"),),
            hanging=(HangingTransaction(EVIL, 0, 5, 7, 0, 0, NOW_MS, 3.0, EVIL, "overdue"),),
            lagging=(LaggingPartition(EVIL, 0, 5, 9, 4, 60.0),),
        ),
    )
    cases = [overview(evil, {what: Listed(len(rows), rows) for what, rows in ROWS.items()})]
    for what, rows in ROWS.items():
        if what != "software":  # has no page
            query = "?" + urlencode({"search": EVIL, "topic": EVIL, "offset": 1, "limit": 1})
            cases.append(list_page(what, Listed(9, rows), query, search=EVIL, topic=EVIL, offset=1, limit=1))
    return rendered(cases)


@needs_node
def test_whatever_peers_call_themselves_is_text() -> None:
    for each in every_page():
        read = each.read
        scripts = [attributes for tag, attributes in read.tags if tag == "script"]
        assert scripts == [{"type": "module", "src": "/page.js"}], f"{each.title}: only the page's own"
        assert not [tag for tag, _ in read.tags if tag == "img"]
        assert not [name for _, attributes in read.tags for name in attributes if name.startswith("on")]
        values = [value or "" for _, attributes in read.tags for name, value in attributes.items() if name != "value"]
        assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", "".join((read.text, *values)))
        for _, attributes in read.tags:
            target = attributes.get("href") or attributes.get("action") or "/"
            assert target[0] in "/#", f"{target} leads away"
        assert "<script>alert('x')</script>" in read.text, "it is there, to be read"


def test_script_makes_no_markup_from_text() -> None:
    script = (FILES / "page.js").read_text("utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|\.style\b", script)


@needs_node
def test_hanging_transactions_are_explained() -> None:
    assert WHY["overdue"] in every_page()[0].read.sections["transactions"]


@needs_node
def test_long_names_do_not_make_the_page_long() -> None:
    long = "x" * 32_767
    clients = tuple(ClientStatus(long, Address("10.0.0.7", n), long, long, None, 1.0, 1.0) for n in range(50))
    assert len(shown(list_page("clients", Listed(50, clients))).html) < 100_000


@needs_node
def test_list_page_searches_and_links_to_its_neighbours() -> None:
    rows = tuple(CheckedTopicStatus(f"t{number}", REQUIRED, 1) for number in range(50))
    found = shown(list_page("topics", Listed(1_234, rows), "?search=t&offset=50", search="t", offset=50))
    assert found.asked == ["/topics.json?search=t&offset=50"]
    assert "51 to 100 of 1,234" in found.read.text
    links = [attributes["href"] for tag, attributes in found.read.tags if tag == "a"]
    assert {"/topics?search=t&offset=0&limit=50", "/topics?search=t&offset=100&limit=50"} <= set(links)
    assert found.asked[0] in links, "the same as JSON"
    assert ("a", {"href": "/topics", "aria-current": "page"}) in found.read.tags
    (field,) = [attributes for tag, attributes in found.read.tags if tag == "input"]
    assert field["value"] == "t"


@needs_node
def test_list_page_without_rows_says_none() -> None:
    assert shown(list_page("groups", Listed())).read.sections["list"] == "Consumer groups with gated partitionsNone."


@needs_node
def test_overview_links_to_all_rows() -> None:
    rows = tuple(
        CheckedTopicStatus(f"t{number}", REQUIRED | AGED, 6, log_end_offsets=9, ends_known=2) for number in range(20)
    )
    found = shown(overview(lists=dict(EMPTY) | {"topics": Listed(1_234, rows)}))
    assert "all 1,234" in found.read.sections["topics"]
    assert "t19" in found.read.sections["topics"]
    assert "9 in 2" in found.read.sections["topics"]
    assert "check.expected.offsets=required, max.record.age.ms=60000" in found.read.sections["topics"]


@needs_node
def test_times_are_relative_to_the_proxys_clock() -> None:
    def when(seconds: int) -> str:
        refusal = replace(REFUSAL, topic="t", at_ms=NOW_MS - seconds * 1000)
        return shown(list_page("refusals", Listed(1, (refusal,)))).read.sections["list"]

    assert "2 min ago" in when(150)
    assert "2027-01-15 05:00:00 UTC" in when(10_800)


# --- for every reader -------------------------------------------------------------------------------------------------


@needs_node
def test_headings_tables_and_fields_are_named() -> None:
    for each in every_page():
        tags = each.read.tags
        names = [tag for tag, _ in tags]
        assert names.count("h1") == 1
        assert names.index("h1") < names.index("h2")
        assert ("html", {"lang": "en"}) in tags
        for tag, attributes in tags:
            if tag == "table":
                assert attributes["aria-label"]
            if tag == "th":
                assert attributes["scope"] in ("col", "row")
            if tag == "td":
                assert attributes["data-label"], "on a phone there is no head of the table"
            if tag == "input" and attributes.get("type") != "hidden":
                assert any(name == "label" and of.get("for") == attributes["id"] for name, of in tags)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_has_contrast(theme: str) -> None:
    """WCAG 2.2, AA: 4.5 to 1."""
    style = (FILES / "page.css").read_text("utf-8")
    light, _, dark = style.partition("@media (prefers-color-scheme: dark)")
    colours = dict(re.findall(r"--(\w+): (#\w{6})", light if theme == "light" else dark.partition("}")[0]))
    assert colours.keys() >= {"bg", "card", "ink", "soft", "good", "bad", "warn", "link"}
    for ground in ("bg", "card"):
        for name in ("ink", "soft", "good", "bad", "warn", "link"):
            one, other = sorted((_luminance(colours[ground]), _luminance(colours[name])))
            assert (other + 0.05) / (one + 0.05) >= 4.5, f"{name} on {ground}"


# --- lists ------------------------------------------------------------------------------------------------------------


class _Proxy:
    """Topics with that many partitions; sequencers where a test opens them."""

    def __init__(self, topics: Mapping[str, int]) -> None:
        leader = PartitionInfo(Leader(NodeId(1), LeaderEpoch(0)), (NodeId(1),), (NodeId(1),))
        self.infos = {
            name: TopicInfo(name, UUID(int=1), dict.fromkeys(range(count), leader)) for name, count in topics.items()
        }
        self.sequencers: dict[TopicPartition, PartitionSequencer] = {}
        self.refusals = Refusals()
        self.expansions: list[ExpansionStatus] = []
        self.gated: list[GatedStatus] = []
        self.lists = Lists(
            proxied_connections={},
            sequencers=self.sequencers,
            refusals=self.refusals,
            topics=lambda: self.infos,
            policy=lambda name: TopicPolicy.of(REQUIRED | AGED) if name in self.infos else None,
            info=self.infos.get,
            expansions=lambda: self.expansions,
            gated=lambda: self.gated,
        )

    def open(self, topic: str, partition: int, log_end: int) -> None:
        sequencer = self.sequencers[TopicPartition(topic, partition)] = PartitionSequencer(
            TopicPartition(topic, partition), SequencerLimits()
        )
        fence = sequencer.state.fence
        fence.phase, fence.log_end = type(fence.phase).OPEN, log_end

    def refuse(self, topic: str, partition: int, reason: str = "offset_mismatch") -> None:
        self.refusals.record(Count("refusal", reason, TopicPartition(topic, partition), 3, 57), None)


def names(listed: Listed) -> list[str]:
    return [each.topic for each in listed.rows]


def test_topics_are_paged_and_searched_by_name() -> None:
    proxy = _Proxy({f"Orders-{number:04}": 1 for number in range(300)} | {"clicks": 2})

    first = proxy.lists.listed(PageRequest("topics", limit=2))
    assert (first.matching, names(first)) == (301, ["Orders-0000", "Orders-0001"])
    last = proxy.lists.listed(PageRequest("topics", offset=300, limit=50))
    assert names(last) == ["clicks"]
    searched = proxy.lists.listed(PageRequest("topics", search="oRDERS-029"))
    assert (searched.matching, names(searched)[0]) == (10, "Orders-0290")
    assert proxy.lists.listed(PageRequest("topics", offset=5_000)) == Listed(301, ())


def test_topic_shows_its_ends_and_last_refusal() -> None:
    proxy = _Proxy({"orders": 3})
    proxy.open("orders", 0, 57)
    proxy.open("orders", 2, 5)
    proxy.refuse("orders", 0)
    proxy.refuse("orders", 2, "expectation_required")

    (topic,) = proxy.lists.listed(PageRequest("topics")).rows
    assert (topic.log_end_offsets, topic.ends_known, topic.partitions, topic.refusals) == (62, 2, 3, 2)
    assert topic.configs == REQUIRED | AGED
    assert (topic.last_refusal.reason, topic.last_refusal.partition) == ("expectation_required", 2)
    zero, one, _ = proxy.lists.listed(PageRequest("partitions", topic="orders")).rows
    assert (zero.state, zero.log_end_offset, zero.last_refusal.expected, zero.last_refusal.log_end_offset) == (
        "open", 57, 3, 57,
    )  # fmt: skip
    assert (one.state, one.log_end_offset, one.last_refusal) == (None, None, None)
    assert not proxy.lists.listed(PageRequest("partitions", topic="not-checked")).rows


def test_newest_refusals_come_first_and_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fencepost_proxy.observability.lists._REFUSALS_MAX", 3)
    proxy = _Proxy({"t": 9})
    for partition in (0, 1, 2, 0, 3):
        proxy.refuse("t", partition)

    found = proxy.lists.listed(PageRequest("refusals"))
    assert [each.partition for each in found.rows] == [3, 0, 2]
    assert proxy.lists.listed(PageRequest("partitions", topic="t")).rows[0].refusals == 2


def test_a_page_of_ten_thousand_partitions_is_small() -> None:
    proxy = _Proxy({f"orders-with-a-long-name-{number:04}": 10 for number in range(1_000)})
    for topic, info in proxy.infos.items():
        for partition in info.partitions:
            proxy.open(topic, partition, 10**12)
            proxy.refuse(topic, partition)
    topics = proxy.lists.listed(PageRequest("topics", limit=20))
    partitions = proxy.lists.listed(PageRequest("partitions", limit=50))
    assert (topics.matching, len(topics.rows)) == (1_000, 20)
    assert (partitions.matching, len(partitions.rows)) == (10_000, 50)
    for what, listed in (("topics", topics), ("partitions", partitions)):
        assert len(json.dumps(list_page(what, listed).answer)) < 30_000


# --- clients ----------------------------------------------------------------------------------------------------------


def hello(version: int, name: str = "apache-kafka-java", number: str = "4.3.1") -> memoryview:
    message = Message(client_software_name=name, client_software_version=number)
    return memoryview(encode_request_frame(API_VERSIONS, version, 1, "billing", message))[4:]


def test_clients_say_their_software_since_version_3() -> None:
    assert introduced(hello(3)) == ("billing", Software("apache-kafka-java", "4.3.1"))
    assert introduced(hello(4)) == ("billing", Software("apache-kafka-java", "4.3.1"))
    assert introduced(hello(2)) == ("billing", None)


def test_unreadable_client_introduction_is_ignored() -> None:
    for length in range(len(hello(3))):
        introduced(hello(3)[:length])  # does not raise
    assert introduced(hello(3)[:-1]) == (None, None)


def test_a_name_that_never_ends_is_cut() -> None:
    _, software = introduced(hello(3, "n" * 5_000, "1\n2"))
    assert software == Software("n" * 64, "1?2")


# --- as JSON ----------------------------------------------------------------------------------------------------------


def test_every_json_field_is_documented() -> None:
    reported = (Path(__file__).parents[2] / "docs" / "status.md").read_text("utf-8")
    kinds = (
        StatusSnapshot, Problem, BrokerStatus, CheckedTopicStatus, PartitionStatus, RefusalStatus, SoftwareStatus,
        ClientStatus, ExpansionStatus, GatedStatus, ViolationStatus, Instance,
    )  # fmt: skip
    missing = {each.name for kind in kinds for each in fields(kind) if f"`{each.name}`" not in reported}
    assert not missing, json.dumps(sorted(missing))
