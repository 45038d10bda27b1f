"""`python -m tests.conformance` writes docs/conformance.md."""

from __future__ import annotations

from pathlib import Path

from fencepost_proxy.preflight.conformance.case import FENCES, Case, Promise
from fencepost_proxy.preflight.conformance.cases import CASES

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
_HEAD = """\
# Kafka behavior that Fencepost relies on

One case in `proxy/fencepost_proxy/preflight/conformance/` pins each fact. It runs on real Kafka, on the simulation's
model broker, and, unless it disturbs brokers, on your cluster by [`fencepost verify-broker`](which-kafka.md).
*Needed by*: the promises that break without it; –: the proxy allows for it. `tests/conformance/test_wrong_models.py`
breaks each rule of the model; a case must fail. `python -m tests.conformance` writes this page.

"""
_FOOT = """
The model has no segments, no retention, no faulty controller, no lossy disks.

After a loss of acknowledged records (unclean leader election, lost disk), their offsets can come again with other
records. The simulation's scenario `lost-records` and `tests/integration/test_lost_records.py` show what the proxy then
answers ([contract](contract.md#guarantees)).
"""


def page() -> str:
    # Narrow: the page is read rendered.
    rows = [f"{case.fact}|`{case.name}`|{_needed_by(case)}\n" for case in CASES]
    rows = ["fact|case|needed by\n", "---|---|---\n", *rows]
    return _HEAD + "".join(rows) + _FOOT


def _needed_by(case: Case) -> str:
    if case.promises == FENCES:
        return "all"
    return ", ".join(promise for promise in Promise if promise in case.promises) or "–"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
