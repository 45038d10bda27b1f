"""Run the cases (`fencepost_proxy/preflight/conformance/`) on real Kafka and on the simulation's brokers.

A case that fails only on the model shows a defect of the model; on both, the sequencers rely on a wrong assumption.
"""

from __future__ import annotations

import os

import pytest

from fencepost_proxy.preflight.conformance.case import Control
from fencepost_proxy.preflight.conformance.cases import CASES, Case
from tests.conformance.__main__ import PAGE, page
from tests.conformance.model import ModelKafka

#: Runs of each case: the model is random.
_SEEDS = int(os.environ.get("FENCEPOST_CONFORMANCE_SEEDS", "10"))

each_case = pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])


@pytest.mark.no_cover
@each_case
def test_model(case: Case) -> None:
    for seed in range(_SEEDS):
        try:
            case.run(ModelKafka(seed, case.brokers))
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.kafka
@pytest.mark.no_cover
@each_case
def test_real_kafka(case: Case, request: pytest.FixtureRequest) -> None:
    fixture = "one_broker" if case.brokers == 1 and case.control is not Control.EXPIRY else "three_brokers"
    kafka = request.getfixturevalue(fixture)
    try:
        case.run(kafka)
    finally:
        kafka.heal()


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == page(), "python -m tests.conformance"
