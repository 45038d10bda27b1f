"""`python -m tests.conformance` writes docs/conformance.md."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.cases import CASES

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
_HEAD = """\
# Kafka behavior that Fencepost relies on

One case in `tests/conformance/cases.py` pins each fact. It runs on real Kafka and on the simulation's model broker.
`test_wrong_models.py` breaks each rule of the model; a case must fail. `python -m tests.conformance` writes this page.

"""
_FOOT = """
The model has no segments, no retention, no faulty controller, no lossy disks.

After a loss of acknowledged records (unclean leader election, lost disk), their offsets can come again with other
records. The simulation's scenario `lost-records` and `tests/integration/test_lost_records.py` show what the proxy then
answers ([contract](contract.md#guarantees)).
"""


def page() -> str:
    # Narrow: the page is read rendered.
    rows = ["fact|case\n", "---|---\n", *(f"{case.fact}|`{case.name}`\n" for case in CASES)]
    return _HEAD + "".join(rows) + _FOOT


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
