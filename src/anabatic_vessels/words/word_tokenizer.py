"""Words as ids: one word, one id, whatever the tokenizer would make of the text and of the spaces between the words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anabatic.core import log
from anabatic.core.errors import DataError

UNKNOWN_TOKEN, MASK_TOKEN, END_OF_TEXT = "[UNK]", "[MASK]", "<|endoftext|>"
WARN_UNKNOWN_FRACTION = 0.001
"""Share of unknown words from which a warning is given."""
MAX_UNKNOWN_FRACTION = 0.5
"""Share of unknown words from which the text cannot be of these words."""


@dataclass
class WordEncoder:
    """A vocabulary of words, and what was met that is not in it.

    Attributes:
        vocab: word -> id.
        unk_token_id: id of all other words.
        num_words: how many were read; `unknown_words`: those that are not known, with their number.
    """

    vocab: dict[str, int]
    unk_token_id: int
    num_words: int = 0
    unknown_words: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> WordEncoder:
        """Return the vocabulary of a tokenizer of `build_word_tokenizer` or `add_missing_words`.

        Raises:
            DataError: it is no such tokenizer.
        """
        known = dict(tokenizer.get_vocab())
        if UNKNOWN_TOKEN not in known:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path} has no {UNKNOWN_TOKEN}: it was not made for words",
                "train on words with `anabatic classify pretrain` or `classify train` first",
            )
        return cls(known, known[UNKNOWN_TOKEN])

    def __call__(self, text: str) -> np.ndarray:
        """Return the ids of a text's words, int32."""
        words = text.split()
        ids = [self.vocab.get(word, self.unk_token_id) for word in words]
        self.num_words += len(words)
        if self.unk_token_id in ids:
            self.unknown_words.update(word for word in words if word not in self.vocab)
        return np.asarray(ids, dtype=np.int32)

    def report_unknown_words(self, what: str) -> None:
        """Say how many words were not known.

        Raises:
            DataError: most were not.
        """
        count = self.unknown_words.total()
        if not count:
            return
        fraction = count / self.num_words
        common = ", ".join(f"{word[:40]} ({number:,})" for word, number in self.unknown_words.most_common(3))
        message = f"{what}: {count:,} of {self.num_words:,} words ({fraction:.2%}) are not in the vocabulary: {common}"
        if fraction >= MAX_UNKNOWN_FRACTION:
            raise DataError(message, "the text is written in other words than the model's: see `words` of its rows")
        (log.warn if fraction >= WARN_UNKNOWN_FRACTION else log.info)(message)


def build_word_tokenizer(words: Sequence[str]) -> Any:
    """Return a tokenizer of these words alone, for transformers' interface: one word between spaces, one id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    wrap: Any = PreTrainedTokenizerFast  # whose constructor has no types
    entries = list(dict.fromkeys([END_OF_TEXT, UNKNOWN_TOKEN, MASK_TOKEN, *words]))
    bare = Tokenizer(models.WordLevel({word: number for number, word in enumerate(entries)}, unk_token=UNKNOWN_TOKEN))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrap(
        tokenizer_object=bare,
        unk_token=UNKNOWN_TOKEN,
        mask_token=MASK_TOKEN,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
    )


def add_missing_words(tokenizer: Any, words: Iterable[str]) -> int:
    """Add what a tokenizer lacks of `words` and of the marks; return how many entries are new."""
    known = tokenizer.get_vocab()
    missing = [word for word in dict.fromkeys([UNKNOWN_TOKEN, MASK_TOKEN, *words]) if word not in known]
    return int(tokenizer.add_tokens(missing)) if missing else 0
