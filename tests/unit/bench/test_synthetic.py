"""Made-up words: a tokenizer whose words are single tokens, texts and rows of any length."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.bench import synthetic
from anabatic.core.errors import ConfigError
from anabatic.data import tokenizer
from anabatic.testing.untrained import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.tokenizer(tmp_path_factory.mktemp("words"), 12_000)


def test_each_word_is_a_token(folder: Path) -> None:
    backend = tokenizer.encode_fast(folder)
    assert backend.get_vocab_size() == 12_000
    for word in islice(synthetic.words(), 500):
        assert backend.encode(f" {word}").tokens == ["Ġ" + word]


@pytest.fixture(scope="module")
def texts(folder: Path) -> synthetic.Texts:
    return synthetic.texts(folder)


@given(st.integers(1, 300))
def test_a_text_has_as_many_tokens_as_asked_for(texts: synthetic.Texts, tokens: int) -> None:
    assert len(texts.ends(texts.text(tokens))) == tokens


def test_texts_are_as_long_under_another_tokenizer(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    for tokens in (1, 7, 400):
        found = len(tokenizer.encode_fast(tmp_path).encode(synthetic.texts(tmp_path).text(tokens)).ids)
        assert abs(found - tokens) <= 1


@pytest.mark.parametrize("command", synthetic.ROWS)
def test_rows_are_those_of_a_command(command: str, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    synthetic.rows(file, command, folder, 64, 5000)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 78 and len({json.dumps(row) for row in rows}) == 78
    known = tokenizer.load(folder)
    for row in rows[:5]:
        if command == "pretrain":
            assert len(known(row["text"])["input_ids"]) == 64
        else:
            assert abs(len(known.apply_chat_template(row["messages"], return_dict=False)) - 64) <= 6
            assert ("rejected_response" in row) == (command != "sft")


def test_rows_of_other_commands_cannot_be_made_up(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rows for rl cannot be made up"):
        synthetic.rows(tmp_path / "rows.jsonl", "rl", folder, 64, 5000)
