"""What `make bench` works out: its frames, what it reads from the tools, goals, peers, and what it writes."""

from __future__ import annotations

import re
import struct
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiokafka.record.default_records import DefaultRecordBatch
from kafka.protocol.producer import ProduceRequest, ProduceResponse

from benchmarks import __main__ as command
from benchmarks import machine, routes, spark
from benchmarks.java import LoadError, consumed, produced_mib_per_second
from benchmarks.raw import PRODUCE_VERSION, Appends, RefusedError, Shape, percentile
from benchmarks.results import CPU_PER_GB, OF_DIRECT, P50, P99, Report, Row, at_least, at_most, ratios, with_goals
from benchmarks.routes import Peer, PeersError, filled, given_route, read_peers
from benchmarks.secured import with_tls

PEERS_FILE = Path(routes.__file__).with_name("peers.toml")


# --- rows and goals ---------------------------------------------------------------------------------------------------


def test_ratios_are_formed_within_each_round() -> None:
    # given a machine that was twice as slow in the second round
    direct, proxied = (200.0, 100.0, 200.0), (190.0, 95.0, 190.0)
    # then the ratio does not notice, whereas one of medians might
    assert ratios(proxied, direct) == (0.95, 0.95, 0.95)


def test_only_product_rows_get_goals() -> None:
    rows = with_goals(
        [
            Row("idempotent", "fencepost, checks on", OF_DIRECT, (0.96,)),
            Row("idempotent", "HAProxy (TCP)", OF_DIRECT, (0.96,)),
            Row("produce", "fencepost, checks on", "MiB/s", (160.0,)),
            Row("produce", "fencepost-like", CPU_PER_GB, (9.0,)),
        ],
        peers=[],
    )
    assert [row.goal for row in rows] == [at_least(0.95), None, None, None]


def test_goals_are_relative_to_haproxys_figures_of_the_run() -> None:
    rows = [
        Row("produce", "HAProxy (TCP)", CPU_PER_GB, (0.5, 0.6, 0.7)),
        Row("produce", "HAProxy (TCP)", OF_DIRECT, (0.9,)),
        Row("one in flight", "HAProxy (TCP)", P50, (150.0,)),
        Row("consume", "HAProxy (TCP)", CPU_PER_GB, (0.4,)),
        Row("consume", "fencepost", CPU_PER_GB, (0.3,)),
        Row("produce", "fencepost, checks off", CPU_PER_GB, (0.6,)),
        Row("produce", "fencepost, checks on", CPU_PER_GB, (0.73,)),
        Row("produce", "fencepost, checks on", OF_DIRECT, (0.88,)),
        Row("conditional", "fencepost, required, header", P50, (151.0,)),
        Row("conditional", "fencepost, checks on", P50, (140.0,)),
        Row("one in flight", "fencepost, checks on", P50, (140.0,)),
    ]
    found = [row.goal and str(row.goal) for row in with_goals(rows, peers=[])[4:]]
    assert found == [
        "≤ 0.28 (0.7 × HAProxy)",
        "≤ 0.6 (1 × HAProxy)",
        "≤ 0.72 (1.2 × HAProxy)",
        "≥ 0.88 (HAProxy − 0.02)",
        "≤ 150 (1 × HAProxy)",
        None,
        None,
    ]
    without = with_goals(rows[4:], peers=[])
    assert all(row.goal is None for row in without)


def test_run_on_a_busy_machine_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "result.json"
    result.write_text(replace(_report(), busy="others used 1.00 cores").to_json(), "utf-8")
    assert (
        "**Not for publication: others used 1.00 cores**" in Report.from_json(result.read_text("utf-8")).to_markdown()
    )
    monkeypatch.setattr("sys.argv", ["benchmarks", "--publish", str(result)])
    with pytest.raises(SystemExit):
        command.main()


def test_busy_machine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_OBSERVED_SECONDS", 0.0001)
    used = iter((10.0, 10.0, 20.0, 21.0))
    monkeypatch.setattr(machine, "_busy_seconds", lambda: next(used))
    assert machine.busy() == ""
    assert "other programs" in machine.busy()


