"""A decoder layer as one function computes what its modules compute, and steps aside where it cannot."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from anabatic.config.sections.train_jobs import Lora
from anabatic.cpu_speed import fused_layers
from anabatic.data.batching.packing import IGNORE_INDEX
from anabatic.device.ops import get_device_ops
from anabatic.models import forward, fused_ops
from anabatic.models.lora import adapter
from anabatic.models.pretrained import enable_activation_checkpointing
from anabatic_testing.tiny_models import build_tiny_model
from unit.models.test_families import FAMILIES, batch_of, build, packed

CPU = torch.device("cpu")
FEW, EQUAL, MANY = [5, 12, 30], [16, 16, 16], [3, 4, 5, 6, 7, 8, 9, 10, 3, 2, 5, 30, 31, 33, 29, 28, 30]
"""Lengths of segments: each its own group, one group, and groups with padding."""


def gradients(model: Any, lengths: list[int], skipped: int = 3) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and all gradients; one row in `skipped` has no target."""
    torch.manual_seed(1)
    batch = batch_of(lengths)
    if skipped:
        batch.labels[::skipped] = IGNORE_INDEX
    targets = int((batch.labels != IGNORE_INDEX).sum())
    model.zero_grad(set_to_none=True)
    ready = forward.pack_batch(replace(batch, num_targets=targets), CPU)
    loss = forward.compute_summed_loss(model, ready, 1 << 12)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def adapted(model: Any) -> Any:
    adapter.insert_adapter(model, Lora(r=4))
    adapter.init_adapter_weights(model, Lora(r=4), 0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            nn.init.normal_(parameter, std=0.05)
    return model


def both(model: Any) -> tuple[Any, Any]:
    """The model with the fused parts alone, and with whole layers."""
    parts, whole = copy.deepcopy(model), model
    fused_ops.install_fused_ops(parts, get_device_ops("cpu"))
    assert "2 decoder layers" in fused_ops.apply_fused_setting(whole, "auto", "cpu")
    return parts, whole


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original = fused_layers.run_decoder_layer

    def counted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = original(x, *rest)
        calls.append(out.shape[0])
        return out

    monkeypatch.setattr(fused_layers, "run_decoder_layer", counted)
    return calls


@pytest.mark.parametrize("lengths", [FEW, EQUAL, MANY], ids=["few", "equal", "many"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_loss_and_gradients_are_those_of_the_modules(
    family: str, lora: bool, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed(build(*FAMILIES[family][:2])).float()
    parts, whole = both(adapted(model) if lora else model)
    expected, wanted = gradients(parts, lengths)
    calls = count_calls(monkeypatch)
    loss, found = gradients(whole, lengths)
    tokens = sum(lengths)
    assert calls == [tokens, tokens - len(range(0, tokens, 3))]  # the last layer leaves out what has no target
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        scale = float(grad.abs().max())
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_under_autocast_the_loss_is_as_near_to_fp32(lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed(build(*FAMILIES["qwen3"][:2])).float()
    parts, whole = both(adapted(model) if lora else model)
    expected, wanted = gradients(parts, FEW)
    calls = count_calls(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        loss, found = gradients(whole, FEW)
    assert len(calls) == 2
    torch.testing.assert_close(loss, expected, rtol=5e-3, atol=0)
    for name, grad in wanted.items():
        assert found[name].dtype == grad.dtype
        assert float((found[name] - grad).norm() / grad.norm()) < 0.05, name


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_gives_the_same_gradients(mode: Any) -> None:
    model = build_tiny_model()
    fused_ops.apply_fused_setting(model, "auto", "cpu")
    model.train()
    expected, wanted = gradients(model, FEW)
    enable_activation_checkpointing(model, mode)
    loss, found = gradients(model, FEW)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()), msg=name)


def test_a_hook_a_window_and_a_forward_pass_alone_take_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_model()
    fused_ops.apply_fused_setting(model, "auto", "cpu")
    calls = count_calls(monkeypatch)
    with torch.no_grad():
        forward.compute_summed_loss(model, forward.pack_batch(batch_of(FEW), CPU), 1 << 12)
    assert not calls
    seen: list[int] = []
    mlp = model.model.layers[0].mlp
    handle = mlp.register_forward_hook(lambda *_: seen.append(1))
    gradients(model, FEW)
    assert seen and len(calls) == 1
    handle.remove()
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 8
    gradients(model, FEW)
    assert len(calls) == 1


def test_layers_of_another_structure_are_not_matched() -> None:
    for family in ("gemma2", "phi3", "qwen3-moe"):
        assert fused_layers.install_layers(packed(build(*FAMILIES[family][:2]))) == 0


def test_a_layer_that_computes_something_else_is_not_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_model()
    kind = type(model.model.layers[0])
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: 2 * original(self, *args, **kwargs))
    assert fused_layers.install_layers(model) == 0


def test_layers_that_rotate_a_part_of_each_head_keep_their_modules() -> None:
    """GLM-4.5's first block has Llama's structure, and cosines of half a head."""
    model = packed(build(*FAMILIES["glm4-moe"][:2])).float()
    expected, wanted = gradients(model, FEW)
    assert "decoder layers" not in fused_ops.apply_fused_setting(model, "auto", "cpu")
    loss, grads = gradients(model, FEW)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, wanted, rtol=1e-3, atol=1e-3)
