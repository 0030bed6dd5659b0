"""How programs are shut in on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field

NAMESPACES, LANDLOCK, CHROOT, LIMITS = "namespaces", "landlock", "chroot", "limits"
WAYS = (NAMESPACES, LANDLOCK, CHROOT, LIMITS)
"""How programs are shut in, the best first."""


@dataclass
class Way:
    """How this keeper shuts programs in.

    Attributes:
        name: one of `WAYS`.
        own: namespaces: what `namespaces.fork_inside` needs.
        filtered: system calls are filtered.
        processes: what has to be added to `Limits.processes` for RLIMIT_NPROC; None: a program may start none.
        readable: landlock: files and folders.
        guards: what is guarded -> by what.
    """

    name: str
    own: int = -1
    filtered: bool = False
    processes: int | None = None
    readable: list[str] = field(default_factory=list)
    guards: dict[str, str] = field(default_factory=dict)
