"""Why a task cannot continue, and what to do about it."""

from __future__ import annotations

from fencepost._partitioning import INVALID_PARTITIONS
from fencepost._refusals import POLICY_VIOLATION
from fencepost.records import COUNT_CHECK_CONFIG
from fencepost.spark.commit_tags import CommitTag
from fencepost.spark.errors import SinkError
from fencepost.spark.interfaces import Answer, TopicPartition
from fencepost.spark.write import Write

#: Kafka's names of the errors of a Produce response.
_NAMES = {
    **{-1: "UNKNOWN_SERVER_ERROR", 2: "CORRUPT_MESSAGE", 3: "UNKNOWN_TOPIC_OR_PARTITION", 5: "LEADER_NOT_AVAILABLE"},
    **{6: "NOT_LEADER_OR_FOLLOWER", 7: "REQUEST_TIMED_OUT", 8: "BROKER_NOT_AVAILABLE", 9: "REPLICA_NOT_AVAILABLE"},
    **{10: "MESSAGE_TOO_LARGE", 13: "NETWORK_EXCEPTION", 17: "INVALID_TOPIC_EXCEPTION", 18: "RECORD_LIST_TOO_LARGE"},
    **{19: "NOT_ENOUGH_REPLICAS", 20: "NOT_ENOUGH_REPLICAS_AFTER_APPEND", 21: "INVALID_REQUIRED_ACKS"},
    **{29: "TOPIC_AUTHORIZATION_FAILED", 31: "CLUSTER_AUTHORIZATION_FAILED", 32: "INVALID_TIMESTAMP"},
    **{35: "UNSUPPORTED_VERSION", 42: "INVALID_REQUEST", 43: "UNSUPPORTED_FOR_MESSAGE_FORMAT"},
    **{45: "OUT_OF_ORDER_SEQUENCE_NUMBER", 47: "INVALID_PRODUCER_EPOCH", 56: "KAFKA_STORAGE_ERROR"},
    **{59: "UNKNOWN_PRODUCER_ID", 74: "FENCED_LEADER_EPOCH", 75: "UNKNOWN_LEADER_EPOCH", 87: "INVALID_RECORD"},
    **{76: "UNSUPPORTED_COMPRESSION_TYPE", 89: "THROTTLING_QUOTA_EXCEEDED", 90: "PRODUCER_FENCED"},
    **{100: "UNKNOWN_TOPIC_ID", 103: "INCONSISTENT_TOPIC_ID"},
}

#: Temporary errors. After each of them the log shows whether the batch was appended.
_RETRIABLE = frozenset({2, 3, 5, 6, 7, 8, 9, 13, 14, 15, 16, 19, 20, 56, 74, 75, 76, 89})
_MEANINGS = {
    10: "a row exceeds the topic's max.message.bytes",
    29: "the user of the sink needs WRITE, READ and DESCRIBE on the topic",
    31: "the user of the sink may not write to this cluster",
    32: "the record timestamps are too old or in the future (compare the clocks of executors and brokers)",
    87: "the proxy or Kafka rejects the records as invalid",
}


