"""`fencepost status` and `fencepost topics`, and what all commands share: help and an unreachable proxy."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fencepost_proxy.cli import status, status_client
from fencepost_proxy.cli.main import main
from fencepost_proxy.cluster.heartbeats import Instance
from fencepost_proxy.config import ListenTls
from fencepost_proxy.observability.status import (
    BrokerStatus,
    CheckedTopicStatus,
    PartitionStatus,
    Problem,
    RefusalStatus,
    SoftwareStatus,
    StatusSnapshot,
)
from fencepost_proxy.transport.certificates import Certificates
from fencepost_proxy.types import Address, NodeId
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.status import AGED, REQUIRED, status_page

BROKER = BrokerStatus(NodeId(2), Address("kafka-2", 9092), Address("proxy", 19095), 4)
HEALTHY = StatusSnapshot("1.2.3", 3_700.0, "abc", Address("proxy", 19092), brokers=(BROKER,), refusals={"x": 7})
WRONG = replace(HEALTHY, problems=(Problem(True, "Broker 2 cannot be reached\x1b[2J", "Is that broker up?"),))
LAST = RefusalStatus(
    "orders", 3, "offset_mismatch", int(time.time() * 1000), 41, 57, "billing", Address("10.0.0.7", 51_000)
)
ROWS: Mapping[str, Sequence[Any]] = {
    "topics": (CheckedTopicStatus("orders", REQUIRED | AGED, 6, 2, log_end_offsets=570, ends_known=4, refusals=1),),
    "partitions": (
        PartitionStatus("orders", 3, NodeId(2), "open", 57, 0, refusals=1, last_refusal=LAST),
        PartitionStatus("orders", 4, None),
    ),
    "refusals": (LAST,),
    "software": (SoftwareStatus("apache-kafka-java", "4.3.1", 12), SoftwareStatus(None, None, 1)),
}


def test_output_starts_with_the_health_line(capsys: pytest.CaptureFixture[str]) -> None:
    with status_page(HEALTHY, ROWS) as address:
        assert main(["status", "--status", str(address)]) == 0

    reported = capsys.readouterr().out
    assert reported.startswith("✓ Healthy\n\nclients connect to proxy:19092, cluster abc\n")
    for text in ("1 checked topics", "7 batches refused", "kafka-2:9092", "billing", "41", "57", "apache-kafka-java"):
        assert text in reported
    assert "\x1b" not in reported, "this is no terminal"


def test_command_reads_with_the_token_and_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path)
    certificate = authority.sign("proxy")
    tls = Certificates(ListenTls(certificate.certificate, certificate.key), None).status_context
    (token := tmp_path / "token").write_text("r3ad\n")
    with status_page(HEALTHY, ROWS, read_token_file=token, tls=tls) as address:
        arguments = ["status", "--status", f"https://{address}"]
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        assert main(arguments) == 2
        assert f"https://{address}/status.json responded 401: token required" in capsys.readouterr().err
        monkeypatch.setenv("FENCEPOST_STATUS_READ_TOKEN_FILE", str(tmp_path / "absent"))
        assert main(arguments) == 2
        assert "absent cannot be read" in capsys.readouterr().err
        monkeypatch.setenv("FENCEPOST_STATUS_READ_TOKEN_FILE", str(token))
        assert main(arguments) == 0
        monkeypatch.delenv("SSL_CERT_FILE")
        assert main(arguments) == 2
        assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err


def test_rates_limits_and_proxies_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    history = {"requests": (1.0, 12.34), "to_kafka": (0.0, 3e6), "to_clients": (0.0, 1e6), "refusals": (0.0, 12.0)}
    other = Instance(4, "edge-2\x1b[2J", "1.1", None, 95.0, live=False)
    instances = Instance(3, "edge-1", "1.2", "0.0.0.0:8080", 0.0, live=True, this=True), other
    snapshot = replace(HEALTHY, connections=812, connections_max=5_000, history=history, instances=instances)
    with status_page(snapshot, ROWS) as address:
        assert main(["status", "--status", str(address)]) == 0

    reported = capsys.readouterr().out
    assert "812 of 5,000 connections, 0 requests in flight; 12.3 requests/s, 4.00 MB/s, 12.0 refusals/min\n" in reported
    assert re.search(r"3 +edge-1 +1\.2 +0\.0\.0\.0:8080 +this process\n", reported)
    assert re.search(r"4 +edge-2\\x1b\[2J +1\.1 +- +1 min.* ago: dead or cut off\n", reported)


def test_problem_and_advice_come_first_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with status_page(WRONG, ROWS) as address:
        assert main(["status", "--status", str(address)]) == 1

    first, problem, advice, *_ = capsys.readouterr().out.splitlines()
    assert first == "✕ Serving, but degraded"
    assert problem == "  ✕ Broker 2 cannot be reached\\x1b[2J", "a peer's text is no command for the terminal"
    assert advice == "    Is that broker up?"


@pytest.mark.parametrize(
    ("environment", "coloured"), [({"TERM": "xterm"}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_are_for_terminals(
    environment: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with status_page(HEALTHY, ROWS) as address:
        monkeypatch.setattr(sys, "stdout", terminal)
        main(["status", "--status", str(address)])

    assert terminal.getvalue().startswith("\x1b[32m✓ Healthy\x1b[0m" if coloured else "✓ Healthy")


def test_programs_get_what_the_page_has(capsys: pytest.CaptureFixture[str]) -> None:
    with status_page(WRONG, ROWS) as address:
        assert main(["status", "--status", str(address), "--json"]) == 1

    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["problems"][0]["bad"], found["brokers"][0]["node_id"]) == ("degraded", True, 2)


def test_topics_and_the_partitions_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    with status_page(HEALTHY, ROWS) as address:
        assert main(["topics", "--status", str(address)]) == 0
        head, topic = capsys.readouterr().out.splitlines()
        assert main(["topics", "orders", "--status", str(address)]) == 0
        _, three, four = capsys.readouterr().out.splitlines()
        assert main(["topics", "--search", "nothing like it", "--status", str(address)]) == 0
        nothing = capsys.readouterr().out

    assert head.split()[:2] == ["TOPIC", "CONFIGS"]
    assert topic.split()[:3] == ["orders", "check.expected.offsets=required,", "max.record.age.ms=60000"]
    assert "570 in 4" in topic
    assert "offset_mismatch" in three
    assert "expected 41, log end 57" in three
    assert "none" in four
    assert "not used yet" in four
    assert nothing.startswith("No checked topics known to this proxy process, or none with a matching name. ")


def test_long_topic_list_is_queried_completely(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [CheckedTopicStatus(f"t{number:04}", REQUIRED, 1) for number in range(1_100)]
    with status_page(HEALTHY, {"topics": rows}) as address:
        assert main(["topics", "--status", str(address), "--json"]) == 0

    assert [each["topic"] for each in json.loads(capsys.readouterr().out)["topics"]] == [each.topic for each in rows]


def test_unchecked_topic_is_not_a_success(capsys: pytest.CaptureFixture[str]) -> None:
    with status_page(HEALTHY, {}) as address:
        assert main(["topics", "orders", "--status", str(address)]) == 2

    assert "orders is not a checked topic of the proxy at" in capsys.readouterr().err


def test_watch_repeats_and_survives_an_unreachable_proxy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with status_page(HEALTHY, ROWS) as address:
        healthy = status_client.status_page(address)
    answers = iter([healthy, status_client.CannotQuery("unreachable"), healthy | {"state": "degraded"}])

    def probe(_: Address) -> dict[str, Any]:
        answer = next(answers, None)
        if answer is None:
            raise KeyboardInterrupt
        if isinstance(answer, status_client.CannotQuery):
            raise answer
        return dict(answer)

    monkeypatch.setattr(status, "status_page", probe)
    assert main(["status", "--watch", "0.2", "--json"]) == 130

    captured = capsys.readouterr()
    assert [json.loads(line)["state"] for line in captured.out.splitlines()] == ["healthy", "degraded"]
    assert captured.err == "fencepost: unreachable\n"


@pytest.mark.parametrize("command", ["status", "topics", "expansions", "transactions"])
def test_unreachable_proxy_is_one_line_and_status_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert main([command, "--status", address]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fencepost: no response from http://{address}/")
    assert line.endswith(f"(check that the proxy runs with --status {address})")


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("status", ["--watch", "--json", "127.0.0.1:8080"]),
        ("topics", ["--watch", "--json", "127.0.0.1:8080"]),
        ("expansions", ["thresholds", "--json", "--bootstrap-server", "fencepost expansions open orders billing"]),
        ("check", ["fencepost check --config fencepost.toml", "exit code: 0"]),
        ("config", []),
        ("config explain", []),
        ("config show", []),
        ("proxy", ["proxy --bootstrap-server localhost:9092 --listen localhost:19092", "ready bootstrap=HOST:PORT"]),
    ],
)
def test_help_teaches_by_examples(command: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])

    text = capsys.readouterr().out
    assert f"fencepost {command}" in text.split("examples:")[1]
    assert [part for part in parts if part not in text] == []
    assert "unsafe" not in text
