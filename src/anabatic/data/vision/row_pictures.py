"""Pictures of a row, as ms-swift, LLaMA-Factory, Llava and OpenAI's chat write them."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anabatic.core.errors import DataError
from anabatic.data.chat.conversation_formats import find_media_column, parse_json_list
from anabatic.data.chat.turn_fields import BadRowError, json_type_name
from anabatic.data.readers.document import Message

TAG = "<image>"
"""Place of a picture in the text of a row."""
PICTURE_COLUMNS = ("images", "image")
_PART_KEYS = ("image_url", "image", "url", "path")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def take_pictures(row: Mapping[str, Any], folder: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the row with a tag for each picture in its turns, and its pictures: absolute paths and data URIs.

    Args:
        folder: that relative paths start from.

    Raises:
        BadRowError: a picture is an address in a network or no text, or the row has video or sound.
    """
    if other := find_media_column({key: value for key, value in row.items() if key not in PICTURE_COLUMNS}):
        raise BadRowError(f'column "{other}" holds video or sound, which are not supported')
    named: list[Any] = []
    for column in PICTURE_COLUMNS:
        value = parse_json_list(row.get(column))
        named += value if isinstance(value, list) else [] if value in (None, "") else [value]
    plain = {key: value for key, value in row.items() if key not in PICTURE_COLUMNS}
    shown: list[Any] = []
    for key in ("messages", "conversations", "prompt", "chosen", "rejected"):
        if isinstance(plain.get(key), list):  # the worse answer is about the pictures of the better one
            plain[key] = [_take_parts(turn, [] if key == "rejected" else shown) for turn in plain[key]]
    named += [each for each in shown if each is not None]
    return plain, tuple(resolve_picture(each, folder) for each in named)


def _take_parts(turn: Any, shown: list[Any]) -> Any:
    """Return a turn whose parts that are pictures became tags; what the parts name is added to `shown`."""
    content = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(content, list):
        return turn
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image", "image_url", "input_image"):
            shown.append(next((part[key] for key in _PART_KEYS if part.get(key)), None))
            part = {"type": "text", "text": TAG}
        parts.append(part)
    return {**turn, "content": parts}


def resolve_picture(value: Any, folder: str) -> str:
    """Return a picture as an absolute path or a data URI; arguments and errors as of `take_pictures`."""
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):  # Parquet tables of data sets
        return f"data:image/any;base64,{base64.b64encode(value['bytes']).decode()}"
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("url", "path", "image") if value.get(key)), None)
    if not isinstance(value, str) or not value.strip():
        raise BadRowError(f"a picture is {json_type_name(value)}, not a path or a data URI")
    if value[:5].lower() == "data:":
        return value
    if value[:7].lower() == "file://":
        value = value[7:]
    elif _URL.match(value):
        raise BadRowError(
            f"the picture {value[:80]} is an address in a network, and nothing is fetched",
            "fetch the pictures first, and name their files",
        )
    return str(Path(folder, Path(value).expanduser()).absolute())


def place_pictures(turns: Sequence[Message], pictures: Sequence[str], name: str, text: str) -> list[dict[str, Any]]:
    """Return turns with `text`, the template's for a picture, in place of each tag.

    A row with pictures and no tag at all has them before its first question (ms-swift).

    Raises:
        DataError: there are more tags than pictures, or fewer.
    """
    tags = sum(str(turn.get("content") or "").count(TAG) for turn in turns)
    if tags == 0 and pictures:
        first = next((number for number, turn in enumerate(turns) if turn["role"] == "user"), 0)
        before = text * len(pictures)
        return [
            {**turn, "content": f"{before}{turn.get('content') or ''}"} if number == first else turn
            for number, turn in enumerate(turns)
        ]
    if tags != len(pictures):
        raise DataError(
            f"{name}: {tags} x {TAG} in the turns, {len(pictures)} pictures in the row",
            f'write {TAG} once for each entry of "images"',
        )
    return [
        {**turn, "content": turn["content"].replace(TAG, text)} if TAG in (turn.get("content") or "") else turn
        for turn in turns
    ]
