"""Which tokens of a conversation are targets, and what happens to long ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.core.errors import DataError
from anabatic.data.chat import rendering
from anabatic.data.chat.loss_mask import LossPolicy, TruncationStrategy
from anabatic.data.readers.document import Document
from anabatic.data.shards.encoders import ChatEncoder
from anabatic.data.shards.writer import DocumentCounts
from anabatic.data.tokenizer import hf_folder
from anabatic_testing.tiny_corpora import write_byte_tokenizer
from suite.rendered_rows import tokenize_conversations

TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "two"},
]


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return hf_folder.load_tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@given(st.integers(2, 200), st.integers(1, 50), st.sampled_from(["right", "left", "split"]))
def test_pieces(length: int, longest: int, too_long: TruncationStrategy) -> None:
    pieces = list(LossPolicy("assistant", too_long).kept_token_ranges(length, longest))
    assert all(1 <= stop - start - 1 <= longest for start, stop in pieces)
    if length <= longest + 1:
        assert pieces == [(0, length)]
    elif too_long == "split":
        targets = [token for start, stop in pieces for token in range(start + 1, stop)]
        assert targets == list(range(1, length))  # each once
    else:
        assert pieces == ([(0, longest + 1)] if too_long == "right" else [(length - longest - 1, length)])


def test_long_ones_may_be_left_out() -> None:
    assert list(LossPolicy("assistant", "delete").kept_token_ranges(10, 8)) == []
    assert list(LossPolicy("assistant", "delete").kept_token_ranges(9, 8)) == [(0, 9)]
    assert list(LossPolicy().kept_token_ranges(99, None)) == [(0, 99)]


def said(tok: Any, turns: list[dict[str, Any]], which: Any = "assistant") -> str:
    one = rendering.render_conversations([turns], tok, names=["row 3"], turns=which)[0]
    return str(tok.decode(one.ids[one.mask == 1]))


def test_turns(tok: Any) -> None:
    assert said(tok, TURNS) == "one<|im_end|>two<|im_end|>"
    assert said(tok, TURNS, "last") == "two<|im_end|>"
    for key, off in (("weight", 0), ("loss", False)):
        turns = [*TURNS[:3], {**TURNS[3], key: off}]
        assert said(tok, turns) == "one<|im_end|>"
        with pytest.raises(DataError, match="row 3: none of the assistant's 2 turns is learned"):
            said(tok, turns, "last")
    with pytest.raises(DataError, match="row 3: a turn of the assistant has weight 0.5"):
        said(tok, [*TURNS[:3], {**TURNS[3], "weight": 0.5}])


@pytest.mark.parametrize(
    ("too_long", "entries", "counted"),
    [("right", 1, "truncated"), ("left", 1, "truncated"), ("delete", 0, "too_long"), ("split", 3, "split")],
)
def test_counts_of_long_conversations(tok: Any, too_long: TruncationStrategy, entries: int, counted: str) -> None:
    counts = DocumentCounts()
    turns = [TURNS[0], {"role": "assistant", "content": "x" * 40}]
    length = len(tokenize_conversations([turns], tok)[0][0])
    encode = ChatEncoder(tok, counts, seq_len=(length + 1) // 3, learning=LossPolicy("all", too_long), skip_bad=False)
    made = encode([Document(None, turns, "r:1")])
    assert len(made) == entries and getattr(counts, counted) == 1
    assert sum(one.is_document_start for one in made) == min(entries, 1)
    if too_long == "split":
        assert sum(len(one.ids) - 1 for one in made) == length - 1
        assert sum(one.num_bytes for one in made) == rendering.render_conversations([turns], tok)[0].count_text_bytes(
            0, length, True
        )


def test_a_table_and_an_array(tmp_path: Path) -> None:
    """Rows with another name for their columns, in both shapes of file."""
    from anabatic.config.sections.common import Data
    from anabatic.data.readers.sources import parse_source, read_documents

    (tmp_path / "a.csv").write_text('frage,antwort\n"eins, zwei",drei\n"x\ny",z\n')
    (tmp_path / "a.json").write_text(
        '[{"frage": "eins, zwei", "antwort": "drei"},\n {"frage": "x\\ny", "antwort": "z"}]'
    )
    data = Data(columns={"query": "frage", "response": "antwort"})
    rows = [
        [document.messages for document in read_documents(parse_source(str(tmp_path / name)), data)]
        for name in ("a.csv", "a.json")
    ]
    assert (
        rows[0]
        == rows[1]
        == [
            [{"role": "user", "content": "eins, zwei"}, {"role": "assistant", "content": "drei"}],
            [{"role": "user", "content": "x\ny"}, {"role": "assistant", "content": "z"}],
        ]
    )
