"""What a signal means, by its kind and its time; what a process does with one before and after it can save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anabatic.core import relaunch
from anabatic.core.stop_signals import (
    FIRST_SIGNAL,
    REPEATED_SIGNAL,
    SECOND_SIGINT_SECONDS,
    STOP_NOW,
    SignalListener,
    StopRequest,
)

TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def test_only_a_later_second_interrupt_ends_at_once() -> None:
    clock = Clock()
    wish = StopRequest(now=clock)
    assert [wish.classify_signal(number) for number in (TERM, TERM, USR1, HUP, INT, INT)] == [
        FIRST_SIGNAL,
        *[REPEATED_SIGNAL] * 5,
    ]
    clock.time = SECOND_SIGINT_SECONDS - 0.1
    assert wish.classify_signal(INT) == REPEATED_SIGNAL
    clock.time = 100 * SECOND_SIGINT_SECONDS
    assert [wish.classify_signal(number) for number in (TERM, HUP, USR1)] == [REPEATED_SIGNAL] * 3
    assert wish.classify_signal(INT) == STOP_NOW and wish.first_signal == TERM


def test_whoever_is_supervised_never_ends_at_once() -> None:
    clock = Clock()
    wish = StopRequest(supervised=True, now=clock)
    assert wish.classify_signal(INT) == FIRST_SIGNAL
    clock.time = 100.0
    assert wish.classify_signal(INT) == REPEATED_SIGNAL and wish.first_signal == INT


def test_what_can_be_saved_is_not_ended() -> None:
    before = [signal.getsignal(number) for number in (TERM, INT, HUP, USR1)]
    told: list[int] = []
    with SignalListener().defer_signals(told.append):
        for number in (USR1, TERM, TERM, HUP, INT, INT):
            signal.raise_signal(number)
    assert told == [USR1]
    assert [signal.getsignal(number) for number in (TERM, INT, HUP, USR1)] == before


PROGRAM = """
import sys, time
from anabatic.cli import app
from anabatic.core import log
from anabatic.core.stop_signals import SIGNAL_LISTENER

def work():
    SIGNAL_LISTENER.start_listening()
    print("starts", flush=True)
    if {how!r} == "starts":
        time.sleep(60)
    if {how!r} == "library":
        import ctypes
        library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        for _ in range(2):  # it waits for itself, in C, where no handler of Python's runs
            library.pthread_mutex_lock(mutex)
    told = []
    with SIGNAL_LISTENER.defer_signals(told.append):
        print("trains", flush=True)
        while not told:
            time.sleep(0.01)
    print("finishes", flush=True)
    time.sleep(0.5)
    print("finished", told, flush=True)
    return 143

log.setup_logging()
sys.exit(app.run_with_error_report(work, False))
"""


def begin(tmp_path: Path, how: str) -> subprocess.Popen[str]:
    program = PROGRAM.format(how=how)
    variables = {**os.environ, "RANK": "0"}
    variables.pop(relaunch.REPORTS_VARIABLE, None)
    if how == "reports":
        variables[relaunch.REPORTS_VARIABLE] = str(tmp_path)
    return subprocess.Popen(
        [sys.executable, "-c", program], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    while (read := process.stdout.readline().strip()) != line:
        assert read, process.communicate()[1]


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(TERM, 143), (USR1, 143), (HUP, 143), (INT, 130)])
def test_before_there_is_anything_to_save_it_ends(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = begin(tmp_path, "starts")
    until(process, "starts")
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert err == (
        "\ninterrupted\n" if code == 130 else f"{number.name} before the first step: there is nothing to save\n"
    )


@pytest.mark.process
def test_afterwards_it_comes_to_its_own_end(tmp_path: Path) -> None:
    process = begin(tmp_path, "reports")
    until(process, "trains")
    for _ in range(3):
        process.send_signal(TERM)
    until(process, "finishes")
    for number in (TERM, HUP, USR1, INT, INT):
        process.send_signal(number)
        time.sleep(0.02)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (143, "finished [15]\n", "")
    assert (tmp_path / "rank-0.code").read_text() == "143"


@pytest.mark.process
def test_a_library_that_keeps_the_process_is_not_waited_for(tmp_path: Path) -> None:
    process = begin(tmp_path, "library")
    until(process, "starts")
    process.send_signal(TERM)
    process.communicate(timeout=120)
    assert process.returncode == 143


ENDING = """
import atexit, os, signal, sys
from anabatic.cli import app
from anabatic.core.errors import DataError
from anabatic.core.stop_signals import SIGNAL_LISTENER

class Told(DataError):
    def render(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().render()

def fail():
    raise Told("no corpus", "give one")

SIGNAL_LISTENER.start_listening(watch=False)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
    atexit.register(os.kill, os.getpid(), number)
sys.exit(app.run_with_error_report({call}, False))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("call", "code", "err"),
    [("fail", 2, "error: no corpus\nhint: give one\n"), ("lambda: 143", 143, "")],
    ids=["error", "end"],
)
def test_a_signal_interrupts_neither_an_error_nor_the_end(call: str, code: int, err: str) -> None:
    """A launcher ends the others by SIGTERM when one fails, and a scheduler signals all, whose workers have stopped."""
    program = ENDING.replace("{call}", call)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (code, err)
