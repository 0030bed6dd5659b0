"""Optimizer and schedule against slow references."""

from __future__ import annotations

import math

import pytest
import torch

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.config.sections.common import Optim, Schedule
from anabatic.device.device import select_device
from anabatic.parallel.world import World
from anabatic.train.optim import adamw
from anabatic.train.optim.optimizer import LearningRates, Optimizer, compute_lr_scale, orthogonalize_matrices
from anabatic_testing.tiny_models import build_tiny_model


def optimizer_of(model, **changes) -> Optimizer:
    return Optimizer(
        model, Optim(**changes), LearningRates(1e-2, 2e-2), select_device(DeviceConfig(type="cpu")), World()
    )


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 16), (2, 16, 5)])
def test_orthogonalise_keeps_singular_vectors_and_levels_values(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape)
    out = orthogonalize_matrices(matrices)
    for before, after in zip(matrices, out, strict=True):
        u, _, v = torch.linalg.svd(before, full_matrices=False)
        inner = u.T @ after @ v.T
        values = torch.linalg.svdvals(after)
        assert values.min() > 0.3 and values.max() < 1.4
        torch.testing.assert_close(
            inner - torch.diag(torch.diagonal(inner)), torch.zeros_like(inner), atol=2e-3, rtol=0
        )


ONE = torch.tensor(1.0)


