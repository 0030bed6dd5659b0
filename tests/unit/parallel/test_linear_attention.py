"""Two processes that share the tokens of a batch, or the heads of a layer, train models with linear attention as one
process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from anabatic.config.sections.common import Parallel
from anabatic.core.errors import ConfigError
from anabatic.data.batching.packing import Batch
from anabatic.data.chat.preference_pairs import collate_preference_pairs
from anabatic.device.device import select_device
from anabatic.models import context_parallel, tensor_parallel
from anabatic.models.pretrained import init_empty_weights
from anabatic.parallel.mesh import ContextGroup
from anabatic.parallel.world import World, build_world, init_world, leave_world
from anabatic.plan.mesh_shape import resolve_mesh_shape
from anabatic_testing.multiprocess import spawn_ranks
from anabatic_testing.tiny_models import FAMILY_CONFIGS
from unit.models.test_preference import PAIRS
from unit.parallel.one_step import DEVICE, Case, Settings, batch_of, config_of, save_random_model, train_step
from unit.parallel.test_context import RING, TWO, below

TENSOR = {"tensor": 2}
NEXT, DENSE, MOE = FAMILY_CONFIGS["Qwen3Next"], FAMILY_CONFIGS["Qwen3_5Text"], FAMILY_CONFIGS["Qwen3_5MoeText"]
CASES = {
    "next": Case("Qwen3Next", NEXT, mesh=TWO),
    "next-ring": Case("Qwen3Next", NEXT, strategy="zero3", mesh={**TWO, **RING}),
    "next-lora": Case("Qwen3Next", NEXT, {"init": "pissa"}, strategy="zero2", mesh=TWO, fused=True),
    "dense": Case("Qwen3_5Text", DENSE, strategy="zero3", optim="muon", mesh=TWO),
    "dense-ring": Case("Qwen3_5Text", DENSE, mesh={**TWO, **RING}),
    "moe": Case("Qwen3_5MoeText", MOE, mesh=TWO, fused=True),
    "dpo": Case("Qwen3_5Text", DENSE, {}, mesh=TWO, objective="sigmoid"),
    "dpo-ring": Case("Qwen3Next", NEXT, {}, mesh={**TWO, **RING}, objective="sigmoid"),
    "tensor-next": Case("Qwen3Next", NEXT, mesh=TENSOR),
    "tensor-next-lora": Case("Qwen3Next", NEXT, {}, mesh=TENSOR, fused=True),
    "tensor-dense": Case("Qwen3_5Text", DENSE, optim="muon", mesh=TENSOR, fused=True),
    "tensor-dense-lora": Case("Qwen3_5Text", DENSE, {"init": "pissa"}, mesh=TENSOR),
    "tensor-moe": Case("Qwen3_5MoeText", MOE, mesh=TENSOR),
    "tensor-dpo": Case("Qwen3_5Text", DENSE, {"use_dora": True}, mesh=TENSOR, objective="sigmoid"),
    # fewer key heads than ranks, and a number that they do not divide: copies of key heads
    "one-key-head": Case("Qwen3_5Text", {**DENSE, "linear_num_key_heads": 1}, mesh=TWO),
    "three-key-heads": Case(
        "Qwen3Next", {**NEXT, "linear_num_key_heads": 3, "linear_num_value_heads": 6}, mesh={**TWO, **RING}
    ),
}
LENGTHS = ([70, 9, 3, 150], [200], [1, 65, 64])
"""Segments of the micro-batches: of less than a chunk, of several; a piece's border lies within one."""


def batches_of(case: Case) -> list[Batch]:
    if case.objective == "next":
        return [*map(batch_of, LENGTHS)]
    return [collate_preference_pairs([below(piece) for piece in PAIRS[at:]], 70, 0, 64) for at in (0, 1)]


