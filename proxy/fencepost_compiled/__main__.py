"""`python -m fencepost_compiled`: says whether the compiled build is what runs, and why not."""

from __future__ import annotations

import fencepost_compiled

fencepost_compiled.use()
why = fencepost_compiled.why()
print(fencepost_compiled.what_runs() + (f": {why}" if why else ""))
