"""The first steps of the process that a program gets: everything is given up before a line of it runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn

from anabatic.sandbox import judge, landlock, namespaces, places, program, seccomp, system
from anabatic.sandbox.limits import Limits
from anabatic.sandbox.way import CHROOT, LANDLOCK, NAMESPACES, Way

_REPORT, _SOURCE, _SINK = 3, 4, 5
_HIGH, _MOST_FILES = 1000, 1024


def begin(
    way: Way, limits: Limits, message: dict[str, Any], handles: Sequence[int], nonce: bytes, folder: str | None
) -> NoReturn:
    """Run the program of a message in this process, which was just forked; never return.

    Args:
        way: how it is shut in.
        limits: what it may use.
        message: `source`, `files`; `part`, where it is judged: `program` or `tests` (with `helpers`).
        handles: stdin, stdout, stderr, the report; where it is judged, those to and from its other part.
        nonce: what the report says when the last line was reached.
        folder: its own, where the way gives it none.
    """
    try:
        stdin, stdout, stderr, *others = (os.dup(handle) for handle in handles)
        program.open_standard_files(stdin, stdout, stderr)
        # Above every number that stays: dup2 would close what stands at 3 before it is copied.
        high = [os.dup2(handle, _HIGH + place) for place, handle in enumerate(others)]
        for place, handle in enumerate(high):
            os.dup2(handle, _REPORT + place, inheritable=False)
        os.closerange(_REPORT + len(others), _MOST_FILES)
        if way.name == NAMESPACES:
            _lead(limits)
        else:
            assert folder is not None
            os.chdir(folder)
            if way.name == CHROOT:
                os.chroot(folder)
        _give_up(way, limits, folder)
        program.write_files(message["files"])
    except BaseException as error:  # nothing may return from here into the keeper's own loop
        os.write(_REPORT, nonce + program.FAILED + (str(error) or type(error).__name__).encode())
        os._exit(1)
    part = message.get("part")
    before = judge.prepare_tests(message["helpers"], message["source"], _SOURCE, _SINK) if part == "tests" else None
    after = judge.serve_program(_SOURCE, _SINK) if part == "program" else None
    program.run(message["source"], _REPORT, nonce, before, after)


def _lead(limits: Limits) -> None:
    """Return in the process that the program gets; this one only waits for it: with it everything else ends.

    The first process of a namespace receives no signal that it does not handle: no place for a program.
    """
    system.die_with_parent()
    namespaces.give_folder(limits.file_mib)
    child = os.fork()
    if child == 0:
        return
    system.forbid_inspection()
    os.closerange(0, _REPORT)
    os.closerange(_SOURCE, _SINK + 1)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)


def _give_up(way: Way, limits: Limits, folder: str | None) -> None:
    program.limit(limits, None if way.processes is None else limits.processes + way.processes)
    if way.name in (NAMESPACES, CHROOT):
        namespaces.become_nobody()
    system.drop_capabilities()
    system.no_new_privileges()
    if way.name != NAMESPACES:
        system.die_with_parent()
    if way.name == LANDLOCK:
        assert folder is not None
        landlock.confine(folder, way.readable, places.devices())
    if way.filtered:
        system.install_filter(seccomp.program(os.getpid() if way.processes is None else None))
