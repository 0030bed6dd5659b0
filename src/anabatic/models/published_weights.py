"""Read weights that their publisher has quantized as if they were not: one tensor at a time, in plain operators.

| `quant_method` | Tensors of a weight X | Source of the layout |
|---|---|---|
| `fp8`, `fbgemm_fp8` | X float8, X_scale_inv or X_scale: one number, one a row, or one a block | transformers 5.23, integrations/finegrained_fp8.py |
| `compressed-tensors` | as `fp8`, with int8 too; or X_packed int32, X_scale, X_shape, X_zero_point | compressed-tensors 0.20, compressors/pack_quantized |
| `mxfp4` | X_blocks uint8 `[..., out, blocks, 16]`, X_scales uint8; X is `[..., in, out]` | transformers 5.23, integrations/mxfp4.py |
| `gptq` | `qweight` int32 `[in * bits / 32, out]`, `qzeros`, `scales`, `g_idx` | gptqmodel 7.7, nn_modules/qlinear/torch.py |
| `awq` | `qweight` int32 `[in, out * bits / 32]`, `qzeros`, `scales` | autoawq 0.2.9, awq/utils/packing_utils.py |
| `bitsandbytes` | X uint8, X.absmax, X.quant_map, X.quant_state.bitsandbytes__nf4; or X int8, `SCB` | bitsandbytes 0.50, functional.py |
"""  # noqa: E501 - a table

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anabatic.core import json_reader, log
from anabatic.core.errors import DataError
from anabatic.core.formatting import format_size
from anabatic.models.quantized import NF4_BLOCK_SIZE, NF4_LEVELS, QuantizationKind
from anabatic.models.weight_files import WeightsReader, open_weights
from anabatic.parallel.sharded_tensors import TensorSlices

FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of a 4-bit float with two bits of exponent (OCP Microscaling Formats 1.0, table 5)."""
_ACTIVATION_SUFFIXES = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "k_scale", "v_scale")
"""Last parts of names of tensors that quantize activations or caches: training does neither."""
_CODES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "I32")
"""Names in safetensors of number formats in which a weight alone means nothing."""
_AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in an int32 of each of its 8 columns."""


@dataclass(frozen=True)
class _QuantizedTensor:
    """A weight and the stored tensors that it is made of."""

    shape: list[int]
    parts: tuple[str, ...]
    read: Callable[[TensorSlices | None], Tensor]
    """Returns the values in fp32, or slices of them."""
    kind: QuantizationKind | None = None
    """Codes of our own that mean the same numbers."""
    read_codes: Callable[[], tuple[Tensor, Tensor]] | None = None
    """Returns these codes and their scales, as `QuantizedWeight` holds them."""


