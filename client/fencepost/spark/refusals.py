"""Why a task cannot continue, and what to do about it."""

from __future__ import annotations

from fencepost._partitioning import INVALID_PARTITIONS
from fencepost._refusals import POLICY_VIOLATION
from fencepost.spark.commit_tags import CommitTag
from fencepost.spark.errors import SinkError
from fencepost.spark.interfaces import Answer, TopicPartition
from fencepost.spark.write import PartitionWrite, Write

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
        self._sink, self._query, self._batch = write.plan.sink, write.query, write.batch

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

    def refuse_old(self, topic_partition: TopicPartition, commit_tag: CommitTag) -> None:
        """Refuse to continue a batch of version 1."""
        if commit_tag.is_old and commit_tag.batch >= self._batch:
            raise SinkError(
                f"{name_of(topic_partition)}: an earlier version of fencepost wrote {self._what} of sink "
                f"{self._sink!r}, and placed its rows otherwise (finish it with that version; a finished load needs "
                "nothing)"
            )

    def refuse_other_batch(self, topic_partition: TopicPartition, commit_tag: CommitTag) -> None:
        """Refuse an append that was read while this batch is written."""
        self.refuse_other_query(topic_partition, commit_tag)
        self.refuse_old(topic_partition, commit_tag)
        if commit_tag.batch == self._batch:
            return
        at = name_of(topic_partition)
        if commit_tag.batch > self._batch:
            raise SinkError(
                f"{at}: batch {commit_tag.batch} of sink {self._sink!r} appeared while batch {self._batch} "
                "was being written: another driver is ahead on the same checkpoint (stop all but "
                "one)"
            )
        raise SinkError(
            f"{at}: rows of batch {commit_tag.batch} of sink {self._sink!r} follow the beginning "
            f"of batch {self._batch}: two queries write under one sink.id (give each its own)"
        )

    def refuse_deleted(self, topic_partition: TopicPartition, begin: int) -> None:
        if begin < self._write.probed.observations[topic_partition].start:
            raise self.deleted(topic_partition, f"rows of {self._what} may have been there")

    def deleted(self, topic_partition: TopicPartition, why: str) -> SinkError:
        start = self._write.probed.observations[topic_partition].start
        return SinkError(
            f"{name_of(topic_partition)} has lost its records below offset {start}, and {why}: cannot determine which "
            f"rows of {self._what} were written ({self._way_out()})"
        )

    def other_rows(self, topic_partition: TopicPartition, what: str) -> SinkError:
        return SinkError(
            f"{name_of(topic_partition)}: the topic has rows of {self._what} of sink {self._sink!r}, and the data now "
            f"has {what}: the source or the query changed since ({self._way_out()})"
        )

    def refuse_missing(self, topic_partition: TopicPartition, partition: PartitionWrite) -> None:
        """Refuse to append rows that the log lacks, where they are no rest of an unfinished batch."""
        if self._write.is_load and self._write.probed.done:
            raise self.other_rows(topic_partition, "more rows")
        if self._write.is_complete:
            raise SinkError(
                f"{name_of(topic_partition)}: a row of batch {self._batch} is missing although the "
                "topic has later batches: the checkpoint was restored from before later batches, and the "
                "source now gives other rows; nothing was appended (restore the newest checkpoint, "
                "or write only the missing rows under a new sink.id)"
            )
        if partition.is_compacted:
            raise SinkError(
                f"{name_of(topic_partition)} was compacted since {self._what} of sink {self._sink!r} began, and a row "
                "is missing: if compaction removed it, appending it again would undo newer values of its key (retry "
                f"within min.compaction.lag.ms next time; {self._way_out()})"
            )

    def not_numbered(self, topic_partition: TopicPartition) -> SinkError:
        return SinkError(
            f"{name_of(topic_partition)}: another run of {self._what} partitions its rows by another count (run "
            "it again, which finds them)"
        )

    def expanded(self, topic: str) -> SinkError:
        return SinkError(
            f"topic {topic} was expanded from {self._write.counts[topic][-1]} partitions while {self._what} was "
            "written (start it again: the rows already written are found, and the others are placed by the new count)"
        )

    @property
    def _what(self) -> str:
        return "this load" if self._write.is_load else f"batch {self._batch}"

    def _way_out(self) -> str:
        if self._write.is_load:
            return "a finished load needs nothing; for other rows use another sink.id"
        if self._write.is_complete:
            return "the checkpoint was restored from before later batches: restore the newest one"
        return (
            "go back to the query and source that began the batch; a new sink.id with the same checkpoint appends "
            "all its rows"
        )


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
