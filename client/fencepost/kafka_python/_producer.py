"""The producer with expected offsets, and reads of topic configs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.errors import BrokerResponseError, KafkaTimeoutError
from kafka.future import Future

from fencepost._checks import BlockingChecks, CheckCache
from fencepost._idempotence import Idempotence, configured
from fencepost._refusals import refusal, verify
from fencepost.errors import PartitionRequiredError
from fencepost.records import CHECK_CONFIG, binding_of, conditional_headers, new_write_id, unstated_headers


def checks_of(ttl_seconds: float, configs: Mapping[str, Any], check: str = CHECK_CONFIG) -> BlockingChecks:
    admin_configs = {k: v for k, v in configs.items() if k in KafkaAdminClient.DEFAULT_CONFIG}
    return BlockingChecks(
        CheckCache(ttl_seconds, config=check),
        lambda: KafkaAdminClient(**admin_configs),
        describe_topic,
        lambda admin, _: admin.describe_cluster().get("cluster_id"),
        lambda admin: admin.close(),
    )


def describe_topic(admin: Any, topic: str) -> dict[str, str | None]:
    """A topic's configs {name: value}, read with a KafkaAdminClient; empty if they are not visible."""
    resource = ConfigResource(ConfigResourceType.TOPIC, topic)
    found = admin.describe_configs([resource], config_filter="all").get("topic", {}).get(topic, {})
    return {name: config["value"] for name, config in found.items()}


class SendFuture(Future):  # type: ignore[misc]
    """The result of a `send`. Done when the record is appended or refused."""

    def __init__(self) -> None:
        super().__init__()
        self._done = threading.Event()
        self.add_both(lambda _: self._done.set())

    def get(self, timeout: float | None = None) -> Any:
        """RecordMetadata. Waits up to `timeout` seconds; raises KafkaTimeoutError or the error of the send."""
        if not self._done.wait(timeout):
            raise KafkaTimeoutError(f"no outcome within {timeout} s: the record may still be appended")
        if self.exception is not None:
            raise self.exception
        return self.value


class ConditionalFuture(SendFuture):
    """The result of a conditional `send`: fails with OffsetMismatchError if refused, else yields RecordMetadata."""

    def __init__(self, inner: Any, topic: str, partition: int, expected: int) -> None:
        super().__init__()
        self._where = (topic, partition, expected)
        inner.add_callback(self._appended).add_errback(self._failed)

    def _appended(self, metadata: Any) -> None:
        try:
            verify(*self._where, metadata.offset)
        except Exception as error:
            self.failure(error)
        else:
            self.success(metadata)

    def _failed(self, error: Exception) -> None:
        ours = None
        if isinstance(error, BrokerResponseError):
            message = error.args[0] if error.args else None
            ours = refusal(*self._where, code=error.errno, message=message)
        if ours is not None:
            ours.__cause__ = error
        self.failure(ours or error)


class ConditionalProducer(KafkaProducer):  # type: ignore[misc]
    """KafkaProducer whose `send` takes `expected_offset`. All else is KafkaProducer's.

    Defaults that differ from KafkaProducer's:

    - `enable_idempotence=False`. True raises ValueError: an idempotent producer of kafka-python 3 is unusable after its
      first refusal. Transactions work, because a refused transaction can be aborted;
    - `max_in_flight_requests_per_connection=1`: otherwise later batches overtake a retried batch and are refused.

    `idempotence`: `"off"` or `"safe"`, which is the same here; `"required"` raises ValueError. `check_ttl_seconds`: how
    long a topic's check config is cached. `acks=0` raises ValueError, because the producer would not receive refusals.
    """

    def __init__(
        self,
        *,
        check_ttl_seconds: float = 30.0,
        idempotence: Idempotence | None = None,
        **configs: Any,
    ) -> None:
        configs |= configured(idempotence, configs, "enable_idempotence", possible=False)
        if configs.get("acks") == 0:
            raise ValueError("acks=0 cannot be used with expected offsets: the producer would not receive refusals")
        self._checks = checks_of(check_ttl_seconds, configs)
        if configs.get("transactional_id") is None and configs.setdefault("enable_idempotence", False):
            # A refusal would also fail all other records in flight, appended or not.
            raise ValueError(
                "enable_idempotence=True cannot be used with expected offsets: an idempotent producer of kafka-python "
                "is unusable after its first refusal (leave it off: an expected offset already prevents duplicates)"
            )
        configs.setdefault("max_in_flight_requests_per_connection", 1)
        super().__init__(**configs)

    def send(  # noqa: PLR0917 - the library's signature
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: list[tuple[str, bytes]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        *,
        expected_offset: int | None = None,
        write_id: bytes | None = None,
    ) -> Any:
        """KafkaProducer.send; with `expected_offset`, the record is appended at that offset or not at all.

        The future fails with OffsetMismatchError if the log ends at another offset. The records of one batch are
        accepted or refused together; those without `expected_offset` then fail with PolicyViolationError. `write_id`:
        identifies this write, 16 random bytes by default. To repeat a send with an unknown outcome, pass the same
        `write_id` and the same record. Raises CheckIsOffError, PartitionRequiredError, ValueError.
        """
        if expected_offset is None:
            return super().send(topic, value, key, headers, partition, timestamp_ms)
        if partition is None:
            raise PartitionRequiredError("expected_offset= needs partition= (offsets are per partition)")
        given = unstated_headers(headers or [], expected_offset)
        where = binding_of(topic, partition, self._checks.require(topic).cluster_id)
        headers = conditional_headers(given, expected_offset, write_id or new_write_id(), where)
        future = super().send(topic, value, key, headers, partition, timestamp_ms)
        return ConditionalFuture(future, topic, partition, expected_offset)

    def close(self, timeout: float | None = None, null_logger: bool = False) -> None:
        if not hasattr(self, "config"):
            return  # __del__ of a producer whose __init__ raised
        super().close(timeout, null_logger)
        self._checks.close()
