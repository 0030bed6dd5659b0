"""A model that sees and is not packed, trained by `anabatic sft` and `dpo`, resumed, merged, and refused elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import anabatic
from anabatic.config.infer import InferJob
from anabatic.core import json_reader
from anabatic.core.errors import ConfigError
from anabatic.recipes import batch_inference
from suite import tiny_own_vision, tiny_vision

pytestmark = pytest.mark.process
OPTIONS: dict[str, Any] = {
    "batch.seq_len": 96, "batch.micro_batch_tokens": 384, "batch.global_batch_tokens": 384, "log.every": 1,
    "data.valid_fraction": 0.0, "save.every": 10, "device.dtype": "fp32",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, pictures and rows, every fifth without a picture."""
    folder = tmp_path_factory.mktemp("own")
    tiny_own_vision.save_own_model(folder / "model", "llava")
    tiny_vision.write_shapes(folder / "shapes", rows=40, text_every=5)
    return folder


def train(place: Path, out: str, **options: Any) -> Path:
    """Fine-tune the model; return the run folder."""
    dotted = {key.replace("__", "."): value for key, value in options.items()}
    anabatic.sft(model=place / "model", data=place / "shapes" / "rows.jsonl", out=place / out, **{**OPTIONS, **dotted})
    return place / out


def read_losses(run: Path) -> list[float]:
    return [row["loss"] for row in json_reader.read_json_lines(run / "metrics.jsonl") if row["kind"] == "train"]


def test_adapters_are_trained_resumed_to_the_bit_and_merged(place: Path) -> None:
    more: dict[str, Any] = {"tuner": "lora", "schedule__max_steps": 20, "optim__lr": 0.01, "lora__r": 8}
    run = train(place, "lora", **more)
    losses = read_losses(run)
    assert losses[-1] < 0.5 * losses[0]

    stopped = place / "stopped"
    shutil.copytree(run, stopped, ignore=shutil.ignore_patterns("final_model", "checkpoint-20", "summary*"))
    config = stopped / "config.yaml"
    config.write_text(config.read_text().replace(str(run), str(stopped)))
    train(place, "stopped", **more)
    first, second = (load_file(one / "final_model" / "adapter_model.safetensors") for one in (run, stopped))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert first and all("language_model" in name for name in first)

    anabatic.merge(model=run, out=place / "merged")
    assert {"preprocessor_config.json", "processor_config.json"} <= {one.name for one in (place / "merged").iterdir()}
    merged = AutoModelForImageTextToText.from_pretrained(place / "merged")
    before = AutoModelForImageTextToText.from_pretrained(place / "model")
    row = json.loads((place / "shapes" / "rows.jsonl").read_text().splitlines()[1])
    losses = [compute_loss(model, place, row) for model in (before, merged)]
    assert losses[1] < 0.5 * losses[0]
    with pytest.raises(ConfigError, match="not run by this engine") as refused:
        batch_inference.run(InferJob(model=str(run), inputs=[str(place / "shapes" / "rows.jsonl")], out="x.jsonl"))
    assert "anabatic export" in refused.value.hint


def compute_loss(model: Any, place: Path, row: dict[str, Any]) -> float:
    """Return the mean loss of a row's answer by transformers alone."""
    processor = tiny_own_vision.build_own_processor("llava")
    image = {"type": "image", "path": str(place / "shapes" / row["images"][0])}
    question = {"type": "text", "text": row["messages"][0]["content"].replace("<image>", "")}
    answer = row["messages"][1]["content"]
    turns = [
        {"role": "user", "content": [image, question]},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
    inputs = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
    labels = torch.full_like(inputs["input_ids"], -100)
    learned = slice(-len(answer) - 2, -1)
    labels[:, learned] = inputs["input_ids"][:, learned]
    with torch.no_grad():
        return float(model(**inputs, labels=labels).loss)


def test_parts_are_trained_and_the_rest_is_kept(place: Path) -> None:
    run = train(place, "full", tuner="full", schedule__max_steps=2, recompute="full")
    final = run / "final_model"
    loaded = [AutoModelForImageTextToText.from_pretrained(one) for one in (place / "model", final)]
    before, after = (model.state_dict() for model in loaded)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("projector" in name for name in changed) and any("language_model" in name for name in changed)
    assert not any("vision_tower" in name for name in changed)

    run = train(place, "tower", tuner="lora", schedule__max_steps=2, vision__train=["tower"])
    adapters = load_file(run / "final_model" / "adapter_model.safetensors")
    assert adapters and all("vision_tower" in name for name in adapters)


def test_preferences_are_learned(place: Path) -> None:
    rows = [json.loads(line) for line in (place / "shapes" / "rows.jsonl").read_text().splitlines()]
    pairs = [{**row, "rejected_response": "none"} for row in rows if row.get("images")]
    (place / "shapes" / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    options = {**OPTIONS, "schedule.max_steps": 6, "tuner": "lora", "optim.lr": 0.01}
    options |= {"batch.micro_batch_tokens": 768, "batch.global_batch_tokens": 768}
    data = place / "shapes" / "pairs.jsonl"
    anabatic.dpo(model=place / "model", data=data, out=place / "pairs", **options)
    losses = read_losses(place / "pairs")
    assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[-1] < 0.6
    with pytest.raises(ConfigError, match="only sft and dpo without --loss-type kto"):
        anabatic.dpo(model=place / "model", data=data, out=place / "kto", **options, loss_type="kto")
    with pytest.raises(ConfigError, match="only sft and dpo"):
        anabatic.reward(model=place / "model", data=data, out=place / "judge", **options)
