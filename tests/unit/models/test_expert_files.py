"""Saved mixtures of experts are what transformers writes, tensor for tensor, and load again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from anabatic.models import pretrained, weights_reader
from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS

# family: a name of layer 1 on disk
LAYOUTS = {
    "Mixtral": "model.layers.1.block_sparse_moe.experts.3.w2.weight",
    "Qwen2Moe": "model.layers.1.mlp.experts.3.down_proj.weight",
    "Qwen3Moe": "model.layers.1.mlp.experts.3.gate_proj.weight",
    "Qwen3Next": "model.layers.1.mlp.experts.3.up_proj.weight",
    "DeepseekV3": "model.layers.1.mlp.experts.3.gate_proj.weight",
    "Glm4Moe": "model.layers.1.mlp.experts.3.up_proj.weight",
    "GptOss": "model.layers.1.mlp.experts.gate_up_proj",
}


def build(family: str) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {**COMMON_CONFIG, **FAMILY_CONFIGS[family]}
    if family == "GptOss":
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**settings))


@pytest.mark.parametrize("family", LAYOUTS)
def test_files_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    weights_reader.save_weights(model, tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs"))
    assert LAYOUTS[family] in ours
    assert {name: tuple(value.shape) for name, value in ours.items()} == {
        name: tuple(value.shape) for name, value in theirs.items()
    }
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    again = pretrained.build_meta_causal_lm(tmp_path / "theirs", torch.float32)
    pretrained.materialize_parameters(again, torch.device("cpu"), torch.device("cpu"))
    pretrained.load_folder_weights(again, tmp_path / "theirs")
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
