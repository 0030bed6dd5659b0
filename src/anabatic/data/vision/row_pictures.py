"""Pictures of a row, as ms-swift, LLaMA-Factory, Llava and OpenAI's chat write them."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anabatic.core.errors import DataError
from anabatic.data.chat.conversation_formats import find_media_column, parse_json_list
from anabatic.data.chat.turn_fields import BadRowError, json_type_name
from anabatic.data.readers.document import Message
from anabatic.data.vision.row_objects import OBJECTS_COLUMN, take_objects
from anabatic.data.vision.video_files import is_video, name_video

TAG, VIDEO_TAG = "<image>", "<video>"
"""Place of a picture or a video in the text of a row."""
PICTURE_COLUMNS, VIDEO_COLUMNS = ("images", "image"), ("videos", "video")
_PART_KINDS = {"image": TAG, "image_url": TAG, "input_image": TAG, "video": VIDEO_TAG, "video_url": VIDEO_TAG}
_PART_KEYS = {TAG: ("image_url", "image", "url", "path"), VIDEO_TAG: ("video_url", "video", "url", "path")}
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_TAGS = re.compile(f"{TAG}|{VIDEO_TAG}")


def take_pictures(row: Mapping[str, Any], folder: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the row with a tag for each picture in its turns, and its pictures: absolute paths, data URIs, and behind
    them videos, as `name_video` writes them, and the row's objects.

    Args:
        folder: that relative paths start from.

    Raises:
        BadRowError: a picture is an address in a network or no text, or the row has sound.
    """
    columns = (*PICTURE_COLUMNS, *VIDEO_COLUMNS)
    if other := find_media_column({key: value for key, value in row.items() if key not in columns}):
        raise BadRowError(f'column "{other}" holds sound, which is not supported')
    named: dict[str, list[Any]] = {TAG: [], VIDEO_TAG: []}
    for column in columns:
        value = parse_json_list(row.get(column))
        values = value if isinstance(value, (list, tuple)) else [] if value in (None, "") else [value]
        named[TAG if column in PICTURE_COLUMNS else VIDEO_TAG] += values
    plain = {key: value for key, value in row.items() if key not in columns}
    shown: list[tuple[str, Any]] = []
    for key in ("messages", "conversations", "prompt", "chosen", "rejected"):
        if isinstance(plain.get(key), list):  # the worse answer is about the pictures of the better one
            plain[key] = [_take_parts(turn, [] if key == "rejected" else shown) for turn in plain[key]]
    for tag, each in shown:
        named[tag] += [] if each is None else [each]
    pictures = [resolve_picture(each, folder) for each in named[TAG]]
    objects = take_objects(plain.pop(OBJECTS_COLUMN, None), len(pictures))
    return plain, (*pictures, *(_resolve_video(each, folder) for each in named[VIDEO_TAG]), *objects)


def _take_parts(turn: Any, shown: list[tuple[str, Any]]) -> Any:
    """Return a turn whose parts that are pictures became tags; what the parts name is added to `shown`."""
    content = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(content, list):
        return turn
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if tag := _PART_KINDS.get(kind) if isinstance(kind, str) else None:
            shown.append((tag, next((part[key] for key in _PART_KEYS[tag] if part.get(key)), None)))
            part = {"type": "text", "text": tag}
        parts.append(part)
    return {**turn, "content": parts}


def _resolve_video(value: Any, folder: str) -> str:
    """Return the source of a video, whose frames may be listed."""
    if isinstance(value, Mapping) and value.get("url"):
        value = value["url"]
    if isinstance(value, (list, tuple)):
        if not value:
            raise BadRowError("a video is an empty list of frames")
        return name_video([resolve_picture(each, folder) for each in value])
    return name_video(resolve_picture(value, folder, "video"))


def resolve_picture(value: Any, folder: str, kind: str = "picture") -> str:
    """Return a picture, or a file of another kind, as an absolute path or a data URI; arguments and errors as of
    `take_pictures`."""
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):  # Parquet tables of data sets
        form = "image" if kind == "picture" else kind
        return f"data:{form}/any;base64,{base64.b64encode(value['bytes']).decode()}"
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("url", "path", "image", "video") if value.get(key)), None)
    if not isinstance(value, str) or not value.strip():
        raise BadRowError(f"a {kind} is {json_type_name(value)}, not a path or a data URI")
    if value[:5].lower() == "data:":
        return value
    if value[:7].lower() == "file://":
        value = value[7:]
    elif _URL.match(value):
        raise BadRowError(
            f"the {kind} {value[:80]} is an address in a network, and nothing is fetched",
            f"fetch the {kind}s first, and name their files",
        )
    return str(Path(folder, Path(value).expanduser()).absolute())


def count_tags(turns: Iterable[Message], tag: str = TAG) -> int:
    """Return how many pictures, or videos, have their place in turns."""
    return sum(str(turn.get("content") or "").count(tag) for turn in turns)


def place_pictures(
    turns: Sequence[Message], pictures: Sequence[str], name: str, texts: Sequence[str]
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return turns with texts in place of tags, and in which order these show the pictures.

    A row with pictures and no tag at all has them before its first question (ms-swift).

    Args:
        texts: of each picture, the template's.

    Raises:
        DataError: there are more tags than pictures, or fewer.
    """
    videos = [number for number, each in enumerate(pictures) if is_video(each)]
    stills = [number for number in range(len(pictures)) if number not in videos]
    tags = {TAG: count_tags(turns), VIDEO_TAG: count_tags(turns, VIDEO_TAG)}
    if pictures and not any(tags.values()):
        first = next((number for number, turn in enumerate(turns) if turn["role"] == "user"), 0)
        before, order = "".join(texts), list(range(len(pictures)))
        return [
            {**turn, "content": f"{before}{turn.get('content') or ''}"} if number == first else turn
            for number, turn in enumerate(turns)
        ], order
    for tag, shown, what in ((TAG, stills, "pictures"), (VIDEO_TAG, videos, "videos")):
        if tags[tag] != len(shown):
            column = "images" if tag == TAG else "videos"
            raise DataError(
                f"{name}: {tags[tag]} x {tag} in the turns, {len(shown)} {what} in the row",
                f'write {tag} once for each entry of "{column}"',
            )
    order = []
    rest = {TAG: iter(stills), VIDEO_TAG: iter(videos)}

    def write_next(match: re.Match[str]) -> str:
        order.append(next(rest[match[0]]))
        return texts[order[-1]]

    return [
        {**turn, "content": _TAGS.sub(write_next, turn["content"])} if _TAGS.search(turn.get("content") or "") else turn
        for turn in turns
    ], order
