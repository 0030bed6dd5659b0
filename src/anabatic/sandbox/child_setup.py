"""The first steps of the process that a program gets: everything is given up before a line of it runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn

from anabatic.sandbox import program_process, test_process
from anabatic.sandbox.isolation import landlock, namespaces, seccomp, syscalls
from anabatic.sandbox.isolation.modes import CHROOT, LANDLOCK, NAMESPACES, IsolationState
from anabatic.sandbox.limits import ResourceLimits

_REPORT_FD, _SOURCE_FD, _SINK_FD = 3, 4, 5
_HIGH_FD, _MAX_FDS = 1000, 1024


def start_program(
    way: IsolationState,
    limits: ResourceLimits,
    message: dict[str, Any],
    handles: Sequence[int],
    nonce: bytes,
    folder: str | None,
) -> NoReturn:
    """Run the program of a message in this process, which was just forked; never return.

    Args:
        way: how it is isolated.
        limits: what it may use.
        message: `source`, `files`; `part`, where it is judged: `program` or `tests` (with `helpers`).
        handles: stdin, stdout, stderr, the report; where it is judged, those to and from its other part.
        nonce: what the report says when the last line was reached.
        folder: its own, where the way gives it none.
    """
    try:
        stdin, stdout, stderr, *others = (os.dup(handle) for handle in handles)
        program_process.open_standard_files(stdin, stdout, stderr)
        # Above every number that stays: dup2 would close what stands at 3 before it is copied.
        high = [os.dup2(handle, _HIGH_FD + place) for place, handle in enumerate(others)]
        for place, handle in enumerate(high):
            os.dup2(handle, _REPORT_FD + place, inheritable=False)
        os.closerange(_REPORT_FD + len(others), _MAX_FDS)
        if way.mode == NAMESPACES:
            _fork_program(limits)
        else:
            assert folder is not None
            os.chdir(folder)
            if way.mode == CHROOT:
                os.chroot(folder)
        _drop_privileges(way, limits, folder)
        program_process.write_files(message["files"])
    except BaseException as error:  # nothing may return from here into the zygote's own loop
        os.write(_REPORT_FD, nonce + program_process.START_FAILED + (str(error) or type(error).__name__).encode())
        os._exit(1)
    part = message.get("part")
    before = (
        test_process.prepare_tests(message["helpers"], message["source"], _SOURCE_FD, _SINK_FD)
        if part == "tests"
        else None
    )
    after = test_process.serve_program(_SOURCE_FD, _SINK_FD) if part == "program" else None
    program_process.run_program(message["source"], _REPORT_FD, nonce, before, after)


def _fork_program(limits: ResourceLimits) -> None:
    """Return in the process that the program gets; this one only waits for it: with it everything else ends.

    The first process of a namespace receives no signal that it does not handle: no place for a program.
    """
    syscalls.die_with_parent()
    namespaces.mount_program_folder(limits.file_mib)
    child = os.fork()
    if child == 0:
        return
    syscalls.forbid_inspection()
    os.closerange(0, _REPORT_FD)
    os.closerange(_SOURCE_FD, _SINK_FD + 1)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)


def _drop_privileges(way: IsolationState, limits: ResourceLimits, folder: str | None) -> None:
    program_process.apply_limits(
        limits, None if way.extra_processes is None else limits.processes + way.extra_processes
    )
    if way.mode in (NAMESPACES, CHROOT):
        namespaces.become_nobody()
    syscalls.drop_capabilities()
    syscalls.forbid_new_privileges()
    if way.mode != NAMESPACES:
        syscalls.die_with_parent()
    if way.mode == LANDLOCK:
        assert folder is not None
        landlock.confine_process(folder, way.readable_paths, landlock.list_devices())
    if way.has_seccomp:
        syscalls.install_filter(seccomp.build_filter(os.getpid() if way.extra_processes is None else None))
