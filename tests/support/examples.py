"""Hypothesis's settings for all tests.

No deadline, because the machine may be busy. The examples are the same on each run, so that a change is not blamed for
a random find. `make fuzz` draws others.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "busy",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize="FENCEPOST_EXAMPLES" not in os.environ,
    max_examples=int(os.environ.get("FENCEPOST_EXAMPLES", "100")),
)
settings.load_profile("busy")
