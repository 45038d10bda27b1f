"""`python -m tests.conformance` writes docs/conformance.md."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.cases import CASES

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
_HEAD = """\
# What the gate relies on

Facts of Kafka, and the case that pins each of them, on real Kafka and on the simulation's model of it: one script for
both (`tests/conformance/cases.py`). `test_wrong_models.py` beside it breaks the model point by point and shows which
case notices. This page is made by `python -m tests.conformance`.

| what the gate relies on | case | replicas |
|---|---|---|
"""
_TAIL = """
Not in the model: segments and retention (its snapshots of producers are of any offset instead), a controller that
is late or wrong, disks that lose what was written.
"""


def page() -> str:
    rows = [f"| {case.fact} | `{case.name}` | {case.brokers} |\n" for case in CASES]
    return _HEAD + "".join(rows) + _TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
