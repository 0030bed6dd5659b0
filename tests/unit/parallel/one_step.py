"""One training step of a small model in a mesh of processes: what it makes of gradients, norm, weights and loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

from anabatic.config.sections.common import DeviceSettings, Optim, Parallel
from anabatic.config.sections.train_jobs import Lora
from anabatic.data.batching.packing import IGNORE_INDEX, Batch
from anabatic.device.device import select_device
from anabatic.models import fused_ops
from anabatic.models.lora import adapter
from anabatic.models.model_init import materialize_model
from anabatic.models.preference_loss import PreferenceOptions
from anabatic.models.pretrained import build_meta_causal_lm, load_folder_weights
from anabatic.models.reward_head import RewardOptions, attach_score_head, init_score_head
from anabatic.parallel.sharded_tensors import gather_full_tensor, to_local
from anabatic.parallel.sharding import resolve_sharding, wrap_ddp
from anabatic.parallel.world import World
from anabatic.train import objectives
from anabatic.train.optim.optimizer import LearningRates, Optimizer
from anabatic.train.step import TrainStep
from anabatic_testing.tiny_models import COMMON_CONFIG

Settings = dict[str, Any]
DEVICE = DeviceSettings(type="cpu", threads=1)


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and over which mesh.

    Attributes:
        family: class of transformers, without Config; settings: what its configuration adds.
        lora: settings of an adapter; mesh: of `parallel`; fused: the device's fused operators are installed.
    """

    family: str
    settings: Settings = field(default_factory=dict)
    lora: Settings | None = None
    strategy: Literal["ddp", "zero2", "zero3"] = "ddp"
    optim: Literal["adamw", "muon"] = "adamw"
    mesh: Settings = field(default_factory=dict)
    objective: Literal["next", "sigmoid", "kto", "reward"] = "next"
    fused: bool = False


def batch_of(lengths: list[int]) -> Batch:
    """A packed batch of random tokens, of which the first half of the first segment are no targets."""
    generator = torch.Generator().manual_seed(lengths[0])
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    ids, labels = (torch.randint(3, 96, (borders[-1],), generator=generator) for _ in range(2))
    labels[: lengths[0] // 2] = IGNORE_INDEX
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(ids, labels, positions, borders, int((labels != IGNORE_INDEX).sum()), borders[-1])


def config_of(name: str, settings: Settings) -> Any:
    return getattr(transformers, f"{name}Config")(**{**COMMON_CONFIG, **settings})


def save_random_model(folder: Path, case: Case) -> None:
    """Save the model of a case with random weights."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(case.family, case.settings))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 0.5, std=0.2)
    model.save_pretrained(folder)


def train_step(
    folder: Path, case: Case, world: World, batches: Sequence[Batch], settings: DeviceSettings = DEVICE
) -> dict[str, Tensor]:
    """Make one step of a case; return the gradients as the optimizer receives them, their norm, the loss, what the
    objective adds up beside it, and the weights after the step; all whole.

    Args:
        folder: of the model; batches: of all ranks, in turn; settings: of the device.
    """
    device = select_device(settings)
    model = build_meta_causal_lm(folder, torch.float32)
    if case.lora is not None:
        adapter.insert_adapter(model, Lora(r=4, **case.lora))
    if case.objective == "reward":
        attach_score_head(model, torch.float32)
    division = resolve_sharding(Parallel(strategy=case.strategy if world.size > 1 else "auto"), world, device)
    root = materialize_model(model, division, device, world)
    load_folder_weights(model, folder)
    if case.objective == "reward":
        init_score_head(model, 0)
    if case.lora is not None:
        adapter.init_adapter_weights(model, Lora(r=4, **case.lora), seed=1)
        for layer in adapter.find_lora_layers(model).values():  # so that gradients reach A
            to_local(layer.lora_B.detach()).add_(0.1)
    if case.fused:
        fused_ops.apply_fused_setting(model, "auto", device.type)
    optimizer = Optimizer(
        model, Optim(name=case.optim), LearningRates(1e-2, 1e-2), device, world, experts=root.expert_params
    )
    objective = _make_objective(case, root, device, world)
    step = TrainStep(
        wrap_ddp(root, division, device, world),
        objective.loss_fn,
        optimizer,
        17,
        objective.pack_batch,
        objective.metric_sums,
        objective.metric_names,
    )
    kept: dict[str, Tensor] = {}
    collect: Callable[[], Any] = optimizer.collect_grads

    def watch() -> Any:
        params = {name: param for name, param in optimizer.params.items() if param.grad is not None}
        kept.update({name: gather_full_tensor(param.grad).clone() for name, param in params.items()})  # type: ignore[arg-type]
        return collect()

    optimizer.collect_grads = watch  # type: ignore[method-assign]
    mine = batches[world.data_group.rank :: world.data_group.size]
    step.run_step(iter(mine), len(mine), 1.0)
    made = {f"{name}.grad": grad * world.gradient_group.size for name, grad in kept.items()}
    made |= {name: gather_full_tensor(param.detach()).clone() for name, param in model.named_parameters()}
    # Before the first update the accuracy compares rounding with zero.
    counted = [True] * 4 + [name != "accuracy" for name in objective.metric_names]
    sums = step.totals[1:].cpu()[torch.tensor(counted)]
    made |= {"loss": step.totals[0] / step.totals[1], "norm": step.grad_norm, "sums": sums}
    made["valid"] = _measure(objective, batches, world)
    return {name: value.cpu().contiguous() for name, value in made.items()}


def _make_objective(case: Case, root: Any, device: Any, world: World) -> objectives.Objective:
    if case.objective == "next":
        return objectives.make_next_token_objective(root, device, world, 64)
    if case.objective == "reward":
        return objectives.make_reward_objective(root, device, world, 64, RewardOptions())
    return objectives.make_preference_objective(root, device, world, 64, PreferenceOptions(loss_type=case.objective))


class _Heldout(list[Batch]):
    """The batches of a rank, as an evaluation reads them."""

    num_bytes = 100


def _measure(objective: objectives.Objective, batches: Sequence[Batch], world: World) -> Tensor:
    """Return what held-out data give after the step, by name."""
    mine: Any = _Heldout(batches[world.data_group.rank :: world.data_group.size])
    found = objective.validate(mine)
    return torch.tensor([float(found[name] or 0) for name in sorted(found)], dtype=torch.float64)
