"""`python -m tests.support.line_loader BOOTSTRAP TOPIC LOAD FILE`: as the loaders of examples/clients, in Python."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from kafka import KafkaAdminClient

from fencepost import Record
from fencepost.kafka_python import LogWriter
from fencepost.recipes import Loader


def main() -> None:
    bootstrap, topic, name, file = sys.argv[1:]
    with contextlib.closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        [described] = admin.describe_topics([topic])
    logs = [LogWriter(topic, each, bootstrap_servers=bootstrap) for each in range(len(described["partitions"]))]
    with Loader(name, logs, group_bytes=500_000) as load:
        lines = Path(file).read_bytes().splitlines()
        for unit in range(int(load.position or 0) + 1, len(lines) + 1):
            key, value = lines[unit - 1].split(b"\t", 1)
            load.append([Record(value, key)], b"%d" % unit)


if __name__ == "__main__":
    main()