class Refusals:
    """Errors of one task's write."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._sink, self._query, self._batch, self._task = write.plan.sink, write.query, write.batch, write.task

    def refuse_other_query(self, topic_partition: TopicPartition, commit_tag: CommitTag) -> None:
        if commit_tag.query == self._query:
            return
        writer = f"streaming query {commit_tag.query}" if commit_tag.query else "a df.write"
        me = f"streaming query {self._query}" if self._query else "a df.write"
        raise SinkError(
            f"{name_of(topic_partition)} has rows of sink.id {self._sink!r} by {writer}, and this "
            f"is {me}: the checkpoint was deleted or replaced, or two queries share the sink.id "
            "(restore its checkpoint, or use a new sink.id to append these rows after the existing "
            "ones)"
        )

    def only_count(self, topic: str, overs: set[int]) -> int:
        if len(overs) > 1:
            raise SinkError(
                f"topic {topic} was expanded several times during batch {self._batch} and {COUNT_CHECK_CONFIG} "
                "is off: cannot determine where its rows are (count them manually, and continue "
                "under a new sink.id)"
            )
        return next(iter(overs))

    def refuse_deleted(self, topic_partition: TopicPartition, begin: int, start: int) -> None:
        if begin < start:
            raise self.deleted(topic_partition, start, f"rows of batch {self._batch} may have been there")

    def deleted(self, topic_partition: TopicPartition, start: int, why: str) -> SinkError:
        if self._write.complete:
            way = "the checkpoint was restored from before later batches: restore the newest one"
        elif self._query:
            way = (
                "if nothing of the batch was deleted, or if it may be written again, set first.run=true "
                "for one run: existing rows are found and the rest is appended"
            )
        else:
            way = "a finished load needs nothing; to write all rows again, use another sink.id"
        return SinkError(
            f"{name_of(topic_partition)} has lost its records below offset {start}, and {why}: cannot "
            f"determine which rows of batch {self._batch} were written ({way})"
        )

    def other_batch(self, topic_partition: TopicPartition, commit_tag: CommitTag) -> SinkError:
        at = name_of(topic_partition)
        if commit_tag.batch > self._batch:
            return SinkError(
                f"{at}: batch {commit_tag.batch} of sink {self._sink!r} appeared while batch {self._batch} "
                "was being written: another driver is ahead on the same checkpoint (stop all but "
                "one)"
            )
        return SinkError(
            f"{at}: rows of batch {commit_tag.batch} of sink {self._sink!r} follow the beginning "
            f"of batch {self._batch}: two queries write under one sink.id (give each its own)"
        )

    def not_arranged(self, topic_partition: TopicPartition, task: int) -> SinkError:
        return SinkError(
            f"{name_of(topic_partition)} is written by tasks {task} and {self._task} of one write, "
            "although arranged=true: all rows of a partition must be in one task (use fencepost.spark.arrange "
            "as the last step before the write)"
        )

    def other_split(self, topic_partition: TopicPartition) -> SinkError:
        return SinkError(
            f"batch {self._batch} is partly written, and its rows without key and partition are "
            "split into tasks differently than before: another task wrote a row for "
            f"{name_of(topic_partition)} "
            "(restore spark.sql.shuffle.partitions, the file split or the number of cores until "
            "this batch is done, then give rows a key or a partition, or use fencepost.spark.arrange "
            "with arranged=true; or set same.split=true and unmatched.rows=compare, which finds rows in other tasks; "
            f"{self._last_way_out()})"
        )

    def other_rows(self, topic_partition: TopicPartition, count: int) -> SinkError:
        buffered = "; this task appended nothing" if self._write.buffered is not None else ""
        what = f"batch {self._batch}" if self._query else "this write"
        same = "" if self._write.spread else "if the same rows are in other tasks, set unmatched.rows=compare; "
        way = (
            f"go back to the query and source that began the batch; {same}{self._last_way_out()}"
            if self._query
            else f"for another load use another sink.id; {same}see fencepost.spark.arrange"
        )
        return SinkError(
            f"{name_of(topic_partition)} has {count} rows of {what} of sink {self._sink!r} (task "
            f"{self._task}) that the data does not have now: the data changed, or its rows are "
            f"in other tasks{buffered} ({way})"
        )

    def compacted_away(self, topic_partition: TopicPartition) -> SinkError:
        what = f"batch {self._batch}" if self._query else "this write"
        return SinkError(
            f"{name_of(topic_partition)} was compacted since {what} of sink {self._sink!r} began, "
            "and a row is missing: if compaction removed it, appending it again would undo newer "
            f"values of its key (retry within min.compaction.lag.ms next time; "
            f"{'' if self._query else 'a finished load needs nothing; '}{self._last_way_out()})"
        )

    def finished_meanwhile(self, topic_partition: TopicPartition) -> SinkError:
        return SinkError(
            f"{name_of(topic_partition)}: another driver has finished load {self._sink!r} meanwhile (run it again: a "
            "finished load appends nothing)"
        )

    def expanded_at_commit(self, topic: str) -> SinkError:
        return SinkError(
            f"topic {topic} was expanded before the last rows of load {self._sink!r} were appended (run it again, "
            "which appends them)"
        )

    def _last_way_out(self) -> str:
        if not self._query:
            return "as a last resort, another sink.id appends all rows again"
        return "as a last resort, a new sink.id with the same checkpoint appends this batch again"


def name_of(topic_partition: TopicPartition) -> str:
    return f"{topic_partition[0]}-{topic_partition[1]}"


def error_name(code: int) -> str:
    return _NAMES.get(code, f"error {code}")


def refuse_final(topic_partition: TopicPartition, answer: Answer) -> None:
    """Raises SinkError for a permanent error."""
    stated = answer.message or ""
    at = name_of(topic_partition)
    if answer.code == POLICY_VIOLATION:
        if "OFFSET_VIOLATION" in stated:
            raise SinkError(
                f"{at}: {stated}: another client bypasses the proxy, or the check was switched "
                "off meanwhile, so later rows may be in the topic twice"
            )
        if stated and "OFFSET_MISMATCH" not in stated and "PREDECESSOR_FAILED" not in stated:
            raise SinkError(f"{at}: {stated}")
    elif answer.code not in _RETRIABLE and answer.code != INVALID_PARTITIONS:
        raise SinkError(f"{at}: {error_name(answer.code)}: {_MEANINGS.get(answer.code, 'refused')} {stated}".rstrip())