def test_a_goal_is_met_at_its_limit() -> None:
    assert at_least(0.97).met_by(0.97)
    assert not at_least(0.97).met_by(0.969)
    assert at_most(45).met_by(45)
    assert not at_most(45).met_by(45.1)


def test_p99_goal_is_the_better_peers_value() -> None:
    rows = [
        Row("one in flight", "fencepost, checks off", P99, (290.0,)),
        Row("one in flight", "Kroxylicious", P99, (285.0,)),
        Row("one in flight", "kafka-proxy", P99, (343.0,)),
        Row("one in flight", "HAProxy (TCP)", P99, (200.0,)),
    ]
    (product, *_) = with_goals(rows, peers=["Kroxylicious", "kafka-proxy"])
    assert product.goal == at_most(285.0)
    # and against nothing where none was measured
    (product, *_) = with_goals(rows[:1], peers=[])
    assert product.goal is None


def test_workloads_match_patterns_and_quick_skips_longest() -> None:
    assert command.chosen_workloads(["produce*"], quick=False) == ["produce", "produce 100 B"]
    assert command.chosen_workloads([], quick=False) == [*command.WORKLOADS, "scaling"]
    assert command.chosen_workloads([], quick=True) == [*command.WORKLOADS]
    assert command.chosen_workloads(["scaling"], quick=True) == ["scaling"]
    assert command.chosen_workloads(["nothing"], quick=True) == []


# --- the report -------------------------------------------------------------------------------------------------------


def _report(*rows: Row) -> Report:
    return Report(
        when="2026-01-02 03:04 UTC",
        command="python -m benchmarks --quick",
        commit="0123456789ab+",
        machine={"cores": "2"},
        versions={"Kafka": "4.4.0"},
        settings={"produce": "With these settings."},
        missing={"Kroxylicious": "its command was not found"},
        rows=rows,
        failures=("consume: it hung",),
    )


def test_report_lists_missing_and_failed_measurements() -> None:
    text = _report(Row("produce", "direct", "MiB/s", (176.0,))).to_markdown()
    assert "**Not measured: Kroxylicious** – its command was not found" in text
    assert "**Failed: consume: it hung**" in text
    assert "`python -m benchmarks --quick` at commit `0123456789ab+`" in text
    assert "## Produce, 1 KB records\n\nWith these settings.\n\n| | MiB/s |" in text


def test_page_without_markers_is_not_overwritten(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("# Mine\n")
    with pytest.raises(ValueError, match="lacks the lines"):
        command.publish(_report(), page)
    assert page.read_text() == "# Mine\n"


# --- peers ------------------------------------------------------------------------------------------------------------


def test_uncommented_peers_toml_examples_are_valid() -> None:
    text = PEERS_FILE.read_text("utf-8")
    assert tomllib.loads(text) == {}, "what is committed names no program of anybody's"
    first = text.index("# [Kroxylicious]")
    uncommented = re.sub(r"(?m)^# ?", "", text[first:])
    known = {"host", "port", "upstream", "config"}
    for name, table in tomllib.loads(uncommented).items():
        used = set(re.findall(r"\$\{(\w+)\}", f"{table['start']} {table.get('config', '')}"))
        assert used <= known
        assert {"upstream", "port"} <= used, name
        with_tls = set(re.findall(r"\$\{(\w+)\}", table.get("tls_config", "")))
        assert not with_tls or with_tls == {"host", "port", "upstream", "certificate", "key", "trusted"}
    assert {peer.name for peer in read_peers(uncommented)} == set(routes.KNOWN_PEERS)


def test_peer_without_its_program_is_missing() -> None:
    (peer,) = read_peers('[other]\nstart = ["/no/such/proxy"]')
    assert "/no/such/proxy was not found" in peer.missing


def test_tls_config_of_a_peer_gets_the_files_of_the_run(tmp_path: Path) -> None:
    files = SimpleNamespace(
        server=SimpleNamespace(certificate=tmp_path / "server.pem", key=tmp_path / "server.key"),
        authority=SimpleNamespace(file=tmp_path / "authority.pem"),
    )
    text = 'start = ["sh"]\ntls_config = "${certificate} ${key} ${trusted} ${port}"'
    (peer,) = read_peers(f"[other]\n{text}")
    config = with_tls(peer, "with TLS", files).config  # type: ignore[arg-type]
    assert config == f"{tmp_path}/server.pem {tmp_path}/server.key {tmp_path}/authority.pem ${{port}}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("other = 1", r"other: must be a table"),
        ("[other]", r"set either `start`, or the `address`"),
        ('[other]\nstart = ["sh"]\naddress = "127.0.0.1:1"', r"set either"),
        ('[other]\nstart = "sh"', r"start must be a list of words"),
        ('[other]\naddress = "127.0.0.1:1"\nrewrite = true', r"unknown: rewrite"),
        ('[direct]\naddress = "127.0.0.1:1"', r"this name is reserved"),
        ("[other", r"not TOML"),
    ],
)
def test_peers_toml_errors_name_the_problem(text: str, problem: str) -> None:
    with pytest.raises(PeersError, match=problem):
        read_peers(text)


