"""Settings of the property tests: a few fixed examples in the test suite; `make fuzz` draws many others."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_EXAMPLES = int(os.environ.get("FENCEPOST_EXAMPLES", "40"))

#: No deadline, because the machine may be busy.
some = settings(max_examples=_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
