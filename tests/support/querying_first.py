"""`fencepost proxy` that queries the broker with the address `$FIRST` first what any broker can answer:
`python -m tests.support.querying_first`.

Without it, that depends on which of the proxy's connections are open.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from fencepost_proxy.cli.main import main
from fencepost_proxy.cluster.broker import PooledConnection
from fencepost_proxy.cluster.pool import ConnectionPool
from tests.support.mutants import Mutant, wrap


def first_to_any(to_any: Callable[..., list[PooledConnection]], self: ConnectionPool) -> list[PooledConnection]:
    return sorted(to_any(self), key=lambda each: str(each.address) != os.environ["FIRST"])


if __name__ == "__main__":
    with Mutant("querying first", "see the module", (), wrap(ConnectionPool, "to_any", first_to_any)).live():
        sys.exit(main())
