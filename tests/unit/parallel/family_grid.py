"""Every family of models over every dimension of a mesh: one step of two processes, or the refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from anabatic.config.sections.common import DeviceSettings, Parallel
from anabatic.core.errors import AnabaticError
from anabatic.device.device import Device
from anabatic.parallel.world import World, build_world
from anabatic.plan.mesh_shape import resolve_mesh_shape
from anabatic_testing.tiny_models import FAMILY_CONFIGS
from unit.parallel.one_step import DEVICE, Case, batch_of, save_random_model, train_step

FAMILIES = {
    "qwen3": "Qwen3",
    "qwen3-moe": "Qwen3Moe",
    "qwen3-next": "Qwen3Next",
    "deepseek-v3": "DeepseekV3",
    "glm-4.5": "Glm4Moe",
    "gpt-oss": "GptOss",
}
DIMENSIONS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "ulysses": {"strategy": "zero3", "context": 2},
    "ring": {"strategy": "ddp", "context": 2, "context_method": "ring"},
    "tensor": {"strategy": "ddp", "tensor": 2},
    "expert": {"strategy": "ddp", "expert": 2},
    "pipeline": {"strategy": "ddp", "pipeline": 2},
}
REFUSED: dict[tuple[str, str], tuple[str, str]] = {
    ("deepseek-v3", "ring"): ("ring of parallel.context computes causal attention without", "context-method ulysses"),
    ("gpt-oss", "ring"): ("ring of parallel.context computes causal attention without", "context-method ulysses"),
    ("deepseek-v3", "tensor"): ("layers have separate projections", "zero3"),
    ("gpt-oss", "tensor"): ("weights that are not a head's: sinks", "zero3"),
    ("qwen3", "expert"): ("has no layers of stacked experts", "parallel.expert"),
}
"""Refused by design: what the message names, and the hint."""
LEFT_OUT = [("qwen3-next", dimension) for dimension in ("ulysses", "ring", "tensor")]
"""Tested where the layers of the delta rule are."""
GRID = [(family, dimension) for family in FAMILIES for dimension in DIMENSIONS if (family, dimension) not in LEFT_OUT]
BATCHES = [batch_of([5, 9, 3]), batch_of([2, 15])]


def _case_of(family: str, dimension: str) -> Case:
    mesh = {key: value for key, value in DIMENSIONS[dimension].items() if key != "strategy"}
    name = FAMILIES[family]
    return Case(name, FAMILY_CONFIGS[name], strategy=DIMENSIONS[dimension]["strategy"], mesh=mesh, fused=True)


def save_models(folder: Path) -> None:
    """Save a random model of each family."""
    for family in FAMILIES:
        save_random_model(folder / family, _case_of(family, "ddp"))


def train_alone(folder: Path, family: str) -> dict[str, Tensor]:
    """One step of a family in this process, on the CPU."""
    return train_step(folder / family, _case_of(family, "ddp"), World(), BATCHES)


def train_together(folder: Path, device: Device, settings: DeviceSettings = DEVICE) -> None:
    """Make the steps of the grid as one of two processes, which have joined; write what they give, or the refusal."""
    for family, dimension in GRID:
        mesh = Parallel(**DIMENSIONS[dimension])
        world = build_world(device, resolve_mesh_shape(mesh, 2), mesh)
        place = folder / f"{family} {dimension} {world.rank}"
        try:
            save_file(train_step(folder / family, _case_of(family, dimension), world, BATCHES, settings), place)
        except AnabaticError as error:
            place.with_suffix(".json").write_text(json.dumps([str(error), error.hint]), encoding="utf-8")


def read_ranks(folder: Path, family: str, dimension: str) -> list[dict[str, Tensor]]:
    """Return what each rank has written; of stages, each with its own weights, what both have."""
    ranks = [load_file(folder / f"{family} {dimension} {rank}") for rank in range(2)]
    if dimension != "pipeline":
        return ranks
    layers = [{key for key in found if ".layers." in key} for found in ranks]
    assert layers[0] and layers[1] and not layers[0] & layers[1]
    for key in ranks[0].keys() & ranks[1].keys():
        assert torch.equal(ranks[0][key], ranks[1][key]), key
    whole = ranks[0] | ranks[1]
    return [whole, whole]


def check_refusal(family: str, dimension: str, places: list[Path]) -> None:
    """Check what each rank was told."""
    words, hint = REFUSED[family, dimension]
    for place in places:
        told = json.loads(place.with_suffix(".json").read_text(encoding="utf-8"))
        assert words in told[0] and hint in told[1], told
