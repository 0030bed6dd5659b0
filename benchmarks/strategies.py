"""What each strategy keeps on a device, beside theory: peak of the real NPU allocator on two simulated NPUs.

    python benchmarks/strategies.py [--npus 2] [--only full,lora]

A Qwen2 of 30 M parameters, short rows, so that weights, gradients and optimizer decide. Theory, for P trained of
P + F parameters, N processes, fp32 weights (4 bytes), gradients (4), AdamW's moments (8), frozen weights in bf16 (2):

    ddp    16 P + 2 F                            zero2  16 P / N + 2 F / N + 2 (P + F), gathered in bf16 for a step
    zero3  16 P / N + 2 F / N + 2 x one block    zero3, offload  2 x one block
    tensor (16 P + 2 F) / N of heads and MLPs + 16 P + 2 F of the rest: embeddings, head, norms, half of every adapter

Two blocks are counted where one is gathered: the next is fetched while one computes. The flat kernel of AdamW holds its
gradients in one tensor, and two more of a bucket (256 MiB at most) during the update: what comes on top is listed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from option_types import names_among, positive_int

MIB = 2**20
STRATEGIES: dict[str, list[str]] = {
    "ddp": [],
    "zero2": ["--parallel.strategy", "zero2"],
    "zero3": ["--parallel.strategy", "zero3"],
    "zero3, offload": ["--parallel.strategy", "zero3", "--parallel.offload", "cpu"],
    "tensor": ["--parallel.tensor"],
}
TUNERS = {"full": ["--tuner", "full"], "lora": ["--tuner", "lora", "--lora.r", "16"]}


def prepare(folder: Path) -> dict[str, int]:
    """Write a model, a tokenizer and rows; return numbers of parameters."""
    from anabatic.data.tokenizer import hf_folder as tokenizers
    from anabatic.models.pretrained import save_model
    from anabatic_testing.tiny_models import build_tiny_qwen2, train_tiny_tokenizer, write_tiny_text

    tokens = train_tiny_tokenizer(folder, write_tiny_text(folder))
    model: Any = build_tiny_qwen2(
        vocab_size=4096,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=1408,
        max_position_embeddings=256,
    )
    save_model(model, folder / "model", tokenizers.load_tokenizer(tokens))
    rows = [{"query": f"{n}?", "response": "the wind moves upward along the slope"} for n in range(200)]
    (folder / "rows.json").write_text(json.dumps(rows))
    block = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    layers = {name: m for name, m in model.model.layers.named_modules() if hasattr(m, "in_features")}
    return {
        "all": sum(parameter.numel() for parameter in model.parameters()),
        "block": block,
        "divided": sum(parameter.numel() for m in layers.values() for parameter in m.parameters()),
        "linear": sum(m.in_features + m.out_features for m in layers.values()),
        "linear, divided": sum(
            m.in_features if name.endswith(("o_proj", "down_proj")) else m.out_features for name, m in layers.items()
        ),
    }


def theory(strategy: str, tuner: str, sizes: dict[str, int], processes: int) -> float:
    """Bytes on a device."""
    trained = sizes["all"] if tuner == "full" else 16 * sizes["linear"]
    frozen = 0 if tuner == "full" else sizes["all"]
    everything, gathered = trained + frozen, 2 * 2 * sizes["block"]
    share = 1 - 1 / processes  # of what is divided, that lies elsewhere
    elsewhere = 16 * sizes["divided"] if tuner == "full" else 2 * sizes["divided"] + 16 * 16 * sizes["linear, divided"]
    return {
        "tensor": 16 * trained + 2 * frozen - share * elsewhere,
        "ddp": 16.0 * trained + 2 * frozen,
        "zero2": (16 * trained + 2 * frozen) / processes + 2 * everything,
        "zero3": (16 * trained + 2 * frozen) / processes + gathered,
        "zero3, offload": gathered,
    }[strategy]


def measured(folder: Path, options: list[str], processes: int) -> float:
    """Run a few steps; return the allocator's peak in bytes on the device that needs most."""
    out = folder / "run"
    words = [sys.executable, "-m", "anabatic", "sim", "--npus", str(processes), "--", "python", "-m", "anabatic", "sft"]
    given: dict[str, Any] = {
        "model": folder / "model",
        "data.train": folder / "rows.json",
        "out": out,
        "device.nproc": processes,
        "device.dtype": "bf16",
        "batch.seq-len": 64,
        "batch.micro-batch-tokens": 64,
        "batch.global-batch-tokens": 64 * processes,
        "schedule.max-steps": 4,
        "log.every": 1,
        "save.resume": "never",
        "data.valid-fraction": 0,
    }
    for key, value in given.items():
        words += [f"--{key}", str(value)]
    done = subprocess.run([*words, *options], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return max(row["memory_bytes"] for row in rows if row["kind"] == "train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--npus", type=positive_int, default=2)
    parser.add_argument("--only", type=names_among(TUNERS), default=list(TUNERS), help=f"of {','.join(TUNERS)}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sizes = prepare(folder)
        print(f"{sizes['all'] / 1e6:.1f} M parameters, {options.npus} simulated NPUs, MiB on a device")
        print(f"  {'':24} {'measured':>9} {'theory':>9} {'difference':>11}")
        for tuner in options.only:
            for strategy, words in STRATEGIES.items():
                given = [*words, str(options.npus)] if strategy == "tensor" else words
                found = measured(folder, [*TUNERS[tuner], *given], options.npus) / MIB
                expected = theory(strategy, tuner, sizes, options.npus) / MIB
                print(
                    f"  {tuner + ', ' + strategy:24} {found:9.1f} {expected:9.1f} {found - expected:11.1f}", flush=True
                )


if __name__ == "__main__":
    main()