def together(folder: Path) -> None:
    device = select_device(DEVICE)
    init_world(device)
    for name, case in CASES.items():
        settings = Parallel(strategy=case.strategy, **case.mesh)
        world = build_world(device, resolve_mesh_shape(settings, 2), settings)
        save_file(train_step(folder / name, case, world, batches_of(case)), folder / f"{name}-{world.rank}.safetensors")
    leave_world(world)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("linear")
    for name, case in CASES.items():
        save_random_model(root / name, case)
    spawn_ranks(together, 2, root)
    return root


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one_does(folder: Path, name: str) -> None:
    case = CASES[name]
    expected = train_step(folder / name, case, World(), batches_of(case))
    ranks = [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(2)]
    for found in ranks:
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            scale = value.abs().max() + 1e-9
            # Short queries and keys, which the rule norms, multiply rounding; so does the update where gradients
            # (AdamW) or singular values (Muon) are small.
            most = 5e-5 if key.endswith(".grad") or key in ("loss", "norm", "sums") else 1e-4
            found_value, message = found[key] / scale, f"{name} {key}: {found[key]} instead of {value}"
            torch.testing.assert_close(found_value, value / scale, rtol=0, atol=most, msg=message)
    if case.lora is None:
        parts = [key for key in expected if "linear_attn" in key and key.endswith(".grad")]
        assert {key.split("linear_attn.")[1].split(".")[0] for key in parts} >= {"A_log", "dt_bias", "conv1d", "norm"}
        assert all(float(expected[key].abs().max()) > 0 for key in parts)
    for key, value in ranks[0].items():  # copies of a weight stay copies
        assert torch.equal(ranks[1][key], value), key


REFUSED: dict[str, tuple[Settings, int, int, str, str]] = {
    "ulysses": (
        {"num_attention_heads": 6, "num_key_value_heads": 6},
        3,
        1,
        "parallel.context is 3, which does not divide the model's 4 value heads of linear attention",
        "use 1 or 2",
    ),
    "ring": (
        {},
        3,
        2,
        "parallel.context is 3, which does not divide the model's 4 value heads of linear attention",
        "use 1 or 2 or 4",
    ),
    "attention": (
        {"num_attention_heads": 2},
        4,
        1,
        "parallel.context is 4, which does not divide the model's 2 attention heads",
        "use 1 or 2, or --parallel.context-method ring",
    ),
    "both": (
        {},
        8,
        1,
        "parallel.context is 8, which does not divide the model's 4 attention heads and 4 value heads of linear",
        "use 1 or 2 or 4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_ranks_do_not_divide_are_named(name: str) -> None:
    settings, ranks, pieces, message, hint = REFUSED[name]
    with init_empty_weights():
        model: Any = transformers.AutoModelForCausalLM.from_config(config_of("Qwen3_5Text", {**DENSE, **settings}))
    world = World(0, ranks, context_group=ContextGroup(0, ranks, pieces=pieces))
    with pytest.raises(ConfigError) as caught:
        context_parallel.require_divisible_heads(model, world)
    assert message in str(caught.value) and caught.value.hint == hint


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"linear_num_key_heads": 1}, "leave parallel.tensor at 1; --parallel.strategy zero3 divides every model"),
        ({"linear_num_key_heads": 3, "linear_num_value_heads": 6}, "leave parallel.tensor at 1"),
        ({"linear_num_key_heads": 2, "num_key_value_heads": 4, "intermediate_size": 32}, "use 1 or 2"),
    ],
)
@pytest.mark.parametrize("family", ["Qwen3_5Text", "Qwen3Next"])
def test_key_heads_that_tensor_ranks_do_not_divide_are_named(family: str, settings: Settings, hint: str) -> None:
    with init_empty_weights():
        config = config_of(family, {**FAMILY_CONFIGS[family], **settings})
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="parallel.tensor is 4, which does not divide all of the model's") as caught:
        tensor_parallel.require_divisible(model, 4)
    assert f"{settings['linear_num_key_heads']} key heads of linear attention" in str(caught.value)
    assert (caught.value.hint or "").startswith(hint)
