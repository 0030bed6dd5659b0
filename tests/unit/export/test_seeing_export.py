"""A model that sees, exported: every file of its processor, the sizes of its training, the answers of the model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from anabatic.config.export import ExportJob
from anabatic.config.sections.train_jobs import Lora
from anabatic.core.errors import ConfigError
from anabatic.data.vision.picture_files import load_picture
from anabatic.data.vision.rule_files import read_picture_rules
from anabatic.models import pretrained, weights_reader
from anabatic.models.lora import adapter
from anabatic.models.vision.processor_files import copy_processor_files
from anabatic.recipes.export import model_folder
from suite import tiny_vision

pytestmark = pytest.mark.process  # seconds


def compute_logits(model: Any, picture: Path, folder: Path) -> list[float]:
    """Return the logits of transformers' own forward pass, the picture resized as the folder says."""
    size = json.loads((folder / "preprocessor_config.json").read_text())["size"]
    half = [0.5, 0.5, 0.5]
    processor = Qwen2VLImageProcessorPil(size=size, patch_size=16, image_mean=half, image_std=half)
    inputs = processor([load_picture(str(picture))], return_tensors="pt")
    tokens = int(inputs["image_grid_thw"].prod()) // 4
    ids = torch.tensor([[10, 3, *[5] * tokens, 4, 11, 12]])
    with torch.no_grad():
        out = model.float().eval()(input_ids=ids, mm_token_type_ids=(ids == 5).int(), use_cache=False, **inputs)
    return out.logits[0, -1].tolist()


def save_trained_adapter(base: Path, folder: Path) -> Path:
    """Save an adapter as a training with smaller pictures does."""
    model, settings = tiny_vision.build_model(), Lora(r=2)
    adapter.insert_adapter(model, settings, ("model.language_model.",))
    adapter.init_adapter_weights(model, settings, 0)
    for layer in adapter.find_lora_layers(model).values():
        torch.nn.init.normal_(layer.lora_B, 0.0, 0.3, torch.Generator().manual_seed(1))
    rules = read_picture_rules(base, model.config.to_dict(), max_pixels=4096)
    adapter.save_adapter(
        model, folder, tiny_vision.build_tokenizer(), settings, base,
        write_extra=lambda temporary: copy_processor_files(base, temporary, rules),
    )  # fmt: skip
    return folder


def test_a_merged_adapter_has_all_that_a_server_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = tiny_vision.save_seeing_model(tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"top_p": 0.8, "do_sample": True}))
    (base / "LICENSE").write_text("mine")
    lora = save_trained_adapter(base, tmp_path / "lora")
    out = tmp_path / "out"
    with caplog.at_level(logging.INFO, logger="anabatic"):
        model_folder.run(ExportJob(model=str(lora), out=str(out), dtype="fp32"))
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert names == {
        "LICENSE", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "preprocessor_config.json", "serving/mindie-config.json", "serving/vllm-ascend.sh", "tokenizer.json",
        "tokenizer_config.json", "video_preprocessor_config.json",
    }  # fmt: skip
    assert "no Modelfile" in caplog.text
    assert json.loads((out / "preprocessor_config.json").read_text())["size"]["longest_edge"] == 4096
    settings = json.loads((out / "generation_config.json").read_text())
    assert settings["top_p"] == 0.8 and settings["eos_token_id"]
    assert "--max-model-len 512" in (out / "serving/vllm-ascend.sh").read_text()

    exported, told = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    loaded = adapter.merge_into_linears(pretrained.load_model(lora, torch.device("cpu")))
    loaded.set_attn_implementation("sdpa")
    picture = tiny_vision.draw_shape(tmp_path / "a.png", "red", "circle", (96, 64))
    found = compute_logits(exported, picture, out)
    assert found == pytest.approx(compute_logits(loaded, picture, out), abs=1e-4)
    plain = AutoModelForImageTextToText.from_pretrained(base)
    assert found != pytest.approx(compute_logits(plain, picture, out), abs=1e-2)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert "<|image_pad|>" in tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}], tokenize=False
    )
    assert type(AutoImageProcessor.from_pretrained(out, use_fast=False)).__name__.startswith("Qwen2VLImageProcessor")


def test_gguf_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    base = tiny_vision.save_seeing_model(tmp_path / "base")
    (base / "model.safetensors").unlink()
    for settings in ({"gguf": "q8_0"}, {"format": "gguf"}, {"format": "ollama"}):
        with pytest.raises(ConfigError, match="reads pictures: llama.cpp keeps its tower in a second file"):
            model_folder.run(ExportJob(model=str(base), out=str(tmp_path / "out"), **settings))


def test_older_programs_find_the_sections_of_positions() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = weights_reader.to_older_config({"text_config": {"rope_parameters": rope}})["text_config"]
    assert text["rope_theta"] == 1e4 and text["rope_scaling"] == {"rope_type": "default", "mrope_section": [2, 1, 1]}
