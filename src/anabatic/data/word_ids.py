"""Words as ids: one word, one id, whatever the tokenizer would make of the text and of the spaces between the words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anabatic.core import log
from anabatic.core.errors import DataError

UNKNOWN, MASK, END_OF_TEXT = "[UNK]", "[MASK]", "<|endoftext|>"
WARN_SHARE = 0.001
"""Share of unknown words from which a warning is given."""
REFUSE_SHARE = 0.5
"""Share of unknown words from which the text cannot be of these words."""


@dataclass
class WordIds:
    """A vocabulary of words, and what was met that is not in it.

    Attributes:
        known: word -> id.
        unknown: id of all other words.
        words: how many were read; `strange`: those that are not known, with their number.
    """

    known: dict[str, int]
    unknown: int
    words: int = 0
    strange: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, tokenizer: Any) -> WordIds:
        """Return the vocabulary of a tokenizer of `make` or `extended`.

        Raises:
            DataError: it is no such tokenizer.
        """
        known = dict(tokenizer.get_vocab())
        if UNKNOWN not in known:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path} has no {UNKNOWN}: it was not made for words",
                "train on words with `anabatic classify pretrain` or `classify train` first",
            )
        return cls(known, known[UNKNOWN])

    def __call__(self, text: str) -> np.ndarray:
        """Return the ids of a text's words, int32."""
        words = text.split()
        ids = [self.known.get(word, self.unknown) for word in words]
        self.words += len(words)
        if self.unknown in ids:
            self.strange.update(word for word in words if word not in self.known)
        return np.asarray(ids, dtype=np.int32)

    def report(self, what: str) -> None:
        """Say how many words were not known.

        Raises:
            DataError: most were not.
        """
        count = self.strange.total()
        if not count:
            return
        share = count / self.words
        common = ", ".join(f"{word[:40]} ({number:,})" for word, number in self.strange.most_common(3))
        told = f"{what}: {count:,} of {self.words:,} words ({share:.2%}) are not in the vocabulary: {common}"
        if share >= REFUSE_SHARE:
            raise DataError(told, "the text is written in other words than the model's: see `words` of its rows")
        (log.warn if share >= WARN_SHARE else log.info)(told)


def make(words: Sequence[str]) -> Any:
    """Return a tokenizer of these words alone, for transformers' interface: one word between spaces, one id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = list(dict.fromkeys([END_OF_TEXT, UNKNOWN, MASK, *words]))
    bare = Tokenizer(models.WordLevel({word: number for number, word in enumerate(entries)}, unk_token=UNKNOWN))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, unk_token=UNKNOWN, mask_token=MASK, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def extended(tokenizer: Any, words: Iterable[str]) -> int:
    """Add what a tokenizer lacks of `words` and of the marks; return how many entries are new."""
    known = tokenizer.get_vocab()
    missing = [word for word in dict.fromkeys([UNKNOWN, MASK, *words]) if word not in known]
    return int(tokenizer.add_tokens(missing)) if missing else 0
