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

from anabatic.config.parallel import Parallel
from anabatic.config.shared import Device, Optim
from anabatic.config.tuner import Lora
from anabatic.core.errors import ConfigError
from anabatic.data.batch import IGNORE, Batch
from anabatic.device.device import pick
from anabatic.models import adapter, tensor
from anabatic.models.forward import summed_loss
from anabatic.models.hf import fill, on_meta, skeleton
from anabatic.models.place import place
from anabatic.parallel import world as parallel
from anabatic.parallel.shard import replicate, settle
from anabatic.parallel.sharded import local, whole
from anabatic.parallel.world import Group, World
from anabatic.testing.spawn import spawn
from anabatic.train.optim import Optimizer
from anabatic.train.step import TrainStep
from unit.models.test_families import FAMILIES, SIZES

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
DEVICE = Device(type="cpu", threads=1)


def batch_of(lengths: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(lengths[0])
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    ids, labels = (torch.randint(3, 96, (borders[-1],), generator=generator) for _ in range(2))
    labels[: lengths[0] // 2] = IGNORE
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(ids, labels, positions, borders, int((labels != IGNORE).sum()), borders[-1])


def trained(folder: Path, case: str, world: World) -> dict[str, Tensor]:
    """One step of a case: gradients as the optimizer receives them, their norm, and the weights after it; whole."""
    _, _, lora, strategy, optim = CASES[case]
    device = pick(DEVICE)
    model = skeleton(folder / case, torch.float32)
    if lora is not None:
        adapter.insert(model, Lora(r=4, **lora))
    division = settle(Parallel(strategy=strategy if world.size > 1 else "auto"), world, device)  # type: ignore[arg-type]
    root = place(model, division, device, world)
    fill(model, folder / case)
    if lora is not None:
        adapter.begin(model, Lora(r=4, **lora), seed=1)
        for layer in adapter.layers(model).values():  # so that gradients reach A
            local(layer.lora_B.detach()).add_(0.1)
    optimizer = Optimizer(model, Optim(name=optim), 1e-2, 1e-2, device, world)  # type: ignore[arg-type]
    loss = functools.partial(summed_loss, chunk_bytes=1 << 14)
    step = TrainStep(replicate(root, division, device, world), loss, optimizer, device, world, 17, partial=root.partial)
    kept: dict[str, Tensor] = {}
    collect = optimizer.collect

    def watch() -> tuple[list[Tensor], list[Tensor]]:
        kept.update({name: whole(param.grad).clone() for name, param in optimizer.params.items()})
        return collect()

    optimizer.collect = watch  # type: ignore[method-assign]
    mine = [batch_of(lengths) for lengths in BATCHES[world.data.rank :: world.data.size]]
    step.run(iter(mine), len(mine), 1.0)
    made = {f"{name}.grad": grad * world.data.size for name, grad in kept.items()}
    made |= {name: whole(param.detach()).clone() for name, param in model.named_parameters()}
    made["loss"], made["norm"] = step.totals[0] / step.totals[1], step.norm
    return {name: value.contiguous() for name, value in made.items()}


def together(folder: Path) -> None:
    world = parallel.start(pick(DEVICE), tensor=2)
    assert (world.data.size, world.tensor.size) == (2, 2)
    for case in CASES:
        found = trained(folder, case, world)
        save_file(found, folder / f"{case}-{os.environ['RANK']}.safetensors")
    parallel.stop(world)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tensor")
    for case, (name, settings, *_) in CASES.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config_of(name, settings))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 0.5, std=0.2)
        model.save_pretrained(root / case)
    spawn(together, 4, root)
    return root


def config_of(name: str, settings: Settings) -> Any:
    return getattr(transformers, f"{name}Config")(**{**SIZES, **settings})


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
    with on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config_of(name, settings))
    tensor.require_divisible(model, 1)
    with pytest.raises(ConfigError, match=REFUSED[family]) as caught:
        tensor.require_divisible(model, 2)
    assert "zero3" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "family", ["mistral", "granite", "cohere", "glm4", "gemma3", "mixtral", "qwen3-moe", "glm4-moe"]
)
def test_these_families_are_divided(family: str) -> None:
    name, settings, _ = FAMILIES[family]
    with on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config_of(name, settings))
    tensor.require_divisible(model, 2)
    assert len(tensor.attention_blocks(model)) == 2


def test_degrees_that_do_not_divide_are_named() -> None:
    settings = {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 63, "hidden_size": 48}
    with on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config_of("Qwen2", settings))
    with pytest.raises(ConfigError, match="6 attention heads, 6 key/value heads, 63 inner neurons of MLPs") as caught:
        tensor.require_divisible(model, 2)
    assert caught.value.hint == "use 1 or 3"


def test_processes_that_do_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ConfigError, match="parallel.tensor is 4, which does not divide 6 processes") as caught:
        parallel.start(pick(DEVICE), tensor=4)
    assert "8" in (caught.value.hint or "")
    assert World().data == World() and World().tensor == Group()
