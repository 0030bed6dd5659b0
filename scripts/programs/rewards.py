"""A reward for GRPO: TRL, ms-swift and others import it by its name."""

from __future__ import annotations

from typing import Any


def count_letters(completions: list[Any], **_: Any) -> list[float]:
    """Return how many of the first 40 characters are letters."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [sum(letter.isalpha() for letter in text[:40]) / 40 for text in texts]
