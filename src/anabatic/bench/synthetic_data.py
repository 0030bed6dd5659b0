"""Text and rows of any length, made on the spot, and a tokenizer of any size whose words are single tokens.

Words are syllables of a consonant and a vowel, so that no merge of a pair crosses a syllable: `"ba", "babe", " bab"`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Any

from anabatic.core.errors import ConfigError
from anabatic.core.paths import write_atomic
from anabatic.plan.model_shape import DEFAULT_VOCAB_SIZE

SYNTHETIC_TOKENIZER = "synthetic:"
"""In the place of a tokenizer's folder."""
_SPACE_SYMBOL = "Ġ"
"""A space in the alphabet of byte-level tokenizers (GPT-2)."""
_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"
_SYLLABLES = tuple(map("".join, product(_CONSONANTS, _VOWELS)))
_WORD_POOL_SIZE = 4096
"""Words that a text is drawn from."""


def iter_bpe_merges() -> Iterator[tuple[str, str]]:
    """Yield pairs that make syllables, syllables behind a blank, then words of two and three syllables."""
    yield from product(_CONSONANTS, _VOWELS)
    yield from ((_SPACE_SYMBOL, one) for one in _SYLLABLES)
    yield from ((_SPACE_SYMBOL + one, other) for one, other in product(_SYLLABLES, _SYLLABLES))
    for one, other, third in product(_SYLLABLES, _SYLLABLES, _SYLLABLES):
        yield _SPACE_SYMBOL + one + other, third


def write_synthetic_tokenizer(folder: Path, vocab_size: int = DEFAULT_VOCAB_SIZE) -> Path:
    """Write a byte-level tokenizer of so many entries, with our special tokens and chat template; return the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from anabatic.data.tokenizer import hf_folder as folders

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*folders.SPECIAL_TOKENS, *alphabet])}
    pairs = list(islice(iter_bpe_merges(), vocab_size - len(vocabulary)))
    for left, right in pairs:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [token for token in folders.SPECIAL_TOKENS if token not in folders.VISIBLE_SPECIAL_TOKENS]
    )
    folders.save_tokenizer(tokenizer, folder)
    return folder


def iter_words(seed: int = 0) -> Iterator[str]:
    """Yield words without end, the same for a seed."""
    draw = Random(seed)
    pool = ["".join(draw.choices(_SYLLABLES, k=draw.choice((1, 2, 2, 2)))) for _ in range(_WORD_POOL_SIZE)]
    while True:
        yield draw.choice(pool)


class SyntheticTexts:
    """Texts of so many tokens each, under one tokenizer.

    Args:
        ends: text -> the place in it where each of its tokens ends.
    """

    def __init__(self, ends: Callable[[str], list[int]], seed: int = 0) -> None:
        self.token_ends, self._words = ends, iter_words(seed)

    def generate_text(self, tokens: int) -> str:
        """Return a text of `tokens` tokens, or one more or less where cutting it changes its last word."""
        found: list[str] = []
        ends: list[int] = []
        while len(ends) < tokens:
            found += islice(self._words, tokens - len(ends) + 1)
            ends = self.token_ends(" ".join(found))
        return " ".join(found)[: ends[tokens - 1]]


def build_synthetic_texts(folder: str | Path, seed: int = 0) -> SyntheticTexts:
    """Return texts under the tokenizer of a folder.

    Raises:
        DataError: it is not there, or damaged.
    """
    from anabatic.data.tokenizer import hf_folder as folders

    backend = folders.load_fast_tokenizer(folder)
    return SyntheticTexts(lambda text: [end for _, end in backend.encode(text, add_special_tokens=False).offsets], seed)


def _build_document_row(one: SyntheticTexts, length: int) -> dict[str, Any]:
    return {"text": one.generate_text(length)}


def _build_conversation_row(one: SyntheticTexts, length: int) -> dict[str, Any]:
    """A question of a quarter of the tokens; the marks of turns are left room for."""
    ask, answer = max(1, length // 4), max(1, length - length // 4 - 12)
    return {
        "messages": [
            {"role": "user", "content": one.generate_text(ask)},
            {"role": "assistant", "content": one.generate_text(answer)},
        ]
    }


def _build_preference_row(one: SyntheticTexts, length: int) -> dict[str, Any]:
    row = _build_conversation_row(one, length)
    return {**row, "rejected_response": one.generate_text(max(1, length - length // 4 - 12))}


ROW_BUILDERS: dict[str, Callable[[SyntheticTexts, int], dict[str, Any]]] = {
    "pretrain": _build_document_row,
    "sft": _build_conversation_row,
    "dpo": _build_preference_row,
    "reward": _build_preference_row,
}
"""Command -> one row of its data."""


def write_synthetic_rows(file: Path, command: str, tokenizer_folder: str | Path, length: int, tokens: int) -> None:
    """Write rows of `length` tokens for a command, `tokens` in all.

    Raises:
        ConfigError: the command's data cannot be made up.
        DataError: the tokenizer is not there, or damaged.
    """
    if command not in ROW_BUILDERS:
        known = ", ".join(ROW_BUILDERS)
        raise ConfigError(f"rows for {command} cannot be made up", f"leave --length out; it is for {known}")
    one = build_synthetic_texts(tokenizer_folder)
    lines = [json.dumps(ROW_BUILDERS[command](one, length)) for _ in range(max(64, tokens // length))]
    write_atomic(file, "\n".join(lines) + "\n")
