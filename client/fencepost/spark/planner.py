"""What the driver's snapshot says about a task's batch: fresh, partly written or complete, and its counts."""

from __future__ import annotations

from fencepost.records import COUNT_CHECK_CONFIG
from fencepost.spark.commit_tags import CommitTag
from fencepost.spark.errors import SinkError
from fencepost.spark.interfaces import TopicPartition
from fencepost.spark.refusals import Refusals
from fencepost.spark.write import PartitionWrite, Write


class Planner:
    """Decides at the start of a task."""

    def __init__(self, write: Write, refusals: Refusals) -> None:
        self._write = write
        self._refusals = refusals

    def plan(self) -> bool:
        """Check the driver's snapshot. Returns whether the log may have rows of this batch."""
        last = {
            topic_partition: observation.last
            for topic_partition, observation in self._write.probed.observations.items()
            if observation.last is not None
        }
        for topic_partition, known in last.items():
            self._refusals.refuse_other_query(topic_partition, known)
        latest = max((commit_tag.batch for commit_tag in last.values()), default=-1)
        if not self._write.plan.first_run:
            for topic_partition, observation in self._write.probed.observations.items():
                if observation.unread or (not last and self._write.batch > 0 and observation.start > 0):
                    raise self._refusals.deleted(
                        topic_partition, observation.start, f"nothing of sink {self._write.plan.sink!r} is left there"
                    )
        self._write.complete = latest > self._write.batch
        if latest == self._write.batch:
            self._choose_counts(last)
        for topic_partition, observation in self._write.probed.observations.items():
            commit_tag, end = observation.last, observation.end
            if commit_tag is None or commit_tag.batch < self._write.batch or self._write.complete:
                partition = PartitionWrite(end, end, -1 if commit_tag is None else commit_tag.began)
            else:
                partition = PartitionWrite(end, commit_tag.began, commit_tag.before)
            partition.read = latest < self._write.batch
            self._write.partitions[topic_partition] = partition
        return latest >= self._write.batch

    def _choose_counts(self, last: dict[TopicPartition, CommitTag]) -> None:
        """Choose the partition counts of a batch that began earlier, perhaps before an expansion."""
        for topic, count in self._write.probed.counts.items():
            commit_tags = [m for (t, _), m in last.items() if t == topic and m.batch == self._write.batch]
            overs = {
                over for commit_tag in commit_tags for over in (commit_tag.over, commit_tag.created_partitions)
            } - {count}
            self._write.created_counts[topic] = min([count, *overs])
            if overs and topic in self._write.count_checked:
                self._write.mixed.add(topic)
            elif overs and not self._write.plan.arranged:
                # Tasks with the old count may still append unchecked, so the batch keeps the old count.
                self._write.over[topic] = self._refusals.only_count(topic, overs)
            elif overs:
                raise SinkError(
                    f"topic {topic} was expanded from {min(overs)} to {count} partitions after batch "
                    f"{self._write.batch} began (finish the batch with arrange(…, partitions={min(overs)}); "
                    f"set {COUNT_CHECK_CONFIG}=true before the next expansion to avoid this)"
                )
        limit = min((m.at for m in last.values() if m.batch == self._write.batch), default=0)
        for (topic, partition), observation in self._write.probed.observations.items():
            kept = self._write.probed.retention_ms.get(topic, -1)
            deleted = (
                observation.last is None and observation.start > 0 and 0 < kept < 2 * (self._write.probed.at - limit)
            )
            if deleted and not self._write.plan.first_run:
                raise self._refusals.deleted(
                    (topic, partition), observation.start, f"batch {self._write.batch} began long before"
                )
