"""A step: the mean over all targets, clipping, refusal of what is not finite."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.config.sections.common import Optim
from anabatic.data.batching.packing import IGNORE_INDEX, Batch
from anabatic.device.device import select_device
from anabatic.models.forward import ModelRoot, compute_summed_loss
from anabatic.parallel.world import World
from anabatic.train.optim.optimizer import LearningRates, Optimizer
from anabatic.train.step import LossScale, TrainStep
from anabatic_testing.tiny_models import build_tiny_model


def batch_of(tokens: int, targets: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 320, (tokens,), generator=generator)
    labels[targets:] = IGNORE_INDEX
    ids = torch.randint(0, 320, (tokens,), generator=generator)
    return Batch(ids, labels, torch.arange(tokens), [0, tokens], targets, tokens, {"at": seed})


def step_of(model, dtype: torch.dtype = torch.float32, **optim) -> TrainStep:
    device = replace(select_device(DeviceConfig(type="cpu", threads=1)), dtype=dtype)
    optimizer = Optimizer(model, Optim(**optim), LearningRates(1e-2, 1e-2), device, World())
    return TrainStep(ModelRoot(model), functools.partial(compute_summed_loss, chunk_bytes=1 << 16), optimizer, 32)


def captured_gradient(step: TrainStep, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """The gradients as the optimizer receives them."""
    seen: dict[str, torch.Tensor] = {}
    original = step.optimizer.step

    def keep(scale: float, factor: torch.Tensor, ok: torch.Tensor) -> None:
        seen.update({name: param.grad * factor for name, param in step.optimizer.params.items()})
        original(scale, factor, ok)

    step.optimizer.step = keep  # type: ignore[method-assign]
    step.run_step(iter(batches), len(batches), 1.0)
    return seen


def test_gradient_is_that_of_the_mean_over_all_targets_of_all_micro_batches() -> None:
    batches = [batch_of(30, 30, 1), batch_of(20, 3, 2), batch_of(10, 7, 3)]
    ours = captured_gradient(step_of(build_tiny_model(), name="adamw", max_grad_norm=0.0), batches)
    model = build_tiny_model()
    total = torch.zeros(())
    for batch in batches:
        from anabatic.models.forward import pack_batch

        total = total + compute_summed_loss(model, pack_batch(batch, torch.device("cpu")), 1 << 16)
    (total / 40).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(ours[name], param.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_gradient_is_clipped_by_its_global_norm() -> None:
    free = captured_gradient(step_of(build_tiny_model(), name="adamw", max_grad_norm=0.0), [batch_of(30, 30, 1)])
    clipped = captured_gradient(step_of(build_tiny_model(), name="adamw", max_grad_norm=0.01), [batch_of(30, 30, 1)])
    norm = torch.sqrt(sum((grad**2).sum() for grad in free.values()))
    assert norm > 0.01
    for name, grad in free.items():
        torch.testing.assert_close(clipped[name], grad * 0.01 / norm, rtol=1e-3, atol=1e-8)


def test_what_happened_is_counted_once() -> None:
    step = step_of(build_tiny_model())
    step.run_step(iter([batch_of(30, 10, 1), batch_of(20, 5, 2)]), 2, 1.0)
    drained = step.read_stats()
    assert (drained.targets, drained.tokens, drained.skipped, drained.should_stop) == (15, 50, 0, False)
    assert 0 < drained.loss < 20 and drained.grad_norm > 0
    assert step.read_stats().targets == 0


def test_the_wish_to_stop_is_not_saved() -> None:
    step = step_of(build_tiny_model())
    step.stop_signal = 15
    step.run_step(iter([batch_of(30, 10, 1)]), 1, 1.0)
    again = step_of(build_tiny_model())
    for name, tensor in again.state_dict().items():
        tensor.copy_(step.state_dict()[name])
    assert step.read_stats().should_stop
    drained = again.read_stats()
    assert (drained.should_stop, drained.targets) == (False, 10)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_step_that_is_not_finite_leaves_the_model_as_it_was(optimizer: str) -> None:
    model = build_tiny_model()
    step = step_of(model, name=optimizer)
    step.run_step(iter([batch_of(30, 30, 1)]), 1, 1.0)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    before = [parameter.clone() for parameter in model.parameters()]
    step.run_step(iter([batch_of(30, 30, 2)]), 1, 1.0)
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    drained = step.read_stats()
    assert drained.skipped == 1 and drained.targets == 30
    assert drained.loss == pytest.approx(drained.loss)


def test_a_batch_without_targets_does_no_harm() -> None:
    model = build_tiny_model()
    step = step_of(model)
    step.run_step(iter([batch_of(10, 0, 1)]), 1, 1.0)
    assert step.read_stats().targets == 0
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_loss_falls_on_one_batch() -> None:
    step = step_of(build_tiny_model())
    losses = []
    for _ in range(15):
        step.run_step(iter([batch_of(30, 30, 1)]), 1, 1.0)
        losses.append(step.read_stats().loss)
    assert losses[-1] < 0.7 * losses[0]


def test_a_signal_in_the_middle_of_a_long_step_keeps_nothing_of_it() -> None:
    model = build_tiny_model()
    step = step_of(model)
    before = [parameter.clone() for parameter in model.parameters()]

    def batches() -> Iterator[Batch]:
        yield batch_of(30, 30, 1)
        step.stop_signal = 15
        yield batch_of(30, 30, 2)
        raise AssertionError("a third batch was read")

    assert step.run_step(batches(), 5, 1.0) is None
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert step.read_stats().tokens == 0


def test_fp16_gives_the_gradient_of_fp32_with_its_scale_taken_out() -> None:
    batches = [batch_of(30, 30, 1), batch_of(20, 3, 2)]
    wanted = captured_gradient(step_of(build_tiny_model(), name="adamw", max_grad_norm=0.0), batches)
    found = captured_gradient(step_of(build_tiny_model(), torch.float16, name="adamw", max_grad_norm=0.0), batches)
    for name, grad in wanted.items():
        assert (found[name] - grad).norm() <= 0.02 * grad.norm() + 1e-6, name


def test_an_overflow_in_fp16_changes_no_weight_and_halves_the_scale() -> None:
    model = build_tiny_model()
    step = step_of(model, torch.float16, name="adamw")
    step.loss_scale.value.fill_(2.0**40)  # no fp16 gradient is that small
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step.run_step(iter([batch_of(30, 30, 1)]), 1, 1.0)
    assert step.read_stats().skipped == 1
    assert float(step.loss_scale.value) == 2.0**39
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    step.loss_scale.value.fill_(2.0**10)
    step.run_step(iter([batch_of(30, 30, 1)]), 1, 1.0)
    assert step.read_stats().skipped == 0 and float(step.loss_scale.value) == 2.0**10
    assert not all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_the_scale_moves_as_the_grad_scaler_of_torch() -> None:
    """2,000 whole steps in a row double it, an overflow halves it and begins the count anew; state_dict has both."""
    device = replace(select_device(DeviceConfig(type="cpu", threads=1)), dtype=torch.float16)
    ours, theirs = LossScale(device), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs.scale(torch.ones(1))  # it makes its tensors at the first use
    for number in range(4100):
        good = number != 50
        weight.grad = torch.full((1,), 1.0 if good else float("inf"))
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(float(good)))
    assert float(ours.value) == theirs.get_scale() == 2.0**17
