"""Adapters computed in groups give what each layer gives by itself, in values and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from anabatic.config.sections.train_jobs import Lora
from anabatic.device.ops import get_device_ops
from anabatic.models import forward, fused_ops, pretrained
from anabatic.models.lora import adapter
from anabatic.models.lora.grouped import AdapterBank, LoraGroup, group_adapters
from anabatic.models.lora.linear import LoraLinear
from unit.models.test_families import FAMILIES, batch_of, build, packed

CPU = torch.device("cpu")


def adapted(family: str = "qwen2", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    name, settings, _ = FAMILIES[family]
    model = packed(build(name, settings)).to(dtype)
    fused_ops.install_fused_ops(model, get_device_ops("cpu"))
    adapter.insert_adapter(model, Lora(r=4, **options))
    adapter.init_adapter_weights(model, Lora(r=4, **options), 0)
    torch.manual_seed(2)
    for key, parameter in model.named_parameters():
        if key.endswith("lora_B"):
            nn.init.normal_(parameter, std=0.1)
    return model


def together(model: Any) -> AdapterBank:
    bank = group_adapters(model)
    assert bank is not None
    model.__dict__["adapter_bank"] = bank
    return bank


def step(model: Any, seed: int = 3) -> torch.Tensor:
    torch.manual_seed(seed)
    loss = forward.compute_summed_loss(model, forward.pack_batch(batch_of([5, 12, 30]), CPU), 1 << 12)
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
    group: LoraGroup = together(model).groups[0]
    layer = group.layers[0]
    assert isinstance(layer, LoraLinear)
    model.__dict__["adapter_bank"].cast_adapters()
    first = layer(x)
    assert group.compute_all(x) is not None
    with torch.no_grad():
        layer.lora_B.add_(1.0)
    assert group.compute_all(x) is None
    changed = layer(x)
    torch.testing.assert_close(
        changed - first, layer.scale * (x @ layer.lora_A.t()).sum(-1, keepdim=True).expand_as(first)
    )


def test_an_update_of_a_joint_buffer_reaches_the_group() -> None:
    """Optimizers of joint buffers change the values and not the versions of the parameters."""
    alone, ours = adapted(), adapted()
    together(ours)
    for model in (alone, ours):
        step(model)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                version = parameter._version
                parameter.data.mul_(3.0)
                assert parameter._version == version
    torch.testing.assert_close(step(ours, 4), step(alone, 4), rtol=1e-5, atol=0)
    check_equal(ours, alone, 1e-4)


def test_micro_batches_in_flight_share_the_copied_adapters() -> None:
    """A pipeline computes the next micro-batch before it goes back through the first one."""
    alone, ours = adapted(), adapted()
    together(ours)
    for model in (alone, ours):
        losses = []
        for seed in (3, 4):
            torch.manual_seed(seed)
            batch = forward.pack_batch(batch_of([5, 12, 30]), CPU)
            losses.append(forward.compute_summed_loss(model, batch, 1 << 12))
        for loss in losses:
            loss.backward()
    check_equal(ours, alone, 1e-4)


def test_two_micro_batches_and_recomputation_change_nothing() -> None:
    alone, ours, again = (adapted() for _ in range(3))
    together(ours)
    together(again)
    for model in (alone, ours, again):
        model.train()
    pretrained.enable_activation_checkpointing(again, "full")
    for seed in (3, 4):
        for model in (alone, ours, again):
            step(model, seed)
    check_equal(ours, alone, 1e-4)
    check_equal(again, ours, 1e-6)


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"use_dora": True}])
def test_layers_that_do_more_stay_by_themselves(options: dict[str, Any]) -> None:
    assert group_adapters(adapted(**options)) is None


@pytest.mark.process
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_compiled_blocks_compute_their_layers_one_by_one() -> None:
    alone, ours = adapted(), adapted()
    together(ours)
    for layer in ours.model.layers:
        layer.mlp.compile(backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(step(ours), step(alone), rtol=1e-5, atol=0)
    check_equal(ours, alone, 1e-4)


def test_a_model_without_adapters_has_no_groups() -> None:
    assert group_adapters(packed(build("Qwen2", {}))) is None
