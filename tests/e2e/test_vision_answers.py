"""A model that sees is asked: in a conversation, over HTTP; it learns from preferences and from rewards."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import anabatic
from anabatic.config.chat import ChatJob, Sampling
from anabatic.config.sections.common import DeviceSettings
from anabatic.config.task import EvalTask, TaskData
from anabatic.core import json_reader
from anabatic.core.errors import ConfigError
from anabatic.device.device import select_device
from anabatic.infer.engine import Engine
from anabatic.infer.loaded_model import load_model_to_ask
from anabatic.infer.reward_scorer import RewardScorer
from anabatic.infer.server.model_registry import ServedModel
from anabatic.recipes.chat import session
from suite import tiny_vision
from unit.infer.server.running import catalogue_of, serving

pytestmark = pytest.mark.process
CPU = DeviceSettings(type="cpu", dtype="fp32")
STEP: dict[str, Any] = {
    "batch.seq_len": 96, "batch.micro_batch_tokens": 384, "batch.global_batch_tokens": 768, "log.every": 1,
    "data.valid_fraction": 0.0, "device.dtype": "fp32", "data.cache": None,
}  # fmt: skip
OTHER = {"red": "blue", "blue": "green", "green": "white", "white": "red"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and rows: conversations, pairs of answers, answers with a label."""
    folder = tmp_path_factory.mktemp("vision")
    tiny_vision.save_seeing_model(folder / "model")
    rows = list(json_reader.read_json_lines(tiny_vision.write_shapes(folder / "shapes", rows=16, text_every=5)))
    pairs = [{**row, "rejected_response": OTHER[row["messages"][1]["content"]]} for row in rows]
    for name, lines in (
        ("pairs", pairs),
        ("labels", [{**row, "label": index % 2 == 0} for index, row in enumerate(rows)]),
    ):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "shapes" / f"{name}.jsonl").write_text(text)
    return folder


def read_rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in json_reader.read_json_lines(run / "metrics.jsonl") if row["kind"] == "train"]


@pytest.mark.parametrize(("rows", "loss_type"), [("pairs", "sigmoid"), ("labels", "kto")])
def test_preferences_about_pictures_are_learned(place: Path, rows: str, loss_type: str) -> None:
    out = place / loss_type
    data = place / "shapes" / f"{rows}.jsonl"
    anabatic.dpo(
        model=place / "model", data=data, out=out,
        **{**STEP, "tuner": "lora", "loss_type": loss_type, "schedule.max_steps": 8, "optim.lr": 3e-3},
    )  # fmt: skip
    losses = [row["loss"] for row in read_rows(out)]
    assert losses[0] == pytest.approx({"sigmoid": 0.693147, "kto": 0.5}[loss_type], abs=1e-4)
    assert losses[-1] < losses[0]
    assert not any("visual" in name for name in load_file(out / "final_model" / "adapter_model.safetensors"))


def test_the_engine_and_the_training_agree_on_answers_about_pictures(place: Path) -> None:
    reward = place / "near.py"
    reward.write_text(
        "def near(text, row):\n"
        "    assert row['answer'] and (not row.get('images') or row['images'][0].endswith('.png'))\n"
        "    return float(len(set(text)))\n"
    )
    anabatic.run_command(
        "rl",
        model=place / "model", data=place / "shapes" / "rows.jsonl", out=place / "rl", rewards=[f"{reward}:near"],
        **{
            "batch.seq_len": 96, "log.every": 1, "data.valid_fraction": 0.0, "device.dtype": "fp32",
            "num_samples": 4, "examples_per_step": 2, "device_batch_size": 8, "sampling.max_new_tokens": 6,
            "schedule.max_steps": 2, "optim.lr": 1e-3, "vision.train": ["language", "projector"],
        },
    )  # fmt: skip
    differences = [row["logprob_diff"] for row in read_rows(place / "rl") if row["logprob_diff"]]
    assert differences and max(differences) < 1e-4


