"""Public scripts run unmodified on simulated devices: Trainer with PEFT, FSDP2 under torchrun, the profilers."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from npu_sim.conftest import PROGRAMS, Sim

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("peft", "accelerate"))), reason="peft and accelerate are not installed"
)
def test_trainer_and_peft(sim: Sim) -> None:
    words = [str(EXAMPLES / "trainer_peft.py"), "--steps", "4"]
    here = subprocess.run([sys.executable, *words], cwd=sim.folder, capture_output=True, text=True, timeout=600)
    there = sim.command("python", *words)
    assert here.returncode == 0, here.stderr[-2000:]
    assert there.returncode == 0, there.stderr[-2000:]
    cpu, npu = here.stdout.splitlines()[-1], there.stdout.splitlines()[-1]
    assert npu.startswith("device npu:0, loss ")
    assert npu.partition("loss")[2] == cpu.partition("loss")[2]
    assert (sim.folder / "out/trainer_peft/adapter_model.safetensors").is_file()


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss ([\d.]+)", text)]


def test_fsdp2_under_torchrun(sim: Sim) -> None:
    script = str(EXAMPLES / "fsdp2.py")
    here = subprocess.run(
        [*TORCHRUN, "--nproc_per_node", "1", script], cwd=sim.folder, capture_output=True, text=True, timeout=600
    )
    there = sim.command("torchrun", "--standalone", "--nproc_per_node", "4", script, flags=["--npus", "4"])
    assert here.returncode == 0, here.stderr[-2000:]
    assert there.returncode == 0, there.stderr[-2000:]
    assert "device npu x 4, checkpoint restored: True" in there.stdout
    assert len(losses(there.stdout)) == 5
    assert losses(there.stdout) == pytest.approx(losses(here.stdout), abs=5e-5)


def test_profilers_see_the_host(sim: Sim) -> None:
    done = sim.command("python", str(PROGRAMS / "profiles.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.profiler True True\n" in done.stdout
    assert "torch_npu.profiler True\n" in done.stdout
    assert done.stderr.count("device activities are not simulated") == 1  # torch.profiler says it once
