"""Four processes, two by two: a step makes the gradients, the norm and the weights of one process."""

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
from anabatic.models import tensor_parallel
from anabatic.models.forward import compute_summed_loss
from anabatic.models.lora import adapter
from anabatic.models.model_init import materialize_model
from anabatic.models.pretrained import build_meta_causal_lm, init_empty_weights, load_folder_weights
from anabatic.parallel import process_groups as parallel
from anabatic.parallel.process_groups import RankGroup, World, gather_full_tensor, to_local
from anabatic.parallel.sharding import resolve_sharding, wrap_ddp
from anabatic.testing.multiprocess import spawn_ranks
from anabatic.testing.tiny_models import COMMON_CONFIG
from anabatic.train.optim.optimizer import Optimizer
from anabatic.train.step import TrainStep
from unit.models.test_families import FAMILIES

Settings = dict[str, Any]
BIASED: Settings = {"attention_bias": True, "mlp_bias": True, "head_dim": 8}
# case: (class, what its configuration adds, settings of an adapter, strategy, optimizer)
CASES: dict[str, tuple[str, Settings, Settings | None, str, str]] = {
    "qwen2": ("Qwen2", {}, None, "ddp", "adamw"),
    "qwen3": ("Qwen3", {"head_dim": 8}, None, "zero3", "muon"),
    "llama": ("Llama", BIASED, None, "ddp", "muon"),
    "gemma2": ("Gemma2", {"head_dim": 8}, None, "ddp", "adamw"),
    "qwen2-moe": (*FAMILIES["qwen2-moe"][:2], None, "ddp", "adamw"),
    "lora": ("Llama", BIASED, {"init": "pissa"}, "zero2", "adamw"),
    "dora": ("Llama", BIASED, {"use_dora": True}, "zero3", "adamw"),
}
BATCHES = ([5, 9, 3], [17], [2, 15], [8, 9])
"""Lengths of the segments of a step's micro-batches; of ranks 0 and 1 in turn."""
DEVICE = DeviceSettings(type="cpu", threads=1)


def batch_of(lengths: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(lengths[0])
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    ids, labels = (torch.randint(3, 96, (borders[-1],), generator=generator) for _ in range(2))
    labels[: lengths[0] // 2] = IGNORE_INDEX
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(ids, labels, positions, borders, int((labels != IGNORE_INDEX).sum()), borders[-1])


def trained(folder: Path, case: str, world: World) -> dict[str, Tensor]:
    """One step of a case: gradients as the optimizer receives them, their norm, and the weights after it; whole."""
    _, _, lora, strategy, optim = CASES[case]
    device = select_device(DEVICE)
    model = build_meta_causal_lm(folder / case, torch.float32)
    if lora is not None:
        adapter.insert_adapter(model, Lora(r=4, **lora))
    division = resolve_sharding(Parallel(strategy=strategy if world.size > 1 else "auto"), world, device)  # type: ignore[arg-type]
    root = materialize_model(model, division, device, world)
    load_folder_weights(model, folder / case)
    if lora is not None:
        adapter.init_adapter_weights(model, Lora(r=4, **lora), seed=1)
        for layer in adapter.find_lora_layers(model).values():  # so that gradients reach A
            to_local(layer.lora_B.detach()).add_(0.1)
    optimizer = Optimizer(model, Optim(name=optim), 1e-2, 1e-2, device, world)  # type: ignore[arg-type]
    loss = functools.partial(compute_summed_loss, chunk_bytes=1 << 14)
    step = TrainStep(
        wrap_ddp(root, division, device, world), loss, optimizer, device, world, 17, partial_params=root.partial_params
    )
    kept: dict[str, Tensor] = {}
    collect = optimizer.collect_grads

    def watch() -> tuple[list[Tensor], list[Tensor]]:
        kept.update({name: gather_full_tensor(param.grad).clone() for name, param in optimizer.params.items()})
        return collect()

    optimizer.collect_grads = watch  # type: ignore[method-assign]
    mine = [batch_of(lengths) for lengths in BATCHES[world.data_group.rank :: world.data_group.size]]
    step.run_step(iter(mine), len(mine), 1.0)
    made = {f"{name}.grad": grad * world.data_group.size for name, grad in kept.items()}
    made |= {name: gather_full_tensor(param.detach()).clone() for name, param in model.named_parameters()}
    made["loss"], made["norm"] = step.totals[0] / step.totals[1], step.grad_norm
    return {name: value.contiguous() for name, value in made.items()}


def together(folder: Path) -> None:
    world = parallel.init_world(select_device(DEVICE), tensor_size=2)
    assert (world.data_group.size, world.tensor_group.size) == (2, 2)
    for case in CASES:
        found = trained(folder, case, world)
        save_file(found, folder / f"{case}-{os.environ['RANK']}.safetensors")
    parallel.leave_world(world)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tensor")
    for case, (name, settings, *_) in CASES.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config_of(name, settings))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 0.5, std=0.2)
        model.save_pretrained(root / case)
    spawn_ranks(together, 4, root)
    return root


