"""Weights of a block that are cast together: the numbers of autocast, and the parameters as they were afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from anabatic.config.sections.common import DeviceSettings, Recompute
from anabatic.device.device import Device, select_device
from anabatic.device.ops import REFERENCE_OPS
from anabatic.models import fused_ops
from anabatic.models.pretrained import enable_activation_checkpointing
from anabatic.models.weight_casts import install_block_casts
from anabatic_testing.tiny_models import build_tiny_qwen2


@pytest.fixture
def device() -> Iterator[Device]:
    threads = torch.get_num_threads()
    chosen = select_device(DeviceSettings(type="cpu", dtype="bf16", threads=1))
    yield replace(chosen, device_row=replace(chosen.device_row, cast_weights_together=True))
    torch.set_num_threads(threads)


def build(**shape: int) -> Any:
    torch.manual_seed(0)
    return build_tiny_qwen2(**shape).train()


def gradients(model: Any, device: Device, passes: int = 2) -> dict[str, Tensor]:
    ids = torch.arange(24).reshape(2, 12)
    for _ in range(passes):
        with device.autocast():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_alike(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Joint products round the sum of several gradients once, separate ones each: less than two digits of bf16."""
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 2**-6 * value.norm() + 1e-6, name


def test_gradients_are_those_of_autocast(device: Device) -> None:
    model = build()
    assert install_block_casts(model, device) == 2 * (7 + 3)  # q, k and v have a bias
    assert install_block_casts(model, device) == 0  # once is enough
    plain, joined = gradients(build(), device), gradients(model, device)
    assert_alike(plain, joined)
    assert {type(parameter) for _, parameter in model.named_parameters()} == {torch.nn.Parameter}


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_blocks_cast_again(device: Device, mode: Recompute) -> None:
    plain, model = build(), build()
    install_block_casts(model, device)
    for each in (plain, model):
        enable_activation_checkpointing(each, mode)
    expected, found = gradients(plain, device, 1), gradients(model, device, 1)
    assert_alike(expected, found)


def test_a_failure_leaves_the_parameters(device: Device) -> None:
    model = build()
    install_block_casts(model, device)
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gradients(model, device)
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in model.model.layers[0].mlp.parameters())
    assert isinstance(model.model.layers[0].self_attn.q_proj.weight, torch.nn.Parameter)


def test_only_what_is_trained_in_fp32(device: Device) -> None:
    frozen = build().requires_grad_(False)
    assert install_block_casts(frozen, device) == 0
    assert install_block_casts(build().to(torch.bfloat16), device) == 0
    assert install_block_casts(build(), replace(device, dtype=torch.float32)) == 0


def saved_storages(model: Any, device: Device) -> list[int]:
    """Bytes of each storage that a forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), device.autocast():
        hidden = model.model(input_ids=torch.arange(24).reshape(2, 12)).last_hidden_state
    hidden.sum().backward()
    return list(kept.values())


def test_no_cast_weights_are_kept(device: Device) -> None:
    model = build()
    install_block_casts(model, device)
    layers = [layer for layer in model.model.layers.modules() if isinstance(layer, torch.nn.Linear)]
    weights = sum(2 * layer.weight.numel() for layer in layers)
    assert sum(saved_storages(model, device)) <= sum(saved_storages(build(), device)) - weights


def test_a_fused_mlp_keeps_gate_and_up_alone(device: Device) -> None:
    plain, model = build(intermediate_size=160), build(intermediate_size=160)
    for each in (plain, model):
        fused_ops.install_fused_ops(each, REFERENCE_OPS)
    install_block_casts(model, device)
    assert_alike(gradients(plain, device), gradients(model, device))
    inner = 24 * 160 * 2  # bytes in bf16
    kept = saved_storages(model, device)
    assert kept.count(2 * inner) == 2 and inner not in kept  # in each of two layers


def test_weights_that_change_before_the_backward_pass_are_an_error(device: Device) -> None:
    model = build()
    install_block_casts(model, device)
    ids = torch.arange(24).reshape(2, 12)
    with device.autocast():
        loss = model(input_ids=ids, labels=ids).loss
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="changed between the forward and the backward pass"):
        loss.backward()


def test_a_copy_of_the_model_computes_with_its_own_weights(device: Device) -> None:
    model = build()
    install_block_casts(model, device)
    ids = torch.arange(24).reshape(2, 12)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
        assert not torch.allclose(twin(input_ids=ids).logits, model(input_ids=ids).logits)
