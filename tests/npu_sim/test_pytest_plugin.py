"""`pytest --npu-sim`: the example project of the guide, marks, fixtures, exit codes, pytest-xdist."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from house import tree
from npu_sim.conftest import CACHE
from pages import blocks

PAGE = tree.ROOT / "docs" / "en" / "guides" / "test-your-project.md"
PYTEST = (sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "anabatic_sim.pytest_plugin")
"""With the plugins that a project of its own has: importing all of this environment's takes longer than the tests."""


@dataclass
class Outcome:
    """How pytest ended, and what became of each test."""

    code: int
    output: str
    tests: dict[str, str]
    """Name -> passed, skipped, failure or error, with the message."""


@dataclass
class Project:
    """A project of somebody else, whose tests run with the plugin."""

    folder: Path

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")

    def pytest(self, *words: str, **variables: str) -> Outcome:
        """Run pytest as its own program."""
        results = self.folder / "results.xml"
        results.unlink(missing_ok=True)
        line = [*PYTEST, f"--junitxml={results}", *words]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("ANABATIC_SIM_", "PYTEST"))}
        outer = {**inherited, "ANABATIC_CACHE": str(CACHE), "PYTHONPATH": str(self.folder), **variables}
        outer["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        done = subprocess.run(line, cwd=self.folder, env=outer, capture_output=True, text=True, timeout=800)
        return Outcome(done.returncode, done.stdout + done.stderr, read_results(results) if results.is_file() else {})


def read_results(path: Path) -> dict[str, str]:
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        inner = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        message = "passed" if inner is None else f"{inner.tag}: {inner.get('message')} {inner.text or ''}"
        found[str(case.get("name"))] = message
    return found


@pytest.fixture
def project(_built: None, tmp_path: Path) -> Project:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return Project(folder)


def test_example_of_the_guide(project: Project) -> None:
    """The files of the page, as the page runs them."""
    written = []
    for block in blocks.blocks(PAGE):
        if block.language == "python":
            name = re.match(r"# (\S+)\n", block.text)
            assert name, block.name
            project.write(name[1], block.text)
            written.append(name[1])
    assert written == ["scale.py", "tests/all_reduce.py", "tests/test_npu.py"]
    done = project.pytest("--npu-sim", "2")
    assert done.code == 0, done.output
    assert done.tests.pop("test_a_whole_cluster").startswith("skipped: needs 64 NPUs, there are 2")
    assert set(done.tests.values()) == {"passed"} and len(done.tests) == 5, done.output
    assert "npu: 2 x Ascend910B3, simulated" in done.output
    # The same tests where no NPU is: what needs one is skipped.
    done = project.pytest()
    assert done.code == 0 and {text.partition(":")[0] for text in done.tests.values()} == {"skipped"}, done.output


def test_exit_codes_are_those_of_pytest(project: Project) -> None:
    project.write(
        "test_codes.py",
        """
        import os, signal

        def test_good(): pass
        def test_bad(): assert 1 == 2
        def test_killed(): os.kill(os.getpid(), signal.SIGTERM)
        """,
    )
    assert project.pytest("--npu-sim", "1", "-k", "good").code == 0
    assert project.pytest("--npu-sim", "1", "-k", "bad").code == 1
    assert project.pytest("--npu-sim", "1", "-k", "nothing").code == 5
    assert project.pytest("--npu-sim", "1", "-k", "killed").code == -signal.SIGTERM
    wrong = project.pytest("--npu-sim", "1", "--npu-sim-chip", "910X")
    assert wrong.code == 2 and 'error: --chip is "910X"' in wrong.output
    assert project.pytest("--npu-sim-chip", "910A").code == 4
    # A setting of the project does the same as the option.
    project.write("pytest.ini", "[pytest]\naddopts = --npu-sim 3 --npu-sim-hbm 1GiB --npu-sim-chip 910A\n")
    done = project.pytest("-k", "good")
    assert done.code == 0 and "npu: 3 x Ascend910A, simulated" in done.output


def test_processes_of_xdist_share_the_machine(project: Project) -> None:
    project.write(
        "test_share.py",
        """
        import pytest, torch

        @pytest.mark.parametrize("number", range(4))
        def test_device(number, npu_device, worker_id):
            assert npu_device == f"npu:{worker_id[-1]}"
            assert torch.ones(2, device=npu_device).sum().item() == 2

        def test_inject(npu_machine):
            npu_machine.inject("oom@0#1")

        @pytest.mark.npu_fault("oom@0#1", npus=3)
        def test_own(npu_count):
            assert npu_count == 3
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(2, device="npu:0")
        """,
    )
    done = project.pytest("--npu-sim", "2", "-n", "2")
    assert done.code == 1, done.output
    refused = done.tests.pop("test_inject")
    assert "a fault strikes all tests that run on this machine" in refused, done.output
    assert set(done.tests.values()) == {"passed"} and len(done.tests) == 5, done.output


def test_own_simulation_reports_what_happened(project: Project) -> None:
    project.write("conftest.py", "def pytest_addoption(parser): parser.addoption('--word')\n")
    project.write(
        "test_own.py",
        """
        import os, pytest

        @pytest.fixture
        def broken(): raise OSError("the fixture is broken")

        @pytest.mark.npu_fault("slow@1=3")
        def test_failed(request):
            print("said before")
            assert request.config.getoption("word") == "hello" and 3 == 4

        @pytest.mark.npu_fault("oom")
        def test_skipped(): pytest.skip("not today")

        @pytest.mark.npu_fault("oom")
        def test_fixture(broken): pass

        @pytest.mark.npu_fault("oom")
        def test_dies(): os._exit(7)

        @pytest.mark.npu_fault("nonsense@0")
        def test_nonsense(): pass

        class TestClass:
            @pytest.mark.npu_fault("oom@1#2")
            @pytest.mark.parametrize("text", ["a/b", "c::d"])
            def test_names(self, text, npu_machine): assert npu_machine.npus == 2
        """,
    )
    done = project.pytest("--npu-sim", "2", "--word", "hello", "test_own.py", "-W", "error")
    assert done.code == 1, done.output
    assert re.search(r"assert \('hello' == 'hello'.* and 3 == 4\)", done.tests["test_failed"], re.DOTALL)
    assert "said before" in done.output
    assert "not today" in done.tests["test_skipped"]
    assert done.tests["test_fixture"].startswith("error:") and "the fixture is broken" in done.tests["test_fixture"]
    assert "the simulation ended with exit code 7 before the test was reported" in done.tests["test_dies"]
    assert 'error: --fault names "nonsense"' in done.tests["test_nonsense"]
    assert done.tests["test_names[a/b]"] == done.tests["test_names[c::d]"] == "passed"
    assert len(done.tests) == 7


def test_faults_of_a_live_machine_end_with_the_test(project: Project) -> None:
    project.write(
        "test_live.py",
        """
        import pytest, subprocess, sys, torch
        from anabatic.core.errors import ConfigError

        PEER = "import torch; torch.npu.set_device(1); print(torch.ones(2, device='npu:1').sum().item())"

        def test_full(npu_machine):
            npu_machine.inject("oom@0#1", "health@1=alarm", "lost@1#1")
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(1 << 28, device="npu:0")
            assert npu_machine.count_strikes() == 1
            assert subprocess.run([sys.executable, "-c", PEER], capture_output=True).returncode
            table = subprocess.run(["npu-smi", "info", "-t", "health", "-i", "1"], capture_output=True, text=True)
            assert npu_machine.count_strikes() == 2
            with pytest.raises(ConfigError, match="names device 2"):
                npu_machine.inject("oom@2")

        def test_after(npu_machine):
            torch.ones(1 << 28, device="npu:0")
            done = subprocess.run([sys.executable, "-c", PEER], capture_output=True, text=True)
            assert done.stdout.strip() == "2.0", done.stderr
            before = npu_machine.read_counters(1)
            subprocess.run([sys.executable, "-c", PEER], check=True)
            after = npu_machine.read_counters(1)
            assert after["operators"] > before["operators"] and after["syncs"] > before["syncs"]
        """,
    )
    done = project.pytest("--npu-sim", "2")
    assert done.code == 0, done.output


def test_refusals(project: Project) -> None:
    project.write("test_empty.py", "def test_nothing(): pass\n")
    line = [sys.executable, "-E", "-m", "pytest", "-p", "anabatic_sim.pytest_plugin", "--npu-sim", "1"]
    done = subprocess.run(line, cwd=project.folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 4 and "python -I and -E hide the simulated NPU" in done.stderr
    inside = [sys.executable, "-m", "anabatic", "sim", "--", sys.executable, "-m", "pytest"]
    inside += ["-p", "anabatic_sim.pytest_plugin", "--npu-sim", "2"]
    outer = {**os.environ, "ANABATIC_CACHE": str(CACHE)}
    done = subprocess.run(inside, cwd=project.folder, capture_output=True, text=True, timeout=100, env=outer)
    assert done.returncode == 4 and "--npu-sim 2: this runs in a simulation of 1 already" in done.stderr
