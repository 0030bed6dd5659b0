"""Optimizer and schedule against slow references."""

from __future__ import annotations

import math

import pytest
import torch

from anabatic.config.shared import Device as DeviceConfig
from anabatic.config.shared import Optim, Schedule
from anabatic.device.device import pick
from anabatic.parallel.world import World
from anabatic.testing.tiny import tiny_model
from anabatic.train.optim import Optimizer, adamw_reference, orthogonalise
from anabatic.train.schedule import lr_scale


def optimizer_of(model, **changes) -> Optimizer:
    return Optimizer(model, Optim(**changes), 1e-2, 2e-2, pick(DeviceConfig(type="cpu")), World())


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 16), (2, 16, 5)])
def test_orthogonalise_keeps_singular_vectors_and_levels_values(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape)
    out = orthogonalise(matrices)
    for before, after in zip(matrices, out, strict=True):
        u, _, v = torch.linalg.svd(before, full_matrices=False)
        inner = u.T @ after @ v.T
        values = torch.linalg.svdvals(after)
        assert values.min() > 0.3 and values.max() < 1.4
        torch.testing.assert_close(
            inner - torch.diag(torch.diagonal(inner)), torch.zeros_like(inner), atol=2e-3, rtol=0
        )


def test_adamw_equals_torch_step_by_step() -> None:
    config = Optim(beta1=0.8, beta2=0.9, eps=1e-6)
    start = torch.randn(4, 3)
    theirs = torch.nn.Parameter(start.clone())
    peer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    ours, moments = start.clone(), (torch.zeros(4, 3), torch.zeros(4, 3))
    for step in range(1, 6):
        theirs.grad = torch.randn(4, 3)
        count = torch.tensor(float(step))
        adamw_reference([ours], [theirs.grad.clone()], [moments], count, 1e-2, config, 0.3, 1.0)
        peer.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_fused_and_plain_updates_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    results = []
    for fused in (True, False):
        model = tiny_model()
        optimizer = optimizer_of(model, name=name)
        row = dataclasses.replace(optimizer.device.row, fused_adamw=fused)
        optimizer.device = dataclasses.replace(optimizer.device, row=row)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step(0.7)
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["muon", "adamw"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_refused_update_changes_nothing(name: str, fused: bool) -> None:
    import dataclasses

    model = tiny_model()
    optimizer = optimizer_of(model, name=name)
    row = dataclasses.replace(optimizer.device.row, fused_adamw=fused)
    optimizer.device = dataclasses.replace(optimizer.device, row=row)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step(1.0, torch.tensor(1.0))
    before = [tensor.clone() for tensor in (*model.parameters(), *optimizer.state().values())]
    for parameter in model.parameters():
        parameter.grad = torch.zeros(parameter.shape)
    optimizer.step(1.0, torch.tensor(0.0))
    after = [*model.parameters(), *optimizer.state().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_muon_takes_the_matrices_of_the_blocks_and_nothing_else() -> None:
    optimizer = optimizer_of(tiny_model())
    taken = {name for names in optimizer.stacks for name in names}
    assert taken and all(".layers." in name and name.endswith("proj.weight") for name in taken)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(optimizer.adam_names)
    assert not [name for names in optimizer_of(tiny_model(), name="adamw").stacks for name in names]


def test_state_shares_memory_with_the_optimizer() -> None:
    optimizer = optimizer_of(tiny_model())
    for tensor in optimizer.state().values():
        tensor.fill_(3.0)
    assert all(bool((stack == 3).all()) for stack in optimizer.momentum)
    assert all(bool((first == 3).all()) for first, _ in optimizer.moments.values())


def test_schedule_rises_stays_and_falls() -> None:
    schedule = Schedule(warmup_ratio=0.1, decay_ratio=0.4, final_lr_ratio=0.1)
    values = [lr_scale(step, 100, schedule) for step in range(1, 101)]
    assert values[0] == pytest.approx(0.1) and values[9] == 1.0
    assert all(value == 1.0 for value in values[9:60])
    assert values[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(values[60:], values[61:], strict=False))


def test_cosine_and_no_decay() -> None:
    cosine = Schedule(warmup_ratio=0.0, decay_ratio=1.0, decay="cosine", final_lr_ratio=0.0)
    assert lr_scale(50, 100, cosine) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.5)))
    assert lr_scale(100, 100, Schedule(decay="none")) == 1.0


@pytest.mark.parametrize("total", [1, 2, 3])
def test_tiny_runs_have_a_usable_learning_rate(total: int) -> None:
    assert all(0 < lr_scale(step, total, Schedule()) <= 1 for step in range(1, total + 1))
