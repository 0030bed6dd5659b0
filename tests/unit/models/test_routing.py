"""The router's loss is transformers' own, on packed documents and with padding; the tokens of experts are counted."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from anabatic.config.sections.common import DeviceSettings, Optim
from anabatic.core.errors import ConfigError
from anabatic.data.batching.packing import Batch, TokenSegment, collate_packed, collate_padded
from anabatic.device.device import select_device
from anabatic.device.ops import get_device_ops
from anabatic.models import forward, fused_ops, pretrained
from anabatic.models.experts.expert_layers import iter_expert_layers
from anabatic.models.experts.routing import make_recorder
from anabatic.models.model_init import count_parameters, flops_per_token
from anabatic.parallel.world import World
from anabatic.train.optim.optimizer import LearningRates, Optimizer
from anabatic.train.step import TrainStep
from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS, build_tiny_model

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {},
    "Mixtral": {},
    "GptOss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "Qwen2Moe": {"decoder_sparse_step": 2},
}
COEFFICIENT = 0.3


def build(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    settings = {**COMMON_CONFIG, **FAMILY_CONFIGS[name], **FAMILIES.get(name, {}), **more}
    config = getattr(transformers, f"{name}Config")(**settings, router_aux_loss_coef=COEFFICIENT)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 0.5, std=0.2)
    return model.train()


def packed(model: Any) -> Any:
    ours = copy.deepcopy(model)
    ours.config._attn_implementation = pretrained.ATTENTION_NAME
    fused_ops.install_fused_ops(ours, get_device_ops("cpu"))
    return ours


def step_of(model: Any, coefficient: float | None = None) -> TrainStep:
    device = select_device(DeviceSettings(type="cpu", threads=1))
    optimizer = Optimizer(model, Optim(name="adamw", max_grad_norm=0.0), LearningRates(0.0, 0.0), device, World())
    loss = functools.partial(forward.compute_summed_loss, chunk_bytes=1 << 16)
    routing = make_recorder(model, coefficient, CPU)
    return TrainStep(forward.ModelRoot(model), loss, optimizer, 32, routing=routing)


def gradients_of(step: TrainStep, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """The gradients as the optimizer receives them."""
    seen: dict[str, torch.Tensor] = {}
    original = step.optimizer.step

    def keep(scale: float, factor: torch.Tensor, ok: torch.Tensor) -> None:
        seen.update({n: p.grad * factor for n, p in step.optimizer.params.items() if p.grad is not None})
        original(scale, factor, ok)

    step.optimizer.step = keep  # type: ignore[method-assign]
    step.run_step(iter(batches), len(batches), 1.0)
    return seen


def pieces_of(lengths: list[int]) -> list[TokenSegment]:
    draw = np.random.default_rng(0)
    return [TokenSegment(draw.integers(3, 96, length + 1)) for length in lengths]


def transformers_loss(model: Any, pieces: list[TokenSegment]) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross-entropy over all targets, the loss of the routers) of transformers' own padded batch."""
    longest = max(piece.num_inputs for piece in pieces)
    ids = torch.zeros(len(pieces), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, piece in enumerate(pieces):
        ids[row, : piece.num_inputs] = torch.from_numpy(piece.ids[:-1])
        mask[row, : piece.num_inputs] = 1
    out = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    targets = [torch.from_numpy(piece.ids[1:]) for piece in pieces]
    rows = [out.logits[row, : piece.num_inputs] for row, piece in enumerate(pieces)]
    return F.cross_entropy(torch.cat(rows), torch.cat(targets)), out.aux_loss


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", ["packed", "packed tail", "padded rows"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_transformers_own(family: str, layout: str, recompute: Any) -> None:
    reference, pieces = build(family), pieces_of([5, 12, 9, 1, 20])
    capacity = 47 if layout == "packed" else 64
    batch = (collate_padded if layout == "padded rows" else collate_packed)(pieces, capacity, 7, 32)
    ours = packed(reference)
    pretrained.enable_activation_checkpointing(ours, recompute)
    step = step_of(ours, COEFFICIENT)
    found = gradients_of(step, [batch])
    stats = step.read_stats()
    entropy, balance = transformers_loss(reference, pieces)
    (entropy + COEFFICIENT * balance).backward()
    assert stats.loss == pytest.approx(entropy.item(), rel=1e-5)  # the logged loss is comparable with held-out loss
    assert stats.means["router_aux_loss"] == pytest.approx(balance.item(), rel=1e-5)
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        scale = float(grad.abs().max()) + 1e-9
        torch.testing.assert_close(found[name] / scale, grad / scale, rtol=0, atol=2e-4, msg=name)


def test_several_micro_batches_are_weighted_by_their_targets() -> None:
    reference = build("Qwen3Moe")
    groups = [pieces_of([30]), pieces_of([4, 6])]
    step = step_of(packed(reference), COEFFICIENT)
    found = gradients_of(step, [collate_packed(group, 32, 7, 32) for group in groups])
    losses = [transformers_loss(reference, group) for group in groups]
    mean = sum(n * (entropy + COEFFICIENT * balance) for n, (entropy, balance) in zip((30, 10), losses, strict=True))
    (mean / 40).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=2e-3, atol=2e-5, msg=name)


