"""Room for many sockets."""

from __future__ import annotations

import resource


def allow_open_files(count: int) -> int:
    """Raises the soft limit of this process, and of those it starts, as far as the hard one lets it. What it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    requested = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < requested:
        resource.setrlimit(resource.RLIMIT_NOFILE, (requested, hard))
        soft = requested
    return count if soft == resource.RLIM_INFINITY else soft
