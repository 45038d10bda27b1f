"""Proxies of an older version are replaced by this one under load, one after the other, and this one by the older one.

Every check reads the log directly from Kafka.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.integration.test_claims import CLAIMING, WINDOW, Pipeline, check
from tests.kit.threads import working
from tests.kit.waiting import until
from tests.rolling_restart.run import run
from tests.rolling_restart.stage import two_proxies
from tests.support import older_version
from tests.support.proxy import CHECKED_WITH_LONG_LEASE, ProxyProcess
from tests.support.raw import Answer, Connection, Log, batch

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(900)]

OK, NOT_LEADER = 0, 6
APPENDING_SECONDS = 10.0
LEASE_SECONDS = 1.0
CHECK, CLAIMS = "fencepost.check.expected.offsets", "fencepost.claims"


@pytest.fixture(scope="module")
def older() -> dict[str, str]:
    return older_version.environment()


def assert_read_all_state(*proxies: ProxyProcess) -> None:
    """Each version read what the other one has stored."""
    for proxy in proxies:
        assert "state record ignored" not in proxy.log, proxy.log


def test_upgrade_and_rollback_lose_nothing(
    kafka: KafkaCluster, tmp_path: Path, say: Callable[[str], None], older: dict[str, str]
) -> None:
    """Both proxies are upgraded, then both rolled back."""
    started = []

    def other_version(proxy: ProxyProcess) -> None:
        proxy.environment = {} if proxy.environment else dict(older)
        started.append("older" if proxy.environment else "newer")

    with two_proxies(kafka, tmp_path, CHECKED_WITH_LONG_LEASE, environment=older) as stage:
        stage.before_start = other_version
        result = run(stage, rolls=2, readers=("java-eager", "aiokafka-eager"))
        assert_read_all_state(*stage.proxies)
    say(result.table())
    assert started == ["newer", "newer", "older", "older"]
    assert result.holds, result.table()


def once(proxy: ProxyProcess, topic: str, records: bytes) -> Answer:
    with Connection(proxy.bootstrap) as client:
        return client.append(topic, records)


def number_of(value: bytes) -> int:
    return int(value.split(b"/")[1])


def after_a_refused_one(pipeline: Pipeline) -> list[bytes]:
    """Accepted appends whose predecessor in the pipeline was refused."""
    refused = {number_of(value) for value in pipeline.refused}
    return [value for value in pipeline.accepted if number_of(value) % WINDOW and number_of(value) - 1 in refused]


def test_older_version_does_not_append_to_a_claimed_partition(
    kafka: KafkaCluster, tmp_path: Path, unique_topic: Callable[..., str], older: dict[str, str]
) -> None:
    """The process that has claimed it pipelines. An append of another one, which does not know of the claim, would be
    taken for one of the pipeline."""
    config, topic, log = f"config_lease_seconds = {LEASE_SECONDS}\n", unique_topic("claimed"), Log(kafka.bootstrap)
    with (
        ProxyProcess(kafka.bootstrap, tmp_path, config=config) as newer,
        ProxyProcess(kafka.bootstrap, tmp_path, config=config) as replaced,
    ):
        with Connection(newer.bootstrap) as admin:
            assert admin.create_topic(topic, configs={CHECK: "required", CLAIMS: "true"}) == (OK, None)
        one, other = (Pipeline(name, proxy.bootstrap, topic) for name, proxy in (("one", newer), ("other", replaced)))
        one.run(lambda: CLAIMING in newer.log and len(one.accepted) >= 200)

        # Rolled back too early: the config is still set.
        replaced.stop()
        replaced.environment = dict(older)
        replaced.restart()
        before = len(one.accepted)
        with working(one.append, other.append):
            time.sleep(APPENDING_SECONDS)
        assert not other.accepted
        assert len(one.accepted) > before + 100
        answer = once(replaced, topic, batch(b"last/0/%d" % one.end, expected=one.end))
        assert answer.error_code == NOT_LEADER
        assert f"does not know the topic config {CLAIMS}" in (answer.message or "")
        check(log, topic, one, other)

        # As docs/operations.md says: without the config, the claim ends, and both append.
        with Connection(replaced.bootstrap) as admin:
            assert admin.alter_topic(topic, {CLAIMS: None}) == (OK, None)
        time.sleep(3 * LEASE_SECONDS)
        with working(one.append, other.append):
            until(lambda: len(other.accepted) >= 50 and len(one.accepted) > before + 200, "both to append")
            time.sleep(APPENDING_SECONDS)
        check(log, topic, one, other)
        assert after_a_refused_one(one) == after_a_refused_one(other) == []

        # The other one is rolled back, and both are upgraded again.
        for proxy, version in ((newer, older), (newer, {}), (replaced, {})):
            with working(one.append, other.append):
                proxy.stop()
                proxy.environment = dict(version)
                proxy.restart()
                for each in (one, other):
                    accepted = len(each.accepted) + 50
                    until(lambda each=each, accepted=accepted: len(each.accepted) > accepted, f"{each.name} to append")
        check(log, topic, one, other)
        assert_read_all_state(newer, replaced)


def test_older_version_is_no_home(
    kafka: KafkaCluster, tmp_path: Path, unique_topic: Callable[..., str], older: dict[str, str]
) -> None:
    """It does not know `homes`, and both serve every client, before and after its upgrade."""
    config = 'homes = true\nadvertised_host = "127.0.0.1"\n'

    def homes(proxy: ProxyProcess) -> set[int]:
        with Connection(proxy.bootstrap) as client:
            return {each.port - 1 - each.node_id for each in client.metadata().brokers}

    (tmp_path / "newer").mkdir()
    (tmp_path / "older").mkdir()
    with (
        ProxyProcess(kafka.bootstrap, tmp_path / "newer", config=config) as newer,
        ProxyProcess(kafka.bootstrap, tmp_path / "older", environment=older) as replaced,
    ):
        topic = unique_topic("homes")
        with Connection(newer.bootstrap) as admin:
            assert admin.create_topic(topic, configs={CHECK: "required"}) == (OK, None)
        pipelines = [Pipeline(name, each.bootstrap, topic) for name, each in (("one", newer), ("other", replaced))]
        with working(*(each.append for each in pipelines)):
            until(lambda: all(len(each.accepted) >= 50 for each in pipelines), "both to append")
            assert homes(newer) == {newer.port}
            assert homes(replaced) == {replaced.port}
        replaced.stop()
        replaced.environment, replaced.config = {}, replaced.config + config
        replaced.restart()
        until(lambda: homes(newer) == homes(replaced), "the same home", accept=bool)
        check(Log(kafka.bootstrap), topic, *pipelines)
        assert_read_all_state(newer, replaced)
