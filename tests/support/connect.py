"""Kafka Connect and MirrorMaker 2 as separate processes, from the locked jars."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from fencepost_dev.jars import CONNECT_LOCK, classpath
from fencepost_dev.java import QUICK_JVM, find_jdk, logging_flags
from fencepost_dev.process import SupervisedProcess

STANDALONE = "org.apache.kafka.connect.cli.ConnectStandalone"
DISTRIBUTED = "org.apache.kafka.connect.cli.ConnectDistributed"
MIRROR_MAKER = "org.apache.kafka.connect.mirror.MirrorMaker"
_STRINGS = "org.apache.kafka.connect.storage.StringConverter"
_STOP_SECONDS = 60.0


def worker(bootstrap: str, rest_port: int, more: Mapping[str, str]) -> dict[str, str]:
    """A worker's settings, with records as lines of text."""
    return {
        "bootstrap.servers": bootstrap,
        "key.converter": _STRINGS,
        "value.converter": _STRINGS,
        "offset.flush.interval.ms": "500",
        # The connectors are on the class path, not in a plugin directory.
        "plugin.discovery": "only_scan",
        "listeners": f"HTTP://127.0.0.1:{rest_port}",
        **more,
    }


def file_source(file: Path, topic: str) -> dict[str, str]:
    return {
        "name": f"source-{topic}",
        "connector.class": "org.apache.kafka.connect.file.FileStreamSourceConnector",
        "tasks.max": "1",
        "file": str(file),
        "topic": topic,
    }


def file_sink(file: Path, topic: str) -> dict[str, str]:
    return {
        # Connect derives the consumer group from the name, so the name must be unique.
        "name": f"sink-{topic}",
        "connector.class": "org.apache.kafka.connect.file.FileStreamSinkConnector",
        "tasks.max": "1",
        "file": str(file),
        "topics": topic,
        # Also reads records from before the group's start, and without delay.
        "consumer.override.auto.offset.reset": "earliest",
    }


@contextmanager
def running(main_class: str, directory: Path, settings: Sequence[Mapping[str, str]]) -> Iterator[SupervisedProcess]:
    """Write each of `settings` to a file; the first is the worker's. It logs to `log_of(directory)`."""
    files = []
    for number, each in enumerate(settings):
        (file := directory / f"{number}.properties").write_text("".join(f"{k}={v}\n" for k, v in each.items()))
        files.append(str(file))
    command = [
        str(find_jdk().java),
        "-Xmx512m",
        *QUICK_JVM,
        *logging_flags("INFO", to_stderr=True),
        "-cp",
        classpath(CONNECT_LOCK),
        main_class,
        *files,
    ]
    process = SupervisedProcess(command, output=log_of(directory))
    try:
        yield process
    finally:
        process.signal(signal.SIGTERM)
        if not process.wait(_STOP_SECONDS):
            process.signal(signal.SIGKILL)
            process.wait(_STOP_SECONDS)


def log_of(directory: Path) -> Path:
    return directory / "connect.log"
