"""Room for many sockets."""

from __future__ import annotations

import resource


def allow_open_files(count: int) -> int:
    """Raises the soft limit of this process, and of those it starts, as far as the hard one lets it. What it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return count if soft == resource.RLIM_INFINITY else soft
