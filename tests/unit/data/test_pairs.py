"""Preference pairs: from rows in many shapes to two segments side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.config.sections.common import Data
from anabatic.core.errors import DataError
from anabatic.data.batching.loader import Loader
from anabatic.data.batching.packing import IGNORE_INDEX, TokenSegment
from anabatic.data.chat import loss_preview
from anabatic.data.chat.conversation_formats import detect_format
from anabatic.data.chat.loss_mask import LossPolicy, TruncationStrategy
from anabatic.data.chat.preference_pairs import (
    REJECTED_BIT,
    collate_preference_pairs,
    collate_unpaired_answers,
    max_pair_inputs,
    split_pair_messages,
    split_pair_segment,
)
from anabatic.data.chat.turn_fields import BadRowError
from anabatic.data.readers.document import Document
from anabatic.data.readers.sources import DataSource, read_documents
from anabatic.data.shards import dataset_cache
from anabatic.data.shards.encoders import PreferencePairEncoder
from anabatic.data.shards.writer import DocumentCounts
from anabatic.data.tokenizer import hf_folder
from anabatic_testing.tiny_corpora import write_byte_tokenizer

USER = {"role": "user", "content": "2 and 2?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("4", "five"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tok(folder: Path) -> Any:
    return hf_folder.load_tokenizer(folder)


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
    form = detect_format(row)
    assert form is not None and form.name == "preference pairs"
    made = form.parse_row(row)
    assert made.messages == [USER, GOOD] and made.rejected == [USER, BAD]
    told = form.parse_row({**row, "system": "Be brief."})
    assert [turns[0]["role"] for turns in (told.messages, told.rejected or [])] == ["system", "system"]


def test_a_missing_worse_answer_is_no_pair() -> None:
    row = {"messages": [USER, GOOD], "rejected_response": None}
    form = detect_format(row)
    assert form is not None and form.parse_row(row).rejected is None
    with pytest.raises(BadRowError, match="ends with the assistant"):
        form.parse_row({"messages": [USER], "rejected_response": "five"})


def encoded(
    tok: Any, chosen: list[Any], rejected: Any, seq_len: int = 100, too_long: TruncationStrategy = "right"
) -> Any:
    counts = DocumentCounts()
    learning = LossPolicy("assistant", too_long, pairs=True)
    encode = PreferencePairEncoder(tok, counts, seq_len=seq_len, learning=learning, skip_bad=False)
    made = encode([Document(None, chosen, "r.jsonl:7", rejected=rejected)])
    pieces = [TokenSegment(np.asarray(one.ids), np.frombuffer(one.mask, np.uint8)) for one in made]
    return pieces, counts


def learned(tok: Any, side: TokenSegment) -> str:
    assert side.loss_mask is not None
    return str(tok.decode(side.ids[side.loss_mask != 0]))


def test_learned_is_where_the_answers_part(tok: Any) -> None:
    before = [USER, {"role": "assistant", "content": "wait"}, {"role": "user", "content": "well?"}]
    (piece,), _ = encoded(tok, [*before, GOOD], [*before, BAD, USER, GOOD])
    chosen, rejected = split_pair_segment(piece)
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
    lengths = [len(side.ids) for side in split_pair_segment(whole)]
    for too_long in ("right", "left"):
        (piece,), counts = encoded(tok, [USER, GOOD], [USER, long], lengths[1] - 20, too_long)
        assert [len(side.ids) for side in split_pair_segment(piece)] == [
            lengths[0],
            lengths[1] - 20,
        ] and counts.truncated == 1
        kept = split_pair_segment(piece)[1].ids
        full = split_pair_segment(whole)[1].ids
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
        mask[one:] |= REJECTED_BIT
        pieces.append(TokenSegment(np.arange(one + two) + 100 * number + 1, mask))
    capacity = sum(piece.num_inputs for piece in pieces) + tail + 1
    batch = collate_preference_pairs(pieces, capacity, 0, max_pair_inputs(16))
    assert batch.num_targets == len(pieces) and batch.num_tokens == sum(one + two - 2 for one, two in lengths)
    at = 0
    for number, pair in enumerate(lengths):
        for side, length in enumerate(pair):
            assert batch.cu_seqlens[2 * number + side] == at
            ids = np.arange(length) + 100 * number + 1 + side * pair[0]
            assert batch.input_ids[at : at + length - 1].tolist() == ids[:-1].tolist()
            assert batch.labels[at : at + length - 1].tolist() == ids[1:].tolist()
            at += length - 1
    assert all(batch.labels[at:] == IGNORE_INDEX) and np.diff(batch.cu_seqlens[2 * len(pieces) :]).max(initial=0) <= 16


def test_both_sides_are_shown(folder: Path, tmp_path: Path, tok: Any) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "2 and 2?", "chosen": "4", "rejected": "five"}) + "\n")
    data = Data(train=[str(path)], cache=str(tmp_path / "cache"), valid_fraction=0.0)
    made = dataset_cache.build_dataset(str(path), folder, data, "train", seq_len=64, learning=LossPolicy(pairs=True))
    shown = [
        (name.rpartition(" ")[2], loss_preview.format_preview(loss_preview.split_by_loss_mask(ids, mask, tok), False))
        for name, ids, mask in loss_preview.iter_conversations([made], 1)
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
        learning = LossPolicy(pairs=True)
        sources = dataset_cache.build_datasets([str(path)], folder, data, "train", seq_len=64, learning=learning)
        found: list[tuple[int, ...]] = []
        loaders = [
            Loader(
                sources, seq_len=128, micro_batch_tokens=256, rank=rank, world_size=world, lay=collate_preference_pairs
            )
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
    found = [split_pair_messages(document, labels=True) for document in read_documents(DataSource(str(path)), Data())]
    assert [(one is None, other is None) for one, other in found] == [
        (False, True),
        (True, False),
        (False, False),
        (True, False),
    ]
    path.write_text(json.dumps({"messages": turns, "label": "good"}) + "\n")
    (document,) = read_documents(DataSource(str(path)), Data())
    with pytest.raises(DataError, match="one answer without a label"):
        split_pair_messages(document, labels=True)


def test_single_answers_become_entries_of_one_side(tok: Any) -> None:
    """As they leave the encoder, and as they are laid."""
    turns = [USER, GOOD]
    docs = [
        Document(None, turns, "a:1", label=True),
        Document(None, turns, "a:2", label=False),
        Document(None, turns, "a:3", rejected=[USER, BAD]),
    ]
    learning = LossPolicy("assistant", "right", pairs=True, labels=True)
    encoder = PreferencePairEncoder(tok, DocumentCounts(), seq_len=64, learning=learning, skip_bad=False)
    made = [TokenSegment(np.asarray(one.ids), np.frombuffer(one.mask or b"", dtype=np.uint8)) for one in encoder(docs)]
    assert [[len(side.ids) > 0 for side in split_pair_segment(piece)] for piece in made] == [
        [True, False],
        [False, True],
        [True] * 2,
    ]
    batch = collate_unpaired_answers(made, 200, 0, 128)
    assert batch.num_targets == 4
    assert batch.extra["desirable"].tolist() == [True, False, True, False]
    assert batch.extra["entry"].tolist() == [0, 1, 2, 2]
