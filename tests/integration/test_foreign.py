"""The fastest suite of `make test-foreign`: kafka-python's tests have the same results through the proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.foreign.compare import compare
from tests.foreign.suites import KAFKA_PYTHON, PASSED, Missing

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(900)]


def test_kafka_pythons_own_tests_come_out_the_same(tmp_path: Path) -> None:
    try:
        root = KAFKA_PYTHON.get(tmp_path, None)
    except Missing as missing:
        pytest.skip(str(missing))

    compared = compare(KAFKA_PYTHON, root, tmp_path)

    assert list(compared.direct.values()).count(PASSED) > 45, compared.direct
    assert compared.unexplained == []