class DequantizedWeights(WeightsReader):
    """Reads the weights of a folder under the names that they would have if they were not quantized.

    Raises:
        DataError: a tensor that belongs to a weight is missing, or of another shape.
    """

    def __init__(self, stored: WeightsReader, settings: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.folder, self._file_of, self._stored, self._dtype = stored.folder, stored._file_of, stored, dtype
        method = settings.get("quant_method")
        if method not in _FORMATS:
            raise DataError(
                f"{stored.folder} holds weights quantized by {str(method)[:40]}, which are not read here",
                f"{', '.join(_FORMATS)} are; or use the model's folder in bf16",
            )
        try:
            self._weights = dict(_FORMATS[method](stored, settings))
        except Exception as error:  # safetensors raises its own class, straight from Rust
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
            raise DataError(f"{stored.folder}: weights of {method}: {reason}", "copy the folder again") from error
        parts = {part for weight in self._weights.values() for part in weight.parts}
        rest = (name for name in stored.names if not name.endswith(_ACTIVATION_SUFFIXES))
        self.names = sorted({*rest} - parts | self._weights.keys())
        bare = [name for name in self.names if name not in self._weights and self.get_dtype(name) in _CODES]
        if bare:
            raise DataError(
                f"{stored.folder}: {len(bare)} weights have no scales: {', '.join(bare[:3])}", "copy the folder again"
            )
        if self._weights:  # a folder may have been dequantized without a change of its config.json
            self._describe(method)

    def get_shape(self, name: str) -> list[int]:
        """Return the shape of a weight."""
        weight = self._weights.get(name)
        return super().get_shape(name) if weight is None else weight.shape

    def read_tensor(self, name: str, slices: TensorSlices | None = None) -> Tensor:
        """Read a weight, or slices of it."""
        weight = self._weights.get(name)
        if weight is None:
            return super().read_tensor(name, slices)
        return weight.read(slices).to(self._dtype)

    def read_codes(self, name: str, kind: QuantizationKind) -> tuple[Tensor, Tensor] | None:
        """Return the codes and scales of a weight if they are those of `kind`, so that nothing is rounded again."""
        weight = self._weights.get(name)
        return weight.read_codes() if weight is not None and weight.kind == kind and weight.read_codes else None

    def _describe(self, method: str) -> None:
        values = sum(math.prod(weight.shape) for weight in self._weights.values())
        dtype, size = str(self._dtype).removeprefix("torch."), format_size(values * self._dtype.itemsize)
        log.info(
            f"{self.folder}: {len(self._weights):,} weights in {method} become {dtype} while they are read: "
            f"{size} on all devices together"
        )


@contextmanager
def open_dequantized(folder: Path, settings: Mapping[str, Any], dtype: torch.dtype) -> Iterator[WeightsReader]:
    """Open the weight files of a quantized folder, whose weights are read in `dtype`.

    Args:
        settings: `quantization_config` of its config.json.

    Raises:
        DataError: a file is missing or torn, or quantized in a way that is not read here.
    """
    with open_weights(folder) as stored:
        yield DequantizedWeights(stored, settings, dtype)


def _find_scaled(stored: WeightsReader, settings: Mapping[str, Any]) -> Iterator[tuple[str, _QuantizedTensor]]:
    """Find weights X with a tensor of scales X_scale_inv or X_scale."""
    blocks = settings.get("weight_block_size")
    names = set(stored.names)
    for scale_name in stored.names:
        name = scale_name.removesuffix("_inv").removesuffix("_scale")
        if name == scale_name or name not in names:
            continue
        shape = stored.get_shape(name)
        block = _find_block(name, shape, stored.get_shape(scale_name), blocks)
        zero_name = f"{name}_zero_point"
        parts = tuple(part for part in (name, scale_name, zero_name, f"{name}_g_idx") if part in names)
        read = _make_scaled_read(stored, name, scale_name, zero_name if zero_name in names else None, block)
        codes = None
        if zero_name not in names and stored.get_shape(scale_name) == [shape[0], 1] and stored.get_dtype(name) == "I8":
            codes = functools.partial(_read_int8_codes, stored, name, scale_name, 1)
        yield name, _QuantizedTensor(shape, parts, read, "int8" if codes else None, codes)


def _read_int8_codes(stored: WeightsReader, name: str, scale_name: str, levels: int) -> tuple[Tensor, Tensor]:
    return stored.read_tensor(name), stored.read_tensor(scale_name).float().view(-1, 1) / levels


def _find_block(name: str, shape: list[int], scales: list[int], given: Any) -> list[int]:
    """Return how many values in each dimension share a scale."""
    if math.prod(scales) == 1:
        return list(shape)
    if len(scales) == 1 and len(shape) == 2:
        scales = [*scales, 1]
    if len(scales) != len(shape):
        raise ValueError(f"{name} has shape {shape}, its scales {scales}")
    block = [math.ceil(size / count) for size, count in zip(shape, scales, strict=True)]
    if isinstance(given, list) and len(given) == 2 and all(isinstance(size, int) and size > 0 for size in given):
        stated = [1] * (len(shape) - 2) + given
        if all(math.ceil(size / step) == count for size, step, count in zip(shape, stated, scales, strict=True)):
            return stated
    if any(size % count for size, count in zip(shape, scales, strict=True)):
        raise ValueError(f"{name} has shape {shape}, its scales {scales}, and weight_block_size is {given}")
    return block


def _make_scaled_read(
    stored: WeightsReader, name: str, scale_name: str, zero_name: str | None, block: list[int]
) -> Callable[[TensorSlices | None], Tensor]:
    def read(slices: TensorSlices | None) -> Tensor:
        weight = _widen(stored.read_tensor(name, slices))
        starts = [part.start or 0 for part in slices] if slices else [0] * weight.dim()
        if zero_name is not None:
            zeros = stored.read_tensor(zero_name).to(torch.float32)
            _view_blocks(weight, starts[-1], block[-1]).sub_(_spread(zeros, weight, starts, block))
        scales = _spread(_read_scales(stored.read_tensor(scale_name)), weight, starts, block)
        _view_blocks(weight, starts[-1], block[-1]).mul_(scales)
        return weight

    return read


def _widen(codes: Tensor) -> Tensor:
    """Return codes in fp32; of float8 by a table, half the time of a cast on a CPU."""
    if not codes.dtype.is_floating_point or codes.itemsize > 1:
        return codes.to(torch.float32)
    table = torch.arange(256, dtype=torch.uint8).view(codes.dtype).to(torch.float32)
    return table.index_select(0, codes.reshape(-1).view(torch.uint8).int()).view(codes.shape)


def _view_blocks(weight: Tensor, start: int, block: int) -> Tensor:
    """Return a view `[..., blocks, block]` of a weight whose columns begin at `start`;
    blocks of 1 if borders are cut."""
    if start % block or weight.shape[-1] % block:
        return weight.unsqueeze(-1)
    return weight.unflatten(-1, (-1, block))


def _spread(grid: Tensor, weight: Tensor, starts: list[int], block: list[int]) -> Tensor:
    """Return the entry of a grid for each row, and for each block of `_view_blocks`: `[..., blocks, 1]`."""
    if grid.numel() == 1:
        return grid.reshape(())
    grid = grid.unsqueeze(-1) if grid.dim() == 1 else grid
    is_cut = starts[-1] % block[-1] or weight.shape[-1] % block[-1]
    for dim, (start, size, step) in enumerate(zip(starts, weight.shape, block, strict=True)):
        if grid.shape[dim] > 1:
            stride = step if dim == weight.dim() - 1 and not is_cut else 1
            grid = grid.index_select(dim, torch.arange(start, start + size, stride) // step)
    return grid.unsqueeze(-1)


def _read_scales(scales: Tensor) -> Tensor:
    """Return scales in fp32; bytes are powers of two with a bias of 127 (OCP Microscaling Formats 1.0, 5.4.1)."""
    if scales.dtype == torch.uint8:
        return torch.exp2(scales.to(torch.float32) - 127)
    return scales.to(torch.float32)


def _read_whole(make: Callable[[], Tensor]) -> Callable[[TensorSlices | None], Tensor]:
    """Return a function that makes a weight, and returns slices of it."""
    return lambda slices: make()[slices] if slices else make()


def _find_compressed(stored: WeightsReader, settings: Mapping[str, Any]) -> Iterator[tuple[str, _QuantizedTensor]]:
    """Find weights of compressed-tensors: scaled ones, and integers packed in int32."""
    groups = settings.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    stated = settings.get("weight_block_size") or next(
        (one["block_structure"] for one in weights if isinstance(one, dict) and one.get("block_structure")), None
    )
    yield from _find_scaled(stored, {"weight_block_size": stated})
    for packed_name in (name for name in stored.names if name.endswith("_packed")):
        name = packed_name.removesuffix("_packed")
        if f"{name}_shape" not in stored.names:
            raise ValueError(f"{packed_name} holds no integers: of the packed forms only they are read")
        shape = [int(size) for size in stored.read_tensor(f"{name}_shape").tolist()]
        parts = [packed_name, *(f"{name}{suffix}" for suffix in ("_scale", "_shape", "_zero_point", "_g_idx"))]
        parts = [part for part in parts if part in stored.names]
        if len(shape) != 2 or min(shape) < 1 or f"{name}_scale" not in parts:
            raise ValueError(f"{name} has shape {shape} and the tensors {', '.join(parts)}")
        bits = _find_bits(name, shape[1], stored.get_shape(packed_name)[1])

        def make(name: str = name, shape: list[int] = shape, bits: int = bits) -> Tensor:
            values = _unpack(stored.read_tensor(f"{name}_packed"), bits)[:, : shape[1]].float()
            scales = stored.read_tensor(f"{name}_scale").float()
            zeros = torch.full_like(scales, 1 << (bits - 1))
            if f"{name}_zero_point" in stored.names:
                zeros = _unpack(stored.read_tensor(f"{name}_zero_point").t(), bits)[:, : shape[0]].t().float()
            order = torch.arange(shape[1]) * scales.shape[1] // shape[1]
            if f"{name}_g_idx" in stored.names:
                order = stored.read_tensor(f"{name}_g_idx").long()
            return (values - zeros[:, order]).mul_(scales[:, order])

        yield name, _QuantizedTensor(shape, tuple(parts), _read_whole(make))


def _find_bits(name: str, values: int, words: int) -> int:
    """Return how many bits each of `values` integers in `words` int32 has.

    Raises:
        ValueError: none of 2, 4 and 8 fits.
    """
    for bits in (4, 8, 2):
        if math.ceil(values * bits / 32) == words:
            return bits
    raise ValueError(f"{name}: {words} words of 32 bits hold {values} integers; 2, 4 and 8 bits each are read")


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers in the last dimension of int32 `words`, the lowest bits first."""
    if words.dtype != torch.int32:
        raise ValueError(f"packed integers are {words.dtype}, not int32")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _find_gptq(stored: WeightsReader, settings: Mapping[str, Any]) -> Iterator[tuple[str, _QuantizedTensor]]:
    """Find weights of GPTQ (arXiv 2210.17323); files of the first version hold zero points less one."""
    shift = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    for prefix in _list_layers(stored):
        (rows, out), order_name = stored.get_shape(f"{prefix}.qweight"), f"{prefix}.g_idx"
        has_order = order_name in stored.names
        inner = stored.get_shape(order_name)[0] if has_order else rows * 32 // int(settings["bits"])
        bits = _find_bits(prefix, inner, rows)

        def make(prefix: str = prefix, inner: int = inner, bits: int = bits, has_order: bool = has_order) -> Tensor:
            values = _unpack(stored.read_tensor(f"{prefix}.qweight").t(), bits).float()
            scales = stored.read_tensor(f"{prefix}.scales").float().t()
            zeros = (_unpack(stored.read_tensor(f"{prefix}.qzeros"), bits) + shift).float().t()
            order = torch.arange(inner) * scales.shape[1] // inner
            if has_order:
                order = stored.read_tensor(f"{prefix}.g_idx").long()
            return (values - zeros[:, order]).mul_(scales[:, order])

        yield f"{prefix}.weight", _QuantizedTensor([out, inner], _list_parts(stored, prefix), _read_whole(make))


def _find_awq(stored: WeightsReader, settings: Mapping[str, Any]) -> Iterator[tuple[str, _QuantizedTensor]]:
    """Find weights of AWQ (arXiv 2306.00978) in the layout `gemm`."""
    version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", settings.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise ValueError(f"version {version} with {bits} bits; gemm with 4 is read")
    for prefix in _list_layers(stored):
        inner, words = stored.get_shape(f"{prefix}.qweight")

        def make(prefix: str = prefix, inner: int = inner) -> Tensor:
            def unpack(name: str) -> Tensor:
                values = _unpack(stored.read_tensor(f"{prefix}.{name}"), 4)
                return values.unflatten(-1, (-1, 8))[..., list(_AWQ_COLUMNS)].flatten(-2).float()

            scales = stored.read_tensor(f"{prefix}.scales").float()
            order = torch.arange(inner) * len(scales) // inner
            return (unpack("qweight") - unpack("qzeros")[order]).mul_(scales[order]).t()

        yield f"{prefix}.weight", _QuantizedTensor([words * 8, inner], _list_parts(stored, prefix), _read_whole(make))


def _list_layers(stored: WeightsReader) -> list[str]:
    """Return the names of layers with packed integers.

    Raises:
        ValueError: one lacks its scales or zero points.
    """
    layers = [name.removesuffix(".qweight") for name in stored.names if name.endswith(".qweight")]
    for layer in layers:
        for part in ("scales", "qzeros"):
            if f"{layer}.{part}" not in stored.names:
                raise ValueError(f"{layer}.{part} is missing")
    return layers


def _list_parts(stored: WeightsReader, prefix: str) -> tuple[str, ...]:
    names = (f"{prefix}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    return tuple(name for name in names if name in stored.names)


def _find_mxfp4(stored: WeightsReader, settings: Mapping[str, Any]) -> Iterator[tuple[str, _QuantizedTensor]]:
    """Find experts in 4-bit floats with a scale for each 32."""
    for block_name in (name for name in stored.names if name.endswith("_blocks")):
        name = block_name.removesuffix("_blocks")
        *outer, out, blocks, size = stored.get_shape(block_name)
        if (scales := stored.get_shape(f"{name}_scales")) != [*outer, out, blocks]:
            raise ValueError(f"{block_name} has shape {[*outer, out, blocks, size]}, its scales {scales}")

        def make(name: str = name, shape: tuple[int, ...] = (*outer, out, blocks * size * 2)) -> Tensor:
            codes = stored.read_tensor(f"{name}_blocks")
            scales = _read_scales(stored.read_tensor(f"{name}_scales")).unsqueeze(-1)
            levels = torch.tensor(FP4_LEVELS, dtype=torch.bfloat16)  # exact in it, as powers of two are
            made = torch.empty(shape, dtype=torch.bfloat16)
            rows = (each.reshape(-1, each.shape[-2], each.shape[-1]) for each in (codes, scales))
            for wide, row, scale in zip(
                made.view(-1, shape[-1]).split(4096), *(each.split(4096) for each in rows), strict=True
            ):
                pairs = torch.stack((row & 15, row >> 4), -1).flatten().int()
                values = levels.index_select(0, pairs).view(len(row), scale.shape[1], -1)
                torch.mul(values, scale.to(torch.bfloat16), out=wide.view(values.shape))
            return made.mT

        parts = (block_name, f"{name}_scales")
        yield name, _QuantizedTensor([*outer, blocks * size * 2, out], parts, _read_whole(make))


def _find_bitsandbytes(stored: WeightsReader, settings: Mapping[str, Any]) -> Iterator[tuple[str, _QuantizedTensor]]:
    """Find weights in 4 bits with their state, and in 8 with a largest value for each row."""
    for state_name in (name for name in stored.names if ".quant_state.bitsandbytes__" in name):
        name = state_name.partition(".quant_state.")[0]
        state = json_reader.loads(bytes(stored.read_tensor(state_name).tolist()))
        shape = [int(size) for size in state["shape"]]
        if math.prod(stored.get_shape(name)) * 2 < math.prod(shape):
            raise ValueError(f"{name} has {math.prod(stored.get_shape(name))} bytes for shape {shape}")

        def make(name: str = name, state: Mapping[str, Any] = state, shape: list[int] = shape) -> Tensor:
            codes = stored.read_tensor(name).flatten()
            pairs = torch.stack((codes >> 4, codes & 15), -1).flatten().int()
            values = stored.read_tensor(f"{name}.quant_map").float().index_select(0, pairs)
            return _scale_blocks(values, _read_absmax(stored, name, state), state["blocksize"], shape)

        def read_codes(name: str = name, state: Mapping[str, Any] = state) -> tuple[Tensor, Tensor]:
            return stored.read_tensor(name).flatten(), _read_absmax(stored, name, state).unsqueeze(1)

        parts = tuple(part for part in stored.names if part == name or part.startswith(f"{name}."))
        table = stored.read_tensor(f"{name}.quant_map").float()
        is_ours = state["blocksize"] == NF4_BLOCK_SIZE and torch.equal(table, torch.tensor(NF4_LEVELS))
        kind: QuantizationKind | None = "nf4" if is_ours else None
        yield name, _QuantizedTensor(shape, parts, _read_whole(make), kind, read_codes)
    for scale_name in (name for name in stored.names if name.endswith(".SCB")):
        prefix = scale_name.removesuffix("SCB")

        codes = functools.partial(_read_int8_codes, stored, f"{prefix}weight", scale_name, 127)

        def make_rows(codes: Callable[[], tuple[Tensor, Tensor]] = codes) -> Tensor:
            values, scales = codes()
            return values.float() * scales

        parts = tuple(
            part for part in (f"{prefix}weight", scale_name, f"{prefix}weight_format") if part in stored.names
        )
        shape = stored.get_shape(f"{prefix}weight")
        yield f"{prefix}weight", _QuantizedTensor(shape, parts, _read_whole(make_rows), "int8", codes)


def _read_absmax(stored: WeightsReader, name: str, state: Mapping[str, Any]) -> Tensor:
    """Return the largest value of each block, which may be quantized itself (QLoRA, arXiv 2305.14314, section 3)."""
    absmax = stored.read_tensor(f"{name}.absmax")
    if "nested_blocksize" not in state:
        return absmax.float()
    values = stored.read_tensor(f"{name}.nested_quant_map").float().index_select(0, absmax.int())
    nested = stored.read_tensor(f"{name}.nested_absmax").float()
    return _scale_blocks(values, nested, state["nested_blocksize"], list(values.shape)) + float(state["nested_offset"])


def _scale_blocks(values: Tensor, scales: Tensor, block: int, shape: list[int]) -> Tensor:
    """Multiply each `block` of `values` with its scale; what is left behind `shape` is padding."""
    spread = scales.repeat_interleave(int(block))[: len(values)]
    return values.mul_(spread)[: math.prod(shape)].view(shape)


_FORMATS: dict[str, Callable[[WeightsReader, Mapping[str, Any]], Iterator[tuple[str, _QuantizedTensor]]]] = {
    "fp8": _find_scaled,
    "fbgemm_fp8": _find_scaled,
    "compressed-tensors": _find_compressed,
    "mxfp4": _find_mxfp4,
    "gptq": _find_gptq,
    "awq": _find_awq,
    "bitsandbytes": _find_bitsandbytes,
}
"""`quant_method` of config.json -> what finds the weights."""
