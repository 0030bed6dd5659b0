"""The engine answers prompts with pictures as transformers' own `generate` does, in pieces, in batches, and again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from anabatic.config.chat import Sampling
from anabatic.data.vision.picture_batch import list_pictures, read_pictures
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.infer.engine import Engine
from anabatic.models.pretrained import prepare_model
from anabatic.models.vision.prompt_pictures import PromptPictures
from suite import tiny_vision

from .test_packed_pictures import CPU, make_rows

pytestmark = pytest.mark.process
GREEDY = Sampling(temperature=0.0, max_new_tokens=6)


def make_prompts(folder: Path, family: str) -> tuple[PictureRules, list[tuple[list[int], PromptPictures | None, list]]]:
    """Return prompts with one picture, none, two, and one."""
    rules, rows = make_rows(folder, family)
    prompts = []
    for row in rows:
        ids = row.ids
        sources = list_pictures(row.pictures or b"[]")
        pictures = None
        if sources:
            pictures = PromptPictures(ids, ids == rules.image_token, read_pictures(ids, sources, rules))
        prompts.append((ids.tolist(), pictures, sources))
    return rules, prompts


def generate_reference(model: PreTrainedModel, ids: list[int], sources: list, rules: PictureRules) -> list[int]:
    """Return transformers' greedy answer to one prompt."""
    tokens = torch.tensor([ids])
    inputs: dict = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if sources:
        batch = read_pictures(np.asarray(ids), sources, rules)
        pixels = batch.pixels.to(model.dtype)
        inputs |= (
            {"pixel_values": pixels.view(-1, 3, rules.patch, rules.patch)}
            if rules.axes == 1
            else {
                "pixel_values": pixels,
                "image_grid_thw": torch.tensor([(1, *grid) for grid in batch.grids]),
                "mm_token_type_ids": (tokens == rules.image_token).int(),
            }
        )
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.generate(**inputs, generation_config=settings)[0, len(ids) :].tolist()


def answer(engine: Engine, prompts: list, chosen: list[int]) -> list[list[int]]:
    requests = [engine.request(prompts[one][0], GREEDY, stop_ids=(), pictures=prompts[one][1]) for one in chosen]
    engine.submit(requests)
    while any(not request.finish_reason for request in requests):
        engine.step()
    return [request.ids for request in requests]


@pytest.mark.parametrize("family", tiny_vision.PATCH)
def test_answers_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    rules, prompts = make_prompts(tmp_path, family)
    plain = tiny_vision.build_model(family, torch.float64).eval()
    expected = [generate_reference(plain, ids, sources, rules) for ids, _, sources in prompts]

    model = prepare_model(tiny_vision.build_model(family, torch.float64), CPU).eval()
    engine = Engine(model, tiny_vision.build_tokenizer(), max_batch=3, max_len=256, step_tokens=23)
    order = [0, 1, 2, 3, 0, 2]
    assert answer(engine, prompts, order) == [expected[one] for one in order]
    assert answer(engine, prompts, [2, 3]) == [expected[2], expected[3]]
    assert engine.runner.runs_directly == (
        family == "qwen3_vl" or family == "internvl"
    )  # decoders of the known structure
    shared = engine.get_load().shared_tokens
    assert shared > 0 or family.startswith("qwen3_5")  # layers with a state share no beginnings


def test_another_picture_shares_no_tokens_of_the_first(tmp_path: Path) -> None:
    rules, prompts = make_prompts(tmp_path, "qwen3_vl")
    ids, _, (shown,) = prompts[0]
    tiny_vision.draw_shape(tmp_path / "other.png", "white", "square", (96, 64))
    token_ids = np.asarray(ids)
    other_sources = [shown._replace(source=str(tmp_path / "other.png"))]
    other = PromptPictures(token_ids, token_ids == rules.image_token, read_pictures(token_ids, other_sources, rules))
    plain = tiny_vision.build_model("qwen3_vl", torch.float64).eval()
    expected = generate_reference(plain, ids, other_sources, rules)
    assert expected != generate_reference(plain, ids, [shown], rules)
    engine = Engine(
        prepare_model(tiny_vision.build_model("qwen3_vl", torch.float64), CPU).eval(),
        tiny_vision.build_tokenizer(), max_batch=2, max_len=256,
    )  # fmt: skip
    answer(engine, prompts, [0])
    assert answer(engine, [(ids, other, [])], [0]) == [expected]