def test_any_address_can_be_a_route() -> None:
    assert given_route("mine=127.0.0.1:9999", rewrites=True) == Peer("mine", address="127.0.0.1:9999")
    assert not given_route("mine=[::1]:9999", rewrites=False).rewrites
    for wrong in ("127.0.0.1:9999", "mine=", "mine=host", "mine=host:port", "=host:1"):
        with pytest.raises(PeersError, match="NAME=HOST:PORT"):
            given_route(wrong, rewrites=True)


def test_placeholders_are_replaced_and_misspelt_ones_reported() -> None:
    assert filled("${host}:${port} $$5 {}", {"host": "h", "port": "1"}) == "h:1 $5 {}"
    with pytest.raises(PeersError, match=r"prot.*known: host, port"):
        filled("${prot}", {"host": "h", "port": "1"})


# --- what the tools print ---------------------------------------------------------------------------------------------


def test_the_last_summary_of_the_producer_tool_counts() -> None:
    printed = (
        "311113 records sent, 62222.6 records/sec (60.76 MB/sec), 8.7 ms avg latency, 200.0 ms max latency.\n"
        "400000 records sent, 180180.2 records/sec (175.96 MB/sec), 5.11 ms avg latency, 89.00 ms max latency, "
        "4 ms 50th, 12 ms 95th, 20 ms 99th, 30 ms 99.9th.\n"
    )
    assert produced_mib_per_second(printed) == 175.96
    with pytest.raises(LoadError, match="no brokers"):
        produced_mib_per_second("no brokers\n")


_CONSUMED = (
    "start.time, end.time, data.consumed.in.MB, MB.sec, data.consumed.in.nMsg, nMsg.sec, rebalance.time.ms, "
    "fetch.time.ms, fetch.MB.sec, fetch.nMsg.sec\n"
    "2026-01-02 03:04:05:000, 2026-01-02 03:04:06:000, 195.3125, 97.6, 200000, 100000.0, 1700, 300, 651.0417, 6.6\n"
)


def test_rate_of_a_complete_consumer_is_computed_from_fetch_time() -> None:
    found = consumed(_CONSUMED, at_least_mib=195)
    assert (found.mib, found.mib_per_second) == (195.3125, 651.0417)
    with pytest.raises(LoadError, match="not 196"):
        consumed(_CONSUMED, at_least_mib=196)


# --- the raw client ---------------------------------------------------------------------------------------------------


def _sent(frame: bytearray) -> tuple[int, DefaultRecordBatch]:
    """The correlation id and the batch of a frame, read by code that did not write it."""
    request = ProduceRequest.decode(bytes(frame[4:]), version=PRODUCE_VERSION, header=True)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    (topic,) = request.topic_data
    (partition,) = topic.partition_data
    batch = DefaultRecordBatch(bytes(partition.records))
    assert batch.validate_crc()
    return int.from_bytes(frame[8:12], "big"), batch


def test_frames_expect_consecutive_offsets_across_digit_lengths() -> None:
    appends = Appends(Shape("orders", 2, 10, "header"), next_offset=7)
    for number, expected in enumerate((b"7", b"9", b"11"), 1):
        correlation_id, batch = _sent(appends.frame())
        records = list(batch)
        assert correlation_id == number
        assert [len(record.value) for record in records] == [10, 10]
        assert records[0].headers == [("fencepost-expected-offset", expected)]


