"""`fencepost proxy` that updates the keys of TLS connections after `$KEY_BYTES` bytes, not 64 GiB:
`python -m tests.support.short_keys`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from fencepost_proxy.cli.main import main
from fencepost_proxy.transport.native_tls import NativeTlsSocket
from tests.support.mutants import Mutant, wrap


def with_short_keys(make: Callable[..., None], self: NativeTlsSocket, *of: Any) -> None:
    make(self, *of)
    assert self.native is not None
    self.native.key_bytes_max = int(os.environ["KEY_BYTES"])


if __name__ == "__main__":
    with Mutant("short keys", "see the module", (), wrap(NativeTlsSocket, "__init__", with_short_keys)).live():
        sys.exit(main())
