"""Preference pairs: from rows in many shapes to two segments side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.config.shared import Data
from anabatic.core.errors import DataError
from anabatic.data import sample, shards, tokenizer
from anabatic.data.batch import IGNORE
from anabatic.data.document import Document
from anabatic.data.formats import find
from anabatic.data.learn import Learning, TooLong
from anabatic.data.loader import Loader
from anabatic.data.pack import Piece
from anabatic.data.pairs import REJECTED, PairEncoder, answers, flatten_answers, flatten_pairs, longest, parted
from anabatic.data.shard_write import Counts
from anabatic.data.sources import Source, documents
from anabatic.data.turn_fields import BadRow
from anabatic.testing.corpora import byte_tokenizer

USER = {"role": "user", "content": "2 and 2?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("4", "five"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tok(folder: Path) -> Any:
    return tokenizer.load(folder)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 and 2?", "chosen": "4", "rejected": "five"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "2 and 2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {
            "conversations": [{"from": "human", "value": "2 and 2?"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": {"from": "gpt", "value": "five"},
        },
        {"instruction": "2 and 2?", "input": "", "chosen": "4", "rejected": "five"},
        {"messages": [USER, GOOD], "rejected_response": "five"},
        {"messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
        {"query": "2 and 2?", "response": "4", "rejected_response": "five"},
    ],
    ids=lambda row: " ".join(row),
)
def test_rows_in_circulation(row: dict[str, Any]) -> None:
    form = find(row)
    assert form is not None and form.name == "preference pairs"
    made = form.read(row)
    assert made.messages == [USER, GOOD] and made.rejected == [USER, BAD]
    told = form.read({**row, "system": "Be brief."})
    assert [turns[0]["role"] for turns in (told.messages, told.rejected or [])] == ["system", "system"]


def test_a_missing_worse_answer_is_no_pair() -> None:
    row = {"messages": [USER, GOOD], "rejected_response": None}
    form = find(row)
    assert form is not None and form.read(row).rejected is None
    with pytest.raises(BadRow, match="ends with the assistant"):
        form.read({"messages": [USER], "rejected_response": "five"})


def encoded(tok: Any, chosen: list[Any], rejected: Any, seq_len: int = 100, too_long: TooLong = "right") -> Any:
    counts = Counts()
    learning = Learning("assistant", too_long, pairs=True)
    encode = PairEncoder(tok, counts, seq_len=seq_len, learning=learning, skip_bad=False)
    made = encode([Document(None, chosen, "r.jsonl:7", rejected=rejected)])
    pieces = [Piece(np.asarray(one.ids), np.frombuffer(one.mask, np.uint8)) for one in made]
    return pieces, counts


def learned(tok: Any, side: Piece) -> str:
    assert side.mask is not None
    return str(tok.decode(side.ids[side.mask != 0]))


def test_learned_is_where_the_answers_part(tok: Any) -> None:
    before = [USER, {"role": "assistant", "content": "wait"}, {"role": "user", "content": "well?"}]
    (piece,), _ = encoded(tok, [*before, GOOD], [*before, BAD, USER, GOOD])
    chosen, rejected = parted(piece)
    assert learned(tok, chosen) == "4<|im_end|>" and learned(tok, rejected) == "five<|im_end|>4<|im_end|>"
    assert tok.decode(chosen.ids) == tok.apply_chat_template([*before, GOOD], tokenize=False)
    assert tok.decode(rejected.ids) == tok.apply_chat_template([*before, BAD, USER, GOOD], tokenize=False)


def test_bad_pairs_are_named(tok: Any) -> None:
    with pytest.raises(DataError, match=r"r.jsonl: line 7: one answer, where a pair has two"):
        encoded(tok, [USER, GOOD], None)
    with pytest.raises(DataError, match=r"r.jsonl: line 7: both answers are the same"):
        encoded(tok, [USER, GOOD], [USER, GOOD])


def test_long_pairs(tok: Any) -> None:
    long = {"role": "assistant", "content": "x" * 60}
    (whole,), _ = encoded(tok, [USER, GOOD], [USER, long], 200)
    lengths = [len(side.ids) for side in parted(whole)]
    for too_long in ("right", "left"):
        (piece,), counts = encoded(tok, [USER, GOOD], [USER, long], lengths[1] - 20, too_long)
        assert [len(side.ids) for side in parted(piece)] == [lengths[0], lengths[1] - 20] and counts.truncated == 1
        kept = parted(piece)[1].ids
        full = parted(whole)[1].ids
        assert np.array_equal(kept, full[:-20] if too_long == "right" else full[20:])
    none, counts = encoded(tok, [USER, GOOD], [USER, long], lengths[1] - 20, "delete")
    assert none == [] and counts.too_long == 1
    none, counts = encoded(tok, [USER, GOOD], [USER, BAD], 8)
    assert none == [] and counts.too_long == 1 and counts.unlearned == 0


@given(st.lists(st.tuples(st.integers(2, 20), st.integers(2, 20)), max_size=6), st.integers(0, 30))
def test_pairs_lie_side_by_side(lengths: list[tuple[int, int]], tail: int) -> None:
    pieces = []
    for number, (one, two) in enumerate(lengths):
        mask = np.full(one + two, 1, dtype=np.uint8)
        mask[one:] |= REJECTED
        pieces.append(Piece(np.arange(one + two) + 100 * number + 1, mask))
    capacity = sum(piece.length for piece in pieces) + tail + 1
    batch = flatten_pairs(pieces, capacity, 0, longest(16))
    assert batch.num_targets == len(pieces) and batch.num_tokens == sum(one + two - 2 for one, two in lengths)
    at = 0
    for number, pair in enumerate(lengths):
        for side, length in enumerate(pair):
            assert batch.cu_seqlens[2 * number + side] == at
            ids = np.arange(length) + 100 * number + 1 + side * pair[0]
            assert batch.input_ids[at : at + length - 1].tolist() == ids[:-1].tolist()
            assert batch.labels[at : at + length - 1].tolist() == ids[1:].tolist()
            at += length - 1
    assert all(batch.labels[at:] == IGNORE) and np.diff(batch.cu_seqlens[2 * len(pieces) :]).max(initial=0) <= 16


def test_both_sides_are_shown(folder: Path, tmp_path: Path, tok: Any) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "2 and 2?", "chosen": "4", "rejected": "five"}) + "\n")
    data = Data(train=[str(path)], cache=str(tmp_path / "cache"), valid_fraction=0.0)
    made = shards.build(str(path), folder, data, "train", seq_len=64, learning=Learning(pairs=True))
    shown = [
        (name.rpartition(" ")[2], sample.shown(sample.stretches(ids, mask, tok), False))
        for name, ids, mask in sample.conversations([made], 1)
    ]
    assert [name for name, _ in shown] == ["(chosen)", "(rejected)"]
    assert "[[4<|im_end|>]]" in shown[0][1] and "[[five<|im_end|>]]" in shown[1][1]
    assert all(text.count("[[") == 1 for _, text in shown)


def test_no_pair_is_split_and_each_comes_once(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "chosen": "y" * (1 + n % 7), "rejected": "n" * (1 + n % 5)} for n in range(50)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(train=[str(path)], cache=str(tmp_path / "cache"), valid_fraction=0.0)
    seen = []
    for world in (1, 2):
        learning = Learning(pairs=True)
        sources = shards.build_all([str(path)], folder, data, "train", seq_len=64, learning=learning)
        found: list[tuple[int, ...]] = []
        loaders = [
            Loader(sources, seq_len=128, micro_batch_tokens=256, rank=rank, world_size=world, lay=flatten_pairs)
            for rank in range(world)
        ]
        while len(found) < 50:
            for loader in loaders:
                batch = next(loader)
                for pair in range(batch.num_targets):
                    start, stop = batch.cu_seqlens[2 * pair], batch.cu_seqlens[2 * pair + 2]
                    found.append(tuple(batch.input_ids[start:stop].tolist()))
        for loader in loaders:
            loader.close()
        assert len(set(found[:50])) == 50
        seen.append(found[:50])
    assert seen[0] == seen[1]


def test_single_answers_with_a_label(tmp_path: Path) -> None:
    """Good ones are the first conversation of an entry, bad ones the second; without a label nothing is known."""
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    rows: list[dict[str, Any]] = [
        {"messages": turns, "label": True},
        {"prompt": "Q", "completion": "B", "label": False},
        {"prompt": "Q", "chosen": "A", "rejected": "B"},
        {"messages": turns, "kto_tag": False},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [answers(document, labels=True) for document in documents(Source(str(path)), Data())]
    assert [(one is None, other is None) for one, other in found] == [
        (False, True),
        (True, False),
        (False, False),
        (True, False),
    ]
    path.write_text(json.dumps({"messages": turns, "label": "good"}) + "\n")
    (document,) = documents(Source(str(path)), Data())
    with pytest.raises(DataError, match="one answer without a label"):
        answers(document, labels=True)


def test_single_answers_become_entries_of_one_side(tok: Any) -> None:
    """As they leave the encoder, and as they are laid."""
    turns = [USER, GOOD]
    docs = [
        Document(None, turns, "a:1", label=True),
        Document(None, turns, "a:2", label=False),
        Document(None, turns, "a:3", rejected=[USER, BAD]),
    ]
    learning = Learning("assistant", "right", pairs=True, labels=True)
    encoder = PairEncoder(tok, Counts(), seq_len=64, learning=learning, skip_bad=False)
    made = [Piece(np.asarray(one.ids), np.frombuffer(one.mask or b"", dtype=np.uint8)) for one in encoder(docs)]
    assert [[len(side.ids) > 0 for side in parted(piece)] for piece in made] == [
        [True, False],
        [False, True],
        [True] * 2,
    ]
    batch = flatten_answers(made, 200, 0, 128)
    assert batch.num_targets == 4
    assert batch.extra["desirable"].tolist() == [True, False, True, False]
    assert batch.extra["entry"].tolist() == [0, 1, 2, 2]
