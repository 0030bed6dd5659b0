"""Measure the cost of reading a quantized folder, compared with transformers' own dequantizing load.

    python benchmarks/quantized_folders.py [--rounds N] [--hidden N] [--layers N]

A model of random weights is quantized once, in fp8 (Qwen3, blocks of 128 x 128) and in mxfp4 (gpt-oss). Both sides read
it in turn into bfloat16, each time in a process of its own; what is read is the CPU time of that process and the most
memory that it held, both less those of one that only imports.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from option_types import positive_int

TINY: dict[str, Any] = dict(hidden_size=64, num_hidden_layers=1, vocab_size=64, intermediate_size=64)
SIDES = ("import", "ours", "transformers")


def read(side: str, folder: str) -> None:
    """Read a folder as one side does, and print CPU seconds and peak KiB."""
    import transformers

    from anabatic.models import pretrained

    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen3", **TINY))

    if side == "ours":
        model = pretrained.load_model(folder, torch.device("cpu"), torch.bfloat16)
    elif side == "transformers":
        method = json.loads((Path(folder) / "config.json").read_text("utf-8"))["quantization_config"]["quant_method"]
        kind = {"fp8": transformers.FineGrainedFP8Config, "mxfp4": transformers.Mxfp4Config}[method]
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=kind(dequantize=True), dtype=torch.bfloat16
        )
    if side != "import":
        assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(time.process_time(), held.split()[1])


def write(folder: Path, kind: str, hidden: int, layers: int) -> float:
    """Write a quantized model; return the GiB of its weights in 16 bits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = dict(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=2,
        head_dim=64, vocab_size=1024, intermediate_size=hidden * 3, max_position_embeddings=256,
    )  # fmt: skip
    if kind == "mxfp4":
        sizes |= dict(intermediate_size=hidden, num_local_experts=8, num_experts_per_tok=2)
    config = AutoConfig.for_model("qwen3" if kind == "fp8" else "gpt_oss", **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    stored: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if kind == "fp8" and name.endswith("proj.weight"):
            rows, columns = (-(-size // 128) for size in weight.shape)
            stored[name] = weight.float().clamp(-400, 400).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = torch.rand(rows, columns)
        elif kind == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inner, out = weight.shape
            stored[f"{name}_blocks"] = torch.randint(0, 256, (experts, out, inner // 32, 16), dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(115, 125, (experts, out, inner // 32), dtype=torch.uint8)
        else:
            stored[name] = weight.contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text("utf-8"))
    values["quantization_config"] = {"quant_method": kind} | (
        {"weight_block_size": [128, 128]} if kind == "fp8" else {}
    )
    (folder / "config.json").write_text(json.dumps(values), "utf-8")
    return sum(weight.numel() for weight in model.parameters()) * 2 / 2**30


def main() -> None:
    """Print one row a format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--hidden", type=positive_int, default=1024)
    parser.add_argument("--layers", type=positive_int, default=8)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read(*args.read)
        return
    print("| Format | GiB in 16 bits | CPU time, ours / transformers | memory, ours / transformers |")
    print("|---|--:|--:|--:|")
    for kind in ("fp8", "mxfp4"):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / kind
            size = write(folder, kind, args.hidden, args.layers)
            found: dict[str, list[list[float]]] = {side: [] for side in SIDES}
            for _ in range(args.rounds):
                for side in SIDES:
                    line = [sys.executable, __file__, "--read", side, str(folder)]
                    done = subprocess.run(line, capture_output=True, encoding="utf-8", check=True)
                    found[side].append([float(one) for one in done.stdout.split()[-2:]])
            seconds, memory = ([statistics.median(one[at] for one in found[side]) for side in SIDES] for at in range(2))
            cells = []
            for (base, ours, theirs), unit in ((seconds, 1.0), ([one / 2**20 for one in memory], 1.0)):
                cells.append(
                    f"{(ours - base) / (theirs - base):.2f} ({(ours - base) * unit:.2f} / {theirs - base:.2f})"
                )
            print(f"| {kind} | {size:.2f} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
