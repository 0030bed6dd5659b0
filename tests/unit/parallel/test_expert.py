"""Experts divided among processes: a step makes the losses, gradients, norm and weights of one process."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from anabatic.config.sections.common import DeviceSettings, Optim, Parallel
from anabatic.config.sections.train_jobs import Lora
from anabatic.core.errors import ConfigError
from anabatic.data.batching.packing import IGNORE_INDEX, Batch
from anabatic.device.device import select_device
from anabatic.models import weights_reader
from anabatic.models.experts import expert_parallel
from anabatic.models.experts.routing import make_recorder
from anabatic.models.forward import compute_summed_loss
from anabatic.models.lora import adapter
from anabatic.models.model_init import materialize_model
from anabatic.models.pretrained import build_meta_causal_lm, init_empty_weights, load_folder_weights
from anabatic.parallel.sharded_tensors import gather_full_tensor, to_local
from anabatic.parallel.sharding import resolve_sharding, wrap_ddp
from anabatic.parallel.world import World, build_world, init_world, leave_world
from anabatic.plan.mesh_shape import MeshShape
from anabatic.train.optim.optimizer import LearningRates, Optimizer
from anabatic.train.step import TrainStep
from anabatic_testing.multiprocess import spawn_ranks
from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS

DEVICE = DeviceSettings(type="cpu", threads=1)
# case: (class, ranks that share the experts, strategy, with an adapter, optimizer)
CASES: dict[str, tuple[str, int, str, bool, str]] = {
    "ddp": ("Qwen3Moe", 2, "ddp", False, "adamw"),
    "zero3": ("Qwen3Moe", 2, "zero3", False, "muon"),
    "zero3 copies": ("Qwen3Moe", 2, "zero3", False, "adamw"),
    "zero2 gpt-oss": ("GptOss", 2, "zero2", False, "adamw"),
    "zero3 adapters": ("DeepseekV3", 2, "zero3", True, "adamw"),
    "ddp adapters": ("Qwen3Moe", 2, "ddp", True, "adamw"),
    "all ranks": ("Qwen3Moe", 4, "ddp", False, "adamw"),
    "all ranks zero3": ("GptOss", 4, "zero3", False, "adamw"),
}
BATCHES = ([5, 9, 3], [17], [2, 15], [8, 9], [1, 1, 15], [16, 1], [4, 13], [17])
"""Lengths of the segments of a step's micro-batches; of each rank in turn."""
BALANCE = 0.3