def test_a_reward_model_judges_answers_about_pictures(place: Path) -> None:
    run = place / "judge"
    more = {"schedule.max_steps": 24, "optim.lr": 5e-3, "tuner": "lora", "vision.max_pixels": 4096}
    data = place / "shapes" / "pairs.jsonl"
    anabatic.run_command("reward", model=place / "model", data=data, out=run, **{**STEP, **more})
    rows = read_rows(run)
    assert rows[0]["loss"] > 0.4 and rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    names = load_file(run / "final_model" / "adapter_model.safetensors")
    assert any("score" in name for name in names) and not any("visual" in name for name in names)
    anabatic.run_command(
        "reward", model=place / "model", data=data, out=place / "whole", **{**STEP, **more, "tuner": "full"}
    )
    size = json_reader.read_json_file(place / "whole" / "final_model" / "preprocessor_config.json")["size"]
    assert size["longest_edge"] == 4096

    scorer = RewardScorer(run, select_device(CPU))
    whole = RewardScorer(place / "whole", select_device(CPU))
    picture = base64.b64encode((place / "shapes" / "red-square-64.png").read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    asked = {"role": "user", "content": [part, {"type": "text", "text": "Which color has the square?"}]}
    talks = [[asked, {"role": "assistant", "content": color}] for color in ("red", OTHER["red"])]
    catalogue = catalogue_of({}, pictures=2)
    catalogue.classifiers.update(judge=scorer, whole=whole)
    with serving(catalogue) as running:
        for name in ("judge", "whole"):
            answer = running.post("/v1/classify", {"model": name, "messages": talks}).json()
            right, wrong = (row["score"] for row in answer["data"])
            assert right > wrong
        refused = running.post("/v1/classify", {"model": "judge", "messages": [talks[0]] * 3})
        assert refused.status_code == 400 and "3 pictures are given" in refused.text
        address = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
        refused = running.post("/v1/classify", {"model": "judge", "messages": [{**asked, "content": [address]}]})
        assert refused.status_code == 400 and "nothing is fetched" in refused.text

    anabatic.run_command(
        "rl",
        model=place / "model", data=place / "shapes" / "rows.jsonl", out=place / "judged", rewards=[f"model:{run}"],
        **{
            "batch.seq_len": 96, "log.every": 1, "data.valid_fraction": 0.0, "device.dtype": "fp32",
            "num_samples": 2, "examples_per_step": 2, "device_batch_size": 4, "sampling.max_new_tokens": 4,
            "schedule.max_steps": 1,
        },
    )  # fmt: skip
    (row,) = read_rows(place / "judged")
    assert row["reward_std"] != 0 or row["reward"] != 0


def test_a_task_shows_pictures(place: Path) -> None:
    task = place / "colors.yaml"
    task.write_text(
        '{kind: generate, chat: true, data: {files: [shapes/pairs.jsonl]}, images: "{{ images }}", max_new_tokens: 4,'
        " keep: \"{{ row['images'] is defined }}\", prompt: \"{{ messages[0]['content'] }}\","
        " answer: \"{{ messages[1]['content'] }}\"}"
    )
    anabatic.run_command(
        "eval", model=place / "model", tasks=[str(task)], out=place / "eval", **{"device.dtype": "fp32"}
    )
    found = json_reader.read_json_file(place / "eval" / "eval.json")["tasks"]["colors"]
    assert found["n"] == 12
    replies = {row["reply"] for row in json_reader.read_json_lines(place / "eval" / "samples.jsonl")}
    assert len(replies) > 1  # all questions say the same: their pictures make the answers
    with pytest.raises(ConfigError, match="pictures are shown in conversations"):
        EvalTask(kind="generate", prompt="x", answer="y", images="{{ images }}", data=TaskData(files=["a.jsonl"]))


def test_a_conversation_shows_pictures(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    picture = place / "shapes" / "red-square-64.png"
    saved = place / "talk.jsonl"
    lines = f"/image {picture}\nWhat is it?\nAnd now?\n/image {place / 'none.png'}\n"
    lines += f"/image {picture}\nWhy <image>?\n/save {saved}\nWhy?\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    sampling = Sampling(temperature=0.0, max_new_tokens=4)
    with caplog.at_level("INFO", logger="anabatic"):
        session.run(ChatJob(model=str(place / "model"), sampling=sampling, device=CPU, out=str(place / "talk")))
    assert len(capsys.readouterr().out.splitlines()) >= 2
    assert "none.png: No such file" in caplog.text and "3 x <image> in the turns, 2 pictures" in caplog.text
    row = json.loads(saved.read_text())
    assert row["images"] == [str(picture)] and row["messages"][0]["content"] == "<image>What is it?"
    assert len(row["messages"]) == 4
    last = list(json_reader.read_json_lines(place / "talk" / "chat.jsonl"))[-2]
    assert last["images"] == [str(picture)]  # of the message that was refused

    monkeypatch.setattr("sys.stdin", io.StringIO(f"/load {saved}\n/regenerate\n/exit\n"))
    session.run(ChatJob(model=str(place / "model"), sampling=sampling, device=CPU))
    assert capsys.readouterr().out


def test_requests_show_pictures(place: Path) -> None:
    device = select_device(CPU)
    loaded = load_model_to_ask(place / "model", device)
    engine = Engine(loaded.model, loaded.tokenizer, max_batch=4, max_len=128)
    catalogue = catalogue_of({}, pictures=2)
    catalogue.models = [
        ServedModel("seeing", engine, loaded.model, pictures=loaded.pictures),
        ServedModel("blind", engine, loaded.model),
    ]

    def show(name: str) -> dict[str, Any]:
        data = base64.b64encode((place / "shapes" / f"{name}.png").read_bytes()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "detail": "high"}}

    def ask(parts: list[dict[str, Any]], model: str = "seeing", **more: Any) -> Any:
        body = {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 8, **more}
        return running.post("/v1/chat/completions", body)

    what = {"type": "text", "text": "What is it? <image>"}
    with serving(catalogue) as running:
        red, blue = (ask([show(f"{color}-square-64"), what]).json() for color in ("red", "blue"))
        assert red["usage"]["prompt_tokens"] == blue["usage"]["prompt_tokens"] > 40
        texts = [one["choices"][0]["message"]["content"] for one in (red, blue)]
        assert texts[0] != texts[1]
        several = ask([show("red-square-64"), what], n=2).json()
        assert [one["message"]["content"] for one in several["choices"]] == [texts[0]] * 2
        item = {"type": "input_image", "image_url": show("red-square-64")["image_url"]["url"]}
        asked = [{"role": "user", "content": [item, {"type": "input_text", "text": what["text"]}]}]
        response = running.post("/v1/responses", {"model": "seeing", "input": asked, "max_output_tokens": 8}).json()
        assert response["output"][-1]["content"][0]["text"] == texts[0]

        refused = {
            "nothing is fetched": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}, what],
            "3 pictures are given": [show("red-square-64")] * 3,
            "broken base64": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}],
            "not a picture": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
            "1 tokens of pictures in the text, 0 pictures": [{"type": "text", "text": "<|image_pad|>"}],
        }
        for message, parts in refused.items():
            answer = ask(parts)
            assert answer.status_code == 400 and message in answer.text, (message, answer.text)
        answer = ask([show("red-square-64"), what], model="blind")
        assert answer.status_code == 400 and "blind sees no pictures" in answer.text
        file = [{"type": "image_url", "image_url": {"url": f"file://{place}/shapes/red-square-64.png"}}]
        assert ask(file).status_code == 400
        system = [{"role": "system", "content": [item]}]
        assert running.post("/v1/responses", {"model": "seeing", "input": system}).status_code == 400
