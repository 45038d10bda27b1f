"""Limits on open files."""

from __future__ import annotations

import resource


def allow_open_files(count: int) -> int:
    """Raise the soft limit of this process and its children as far as the hard limit permits. Return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    requested = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < requested:
        resource.setrlimit(resource.RLIMIT_NOFILE, (requested, hard))
        soft = requested
    return count if soft == resource.RLIM_INFINITY else soft
