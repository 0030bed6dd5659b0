"""A model that sees, trained by `anabatic sft` on colored shapes: its first loss, its pictures, resumed and merged."""

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
from anabatic.config.chat import Sampling
from anabatic.config.infer import InferJob
from anabatic.core import json_reader, paths
from anabatic.data.chat.rendering import render_conversations
from anabatic.data.vision.patches import make_patches
from anabatic.data.vision.picture_files import load_picture
from anabatic.data.vision.rule_files import read_picture_rules
from anabatic.recipes import batch_inference
from anabatic.recipes.row_tokens import RowTokenizer
from suite import tiny_vision

pytestmark = pytest.mark.process
OPTIONS: dict[str, Any] = {
    "batch.seq_len": 96, "batch.micro_batch_tokens": 384, "batch.global_batch_tokens": 384, "log.every": 1,
    "data.valid_fraction": 0.0, "save.every": 20, "device.dtype": "fp32",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, pictures and rows, every fifth without a picture."""
    folder = tmp_path_factory.mktemp("vision")
    tiny_vision.save_seeing_model(folder / "model")
    tiny_vision.write_shapes(folder / "shapes", rows=40, text_every=5)
    return folder


def train(place: Path, out: str, **options: Any) -> Path:
    """Fine-tune the model; return the run folder."""
    dotted = {key.replace("__", "."): value for key, value in options.items()}
    rows = dotted.pop("rows", place / "shapes" / "rows.jsonl")
    anabatic.sft(model=place / "model", data=rows, out=place / out, **{**OPTIONS, **dotted})
    return place / out


def read_losses(run: Path) -> list[float]:
    return [row["loss"] for row in json_reader.read_json_lines(run / "metrics.jsonl") if row["kind"] == "train"]


def compute_loss(model: Any, folder: Path, row: dict[str, Any], picture: Path) -> float:
    """Return the mean loss of a row's answer by transformers alone, with this picture."""
    rules = read_picture_rules(folder, model.config.to_dict())
    tokenizer = tiny_vision.build_tokenizer(rules.adds_borders)
    image = load_picture(str(picture))
    grid = rules.fit_grid(image.size[1], image.size[0])
    pads = "<|image_pad|>" * rules.count_tokens(grid)
    turns = [dict(turn) for turn in row["messages"]]
    behind = "\n" if rules.adds_borders else ""
    turns[0]["content"] = turns[0]["content"].replace("<image>", f"<|vision_start|>{pads}<|vision_end|>{behind}")
    (rendered,) = render_conversations([turns], tokenizer)
    ids = torch.from_numpy(rendered.ids)[None]
    labels = torch.where(torch.from_numpy(rendered.mask != 0)[None], ids, -100)
    pixels = torch.from_numpy(make_patches(image, rules))
    shown: dict[str, Any] = {"pixel_values": pixels.view(-1, 3, rules.patch, rules.patch)}
    if rules.axes == 3:
        shown = {"pixel_values": pixels, "image_grid_thw": torch.tensor([(1, *grid)])}
        shown["mm_token_type_ids"] = (ids == rules.image_token).int()
    with torch.no_grad():
        out = model(input_ids=ids, labels=labels, **shown)
    return float(out.loss)


def test_the_first_loss_is_that_of_transformers(place: Path) -> None:
    rows = [json.loads(line) for line in (place / "shapes" / "rows.jsonl").read_text().splitlines()]
    row = rows[1]
    (place / "shapes" / "one.jsonl").write_text(json.dumps(row))
    run = train(place, "first", rows=place / "shapes" / "one.jsonl", schedule__max_steps=1, tuner="lora")
    model = AutoModelForImageTextToText.from_pretrained(place / "model")
    assert read_losses(run)[0] == pytest.approx(
        compute_loss(model, place / "model", row, place / "shapes" / row["images"][0]), rel=1e-5
    )


def test_a_trained_model_needs_its_picture_and_resumes_to_the_bit(place: Path) -> None:
    more: dict[str, Any] = {
        "tuner": "lora", "schedule__max_steps": 40, "optim__lr": 0.01, "lora__r": 8, "vision__train": ["language"],
    }  # fmt: skip
    run = train(place, "shapes-lora", **more)
    losses = read_losses(run)
    assert losses[-1] < 0.5 * losses[0]

    stopped = place / "stopped"
    shutil.copytree(run, stopped, ignore=shutil.ignore_patterns("final_model", "checkpoint-40", "summary*"))
    config = stopped / "config.yaml"
    config.write_text(config.read_text().replace(str(run), str(stopped)))
    train(place, "stopped", **more, vision__cache_gib=0.01)  # the second half, with pictures from the disk
    assert any(paths.get_cache_root().glob("pictures/*/*"))
    first, second = (load_file(one / "final_model" / "adapter_model.safetensors") for one in (run, stopped))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert not any("visual" in name for name in first)

    anabatic.merge(model=run, out=place / "merged")
    names = {path.name for path in (place / "merged").iterdir()}
    assert {"preprocessor_config.json", "video_preprocessor_config.json", "chat_template.jinja"} <= names
    model = AutoModelForImageTextToText.from_pretrained(place / "merged")
    rows = [json.loads(line) for line in (place / "shapes" / "rows.jsonl").read_text().splitlines()[1:9]]
    for row in (one for one in rows if "images" in one):
        right = row["images"][0]
        color = right.partition("-")[0]
        other = next(name for name in tiny_vision.COLORS if name != color)
        wrong = right.replace(color, other)
        losses = [compute_loss(model, place / "model", row, place / "shapes" / one) for one in (right, wrong)]
        assert losses[0] < losses[1]

    asked = [{**row, "messages": row["messages"][:1]} for row in rows]
    (place / "shapes" / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    greedy = Sampling(temperature=0.0, max_new_tokens=8)
    out = place / "answers.jsonl"
    batch_inference.run(
        InferJob(model=str(run), inputs=[str(place / "shapes" / "asked.jsonl")], out=str(out), sampling=greedy)
    )
    answers = [line["response"] for line in json_reader.read_json_lines(out)]
    expected = [row["messages"][1]["content"] for row in rows]
    assert sum(one == two for one, two in zip(answers, expected, strict=True)) >= len(rows) // 2, answers


def test_an_adapter_of_the_tower_is_continued_with_its_sizes(place: Path) -> None:
    first = train(place, "tower", tuner="lora", schedule__max_steps=2, vision__train=["tower"], vision__max_pixels=1024)
    names = load_file(first / "final_model" / "adapter_model.safetensors")
    assert names and all("visual.blocks" in name for name in names)
    reader = RowTokenizer(str(first), None)
    assert reader.rules is not None and reader.rules.max_pixels == 1024
    anabatic.sft(
        model=first, data=place / "shapes" / "rows.jsonl", out=place / "more", **{**OPTIONS, "schedule.max_steps": 1}
    )
    again = load_file(place / "more" / "final_model" / "adapter_model.safetensors")
    sizes = json.loads((place / "more" / "final_model" / "preprocessor_config.json").read_text())["size"]
    assert again.keys() == names.keys() and sizes["longest_edge"] == 1024


def test_a_whole_model_keeps_its_frozen_tower(place: Path) -> None:
    run = train(place, "full", tuner="full", schedule__max_steps=2, vision__max_pixels=4096)
    sizes = json.loads((run / "final_model" / "preprocessor_config.json").read_text())["size"]
    assert sizes == {"shortest_edge": 1024, "longest_edge": 4096}  # those that it was trained with
    file = "video_preprocessor_config.json"
    assert (run / "final_model" / file).read_bytes() == (place / "model" / file).read_bytes()
    before = load_file(place / "model" / "model.safetensors")
    after = load_file(run / "final_model" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert all("merger" in name for name in changed if "visual" in name)
    assert any("visual.merger" in name for name in changed) and any("language_model" in name for name in changed)


def test_a_model_with_tiles_is_trained_loaded_and_asked(place: Path) -> None:
    folder = tiny_vision.save_seeing_model(place / "tiled", "internvl")
    row = json.loads((place / "shapes" / "rows.jsonl").read_text().splitlines()[3])
    (place / "shapes" / "tiled.jsonl").write_text(json.dumps(row))
    options = OPTIONS | {"schedule.max_steps": 2, "tuner": "full", "vision.max_pixels": 3072, "recompute": "full"}
    anabatic.sft(model=folder, data=place / "shapes" / "tiled.jsonl", out=place / "tiles", **options)
    final = place / "tiles" / "final_model"
    assert json.loads((final / "preprocessor_config.json").read_text())["max_patches"] == 3
    model = AutoModelForImageTextToText.from_pretrained(folder)
    picture = place / "shapes" / row["images"][0]
    first = read_losses(place / "tiles")[0]
    shutil.copyfile(final / "preprocessor_config.json", folder / "preprocessor_config.json")
    assert first == pytest.approx(compute_loss(model, folder, row, picture), rel=1e-5)
    trained = AutoModelForImageTextToText.from_pretrained(final)
    assert compute_loss(trained, final, row, picture) < first
    before, after = (load_file(one / "model.safetensors") for one in (folder, final))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("projector" in name for name in changed) and not any("vision_tower" in name for name in changed)

    anabatic.dpo(
        model=folder, data=write_pairs(place, row), out=place / "tiled-pairs",
        **{**OPTIONS, "schedule.max_steps": 2, "tuner": "lora", "loss_type": "kto"},
    )  # fmt: skip
    asked = {**row, "messages": row["messages"][:1]}
    (place / "shapes" / "asked.jsonl").write_text(json.dumps(asked))
    out = place / "tiled.jsonl"
    batch_inference.run(
        InferJob(model=str(place / "tiled-pairs"), inputs=[str(place / "shapes" / "asked.jsonl")], out=str(out))
    )
    assert len(list(json_reader.read_json_lines(out))) == 1


def write_pairs(place: Path, row: dict[str, Any]) -> Path:
    """Write answers with a label about the picture of a row; return the file."""
    path = place / "shapes" / "tiled-labels.jsonl"
    path.write_text("".join(json.dumps({**row, "label": label}) + "\n" for label in (True, False) * 4))
    return path
