"""The command's exit code and signal pass through, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anabatic.core import process_info
from anabatic_sim import shared_memory
from npu_sim.conftest import CACHE, Sim


def test_exit_code_and_output(sim: Sim) -> None:
    done = sim.command("sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout) == (7, "out\n")
    assert done.stderr.endswith("err\n")


def test_the_signal_of_the_command(sim: Sim) -> None:
    assert sim.command("sh", "-c", "kill -SEGV $$").returncode == -signal.SIGSEGV
    assert sim.command("sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL


def test_no_such_program(sim: Sim) -> None:
    done = sim.command("no-such-program")
    assert done.returncode == 2
    assert 'error: there is no program "no-such-program"' in done.stderr


def test_a_file_that_is_no_program(sim: Sim) -> None:
    (sim.folder / "run.sh").write_text("echo ran")
    done = sim.command("./run.sh")
    assert done.returncode == 2
    assert "error: ./run.sh is not executable" in done.stderr


def test_no_command(sim: Sim) -> None:
    done = subprocess.run([sys.executable, "-m", "anabatic", "sim"], capture_output=True, text=True, cwd=sim.folder)
    assert done.returncode == 2
    assert "error: which command?" in done.stderr


def test_not_inside_itself(sim: Sim) -> None:
    done = sim.command(sys.executable, "-m", "anabatic", "sim", "--", "true")
    assert done.returncode == 2
    assert "already runs inside a simulation" in done.stderr


def test_options_of_the_command_stay_its_own(sim: Sim) -> None:
    assert sim.command("echo", "--debug", "-x", "--npus", "3").stdout == "--debug -x --npus 3\n"


class Started:
    """`anabatic sim` under way, after the first line of its command."""

    def __init__(self, sim: Sim, script: str, **options: bool) -> None:
        line = [sys.executable, "-m", "anabatic", "sim", "--", "sh", "-c", script]
        environment = {**os.environ, "ANABATIC_CACHE": str(CACHE)}
        self.process = subprocess.Popen(
            line, stdout=subprocess.PIPE, text=True, env=environment, cwd=sim.folder, **options
        )
        assert self.process.stdout is not None
        self.first = self.process.stdout.readline().strip()
        self.machine = f"{shared_memory.SHM_PREFIX}{self.process.pid}"

    def wait(self) -> int:
        """Return the exit code."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        try:
            return self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its command would run beside all later tests
            self.process.wait()
            raise


def soon(condition: Callable[[], bool]) -> bool:
    """True when it comes true within a minute."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def gone(pid: int) -> bool:
    """True when the process is over soon."""
    return soon(lambda: process_info.read_start_time(pid) == 0)


def test_killed_from_outside(sim: Sim) -> None:
    run = Started(sim, "sleep 300 & echo $! $$; wait")
    sleeper, shell = map(int, run.first.split())
    assert run.machine in shared_memory.list_machine_names()
    run.process.kill()
    run.wait()
    assert gone(sleeper) and gone(shell)
    assert soon(lambda: run.machine not in shared_memory.list_machine_names())


def _supervisor(run: Started) -> int:
    text = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text()
    return int(text.split()[0])


@pytest.mark.parametrize("both", [False, True])
def test_all_of_our_processes_are_killed(sim: Sim, both: bool) -> None:
    """As by `pkill -9 -f "anabatic sim"`: the supervisor dies, too."""
    run = Started(sim, "sleep 300 & echo $! $$; wait")
    sleeper, shell = map(int, run.first.split())
    try:
        os.kill(_supervisor(run), signal.SIGSTOP if both else signal.SIGKILL)
        if both:
            supervisor = _supervisor(run)
            run.process.kill()
            os.kill(supervisor, signal.SIGKILL)
        code = run.wait()
        assert code == (-signal.SIGKILL if both else 128 + signal.SIGKILL)
        assert gone(shell)
        assert both or (gone(sleeper) and run.machine not in shared_memory.list_machine_names())
    finally:
        for pid in (sleeper, shell):
            if process_info.read_start_time(pid):
                os.kill(pid, signal.SIGKILL)
        shared_memory.remove_segment(run.machine)


def test_a_signal_reaches_the_command(sim: Sim) -> None:
    run = Started(sim, "trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done")
    run.process.terminate()
    assert run.wait() == 5
    assert run.machine not in shared_memory.list_machine_names()


def test_orphans_of_the_command_end_with_it(sim: Sim) -> None:
    done = sim.command("sh", "-c", "nohup sleep 300 >/dev/null 2>&1 & echo $!")
    assert gone(int(done.stdout))


def test_two_at_once(sim: Sim) -> None:
    both = [Started(sim, "echo $ANABATIC_SIM_SEGMENT; sleep 0.5") for _ in range(2)]
    assert len({run.first for run in both}) == 2
    assert [run.wait() for run in both] == [0, 0]


def test_status_and_clean(sim: Sim) -> None:
    run = Started(sim, "echo ready; sleep 300")
    dead = Path("/dev/shm") / f"{shared_memory.SHM_PREFIX}{2**22 - 1}"
    dead.write_bytes(b"\0" * 8)
    try:
        words = [sys.executable, "-m", "anabatic", "sim"]
        done = subprocess.run([*words, "status"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told = done.stdout
        assert f"{run.machine}  1 x Ascend910B3" in told
        assert f"{dead.name}  left behind" in told
        cleaned = subprocess.run([*words, "clean"], capture_output=True, text=True).stdout
        assert cleaned.startswith("removed 1 machine")
        assert not dead.exists()
        assert run.machine in shared_memory.list_machine_names()
        refused = subprocess.run([*words, "clean", "--builds"], capture_output=True, text=True)
        assert refused.returncode == 2 and "error: " in refused.stderr and run.machine in refused.stderr
    finally:
        dead.unlink(missing_ok=True)
        run.process.terminate()
        run.wait()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--npus", "0"], "--npus is 0"),
        (["--npus", "1.5"], '--npus is "1.5", expected a whole number'),
        (["--npus", "x"], '--npus is "x", expected a whole number'),
        (["--chip", "910B"], "old 30-core chip"),
    ],
)
def test_bad_flags(sim: Sim, flags: list[str], message: str) -> None:
    done = sim.command("true", flags=flags)
    assert done.returncode == 2
    assert message in done.stderr


def test_an_interrupt_sent_to_us_alone_is_passed_on_and_ctrl_c_is_not_doubled(sim: Sim) -> None:
    """The terminal sends Ctrl-C to the whole group; `kill -INT` and schedulers send it to one process."""
    count = (
        "trap 'n=$((n+1))' INT; n=0; echo ready; while [ $n = 0 ]; do sleep 0.1; done; "
        "for i in 1 2 3 4 5 6; do sleep 0.2; done; exit $((10 + n))"
    )
    alone = Started(sim, count)
    alone.process.send_signal(signal.SIGINT)
    assert alone.wait() == 11
    group = Started(sim, count, start_new_session=True)
    os.killpg(group.process.pid, signal.SIGINT)
    assert group.wait() == 11
