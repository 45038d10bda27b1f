"""All other releases, and all mechanisms."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.client_matrix.matrix import Scene, compare
from tests.client_matrix.releases import OLDEST, OTHERS, Release

pytestmark = [pytest.mark.kafka]
_CASES = [
    *((release, mechanism) for release in OTHERS for mechanism in ("", *release.mechanisms)),
    *((release, mechanism) for release in OLDEST for mechanism in ("PLAIN", "SCRAM-SHA-256", "OAUTHBEARER")),
]


@pytest.mark.parametrize(("release", "mechanism"), _CASES, ids=str)
def test_release_observes_the_same(stage: Scene, release: Release, mechanism: str, tmp_path: Path) -> None:
    if release in OLDEST and release.name != "Java" and sys.version_info >= (3, 12):
        pytest.skip("older than Python 3.12")
    compare(stage, release, mechanism, tmp_path)
