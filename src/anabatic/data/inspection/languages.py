"""Languages of texts, by py3langid."""

from __future__ import annotations

import random
from collections import Counter

from anabatic.core import extras

SAMPLE_ROWS = 10_000
"""Rows that are looked at, drawn at random from all."""
SAMPLE_CHARS = 2_000
"""Characters of each, from its beginning."""
_MIN_BYTES = 12  # of UTF-8; "Hello" is taken for Breton
_MERGED_CODES = {"wuu": "zh"}  # short Mandarin is taken for Wu: 28 of 1,000 rows of alpaca_zh_demo.json


class LanguageSample:
    """A uniform random sample of the texts that were added (reservoir sampling, algorithm R of Vitter 1985)."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._texts: list[str] = []
        self.num_texts = 0

    def add_text(self, text: str) -> None:
        """Add a text."""
        self.num_texts += 1
        if len(self._texts) < SAMPLE_ROWS:
            self._texts.append(text[:SAMPLE_CHARS])
        elif (at := self._random.randrange(self.num_texts)) < SAMPLE_ROWS:
            self._texts[at] = text[:SAMPLE_CHARS]

    def identify_languages(self) -> dict[str, float]:
        """Return code of ISO 639 -> share of the texts, largest first.

        `zxx` has no language, such as digits; `und` is too short to tell.

        Raises:
            ConfigError: py3langid is not installed.
        """
        py3langid = extras.import_optional("py3langid", "the language of a row")

        def identify_language(text: str) -> str:
            if len(text.strip().encode("utf-8", "replace")) < _MIN_BYTES:
                return "und"
            code: str = py3langid.classify(text)[0]
            return _MERGED_CODES.get(code, code)

        counts = Counter(map(identify_language, self._texts))
        return {code: count / len(self._texts) for code, count in counts.most_common()}
