"""Rows with videos and objects through the commands: trained, preferred, rewarded, asked, checked and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import anabatic
from anabatic.config.chat import Sampling
from anabatic.config.data_commands import DataCheckJob, DataPreviewJob
from anabatic.config.infer import InferJob
from anabatic.config.sections.common import DeviceSettings
from anabatic.core import json_reader
from anabatic.recipes import batch_inference, data_check, data_preview
from suite import tiny_vision

pytestmark = pytest.mark.process
STEP: dict[str, Any] = {
    "batch.seq_len": 192, "batch.micro_batch_tokens": 384, "batch.global_batch_tokens": 768, "log.every": 1,
    "data.valid_fraction": 0.0, "device.dtype": "fp32", "data.cache": None, "tuner": "lora",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and rows: a square moves left or right; some rows have a picture with its box as well."""
    folder = tmp_path_factory.mktemp("videos")
    tiny_vision.save_seeing_model(folder / "model")
    rows = []
    for number in range(8):
        answer = "left" if number % 2 else "right"
        for frame in range(4):
            image = Image.new("RGB", (64, 32), (0, 30 * number, 60))
            at = 12 * (3 - frame if number % 2 else frame)
            image.paste((250, 250, 9), (at, 8, at + 16, 24))
            image.save(folder / f"{number}-{frame}.png")
        row: dict[str, Any] = {
            "messages": [{"role": "user", "content": "<video>Where to?"}, {"role": "assistant", "content": answer}],
            "videos": [[f"{number}-{frame}.png" for frame in range(4)]],
        }
        if number % 4 == 0:
            row["messages"][0]["content"] = "<image>The <ref-object> is at <bbox>. <video>Where to?"
            row |= {"images": [f"{number}-0.png"], "objects": {"ref": ["square"], "bbox": [[0, 8, 16, 24]]}}
        rows.append(row)
    pairs = [{**row, "rejected_response": "up"} for row in rows]
    asked = [{**row, "messages": row["messages"][:1], "answer": row["messages"][1]["content"]} for row in rows]
    labels = [{**row, "label": number % 2 == 0} for number, row in enumerate(rows)]
    for name, lines in (("rows", rows), ("pairs", pairs), ("asked", asked), ("labels", labels)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def read_rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in json_reader.read_json_lines(run / "metrics.jsonl") if row["kind"] == "train"]


def test_rows_with_videos_are_learned_and_asked(place: Path) -> None:
    more = {"schedule.max_steps": 12, "optim.lr": 0.01}
    anabatic.sft(model=place / "model", data=place / "rows.jsonl", out=place / "sft", **{**STEP, **more})
    losses = [row["loss"] for row in read_rows(place / "sft")]
    assert losses[-1] < 0.5 * losses[0]
    job = InferJob(
        model=str(place / "sft"), inputs=[str(place / "asked.jsonl")], out=str(place / "answers.jsonl"),
        sampling=Sampling(temperature=0.0, max_new_tokens=6), device=DeviceSettings(type="cpu", dtype="fp32"),
    )  # fmt: skip
    assert batch_inference.run(job) == 0
    answers = list(json_reader.read_json_lines(place / "answers.jsonl"))
    assert len(answers) == 8 and answers[0]["objects"]["ref"] == ["square"]
    assert [Path(one).name for one in answers[1]["videos"][0]] == [f"1-{frame}.png" for frame in range(4)]


@pytest.mark.parametrize(("rows", "loss_type"), [("pairs", "sigmoid"), ("labels", "kto")])
def test_preferences_about_videos_are_learned(place: Path, rows: str, loss_type: str) -> None:
    more = {"loss_type": loss_type, "schedule.max_steps": 4, "optim.lr": 3e-3}
    anabatic.dpo(model=place / "model", data=place / f"{rows}.jsonl", out=place / loss_type, **{**STEP, **more})
    losses = [row["loss"] for row in read_rows(place / loss_type)]
    assert losses[0] == pytest.approx({"sigmoid": 0.693147, "kto": 0.5}[loss_type], abs=1e-4)
    assert losses[-1] < losses[0]


def test_answers_about_videos_are_rewarded(place: Path) -> None:
    (place / "near.py").write_text("def near(text, row):\n    assert row['videos']\n    return float(len(set(text)))\n")
    anabatic.run_command(
        "rl",
        model=place / "model", data=place / "asked.jsonl", out=place / "rl", rewards=[f"{place / 'near.py'}:near"],
        **{
            "batch.seq_len": 192, "log.every": 1, "data.valid_fraction": 0.0, "device.dtype": "fp32", "tuner": "lora",
            "num_samples": 4, "examples_per_step": 2, "device_batch_size": 8, "sampling.max_new_tokens": 6,
            "schedule.max_steps": 2, "optim.lr": 1e-3,
        },
    )  # fmt: skip
    differences = [row["logprob_diff"] for row in read_rows(place / "rl") if row["logprob_diff"]]
    assert differences and max(differences) < 1e-4


def test_videos_and_objects_are_checked_and_shown(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data_check.run(DataCheckJob(inputs=[str(place / "rows.jsonl")])) == 0
    broken = json.loads((place / "rows.jsonl").read_text().splitlines()[0])
    broken["videos"][0][1] = "no.png"
    (place / "broken.jsonl").write_text(json.dumps(broken))
    assert data_check.run(DataCheckJob(inputs=[str(place / "broken.jsonl")])) == 1
    assert "no.png: No such file" in capsys.readouterr().out
    job = DataPreviewJob(inputs=[str(place / "rows.jsonl")], model=str(place / "model"), thumbnails=32)
    (preview,) = data_preview.preview_sources(job)
    first = preview.rows[0]
    assert [(one.frames, one.num_tokens) for one in first.pictures] == [(None, 2), (4, 4)]
    text = "".join(segment.text for segment in first.segments)
    assert "<|object_ref_start|>square<|object_ref_end|> is at <|box_start|>(0,250),(250,750)<|box_end|>" in text
    assert "<1.2 seconds>" in text and first.pictures[1].thumbnail.startswith("data:image/jpeg")
    data_preview.run(DataPreviewJob(inputs=[str(place / "rows.jsonl")]))
    assert "and 3 more frames: 64 x 32 pixels, 4 frames" in capsys.readouterr().out
