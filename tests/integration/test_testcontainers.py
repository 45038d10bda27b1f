"""The example with Testcontainers, on a Docker daemon, with the image of the proxy from `docker build`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.docs import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


#: As in the example.
_IMAGES = {"FENCEPOST_IMAGE": "fencepost:local", "FENCEPOST_KAFKA_IMAGE": "apache/kafka:4.3.1"}


@pytest.fixture(autouse=True)
def _images() -> None:
    if shutil.which("docker") is None:
        pytest.skip("no docker command: install Docker to run this test")
    for variable, default in _IMAGES.items():
        image = os.environ.get(variable, default)
        found = subprocess.run(["docker", "image", "inspect", image], capture_output=True, timeout=60, check=False)
        if found.returncode:
            pytest.skip(f"image {image} is not here: build or pull it, or name another one by {variable}")


def test_example_appends_and_refuses() -> None:
    program = ROOT / "examples" / "testcontainers" / "kafka_and_fencepost.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = done.stdout.splitlines()
    assert first == "appended at 0"
    assert second.startswith("refused: ")
