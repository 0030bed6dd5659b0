"""Words to spell and to count letters in: real ones from the standard library, and made-up ones.

A frequent word is often a single token, and nothing in a held-out single token says how it is written. So
real words are only taught; the words that are asked in a test are made up (`mobi`, `taken`, `rulosa`), none
of them is ever taught in any task, and they can be spelled by whoever knows how their pieces are spelled.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random

HELD_OUT_EVERY = 10
"""One problem in this many is held out for the test split."""

SOURCE_MODULES = (
    "argparse.py",
    "ast.py",
    "calendar.py",
    "configparser.py",
    "csv.py",
    "dataclasses.py",
    "datetime.py",
    "difflib.py",
    "fractions.py",
    "functools.py",
    "heapq.py",
    "inspect.py",
    "os.py",
    "pdb.py",
    "random.py",
    "shutil.py",
    "statistics.py",
    "string.py",
    "subprocess.py",
    "tarfile.py",
    "textwrap.py",
    "threading.py",
    "typing.py",
    "zipfile.py",
)
"""Sources whose words are taught; those missing in an interpreter are skipped."""

VOWELS = "aeiou"
CONSONANTS = "bdklmnprst"
WORD_SHAPES = ("cvc", "cvcv", "cvcv", "cvcvc", "cvcvcv", "vcvc")
"""Patterns of made-up words: 3 to 6 letters."""


def is_held_out(problem: str) -> bool:
    """Tell whether a problem belongs to the test split: a property of its text alone (BLAKE2b, 1 in
    `HELD_OUT_EVERY`)."""
    digest = hashlib.blake2b(problem.encode("utf-8"), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_EVERY == 0


@cache
def list_real_words(limit: int = 1000) -> tuple[str, ...]:
    """Return the most frequent words of 3 to 6 lower-case letters in `SOURCE_MODULES`, the most frequent first.

    Words whose text is held out are left out, so a real word never teaches a test word.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    counts: Counter[str] = Counter()
    for name in SOURCE_MODULES:
        path = library / name
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            counts.update(re.findall(r"(?<![A-Za-z])[a-z]{3,6}(?![A-Za-z])", text))
    taught = [(-number, word) for word, number in counts.items() if not is_held_out(word)]
    return tuple(word for _, word in sorted(taught)[:limit])


def make_up_word(rng: Random, test: bool) -> str:
    """Return a pronounceable word of 3 to 6 letters that belongs to the test split, or does not."""
    while True:
        shape = rng.choice(WORD_SHAPES)
        word = "".join(rng.choice(VOWELS if kind == "v" else CONSONANTS) for kind in shape)
        if is_held_out(word) == test:
            return word


def draw_word(rng: Random, test: bool, real_share: float) -> str:
    """Return a word: for training a real one with probability `real_share`, for a test always a made-up
    one."""
    words = list_real_words()
    if not test and words and rng.random() < real_share:
        return rng.choice(words)
    return make_up_word(rng, test)
