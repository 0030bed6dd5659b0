"""Parallel training on simulated devices: the losses are those of gloo on the CPU."""

from __future__ import annotations

import pytest

from npu_sim import ranks
from npu_sim.conftest import Sim

WAYS = "ddp,pinned,fsdp2,fsdp2_bf16,tensor_parallel,saved"
ROUNDING = 2e-6
"""Relative: gloo adds up in another order than rank by rank. With two ranks there is only one order."""


@pytest.mark.parametrize(("world", "ways", "rounding"), [(2, WAYS, 0.0), (4, f"{WAYS},two_dimensions", ROUNDING)])
def test_losses_are_those_of_gloo(sim: Sim, world: int, ways: str, rounding: float) -> None:
    results = ranks.run(sim, world, "parallel", "losses", ways, str(sim.folder))
    for told in results.values():
        assert set(told) == set(ways.split(",")), told
        for way, (npu, cpu) in told.items():
            assert npu == pytest.approx(cpu, rel=rounding, abs=0.0), way
    assert len({str(told) for told in results.values()}) == 1  # and every rank sees the same


def test_torchrun(sim: Sim) -> None:
    """The usual launcher, on a script that knows nothing of the simulation; its ranks are forked after the imports."""
    script = sim.folder / "script.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "torch.npu.set_device(int(os.environ['LOCAL_RANK']))\n"
        "dist.init_process_group('hccl')\n"
        "x = torch.full((2,), float(dist.get_rank() + 1), device='npu')\n"
        "dist.all_reduce(x)\n"
        "dist.barrier()\n"
        "server = 'launch.local.forkserver' in open(f'/proc/{os.getppid()}/cmdline').read()\n"
        "os.write(1, f'sum {x.tolist()} {server}\\n'.encode())  # in one piece: both ranks write here\n"
        "dist.destroy_process_group()\n",
        encoding="utf-8",
    )
    done = sim.command("torchrun", "--standalone", "--nproc_per_node", "2", str(script), flags=["--npus", "2"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("sum [3.0, 3.0] True") == 2
