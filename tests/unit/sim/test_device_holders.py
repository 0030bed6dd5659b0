"""Who holds a simulated device: processes that live."""

from __future__ import annotations

import os
import subprocess

import psutil
import pytest

from anabatic.bench import training_probe
from anabatic.core import process_info

pytestmark = pytest.mark.process


def test_one_that_has_ended_holds_nothing_even_if_nobody_waits_for_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        started = process_info.read_start_time(process.pid)
        known = psutil.Process(process.pid)
        assert process_info.is_alive(process.pid, started) and not training_probe._has_exited(known)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
        assert not process_info.is_alive(process.pid, started) and training_probe._has_exited(known)
        process.wait()
        assert process_info.read_start_time(process.pid) == 0 and training_probe._has_exited(known)
