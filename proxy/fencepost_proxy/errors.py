"""Exception classes by cause, and the Kafka error codes that the proxy sends or handles.

A refusal is a value (`fencepost_policies.append.Refusal`), never an exception. An exception means that a peer or the
proxy violated the protocol. It is logged and counted, and closes that one connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a process does not serve, or what it warns of. `hint`: what an operator can do about it."""

    text: str
    hint: str

    def __str__(self) -> str:
        return self.text


class FencepostError(Exception):
    """Base of all errors of the proxy. `hint`: what an operator can do about it, if the error knows."""

    def __init__(self, text: str, *, hint: str = "") -> None:
        super().__init__(text)
        self.hint = hint


class ConfigError(FencepostError):
    """The configuration is invalid; the message says what to change. Shown without a stack trace."""


class ProtocolError(FencepostError):
    """A peer violated the protocol."""


class ClientProtocolError(ProtocolError):
    """The client violated the protocol. Its connection is closed, and the message is logged as the reason."""


class UpstreamProtocolError(ProtocolError):
    """The broker, or another program at its address, violated the protocol."""


class LimitError(ClientProtocolError):
    """The client exceeded a limit; the message names the limit."""


class Error(IntEnum):
    """Kafka error codes (org.apache.kafka.common.protocol.Errors) that the proxy sends or handles."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    COORDINATOR_NOT_AVAILABLE = 15
    INVALID_TOPIC_EXCEPTION = 17
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    TOPIC_AUTHORIZATION_FAILED = 29
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_CONFIG = 40
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    INVALID_PRODUCER_EPOCH = 47
    INVALID_PRODUCER_ID_MAPPING = 49
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    KAFKA_STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    INVALID_RECORD = 87
    UNKNOWN_TOPIC_ID = 100
    INCONSISTENT_TOPIC_ID = 103
    UNSUPPORTED_ENDPOINT_TYPE = 115
    TRANSACTION_ABORTABLE = 120


def error_name(code: int) -> str:
    """Kafka's name of the code, or the number if `Error` does not contain it."""
    try:
        return Error(code).name
    except ValueError:
        return str(code)


class StateError(FencepostError):
    """The state topic belongs to another cluster, or needs a newer version: checked appends wait for an operator."""

    def __init__(self, text: str, *, hint: str) -> None:
        super().__init__(text, hint=hint)
