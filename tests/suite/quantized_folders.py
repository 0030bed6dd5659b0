"""Model folders quantized as publishers do it, written number by number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 128
GROUP = 32

Parts = tuple[dict[str, Tensor], Tensor]
"""What is stored in the place of a weight `X.weight`, and what it stands for."""


def words(values: list[int], bits: int) -> list[int]:
    """Integers behind one another in signed words of 32 bits, the first in the lowest bits."""
    packed = []
    for start in range(0, len(values), 32 // bits):
        word = sum(value << (bits * place) for place, value in enumerate(values[start : start + 32 // bits]))
        packed.append(word - (1 << 32) if word >= 1 << 31 else word)
    return packed


def integers(weight: Tensor, bits: int, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned integers `[out, in]`, scales and zero points `[out, groups]` in fp32."""
    grouped = weight.unflatten(1, (-1, min(GROUP, weight.shape[1])))
    low, high = grouped.amin(-1).clamp(max=-1e-3), grouped.amax(-1).clamp(min=1e-3)
    most = (1 << bits) - 1
    scales = ((high - low) / most).half().float()
    zeros = (-low / scales).round().clamp(0, most)
    if symmetric:
        scales = (grouped.abs().amax(-1) / (most >> 1)).half().float().clamp(min=1e-4)
        zeros = torch.full_like(scales, float(1 << (bits - 1)))
    values = (grouped / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, most)
    return values.flatten(1).int(), scales, zeros.int()


def meant(values: Tensor, scales: Tensor, zeros: Tensor, order: Tensor) -> Tensor:
    return (values - zeros[:, order]).float() * scales[:, order]


def plain_order(weight: Tensor) -> Tensor:
    return torch.arange(weight.shape[1]) // min(GROUP, weight.shape[1])


def fp8(weight: Tensor) -> Parts:
    scales = torch.empty(-(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK))
    stored, wide = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            scales[row, column] = weight[place].abs().max() / 448
            stored[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
            wide[place] = stored[place].float() * scales[row, column]
    return {"weight": stored, "weight_scale_inv": scales}, wide


def fp8_channel(weight: Tensor) -> Parts:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    stored = (weight / scales.float()).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scales, "input_scale": torch.ones(1)}, stored.float() * scales.float()


def w8a8(weight: Tensor) -> Parts:
    scales = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scales).round().to(torch.int8)
    return {"weight": stored, "weight_scale": scales}, stored.float() * scales


def w4a16(weight: Tensor) -> Parts:
    values, scales, zeros = integers(weight, 4, symmetric=True)
    packed = torch.tensor([words(row, 4) for row in values.tolist()], dtype=torch.int32)
    stored = {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    return stored, meant(values, scales, zeros, plain_order(weight))


def w4a16_asymmetric(weight: Tensor) -> Parts:
    values, scales, zeros = integers(weight, 4)
    stored = {
        "weight_packed": torch.tensor([words(row, 4) for row in values.tolist()], dtype=torch.int32),
        "weight_zero_point": torch.tensor([words(column, 4) for column in zeros.t().tolist()], dtype=torch.int32).t(),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, meant(values, scales, zeros, plain_order(weight))


def gptq(weight: Tensor, bits: int = 4) -> Parts:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    values, scales, zeros = integers(weight[:, order], bits)
    zeros = zeros.clamp(min=1)
    groups = plain_order(weight)
    places = torch.argsort(order)
    values, groups = values[:, places], groups[places]
    stored = {
        "qweight": torch.tensor([words(row, bits) for row in values.tolist()], dtype=torch.int32).t(),
        "qzeros": torch.tensor([words(column, bits) for column in (zeros - 1).t().tolist()], dtype=torch.int32),
        "scales": scales.t().half(),
        "g_idx": groups.int(),
    }
    return stored, meant(values, scales, zeros, groups)


def gptq8(weight: Tensor) -> Parts:
    return gptq(weight, 8)


def awq(weight: Tensor) -> Parts:
    values, scales, zeros = integers(weight, 4)

    def pack(columns: Tensor) -> Tensor:
        """[rows, out] -> [rows, out / 8]: columns 0 2 4 6 1 3 5 7 from the lowest bits on."""
        rows = columns.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)
        return torch.tensor([words(row, 4) for row in rows.tolist()], dtype=torch.int32)

    stored = {"qweight": pack(values.t()), "qzeros": pack(zeros.t()), "scales": scales.t().half()}
    return stored, meant(values, scales, zeros, plain_order(weight))


def bnb_int8(weight: Tensor) -> Parts:
    largest = weight.abs().amax(1)
    stored = (weight / largest.unsqueeze(1) * 127).round().to(torch.int8)
    return {"weight": stored, "SCB": largest}, stored.float() * (largest / 127).unsqueeze(1)


NF4_TABLE = torch.linspace(-1, 1, 16)
"""Any table may be stored with a weight."""


def nf4(weight: Tensor) -> Parts:
    block, nested_block = 64, 256
    blocks = weight.reshape(-1, block)
    absmax, offset = blocks.abs().amax(1), 0.25
    table = torch.linspace(-1, 1, 256)
    nested = torch.stack([part.abs().max() for part in (absmax - offset).split(nested_block)])
    spread = nested.repeat_interleave(nested_block)[: len(absmax)]
    codes = torch.tensor([int((table - value).abs().argmin()) for value in ((absmax - offset) / spread).tolist()])
    absmax = table[codes] * spread + offset
    values = (blocks / absmax.unsqueeze(1)).reshape(-1)
    levels = (values.unsqueeze(1) - NF4_TABLE).abs().argmin(1)
    state = {
        "quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape),
        "nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": offset,
    }  # fmt: skip
    stored = {
        "weight": (levels[0::2] * 16 + levels[1::2]).to(torch.uint8).unsqueeze(1),
        "weight.absmax": codes.to(torch.uint8),
        "weight.quant_map": NF4_TABLE.clone(),
        "weight.nested_absmax": nested,
        "weight.nested_quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return stored, (NF4_TABLE[levels].view(-1, block) * absmax.unsqueeze(1)).view(weight.shape)


KINDS: dict[str, tuple[Callable[[Tensor], Parts], dict[str, Any]]] = {
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}),
    "fp8-channel": (fp8_channel, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "w8a8": (w8a8, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "w4a16": (w4a16, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "w4a16-asymmetric": (w4a16_asymmetric, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "gptq8": (gptq8, {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "int8": (bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
"""Name -> how a weight is written, and `quantization_config`."""


def quantize_folder(folder: Path, kind: str, twin: Path, should_quantize: Callable[[str], bool] | None = None) -> None:
    """Quantize the products of a saved model in place; `twin` becomes the folder with what its weights stand for."""
    write, settings = KINDS[kind]
    weights = load_file(folder / "model.safetensors")
    stored, wide = {}, {}
    for name, weight in weights.items():
        chosen = name.endswith("proj.weight") if should_quantize is None else should_quantize(name)
        if not chosen:
            stored[name] = wide[name] = weight
            continue
        parts, wide[name] = write(weight.float())
        stored |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
    write_folder(folder, twin, stored, wide, settings)


def write_folder(
    folder: Path, twin: Path, stored: dict[str, Tensor], wide: dict[str, Tensor], settings: dict[str, Any]
) -> None:
    """Replace the weights of a folder; `twin` becomes its copy with the wide ones."""
    twin.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (twin / file.name).write_bytes(file.read_bytes())
    save_file({name: value.contiguous().clone() for name, value in wide.items()}, twin / "model.safetensors")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}), "utf-8")
