"""With this directory in PYTHONPATH, every worker process of a proxy dies, or stands still, as `dying_proxy` says."""

import os
import sys
from pathlib import Path

if "STOP_AT" in os.environ:
    sys.path.append(str(Path(__file__).parents[3]))
    import tests.support.dying_proxy  # noqa: F401
