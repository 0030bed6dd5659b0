"""Adapters computed in groups give what each layer gives by itself, in values and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from anabatic.config.tuner import Lora
from anabatic.device.ops import for_device
from anabatic.models import adapter, forward, fuse, hf
from anabatic.models.lora import LoraLinear
from anabatic.models.lora_joint import Bank, Group, gather
from unit.models.test_families import FAMILIES, batch_of, build, packed

CPU = torch.device("cpu")


def adapted(family: str = "qwen2", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    name, settings, _ = FAMILIES[family]
    model = packed(build(name, settings)).to(dtype)
    fuse.install(model, for_device("cpu"))
    adapter.insert(model, Lora(r=4, **options))
    adapter.begin(model, Lora(r=4, **options), 0)
    torch.manual_seed(2)
    for key, parameter in model.named_parameters():
        if key.endswith("lora_B"):
            nn.init.normal_(parameter, std=0.1)
    return model


def together(model: Any) -> Bank:
    bank = gather(model)
    assert bank is not None
    model.__dict__["adapter_bank"] = bank
    return bank


def step(model: Any, seed: int = 3) -> torch.Tensor:
    torch.manual_seed(seed)
    loss = forward.summed_loss(model, forward.pack(batch_of([5, 12, 30]), CPU), 1 << 12)
    loss.backward()
    return loss.detach()


def check_equal(ours: Any, theirs: Any, tolerance: float) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None and other.grad is not None:
            assert mine.grad.dtype == mine.dtype
            scale = other.grad.abs().max().item() + 1e-9
            torch.testing.assert_close(mine.grad / scale, other.grad / scale, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("family", ["qwen2", "llama", "phi3", "deepseek-v3", "gemma2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.06)])
def test_groups_equal_single_layers(family: str, dtype: torch.dtype, tolerance: float) -> None:
    alone = adapted(family, dtype)
    ours = copy.deepcopy(alone)
    together(ours)
    torch.testing.assert_close(step(ours), step(alone), rtol=1e-5 if dtype == torch.float32 else 0.01, atol=0)
    check_equal(ours, alone, tolerance)


def test_which_layers_are_grouped_and_their_weights_lie_behind_each_other() -> None:
    model = adapted()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    bank = together(model)
    assert [len(group.layers) for group in bank.groups] == [3, 1, 2, 1] * 2
    for group in bank.groups:
        assert len({layer.weight.untyped_storage().data_ptr() for layer in group.layers}) == 1
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_an_update_makes_the_casts_old() -> None:
    """Without a new cast nobody computes with adapters of before the update."""
    model, x = adapted(), torch.randn(3, 32)
    group: Group = together(model).groups[0]
    layer = group.layers[0]
    assert isinstance(layer, LoraLinear)
    model.__dict__["adapter_bank"].cast()
    first = layer(x)
    assert group.all(x) is not None
    with torch.no_grad():
        layer.lora_B.add_(1.0)
    assert group.all(x) is None
    changed = layer(x)
    torch.testing.assert_close(
        changed - first, layer.scale * (x @ layer.lora_A.t()).sum(-1, keepdim=True).expand_as(first)
    )


def test_two_micro_batches_and_recomputation_change_nothing() -> None:
    alone, ours, again = (adapted() for _ in range(3))
    together(ours)
    together(again)
    for model in (alone, ours, again):
        model.train()
    hf.recompute(again, "full")
    for seed in (3, 4):
        for model in (alone, ours, again):
            step(model, seed)
    check_equal(ours, alone, 1e-4)
    check_equal(again, ours, 1e-6)


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"use_dora": True}])
def test_layers_that_do_more_stay_by_themselves(options: dict[str, Any]) -> None:
    assert gather(adapted(**options)) is None


def test_a_model_without_adapters_has_no_groups() -> None:
    assert gather(packed(build("Qwen2", {}))) is None
