"""Duplicates, near duplicates and leaks: against sets of n-grams, on made and on real rows."""

from __future__ import annotations

import json
import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.data.inspection.duplicates import DuplicateIndex
from anabatic.data.inspection.fingerprints import (
    DUPLICATE_NGRAM_BYTES,
    SIGNATURE_SIZE,
    compute_signature,
    hash_ngrams,
    hash_text,
    normalize_text,
)
from anabatic.data.inspection.languages import SAMPLE_ROWS, LanguageSample
from anabatic.data.inspection.leaks import LEAK_SHARE, Leak, LeakIndex
from anabatic.data.inspection.row_text import RowText

REAL = Path(__file__).resolve().parents[4] / "shared" / "data"
WORDS = [f"word{number}" for number in range(500)]


def ngram_set(text: str, size: int) -> set[bytes]:
    data = normalize_text(text).casefold().encode("utf-8", "surrogatepass")
    return {data[at : at + size] for at in range(len(data) - size + 1)}


def jaccard(one: str, two: str) -> float:
    first, second = (ngram_set(text, DUPLICATE_NGRAM_BYTES) for text in (one, two))
    return len(first & second) / len(first | second)


def make_text(generator: random.Random, words: int) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(words))


def replace_words(text: str, share: float, generator: random.Random) -> str:
    return " ".join(generator.choice(WORDS) if generator.random() < share else word for word in text.split())


@given(st.text(max_size=200), st.sampled_from([1, 2, 16, 32]))
def test_equal_ngrams_and_no_others_have_equal_hashes(text, size):
    data = normalize_text(text).casefold().encode("utf-8", "surrogatepass")
    hashes = hash_ngrams(normalize_text(text), size)
    grams = [data[at : at + size] for at in range(len(data) - size + 1)]
    assert len(hashes) == len(grams)
    assert len(set(hashes.tolist())) == len(set(grams)) == len(set(zip(grams, hashes.tolist(), strict=True)))


def test_a_byte_0_counts():
    hashes = hash_ngrams("\0" * 40 + "a" * 40, 16)
    assert len(set(hashes.tolist())) == len(ngram_set("\0" * 40 + "a" * 40, 16))


@given(st.text(max_size=60))
def test_white_space_alone_makes_no_difference(text):
    spaced = f" {text}\n\n".replace(" ", "\t \u3000")
    assert normalize_text(spaced) == normalize_text(text)
    assert hash_text(normalize_text("a"), text) != hash_text(normalize_text("a"), text + "x")


def test_composed_and_decomposed_letters_are_equal():
    assert normalize_text("cafe\u0301") == normalize_text("caf\u00e9")


@pytest.mark.parametrize("words", [8, 40, 400, 4000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.03, 0.1, 0.5])
def test_a_signature_estimates_the_similarity_of_the_sets(words, share):
    generator, errors = random.Random(words), []
    for _ in range(20):
        text = make_text(generator, words)
        other = replace_words(text, share, generator)
        signatures = [compute_signature(hash_ngrams(normalize_text(one), 16)) for one in (text, other)]
        errors.append(np.mean(signatures[0] == signatures[1]) - jaccard(text, other))
    assert abs(np.mean(errors)) < 0.05 and np.std(errors) < 0.12


def test_signatures_of_strangers_have_nothing_in_common():
    generator = random.Random(0)
    for _ in range(20):
        pair = ["".join(chr(generator.randrange(97, 123)) for _ in range(30)) for _ in range(2)]
        one, two = (compute_signature(hash_ngrams(text, 16)) for text in pair)
        assert np.mean(one == two) < 0.05
    with pytest.raises(ValueError, match="at least one"):
        compute_signature(np.empty(0, np.uint64))


@pytest.mark.process
def test_near_duplicates_are_those_of_the_slow_comparison():
    generator = random.Random(3)
    texts = []
    for _ in range(60):
        text = make_text(generator, generator.randrange(30, 120))
        texts += [text, *(replace_words(text, share, generator) for share in (0.004, 0.3, 0.9))]
    generator.shuffle(texts)
    index = DuplicateIndex()
    for text in texts:
        index.add_row(RowText(text))
    found = index.find_near_duplicates(0.8)
    surely, never = set(), set(range(len(texts)))
    for (_, one), (high, two) in combinations(enumerate(texts), 2):
        value = jaccard(one, two)
        if value >= 0.92 and normalize_text(one) != normalize_text(two):
            surely.add(high)
        if value > 0.65:
            never.discard(high)
    assert len(surely) >= 10 and surely <= set(found) | set(index.exact_duplicates) and not never & set(found)
    for number, (first, similarity) in found.items():
        assert first < number and abs(jaccard(texts[number], texts[first]) - similarity) < 0.2


