"""Which tokens end an answer: those of the generation settings, and the end of a turn that the chat template shows."""

from __future__ import annotations

import json

import pytest
import torch

from anabatic.config.chat import Sampling
from anabatic.core.errors import DataError
from anabatic.data.tokenizer.hf_folder import encode_chat, get_turn_end_id
from anabatic.infer.engine import Engine
from anabatic.models.pretrained import load_model, save_model
from unit.infer.scripted import says

GREEDY = Sampling(temperature=0.0, max_new_tokens=12)
CPU = torch.device("cpu")
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path, tokenizer):
    model = says(tokenizer, ["a", "b"])
    model.config.eos_token_id = 0  # as our own models have it; the turn ends with 2
    save_model(model, tmp_path / "model", tokenizer)
    return tmp_path / "model"


def test_a_saved_model_ends_its_turn(folder, tokenizer):
    engine = Engine(load_model(folder, CPU), tokenizer, max_batch=1, max_len=64)
    (answer,) = engine.generate([encode_chat(tokenizer, USER)], GREEDY)
    assert (answer.text, answer.finish_reason) == ("ab", "stop")
    assert engine.stop_ids == {0, 2}


def test_settings_and_template_add_up(folder, tokenizer, monkeypatch):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    model = load_model(folder, CPU)
    assert Engine(model, tokenizer, max_batch=1, max_len=64).stop_ids == {0, 2, 7}
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert Engine(model, tokenizer, max_batch=1, max_len=64).stop_ids == {0, 7}
    (folder / "generation_config.json").write_text("[")
    with pytest.raises(DataError, match=r"generation_config.json cannot be read"):
        load_model(folder, CPU)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}{{ m.content }}<|reserved_1|>\n{% endfor %}", "<|reserved_1|>"),
        ("{% for m in messages %}{{ m.content }} <|reserved_2|>{% endfor %}", "<|reserved_2|>"),
        ("{% for m in messages %}{{ m.content }}</s>{% endfor %}", None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{% for m in messages %}{{ m.content }}<think>{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_the_end_of_a_turn_is_what_follows_an_answer(tokenizer, monkeypatch, template, end):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    expected = None if end is None else tokenizer.convert_tokens_to_ids(end)
    assert get_turn_end_id(tokenizer) == expected
