"""Rows as the model sees them: what is shown as learned is what a training learns from."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from anabatic.config.data_commands import DataPreviewJob
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.vision.picture_files import load_picture
from anabatic.recipes.data_preview import MAX_THUMBNAILS, preview_sources, run
from anabatic_testing.random_models import build_byte_tokenizer, build_random_model
from suite.rendered_rows import tokenize_conversations
from suite.tiny_vision import draw_shape
from unit.recipes.bad_files import FILES_WITHOUT_A_GOOD_ROW

REAL = Path(__file__).resolve().parents[4] / "shared" / "data"
CHAT = [{"role": "user", "content": "Who? \x1b[31m"}, {"role": "assistant", "content": "A café 你好"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build_random_model(len(build_byte_tokenizer(folder))).save_pretrained(folder)
    return folder


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_what_is_marked_is_the_loss_mask(model, tmp_path):
    file = write(tmp_path / "a.jsonl", [{"messages": CHAT}] * 9)
    (preview,) = preview_sources(DataPreviewJob(inputs=[file], model=str(model), rows=4))
    assert (preview.format, preview.columns, len(preview.rows)) == ("messages", ["messages"], 4)
    tokenizer = build_byte_tokenizer(tmp_path / "same")
    ((ids, mask),) = tokenize_conversations([CHAT], tokenizer)
    row = preview.rows[0]
    assert "".join(segment.text for segment in row.segments) == tokenizer.decode(ids)
    assert (row.num_tokens, row.num_learned) == (len(ids), int(np.sum(mask[1:])))
    assert [segment.text for segment in row.segments if segment.learned] == [tokenizer.decode(ids[mask == 1])]
    assert "café 你好" in row.segments[1].text and row.location.endswith("a.jsonl: line 1")
    (all_turns,) = preview_sources(DataPreviewJob(inputs=[file], model=str(model), rows=1, train_on_inputs=True))
    assert all_turns.rows[0].num_learned == len(ids) - 1


def test_pictures_have_small_copies_of_a_bounded_number(tmp_path):
    draw_shape(tmp_path / "a.png", "red", "circle", (300, 40))
    asked = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "x"}]
    file = write(tmp_path / "a.jsonl", [{"messages": asked, "images": ["a.png"] * (MAX_THUMBNAILS + 2)}])
    (preview,) = preview_sources(DataPreviewJob(inputs=[file], thumbnails=60))
    made = [one.thumbnail for one in preview.rows[0].pictures]
    assert made[MAX_THUMBNAILS:] == ["", ""] and len(set(made[:MAX_THUMBNAILS])) == 1
    assert load_picture(made[0]).size == (60, 8)
    (plain,) = preview_sources(DataPreviewJob(inputs=[file]))
    assert not any(one.thumbnail for one in plain.rows[0].pictures)


def test_pairs_texts_and_several_sources(model, tmp_path):
    pair = {"prompt": "Q", "chosen": "good", "rejected": "bad"}
    pairs = write(tmp_path / "p.jsonl", [pair])
    (tmp_path / "t.txt").write_text("some text", encoding="utf-8")
    with gzip.open(tmp_path / "z.jsonl.gz", "wt", encoding="utf-8") as packed:
        packed.write(json.dumps({"text": "zipped"}) + "\n")
    files = [pairs, str(tmp_path / "t.txt"), str(tmp_path / "z.jsonl.gz"), "task:arithmetic#5"]
    previews = preview_sources(DataPreviewJob(inputs=files, model=str(model), rows=1))
    assert [[row.kind for row in preview.rows] for preview in previews] == [
        ["chosen", "rejected"],
        ["text"],
        ["text"],
        ["conversation"],
    ]
    assert "good" in previews[0].rows[0].segments[1].text and "bad" in previews[0].rows[1].segments[1].text


def test_without_a_model_turns_are_shown_and_nothing_steers_the_terminal(tmp_path, capsys):
    file = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    assert run(DataPreviewJob(inputs=[file])) == 0
    shown = capsys.readouterr().out
    assert "user: Who? \\x1b[31m" in shown and "[[assistant: A café 你好" in shown and "\x1b" not in shown
    assert run(DataPreviewJob(inputs=[file], json=True)) == 0
    tree = json.loads(capsys.readouterr().out)
    assert [segment["learned"] for segment in tree["rows"][0]["segments"]] == [False, True]


@pytest.mark.parametrize(
    ("name", "content"), [*FILES_WITHOUT_A_GOOD_ROW, ("turns.jsonl", b'{"messages": [{"role": "assistant"}]}\n')]
)
def test_bad_files_are_named(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        preview_sources(DataPreviewJob(inputs=[str(tmp_path / name)]))


def test_wrong_settings():
    for settings in ({"inputs": []}, {"inputs": ["a"], "rows": 0}):
        with pytest.raises(ConfigError):
            DataPreviewJob(**settings)


@pytest.mark.skipif(not REAL.is_dir(), reason="the shared data is not on this machine")
@pytest.mark.parametrize(
    "name", ["sft/alpaca_zh_demo.json", "sft/glaive_toolcall_en_demo.json", "dpo/dpo_en_demo.json"]
)
def test_real_rows(model, name):
    (preview,) = preview_sources(DataPreviewJob(inputs=[str(REAL / name)], model=str(model), rows=20))
    assert len(preview.rows) == (40 if name.startswith("dpo") else 20)
    assert all(0 < row.num_learned < row.num_tokens for row in preview.rows)


def test_marks_without_a_model_are_those_of_a_training(tmp_path):
    call = {"type": "function", "function": {"name": "wind", "arguments": {}}}
    turns = [
        {"role": "user", "content": "0+1?"},
        {"role": "assistant", "content": "wrong", "weight": 0},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "content": "", "tool_calls": [call], "weight": 1},
    ]
    file = write(tmp_path / "a.jsonl", [{"messages": turns}])
    (preview,) = preview_sources(DataPreviewJob(inputs=[file]))
    assert [segment.learned for segment in preview.rows[0].segments] == [False, False, False, True]
    assert '"wind"' in preview.rows[0].segments[3].text
    (everything,) = preview_sources(DataPreviewJob(inputs=[file], train_on_inputs=True))
    assert all(segment.learned for segment in everything.rows[0].segments)
    bad = write(tmp_path / "b.jsonl", [{"messages": turns[:2], "label": False}])
    with pytest.raises(DataError, match="none of the assistant's 1 turns is learned"):
        preview_sources(DataPreviewJob(inputs=[bad]))
    bad = write(tmp_path / "b.jsonl", [{"messages": CHAT, "label": False}])
    (rejected,) = preview_sources(DataPreviewJob(inputs=[bad]))
    assert rejected.rows[0].kind == "rejected"


def test_unused_columns_are_said(tmp_path, caplog):
    file = write(tmp_path / "a.jsonl", [{"messages": CHAT, "context": "c"}] * 5)
    preview_sources(DataPreviewJob(inputs=[file], rows=2))
    assert f'the first rows of {file}: columns that were not used: "context" (2 rows)' in caplog.text
