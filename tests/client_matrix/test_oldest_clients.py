"""The oldest supported release of each library that needs nothing but Python or Java."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.client_matrix.matrix import Scene, compare
from tests.client_matrix.releases import OLDEST, Release

pytestmark = [pytest.mark.kafka]


_CASES = [
    *((each, "") for each in OLDEST),
    *((each, "SCRAM-SHA-512" if "SCRAM-SHA-512" in each.mechanisms else "PLAIN") for each in OLDEST),
]


@pytest.mark.parametrize(("release", "mechanism"), _CASES, ids=str)
def test_oldest_release_observes_the_same(stage: Scene, release: Release, mechanism: str, tmp_path: Path) -> None:
    if release.name != "Java" and sys.version_info >= (3, 12):
        pytest.skip("older than Python 3.12")
    compare(stage, release, mechanism, tmp_path)
