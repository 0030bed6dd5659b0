"""Made-up words: a tokenizer whose words are single tokens, texts and rows of any length."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.bench import synthetic_data
from anabatic.core.errors import ConfigError
from anabatic.data.tokenizer import hf_folder
from anabatic_testing.random_models import build_byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_data.write_synthetic_tokenizer(tmp_path_factory.mktemp("words"), 12_000)


def test_each_word_is_a_token(folder: Path) -> None:
    backend = hf_folder.load_fast_tokenizer(folder)
    assert backend.get_vocab_size() == 12_000
    for word in islice(synthetic_data.iter_words(), 500):
        assert backend.encode(f" {word}").tokens == ["Ġ" + word]


@pytest.fixture(scope="module")
def texts(folder: Path) -> synthetic_data.SyntheticTexts:
    return synthetic_data.build_synthetic_texts(folder)


@given(st.integers(1, 300))
def test_a_text_has_as_many_tokens_as_asked_for(texts: synthetic_data.SyntheticTexts, tokens: int) -> None:
    assert len(texts.token_ends(texts.generate_text(tokens))) == tokens


def test_texts_are_as_long_under_another_tokenizer(tmp_path: Path) -> None:
    build_byte_tokenizer(tmp_path)
    for tokens in (1, 7, 400):
        found = len(
            hf_folder.load_fast_tokenizer(tmp_path)
            .encode(synthetic_data.build_synthetic_texts(tmp_path).generate_text(tokens))
            .ids
        )
        assert abs(found - tokens) <= 1


@pytest.mark.parametrize("command", synthetic_data.ROW_BUILDERS)
def test_rows_are_those_of_a_command(command: str, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    synthetic_data.write_synthetic_rows(file, command, folder, 64, 5000)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 78 and len({json.dumps(row) for row in rows}) == 78
    known = hf_folder.load_tokenizer(folder)
    for row in rows[:5]:
        if command == "pretrain":
            assert len(known(row["text"])["input_ids"]) == 64
        else:
            assert abs(len(known.apply_chat_template(row["messages"], return_dict=False)) - 64) <= 6
            assert ("rejected_response" in row) == (command != "sft")


def test_rows_of_other_commands_cannot_be_made_up(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rows for rl cannot be made up"):
        synthetic_data.write_synthetic_rows(tmp_path / "rows.jsonl", "rl", folder, 64, 5000)
