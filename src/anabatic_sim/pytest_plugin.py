"""A plugin of pytest: `pytest --npu-sim 2` runs the tests on simulated NPUs; marks and fixtures for tests on NPUs.

The distribution `anabatic-sim` registers it (entry point `pytest11`); elsewhere `-p anabatic_sim.pytest_plugin` does.
torch finds the simulated NPU through variables that must be there when the process starts, so the plugin starts the
same command line again, before conftest files are imported. All but `--npu-sim*` also works on real NPUs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from anabatic.core.errors import AnabaticError
from anabatic.core.formatting import parse_whole
from anabatic_sim import live_machine, pytest_own_simulation
from anabatic_sim.live_machine import LiveMachine
from anabatic_sim.pytest_own_simulation import WORKER_VARIABLE

_MARKERS = (
    "npu(count=1, simulated=None): needs so many NPUs; simulated=True or False: only simulated or only real ones",
    "npu_fault(*faults, npus=None): runs in a process and a simulation of its own with these faults, for example "
    '"oom@0#5" (KIND[@DEVICE][#N][=VALUE])',
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("npu-sim", "simulated Ascend NPUs")
    group.addoption("--npu-sim", type=int, metavar="N", help="run the tests on N simulated NPUs")
    group.addoption("--npu-sim-chip", metavar="CHIP", help="910B1-910B4, 910C, 910A, 310P, 950PR, 950DT (910B3)")
    group.addoption("--npu-sim-hbm", metavar="SIZE", help="memory of each simulated NPU, for example 2GiB")
    group.addoption(
        "--npu-sim-fault",
        action="append",
        default=[],
        metavar="FAULT",
        help="inject a fault for all tests, several times: KIND[@DEVICE][#N][=VALUE]",
    )
    group.addoption("--npu-sim-report", metavar="FILE", help="write counters and predicted times of all tests as JSON")
    parser.addoption(pytest_own_simulation.RESULTS_OPTION, help="internal: where a simulation for one test reports")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, Any, Any]:
    """Start again on simulated NPUs: before conftest files are imported, and before output is captured."""
    options = early_config.known_args_namespace
    if options.npu_sim is None:
        if wrong := [name for name in ("chip", "hbm", "fault", "report") if getattr(options, f"npu_sim_{name}")]:
            raise pytest.UsageError(f"--npu-sim-{wrong[0]} needs --npu-sim N")
    elif not live_machine.is_simulated():
        _start_again(options)
    else:
        with live_machine.attach_machine() as machine:
            if machine.npus < options.npu_sim:
                raise pytest.UsageError(
                    f"--npu-sim {options.npu_sim}: this runs in a simulation of {machine.npus} already"
                )
    return (yield)


def _start_again(options: Any) -> None:
    """Replace this process by a simulation of the same command line; exit code and signals are those of pytest."""
    if sys.flags.ignore_environment:
        raise pytest.UsageError("--npu-sim: python -I and -E hide the simulated NPU from torch; leave them out")
    if len(sys.orig_argv) < 2 or sys.flags.interactive or WORKER_VARIABLE in os.environ:
        raise pytest.UsageError("--npu-sim needs a command line that can be started again")
    flags = ["--npus", str(options.npu_sim)]
    for name in ("chip", "hbm", "report"):
        value = getattr(options, f"npu_sim_{name}")
        flags += [f"--{name}", value] if value else []
    for fault in options.npu_sim_fault:
        flags += ["--fault", fault]
    words = pytest_own_simulation.make_command(flags, [sys.executable, *sys.orig_argv[1:]])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(words[0], words)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks."""
    for line in _MARKERS:
        config.addinivalue_line("markers", line)
    if config.getoption(pytest_own_simulation.RESULTS_DESTINATION):
        config.pluginmanager.register(pytest_own_simulation.ResultWriter(config), "npu-sim-results")


def pytest_report_header() -> list[str]:
    """Say what the NPUs are."""
    if not live_machine.is_simulated():
        return []
    with live_machine.attach_machine() as machine:
        return [f"npu: {machine.npus} x {machine.chip}, simulated"]


