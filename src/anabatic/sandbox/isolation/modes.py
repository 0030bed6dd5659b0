"""Isolation modes for programs."""

from __future__ import annotations

from dataclasses import dataclass, field

NAMESPACES, LANDLOCK, CHROOT, LIMITS = "namespaces", "landlock", "chroot", "limits"
ISOLATION_MODES = (NAMESPACES, LANDLOCK, CHROOT, LIMITS)
"""Isolation modes, the strongest first."""


@dataclass
class IsolationState:
    """Isolation of this zygote's programs.

    Attributes:
        mode: one of `ISOLATION_MODES`.
        namespace_fd: namespaces: what `namespaces.fork_into_namespace` needs.
        has_seccomp: system calls are filtered.
        extra_processes: added to `ResourceLimits.processes` for RLIMIT_NPROC; None: a program may start none.
        readable_paths: landlock: files and folders.
        counts_files: what a program writes to files is counted.
        guards: what is guarded -> by what.
    """

    mode: str
    namespace_fd: int = -1
    has_seccomp: bool = False
    extra_processes: int | None = None
    readable_paths: list[str] = field(default_factory=list)
    counts_files: bool = False
    guards: dict[str, str] = field(default_factory=dict)
