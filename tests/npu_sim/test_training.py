"""Models train on the simulated device with the CPU's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npu_sim.conftest import Sim


@pytest.mark.parametrize(
    ("kind", "mode", "attention"),
    [
        ("qwen2", "", "sdpa"),
        ("qwen3", "foreach", "sdpa"),
        ("qwen2", "fused", "sdpa"),
        ("qwen3", "", "eager"),
        ("qwen2", "bf16", "sdpa"),
        ("qwen3", "fp16", "sdpa"),
    ],
)
def test_losses_are_the_cpu_s(sim: Sim, kind: str, mode: str, attention: str) -> None:
    printed = sim.program("train.py", kind, mode, attention)
    cpu, npu = json.loads(printed.splitlines()[-1])
    # Products of 16-bit formats are fp32 in the simulator on processors without instructions for them.
    if mode:
        assert npu[:2] == [pytest.approx(numbers, rel=ROUNDING_16_BIT) for numbers in cpu[:2]]
    else:
        assert npu == cpu


ROUNDING_16_BIT = 2.0**-6
"""Of a loss: bf16 rounds to 2^-9, and a step adds up a few of them."""


def test_muon(sim: Sim) -> None:
    printed = sim.python(
        """
        import torch
        results = []
        for device in ("cpu", "npu"):
            torch.manual_seed(0)
            layer = torch.nn.Linear(16, 16, bias=False).to(device)
            optimizer = torch.optim.Muon(layer.parameters(), lr=0.1)
            for _ in range(3):
                layer(torch.ones(2, 16, device=device)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(layer.weight.detach().cpu())
        print(torch.equal(*results))
        """
    )
    assert printed == "True"


def test_a_loader_with_workers_and_pinned_memory(sim: Sim) -> None:
    printed = sim.python(
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        loader = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=4, num_workers=2, pin_memory=True)
        print([batch.npu(non_blocking=True).sum().item() for batch, in loader])
        """
    )
    assert printed == "[6.0, 22.0, 17.0]"


def _pretrained(sim: Sim, device: str, steps: int) -> list[dict[str, Any]]:
    """Return the rows of a small pretraining's metrics."""
    here = Path(__file__).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(here.glob("*.py")))
    (sim.folder / "text.txt").write_text(text, encoding="utf-8")
    tokens = ["anabatic", "tokenizer", "train", "--data.train", "text.txt", "--vocab-size", "400", "--out", "tokenizer"]
    if not (sim.folder / "tokenizer").exists():
        assert sim.command(*tokens).returncode == 0
    words = ["anabatic", "pretrain", "--tokenizer", "tokenizer", "--data.train", "text.txt", "--out", device]
    words += ["--model.depth", "2", "--model.width", "64", "--model.head-dim", "32", "--batch.seq-len", "64"]
    words += ["--batch.micro-batch-tokens", "256", "--batch.global-batch-tokens", "256"]
    words += ["--schedule.max-steps", str(steps), "--device.type", device, "--device.dtype", "fp32"]
    done = sim.command(*words, "--log.every", "1", "--log.device-every", "0.01")
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in (sim.folder / device / "metrics.jsonl").read_text().splitlines()]


def test_our_own_pretraining(sim: Sim) -> None:
    cpu, npu = ([row["loss"] for row in _pretrained(sim, device, 12) if "lr" in row] for device in ("cpu", "npu"))
    assert len(cpu) == 12
    assert npu == pytest.approx(cpu, rel=2e-5)
    # A reading may end after the last row of so short a run, but a processor is never read.
    assert "energy_wh_per_mtoken" not in json.loads((sim.folder / "cpu" / "summary.json").read_text())


def test_the_device_is_watched_while_it_trains(sim: Sim) -> None:
    watched = [row for row in _pretrained(sim, "npu", 200) if "device_util_pct_mean" in row]
    assert watched and all(row["energy_wh_per_mtoken"] > 0 for row in watched)
    assert json.loads((sim.folder / "npu" / "summary.json").read_text())["energy_wh_per_mtoken"] > 0


def test_overflow_is_seen_without_infinities(sim: Sim) -> None:
    told = [json.loads(sim.program("scaled.py", flags=["--chip", chip]).splitlines()[-1]) for chip in ("910A", "910B3")]
    assert str(told[0]) == str(told[1])  # NaN among them
    skipped = [row[0] for row in told[0]]
    assert skipped[0] == 1 and skipped[-1] == 0
