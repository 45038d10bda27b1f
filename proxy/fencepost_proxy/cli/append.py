"""`fencepost append`: appends records at an expected offset."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
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

_REFUSED: Final = 1
#: All records are in one batch, so that all are appended or none.
_BATCH_BYTES: Final = 900_000
_LINGER_MS: Final = 600_000
#: More than the headers of one record.
_HEADERS_BYTES: Final = 150
_CLOSE_SECONDS: Final = 1

_DESCRIPTION: Final = """\
Append records to one partition through the proxy, if the first gets the offset that --expect states. All are appended,
or none. Each VALUE is a record; without VALUE, each line of stdin is.

exit code: 0 appended; 1 refused, nothing was appended; 2 not sent, or the outcome is unknown (as the message says)."""

_EXAMPLES: Final = """\
examples:
  fencepost append orders first second --expect 0
      append two records to partition 0, if it is empty

  fencepost append orders third --expect 2 --key customer-7
      append a record with a key, if partition 0 ends at offset 2
"""


def add_parser(subparsers: Subparsers) -> None:
    summary = "append records at an expected offset"
    parser = add_command(subparsers, "append", run, summary, _DESCRIPTION, examples=_EXAMPLES)
    add_topic(parser)
    add = parser.add_argument
    add("values", nargs="*", metavar="VALUE", help="value of a record (default: the lines of stdin)")
    add("--expect", type=partition, metavar="OFFSET", help="offset that the first record must get (default: any)")
    add("--partition", type=partition, default=0, metavar="N", help="default 0")
    add("--key", help="key of the records (default: none)")


def run(args: argparse.Namespace) -> int:
    """Raises `CannotQuery` unless the records were appended or refused."""
    from kafka.errors import KafkaError, PolicyViolationError  # noqa: PLC0415 - slow to import

    from fencepost import FencepostError, OffsetMismatchError  # noqa: PLC0415

    values = [each.encode() for each in args.values or sys.stdin.read().splitlines()]
    key = None if args.key is None else args.key.encode()
    if not values:
        raise CannotQuery("nothing to append (give VALUE, or lines on stdin)")
    if sum(len(each) + len(key or b"") + _HEADERS_BYTES for each in values) > _BATCH_BYTES:
        raise CannotQuery(f"the records do not fit into one batch of {_BATCH_BYTES} bytes, so nothing was sent")
    try:
        first, last = _append(args, key, values)
    except (OffsetMismatchError, PolicyViolationError) as refused:
        print(f"fencepost: refused: {refused}", file=sys.stderr)
        return _REFUSED
    except _NotSent as error:
        raise CannotQuery(f"nothing was sent: {error}") from None
    except FencepostError as error:
        raise CannotQuery(str(error)) from None
    except KafkaError as error:
        raise CannotQuery(f"perhaps not appended: {error} (run fencepost read {args.topic})") from None
    print(f"appended at offset {first}" if first == last else f"appended at offsets {first} to {last}")
    return 0


class _NotSent(Exception):
    """A failure before the first byte of the records was sent."""


def _append(args: argparse.Namespace, key: bytes | None, values: Sequence[bytes]) -> tuple[int, int]:
    from kafka.errors import KafkaError  # noqa: PLC0415 - slow to import

    from fencepost.kafka_python import ConditionalProducer  # noqa: PLC0415
    from fencepost_proxy.cli.connecting import partitions_of  # noqa: PLC0415

    timeout_ms = int(args.timeout * 1000)
    try:
        partitions_of(client_config(args), args.topic, args.partition, args.timeout)
        producer = ConditionalProducer(
            **kafka_python_settings(args),
            batch_size=_BATCH_BYTES,
            linger_ms=_LINGER_MS,
            max_block_ms=timeout_ms,
            request_timeout_ms=timeout_ms,
            delivery_timeout_ms=_LINGER_MS + 2 * timeout_ms,
        )
    except (KafkaError, CannotQuery) as error:
        raise _NotSent(str(error)) from None
    try:
        try:
            futures = [
                producer.send(
                    args.topic,
                    value,
                    key,
                    partition=args.partition,
                    expected_offset=None if args.expect is None else args.expect + index,
                )
                for index, value in enumerate(values)
            ]
        except KafkaError as error:  # it sends at `flush`
            raise _NotSent(str(error)) from None
        producer.flush(args.timeout)
        offsets = [int(each.get(0).offset) for each in futures]
    finally:
        producer.close(_CLOSE_SECONDS)
    return offsets[0], offsets[-1]