def batch_of(number: int) -> Batch:
    lengths = BATCHES[number]
    generator = torch.Generator().manual_seed(number)
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    ids, labels = (torch.randint(3, 96, (borders[-1],), generator=generator) for _ in range(2))
    labels[: lengths[0] // 2] = IGNORE_INDEX
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(ids, labels, positions, borders, int((labels != IGNORE_INDEX).sum()), borders[-1])


def trained(folder: Path, case: str, world: World) -> dict[str, Tensor]:
    """One step of a case: gradients as the optimizer receives them, their norm, and the weights after it; whole."""
    name, _, strategy, is_adapted, optim = CASES[case]
    device = select_device(DEVICE)
    model = build_meta_causal_lm(folder / name, torch.float32)
    lora = Lora(r=4, target_modules=["all-experts"] if case.startswith("ddp") else ["o_proj", "all-experts"])
    if is_adapted:
        adapter.insert_adapter(model, lora)
    division = resolve_sharding(Parallel(strategy=strategy if world.size > 1 else "auto"), world, device)  # type: ignore[arg-type]
    root = materialize_model(model, division, device, world)
    load_folder_weights(model, folder / name)
    if is_adapted:
        adapter.init_adapter_weights(model, lora, seed=1)
        for layer in (*adapter.find_lora_layers(model).values(), *adapter.find_expert_adapters(model).values()):
            to_local(layer.lora_B.detach()).add_(0.1)  # so that gradients reach A
    optimizer = Optimizer(
        model, Optim(name=optim), LearningRates(1e-2, 1e-2), device, world, experts=root.expert_params
    )  # type: ignore[arg-type]
    routing = make_recorder(model, BALANCE if name != "DeepseekV3" else None, torch.device("cpu"))
    step = TrainStep(
        wrap_ddp(root, division, device, world),
        functools.partial(compute_summed_loss, chunk_bytes=1 << 14),
        optimizer,
        17,
        routing=routing,
    )
    kept: dict[str, Tensor] = {}
    collect = optimizer.collect_grads

    def watch() -> Any:
        kept.update({name: gather_full_tensor(param.grad).clone() for name, param in optimizer.params.items()})
        return collect()

    optimizer.collect_grads = watch  # type: ignore[method-assign]
    numbers = range(len(BATCHES))[world.data_group.rank :: world.data_group.size]
    step.run_step(iter(map(batch_of, numbers)), len(numbers), 1.0)
    made = {f"{name}.grad": grad * world.data_group.size for name, grad in kept.items()}
    made |= {name: gather_full_tensor(param.detach()).clone() for name, param in model.named_parameters()}
    made["loss"], made["norm"], made["totals"] = step.totals[0] / step.totals[1], step.grad_norm, step.totals.clone()
    if not is_adapted and world.is_main_process:
        (folder / f"saved {case} {world.size}").mkdir()
    out = folder / f"saved {case} {world.size}" if world.is_main_process else None
    if not is_adapted:
        weights_reader.save_weights(model, out)
    return {name: value.contiguous() for name, value in made.items()}


def together(folder: Path, degree: int) -> None:
    world = init_world(select_device(DEVICE), Parallel(expert=degree))
    assert (world.data_group.size, world.expert_group.size, world.gradient_group.size) == (4, degree, 4)
    copies = build_world(select_device(DEVICE), MeshShape(replicate=4 // degree, expert=degree))
    for case in (case for case, (_, ranks, *_) in CASES.items() if ranks == degree):
        made = trained(folder, case, copies if "copies" in case else world)
        save_file(made, folder / f"{case}-{os.environ['RANK']}.safetensors")
    leave_world(world)


def config_of(name: str) -> Any:
    settings: dict[str, Any] = {**COMMON_CONFIG, **FAMILY_CONFIGS[name]}
    if name == "GptOss":
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    return getattr(transformers, f"{name}Config")(**settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("expert")
    for name in {name for name, *_ in CASES.values()}:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config_of(name))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 0.5, std=0.2)
        model.save_pretrained(root / name)
    for degree in (2, 4):
        spawn_ranks(together, 4, root, degree)
    return root


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_four_processes_train_as_one_does(folder: Path, case: str) -> None:
    expected = trained(folder, case, World())
    ranks = [load_file(folder / f"{case}-{rank}.safetensors") for rank in range(4)]
    for found in ranks:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            scale = value.abs().max() + 1e-9
            # Muon multiplies rounding where singular values are small.
            most = 1e-4 if CASES[case][-1] == "muon" and ".grad" not in name else 2e-5
            torch.testing.assert_close(found[name] / scale, value / scale, rtol=0, atol=most, msg=name)
    for name, value in ranks[0].items():  # copies of a weight stay copies
        assert all(torch.equal(other[name], value) for other in ranks[1:]), name
    if CASES[case][3]:
        return
    saved, alone = (load_file(folder / f"saved {case} {size}" / "model.safetensors") for size in (4, 1))
    assert saved.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-4, msg=name)


def refused(name: str, degree: int) -> ConfigError:
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config_of(name))
    with pytest.raises(ConfigError) as caught:
        expert_parallel.require_divisible_experts(model, degree)
    return caught.value


def test_what_cannot_be_divided_is_refused() -> None:
    error = refused("Qwen3Moe", 3)
    assert str(error) == "parallel.expert is 3, which does not divide 4 experts" and error.hint == "use 2 or 4"
    assert "the model has no layers of stacked experts" in str(refused("Qwen3", 2))
    with pytest.raises(ConfigError, match="parallel.expert is 2 and parallel.tensor is 2"):
        Parallel(expert=2, tensor=2)


def test_processes_that_do_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ConfigError, match="parallel.expert is 4, which does not divide 6 processes"):
        init_world(select_device(DEVICE), Parallel(expert=4))
