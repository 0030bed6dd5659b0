"""Resource limits of a program, and the outcome of its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from anabatic.core.errors import ConfigError
from anabatic.core.formatting import format_count

ProgramStatus = Literal["ok", "error", "timeout", "memory", "output", "files", "unjudged"]
"""End of a program: with exit code 0; otherwise by itself; out of time, of memory; it wrote too much, to stdout or
stderr, or to files; nobody can tell whether it is right."""
MIB = 2**20
_MINIMUMS: dict[str, float] = {
    "seconds": 0.01, "cpu_seconds": 1, "memory_mib": 64, "file_mib": 1, "output_bytes": 1, "open_files": 16,
    "processes": 1,
}  # fmt: skip


@dataclass(frozen=True)
class ResourceLimits:
    """Resource limits of one program.

    Attributes:
        seconds: wall time.
        cpu_seconds: processor time of one process, whole seconds.
        memory_mib: address space of one process; an interpreter alone takes about 30 MiB of it. Also what all its
            processes hold, socket buffers included.
        file_mib: size of its folder, held in memory; without namespaces, of all that it writes to files.
        output_bytes: of stdout and of stderr; a program that writes more is ended.
        open_files: of one process.
        processes: processes and threads at once, the program itself included.
    """

    seconds: float = 10.0
    cpu_seconds: int = 10
    memory_mib: int = 512
    file_mib: int = 64
    output_bytes: int = 256 * 1024
    open_files: int = 64
    processes: int = 16

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUMS.items():
            value = getattr(self, name)
            if not minimum <= value < 2**31:
                raise ConfigError(f"the sandbox's {name} is {value}", f"use {minimum} or more, less than 2^31")


@dataclass(frozen=True)
class ProgramOutcome:
    """Result of a program.

    Attributes:
        status: how it ended.
        finished: its last line was reached, it says; False after an exception, `sys.exit` or `os._exit`. A program
            that wants to deceive can say so at any line: only `passed` is proof.
        stdout, stderr: what it wrote, as UTF-8, cut at the limit.
        written: bytes of stdout and stderr that were read, before the cut.
        code: its exit code; 128 + the signal that ended it (137: it was killed from outside, as by a limit).
        seconds: wall time; cpu_seconds: processor time of all its processes.
        peak_mib: the largest resident memory of one of its processes.
        passed: its tests were run to their last line, and it could not, or did not, decide that itself
            (`Sandbox.check_program`).
        reaches: what it reaches for that its solution does not need, where it was judged.
        shares: it has names in common with its tests, where it was judged.
        test_report: what its process says of tests that have passed.
    """

    status: ProgramStatus
    finished: bool
    stdout: str
    stderr: str
    written: int
    code: int
    seconds: float
    cpu_seconds: float
    peak_mib: float
    passed: bool = False
    reaches: Sequence[str] = ()
    shares: bool = False
    test_report: str = ""

    @property
    def is_ok(self) -> bool:
        """True when it ended with exit code 0."""
        return self.status == "ok"

    @property
    def is_judged(self) -> bool:
        """False when it cannot be told whether it is right: such an answer counts neither as right nor as wrong."""
        return self.status != "unjudged"

    def describe_end(self, limits: ResourceLimits) -> str:
        """Say in a few words how it ended."""
        last = self.stderr.strip().splitlines()[-1:]
        words: dict[str, Any] = {
            "ok": "ended well" if self.finished else "left before its last line",
            "error": last[0] if last else f"exit code {self.code}",
            "timeout": f"not done after {limits.seconds:g} s, or {limits.cpu_seconds} s of processor time",
            "memory": f"more than {limits.memory_mib} MiB of memory",
            "output": f"wrote more than {format_count(limits.output_bytes)} bytes",
            "files": f"wrote more than {limits.file_mib} MiB to files",
            "unjudged": f"cannot be judged: {'; '.join(self.reaches)}",
        }
        return str(words[self.status])
