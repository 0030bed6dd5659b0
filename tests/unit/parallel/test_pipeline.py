"""Layers divided among processes: a step makes the losses, gradients, norm and weights of one process."""

from __future__ import annotations

import functools
import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from anabatic.config.dpo import DpoJob
from anabatic.config.sections.common import Data, DeviceSettings, Optim, Parallel
from anabatic.config.sections.train_jobs import Lora
from anabatic.config.sft import SftJob
from anabatic.core.errors import ConfigError
from anabatic.data.batching.packing import IGNORE_INDEX, Batch
from anabatic.device.device import select_device
from anabatic.models import weights_reader
from anabatic.models.experts.routing import make_recorder
from anabatic.models.forward import compute_summed_loss, pack_batch
from anabatic.models.lora import adapter
from anabatic.models.model_init import count_parameters, flops_per_token, materialize_model
from anabatic.models.pipeline import stages as pipeline_stages
from anabatic.models.pretrained import (
    build_meta_causal_lm,
    enable_activation_checkpointing,
    init_empty_weights,
    load_folder_weights,
)
from anabatic.parallel.mesh import RankGroup
from anabatic.parallel.pipeline_parameters import gathered_parameters
from anabatic.parallel.sharded_tensors import gather_full_tensor, to_local
from anabatic.parallel.sharding import resolve_sharding, wrap_ddp
from anabatic.parallel.world import World, build_world, init_world, leave_world
from anabatic.plan.job_rules import find_layout_problems, raise_problems
from anabatic.plan.mesh_shape import MeshShape
from anabatic.plan.model_facts import find_model_facts
from anabatic.plan.pipeline_stages import split_layers
from anabatic.train.optim.optimizer import LearningRates, Optimizer
from anabatic.train.step import TrainStep
from anabatic_testing.multiprocess import spawn_ranks
from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS

DEVICE = DeviceSettings(type="cpu", threads=1)
# case: (family, tied embeddings, with an adapter, optimizer, mesh of the four processes)
TWO, FOUR, LONG, WIDE = MeshShape(2, shard=2), MeshShape(4), MeshShape(2, context=2), MeshShape(2, tensor=2)
EXPERTS = MeshShape(2, expert=2)
CASES: dict[str, tuple[str, bool, bool, str, MeshShape]] = {
    "tied": ("Qwen3", True, False, "adamw", TWO),
    "muon": ("Llama", False, False, "muon", TWO),
    "adapters": ("Qwen2", True, True, "adamw", TWO),
    "four stages": ("Qwen3", True, False, "adamw", FOUR),
    "adapters in bf16, recomputed": ("Qwen3", True, True, "adamw", TWO),
    "long": ("Qwen3", True, False, "adamw", LONG),
    "long adapters": ("Llama", False, True, "adamw", LONG),
    "wide": ("Qwen3", True, False, "adamw", WIDE),
    "wide adapters": ("Qwen2", False, True, "adamw", WIDE),
    "wide muon": ("Llama", False, False, "muon", WIDE),
    "tied, zero2": ("Qwen3", True, False, "adamw", TWO),
    "muon, zero3": ("Llama", False, False, "muon", TWO),
    "adapters, zero3": ("Qwen2", False, True, "adamw", TWO),
    "recomputed in bf16, zero3": ("Llama", True, False, "adamw", TWO),
    "Qwen3-MoE": ("Qwen3Moe", False, False, "adamw", TWO),
    "Qwen3-MoE, zero3": ("Qwen3Moe", False, False, "adamw", EXPERTS),
    "experts with adapters": ("Qwen3Moe", False, True, "adamw", EXPERTS),
    "Qwen3-MoE, router loss": ("Qwen3Moe", False, False, "adamw", FOUR),
    "dense stage, router loss": ("Qwen3Moe", False, False, "adamw", LONG),
    "experts with adapters, router loss": ("Qwen3Moe", False, True, "adamw", EXPERTS),
    "router loss, gpt-oss, zero3": ("GptOss", False, False, "adamw", TWO),
    "interleaved, tied": ("Qwen3", True, False, "adamw", TWO),
    "interleaved, long adapters": ("Llama", False, True, "adamw", LONG),
    "interleaved, wide muon": ("Llama", False, False, "muon", WIDE),
    "interleaved and recomputed in bf16, zero3": ("Llama", True, False, "adamw", TWO),
    "interleaved experts with adapters, router loss": ("Qwen3Moe", False, True, "adamw", EXPERTS),
    "interleaved experts, router loss, zero3": ("Qwen3Moe", False, False, "adamw", TWO),
    "interleaved, Gemma 2": ("Gemma2", True, False, "adamw", TWO),
    "interleaved, Qwen3.5": ("Qwen3_5Text", True, False, "adamw", TWO),
    "DeepSeek-V3": ("DeepseekV3", False, False, "adamw", EXPERTS),
    "GLM-4.5": ("Glm4Moe", False, False, "adamw", TWO),
    "gpt-oss": ("GptOss", False, False, "adamw", TWO),
    "Qwen3.5": ("Qwen3_5Text", True, False, "adamw", TWO),
    "Gemma 2": ("Gemma2", True, False, "adamw", TWO),
}
LAYERS = 5
BATCHES = ([5, 9, 3], [17], [2, 11], [8, 9], [1, 1, 15], [16, 1], [4, 13], [6])
"""Lengths of the documents of a step's micro-batches; of each rank with other data in turn."""


