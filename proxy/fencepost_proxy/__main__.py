"""`python -m fencepost_proxy` is the `fencepost` command."""

from __future__ import annotations

import sys

from fencepost_proxy.cli.main import main

sys.exit(main())
