"""`producer.id.expiration.ms` as it counts while brokers, operators and answers change."""

from __future__ import annotations

from fencepost_proxy.cluster.configs import BrokerFacts
from fencepost_proxy.services.log_reader import KNOWN_SECONDS, ProducerExpiration

DAY, HOUR = 86_400_000, 3_600_000


def read(expiration: ProducerExpiration, milliseconds: int, at: float, *, complete: bool = True) -> bool:
    return expiration.observe(BrokerFacts(milliseconds, complete), at)


def test_first_read_counts_at_once() -> None:
    expiration = ProducerExpiration()
    assert expiration.known_until < 0
    assert not read(expiration, 2 * DAY, 10.0)
    assert (expiration.milliseconds, expiration.known_until) == (2 * DAY, 10.0 + KNOWN_SECONDS)


def test_lower_value_counts_at_once() -> None:
    expiration = ProducerExpiration()
    read(expiration, DAY, 0.0)
    assert read(expiration, HOUR, 10.0)
    assert expiration.milliseconds == HOUR
    assert not read(expiration, HOUR, 20.0)


def test_higher_value_applies_only_after_a_time() -> None:
    expiration = ProducerExpiration()
    read(expiration, HOUR, 0.0)
    for at in (10.0, 10.0 + KNOWN_SECONDS - 1):
        assert not read(expiration, DAY, at)
        assert expiration.milliseconds == HOUR
    read(expiration, DAY, 10.0 + KNOWN_SECONDS)
    assert expiration.milliseconds == DAY


def test_lowest_of_higher_values_counts() -> None:
    expiration = ProducerExpiration()
    read(expiration, HOUR, 0.0)
    read(expiration, 2 * HOUR, 10.0)
    read(expiration, DAY, 10.0 + KNOWN_SECONDS)
    assert expiration.milliseconds == 2 * HOUR


def test_silent_broker_restarts_the_wait_for_higher_value() -> None:
    expiration = ProducerExpiration()
    read(expiration, HOUR, 0.0)
    read(expiration, DAY, 10.0)
    read(expiration, DAY, 20.0, complete=False)
    read(expiration, DAY, 10.0 + KNOWN_SECONDS)
    assert expiration.milliseconds == HOUR


def test_silent_broker_does_not_block_a_lower_value() -> None:
    expiration = ProducerExpiration()
    read(expiration, DAY, 0.0)
    assert read(expiration, HOUR, 30.0, complete=False)
    assert (expiration.milliseconds, expiration.known_until) == (HOUR, KNOWN_SECONDS)
