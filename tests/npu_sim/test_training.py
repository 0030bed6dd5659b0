"""Models train on the simulated device with the CPU's numbers."""

from __future__ import annotations

import json
from pathlib import Path

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
    assert npu == cpu


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


def test_our_own_pretraining(sim: Sim) -> None:
    here = Path(__file__).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(here.glob("*.py")))
    (sim.folder / "text.txt").write_text(text, encoding="utf-8")
    losses = {}
    tokens = ["anabatic", "tokenizer", "train", "--data.train", "text.txt", "--vocab-size", "400", "--out", "tokenizer"]
    assert sim.command(*tokens).returncode == 0
    for device in ("cpu", "npu"):
        words = ["anabatic", "pretrain", "--tokenizer", "tokenizer", "--data.train", "text.txt", "--out", device]
        words += ["--model.depth", "2", "--model.width", "64", "--model.head-dim", "32", "--batch.seq-len", "64"]
        words += [
            "--batch.micro-batch-tokens",
            "256",
            "--batch.global-batch-tokens",
            "256",
            "--schedule.max-steps",
            "12",
        ]
        words += ["--device.type", device, "--device.dtype", "fp32", "--log.every", "1"]
        words += ["--log.device-every", "0.01"]
        done = sim.command(*words)
        assert done.returncode == 0, done.stderr[-2000:]
        rows = [json.loads(line) for line in (sim.folder / device / "metrics.jsonl").read_text().splitlines()]
        losses[device] = [row["loss"] for row in rows if "loss" in row and "lr" in row]
        summary = json.loads((sim.folder / device / "summary.json").read_text())
        watched = [row for row in rows if "device_util_pct_mean" in row and row["energy_wh_per_mtoken"] > 0]
        assert bool(watched) == ("energy_wh_per_mtoken" in summary) == (device == "npu")
    assert len(losses["cpu"]) == 12
    assert losses["npu"] == pytest.approx(losses["cpu"], rel=2e-5)


def test_overflow_is_seen_without_infinities(sim: Sim) -> None:
    told = [json.loads(sim.program("scaled.py", flags=["--chip", chip]).splitlines()[-1]) for chip in ("910A", "910B3")]
    assert str(told[0]) == str(told[1])  # NaN among them
    skipped = [row[0] for row in told[0]]
    assert skipped[0] == 1 and skipped[-1] == 0
