"""Four processes that share the tokens of a batch: a step makes the gradients, the norm, the weights and the held-out
loss of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from anabatic.config.sections.common import Parallel
from anabatic.core.errors import ConfigError
from anabatic.data.batching.packing import Batch, TokenSegment, collate_padded
from anabatic.data.chat.preference_pairs import collate_preference_pairs, collate_unpaired_answers
from anabatic.device.device import select_device
from anabatic.models import context_parallel
from anabatic.models.pretrained import init_empty_weights
from anabatic.parallel.mesh import ContextGroup, RankGroup
from anabatic.parallel.token_split import TokenSplit
from anabatic.parallel.world import World, build_world, init_world, leave_world
from anabatic.plan.mesh_shape import MeshShape, resolve_mesh_shape
from anabatic_testing.multiprocess import spawn_ranks
from unit.models.test_families import FAMILIES
from unit.models.test_kto import PAIR, SINGLES
from unit.models.test_preference import PAIRS
from unit.parallel.one_step import DEVICE, Case, batch_of, config_of, save_random_model, train_step

TWO, FOUR, RING = {"context": 2}, {"context": 4}, {"context_method": "ring"}
CASES = {
    # two ranks share a batch, and two batches are computed at a time; heads 4, key heads 2
    "qwen2": Case("Qwen2", mesh=TWO),
    "fused": Case("Qwen3", {"head_dim": 8}, strategy="zero2", mesh=TWO, fused=True),
    "muon": Case("Qwen3", {"head_dim": 8}, strategy="zero3", optim="muon", mesh=TWO),
    "sinks": Case(*FAMILIES["gpt-oss"][:2], mesh=TWO),
    "values": Case(*FAMILIES["deepseek-v3"][:2], strategy="zero3", mesh=TWO),
    "lora": Case("Llama", lora={"init": "pissa"}, strategy="zero2", mesh=TWO, fused=True),
    # more ranks than key heads: each key head goes to two ranks
    "repeated": Case("Qwen2", strategy="zero3", mesh=FOUR),
    "repeated-fused": Case("Qwen2", mesh=FOUR, fused=True),
    "lengths": Case(
        "Llama",
        {
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        },
        mesh=FOUR,
    ),
    # keys travel: more ranks than the heads divide, several documents, one of all tokens, all dimensions
    "ring": Case("Qwen2", mesh={**TWO, **RING}),
    "ring-shard": Case("Qwen3", {"head_dim": 8}, strategy="zero3", mesh={**FOUR, **RING}, fused=True),
    "ring-heads": Case("Qwen2", {"num_attention_heads": 2}, lora={}, strategy="zero2", mesh={**FOUR, **RING}),
    "ring-tensor": Case("Qwen3", {"head_dim": 8}, mesh={**TWO, **RING, "tensor": 2}),
    "ring-dpo": Case("Qwen2", mesh={**TWO, **RING}, objective="sigmoid"),
    "ring-reward": Case("Qwen2", mesh={**FOUR, **RING}, objective="reward"),
    # other dimensions with it, and without
    "tensor": Case("Qwen3", {"head_dim": 8}, mesh={"context": 2, "tensor": 2}),
    "tensor-shard": Case("Qwen2", strategy="zero3", mesh={"tensor": 2}),
    "copies": Case("Qwen2", strategy="zero3", mesh={"context": 2, "replicate": 2}),
    "copies-alone": Case("Qwen2", strategy="zero2", optim="muon", mesh={"replicate": 2}),
    # linear attention: a value head on each rank, with a copy of its key head; heads of two dimensions, of one
    "linear": Case(*FAMILIES["qwen3.5"][:2], mesh=FOUR),
    "linear-ring": Case(*FAMILIES["qwen3-next"][:2], mesh={**TWO, **RING, "tensor": 2}),
    "linear-tensor": Case(*FAMILIES["qwen3.5"][:2], strategy="zero3", mesh={"context": 2, "tensor": 2}),
    "linear-heads": Case(
        "Qwen3_5Text",
        {**FAMILIES["qwen3.5"][1], "linear_num_key_heads": 4, "linear_num_value_heads": 12, "num_key_value_heads": 4},
        mesh={"tensor": 4},
    ),
    # losses of whole answers, which may lie on several ranks
    "dpo": Case("Qwen2", lora={}, mesh=TWO, objective="sigmoid"),
    "kto": Case("Qwen2", strategy="zero3", mesh=FOUR, objective="kto"),
    "reward": Case("Qwen2", mesh=TWO, objective="reward", fused=True),
}
LENGTHS = ([5, 9, 3], [17], [2, 15], [8, 9])
"""Segments of the micro-batches: 17 tokens, which no number of ranks divides."""


def below(piece: TokenSegment) -> TokenSegment:
    """The same with token ids of the small vocabularies here."""
    return replace(piece, ids=piece.ids % 90)


def batches_of(case: Case) -> list[Batch]:
    if case.objective == "next":
        padded = collate_padded([TokenSegment(torch.arange(3, 3 + n).numpy()) for n in (7, 4)], 17, 0, 64)
        return [*map(batch_of, LENGTHS[:3]), padded]
    if case.objective == "kto":
        answers = [below(piece) for piece in (*SINGLES, PAIR)]
        return [collate_unpaired_answers(answers[at:], 60, 0, 64) for at in (0, 1, 2, 0)]
    return [collate_preference_pairs([below(piece) for piece in PAIRS[at:]], 70, 0, 64) for at in (0, 1, 2, 0)]


def together(folder: Path) -> None:
    device = select_device(DEVICE)
    init_world(device)
    for name, case in CASES.items():
        settings = Parallel(strategy=case.strategy, **case.mesh)
        world = build_world(device, resolve_mesh_shape(settings, 4), settings)
        save_file(train_step(folder / name, case, world, batches_of(case)), folder / f"{name}-{world.rank}.safetensors")
    leave_world(world)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("context")
    for name, case in CASES.items():
        save_random_model(root / name, case)
    spawn_ranks(together, 4, root)
    return root


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_four_processes_train_as_one_does(folder: Path, name: str) -> None:
    case = CASES[name]
    expected = train_step(folder / name, case, World(), batches_of(case))
    ranks = [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(4)]
    for found in ranks:
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            scale = value.abs().max() + 1e-9
            # The update multiplies rounding where gradients (AdamW) or singular values (Muon) are small.
            # The delta rule norms queries and keys; short ones multiply it too: half a unit in the last place of the
            # weights moves gradients of these cases by up to 2e-5.
            least = 5e-5 if name.startswith("linear") else 1e-5
            most = 1e-4 if key.endswith(("weight", "bias")) or key == "valid" else least
            torch.testing.assert_close(found[key] / scale, value / scale, rtol=0, atol=most, msg=f"{name} {key}")
    for key, value in ranks[0].items():  # copies of a weight stay copies
        assert all(torch.equal(other[key], value) for other in ranks[1:]), key


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize(("tokens", "ranks"), [(17, 4), (16, 4), (5, 2), (6, 3)])
def test_every_token_is_on_one_rank(tokens: int, ranks: int, pieces: int) -> None:
    borders, every = [0, 2, tokens], torch.arange(tokens)
    splits = [TokenSplit(tokens, ContextGroup(rank, ranks, pieces=pieces)) for rank in range(ranks)]
    rows = [split.take(every) for split in splits]
    assert sorted(torch.cat(rows).tolist()) == list(range(tokens)) and [len(own) for own in rows] == splits[0].counts
    assert max(splits[0].counts) - min(splits[0].counts) <= pieces
    for rank, (split, own) in enumerate(zip(splits, rows, strict=True)):
        plan = split.count_own(borders)
        lengths = [length for length, count in plan for _ in range(count)]
        assert lengths == [2 if row < 2 else tokens - 2 for row in own.tolist()]
        asked = torch.tensor([tokens - 1, 0, tokens // 2])
        indices, places = split.find_rows(asked)
        assert torch.equal(own[places], asked[indices])
        assert indices.tolist() == [index for index, row in enumerate(asked.tolist()) if row in own.tolist()]
        assert all(split.find_owner(piece) == rank for piece in split.list_pieces(rank))


REFUSED: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "context": ({"context": 4}, 6, "parallel.context is 4, which does not divide 6 processes", "--device.nproc 8"),
    "one": ({"context": 2}, 1, "parallel.context is 2, which does not divide 1 process", "--device.nproc 2"),
    "both": (
        {"context": 2, "tensor": 2},
        6,
        "parallel.context 2 x parallel.tensor 2 = 4, which does not divide 6 processes",
        "start a multiple of 4",
    ),
    "copies": (
        {"replicate": 3, "strategy": "zero3"},
        8,
        "parallel.replicate is 3, which does not divide 8 processes",
        "a multiple of 3",
    ),
    "nothing to shard": (
        {"replicate": 4, "tensor": 2, "strategy": "zero3"},
        8,
        "parallel.replicate is 4, and 8 processes leave one in each copy",
        "ddp",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_processes_that_are_no_mesh_are_refused(case: str) -> None:
    settings, processes, message, hint = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        resolve_mesh_shape(Parallel(**settings), processes)
    assert message in str(caught.value) and hint in (caught.value.hint or "")


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="parallel.context is 0"):
        Parallel(context=0)
    with pytest.raises(ConfigError, match="parallel.replicate is 2, parallel.strategy is ddp"):
        Parallel(replicate=2, strategy="ddp")


def test_the_mesh_is_what_is_left() -> None:
    shape = resolve_mesh_shape(Parallel(strategy="zero3", replicate=2, context=4, tensor=2), 64)
    assert shape == MeshShape(replicate=2, shard=4, context=4, tensor=2)
    assert (shape.size, shape.data_size, shape.gradient_size) == (64, 8, 32)


@pytest.mark.parametrize(("context", "tensor", "heads"), [(3, 1, "4 attention heads"), (4, 2, "2 attention heads on")])
def test_heads_that_are_not_divided_are_named(context: int, tensor: int, heads: str) -> None:
    with init_empty_weights():
        model: Any = transformers.AutoModelForCausalLM.from_config(config_of("Qwen2", {}))
    world = World(0, context * tensor, context_group=ContextGroup(0, context), tensor_group=RankGroup(0, tensor))
    with pytest.raises(ConfigError, match=f"parallel.context is {context}, which does not divide the model's {heads}"):
        context_parallel.require_divisible_heads(model, world)


def test_a_value_is_counted_once() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    parts: list[Tensor] = [context_parallel.count_once(x * x, ContextGroup(rank, 3)) for rank in range(3)]
    assert [float(part.detach()) for part in parts] == [9.0, 0.0, 0.0]
    for part in parts:
        assert torch.autograd.grad(part, x)[0] == 6.0
