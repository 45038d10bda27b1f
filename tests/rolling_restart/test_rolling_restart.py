"""Two proxies are restarted in turn under load of every client: no failed send, no duplicate, no loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.rolling_restart.run import run
from tests.rolling_restart.stage import Know, two_proxies
from tests.support.proxy import CHECKED_WITH_LONG_LEASE

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(900)]

_OFTEN = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("know", "rolls"),
    [
        ("both", 1),
        pytest.param("both", 6, marks=_OFTEN),
        pytest.param("first", 3, marks=_OFTEN),
        pytest.param("balancer", 6, marks=_OFTEN),
    ],
)
def test_rolling_restart_loses_no_records(
    know: Know, rolls: int, kafka: KafkaCluster, tmp_path: Path, say: Callable[[str], None]
) -> None:
    with two_proxies(kafka, tmp_path, CHECKED_WITH_LONG_LEASE, know=know) as stage:
        result = run(stage, continue_meanwhile=stage.continue_meanwhile, rolls=rolls)
    say(result.table())
    assert result.holds, result.table()
    assert len(result.stops_seconds) == 2 * rolls
