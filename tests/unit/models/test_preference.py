"""Preference losses against their formulas in float64, and the reference model against its own model."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.config.sections.common import Optim
from anabatic.config.sections.train_jobs import Lora
from anabatic.data.batching.packing import Batch, TokenSegment
from anabatic.data.chat.preference_pairs import REJECTED_BIT, collate_preference_pairs
from anabatic.device import ops
from anabatic.device.device import select_device
from anabatic.models.forward import ModelRoot
from anabatic.models.lora import adapter
from anabatic.models.preference_loss import (
    PREFERENCE_METRIC_NAMES,
    PreferenceLoss,
    PreferenceOptions,
    compute_pair_losses,
    compute_rewards,
)
from anabatic.parallel.world import World
from anabatic.train.optim.optimizer import LearningRates, Optimizer
from anabatic.train.step import TrainStep
from anabatic_testing.tiny_models import build_tiny_model

CPU = torch.device("cpu")
CHUNK = 1 << 12
OBJECTIVES = [
    PreferenceOptions(),
    PreferenceOptions(beta=0.5, label_smoothing=0.1),
    PreferenceOptions(beta=0.2, loss_type="ipo"),
    PreferenceOptions(beta=2.0, loss_type="hinge"),
    PreferenceOptions(rpo_alpha=0.7),
    PreferenceOptions(beta=2.0, loss_type="simpo", simpo_gamma=0.8),
    PreferenceOptions(beta=0.3, loss_type="orpo"),
]


def pair(seed: int, shared: int, better: int, worse: int) -> TokenSegment:
    """`shared` tokens of a question, then two answers."""
    draw = np.random.default_rng(seed)
    question = draw.integers(1, 320, shared)
    ids, mask = [], []
    for mark, length in ((0, better), (REJECTED_BIT, worse)):
        ids += [question, draw.integers(1, 320, length)]
        mark_of = np.full(shared + length, mark, dtype=np.uint8)
        mark_of[shared:] |= 1
        mask.append(mark_of)
    return TokenSegment(np.concatenate(ids), np.concatenate(mask))


PAIRS = [pair(0, 5, 4, 7), pair(1, 3, 6, 2), pair(2, 8, 1, 5)]


def batch_of(pairs: list[TokenSegment], capacity: int = 70) -> Batch:
    return collate_preference_pairs(pairs, capacity, 0, 64)


def loss_of(model: PreTrainedModel, objective: PreferenceOptions | None = None, dtype: Any = "fp32") -> PreferenceLoss:
    device = select_device(DeviceConfig(type="cpu", threads=1, dtype=dtype))
    return PreferenceLoss(ModelRoot(model), device, objective or PreferenceOptions())


def value(loss: PreferenceLoss, batch: Batch | None = None) -> Tensor:
    """As a step does it."""
    pairs = loss.pack_batch(batch_of(PAIRS) if batch is None else batch, CPU)
    with loss.device.autocast():
        found: Tensor = loss.root(loss, pairs)
    return found


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in float64 in transformers' own code."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    made.load_state_dict(model.state_dict())
    return made.double()


def slow_log_probs(model: torch.nn.Module, piece: TokenSegment) -> Tensor:
    """Each answer alone, all logits, float64."""
    assert piece.loss_mask is not None
    border = int(np.argmax(piece.loss_mask >= REJECTED_BIT))
    found = []
    for side in (slice(None, border), slice(border, None)):
        ids = torch.from_numpy(piece.ids[side])
        logits = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        learned = torch.from_numpy(piece.loss_mask[side][1:] & 1).bool()
        found.append(logits.gather(1, ids[1:, None])[learned, 0].sum())
    return torch.stack(found)


def slow_loss(now: Tensor, before: Tensor, lengths: Tensor, objective: PreferenceOptions) -> Tensor:
    """The papers' formulas, pair by pair."""
    total = now.new_zeros(())
    for (a, b), (c, d), (m, n) in zip(now, before, lengths, strict=True):
        better, worse = a - c, b - d
        if objective.loss_type == "ipo":
            total = total + (better / m - worse / n - 1 / (2 * objective.beta)) ** 2
        elif objective.loss_type == "simpo":
            total = total - torch.sigmoid(objective.beta * (a / m - b / n) - objective.simpo_gamma).log()
        elif objective.loss_type == "orpo":
            p, q = (a / m).exp(), (b / n).exp()
            ratio = (p / (1 - p)) / (q / (1 - q))
            total = total - a / m - objective.beta * torch.sigmoid(ratio.log()).log()
        elif objective.loss_type == "hinge":
            total = total + torch.relu(1 - objective.beta * (better - worse))
        else:
            odds = torch.sigmoid(objective.beta * (better - worse))
            smooth = objective.label_smoothing
            total = total - (1 - smooth) * odds.log() - smooth * (1 - odds).log()
        total = total - objective.rpo_alpha * a / m
    return total


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_are_the_formulas(objective: PreferenceOptions) -> None:
    generator = torch.Generator().manual_seed(3)
    now, before = (-20 * torch.rand(6, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    lengths = torch.randint(1, 9, (6, 2), generator=generator).double()
    ours = compute_pair_losses(now, before, lengths, objective).sum()
    torch.testing.assert_close(ours, slow_loss(now, before, lengths, objective), rtol=1e-12, atol=1e-12)
    found = compute_rewards(now, before, lengths, objective)
    torch.testing.assert_close(found[:, 2], found[:, 0] - found[:, 1])
    assert torch.equal(found[:, 3], (found[:, 0] > found[:, 1]).double())


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("frozen", [True, False])
def test_log_probabilities_have_the_gradient_of_the_plain_formula(frozen: bool, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(13, 6, generator=generator, requires_grad=True)
    weight = torch.randn(11, 6, generator=generator, requires_grad=not frozen)
    labels = torch.randint(0, 11, (13,), generator=generator)
    worth = torch.randn(13, generator=generator)
    ours = ops.linear_log_probs(hidden, weight, labels, chunk_bytes=4 * 11 * 4, softcap=softcap)
    ours.backward(worth)
    wide, head = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = wide @ head.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    plain = logits.log_softmax(1).gather(1, labels[:, None])[:, 0]
    plain.backward(worth.double())
    torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)
    assert weight.grad is None if frozen else torch.allclose(weight.grad.double(), head.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_packed_batch_gives_loss_and_gradient_of_the_answers_alone(objective: PreferenceOptions) -> None:
    model = build_tiny_model()
    before = plain(model)
    loss = loss_of(model, objective)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    now = plain(model)
    ours = value(loss)
    ours.backward()

    lengths = torch.tensor([[4, 7], [6, 2], [1, 5]], dtype=torch.float64)
    with torch.no_grad():
        reference = torch.stack([slow_log_probs(before, piece) for piece in PAIRS])
    trained = torch.stack([slow_log_probs(now, piece) for piece in PAIRS])
    slow = slow_loss(trained, reference, lengths, objective)
    slow.backward()
    torch.testing.assert_close(ours.double(), slow, rtol=1e-4, atol=1e-4)
    for (name, one), two in zip(model.named_parameters(), now.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), two.grad, rtol=2e-3, atol=2e-4, msg=name)
    with torch.no_grad():
        expected = compute_rewards(trained, reference, lengths, objective).sum(0)
    torch.testing.assert_close(loss.metric_sums.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "lora", [Lora(r=4), Lora(r=4, dropout=0.5), Lora(r=4, init="pissa"), Lora(r=4, use_dora=True)], ids=str
)
def test_training_begins_at_the_reference(lora: Lora) -> None:
    model = build_tiny_model()
    adapter.insert_adapter(model, lora)
    adapter.init_adapter_weights(model, lora, seed=1)
    loss = loss_of(model)
    loss.root.train(not lora.dropout)  # with dropout they are equal on average only
    first = value(loss)
    assert first.item() == pytest.approx(3 * math.log(2), rel=1e-6) and not loss.metric_sums[:3].abs().gt(1e-6).any()
    first.backward()
    with torch.no_grad():
        for layer in adapter.find_lora_layers(model).values():
            layer.lora_B.add_(0.1)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        moved = value(loss)
    assert abs(moved.item() - first.item()) > 1e-3
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert model.training is not bool(lora.dropout)


def test_an_adapter_that_goes_on_is_its_own_reference() -> None:
    model = build_tiny_model()
    adapter.insert_adapter(model, Lora(r=4))
    adapter.init_adapter_weights(model, Lora(r=4), seed=1)
    for layer in adapter.find_lora_layers(model).values():
        layer.lora_B.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    loss = loss_of(model)
    assert value(loss).item() == pytest.approx(3 * math.log(2), rel=1e-6)


def test_half_precision_copies_do_not_outlive_the_reference() -> None:
    model = build_tiny_model()
    loss = loss_of(model, PreferenceOptions(beta=1.0), "bf16")
    assert value(loss).item() == pytest.approx(3 * math.log(2), rel=2**-9)  # half of the last bit of bf16
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    value(loss).backward()
    assert loss.metric_sums[:2].abs().sum() > 0.1
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["orpo", "simpo"])
def test_some_losses_ask_no_reference(name: Any) -> None:
    loss = loss_of(build_tiny_model(), PreferenceOptions(loss_type=name))
    assert loss.reference is None
    passes: list[int] = []
    loss.root.register_forward_hook(lambda *_: passes.append(1))
    value(loss).backward()
    assert len(passes) == 1, "one forward pass a batch"


def test_orpo_of_an_answer_that_is_certain_is_finite() -> None:
    now = torch.tensor([[-1e-9, -3.0], [0.0, -700.0]], requires_grad=True)
    losses = compute_pair_losses(now, torch.zeros(2, 2), torch.ones(2, 2), PreferenceOptions(loss_type="orpo"))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert now.grad is not None and now.grad.isfinite().all()


def step_of() -> TrainStep:
    device = select_device(DeviceConfig(type="cpu", threads=1))
    model = build_tiny_model()
    loss = PreferenceLoss(ModelRoot(model), device, PreferenceOptions(beta=1.0))
    optimizer = Optimizer(model, Optim(name="adamw", max_grad_norm=0.0), LearningRates(1e-3, 1e-3), device, World())
    return TrainStep(loss.root, loss, optimizer, 70, loss.pack_batch, loss.metric_sums, PREFERENCE_METRIC_NAMES)


def test_a_step_counts_per_pair_and_a_checkpoint_keeps_the_sums() -> None:
    one, two = step_of(), step_of()
    for step, capacity in ((one, [70]), (two, [30, 20, 30])):
        groups = [PAIRS] if len(capacity) == 1 else [[piece] for piece in PAIRS]
        for _ in range(3):
            batches = [batch_of(group, room) for group, room in zip(groups, capacity, strict=True)]
            step.run_step(iter(batches), len(batches), 1.0)
    kept = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    seen, split = one.read_stats(), two.read_stats()
    assert seen.targets == split.targets == 9 and list(seen.means) == list(PREFERENCE_METRIC_NAMES)
    assert seen.loss == pytest.approx(split.loss, rel=1e-4) and seen.loss < math.log(2)
    # At the first step the model is its own reference: which of two equal rewards is larger, rounding decides.
    assert seen.means["accuracy"] == pytest.approx(split.means["accuracy"], abs=3 / 9)
    others = [{name: mean for name, mean in one.means.items() if name != "accuracy"} for one in (seen, split)]
    assert others[0] == pytest.approx(others[1], rel=1e-2, abs=1e-3)
    assert seen.means["margin"] == pytest.approx(seen.means["rewards/chosen"] - seen.means["rewards/rejected"])
    for name, tensor in one.state_dict().items():
        tensor.copy_(kept[name])
    assert one.read_stats().means == seen.means