def batch_of(number: int) -> Batch:
    lengths = BATCHES[number]
    generator = torch.Generator().manual_seed(number)
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    ids, labels = (torch.randint(3, 96, (borders[-1],), generator=generator) for _ in range(2))
    labels[: lengths[0] // 2] = IGNORE_INDEX
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(ids, labels, positions, borders, int((labels != IGNORE_INDEX).sum()), borders[-1])


def trained(folder: Path, case: str, world: World) -> dict[str, Tensor]:
    """Two steps of a case: the first one's gradients on this rank, norms, totals, and its weights after both."""
    _, _, is_adapted, optim, _ = CASES[case]
    is_half = "bf16" in case
    device = select_device(replace(DEVICE, dtype="bf16") if is_half else DEVICE)
    model = build_meta_causal_lm(folder / case, torch.float32)
    lora = Lora(r=4, target_modules=["all-linear", *["all-experts"] * ("experts" in case)])
    if is_adapted:
        adapter.insert_adapter(model, lora)
    strategy = case.rpartition(", ")[2]
    sharding = resolve_sharding(Parallel(strategy=strategy if "zero" in strategy else "auto"), world, device)  # type: ignore[arg-type]
    root = materialize_model(model, sharding, device, world)
    load_folder_weights(model, folder / case)
    enable_activation_checkpointing(model, "full" if "recomputed" in case else "none")
    if is_adapted:
        adapter.init_adapter_weights(model, lora, seed=1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                to_local(parameter.detach()).add_(0.1)  # so that gradients reach A
    settings = Optim(name=optim, max_grad_norm=0.5)  # type: ignore[arg-type]
    optimizer = Optimizer(model, settings, LearningRates(1e-2, 1e-2), device, world, experts=root.expert_params)
    loss = functools.partial(compute_summed_loss, chunk_bytes=1 << 14)
    pack = functools.partial(pack_batch, context=world.context_group)
    coefficient = 3.0 if "router loss" in case else None
    step = TrainStep(
        wrap_ddp(root, sharding, device, world),
        loss,
        optimizer,
        17,
        pack,
        routing=make_recorder(model, coefficient, device.torch_device, world.context_group),
    )
    kept: dict[str, Tensor] = {}
    collect = optimizer.collect_grads

    def watch() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        if not kept:
            scale = world.gradient_group.size
            grads = {name: param.grad for name, param in optimizer.params.items() if param.grad is not None}
            kept.update({f"{name}.grad": gather_full_tensor(grad) * scale for name, grad in grads.items()})
        return collect()

    optimizer.collect_grads = watch  # type: ignore[method-assign]
    numbers = range(len(BATCHES))[world.data_group.rank :: world.data_group.size]
    norms = []
    for _ in range(2):
        step.run_step(iter(map(batch_of, numbers)), len(numbers), 1.0)
        norms.append(step.grad_norm)
    weights = {name: gather_full_tensor(param.detach()).clone() for name, param in model.named_parameters()}
    made = {**kept, **weights}
    made["norms"], made["totals"] = torch.stack(norms), step.totals.clone()
    made["sizes"] = torch.tensor([*count_parameters(model), flops_per_token(model, 8.0)])
    with gathered_parameters(model, world.pipeline_group, is_adapted):
        out = folder / "out" if world.is_main_process else None
        folder.joinpath("out").mkdir(exist_ok=True)
        if world.pipeline_group.rank:
            pass
        elif is_adapted:
            tensors = adapter.collect_adapter_tensors(model)
            if out is not None:
                save_file(tensors, out / "model.safetensors")
        else:
            weights_reader.save_weights(model, out)
        if out is not None:
            (out / "model.safetensors").rename(folder / f"saved {case} {world.size}")
    return {name: value.contiguous() for name, value in made.items()}


def together(folder: Path) -> None:
    joined = init_world(select_device(DEVICE), Parallel(pipeline=2))
    assert (joined.data_group.size, joined.pipeline_group.size, joined.gradient_group.size) == (2, 2, 2)
    device, chunked = select_device(DEVICE), Parallel(pipeline=2, pipeline_chunks=2)
    worlds = {shape: build_world(device, shape) for shape in (TWO, FOUR, LONG, WIDE, EXPERTS)}
    interleaved = {shape: build_world(device, shape, chunked) for shape in (TWO, LONG, WIDE, EXPERTS)}
    for case, (*_, shape) in CASES.items():
        made = trained(folder, case, (interleaved if "interleaved" in case else worlds)[shape])
        save_file(made, folder / f"{case}-{os.environ['RANK']}.safetensors")
    leave_world(joined)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pipeline")
    for case, (family, tied, *_) in CASES.items():
        torch.manual_seed(0)
        sizes = {**COMMON_CONFIG, **FAMILY_CONFIGS[family], "num_hidden_layers": LAYERS, "tie_word_embeddings": tied}
        sizes.pop("layer_types", None)
        sizes |= {"mlp_only_layers": [0, 1, 2, 3]} if "dense stage" in case else {}
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**sizes))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 0.5, std=0.2)
        model.save_pretrained(root / case)
    spawn_ranks(together, 4, root)
    return root


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_stages_train_as_one_process_does(folder: Path, case: str) -> None:
    expected = trained(folder, case, World())
    ranks = [load_file(folder / f"{case}-{rank}.safetensors") for rank in range(4)]
    stages = CASES[case][-1].pipeline
    for found in ranks:
        assert found.keys() < expected.keys()
        for name, value in found.items():
            scale = expected[name].abs().max() + 1e-9
            # Updates multiply rounding: Muon where singular values are small, AdamW where gradients are.
            most = 1e-1 if "bf16" in case else 3e-5 if ".grad" in name else 2e-4
            torch.testing.assert_close(value / scale, expected[name] / scale, rtol=0, atol=most, msg=name)
    assert {name for found in ranks for name in found} == expected.keys()
    layers = [{name.split(".layers.")[1][0] for name in found if ".layers." in name} for found in ranks]
    for one, two in itertools.pairwise(layers[:: 4 // stages]):
        assert one and two and not one & two
        assert (min(two) < max(one)) == ("interleaved" in case)
    for rank in range(0, 4, 4 // stages):  # copies of a weight stay copies
        for other in range(rank, rank + 4 // stages):
            assert all(torch.equal(ranks[other][name], ranks[rank][name]) for name in ranks[rank])
    saved, alone = (load_file(folder / f"saved {case} {size}") for size in (4, 1))
    assert saved.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-1 if "bf16" in case else 2e-4, msg=name)


@pytest.mark.parametrize(("stages", "head"), [(1, 0), (2, 0), (2, 30), (3, 7), (4, 100)])
def test_the_largest_stage_is_as_small_as_possible(stages: int, head: int) -> None:
    weights = [10, 10, 10, 10, 14, 10]
    best = min(
        max(sum(weights[a:b]) + (head if b == 6 else 0) for a, b in itertools.pairwise((0, *cuts, 6)))
        for cuts in itertools.combinations(range(1, 6), stages - 1)
    )
    parts = split_layers(weights, head, stages)
    assert [layer for part in parts for layer in part] == list(range(6))
    assert len(parts) == stages and all(parts)
    assert max(sum(weights[i] for i in part) + head * (part.stop == 6) for part in parts) == best


@pytest.mark.parametrize(
    ("family", "stages", "chunks", "message"),
    [
        ("Llama", 3, 1, "parallel.pipeline is 3, the model has 2 layers"),
        ("Llama", 2, 2, "parallel.pipeline 2 x parallel.pipeline_chunks 2 = 4, the model has 2 layers"),
        ("Granite", 2, 1, "parallel.pipeline is 2, and GraniteModel changes what its embedding returns"),
    ],
)
def test_other_models_are_refused(family: str, stages: int, chunks: int, message: str) -> None:
    sizes = {**COMMON_CONFIG, **FAMILY_CONFIGS.get(family, {}), "num_hidden_layers": 2}
    sizes |= {"embedding_multiplier": 12.0} if family == "Granite" else {}
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**sizes))
    with pytest.raises(ConfigError, match=message):
        pipeline_stages.require_stages(model, World(pipeline_group=RankGroup(0, stages), pipeline_chunks=chunks))


def find_problems(job: Any) -> list[ConfigError]:
    return list(find_layout_problems(job, MeshShape(pipeline=2), find_model_facts(job)))


def test_other_trainings_are_refused_before_they_start() -> None:
    data, stages = Data(train=["rows.json"]), Parallel(pipeline=2)
    with pytest.raises(ConfigError, match="parallel.pipeline is 2, and dpo does not train in stages"):
        raise_problems(find_problems(DpoJob(model="m", data=data, parallel=stages)))
    with pytest.raises(ConfigError, match="parallel.pipeline is 2, and lora.init is pissa"):
        raise_problems(find_problems(SftJob(model="m", data=data, parallel=stages, lora=Lora(init="pissa"))))
    assert find_problems(SftJob(model="m", data=data, parallel=stages)) == []
