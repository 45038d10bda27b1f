"""`python -m fencepost_compiled`: says whether the compiled build is what runs, and why not."""

from __future__ import annotations

import fencepost_compiled

fencepost_compiled.use()
print("compiled" if fencepost_compiled.compiled() else f"pure Python: {fencepost_compiled.why()}")
