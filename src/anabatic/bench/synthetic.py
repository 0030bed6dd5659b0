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
from anabatic.plan.known import USUAL_VOCABULARY

NAME = "synthetic:"
"""In the place of a tokenizer's folder."""
_BLANK = "Ġ"
"""A space in the alphabet of byte-level tokenizers (GPT-2)."""
_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"
_SYLLABLES = tuple(map("".join, product(_CONSONANTS, _VOWELS)))
_POOL = 4096
"""Words that a text is drawn from."""


def merges() -> Iterator[tuple[str, str]]:
    """Yield pairs that make syllables, syllables behind a blank, then words of two and three syllables."""
    yield from product(_CONSONANTS, _VOWELS)
    yield from ((_BLANK, one) for one in _SYLLABLES)
    yield from ((_BLANK + one, other) for one, other in product(_SYLLABLES, _SYLLABLES))
    for one, other, third in product(_SYLLABLES, _SYLLABLES, _SYLLABLES):
        yield _BLANK + one + other, third


def tokenizer(folder: Path, vocab_size: int = USUAL_VOCABULARY) -> Path:
    """Write a byte-level tokenizer of so many entries, with our special tokens and chat template; return the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from anabatic.data import tokenizer as folders

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*folders.SPECIAL, *alphabet])}
    pairs = list(islice(merges(), vocab_size - len(vocabulary)))
    for left, right in pairs:
        vocabulary[left + right] = len(vocabulary)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([token for token in folders.SPECIAL if token not in folders.VISIBLE])
    folders.save(made, folder)
    return folder


def words(seed: int = 0) -> Iterator[str]:
    """Yield words without end, the same for a seed."""
    draw = Random(seed)
    pool = ["".join(draw.choices(_SYLLABLES, k=draw.choice((1, 2, 2, 2)))) for _ in range(_POOL)]
    while True:
        yield draw.choice(pool)


class Texts:
    """Texts of so many tokens each, under one tokenizer.

    Args:
        ends: text -> the place in it where each of its tokens ends.
    """

    def __init__(self, ends: Callable[[str], list[int]], seed: int = 0) -> None:
        self.ends, self._words = ends, words(seed)

    def text(self, tokens: int) -> str:
        """Return a text of `tokens` tokens, or one more or less where cutting it changes its last word."""
        found: list[str] = []
        ends: list[int] = []
        while len(ends) < tokens:
            found += islice(self._words, tokens - len(ends) + 1)
            ends = self.ends(" ".join(found))
        return " ".join(found)[: ends[tokens - 1]]


def texts(folder: str | Path, seed: int = 0) -> Texts:
    """Return texts under the tokenizer of a folder.

    Raises:
        DataError: it is not there, or damaged.
    """
    from anabatic.data import tokenizer as folders

    backend = folders.encode_fast(folder)
    return Texts(lambda text: [end for _, end in backend.encode(text, add_special_tokens=False).offsets], seed)


def _document(one: Texts, length: int) -> dict[str, Any]:
    return {"text": one.text(length)}


def _conversation(one: Texts, length: int) -> dict[str, Any]:
    """A question of a quarter of the tokens; the marks of turns are left room for."""
    ask, answer = max(1, length // 4), max(1, length - length // 4 - 12)
    return {
        "messages": [{"role": "user", "content": one.text(ask)}, {"role": "assistant", "content": one.text(answer)}]
    }


def _pair(one: Texts, length: int) -> dict[str, Any]:
    row = _conversation(one, length)
    return {**row, "rejected_response": one.text(max(1, length - length // 4 - 12))}


ROWS: dict[str, Callable[[Texts, int], dict[str, Any]]] = {
    "pretrain": _document, "sft": _conversation, "dpo": _pair, "reward": _pair,
}  # fmt: skip
"""Command -> one row of its data."""


def rows(file: Path, command: str, tokenizer_folder: str | Path, length: int, tokens: int) -> None:
    """Write rows of `length` tokens for a command, `tokens` in all.

    Raises:
        ConfigError: the command's data cannot be made up.
        DataError: the tokenizer is not there, or damaged.
    """
    if command not in ROWS:
        known = ", ".join(ROWS)
        raise ConfigError(f"rows for {command} cannot be made up", f"leave --length out; it is for {known}")
    one = texts(tokenizer_folder)
    lines = [json.dumps(ROWS[command](one, length)) for _ in range(max(64, tokens // length))]
    write_atomic(file, "\n".join(lines) + "\n")
