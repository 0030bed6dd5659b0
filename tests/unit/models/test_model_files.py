"""What is given instead of a model folder is named, with the way to a folder."""

from __future__ import annotations

import shutil

import pytest

from anabatic.cli.app import main
from anabatic.core.errors import DataError
from anabatic.models.pretrained import load_config, resolve_model_folder
from anabatic.plan.model_format import describe_wrong_model


@pytest.fixture
def places(tmp_path):
    files = {"a.gguf": b"GGUF\x03", "model.safetensors": b"", "notes.md": b""}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "fetched").mkdir()
    shutil.copy(tmp_path / "a.gguf", tmp_path / "fetched" / "model-Q8_0.gguf")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words", "hint"),
    [
        ("a.gguf", "is a GGUF file", "gguf_file='a.gguf'"),
        ("fetched", "is a GGUF file", "gguf_file='model-Q8_0.gguf'"),
        ("model.safetensors", "is the weights alone", "give the folder with config.json"),
        ("notes.md", "is a file; a model is a folder", "give the folder"),
        ("empty", "holds no config.json", "give a Hugging Face folder"),
    ],
)
def test_what_is_no_model_folder_is_named(places, name, words, hint):
    with pytest.raises(DataError) as error:
        resolve_model_folder(places / name)
    assert words in str(error.value) and hint in error.value.hint


def test_weights_beside_their_description(places):
    (places / "config.json").write_text("{}")
    assert describe_wrong_model(places / "model.safetensors").hint == f"give its folder: {places}"


COMMANDS = {
    "chat": ["chat", "MODEL"],
    "infer": ["infer", "ROWS", "-m", "MODEL", "-o", "out.jsonl"],
    "serve": ["serve", "MODEL", "--port", "0"],
    "export": ["export", "MODEL", "-o", "out"],
    "a checkpoint": ["infer", "ROWS", "--ckpt-dir", "MODEL", "-o", "out.jsonl"],
    "sft": ["sft", "--model", "MODEL", "--data", "ROWS", "--out", "run"],
    "eval": ["eval", "MODEL", "--tasks", "arc_easy"],
    "merge": ["merge", "--model", "MODEL", "--out", "out"],
    "plan": ["plan", "--", "sft", "--model", "MODEL", "--data", "ROWS", "--out", "run"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_say_that_gguf_is_not_read(places, monkeypatch, capsys, command):
    monkeypatch.chdir(places)
    rows = places / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 4)
    words = {"MODEL": str(places / "a.gguf"), "ROWS": str(rows)}
    with pytest.raises(SystemExit) as ended:
        main([words.get(word, word) for word in COMMANDS[command]])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert "a.gguf is a GGUF file" in err and "gguf_file='a.gguf'" in err


def test_the_reason_of_a_bad_configuration_is_whole(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "hidden_size": "x"}')
    with pytest.raises(DataError, match=r"field 'hidden_size': \S+"):
        load_config(tmp_path)
