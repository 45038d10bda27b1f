"""Schemas of messages that kafka-python does not ship, in the format of Kafka's own schemas (see `schema.py`)."""

from __future__ import annotations

from typing import Any, Final

_Field = dict[str, Any]


def _field(name: str, kind: str, *, versions: str = "0+", **more: Any) -> _Field:
    return {"name": name, "type": kind, "versions": versions, **more}


def _nullable(name: str, kind: str, *, versions: str = "0+", **more: Any) -> _Field:
    return _field(name, kind, versions=versions, nullableVersions=versions, default="null", **more)


def _message(versions: str, fields: list[_Field], **more: Any) -> dict[str, Any]:
    return {"validVersions": versions, "flexibleVersions": "0+", "fields": fields, **more}


_TOPIC_PARTITIONS: Final = [_field("TopicId", "uuid"), _field("Partitions", "[]int32")]

#: By message name.
SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    # Kafka's ConsumerGroupHeartbeatRequest.json: v1 adds the regular expression and client-generated member ids.
    "ConsumerGroupHeartbeatRequest": _message(
        "0-1",
        [
            _field("GroupId", "string"),
            _field("MemberId", "string"),
            _field("MemberEpoch", "int32"),
            _nullable("InstanceId", "string"),
            _nullable("RackId", "string"),
            _field("RebalanceTimeoutMs", "int32", default="-1"),
            _nullable("SubscribedTopicNames", "[]string"),
            _nullable("SubscribedTopicRegex", "string", versions="1+"),
            _nullable("ServerAssignor", "string"),
            _nullable("TopicPartitions", "[]TopicPartitions", fields=_TOPIC_PARTITIONS),
        ],
    ),
    "ConsumerGroupHeartbeatResponse": _message(
        "0-1",
        [
            _field("ThrottleTimeMs", "int32"),
            _field("ErrorCode", "int16"),
            _nullable("ErrorMessage", "string"),
            _nullable("MemberId", "string"),
            _field("MemberEpoch", "int32"),
            _field("HeartbeatIntervalMs", "int32"),
            _nullable(
                "Assignment",
                "Assignment",
                fields=[_field("TopicPartitions", "[]TopicPartitions", fields=_TOPIC_PARTITIONS)],
            ),
        ],
    ),
    "ConsumerGroupDescribeRequest": _message(
        "0-1",
        [_field("GroupIds", "[]string"), _field("IncludeAuthorizedOperations", "bool")],
    ),
    "ConsumerGroupDescribeResponse": _message(
        "0-1",
        [
            _field("ThrottleTimeMs", "int32"),
            _field(
                "Groups",
                "[]DescribedGroup",
                fields=[
                    _field("ErrorCode", "int16"),
                    _nullable("ErrorMessage", "string"),
                    _field("GroupId", "string"),
                    _field("GroupState", "string"),
                    _field("GroupEpoch", "int32"),
                    _field("AssignmentEpoch", "int32"),
                    _field("AssignorName", "string"),
                    _field(
                        "Members",
                        "[]Member",
                        fields=[
                            _field("MemberId", "string"),
                            _nullable("InstanceId", "string"),
                            _nullable("RackId", "string"),
                            _field("MemberEpoch", "int32"),
                            _field("ClientId", "string"),
                            _field("ClientHost", "string"),
                            _field("SubscribedTopicNames", "[]string"),
                            _nullable("SubscribedTopicRegex", "string"),
                            _field("Assignment", "Assignment"),
                            _field("TargetAssignment", "Assignment"),
                            _field("MemberType", "int8", versions="1+", default="-1"),
                        ],
                    ),
                    _field("AuthorizedOperations", "int32", default="-2147483648"),
                ],
            ),
        ],
        commonStructs=[
            {
                "name": "TopicPartitions",
                "fields": [
                    _field("TopicId", "uuid"),
                    _field("TopicName", "string"),
                    _field("Partitions", "[]int32"),
                ],
            },
            {
                "name": "Assignment",
                "fields": [_field("TopicPartitions", "[]TopicPartitions")],
            },
        ],
    ),
}
