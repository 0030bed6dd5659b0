"""Models and rows of another kind are refused by name, wherever they are met."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabatic.core.errors import ConfigError, DataError
from anabatic.core.model_kind import require_text_decoder
from anabatic.data import asked
from anabatic.data.document import Columns, Document, Problem
from anabatic.data.rows import needed, to_document
from anabatic.models import hf
from anabatic.plan import known
from anabatic.recipes.plan import chip_named

SIZES = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen3-VL": (
        dict(model_type="qwen3_vl", architectures=["Qwen3VLForConditionalGeneration"], text_config=SIZES,
             vision_config={"depth": 27}),
        "Qwen3VLForConditionalGeneration reads pictures, too",
    ),
    "Qwen2.5-Omni": (
        dict(model_type="qwen2_5_omni", thinker_config={"text_config": SIZES}),
        "model_type qwen2_5_omni reads pictures and sound, too",
    ),
    "Qwen2-Audio": (dict(model_type="qwen2_audio", audio_config={"d_model": 4}, **SIZES), "reads sound, too"),
    "LLaVA": (dict(model_type="llava", mm_vision_tower="clip", **SIZES), "reads pictures, too"),
    "Phi-3-vision": (dict(model_type="phi3_v", img_processor={"name": "clip"}, **SIZES), "reads pictures, too"),
    "T5": (dict(model_type="t5", is_encoder_decoder=True, **SIZES), "is an encoder with a decoder"),
    "BERT": (dict(model_type="bert", architectures=["BertForMaskedLM"], **SIZES), "BertForMaskedLM is an encoder"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_models_of_other_kinds_are_refused(kind: str, tmp_path: Path) -> None:
    config, message = OTHERS[kind]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for read in (hf.load_config, lambda folder: known.named(str(folder))):
        with pytest.raises(DataError, match=message):
            read(tmp_path)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3_text"])
def test_decoders_of_text_pass(kind: str) -> None:
    require_text_decoder({"model_type": kind, "vision_config": None, **SIZES}, "config.json")
    require_text_decoder({"model_type": "bert", "is_decoder": True, **SIZES}, "config.json")


TURNS = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "a ship"}]
PART = {"type": "image_url", "image_url": {"url": "a.png"}}
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "ms-swift": ({"messages": TURNS, "images": ["a.png"]}, "has images"),
    "LLaMA-Factory": ({"instruction": "what?", "input": "", "output": "a ship", "images": ["a.png"]}, "has images"),
    "videos and audios": ({"query": "what?", "response": "x", "videos": ["a"], "audios": ["b"]}, "videos, audios"),
    "one image": ({"prompt": "what?", "completion": "x", "image": "a.png"}, "has image,"),
    "OpenAI": ({"messages": [{"role": "user", "content": [PART]}, TURNS[1]]}, "part of the type image_url"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_with_pictures_are_refused(kind: str, tmp_path: Path) -> None:
    row, message = ROWS[kind]
    found = to_document(row, "a:1", "a: line 1", Columns())
    assert isinstance(found, Problem) and message in found.message and "only text is supported" in found.message
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (told,) = asked.read([str(tmp_path / "rows.jsonl")], {})
    assert isinstance(told, Problem) and message in told.message


def test_empty_columns_of_pictures_do_no_harm() -> None:
    found = to_document({"messages": TURNS, "images": [], "video": None}, "a:1", "a: line 1", Columns())
    assert isinstance(found, Document)
    assert isinstance(to_document({"text": "a page", "image": "https://x"}, "a:1", "a: line 1", Columns()), Document)
    assert needed(["messages", "images", "other"], Columns()) == ["messages", "images"]


def test_a_chip_for_inference_is_no_chip_to_train_on() -> None:
    with pytest.raises(ConfigError, match="Ascend310P3 is a chip for inference"):
        chip_named("310P3")
    assert (chip_named("910B4").memory_gib, chip_named("910B4-1").memory_gib) == (32, 64)
