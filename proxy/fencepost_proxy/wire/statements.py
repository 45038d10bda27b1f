"""Expected offset: the offset that a producer states for a record, and at which alone the record may be appended.

Values of the record headers that state one, or a partition count:

| header | bound | unbound |
|---|---|---|
| `fencepost-expected-offset` | `41@orders/3`, `41@orders/3@CLUSTER_ID` | `41`; `-1`: none |
| `fencepost-partition-count` | `6@orders`, `6@orders@CLUSTER_ID` | `6` |

Applications copy headers with records: to a retry topic, a dead-letter topic, another cluster. A bound value names the
binding that it was made for, and counts nowhere else. Topic names contain neither `@` nor `/`.

`native/src/batch.rs` reads the same values, except that it leaves those for another binding to Python.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from fencepost_policies.values import value
from fencepost_proxy.types import TopicPartition

DIGITS_MAX: Final = 19
NO_EXPECTATION: Final = -1
#: Of `_BINDING`.
_BINDING_BYTES_MAX: Final = 518
#: The characters and the length that Kafka allows in topic names. A cluster id may be any text.
_BINDING = re.compile(
    rb"@(?P<topic>[a-zA-Z0-9._-]{1,249})"
    rb"(?:/(?P<partition>0|[1-9][0-9]{0,9}))?"
    rb"(?:@(?P<cluster_id>[!-~]{1,255}))?"
)


@value
class Statement:
    """`number`: what counts here; None for a value with `other_binding`. `text`: the whole value. `binding`: what
    follows its number."""

    number: int | None
    text: bytes
    binding: bytes = b""
    other_binding: str | None = None


def read_statement(text: bytes, where: TopicPartition, cluster_id: bytes | None, *, of_partition: bool) -> Statement:
    """`of_partition`: an expected offset; else a partition count. `cluster_id`: of Kafka; None if not known. Then each
    one counts: a statement too many is refused, one too few is appended at another offset.

    Raises ValueError, with the reason.
    """
    if text.isdigit() and len(text) <= DIGITS_MAX:
        return Statement(int(text), text)
    if text == b"-1" and of_partition:
        return Statement(NO_EXPECTATION, text)
    number = text.partition(b"@")[0]
    binding = text[len(number) :]
    bound = None
    if number.isdigit() and len(number) <= DIGITS_MAX and len(binding) <= _BINDING_BYTES_MAX:
        bound = _read_binding(binding, where, cluster_id, of_partition)
    if bound is None:
        form = "OFFSET@TOPIC/PARTITION" if of_partition else "COUNT@TOPIC"
        raise ValueError(f"is not an ASCII decimal number of at most {DIGITS_MAX} digits, nor {form}[@CLUSTER_ID]")
    return Statement(None, text, other_binding=bound) if bound else Statement(int(number), text, binding)


#: For partitions whose batches alternate.
@lru_cache(maxsize=4096)
def _read_binding(binding: bytes, where: TopicPartition, cluster_id: bytes | None, of_partition: bool) -> str | None:
    """The other binding that it names, "" if that is `where`; None if it is unreadable."""
    bound = _BINDING.fullmatch(binding)
    if bound is None or (bound["partition"] is None) is of_partition:
        return None
    topic, partition, theirs = bound["topic"].decode(), bound["partition"], bound["cluster_id"]
    is_here = topic == where.topic and (partition is None or int(partition) == where.partition)
    if is_here and (theirs is None or cluster_id is None or theirs == cluster_id):
        return ""
    other_binding = topic if partition is None else f"{topic}/{partition.decode()}"
    return other_binding if theirs in (None, cluster_id) else f"{other_binding} of cluster {theirs.decode()}"