def config_of(name: str, settings: Settings) -> Any:
    return getattr(transformers, f"{name}Config")(**{**COMMON_CONFIG, **settings})


@pytest.mark.parametrize("case", CASES)
def test_four_processes_train_as_one_does(folder: Path, case: str) -> None:
    expected = trained(folder, case, World())
    ranks = [load_file(folder / f"{case}-{rank}.safetensors") for rank in range(4)]
    for found in ranks:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            scale = value.abs().max() + 1e-9
            # Muon multiplies rounding where singular values are small.
            most = 1e-4 if CASES[case][-1] == "muon" and ".grad" not in name else 1e-5
            torch.testing.assert_close(found[name] / scale, value / scale, rtol=0, atol=most, msg=name)
    for name, value in ranks[0].items():  # copies of a weight stay copies
        assert all(torch.equal(other[name], value) for other in ranks[1:]), name


REFUSED = {
    "phi3": "0 of 2 layers have separate projections",
    "gpt-oss": "weights that are not a head's: sinks",
    "olmo2": "weights that are not a head's: q_norm.weight, k_norm.weight",
    "deepseek-v2": "0 of 2 layers have separate projections",
}


@pytest.mark.parametrize("family", REFUSED)
def test_attention_that_is_not_divided_by_heads_is_refused(family: str) -> None:
    name, settings, _ = FAMILIES[family]
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config_of(name, settings))
    tensor_parallel.require_divisible(model, 1)
    with pytest.raises(ConfigError, match=REFUSED[family]) as caught:
        tensor_parallel.require_divisible(model, 2)
    assert "zero3" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "family", ["mistral", "granite", "cohere", "glm4", "gemma3", "mixtral", "qwen3-moe", "glm4-moe"]
)
def test_these_families_are_divided(family: str) -> None:
    name, settings, _ = FAMILIES[family]
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config_of(name, settings))
    tensor_parallel.require_divisible(model, 2)
    assert len(tensor_parallel.find_attention_blocks(model)) == 2


def test_degrees_that_do_not_divide_are_named() -> None:
    settings = {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 63, "hidden_size": 48}
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config_of("Qwen2", settings))
    with pytest.raises(ConfigError, match="6 attention heads, 6 key/value heads, 63 inner neurons of MLPs") as caught:
        tensor_parallel.require_divisible(model, 2)
    assert caught.value.hint == "use 1 or 3"


def test_processes_that_do_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ConfigError, match="parallel.tensor is 4, which does not divide 6 processes") as caught:
        parallel.init_world(select_device(DEVICE), tensor_size=4)
    assert "8" in (caught.value.hint or "")
    assert World().data_group == World() and World().tensor_group == RankGroup()
