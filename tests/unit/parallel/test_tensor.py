"""Four processes, two by two: a step makes the gradients, the norm and the weights of one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from anabatic.config.sections.common import Parallel
from anabatic.core.errors import ConfigError
from anabatic.device.device import select_device
from anabatic.models import tensor_parallel
from anabatic.models.pretrained import init_empty_weights
from anabatic.parallel.mesh import RankGroup
from anabatic.parallel.world import World, init_world, leave_world
from anabatic_testing.multiprocess import spawn_ranks
from unit.models.test_families import FAMILIES
from unit.parallel.one_step import DEVICE, Case, Settings, batch_of, config_of, save_random_model, train_step

BIASED: Settings = {"attention_bias": True, "mlp_bias": True, "head_dim": 8}
CASES = {
    "qwen2": Case("Qwen2"),
    "qwen3": Case("Qwen3", {"head_dim": 8}, strategy="zero3", optim="muon"),
    "llama": Case("Llama", BIASED, optim="muon"),
    "gemma2": Case("Gemma2", {"head_dim": 8}),
    "qwen2-moe": Case(*FAMILIES["qwen2-moe"][:2]),
    "lora": Case("Llama", BIASED, {"init": "pissa"}, "zero2"),
    "dora": Case("Llama", BIASED, {"use_dora": True}, "zero3"),
}
BATCHES = [batch_of(lengths) for lengths in ([5, 9, 3], [17], [2, 15], [8, 9])]
"""A step's micro-batches; of ranks 0 and 1 in turn."""


def together(folder: Path) -> None:
    world = init_world(select_device(DEVICE), Parallel(tensor=2))
    assert (world.data_group.size, world.tensor_group.size) == (2, 2)
    for case in CASES:
        found = train_step(folder / case, CASES[case], world, BATCHES)
        save_file(found, folder / f"{case}-{os.environ['RANK']}.safetensors")
    leave_world(world)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tensor")
    for name, case in CASES.items():
        save_random_model(root / name, case)
    spawn_ranks(together, 4, root)
    return root


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_four_processes_train_as_one_does(folder: Path, case: str) -> None:
    expected = train_step(folder / case, CASES[case], World(), BATCHES)
    ranks = [load_file(folder / f"{case}-{rank}.safetensors") for rank in range(4)]
    for found in ranks:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            scale = value.abs().max() + 1e-9
            # Muon multiplies rounding where singular values are small.
            most = 1e-4 if CASES[case].optim == "muon" and ".grad" not in name else 1e-5
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
        init_world(select_device(DEVICE), Parallel(tensor=4))
    assert "8" in (caught.value.hint or "")
    assert World().data_group == World() and World().tensor_group == RankGroup()
