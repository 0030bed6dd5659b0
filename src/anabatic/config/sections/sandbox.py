"""Where programs of a model are run."""

from __future__ import annotations

from dataclasses import dataclass

from anabatic.config.sections.common import require_setting
from anabatic.sandbox.limits import ResourceLimits


@dataclass(kw_only=True)
class SandboxSettings:
    """What a program that a model has written may use."""

    seconds: float = 5.0
    """Wall time of a program; as much processor time, rounded up."""
    memory_mib: int = 512
    """Address space of each of its processes; an interpreter takes about 30 MiB."""
    processes: int = 16
    """Its processes and threads at once."""
    workers: int = 1
    """Programs at once."""
    allow_weaker: bool = False
    """Run programs even where this machine cannot keep them from files or network (`anabatic doctor` tells)."""

    def __post_init__(self) -> None:
        require_setting(self.workers >= 1, f"sandbox.workers is {self.workers}", "use 1 or more")
        self.to_sandbox_limits()

    def to_sandbox_limits(self) -> ResourceLimits:
        """Return them as the sandbox takes them.

        Raises:
            ConfigError: one is too small.
        """
        cpu = max(1, -int(-self.seconds // 1))
        return ResourceLimits(
            seconds=self.seconds, cpu_seconds=cpu, memory_mib=self.memory_mib, processes=self.processes
        )
