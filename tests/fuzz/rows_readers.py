"""Readers of data sets: texts, rows, tables, and what asks for an answer."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from anabatic.config.sections.common import Data
from anabatic.config.sections.train_jobs import PictureData
from anabatic.core.errors import DataError
from anabatic.data.readers import prompts, raw_rows, sources
from anabatic.data.readers.document import Document
from anabatic.data.vision.picture_files import load_picture
from anabatic.data.vision.row_objects import place_objects, split_objects
from anabatic.data.vision.row_pictures import place_pictures
from anabatic.data.vision.video_files import check_source, name_video
from fuzz.engine import Good, gzipped, zstd
from fuzz.reading import Reader

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, {"c": "d"}]}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}]
ROWS: tuple[dict[str, Any], ...] = (
    {"text": "Plain text, 普通文本, with 12 numbers: 3.5."},
    {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "How many?"}, {"type": "python", "text": "1+1"}]},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "Three."},
        ],
        "tools": TOOLS,
    },
    {
        "conversations": [
            {"from": "human", "value": "Hello"},
            {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": 1}})},
            {"from": "observation", "value": "1"},
            {"from": "gpt", "value": "One"},
        ],
        "system": "You help.",
        "tools": json.dumps(TOOLS),
    },
    {"instruction": "Add", "input": "1 2", "output": "3", "history": [["a", "b"], ["c", "d"]], "system": "s"},
    {"query": "q", "response": "r", "history": json.dumps([["a", "b"]]), "label": True},
    {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "r"}]},
    {"messages": json.dumps([{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}])},
    {"question": "What?", "answer": "That. #### 4"},
    {"prompt": "p", "chosen": "yes", "rejected": "no", "kto_tag": True},
    {
        "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}],
    },
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "rejected_response": "b"},
    {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "tool_call", "content": json.dumps({"name": "add", "arguments": {"a": 1}})},
            {"role": "tool_call", "content": json.dumps([CALL])},
            {"role": "tool_response", "content": "1"},
            {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": "{}"}},
            {"role": "function", "name": "add", "content": "2"},
            {"role": "assistant", "content": "Two", "mood": {"a": [1]}},
        ],
        "context": [{"a": [1]}],
    },
    {
        "prompt": [{"role": "user", "content": "q"}],
        "response": "I am {NAME}.",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"question": "q", "answers": ["a"]},
    },
    {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    },
)
_WORDS = "The quick brown fox, 12.5 km; 敏捷的狐狸\n\n" * 20


NESTED: list[Any] = [
    {"extra_info": {"question": "q"}, "x": json.dumps([{"a": "r"}]), "label": 1, "kto_tag": "true"}
] * 3
LISTS: list[Any] = [[{"role": "user", "content": "q"}, {"from": "gpt", "value": "I am {NAME} {{x}}"}]] * 3


def _lines(rows: Sequence[Any] = ROWS) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def _csv(mark: str) -> bytes:
    rows = [("instruction", "output", "history", "n"), ("Add 1", "2", '[["a"# "b"]]'.replace("#", ","), "7")]
    return "\n".join(
        mark.join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows * 1 + rows[1:]
    ).encode()


@cache
def parquet() -> bytes:
    """A file of nested rows, as hubs hold them."""
    import pyarrow
    import pyarrow.parquet

    turns = [{"role": "user", "content": "q 1"}, {"role": "assistant", "content": "答 2"}]
    table = pyarrow.table(
        {
            "messages": [turns] * 5,
            "text": ["a", "b", None, "d", "e"],
            "n": [1, 2, 3, 4, 5],
            "x": [0.5] * 5,
            "day": pyarrow.array([1, 2, 3, 4, 5], pyarrow.timestamp("us", "UTC")),
        }
    )
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


@cache
def text_parquet() -> bytes:
    """A file of one column of text, by dictionary."""
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two", "one"] * 200}), file, compression="zstd")
    return file.getvalue()


def _tables() -> list[Good]:
    return [Good("a.csv", _csv(",")), Good("b.tsv", _csv("\t"))]


def _packed() -> list[Good]:
    lines = _lines(ROWS[:4])
    return [Good("a.jsonl.gz", gzipped(lines), "jsonl"), Good("b.jsonl.zst", zstd(lines), "jsonl")]


def documents(path: Path) -> None:
    """Read a file as a training does, both where bad rows stop and where they are skipped."""
    for policy in ("skip", "fail"):
        data = Data(train=[str(path)], on_bad_row=policy)
        for document in sources.read_documents(sources.parse_source(str(path)), data):
            _use(document)


def _use(document: Document) -> None:
    """What every training does with a document before it is rendered."""
    if document.text is not None:
        document.text.encode()
    else:
        json.dumps([document.messages, document.tools, document.rejected]).encode()


def _nested(path: Path) -> None:
    data = Data(train=[str(path)], on_bad_row="skip", columns={"query": "extra_info.question", "response": "x.0.a"})
    for document in sources.read_documents(sources.parse_source(str(path)), data):
        _use(document)


def _asked(path: Path) -> None:
    for row in prompts.read_prompts([str(path)], {}):
        str(row)
    for row in prompts.read_prompts([str(path)], {"answer": "reward_model.ground_truth"}):
        str(row)


def _raw(path: Path) -> None:
    list(raw_rows.read_raw_rows(path))


PICTURE_ROWS: list[Any] = [
    {"messages": [{"role": "user", "content": "<image>a<image>"}, {"role": "assistant", "content": "b"}],
     "images": ["a.png", {"path": "b.png", "bytes": None}]},
    {"conversations": [{"from": "human", "value": "<image>\na"}, {"from": "gpt", "value": "b"}], "image": "a.png"},
    {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"type": "image", "image": "c.png"},
        {"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}], "rejected_response": "c"},
    {"messages": [
        {"role": "user", "content": "<video><image><ref-object>"}, {"role": "assistant", "content": "<bbox>"}],
     "videos": [["a.png", "b.png"]], "images": ["c.png"],
     "objects": {"ref": ["a"], "bbox": [[1, 2.5, 3, 4]], "bbox_type": "real", "image_id": [0]}},
]  # fmt: skip


def _picture_rows(path: Path) -> None:
    data = PictureData(train=[str(path)], on_bad_row="skip", media=str(path.parent))
    for document in sources.read_documents(sources.parse_source(str(path)), data):
        _use(document)
        for turns in (document.messages, document.rejected):
            try:
                shown, objects = split_objects(document.pictures)
                place_pictures(turns or [], shown, document.location, ["<pad>"] * len(shown))
                place_objects(turns or [], objects, document.location)
            except DataError:
                continue


def _pictures() -> list[Good]:
    from PIL import Image

    image = Image.linear_gradient("L").resize((24, 17)).convert("RGB")
    tags = Image.Exif()
    tags[0x0112] = 6  # turned
    forms: dict[str, dict[str, Any]] = {
        "png": {},
        "jpg": {"exif": tags},
        "gif": {},
        "webp": {},
        "bmp": {},
        "tif": {},
        "ppm": {},
    }
    found = []
    for ending, options in forms.items():
        file = io.BytesIO()
        image.save(file, {"jpg": "jpeg", "tif": "tiff"}.get(ending, ending), **options)
        found.append(Good(f"a.{ending}", file.getvalue()))
    return found


def _videos() -> list[Good]:
    import av
    from PIL import Image

    found = []
    for name, codec in (("a.mp4", "mpeg4"), ("b.mkv", "mjpeg"), ("c.avi", "mpeg4")):
        file = io.BytesIO()
        with av.open(file, "w", format={"mkv": "matroska"}.get(name[2:], name[2:])) as container:
            stream: Any = container.add_stream(codec, rate=25)
            stream.width, stream.height = 32, 16
            stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            for shade in range(4):
                frame = av.VideoFrame.from_image(Image.new("RGB", (32, 16), (60 * shade, 9, 9)))
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        found.append(Good(name, file.getvalue()))
    return found


READERS = [
    Reader("videos", _videos, lambda path: check_source(name_video(str(path))), 200, needs="av"),
    Reader("pictures", _pictures, lambda path: load_picture(str(path)), 400, needs="PIL"),
    Reader("rows with pictures", lambda: [Good("a.jsonl", _lines(PICTURE_ROWS), "jsonl")], _picture_rows, 250),
    Reader("text", lambda: [Good("a.txt", _WORDS.encode()), Good("b.md", _WORDS.encode())], documents),
    Reader("json lines", lambda: [Good("a.jsonl", _lines(), "jsonl")], documents, 500),
    Reader("lists of turns", lambda: [Good("a.jsonl", _lines(LISTS), "jsonl")], documents, 150),
    Reader("nested names", lambda: [Good("a.jsonl", _lines(NESTED), "jsonl")], _nested, 150),
    Reader("json", lambda: [Good("a.json", json.dumps(list(ROWS)).encode(), "json")], documents, 300),
    Reader("csv", _tables, documents, 150),
    Reader("packed lines", _packed, documents, 150),
    Reader("parquet", lambda: [Good("a.parquet", parquet()), Good("b.parquet", text_parquet())], documents, 250),
    Reader("asked", lambda: [Good("a.jsonl", _lines(), "jsonl"), Good("b.txt", _WORDS.encode())], _asked, 150),
    Reader(
        "raw rows", lambda: [Good("a.jsonl", _lines(), "jsonl"), Good("a.parquet", parquet()), *_tables()], _raw, 150
    ),
]
