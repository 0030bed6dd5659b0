"""Rows with pictures, video or sound are refused wherever rows are read, never trained as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabatic.core.errors import DataError
from anabatic.data.readers import prompts, raw_rows
from anabatic.data.readers.document import ColumnMapping, RowIssue
from anabatic.data.readers.row_parsing import row_to_document, select_needed_columns

_TURNS = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A bird."}]
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "LLaMA-Factory": ({"messages": _TURNS, "images": ["bird.jpg"]}, 'column "images"'),
    "ms-swift": ({"query": "<video>What?", "response": "A bird.", "videos": ["bird.mp4"]}, 'column "videos"'),
    "ms-swift, paths as objects": ({"messages": _TURNS, "images": [{"path": "bird.jpg"}]}, 'column "images"'),
    "sound": ({"instruction": "What?", "output": "A bird.", "audios": ["a.wav"]}, 'column "audios"'),
    "Llava": ({"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>"}]}, 'column "image"'),
    "a table": ({"messages": json.dumps(_TURNS), "images": '["bird.jpg"]'}, 'column "images"'),
    "bytes": ({"messages": _TURNS, "image": {"bytes": b"\x89PNG", "path": None}}, 'column "image"'),
}
PARTS: dict[str, dict[str, Any]] = {
    "image_url": {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}},
    "image": {"type": "image", "image": "bird.jpg"},
    "input_image": {"type": "input_image", "image_url": "https://a.example/b.png"},
    "input_audio": {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
    "video_url": {"type": "video_url", "video_url": {"url": "https://a.example/b.mp4"}},
    "audio": {"type": "audio", "audio": "a.wav"},
}


def document(row: dict[str, Any]) -> Any:
    return row_to_document(row, "id", "rows.jsonl: line 1", ColumnMapping("text", ()))


@pytest.mark.parametrize("case", ROWS)
def test_columns(case: str) -> None:
    row, told = ROWS[case]
    found = document(row)
    assert isinstance(found, RowIssue)
    assert told in found.message and "not supported" in found.message and "rows.jsonl: line 1" in found.message
    assert "rows of text" in found.hint and "on-bad-row" in found.hint
    for name in ("images", "videos", "audios", "image"):
        if name in row:
            assert name in select_needed_columns(
                list(row), ColumnMapping("text", ())
            )  # or a Parquet file would hide it


@pytest.mark.parametrize("kind", PARTS)
def test_parts_of_a_message(kind: str) -> None:
    content = [{"type": "text", "text": "What is it?"}, PARTS[kind]]
    found = document({"messages": [{"role": "user", "content": content}, _TURNS[1]]})
    assert isinstance(found, RowIssue) and f'"{kind}"' in found.message and "not supported" in found.message


@pytest.mark.parametrize("empty", [None, [], "", "[]", [None], {}])
def test_rows_of_a_mixed_data_set_without_pictures_are_text(empty: Any) -> None:
    found = document({"messages": _TURNS, "images": empty})
    assert not isinstance(found, RowIssue) and found.messages == _TURNS


@pytest.mark.parametrize("case", [name for name in ROWS if name != "bytes"])
def test_questions_and_tasks(case: str, tmp_path: Path) -> None:
    row, told = ROWS[case]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (found,) = prompts.read_prompts([str(file)], {})
    assert isinstance(found, RowIssue) and told in found.message
    with pytest.raises(DataError, match=told):
        list(raw_rows.read_raw_rows(file))
