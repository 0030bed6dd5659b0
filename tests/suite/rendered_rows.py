"""Conversations as tests compare them."""

from __future__ import annotations

from typing import Any

import numpy as np

from anabatic.data.chat.rendering import render_conversations


def tokenize_conversations(conversations: list[Any], tokenizer: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return `(ids, mask)` of each conversation: int64 `[n]` and uint8 `[n]`, 1 where the assistant speaks."""
    return [(one.ids, one.mask) for one in render_conversations(conversations, tokenizer)]
