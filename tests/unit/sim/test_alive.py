"""Who holds a simulated device: processes that live."""

from __future__ import annotations

import os
import subprocess

import psutil

from anabatic.bench import windows
from anabatic.sim import segment


def test_one_that_has_ended_holds_nothing_even_if_nobody_waits_for_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        started = segment.start_time(process.pid)
        known = psutil.Process(process.pid)
        assert segment.alive(process.pid, started) and not windows._gone(known)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
        assert not segment.alive(process.pid, started) and windows._gone(known)
        process.wait()
        assert segment.start_time(process.pid) == 0 and windows._gone(known)
