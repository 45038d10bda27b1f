from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client_matrix.matrix import Scene, scene


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("client-matrix")) as made:
        yield made
