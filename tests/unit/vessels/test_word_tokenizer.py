"""One word is one id, and words that are not known are counted."""

from __future__ import annotations

import pytest

from anabatic.core.errors import DataError
from anabatic_vessels.words import word_tokenizer
from anabatic_vessels.words.word_tokenizer import WordEncoder


def test_one_word_is_one_id() -> None:
    tokenizer = word_tokenizer.build_word_tokenizer(["SPD_1", "COG_N", "POINT_END"])
    words = WordEncoder.from_tokenizer(tokenizer)
    text = "SPD_1  COG_N POINT_END SPD_1"
    assert words(text).tolist() == tokenizer(text)["input_ids"] == [3, 4, 5, 3]
    assert words.unknown_words.total() == 0
    assert words("SPD_1 SPD_2").tolist() == [3, tokenizer.unk_token_id]
    with pytest.raises(DataError, match=r"2 of 3 words \(66.67%\) are not in the vocabulary: SPD_2"):
        fresh = WordEncoder.from_tokenizer(tokenizer)
        fresh("SPD_2 SPD_2 SPD_1")
        fresh.report_unknown_words("rows")