def test_expected_offset_is_in_the_base_offset_or_nowhere() -> None:
    appends = Appends(Shape("orders", 3, 10, "base"), next_offset=40)
    assert [_sent(appends.frame())[1].base_offset for _ in range(2)] == [40, 43]
    _, batch = _sent(Appends(Shape("orders", 1, 10), next_offset=40).frame())
    assert batch.base_offset == 0
    assert [record.headers for record in batch] == [[]]


def test_idempotent_appends_number_their_sequences() -> None:
    appends = Appends(Shape("orders", 16, 10, "header", producer=(5, 1, 0)))
    batches = [_sent(appends.frame())[1] for _ in range(3)]
    assert [(batch.producer_id, batch.producer_epoch, batch.base_sequence) for batch in batches] == [
        (5, 1, 0),
        (5, 1, 16),
        (5, 1, 32),
    ]


def _answer(topic: str, error_code: int, base_offset: int) -> bytes:
    partition = ProduceResponse.TopicProduceResponse.PartitionProduceResponse(
        index=0,
        error_code=error_code,
        base_offset=base_offset,
        log_append_time_ms=-1,
        log_start_offset=0,
        record_errors=[],
        error_message=None,
    )
    response = ProduceResponse(
        responses=[ProduceResponse.TopicProduceResponse(name=topic, partition_responses=[partition])],
        throttle_time_ms=0,
    )
    # A response header of the flexible kind: correlation id, no tagged fields.
    body = struct.pack(">ib", 9, 0) + bytes(response.encode(version=PRODUCE_VERSION))
    return struct.pack(">i", len(body)) + body


def test_a_refused_append_is_no_measurement() -> None:
    appends = Appends(Shape("orders", 1, 10))
    appends.check(_answer("orders", 0, 41))
    with pytest.raises(RefusedError, match="append failed with 44"):
        appends.check(_answer("orders", 44, 57))


def test_percentiles_are_values_that_were_measured() -> None:
    hundred = list(range(1, 101))
    assert percentile(hundred, 0.5) == 50
    assert percentile(hundred, 0.99) == 99
    assert percentile([3], 0.5) == 3
    assert percentile([1, 2, 3], 0.5) == 2
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_spark_variants_are_compared_per_round_and_arrangement() -> None:
    # given two rounds of three variants, of which the machine disturbed the second round
    base, base_arranged, ours = (
        spark.Series("key", "Spark's sink, direct", "direct", key=True),
        spark.Series("key", "Spark's sink, direct, arranged", "direct", key=True, arranged=True),
        spark.Series("key", "fencepost", "fencepost", ours=True, key=True),
    )
    speeds = {base: (100e3, 50e3), base_arranged: (40e3, 20e3), ours: (60e3, 30e3)}
    found = {series: spark.Measured() for series in speeds}
    for series, values in speeds.items():
        found[series].rows_per_second.extend(values)
        for cpu in found[series].cpu.values():
            cpu.extend((1.0, 2.0))
    # when they become a table
    rows = {(row.route, row.measure): row for row in spark.table(found)}
    # then each ratio is of one round
    assert rows[ours.name, spark.OF_SPARK].values == (0.6, 0.6)
    assert rows[ours.name, spark.OF_SPARK].goal is not None
    assert rows[ours.name, spark.OF_SPARK_ARRANGED].values == (1.5, 1.5)
    assert rows[ours.name, spark.OF_SPARK_ARRANGED].goal is not None
    assert rows[base_arranged.name, spark.OF_SPARK].goal is None
    assert (base.name, spark.OF_SPARK) not in rows
    assert (base.name, "proxy CPU s/M rows") not in rows


def test_versions_name_the_build_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_NATIVE", "off")
    assert machine.versions()["fencepost"].endswith(" (pure Python: FENCEPOST_NATIVE=off)")


@pytest.mark.parametrize("stated", ["", "before the run, other programs used 1.00 cores"])
def test_heading_of_a_printed_result_states_a_busy_machine(
    stated: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "busy", lambda: stated)
    machine.print_heading("TLS")
    out = capsys.readouterr().out
    assert "## TLS" in out
    assert ("Not for publication" in out) is bool(stated)
    assert stated in out
