"""How hard the property tests try: a few examples in the test suite, the same each time; many others by `make fuzz`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_EXAMPLES = int(os.environ.get("FENCEPOST_EXAMPLES", "40"))

#: Without a deadline: a machine may be busy with something else.
some = settings(max_examples=_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