def count_npus() -> int:
    """Return how many NPUs torch sees; 0 without torch or torch_npu."""
    if importlib.util.find_spec("torch") is None:
        return 0
    # By name: this package starts without torch.
    npu = getattr(importlib.import_module("torch"), "npu", None)
    return int(npu.device_count()) if npu is not None else 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs other NPUs than those that are here."""
    for mark in item.iter_markers("npu"):
        _check_mark(*mark.args, **mark.kwargs)


def _check_mark(count: int = 1, *, simulated: bool | None = None) -> None:
    there = count_npus()
    if there < count:
        _skip_test(f"needs {count} NPUs, there are {there}; pytest --npu-sim {count} simulates them")
    if simulated is not None and simulated != live_machine.is_simulated():
        _skip_test(f"needs {'simulated' if simulated else 'real'} NPUs")


def _skip_test(reason: str) -> NoReturn:
    raise pytest.skip.Exception(reason, _use_item_location=True)  # the summary names the test, not this line


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run a test with faults in a process and a simulation of its own."""
    faults = [fault for mark in item.iter_markers("npu_fault") for fault in mark.args]
    if not faults or item.config.getoption(pytest_own_simulation.RESULTS_DESTINATION):
        return None
    if not live_machine.is_simulated():
        item.add_marker(pytest.mark.skip(reason="faults need simulated NPUs: pytest --npu-sim 1"))
        return None
    npus = next((mark.kwargs["npus"] for mark in item.iter_markers("npu_fault") if "npus" in mark.kwargs), None)
    pytest_own_simulation.run_test(item, faults, npus)
    return True


@pytest.fixture(scope="session")
def npu_count() -> int:
    """Number of NPUs, 0 where there are none."""
    return count_npus()


@pytest.fixture(scope="session")
def npu_devices(npu_count: int) -> list[str]:
    """All NPUs, `["npu:0", "npu:1"]`; skips where there are none."""
    if npu_count == 0:
        pytest.skip("needs an NPU; pytest --npu-sim 1 simulates one")
    return [f"npu:{index}" for index in range(npu_count)]


@pytest.fixture(scope="session")
def npu_device(npu_devices: list[str]) -> str:
    """One NPU, `npu:0`; processes of pytest-xdist take turns. Skips where there are none."""
    worker = parse_whole(os.environ.get(WORKER_VARIABLE, "gw0").removeprefix("gw")) or 0
    return npu_devices[worker % len(npu_devices)]


@pytest.fixture
def npu_machine() -> Iterator[LiveMachine]:
    """The simulated machine: its counters, and `inject("oom@0#1")` for faults from now on, which end with the test.

    Skips on real NPUs.
    """
    if not live_machine.is_simulated():
        pytest.skip("needs simulated NPUs: pytest --npu-sim 1")
    with live_machine.attach_machine() as machine:
        yield machine
        machine.remove_faults()


@pytest.fixture
def npu_torchrun(npu_count: int) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a script on several NPUs with torchrun and requires that it succeeds.

    `npu_torchrun("train.py", "--steps", "3", nproc=2)`; nproc: default all NPUs. Returns the finished process with its
    output. Skips where there are too few NPUs.
    """

    def launch(
        script: str | Path, *words: str, nproc: int | None = None, timeout: float = 300, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        wanted = nproc or max(npu_count, 1)
        if npu_count < wanted:
            pytest.skip(f"needs {wanted} NPUs, there are {npu_count}; pytest --npu-sim {wanted} simulates them")
        line = _make_torchrun_line(wanted, script, words)
        done = subprocess.run(line, capture_output=True, text=True, timeout=timeout, check=False)
        if check and done.returncode:
            pytest.fail(f"torchrun {script} ended with {done.returncode}:\n{done.stderr[-4000:]}", pytrace=False)
        return done

    return launch


def _make_torchrun_line(count: int, script: str | Path, words: Sequence[str]) -> list[str]:
    head = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    return [*head, str(script), *words]


def pytest_exception_interact(call: pytest.CallInfo[object], report: pytest.TestReport) -> None:
    """Show the hint of our own errors."""
    if call.excinfo and isinstance(call.excinfo.value, AnabaticError) and call.excinfo.value.hint:
        report.sections.append(("hint", call.excinfo.value.hint))
