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

from anabatic.config.sft import SftJob
from anabatic.config.shared import Data
from anabatic.config.tuner import Lora
from anabatic.core.errors import ConfigError
from anabatic.data import tokenizer as tokenizers
from anabatic.models import adapter, hf
from anabatic.models.build import count_parameters
from anabatic.models.lora import LoraLinear
from anabatic.models.packed import BLOCK, LEVELS, Kind, Packed, PackedLinear, Scratch, put_in, weights
from anabatic.parallel.sharded import materialise
from anabatic.testing.corpora import byte_tokenizer
from anabatic.testing.tiny import tiny_model

CPU = torch.device("cpu")
KINDS: tuple[Kind, ...] = ("int8", "nf4")


def packed(weight: Tensor, kind: Kind) -> Packed:
    one = Packed(weight.shape, kind, Scratch())
    one.take(weight)
    return one


def slow_nf4(weight: Tensor) -> Tensor:
    """Value by value."""
    flat = weight.flatten().tolist()
    out = []
    for start in range(0, len(flat), BLOCK):
        block = flat[start : start + BLOCK]
        scale = max(abs(value) for value in block)
        out += [scale * min(LEVELS, key=lambda level: abs(value / (scale or 1) - level)) for value in block]
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
        torch.testing.assert_close(packed(weight, kind).read(torch.float32), slow(weight), rtol=1e-5, atol=1e-7)


def test_sizes_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(256, 128)
    wide = weight.nbytes
    for kind, most in (("int8", 0.26), ("nf4", 0.141)):
        one = packed(weight, kind)
        assert one.codes.nbytes + one.scales.nbytes < most * wide
        monkeypatch.setattr("anabatic.models.packed._AT_ONCE", 128 * 50)
        again = packed(weight, kind)
        assert torch.equal(one.codes, again.codes) and torch.equal(one.scales, again.scales)
        monkeypatch.undo()
        assert torch.equal(one.read(torch.bfloat16), one.read(torch.float32).bfloat16())
        assert not one.state_dict()


def test_nf4_is_that_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = torch.randn(96, 192)
    codes, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    one = packed(weight, "nf4")
    assert torch.equal(codes.flatten(), one.codes)
    torch.testing.assert_close(functional.dequantize_4bit(codes, state), one.read(torch.float32))


def test_gradients_are_those_of_the_weight_that_is_read() -> None:
    torch.manual_seed(0)
    for kind in KINDS:
        for dropout in (0.0, 0.5):
            layer = LoraLinear(nn.Linear(70, 40), 4, 2.0, dropout)
            layer.reset(torch.Generator().manual_seed(0))
            nn.init.normal_(layer.lora_B)
            plain = copy.deepcopy(layer)
            model = nn.ModuleList([layer])
            store(model, layer, kind)
            plain.weight.data = layer.packed.read(torch.float32).clone()  # type: ignore[union-attr]
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


def store(model: nn.Module, layer: nn.Linear, kind: Kind) -> None:
    weight = layer.weight.detach()
    put_in(layer, weight, kind, Scratch())
    for _, one in weights(model):
        one.take(weight)


def test_nothing_of_the_weights_size_is_saved() -> None:
    layer = PackedLinear(nn.Linear(64, 48), "nf4", Scratch())
    layer.packed.take(torch.randn(48, 64))  # type: ignore[union-attr]
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape), lambda tensor: tensor):
        layer(torch.randn(10, 64, requires_grad=True))
    assert saved == []


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    hf.save_model(tiny_model(), folder / "base", tokenizers.load(byte_tokenizer(folder / "tok")))
    return folder / "base"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_packed_while_it_is_read(base: Path, kind: Kind) -> None:
    """Also the layers without an adapter; embedding and head stay."""
    model, lora = hf.skeleton(base, torch.float32), Lora(r=2, target_modules=["q_proj"], modules_to_save=["o_proj"])
    adapter.insert(model, lora)
    before = count_parameters(model)
    assert adapter.pack(model, kind) == 12  # 2 blocks of 7 layers, o_proj is trained
    assert count_parameters(model) == before
    model = hf.prepare(model, CPU)
    materialise(model, CPU, CPU)
    hf.fill(model, base)
    adapter.begin(model, lora, 0)
    plain = hf.load_model(base, CPU)
    for name, one in weights(model):
        weight = plain.get_parameter(name)
        assert torch.equal(one.read(torch.float32), packed(weight.detach(), kind).read(torch.float32))
        plain.get_submodule(name.removesuffix(".weight")).weight.data = one.read(torch.float32).clone()
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
