"""Rows that are too long: one never ends a job, too many do, and the hint says what to type."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from anabatic.config.sections.common import Data
from anabatic.core.errors import DataError
from anabatic.data.batching import loader
from anabatic.data.chat.loss_mask import LossPolicy, TruncationStrategy
from anabatic.data.readers.long_rows import LongRowCounter
from anabatic.data.shards import dataset_cache
from anabatic_testing.tiny_corpora import write_byte_tokenizer


def long(count: int, share: float = 0.05) -> LongRowCounter:
    found = LongRowCounter("data.train: questions", 255, share)
    for number in range(count):
        found.count_row(278 + number, f"rows.jsonl:{7 + number}")
    return found


def test_one_row_of_many_or_of_few_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for rows in (7473, 2):
        long(1).check_fraction(rows)
    first, second = (record.getMessage() for record in caplog.records)
    assert "1 of 7,473 rows (0.01%) are longer than 255 tokens (the longest has 278, first rows.jsonl:7)" in first
    assert "1 of 2 rows (50.00%)" in second
    long(0).check_fraction(10)
    assert len(caplog.records) == 2


def test_too_many_are_an_error_whose_hint_works() -> None:
    with pytest.raises(DataError, match=r"11 of 100 rows \(11.00%\).*more than data.long_share 0.05 allows") as caught:
        long(11).check_fraction(100, "give --batch.seq-len 289")
    assert caught.value.hint == "give --batch.seq-len 289, or pass over all of them with --data.long-share 0.11"
    long(11, 0.11).check_fraction(100)
    with pytest.raises(DataError) as caught:
        long(334).check_fraction(1000)
    long(334, float(caught.value.hint.split()[-1])).check_fraction(1000)


HINTS: dict[TruncationStrategy, str] = {
    "delete": "cut them with --truncation-strategy right, or pass over all of them with --data.long-share 0.5",
    "right": "keep their ends with --truncation-strategy left, or pass over all of them with --data.long-share 0.5",
}


@pytest.mark.parametrize("too_long", HINTS)
def test_conversations_that_are_left_out(too_long: TruncationStrategy, tmp_path: Path) -> None:
    """Those that are cut before the assistant speaks are as lost as those that are deleted."""
    path = tmp_path / "rows.jsonl"
    row = {"instruction": "x", "output": "y"}
    path.write_text("\n".join(json.dumps(one) for one in [row, {**row, "instruction": "x" * 300}] * 2))
    tok = write_byte_tokenizer(tmp_path / "tok")
    learning = LossPolicy(too_long=too_long)
    made = dataset_cache.build_dataset(
        str(path), tok, Data(valid_fraction=0.0), "train", seq_len=128, learning=learning
    )
    assert made.counts["longest"] > 300
    with pytest.raises(DataError, match=r"2 of 4 rows .*the longest has 3\d\d") as caught:
        dataset_cache.require_few_too_long([made], 128, 0.05, too_long)
    assert caught.value.hint.endswith(HINTS[too_long])
    dataset_cache.require_few_too_long([made], 128, 0.5, too_long)


def test_one_row_that_teaches_nothing_asks_for_no_longer_one_than_the_model_takes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"instruction": "x" * 300, "output": "y"}))
    tok = write_byte_tokenizer(tmp_path / "tok")
    made = dataset_cache.build_dataset(str(path), tok, Data(valid_fraction=0.0), "train", seq_len=128)
    dataset_cache.require_few_too_long([made], 128, 0.05, "right")
    with pytest.raises(DataError, match="0 tokens") as caught:
        loader.resolve_source_weights([(made, None)])
    assert "truncation_strategy: left" in caught.value.hint and "if the model has the positions" in caught.value.hint
