"""Kafka's command line tools in one JVM (`tests/java/ToolRunner.java`), because each JVM start takes seconds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fencepost_dev.tools import MAIN_CLASSES, compile_java, run_java
from tests.support.kafka import kafka_version

_RUNNER = Path(__file__).parents[1] / "java" / "ToolRunner.java"


def run_tools(given: Sequence[Sequence[str]], directory: Path) -> None:
    """Each tool is a list of words, its name first. All must succeed."""
    script = directory / "tools"
    script.write_text(
        "".join("\t".join([MAIN_CLASSES[words[0].removesuffix(".sh")], "", *words[1:]]) + "\n" for words in given)
    )
    printed = run_java(
        "ToolRunner",
        [str(script)],
        classes=compile_java([_RUNNER], version=kafka_version()),
        version=kafka_version(),
        timeout_seconds=400,
    ).output
    parts = re.split(r"^=== \d+ (-?\d+)\n", printed, flags=re.MULTILINE)[1:]
    for words, code, text in zip(given, parts[::2], parts[1::2], strict=True):
        assert code == "0", f"{' '.join(words)}\n{text}"
