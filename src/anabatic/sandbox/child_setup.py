"""The first steps of the process that a program gets: everything is given up before a line of it runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from anabatic.sandbox import joint_process, program_process, test_process
from anabatic.sandbox.isolation import landlock, namespaces, seccomp, syscalls
from anabatic.sandbox.isolation.modes import CHROOT, LANDLOCK, NAMESPACES, IsolationState
from anabatic.sandbox.limits import ResourceLimits

_REPORT_FD, _SETUP_FD, _SOURCE_FD, _SINK_FD = 3, 4, 5, 6
"""The second one is closed before a line of the program runs: what it says, no program has said."""
_HIGH_FD, _MAX_FDS = 1000, 1024
_READING_DEPTH = 10_000
"""Calls in each other while a program is read: a chain of 400 `elif` is a tree of that depth."""


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
        message: `source`, `files`; `part`, where it is judged: `joint` (with `tests`, `helpers`, `prefer_program`) or
            `ordinary` (with `tests`), `program` or `tests` (with `helpers`).
        handles: stdin, stdout, stderr, the report, how the start went; where it is judged in two parts, those to and
            from the other one.
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
        _tell_start({"failed": str(error) or type(error).__name__})
        os._exit(1)
    source, part = message["source"], message.get("part")
    if part == "joint":
        _run_joint(message, nonce)
    _tell_start({})
    if part == "ordinary":
        program_process.run_program(
            source, _REPORT_FD, nonce, None, joint_process.run_in_one_namespace(message["tests"])
        )
    if part == "tests":
        before = test_process.prepare_tests(message["helpers"], source, _SOURCE_FD, _SINK_FD)
        program_process.run_program(source, _REPORT_FD, nonce, before)
    after = test_process.serve_program(_SOURCE_FD, _SINK_FD) if part == "program" else None
    program_process.run_program(source, _REPORT_FD, nonce, None, after)


def _tell_start(facts: dict[str, Any]) -> None:
    os.write(_SETUP_FD, json.dumps(facts).encode())
    os.close(_SETUP_FD)


def _run_joint(message: dict[str, Any], nonce: bytes) -> NoReturn:
    source = message["source"]
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(_READING_DEPTH)
        run = joint_process.JointRun(source, message["tests"], message["helpers"], message["prefer_program"])
    except Exception as error:  # the program is no Python: it ends with that error
        failure = error
        _tell_start({"reaches": ["its own syntax"]})

        def raise_failure(scope: program_process.ProgramScope) -> None:
            raise failure

        program_process.run_program("", _REPORT_FD, nonce, raise_failure)
    finally:
        sys.setrecursionlimit(limit)
    _tell_start({"reaches": run.reaches, "shares": run.shares})
    program_process.run_program(source, _REPORT_FD, nonce, run.prepare_scope, run.run_tests, run.program)


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
    os.closerange(_SETUP_FD, _SINK_FD + 1)
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
    if way.mode == CHROOT:
        syscalls.allow_inspection()
    syscalls.drop_capabilities()
    syscalls.forbid_new_privileges()
    if way.mode != NAMESPACES:
        syscalls.die_with_parent()
    if way.mode == LANDLOCK:
        assert folder is not None
        landlock.confine_process(folder, way.readable_paths, landlock.list_devices())
    if way.has_seccomp:
        syscalls.install_filter(seccomp.build_filter(os.getpid() if way.extra_processes is None else None))
