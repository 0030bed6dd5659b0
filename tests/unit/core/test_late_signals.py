"""A signal that arrives after the last bytecode before a system call: its handler must not wait for the call's end."""

from __future__ import annotations

import ctypes
import itertools
import operator
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from anabatic.core.process_info import wait_for_exit
from anabatic.launch.hosts import remote_agent
from anabatic_sim import supervisor

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="operator.call is of Python 3.11"),
]
RAISE_SIGNAL = ctypes.CDLL(None)["raise"]
"""raise(3) of the C library: unlike `signal.raise_signal`, it runs no Python handler before it returns."""


def signal_before(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with SIGUSR1 just before the first call: no bytecode lies between the two."""
    is_first = iter([True])

    def call(*arguments: Any) -> Any:
        if next(is_first, False):
            return list(itertools.starmap(operator.call, [(RAISE_SIGNAL, signal.SIGUSR1), (function, *arguments)]))[-1]
        return function(*arguments)

    return call


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A child that SIGUSR1 to us ends; by itself it runs for a minute."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        before = signal.signal(signal.SIGUSR1, lambda number, frame: process.terminate())
        yield process
        signal.signal(signal.SIGUSR1, before)
        process.kill()


@pytest.mark.parametrize("wait", [wait_for_exit, remote_agent._wait_for_exit])
def test_waiting_for_a_child(
    child: subprocess.Popen[bytes], wait: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "waitpid", signal_before(os.waitpid))
    assert wait(child) == -signal.SIGTERM


def test_the_supervisor_of_a_simulation(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    monkeypatch.setattr(select, "select", signal_before(select.select))
    assert supervisor._wait_for_exit(child, ours) == -signal.SIGTERM
    os.close(ours)
    os.close(theirs)
