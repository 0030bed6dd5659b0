"""Faults on demand surface as torch_npu surfaces them."""

from __future__ import annotations

import pytest

from npu_sim.conftest import Sim

PROGRAM = """
import subprocess, torch

def attempt(name, function):
    try:
        print(name, "ok", function())
    except RuntimeError as error:
        print(name, type(error).__name__, str(error).replace(chr(10), " "))

x = torch.ones(64, 64, device="npu")
for _ in range(9):
    x = x * 1.0
attempt("item", lambda: x.sum().item())
attempt("sync", torch.npu.synchronize)
attempt("copy", lambda: x.cpu().sum().item())
attempt("alloc", lambda: torch.empty(64 << 20, dtype=torch.uint8, device="npu").numel())
attempt("again", lambda: torch.empty(64 << 20, dtype=torch.uint8, device="npu").numel())
print("smi", subprocess.run(["npu-smi", "info"], capture_output=True, text=True).stdout.replace(chr(10), " "))
"""


def _lines(sim: Sim, fault: str) -> dict[str, str]:
    said = sim.python(PROGRAM, flags=["--fault", fault])
    return dict(line.split(" ", 1) for line in said.splitlines() if " " in line)


@pytest.mark.parametrize(
    ("fault", "code", "text", "health"),
    [
        ("aicore#5", "507015", "The aicore execution is abnormal", "Warning"),
        ("ecc#5", "507054", "HBM MULTI BIT ECC ERROR", "Alarm"),
    ],
)
def test_an_operator_that_failed_is_told_by_the_next_synchronisation(
    sim: Sim, fault: str, code: str, text: str, health: str
) -> None:
    said = _lines(sim, fault)
    for name in ("item", "sync", "copy"):
        assert said[name].startswith("RuntimeError")
        assert f"error code is {code}" in said[name]
        assert text in said[name]
        assert "ERR00100 PTA call acl api failed" in said[name]
    assert health in said["smi"]


def test_out_of_memory_strikes_once(sim: Sim) -> None:
    said = _lines(sim, "oom#2")
    assert said["item"] == "ok 4096.0"
    assert said["alloc"].startswith(
        "OutOfMemoryError NPU out of memory. Tried to allocate 66.00 MiB (NPU 0; 64.00 GiB total"
    )
    assert said["again"].startswith("ok")


def test_a_lost_device_answers_nothing(sim: Sim) -> None:
    said = _lines(sim, "lost#5")
    for name in ("item", "sync", "copy", "alloc"):
        assert "507899" in said[name]
    assert "There is no NPU card on this server." in said["smi"]


def test_health_is_shown(sim: Sim) -> None:
    said = _lines(sim, "health=critical")
    assert said["item"] == "ok 4096.0"
    assert "Critical" in said["smi"]


@pytest.mark.parametrize(("fault", "words"), [("hccl-timeout@1#3", "507048"), ("link-down@0#3", "EI0013")])
def test_collectives(sim: Sim, fault: str, words: str) -> None:
    code = """
import os, torch, torch.distributed as dist
torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("hccl")
x = torch.ones(4, device="npu")
for _ in range(6):
    dist.all_reduce(x)
torch.npu.synchronize()
"""
    file = sim.folder / "collectives.py"
    file.write_text(code, encoding="utf-8")
    done = sim.command("torchrun", "--nproc_per_node", "2", str(file), flags=["--npus", "2", "--fault", fault])
    assert done.returncode == 1
    assert words in done.stderr


RESTARTED = """
import os, torch, torch.distributed as dist
torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("hccl")
x = torch.ones(4, device="npu")
for _ in range(30):
    dist.all_reduce(x)
    x.fill_(1.0)
    torch.npu.synchronize()
print("attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
"""


def test_a_restarted_job_meets_its_fault_once(sim: Sim) -> None:
    """Otherwise torchrun hands the second attempt the store of the first, keys included (torch 2.13, gloo as well)."""
    file = sim.folder / "again.py"
    file.write_text(RESTARTED, encoding="utf-8")
    words = ["torchrun", "--standalone", "--max-restarts", "1", "--nproc_per_node", "2", str(file)]
    flags = ["--npus", "2", "--fault", "aicore@1#20"]
    done = sim.command(*words, flags=flags, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("attempt 1") == 2
    assert "507015" in done.stderr
