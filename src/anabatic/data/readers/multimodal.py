"""Rows with pictures, video or sound: nothing here reads them, and without them the text is another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
"""Of LLaMA-Factory's and ms-swift's rows (`images`, `videos`, `audios`) and Llava's (`image`, `video`)."""
_EMPTY_VALUES = ("", "[]", "null")
_MEDIA_PART_TYPES = ("image", "video", "audio", "file")
"""In the type of a content part: `image`, `image_url`, `input_image`, `input_audio`, `video_url`, `file`."""
TEXT_ONLY_HINT = "models of text alone are trained and asked: use rows of text"
"""What can be done."""


def find_media_column(row: Mapping[str, Any]) -> str:
    """Return the first column of a row that holds pictures, video or sound; empty: none does."""
    return next((name for name in MEDIA_COLUMNS if name in row and _has_content(row[name])), "")


def find_media_part(content: Any) -> str:
    """Return the type of the first part of a message's content that is no text; empty: there is none."""
    for one in content if isinstance(content, list) else ():
        kind = one.get("type") if isinstance(one, Mapping) else None
        if isinstance(kind, str) and any(word in kind for word in _MEDIA_PART_TYPES):
            return kind
    return ""


def _has_content(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() not in _EMPTY_VALUES
    if isinstance(value, (list, tuple)):
        return any(_has_content(one) for one in value)
    return isinstance(value, (Mapping, bytes)) and bool(value)
