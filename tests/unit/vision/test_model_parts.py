"""Parts of models that see, and what is known of them without weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabatic.core.errors import DataError
from anabatic.models.lora import adapter
from anabatic.models.vision.model_parts import choose_parts, find_part_prefixes, find_trained_prefixes
from anabatic.plan import model_shape
from anabatic.plan.memory_estimate import get_persistent_bytes
from anabatic.plan.shapes.tower_shape import count_tower_params
from anabatic.plan.training_setup import TrainingSetup
from suite import tiny_vision

FAMILIES = tuple(tiny_vision.PATCH)
IN_FRONT = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_in_one_part(family: str) -> None:
    model = tiny_vision.build_model(family)
    parts = find_part_prefixes(model)
    for name, _ in model.named_parameters():
        assert sum(name.startswith(prefixes) for prefixes in parts.values()) == 1, name
    trained = find_trained_prefixes(model, choose_parts([], is_full=True))
    names = [name for name, _ in model.named_parameters() if name.startswith(trained)]
    assert any(name.find("merger") + name.find("projector") > 0 for name in names)
    assert not any("blocks" in name or "vision_tower" in name for name in names)
    targets = adapter.find_targets(model, ["all-linear"], find_trained_prefixes(model, choose_parts([], False)))
    assert targets and all("language_model" in name for name in targets)
    targets = adapter.find_targets(model, ["all-linear"], find_trained_prefixes(model, ["tower"]))
    assert len(targets) >= 4 * 4 and all("visual.blocks" in name or "encoder.layer" in name for name in targets)
    assert adapter.find_blocks(model)[0] == "model.language_model.layers.0"


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_the_tower_are_counted(family: str) -> None:
    model = tiny_vision.build_model(family)
    expected = sum(one.numel() for name, one in model.named_parameters() if name.startswith(IN_FRONT))
    assert count_tower_params(model.config.to_dict()) == expected


def test_a_plan_counts_the_weights_of_the_tower(tmp_path: Path) -> None:
    config = tiny_vision.make_config().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape, source = model_shape.get_named_shape(str(tmp_path))
    tower = count_tower_params(config)
    assert shape.tower_params == tower and "with a tower of" in source
    blind = TrainingSetup(replace(shape, tower_params=0))
    for tuner, width in (("full", 4), ("lora", 2)):  # what is frozen beside trained weights has their precision
        more = get_persistent_bytes(TrainingSetup(shape, tuner=tuner))
        less = get_persistent_bytes(replace(blind, tuner=tuner))
        assert more["frozen weights"] - less["frozen weights"] == width * tower
        assert more["optimizer"] == less["optimizer"]
    trained = get_persistent_bytes(TrainingSetup(shape, trains_tower=True, trains_projector=True))
    assert trained["trained weights"] - get_persistent_bytes(blind)["trained weights"] == 4 * tower


def test_which_models_are_taken() -> None:
    config = tiny_vision.make_config().to_dict()
    assert model_shape.packs_pictures(config)
    model_shape.require_text_decoder(config, "config.json")
    with pytest.raises(DataError, match="reads pictures, video or sound"):
        model_shape.require_text_decoder(config | {"text_config": None}, "config.json")
    sliding = {**config["text_config"], "layer_types": ["sliding_attention", "full_attention"]}
    changes: list[dict[str, Any]] = [{"audio_config": {"x": 1}}, {"image_token_id": None}]
    for change in (*changes, {"vision_config": {"hidden_size": 8}}, {"text_config": sliding}):
        assert model_shape.sees_pictures(config | change) and not model_shape.packs_pictures(config | change)
