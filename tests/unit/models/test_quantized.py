"""Frozen weights in 8 and 4 bits: the codes that others would make, and training on them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anabatic.config.sections.common import Data
from anabatic.config.sections.train_jobs import Lora
from anabatic.config.sft import SftJob
from anabatic.core.errors import ConfigError
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.models import pretrained
from anabatic.models.lora import adapter
from anabatic.models.lora.linear import LoraLinear
from anabatic.models.model_init import count_parameters
from anabatic.models.quantized import (
    NF4_BLOCK_SIZE,
    NF4_LEVELS,
    QuantizationKind,
    QuantizedLinear,
    QuantizedWeight,
    ScratchMemory,
    replace_weight,
)
from anabatic.models.weights_reader import iter_quantized_weights
from anabatic.parallel.sharded_tensors import materialize_parameters
from anabatic_testing.tiny_corpora import write_byte_tokenizer
from anabatic_testing.tiny_models import build_tiny_model

CPU = torch.device("cpu")
KINDS: tuple[QuantizationKind, ...] = ("int8", "nf4")


def packed(weight: Tensor, kind: QuantizationKind) -> QuantizedWeight:
    one = QuantizedWeight(weight.shape, kind, ScratchMemory())
    one.quantize_weight(weight)
    return one


def slow_nf4(weight: Tensor) -> Tensor:
    """Value by value."""
    flat = weight.flatten().tolist()
    out = []
    for start in range(0, len(flat), NF4_BLOCK_SIZE):
        block = flat[start : start + NF4_BLOCK_SIZE]
        scale = max(abs(value) for value in block)
        out += [scale * min(NF4_LEVELS, key=lambda level: abs(value / (scale or 1) - level)) for value in block]
    return torch.tensor(out).view(weight.shape)


def slow_int8(weight: Tensor) -> Tensor:
    rows = []
    for row in weight.tolist():
        scale = max(abs(value) for value in row) / 127
        rows.append([scale * round(value / scale) if scale else 0.0 for value in row])
    return torch.tensor(rows)


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 150), seed=st.integers(0, 99), size=st.sampled_from([0, 1e-3, 1, 99])
)
def test_packed_and_read_again(rows: int, columns: int, seed: int, size: float) -> None:
    weight = size * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    for kind, slow in (("int8", slow_int8), ("nf4", slow_nf4)):
        torch.testing.assert_close(
            packed(weight, kind).dequantize_weight(torch.float32), slow(weight), rtol=1e-5, atol=1e-7
        )


def test_sizes_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(256, 128)
    wide = weight.nbytes
    for kind, most in (("int8", 0.26), ("nf4", 0.141)):
        one = packed(weight, kind)
        assert one.codes.nbytes + one.scales.nbytes < most * wide
        monkeypatch.setattr("anabatic.models.quantized._CHUNK_VALUES", 128 * 50)
        again = packed(weight, kind)
        assert torch.equal(one.codes, again.codes) and torch.equal(one.scales, again.scales)
        monkeypatch.undo()
        assert torch.equal(one.dequantize_weight(torch.bfloat16), one.dequantize_weight(torch.float32).bfloat16())
        assert not one.state_dict()


def test_nf4_is_that_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = torch.randn(96, 192)
    codes, state = functional.quantize_4bit(weight, blocksize=NF4_BLOCK_SIZE, quant_type="nf4")
    one = packed(weight, "nf4")
    assert torch.equal(codes.flatten(), one.codes)
    torch.testing.assert_close(functional.dequantize_4bit(codes, state), one.dequantize_weight(torch.float32))


def test_gradients_are_those_of_the_weight_that_is_read() -> None:
    torch.manual_seed(0)
    for kind in KINDS:
        for dropout in (0.0, 0.5):
            layer = LoraLinear(nn.Linear(70, 40), 4, 2.0, dropout)
            layer.init_adapter(torch.Generator().manual_seed(0))
            nn.init.normal_(layer.lora_B)
            plain = copy.deepcopy(layer)
            model = nn.ModuleList([layer])
            store(model, layer, kind)
            plain.weight.data = layer.quantized.dequantize_weight(torch.float32).clone()  # type: ignore[union-attr]
            x = torch.randn(2, 9, 70)
            results = []
            for each in (layer, plain):
                torch.manual_seed(1)
                inner = x.clone().requires_grad_()
                out = each(inner)
                out.square().sum().backward()
                results.append((out, inner.grad, each.lora_A.grad, each.lora_B.grad))
            for ours, wanted in zip(*results, strict=True):
                torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def store(model: nn.Module, layer: nn.Linear, kind: QuantizationKind) -> None:
    weight = layer.weight.detach()
    replace_weight(layer, weight, kind, ScratchMemory())
    for _, one in iter_quantized_weights(model):
        one.quantize_weight(weight)


def test_nothing_of_the_weights_size_is_saved() -> None:
    layer = QuantizedLinear(nn.Linear(64, 48), "nf4", ScratchMemory())
    layer.quantized.quantize_weight(torch.randn(48, 64))  # type: ignore[union-attr]
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape), lambda tensor: tensor):
        layer(torch.randn(10, 64, requires_grad=True))
    assert saved == []


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    pretrained.save_model(
        build_tiny_model(), folder / "base", tokenizers.load_tokenizer(write_byte_tokenizer(folder / "tok"))
    )
    return folder / "base"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_packed_while_it_is_read(base: Path, kind: QuantizationKind) -> None:
    """Also the layers without an adapter; embedding and head stay."""
    model, lora = (
        pretrained.build_meta_causal_lm(base, torch.float32),
        Lora(r=2, target_modules=["q_proj"], modules_to_save=["o_proj"]),
    )
    adapter.insert_adapter(model, lora)
    before = count_parameters(model)
    assert adapter.quantize_frozen_layers(model, kind) == 12  # 2 blocks of 7 layers, o_proj is trained
    assert count_parameters(model) == before
    model = pretrained.prepare_model(model, CPU)
    materialize_parameters(model, CPU, CPU)
    pretrained.load_folder_weights(model, base)
    adapter.init_adapter_weights(model, lora, 0)
    plain = pretrained.load_model(base, CPU)
    for name, one in iter_quantized_weights(model):
        weight = plain.get_parameter(name)
        assert torch.equal(
            one.dequantize_weight(torch.float32), packed(weight.detach(), kind).dequantize_weight(torch.float32)
        )
        plain.get_submodule(name.removesuffix(".weight")).weight.data = one.dequantize_weight(torch.float32).clone()
    assert not any("packed" in name for name in model.state_dict())
    ids = torch.randint(0, 300, (1, 20))
    for each in (model, plain):
        each.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tuner": "full"}, "tuner is full"),
        ({"tuner": "freeze"}, "tuner is freeze"),
        ({"tuner": "lora", "lora": Lora(use_dora=True)}, "use_dora is on"),
        ({"tuner": "lora", "lora": Lora(init="pissa")}, "pissa, which changes the weights"),
        ({"tuner": "lora", "adapter": ["runs/a"]}, "merge it first|adapter is given"),
    ],
)
def test_what_does_not_go_together(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SftJob(model="m", data=Data(train=["rows.json"]), quantize="nf4", **more)
