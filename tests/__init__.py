"""What is tested are the sources, also where a compiled build of them lies: `make test-compiled` asks for that one."""

import os

os.environ.setdefault("FENCEPOST_COMPILED", "0")