def test_config_json_decides_unless_the_setting_does() -> None:
    assert make_recorder(build("Qwen3Moe"), None, CPU).coefficient == 0.0  # type: ignore[union-attr]
    assert make_recorder(build("Qwen3Moe", output_router_logits=True), None, CPU).coefficient == COEFFICIENT  # type: ignore[union-attr]
    assert make_recorder(build("Qwen3Moe", output_router_logits=True), 0.0, CPU).coefficient == 0.0  # type: ignore[union-attr]
    assert make_recorder(build_tiny_model(), None, CPU) is None
    with pytest.raises(ConfigError, match=r"router_aux_loss is 0.1, and Qwen3ForCausalLM has no layers of experts"):
        make_recorder(build_tiny_model(), 0.1, CPU)
    with pytest.raises(ConfigError, match="no such loss for DeepseekV3ForCausalLM"):
        torch.manual_seed(0)
        config = transformers.DeepseekV3Config(**{**COMMON_CONFIG, **FAMILY_CONFIGS["DeepseekV3"]})
        make_recorder(transformers.AutoModelForCausalLM.from_config(config), 0.1, CPU)


def count_by_loop(model: Any, batch: Batch) -> list[list[int]]:
    """The tokens of every expert of every layer, by looking at each choice."""
    seen: list[list[int]] = []
    tokens = batch.make_token_mask()

    def look(module: Any, args: Any) -> None:
        counts = [0] * int(module.num_experts)
        for row, chosen in enumerate(args[1].tolist()):
            for expert in chosen:
                counts[expert] += tokens is None or bool(tokens[row])
        seen.append(counts)

    handles = [layer.register_forward_pre_hook(look) for _, layer in iter_expert_layers(model)]
    with torch.no_grad():
        forward.compute_summed_loss(model, forward.pack_batch(batch, CPU), 1 << 16)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("layout", ["packed tail", "padded rows"])
def test_imbalance_is_measured(layout: str) -> None:
    model, pieces = packed(build("Qwen3Moe")), pieces_of([5, 12, 9])
    batch = (collate_padded if layout == "padded rows" else collate_packed)(pieces, 40, 7, 32)
    counts = count_by_loop(model, batch)
    assert [sum(layer) for layer in counts] == [26 * 2] * 2
    step = step_of(model)
    step.run_step(iter([batch, batch]), 2, 1.0)
    means = step.read_stats().means
    assert means["expert_load_max"] == pytest.approx(max(max(layer) / (sum(layer) / 4) for layer in counts))
    entropies = [-sum(n / 52 * math.log(n / 52) for n in layer if n) / math.log(4) for layer in counts]
    assert means["expert_load_entropy"] == pytest.approx(sum(entropies) / 2)
    assert means["experts_unused"] == sum(layer.count(0) for layer in counts) / 8
    assert means["tokens_dropped"] == 0
    assert "router_aux_loss" not in means
    step.run_step(iter([replace(batch)]), 1, 1.0)
    assert step.read_stats().means["expert_load_max"] == pytest.approx(means["expert_load_max"])  # it starts anew


def test_all_tokens_to_one_expert() -> None:
    """Loss and gradients of an expert with all tokens, and of those with none, are the loop's."""
    reference = build("Qwen3Moe", num_experts_per_tok=1)
    for _, layer in iter_expert_layers(reference):
        assert layer.num_experts == 4
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("gate.weight"):
                parameter.zero_()  # equal scores: every token chooses the same expert
    pieces = pieces_of([5, 12, 9])
    step = step_of(packed(reference), COEFFICIENT)
    found = gradients_of(step, [collate_packed(pieces, 26, 7, 32)])
    means = step.read_stats().means
    assert (means["expert_load_max"], means["expert_load_entropy"], means["experts_unused"]) == (4.0, 0.0, 0.75)
    entropy, balance = transformers_loss(reference, pieces)
    (entropy + COEFFICIENT * balance).backward()
    for name, parameter in reference.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], grad, rtol=2e-3, atol=2e-5, msg=name)
        if name.endswith("experts.down_proj"):
            assert found[name].flatten(1).any(1).sum() == 1


def test_operations_count_the_experts_that_a_token_uses() -> None:
    model = build("Qwen3Moe")
    experts = sum(p.numel() for _, layer in iter_expert_layers(model) for p in layer.parameters())
    attention = 12.0 * 2 * 4 * 8 * 10
    assert flops_per_token(model, 10) == 6.0 * (count_parameters(model)[1] - experts / 2) + attention
    for _, layer in iter_expert_layers(model):
        layer.requires_grad_(False)
    assert flops_per_token(model, 10) == 6.0 * (count_parameters(model)[1] - experts / 2) + attention - 2 * experts / 2
