"""The scripts of `tests/java/ScriptedClients.java`: what the users of Kafka's Java clients observe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fencepost_dev.tools import compile_java, run_java
from tests.support.kafka import kafka_version

_SOURCE = Path(__file__).parents[1] / "java" / "ScriptedClients.java"
#: Row of a table → the script's name.
JAVA_SCRIPTS = {
    "Java: produce": "produce",
    "Java: idempotent, large, transactions": "transactions",
    "Java: group, commit, resume": "classic",
    "Java: group.protocol=consumer": "consumer",
    "Java: seek, offsets for times": "seek",
    "Java: admin": "admin",
}
_SECONDS = 600.0


def play_java(
    settings: Mapping[str, str], scripts: Sequence[str], *, prefix: str, brokers: int, at_ms: int, directory: Path
) -> dict[str, str]:
    """Row → output, of several scripts in one JVM, because each JVM start takes seconds. Names begin with `prefix`."""
    (file := directory / f"{prefix}.properties").write_text("".join(f"{k}={v}\n" for k, v in settings.items()))
    version = kafka_version()
    names = [JAVA_SCRIPTS[each] for each in scripts]
    printed = run_java(
        "ScriptedClients",
        [str(file), prefix, str(brokers), str(at_ms), *names],
        classes=compile_java([_SOURCE], version=version),
        version=version,
        timeout_seconds=_SECONDS,
    ).output
    parts = re.split(r"^=== (\w+)\n", printed, flags=re.MULTILINE)[1:]
    observed = dict(zip(parts[::2], parts[1::2], strict=True))
    return {each: observed[JAVA_SCRIPTS[each]] for each in scripts}
