"""The limit of open files of this process: a connection to each of many machines needs more than the usual 1,024."""

from __future__ import annotations

import resource


def allow_open_files(count: int) -> int:
    """Raise the limit to `count`, as far as the system lets this process; never lower it. Return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft == resource.RLIM_INFINITY:
        return count
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
