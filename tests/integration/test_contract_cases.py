"""contract/cases as clients in other languages use them: examples/go runs them, and both helpers read their answers."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fencepost_dev.tools import compile_java, java_command
from tests.client_matrix.releases import Release, installed, must, run
from tests.support.clients import create_topic
from tests.support.docs import ROOT
from tests.support.proxy import ProxyProcess

_GO = ROOT / "examples" / "go"
_FILES = sorted((ROOT / "contract" / "cases").iterdir())
_CASES: list[dict[str, Any]] = [case for file in _FILES for case in json.loads(file.read_text("utf-8"))]
_ANSWERS = [
    part["answer"]
    for case in _CASES
    for step in case["steps"]
    for request in step.get("produce", ())
    for part in request["partitions"]
    if "kind" in part.get("answer", {}).get("error", {})
]
_RELEASE = Release("contract-cases", "go", lambda *_: [])


def _go(*command: str) -> subprocess.CompletedProcess[str]:
    modules = [f"github.com/twmb/franz-go/pkg/{each}" for each in ("kgo", "kadm", "kmsg")]
    must(_RELEASE, "go", "list", "-deps", *modules, cwd=_GO)  # skips the test where they cannot be had
    return run(["go", *command], _GO)


def _reader() -> Path:
    def install(directory: Path) -> None:
        built = _go("build", "-o", str(directory / "cases"), "./cases")
        assert built.returncode == 0, built.stderr

    return installed(_RELEASE, sorted(each for each in _GO.rglob("*") if each.is_file()), install) / "cases"


@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_go_reader_passes_each_case_that_needs_only_a_proxy(proxy: ProxyProcess) -> None:
    done = run([_reader(), proxy.bootstrap, *_FILES], seconds=500)
    left_out = Counter(", ".join(case["needs"]) for case in _CASES)
    passed = left_out.pop("")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert json.loads(done.stdout) == {"passed": passed, "failed": 0, "left out": left_out}
    assert passed > len(_CASES) * 0.8


@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_go_reader_fails_where_the_check_is_off(proxy: ProxyProcess, tmp_path: Path) -> None:
    """As in front of an implementation that does not check."""
    cases = [case for case in _CASES if case["name"] in ("offset_mismatch/empty-log", "appended/batches-of-all-sizes")]
    for case in cases:
        case["topics"][0]["configs"] = {}
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(cases).replace("case-", "off-"))
    done = run([_reader(), proxy.bootstrap, file])
    first, result = done.stdout.splitlines()
    assert first.startswith("offset_mismatch/empty-log: expected, got: ")
    assert json.loads(result) == {"passed": 1, "failed": 1, "left out": {}}
    assert done.returncode == 1


def test_go_helper_reads_each_answer() -> None:
    tested = _go("test", "-count=1", "./...")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert _go("vet", "./...").returncode == 0


def _java(*arguments: str, stdin: str = "") -> list[Any]:
    classes = compile_java(
        [ROOT / "examples" / "java" / "Fencepost.java", ROOT / "tests" / "java" / "ReadAnswers.java"]
    )
    command = java_command("ReadAnswers", arguments, classes=classes)
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_java_helper_reads_each_answer() -> None:
    messages = [answer["message"].removesuffix("…") for answer in _ANSWERS]
    assert len(messages) > 100
    *read, timeout, other = _java(stdin="".join(f"{each} \n" for each in messages))
    assert read == [answer["error"] for answer in _ANSWERS]
    assert timeout == {"kind": "", "outcome": "unknown"}
    assert other is None


@pytest.mark.kafka
def test_java_helper_reads_the_exception_of_a_producer(proxy: ProxyProcess, unique_topic: Callable[..., str]) -> None:
    topic = create_topic(proxy.bootstrap, unique_topic("append"), "required")
    expected = {"kind": "OFFSET_MISMATCH", "outcome": "refused", "expected": "7", "actual": "0"}
    assert _java(proxy.bootstrap, topic) == [expected]
