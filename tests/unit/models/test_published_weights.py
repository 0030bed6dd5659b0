"""Folders that a publisher has quantized: read as transformers and the format's own package read them, or refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config, PreTrainedModel

from anabatic.core.errors import DataError
from anabatic.models import pretrained, published_weights
from anabatic.models.quantized import NF4_LEVELS, QuantizationKind
from anabatic.models.weights_reader import iter_quantized_weights, open_dequantizable
from anabatic.plan import job_rules
from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS
from suite import quantized_folders as quantized

CPU = torch.device("cpu")
WIDE = {"hidden_size": 160, "intermediate_size": 192, "moe_intermediate_size": 96}


def save(folder: Path, family: str = "Qwen2", **changes: Any) -> PreTrainedModel:
    """Save a small model as transformers does."""
    settings = {**COMMON_CONFIG, **FAMILY_CONFIGS[family], **WIDE, "num_hidden_layers": 1, "tie_word_embeddings": False}
    settings |= changes
    kind = {"Qwen2": "qwen2", "Qwen3Moe": "qwen3_moe", "GptOss": "gpt_oss", "DeepseekV3": "deepseek_v3"}[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model


def weights(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return dict(pretrained.load_model(folder, CPU, dtype).named_parameters())


def require_equal(ours: dict[str, Tensor], wanted: dict[str, Tensor], **bounds: float) -> None:
    assert ours.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(ours[name], weight, **{"rtol": 0.0, "atol": 0.0} | bounds, msg=name)


@pytest.mark.parametrize("kind", quantized.KINDS)
def test_weights_are_those_that_are_meant(tmp_path: Path, kind: str) -> None:
    save(tmp_path / "model")
    quantized.quantize_folder(tmp_path / "model", kind, tmp_path / "twin")
    for dtype, bounds in ((torch.float32, {"rtol": 2e-7, "atol": 1e-7}), (torch.bfloat16, {"rtol": 8e-3})):
        require_equal(weights(tmp_path / "model", dtype), weights(tmp_path / "twin", dtype), **bounds)
    assert not hasattr(pretrained.build_meta_causal_lm(tmp_path / "model", torch.float32).config, "quantization_config")


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3Moe", "DeepseekV3"])
def test_fp8_is_read_as_transformers_reads_it(tmp_path: Path, family: str) -> None:
    save(
        tmp_path / "model",
        family,
        num_hidden_layers=2,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        head_dim=64,
    )
    quantized.quantize_folder(
        tmp_path / "model", "fp8", tmp_path / "twin", lambda name: name.endswith(("gate_proj.weight", "up_proj.weight"))
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    require_equal(weights(tmp_path / "model"), dict(theirs.named_parameters()), rtol=2e-7, atol=1e-7)
    require_equal(weights(tmp_path / "model"), weights(tmp_path / "twin"), rtol=2e-7, atol=1e-7)


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    save(tmp_path / "model", "GptOss")
    stored = wide = load_file(tmp_path / "model" / "model.safetensors")
    stored = dict(stored)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in wide if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inner, out = stored.pop(name).shape
        shape = (experts, out, inner // 32)
        stored[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        stored[f"{name}_scales"] = torch.randint(120, 130, shape, dtype=torch.uint8, generator=generator)
        values = torch.empty(experts, inner, out)
        for expert, row in torch.cartesian_prod(torch.arange(experts), torch.arange(out)).tolist():
            codes = [
                code
                for byte in stored[f"{name}_blocks"][expert, row].flatten().tolist()
                for code in (byte & 15, byte >> 4)
            ]
            scales = [
                2.0 ** (scale - 127) for scale in stored[f"{name}_scales"][expert, row].tolist() for _ in range(32)
            ]
            signs = [-1.0 if code & 8 else 1.0 for code in codes]
            values[expert, :, row] = torch.tensor(
                [sign * quantized.FP4[code & 7] * scale for sign, code, scale in zip(signs, codes, scales, strict=True)]
            )
        wide[name] = values
    quantized.write_folder(tmp_path / "model", tmp_path / "twin", stored, wide, {"quant_method": "mxfp4"})
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    require_equal(weights(tmp_path / "model", torch.bfloat16), dict(theirs.named_parameters()))
    require_equal(weights(tmp_path / "model"), weights(tmp_path / "twin"))


@pytest.mark.parametrize("kind", ["fp8", "w8a8", "w4a16-asymmetric", "gptq", "awq"])
def test_slices_are_those_of_the_whole(tmp_path: Path, kind: str) -> None:
    save(tmp_path / "model")
    quantized.quantize_folder(tmp_path / "model", kind, tmp_path / "twin")
    with open_dequantizable(tmp_path / "model", torch.float32) as stored:
        for name in (name for name in stored.names if name.endswith("proj.weight")):
            whole = stored.read_tensor(name)
            assert list(whole.shape) == stored.get_shape(name)
            rows, columns = whole.shape
            for place in ((slice(rows // 3, rows), slice(0, columns)), (slice(0, rows), slice(5, columns - 7))):
                assert torch.equal(stored.read_tensor(name, place), whole[place])


def test_packed_integers_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    packing = pytest.importorskip(
        "compressed_tensors.compressors.pack_quantized.helpers", reason="compressed-tensors is not installed"
    )
    values, _, zeros = quantized.integers(torch.randn(64, 96), 4)
    ours = torch.tensor([quantized.words(row, 4) for row in values.tolist()], dtype=torch.int32)
    assert torch.equal(ours, packing.pack_to_int32((values - 8).to(torch.int8), 4))
    ours = torch.tensor([quantized.words(column, 4) for column in zeros.t().tolist()], dtype=torch.int32).t()
    assert torch.equal(ours, packing.pack_to_int32((zeros - 8).to(torch.int8), 4, packed_dim=0))


def test_four_bits_are_those_of_bitsandbytes(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = torch.randn(128, 192)
    for nested in (False, True):
        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=nested)
        parts = {"weight": codes} | {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
        save_file({f"a.{name}": value.contiguous() for name, value in parts.items()}, tmp_path / "model.safetensors")
        config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
        (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
        with open_dequantizable(tmp_path, torch.float32) as stored:
            assert stored.names == ["a.weight"]
            torch.testing.assert_close(stored.read_tensor("a.weight"), functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize(("kind", "ours"), [("w8a8", "int8"), ("int8", "int8"), ("nf4", "nf4")])
def test_codes_are_kept(tmp_path: Path, kind: str, ours: QuantizationKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "NF4_TABLE", torch.tensor(NF4_LEVELS))
    save(tmp_path / "model")
    quantized.quantize_folder(tmp_path / "model", kind, tmp_path / "twin")
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    if ours == "int8":  # a code that a second rounding would move
        stored["model.layers.0.mlp.up_proj.weight"][0] = -3
        save_file(stored, file)
    model = pretrained.load_model(tmp_path / "model", CPU, quantize=ours)
    for name, weight in iter_quantized_weights(model):
        assert torch.equal(weight.codes.flatten(), stored[name].flatten())
    if kind == "nf4":
        wanted = weights(tmp_path / "twin")
        for name, weight in iter_quantized_weights(model):
            torch.testing.assert_close(weight.dequantize_weight(torch.float32), wanted[name], rtol=2e-7, atol=1e-7)


def test_a_plan_knows_what_is_read() -> None:
    assert set(published_weights._FORMATS) == set(job_rules.QUANT_METHODS)


def damage(tmp_path: Path, kind: str, drop: str = "", **settings: Any) -> DataError:
    """Return the error about a folder without tensors named `drop`, or with other settings."""
    save(tmp_path / "model")
    quantized.quantize_folder(tmp_path / "model", kind, tmp_path / "twin")
    file = tmp_path / "model" / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if not (drop and name.endswith(drop))}
    save_file(kept, file)
    config = json.loads((tmp_path / "model" / "config.json").read_text("utf-8"))
    config["quantization_config"] |= settings
    (tmp_path / "model" / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(DataError) as caught:
        weights(tmp_path / "model")
    return caught.value


@pytest.mark.parametrize(
    ("kind", "drop", "settings", "words"),
    [
        ("fp8", "", {"quant_method": "hqq"}, "weights quantized by hqq, which are not read"),
        ("fp8", "", {"quant_method": None}, "weights quantized by None"),
        ("fp8", "_scale_inv", {}, "7 weights have no scales"),
        ("w4a16", "_shape", {}, "holds no integers"),
        ("w4a16", "_scale", {}, "has shape"),
        ("gptq", "scales", {}, "scales is missing"),
        ("gptq", "g_idx", {"bits": 3}, "2, 4 and 8 bits"),
        ("awq", "", {"version": "gemv"}, "gemm with 4 is read"),
        ("awq", "qzeros", {}, "qzeros is missing"),
        ("nf4", "quant_map", {}, "quant_map"),
    ],
)
def test_what_is_torn_is_named(tmp_path: Path, kind: str, drop: str, settings: dict[str, Any], words: str) -> None:
    error = damage(tmp_path, kind, drop, **settings)
    assert words in str(error), error


@pytest.mark.parametrize("kind", quantized.KINDS)
def test_damage_is_an_error_of_the_folder(tmp_path: Path, kind: str) -> None:
    save(tmp_path / "model")
    quantized.quantize_folder(tmp_path / "model", kind, tmp_path / "twin")
    file = tmp_path / "model" / "model.safetensors"
    whole = load_file(file)
    draw = random.Random(kind)
    parts = sorted(name for name in whole if "layers.0.mlp.up_proj" in name)
    refused = 0
    for _ in range(8):
        name = draw.choice(parts)
        value = whole[name].flatten()
        torn = draw.choice(
            [
                lambda value: value[: len(value) // 2],
                lambda value: torch.empty(0, dtype=value.dtype),
                lambda value: value.view(torch.uint8) ^ 0xA5,
                lambda value: value.view(1, 1, -1),
                lambda value: torch.full((3, 5), 1 << 30, dtype=torch.int32),
            ]
        )
        save_file({**whole, name: torn(value).contiguous().clone()}, file)
        try:
            weights(tmp_path / "model")
        except DataError as error:
            refused += 1
            assert str(tmp_path / "model") in str(error)
    assert refused >= 2  # other bytes are other weights
