"""acks=0: no answers, and an error closes the connection."""

from fencepost_proxy.preflight.conformance.driver import Settings
from tests.contract.rows import NO_SESSION, appended, batch, row, send

WITHOUT = NO_SESSION
ROWS = [
    *(
        row(f"{name}-closes-the-connection", topic, send(records, acks=0, closes=True), length=1, **more)
        for name, topic, records, more in (
            ("an-expectation", "checked", batch(b"x", expected=1), {}),
            ("a-refusal", "required", batch(b"x"), {}),
            ("an-error-of-kafka", "checked", batch(b"x" * 2000), {"settings": Settings(max_message_bytes=1000)}),
            ("a-missing-producer-id", "idempotent", batch(b"x"), {}),
            ("a-stale-partition-count", "counted", batch(b"x", count=3), {}),
        )
    ),
    row(
        "without-expectation-it-is-appended",
        "checked",
        send(batch(b"a"), appended(1), acks=0),
        send(batch(b"b"), appended(2), acks=0),
        send(batch(b"c", expected=3), appended(3)),  # the next answer is that of the next request with acks
        length=1,
    ),
]
