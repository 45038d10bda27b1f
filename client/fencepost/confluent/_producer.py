"""The producer with expected offsets, and reads of topic configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # documented, but not in its __all__
    AdminClient,
    ConfigResource,
    ResourceType,
)

from fencepost._checks import BlockingChecks, CheckCache
from fencepost._idempotence import Idempotence, configured
from fencepost._refusals import POLICY_VIOLATION, silent_refusal, verify
from fencepost.errors import FencepostError, PartitionRequiredError
from fencepost.records import CHECK_CONFIG, binding_of, conditional_headers, new_write_id, unstated_headers

OnDelivery = Callable[[Any, Message], None]
#: Callbacks of the client object, not passed to its admin client.
CALLBACKS = frozenset({"on_delivery", "error_cb", "stats_cb", "throttle_cb", "logger"})


def checks_of(
    ttl_seconds: float, config: Mapping[str, Any], timeout_seconds: float, check: str = CHECK_CONFIG
) -> BlockingChecks:
    admin_config = {k: v for k, v in config.items() if k not in CALLBACKS}
    return BlockingChecks(
        CheckCache(ttl_seconds, config=check),
        lambda: AdminClient(admin_config),
        lambda admin, topic: describe_topic(admin, topic, timeout_seconds),
        lambda admin, topic: admin.list_topics(topic, timeout=timeout_seconds).cluster_id,
    )


def describe_topic(admin: AdminClient, topic: str, timeout_seconds: float = 30.0) -> dict[str, str | None]:
    """A topic's configs {name: value}, read with an AdminClient; empty if they are not visible."""
    resource = ConfigResource(ResourceType.TOPIC, topic)
    try:
        entries = admin.describe_configs([resource], request_timeout=timeout_seconds)[resource].result()
    except KafkaException as error:
        if error.args[0].code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED):
            return {}
        raise
    return {name: entry.value for name, entry in entries.items()}


class LogEnds:
    """Derives the log end offset from the offsets that librdkafka reports for refused records.

    librdkafka numbers the records of a failed batch like those of a successful one: for record `i` of a batch refused
    at log end offset 57, it reports 57 + i. Consecutive refusals with consecutive offsets belong to one batch, unless
    the second record was produced after the first refusal was delivered.
    """

    def __init__(self) -> None:
        self._count = 0
        self._last: dict[tuple[str, int], tuple[int, int, int, int]] = {}

    @property
    def count(self) -> int:
        """Number of refusals so far; store it when producing a record."""
        return self._count

    def of_refusal(self, topic: str, partition: int, expected: int, offset: int, produced_at: int) -> int:
        """The log end offset. `offset`: reported by librdkafka; `produced_at`: `count` when the record was produced."""
        self._count += 1
        number, last_expected, last_offset, end = self._last.get((topic, partition), (0, -1, -1, -1))
        counts_on = expected == last_expected + 1 and offset == last_offset + 1
        if not (counts_on and number > produced_at):
            end = offset
        self._last[topic, partition] = (self._count, expected, offset, end)
        return end


class ConditionalProducer(Producer):
    """Producer whose `produce` takes `expected_offset`. All else is Producer's.

    Defaults that differ from Producer's:

    - `enable.idempotence=true` (needs `acks=all`): librdkafka then retries the identical batch, and continues after a
      refusal. Otherwise it may retry a record in one batch with later records. If the first send was appended, that
      batch is refused, including the record that is already in the log;
    - `max.in.flight.requests.per.connection=1`: otherwise later batches overtake a retried batch and are refused.

    `acks=0` raises ValueError, because the producer would not receive refusals. `check_ttl_seconds`: how long a topic's
    check config is cached. `check_timeout_seconds`: limit for reading it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        check_ttl_seconds: float = 30.0,
        check_timeout_seconds: float = 30.0,
        idempotence: Idempotence | None = None,
        **kwargs: Any,
    ) -> None:
        config = {**config, **configured(idempotence, config, "enable.idempotence", possible=True)}
        if str(config.get("acks", config.get("request.required.acks", "all"))) == "0":
            raise ValueError("acks=0 cannot be used with expected offsets: the producer would not receive refusals")
        defaults = {"enable.idempotence": True, "max.in.flight.requests.per.connection": 1}
        super().__init__({**defaults, **config}, **kwargs)
        self._log_ends = LogEnds()
        self._transactional = bool(config.get("transactional.id"))
        self._default_delivery: OnDelivery | None = config.get("on_delivery")
        self._checks = checks_of(check_ttl_seconds, config, check_timeout_seconds)

    def produce(  # noqa: PLR0917 - the library's signature
        self,
        topic: str,
        value: str | bytes | None = None,
        key: str | bytes | None = None,
        partition: int = -1,
        callback: OnDelivery | None = None,
        on_delivery: OnDelivery | None = None,
        timestamp: int = 0,
        headers: Any = None,
        *,
        expected_offset: int | None = None,
        write_id: bytes | None = None,
    ) -> None:
        """Producer.produce; with `expected_offset`, the record is appended at that offset or not at all.

        If the log ends at another offset, `on_delivery(err, msg)` gets an OffsetMismatchError as `err`; an
        OffsetViolationError if the record was appended elsewhere; other errors are KafkaErrors. The records of one
        batch are accepted or refused together. `write_id`: identifies this write, 16 random bytes by default. The call
        blocks while it reads the topic configs: the first time for a topic, then every `check_ttl_seconds`. Raises
        CheckIsOffError, PartitionRequiredError, ValueError.
        """
        deliver = on_delivery or callback
        options: dict[str, Any] = {"partition": partition, "timestamp": timestamp}
        if expected_offset is None:
            if deliver is not None:
                options["on_delivery"] = deliver
            super().produce(topic, value, key, headers=headers, **options)
            return
        if partition < 0:
            raise PartitionRequiredError("expected_offset= needs partition= (offsets are per partition)")
        given = headers.items() if isinstance(headers, Mapping) else headers or []
        given = unstated_headers(given, expected_offset)
        bound_to = binding_of(topic, partition, self._checks.require(topic).cluster_id)
        headers = conditional_headers(given, expected_offset, write_id or new_write_id(), bound_to)
        deliver = deliver or self._default_delivery
        where = (topic, partition, expected_offset)
        produced_at = self._log_ends.count

        def delivered(err: KafkaError | None, msg: Message) -> None:
            outcome = self._outcome(where, err, msg, produced_at)
            if deliver is not None:
                deliver(outcome, msg)

        super().produce(topic, value, key, headers=headers, on_delivery=delivered, **options)

    def close(self) -> bool:
        closed = super().close()
        self._checks.close()
        return closed

    def _outcome(
        self, where: tuple[str, int, int], err: KafkaError | None, msg: Message, produced_at: int
    ) -> FencepostError | KafkaError | None:
        if err is None:
            offset = msg.offset()
            try:
                verify(*where, -1 if offset is None else offset)
            except FencepostError as violation:
                return violation
            return None
        if err.code() != POLICY_VIOLATION:
            return err
        # librdkafka drops the server's message and the append time, but reports the base offset with the error.
        offset = msg.offset()
        ours = silent_refusal(
            *where,
            base_offset=self._log_ends.of_refusal(*where, -1 if offset is None else offset, produced_at),
            append_time_ms=-1,
            transactional=self._transactional,
            checks=self._checks.others(where[0]),
        )
        ours.__cause__ = KafkaException(err)
        return ours
