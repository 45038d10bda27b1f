"""44 EXPECTATION_REQUIRED: the topic has `required`, and the batch states no expected offset."""

from tests.contract.rows import POLICY_VIOLATION, appended, batch, refused, row, send
from tests.support.raw import Record

_REQUIRED = refused(
    POLICY_VIOLATION, "EXPECTATION_REQUIRED {where}: this topic has fencepost.check.expected.offsets=required"
)

ROWS = [
    row("no-header", "required", send(batch(b"x"), _REQUIRED), length=1),
    row("idempotent", "required", send(batch(b"x", producer="p"), _REQUIRED), length=1),
    row("minus-one", "required", send(batch(Record(b"x", b"-1")), _REQUIRED)),
    row("base-offset-minus-one", "required", send(batch(b"x", base_offset=-1), _REQUIRED)),
    row("base-offset-zero", "required", send(batch(b"x", base_offset=0), _REQUIRED), length=3),
    row("base-offset-minus-one-as-base", "base-required", send(batch(b"x", base_offset=-1), _REQUIRED), length=1),
    row(
        "others-are-not-affected",
        "required",
        send(batch(b"x"), _REQUIRED),
        send(batch(b"y", expected=1), appended(1)),
        length=1,
    ),
]