def give_gradients(model, generator: torch.Generator) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("kernel", ["fused", "flat"])
def test_adamw_equals_torch_step_by_step(kernel: str) -> None:
    config = Optim(name="adamw", beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
    generator = torch.Generator().manual_seed(0)
    start = {"matrix": torch.randn(4, 3, generator=generator), "vector": torch.randn(5, generator=generator)}
    ours = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    peer = torch.optim.AdamW(
        [{"params": [theirs["matrix"]], "weight_decay": 0.3}, {"params": [theirs["vector"]], "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    found = adamw.build_buckets(ours, config, torch.device("cpu"))
    for step in range(1, 6):
        count = torch.tensor(float(step))
        for name in start:
            theirs[name].grad = torch.randn(start[name].shape, generator=generator)
            ours[name].grad = theirs[name].grad * 4.0
        with torch.no_grad():
            for bucket in found:
                if kernel == "fused":
                    adamw.run_fused_kernel(bucket, count, 1e-2, config, torch.tensor(0.25))
                else:
                    adamw.run_flat_kernel(
                        bucket, adamw.make_flat_step(count, config, torch.tensor(0.25), ONE), 1e-2, config
                    )
        peer.step()
        for name in start:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", ["fp32", "bf16_kahan", "bf16_stochastic"])
def test_the_flat_kernel_refuses_whatever_the_gradients_hold(weights: str) -> None:
    config = Optim(name="adamw", weights=weights)
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    param = torch.nn.Parameter(torch.randn(6, 4).to(dtype))
    (bucket,) = adamw.build_buckets({"p": param}, config, torch.device("cpu"))
    before = param.detach().clone()
    for count, value in ((0.0, float("nan")), (0.0, float("inf"))):
        param.grad = torch.full((6, 4), value, dtype=dtype)
        with torch.no_grad():
            adamw.run_flat_kernel(
                bucket, adamw.make_flat_step(torch.tensor(count), config, ONE, torch.tensor(0.0)), 1e-2, config
            )
        assert torch.equal(param, before) and not bucket.exp_avg.any() and not bucket.exp_avg_sq.any()


@pytest.mark.parametrize("weights", ["fp32", "bf16_kahan"])
def test_a_large_matrix_is_updated_slice_by_slice(weights: str) -> None:
    """7 elements at once of 35, or all: the same to the last bit; moments in bf16 are rounded at random."""
    config = Optim(name="adamw", weight_decay=0.1, weights=weights)  # type: ignore[arg-type]
    results = []
    for most in (7, 8, 100):
        torch.manual_seed(0)
        param = torch.randn(5, 7).to(torch.float32 if weights == "fp32" else torch.bfloat16).requires_grad_()
        (bucket,) = adamw.build_buckets({"w": param}, config, torch.device("cpu"))
        for step in range(1, 4):
            param.grad = torch.randn(5, 7).to(param.dtype)
            with torch.no_grad():
                adamw.run_flat_kernel(
                    bucket,
                    adamw.make_flat_step(torch.tensor(float(step)), config, torch.tensor(0.5), ONE),
                    1e-2,
                    config,
                    most,
                )
            assert param.grad is None
        results.append(
            (
                param.detach(),
                bucket.exp_avg,
                bucket.exp_avg_sq,
                *([] if bucket.compensation is None else [bucket.compensation]),
            )
        )
    for other in results[1:]:
        if weights != "fp32":
            torch.testing.assert_close(other[0], results[0][0], rtol=1e-2, atol=1e-3)
            continue
        for ours, theirs in zip(other, results[0], strict=True):
            assert torch.equal(ours, theirs)


def test_rounding_at_random_keeps_the_mean() -> None:
    torch.manual_seed(0)
    value = torch.full((200_000,), 1.0 + 2**-9)  # a quarter of the way between two numbers of bf16
    found = adamw.round_stochastically(value)
    assert set(found.tolist()) == {1.0, 1.0 + 2**-7}
    assert found.float().mean().item() == pytest.approx(1.0 + 2**-9, abs=5e-5)
    whole = torch.randn(1000).bfloat16().float()
    assert torch.equal(adamw.round_stochastically(whole).float(), whole)


@pytest.mark.parametrize("weights", ["bf16_kahan", "bf16_stochastic"])
def test_bf16_weights_follow_fp32_where_plain_rounding_stands_still(weights: str) -> None:
    """Steps of 1e-4 from 1.0, whose neighbour in bf16 is 0.0039 away."""
    torch.manual_seed(0)
    ends = {}
    for kind in ("fp32", weights):
        config = Optim(name="adamw", weights=kind, weight_decay=0.0, beta2=0.999)
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        param = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))
        (bucket,) = adamw.build_buckets({"p": param}, config, torch.device("cpu"))
        for step in range(1, 101):
            param.grad = torch.ones(64, 64, dtype=dtype)
            with torch.no_grad():
                adamw.run_flat_kernel(
                    bucket, adamw.make_flat_step(torch.tensor(float(step)), config, ONE, ONE), 1e-4, config
                )
        ends[kind] = param.detach().float().mean().item()
    assert ends["fp32"] == pytest.approx(0.99, abs=1e-4)
    assert ends[weights] == pytest.approx(ends["fp32"], abs=2e-3 if weights == "bf16_kahan" else 5e-4)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_fused_and_flat_updates_agree(name: str) -> None:
    results = []
    for fused in (True, False):
        model = build_tiny_model()
        optimizer = optimizer_of(model, name=name)
        optimizer.is_fused = fused
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            give_gradients(model, generator)
            optimizer.collect_grads()
            optimizer.step(0.7, torch.tensor(0.5), ONE)
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["muon", "adamw"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_refused_update_changes_nothing(name: str, fused: bool) -> None:
    model = build_tiny_model()
    optimizer = optimizer_of(model, name=name)
    optimizer.is_fused = fused
    generator = torch.Generator().manual_seed(0)
    give_gradients(model, generator)
    optimizer.collect_grads()
    optimizer.step(1.0, ONE, ONE)
    before = [tensor.clone() for tensor in (*model.parameters(), *optimizer.state_dict().values())]
    give_gradients(model, generator)
    optimizer.collect_grads()
    optimizer.step(1.0, ONE, torch.tensor(0.0))
    after = [*model.parameters(), *optimizer.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_muon_takes_the_matrices_of_the_blocks_and_nothing_else() -> None:
    optimizer = optimizer_of(build_tiny_model())
    taken = {name for stack in optimizer.stacks for name in stack.params}
    assert taken and all(".layers." in name and name.endswith("proj.weight") for name in taken)
    others = {name for bucket in optimizer.buckets for name in bucket.params}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= others
    assert not optimizer_of(build_tiny_model(), name="adamw").stacks


def test_norms_do_not_keep_the_gradients_of_their_block() -> None:
    """All gradients of a block are one tensor, as a joint cast gives them; stacks of matrices copy theirs."""
    model = build_tiny_model()
    optimizer = optimizer_of(model, name="muon")
    expected = {}
    for layer in model.model.layers:
        params = dict(layer.named_parameters())
        flat = torch.randn(sum(param.numel() for param in params.values()))
        for param, part in zip(params.values(), flat.split([param.numel() for param in params.values()]), strict=True):
            param.grad = part.view(param.shape)
            expected[id(param)] = param.grad.clone()
    optimizer.collect_grads()
    norms = [param for param in optimizer.params.values() if param.grad is not None]
    assert norms and sum(param.grad.untyped_storage().nbytes() for param in norms) < 64 * 4 * 64
    assert all(torch.equal(param.grad, expected[id(param)]) for param in norms)


def test_state_shares_memory_with_the_optimizer() -> None:
    optimizer = optimizer_of(build_tiny_model())
    for tensor in optimizer.state_dict().values():
        tensor.fill_(3.0)
    assert all(bool((stack.momentum == 3).all()) for stack in optimizer.stacks)
    assert all(bool((bucket.exp_avg == 3).all()) for bucket in optimizer.buckets)


def test_schedule_rises_stays_and_falls() -> None:
    schedule = Schedule(warmup_ratio=0.1, decay_ratio=0.4, final_lr_ratio=0.1)
    values = [compute_lr_scale(step, 100, schedule) for step in range(1, 101)]
    assert values[0] == pytest.approx(0.1) and values[9] == 1.0
    assert all(value == 1.0 for value in values[9:60])
    assert values[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(values[60:], values[61:], strict=False))


def test_cosine_and_no_decay() -> None:
    cosine = Schedule(warmup_ratio=0.0, decay_ratio=1.0, decay="cosine", final_lr_ratio=0.0)
    assert compute_lr_scale(50, 100, cosine) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.5)))
    assert compute_lr_scale(100, 100, Schedule(decay="none")) == 1.0


@pytest.mark.parametrize("total", [1, 2, 3])
def test_tiny_runs_have_a_usable_learning_rate(total: int) -> None:
    assert all(0 < compute_lr_scale(step, total, Schedule()) <= 1 for step in range(1, total + 1))
