"""Runs Kafka's command line tools, and small Java programs that use its clients, from the locked jars."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fencepost_dev.errors import ToolError
from fencepost_dev.jars import DEFAULT_VERSION, cache_directory, classpath, release
from fencepost_dev.java import QUICK_JVM, find_jdk, logging_flags
from fencepost_dev.process import supervised

TIMEOUT_SECONDS = 60.0
COMPILE_TIMEOUT_SECONDS = 120.0

#: Script of a Kafka distribution → main class.
MAIN_CLASSES = {
    "kafka-acls": "org.apache.kafka.tools.AclCommand",
    "kafka-broker-api-versions": "org.apache.kafka.tools.BrokerApiVersionsCommand",
    "kafka-cluster": "org.apache.kafka.tools.ClusterTool",
    "kafka-configs": "kafka.admin.ConfigCommand",
    "kafka-console-consumer": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "kafka-console-producer": "org.apache.kafka.tools.ConsoleProducer",
    "kafka-console-share-consumer": "org.apache.kafka.tools.consumer.ConsoleShareConsumer",
    "kafka-consumer-groups": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "kafka-consumer-perf-test": "org.apache.kafka.tools.ConsumerPerformance",
    "kafka-delete-records": "org.apache.kafka.tools.DeleteRecordsCommand",
    "kafka-dump-log": "org.apache.kafka.tools.DumpLogSegments",
    "kafka-e2e-latency": "org.apache.kafka.tools.EndToEndLatency",
    "kafka-features": "org.apache.kafka.tools.FeatureCommand",
    "kafka-get-offsets": "org.apache.kafka.tools.GetOffsetShell",
    "kafka-groups": "org.apache.kafka.tools.GroupsCommand",
    "kafka-leader-election": "org.apache.kafka.tools.LeaderElectionCommand",
    "kafka-log-dirs": "org.apache.kafka.tools.LogDirsCommand",
    "kafka-metadata-quorum": "org.apache.kafka.tools.MetadataQuorumCommand",
    "kafka-producer-perf-test": "org.apache.kafka.tools.ProducerPerformance",
    "kafka-reassign-partitions": "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
    "kafka-share-groups": "org.apache.kafka.tools.consumer.group.ShareGroupCommand",
    "kafka-storage": "kafka.tools.StorageTool",
    "kafka-streams-application-reset": "org.apache.kafka.tools.StreamsResetter",
    "kafka-topics": "org.apache.kafka.tools.TopicCommand",
    "kafka-transactions": "org.apache.kafka.tools.TransactionsCommand",
    "kafka-verifiable-share-consumer": "org.apache.kafka.tools.VerifiableShareConsumer",
}
#: Main classes that differ in older releases, by tools lock.
_OLDER_MAIN_CLASSES = {
    "kafka-tools-4.0.2": {"kafka-dump-log": "kafka.tools.DumpLogSegments"},
    "kafka-tools-3.9.2": {
        "kafka-acls": "kafka.admin.AclCommand",
        "kafka-broker-api-versions": "kafka.admin.BrokerApiVersionsCommand",
        "kafka-console-producer": "kafka.tools.ConsoleProducer",
        "kafka-dump-log": "kafka.tools.DumpLogSegments",
    },
}


@dataclass(frozen=True, slots=True)
class ToolResult:
    exit_code: int
    output: str
    #: Standard error, which contains client warnings even on success.
    errors: str


def tool_command(name: str, arguments: Sequence[str], *, version: str = DEFAULT_VERSION) -> list[str]:
    """The command line of a tool, for interactive use. `name` is a key of `MAIN_CLASSES` or a class."""
    lock = release(version).tools_lock
    main_class = _OLDER_MAIN_CLASSES.get(lock, {}).get(name) or MAIN_CLASSES.get(name, name)
    return java_command(main_class, arguments, version=version)


def java_command(
    main_class: str, arguments: Sequence[str], *, version: str = DEFAULT_VERSION, classes: Path | None = None
) -> list[str]:
    """The command line of a main class with the tools' jars of a release and `classes` (of `compile_java`)."""
    path = classpath(release(version).tools_lock)
    if classes is not None:
        path = f"{classes}{os.pathsep}{path}"
    return [
        str(find_jdk().java),
        "-Xmx256m",
        *QUICK_JVM,
        *logging_flags("WARN", to_stderr=True),
        "-cp",
        path,
        main_class,
        *arguments,
    ]


def run_tool(
    name: str,
    arguments: Sequence[str],
    *,
    version: str = DEFAULT_VERSION,
    stdin: str = "",
    timeout_seconds: float = TIMEOUT_SECONDS,
    check: bool = True,
) -> ToolResult:
    """Runs a tool to its end. Raises `ToolError` on timeout, and with `check` if its exit code is not 0."""
    return _run(tool_command(name, arguments, version=version), name, stdin, timeout_seconds, check)


def run_java(
    main_class: str,
    arguments: Sequence[str],
    *,
    classes: Path | None = None,
    version: str = DEFAULT_VERSION,
    stdin: str = "",
    timeout_seconds: float = TIMEOUT_SECONDS,
    check: bool = True,
) -> ToolResult:
    """As `run_tool`, for any main class."""
    command = java_command(main_class, arguments, version=version, classes=classes)
    return _run(command, main_class, stdin, timeout_seconds, check)


def compile_java(sources: Sequence[Path], *, version: str = DEFAULT_VERSION) -> Path:
    """The directory of compiled classes, cached by sources, jars and Java version.

    Raises `ToolError` with the compiler's messages.
    """
    jdk = find_jdk()
    path = classpath(release(version).tools_lock)
    digest = hashlib.sha256(f"{jdk.version}\n{path}\n".encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    target = cache_directory() / "classes" / digest.hexdigest()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=target.parent, prefix=".part-"))
    try:
        _run(
            [str(jdk.javac), "-nowarn", "-d", str(building), "-cp", path, *map(str, sources)],
            "javac",
            "",
            COMPILE_TIMEOUT_SECONDS,
            True,
        )
        try:
            building.rename(target)
        except OSError:
            if not target.exists():
                raise
            # Another process compiled the same sources.
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _run(command: list[str], name: str, stdin: str, timeout_seconds: float, check: bool) -> ToolResult:
    try:
        done = subprocess.run(
            supervised(command),
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        raise ToolError(f"{name} timed out after {timeout_seconds:.0f} s: {expired.stderr!r}") from expired
    if check and done.returncode:
        raise ToolError(f"{name} failed with code {done.returncode}:\n{done.stdout}{done.stderr}")
    return ToolResult(done.returncode, done.stdout, done.stderr)
