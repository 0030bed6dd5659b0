"""Scripts without spaces in tokenizer training: bound the number of distinct words.

BPE training holds every distinct word, about 100 bytes of memory for each of its bytes. Words of spaced scripts
repeat; a clause of Chinese, Japanese or Thai is one unspaced run that hardly ever does, so memory would grow with the
corpus. The first `MAX_UNSPLIT_CHARS` characters of such runs are learned from whole, which finds the longer words;
later ones in pairs of characters, of which there are few.
"""

from __future__ import annotations

import re

MAX_UNSPLIT_CHARS = 5_000_000
"""Characters of unspaced runs that are kept whole: less than 2 GB in the worst case."""

LONG_WORD_CHARS = 200
"""A run of letters or digits of this length counts as unspaced in any script."""

_CJK_RANGES = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f\u1780-\u17ff"  # Burmese, Khmer
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana, Chinese characters
    "\U00020000-\U0003ffff"
)
_CJK_PATTERN = re.compile(f"[{_CJK_RANGES}]")
_CJK_RUN_PATTERN = re.compile(rf"[{_CJK_RANGES}]{{3,}}|\w{{{LONG_WORD_CHARS},}}")


class CjkPretokenizer:
    """Pass text through whole until `whole_chars` of unspaced runs have been seen, then cut the runs into pairs.

    The cut is a line end, which the tokenizer's split keeps apart from letters on both sides.
    """

    def __init__(self, whole_chars: int = MAX_UNSPLIT_CHARS) -> None:
        self.chars_left = whole_chars

    def __call__(self, text: str) -> str:
        """Return the text to train on."""
        if max(map(len, text.split()), default=0) < LONG_WORD_CHARS and not _CJK_PATTERN.search(text):
            return text  # most text by far, and much cheaper to tell than to substitute
        return _CJK_RUN_PATTERN.sub(self._split_run, text)

    def _split_run(self, match: re.Match[str]) -> str:
        run = match[0]
        self.chars_left -= len(run)
        return run if self.chars_left >= 0 else "\n".join(run[start : start + 2] for start in range(0, len(run), 2))
