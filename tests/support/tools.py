"""Kafka's command line tools in one JVM (`tests/java/ToolRunner.java`), because each JVM start takes seconds."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from fencepost_dev.tools import MAIN_CLASSES, compile_java, run_java
from tests.support.kafka import kafka_version

_RUNNER = Path(__file__).parents[1] / "java" / "ToolRunner.java"


#: In 3.9.2; see `fencepost_dev.tools`.
_OLDER = {"kafka-console-producer": "kafka.tools.ConsoleProducer"}
_PAUSE = "pause\t3000\n"
#: Tool, standard input, arguments.
Command = tuple[str, str, Sequence[str]]
T = TypeVar("T")


def run_script(
    commands: Sequence[Command], script: Path, *, pause_after: Collection[str] = ()
) -> list[tuple[str, int, str]]:
    """Tool, exit code and output of each. `pause_after` – tools whose changes reach the brokers one by one: the next
    tool may query another broker."""
    main_classes = MAIN_CLASSES | (_OLDER if kafka_version().startswith("3.") else {})
    lines = (
        "\t".join([main_classes[tool], stdin, *arguments]) + "\n" + _PAUSE * (tool in pause_after)
        for tool, stdin, arguments in commands
    )
    script.write_text("".join(lines))
    classes = compile_java([_RUNNER], version=kafka_version())
    ran = run_java("ToolRunner", [str(script)], classes=classes, version=kafka_version(), timeout_seconds=400)
    parts = re.split(r"^=== \d+ (-?\d+)\n", ran.output, flags=re.MULTILINE)[1:]
    found = zip(commands, parts[::2], parts[1::2], strict=True)
    return [(tool, int(code), text) for (tool, _, _), code, text in found]


def run_tools(given: Sequence[Sequence[str]], directory: Path) -> None:
    """Each tool is a list of words, its name first. All must succeed."""
    commands = [(words[0].removesuffix(".sh"), "", words[1:]) for words in given]
    for words, (_, code, text) in zip(given, run_script(commands, directory / "tools"), strict=True):
        assert code == 0, f"{' '.join(words)}\n{text}"


def at_both(play: Callable[[str], T], direct: str, proxied: str) -> tuple[T, T]:
    """Play it at both bootstrap addresses at once."""
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(play, [direct, proxied])
    return one, other
