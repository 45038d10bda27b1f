"""`fencepost read`: prints the records of a topic, and the offset that the next one gets."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from fencepost_proxy.cli.options import (
    Subparsers,
    add_command,
    add_topic,
    client_config,
    kafka_python_settings,
    partition,
)
from fencepost_proxy.cli.status_client import CannotQuery
from fencepost_proxy.cli.tables import printable

_DESCRIPTION: Final = """\
Print the committed records of a topic, up to its end: partition, offset, key and value, separated by tabs. Then print
to stderr the offset that the next record of each partition gets, for `fencepost append --expect`."""

_EXAMPLES: Final = """\
examples:
  fencepost read orders
      print all partitions

  fencepost read orders --partition 0 --bootstrap-server localhost:19092
      print one partition
"""


def add_parser(subparsers: Subparsers) -> None:
    summary = "print the records of a topic, with their offsets"
    parser = add_command(subparsers, "read", run, summary, _DESCRIPTION, examples=_EXAMPLES)
    add_topic(parser)
    parser.add_argument("--partition", type=partition, metavar="N", help="print only this one (default: all)")


def run(args: argparse.Namespace) -> int:
    """Raises `CannotQuery`."""
    from kafka.errors import KafkaError  # noqa: PLC0415 - slow to import

    from fencepost import FencepostError, LogRecord, RetryPolicy  # noqa: PLC0415
    from fencepost.kafka_python import LogReader  # noqa: PLC0415
    from fencepost_proxy.cli.connecting import partitions_of  # noqa: PLC0415

    found = partitions_of(client_config(args), args.topic, args.partition, args.timeout)
    if not found:
        raise CannotQuery(f"topic {args.topic} does not exist, or you may not DESCRIBE it")
    settings = kafka_python_settings(args)

    def show(at: tuple[str, int], record: LogRecord) -> None:
        texts = (
            "-" if each is None else printable(each.decode("utf-8", "replace")) for each in (record.key, record.value)
        )
        print(at[1], record.offset, *texts, sep="\t")

    try:
        shown = [(args.topic, each) for each in found if args.partition in (None, each)]
        retry = RetryPolicy(attempt_seconds=args.timeout, total_seconds=args.timeout)
        with LogReader(shown, retry=retry, **settings) as log:
            ends = log.read_to_end(show)
    except (KafkaError, FencepostError) as error:
        raise CannotQuery(f"cannot read {args.topic}: {error}") from None
    sys.stdout.flush()
    for (topic, number), end in ends.items():
        print(f"{topic}-{number}: the next record gets offset {end}", file=sys.stderr)
    return 0