def test_exact_duplicates_and_context():
    index = DuplicateIndex()
    rows = [RowText("a b"), RowText("c"), RowText(" a\nb"), RowText("a b", context="other tools"), RowText("a  b")]
    assert [index.add_row(row) for row in rows] == [0, 1, 0, 3, 0]
    assert index.exact_duplicates == {2: 0, 4: 0}
    assert index.find_near_duplicates() == {}  # too short for n-grams
    long = "one text that is long enough to have several n-grams of sixteen bytes"
    index.add_row(RowText(long))
    index.add_row(RowText(long, context="other tools"))
    assert index.find_near_duplicates() == {6: (5, 1.0)}
    assert DuplicateIndex(near=False).find_near_duplicates() == {}


def test_the_index_grows():
    index = DuplicateIndex()
    for number in range(3000):
        index.add_row(RowText(f"{number} is the number of this text; {number * number} is its square"))
    index.add_row(RowText("1234 is the number of this text; 1522756 is its square!"))
    near = index.find_near_duplicates(0.9)
    assert near[3000][0] == 1234


def test_leaks_of_rows_questions_and_texts():
    generator = random.Random(1)
    held = [make_text(generator, 80) for _ in range(6)]
    index = LeakIndex()
    for number, text in enumerate(held):
        index.add_held_out(RowText(text, question=f"question {number}", context="system"))
    index.start_training_rows()
    training = [
        RowText(make_text(generator, 80)),
        RowText(held[0], "question 0", "system"),
        RowText("another answer", "question 1", "system"),
        RowText("another answer", "question 2", "another system"),
        RowText(f"{make_text(generator, 50)} {held[3]} {make_text(generator, 50)}"),
        RowText(held[4][: len(held[4]) // 2]),
    ]
    for number, row in enumerate(training):
        index.add_training(number, row)
    *leaks, covered = index.find_leaks()
    assert leaks == [Leak("same row", 0, 1), Leak("same question", 1, 2)]
    assert (covered.kind, covered.row, covered.train_row) == ("same text", 3, 4) and covered.share == 1.0


def test_a_text_spread_over_rows_leaks_from_the_share_on():
    generator = random.Random(2)
    text = make_text(generator, 100)
    for share in (0.6, 0.8):
        index = LeakIndex()
        index.add_held_out(RowText(text))
        index.start_training_rows()
        half = int(len(text) * share / 2)
        index.add_training(0, RowText(text[: half - 100]))
        index.add_training(1, RowText(text[half - 150 : 2 * half]))
        leaks = index.find_leaks()
        assert bool(leaks) == (share >= LEAK_SHARE)
        if leaks:
            (leak,) = leaks
            expected = ngram_set(text, 32) & (
                ngram_set(text[: half - 100], 32) | ngram_set(text[half - 150 : 2 * half], 32)
            )
            assert leak.train_row == 1 and abs(leak.share - len(expected) / len(ngram_set(text, 32))) < 0.01


def test_no_held_out_rows_leak_nothing():
    index = LeakIndex()
    index.start_training_rows()
    index.add_training(0, RowText("a text of more than thirty-two bytes, at last", "question"))
    assert index.find_leaks() == []


def test_languages():
    pytest.importorskip("py3langid")
    sample = LanguageSample()
    for text in ["The wind rises over the hills."] * 6 + ["今天的天气很好，我们去公园吧。"] * 3 + ["ok"]:
        sample.add_text(text)
    assert sample.identify_languages() == {"en": 0.6, "zh": 0.3, "und": 0.1}


def test_the_sample_of_languages_is_uniform():
    sample = LanguageSample()
    for number in range(3 * SAMPLE_ROWS):
        sample.add_text(str(number // SAMPLE_ROWS))
    counts = [sample._texts.count(str(third)) for third in range(3)]
    assert sum(counts) == SAMPLE_ROWS and all(abs(count - SAMPLE_ROWS / 3) < 300 for count in counts)


def test_the_signature_size_is_that_of_its_bins():
    assert compute_signature(hash_ngrams("a" * 16, 16)).shape == (SIGNATURE_SIZE,)


@pytest.mark.process
@pytest.mark.skipif(not REAL.is_dir(), reason="the shared data is not on this machine")
def test_equal_rows_of_a_real_file():
    rows = json.loads((REAL / "sft" / "glaive_toolcall_en_demo.json").read_text(encoding="utf-8"))
    texts = [json.dumps(row, ensure_ascii=False) for row in rows]
    index = DuplicateIndex()
    for text in texts:
        index.add_row(RowText(text))
    assert len(index.exact_duplicates) == len(texts) - len(set(map(normalize_text, texts)))
    near, slow = index.find_near_duplicates(0.8), set()
    for (_, one), (high, two) in combinations(enumerate(texts[:120]), 2):
        if one != two and jaccard(one, two) >= 0.9:
            slow.add(high)
    assert slow <= set(near) | set(index.exact_duplicates)
