"""Documents from every format, and what bad input says."""

from __future__ import annotations

import gzip
import io
import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from anabatic.config.sections.common import Data
from anabatic.core.errors import DataError
from anabatic.data.chat.python_tool import format_python_call
from anabatic.data.readers.document import MAX_ROW_BYTES, ColumnMapping, Document
from anabatic.data.readers.file_formats import BLOCK_BYTES, iter_numbered_lines, read_text
from anabatic.data.readers.sources import DataSource, SkippedRows, read_documents

ROWS = [{"text": "first"}, {"text": "二"}, {"text": ""}, {"text": "third\nline"}]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def read(path: Path | str, rows: int | None = None, **data: Any) -> list[Document]:
    return list(read_documents(DataSource(str(path), rows), Data(**data)))


def fails(path: Path | str, **data: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        read(path, **data)
    assert caught.value.hint
    return caught.value


def _write(folder: Path, name: str) -> Path:
    path = folder / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)
    else:
        packers = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
        path.write_bytes(packers.get(path.suffix, bytes)(JSONL))
    return path


FORMATS = ("rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet")


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_every_format(name: str, tmp_path: Path) -> None:
    found = read(_write(tmp_path, name))
    assert [document.text for document in found] == ["first", "二", "third\nline"]
    assert [document.id for document in found] == [f"{name}:{row}" for row in (1, 2, 4)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_torn_file_is_reported_after_its_whole_rows(name: str, tmp_path: Path) -> None:
    path = _write(tmp_path, name)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    error = fails(path)
    assert str(path) in str(error)
    if name != "rows.jsonl":
        assert "cannot be read" in str(error)


def test_damaged_gzip_data(tmp_path: Path) -> None:
    path = _write(tmp_path, "rows.jsonl.gz")
    data = bytearray(path.read_bytes())
    data[-6] ^= 0xFF
    path.write_bytes(data)
    assert "CRC" in str(fails(path))


def test_two_frames_in_one_zstd_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(JSONL) * 2)
    assert len(read(path)) == 6


def test_text_files_are_one_document_each(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.md").write_bytes(b"# a\r\n")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfb\n")
    (tmp_path / "empty.py").touch()
    found = read(tmp_path)
    assert [(document.id, document.text) for document in found] == [
        ("b.txt:1", "b\n"),
        ("sub/a.md:1", "# a\r\n"),
    ]
    assert [document.id for document in read(f"{tmp_path}/**/*.md")] == ["sub/a.md:1"]
    assert [document.id for document in read(tmp_path, rows=1)] == ["b.txt:1"]


def test_a_big_text_file_is_read_in_blocks(tmp_path: Path) -> None:
    path = tmp_path / "big.txt"
    paragraph = "Ünïcode text of one paragraph, 一段文字。\n" * 40 + "\n"
    text = paragraph * (MAX_ROW_BYTES // len(paragraph.encode()) + 2)
    path.write_text(text, encoding="utf-8")
    pieces = [document.text or "" for document in read(path)]
    assert "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= 2 * BLOCK_BYTES
    assert all(piece.endswith("\n\n") for piece in pieces)


def test_a_big_text_file_without_any_break_is_cut_between_characters(tmp_path: Path) -> None:
    path = tmp_path / "big.txt"
    path.write_bytes("語".encode() * (MAX_ROW_BYTES // 3 + 1000))
    pieces = [document.text or "" for document in read(path)]
    assert set("".join(pieces)) == {"語"}
    assert len("".join(pieces)) == MAX_ROW_BYTES // 3 + 1000


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a"', "broken JSON: Expecting ',' delimiter at column"),
        (b"[1, 2]", "the row is a list, not an object"),
        (b'"text"', "the row is text, not an object"),
        (b'{"text": 5}', 'column "text" is a number (5), not text'),
        (b'{"text": null}', 'column "text" is null, not text'),
        (b'{"test": "a", "id": 1}', 'no column "text"; the row has "test", "id"'),
        (b"{}", 'no column "text"; the row has no columns'),
        (b'{"text": "\\ud800"}', "lone surrogate at character 0"),
        (b'{"text": "caf\xe9"}', "line 2: invalid UTF-8 at byte 30 (0xe9)"),
        (b'{"text": "a\0b"}', "a binary file: NUL byte at byte 28"),
        (b"[" * 100_000, "broken JSON"),
        (b'{"text": ' + b"9" * 5000 + b"}", "broken JSON"),
        (b'{"messages": []}', '"messages" is empty'),
        (b'{"messages": "hi"}', '"messages" is text, not a list of turns'),
        (b'{"messages": ["hi"]}', "message 1 is text, not an object"),
        (b'{"messages": [{"role": "asistant", "content": "x"}]}', 'Did you mean "assistant"?'),
        (b'{"messages": [{"role": "user", "content": 3}]}', "message 1: content is a number (3)"),
        (b'{"messages": [{"role": "user"}]}', "message 1: content is null"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": "{"}', '"tools" is not JSON'),
        (b'{"conversations": [{"from": "bot", "value": "x"}]}', "message 1 has \"from\" 'bot'"),
        (b'{"instruction": "", "output": "x"}', "both empty"),
    ],
)
def test_a_bad_row_names_file_and_line_or_is_skipped(
    line: bytes, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n\n{"text": "also good"}\n')
    error = fails(path)
    assert f"{path}: line 2" in str(error) or "binary" in words
    assert words in str(error)
    skips = SkippedRows()
    with caplog.at_level(logging.WARNING, "anabatic"):
        found = list(read_documents(DataSource(str(path)), Data(on_bad_row="skip"), skips=skips))
    assert [document.text for document in found] == ["good", "also good"]
    assert skips.count == 1
    assert "skipped 1 bad rows of 3" in caplog.text
    assert words in skips.examples[0]


def test_a_missing_column_suggests_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"contents": "x"}\n')
    assert 'Did you mean "contents"?' in fails(path, text_column="content").hint
    assert read(path, text_column="contents")[0].text == "x"


def test_only_bad_rows_are_an_error_even_when_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    error = fails(path, on_bad_row="skip")
    assert "all 2 rows are bad" in str(error) and error.hint == fails(path).hint and "--data." in error.hint
    path.write_bytes("wind".encode("utf-16"))
    assert "iconv" in fails(path, on_bad_row="skip").hint


@pytest.mark.parametrize("content", [b"\n\n", b'{"text": ""}\n'])
def test_a_file_without_any_text(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert "no document" in str(fails(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"ab\ncd\0", "NUL byte at byte 5"),
        ("text".encode("utf-16"), "UTF-16, not UTF-8"),
        (b"ab\ncaf\xe9\n", "line 2: invalid UTF-8 at byte 6 (0xe9)"),
        (b"ab\n\xe4\xb8", "line 2: invalid UTF-8 at byte 3 (0xe4)"),
    ],
)
def test_text_files_that_are_not_utf8(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    assert words in str(fails(path))
    (tmp_path / "good.txt").write_text("good")
    assert [document.text for document in read(tmp_path, on_bad_row="skip")] == ["good"]


@pytest.mark.process
def test_a_line_of_a_gigabyte_is_refused_without_being_held(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.zst"
    with open(path, "wb") as file, zstandard.ZstdCompressor().stream_writer(file) as stream:
        stream.write(b'{"text": "good"}\n{"text": "')
        for _ in range(1024):
            stream.write(b"a" * 2**20)
        stream.write(b'"}\n{"text": "after"}\n')
    assert "line 2: 1.0 GiB long, more than 64.0 MiB" in str(fails(path))
    tracemalloc.start()
    try:
        assert [document.text for document in read(path, on_bad_row="skip")] == ["good", "after"]
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_ROW_BYTES
    finally:
        tracemalloc.stop()


@given(st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line)), st.integers(1, 30), st.booleans())
def test_lines_are_numbered_and_long_ones_measured(lines: list[bytes], limit: int, ended: bool) -> None:
    data = b"\n".join(lines) + (b"\n" if ended else b"")
    expected = data.splitlines(keepends=True) if b"\r" not in data else None
    found = list(iter_numbered_lines(io.BytesIO(data), limit))
    assert [number for number, _, _ in found] == list(range(1, len(found) + 1))
    total = 0
    for _, offset, line in found:
        assert offset == total
        length = line if isinstance(line, int) else len(line)
        assert isinstance(line, int) == (length > limit)
        assert isinstance(line, int) or data[offset : offset + length] == line
        total += length
    assert total == len(data)
    plain = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
    assert len(found) == plain
    assert expected is None or len(expected) >= plain


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_any_text_survives_reading(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        plain, rows = Path(folder, "a.txt"), Path(folder, "a.jsonl")
        plain.write_bytes(text.encode())
        rows.write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
        expected = text.removeprefix("\ufeff")
        assert [
            document.text for document in read_text(plain, "a", ColumnMapping()) if isinstance(document, Document)
        ] == ([expected] if expected else [])
        assert read(rows)[0].text == text


def _parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_parquet_without_the_column(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "t.parquet", body=["x"], id=[1])
    error = fails(path, text_column="bdy")
    assert 'no column "bdy"; the file has "body", "id"' in str(error)
    assert 'Did you mean "body"?' in error.hint
    assert read(path, text_column="body")[0].text == "x"


def test_parquet_columns_of_the_wrong_type(tmp_path: Path) -> None:
    assert 'column "text" is int64, not text' in str(fails(_parquet(tmp_path / "t.parquet", text=[1, 2])))
    assert "row 2" in str(fails(_parquet(tmp_path / "n.parquet", text=["a", None])))


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"caf\xe9", b"fine"]).view(pa.string())
    path = _parquet(tmp_path / "t.parquet", text=raw)
    assert "row 2: invalid UTF-8 at byte 3" in str(fails(path))
    assert [document.text for document in read(path, on_bad_row="skip")] == ["good", "fine"]


def test_parquet_large_and_dictionary_strings(tmp_path: Path) -> None:
    large = pa.array(["a", "b"], pa.large_string())
    for name, column in (("l", large), ("d", pa.array(["a", "b"]).dictionary_encode())):
        assert [document.text for document in read(_parquet(tmp_path / f"{name}.parquet", text=column))] == [
            "a",
            "b",
        ]


def test_something_that_is_no_parquet(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(b"hello, this is not it")
    assert "cannot be read as Parquet" in str(fails(path))


TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def test_conversations_in_jsonl_and_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TURNS, "text": "ignored"}) + "\n")
    _parquet(tmp_path / "b.parquet", messages=[TURNS])
    for name in ("a.jsonl", "b.parquet"):
        (document,) = read(tmp_path / name)
        assert document.messages == TURNS
        assert document.text is None


def test_content_in_text_parts_is_the_text_of_them(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": parts}, TURNS[1]]}) + "\n")
    _parquet(
        tmp_path / "b.parquet",
        messages=[[{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]],
    )
    for name in ("a.jsonl", "b.parquet"):
        (document,) = read(tmp_path / name)
        assert document.messages == TURNS


def test_calls_of_the_python_tool_in_parts(tmp_path: Path) -> None:
    parts = [
        {"type": kind, "text": text} for kind, text in (("text", "It is "), ("python", "6*7"), ("python_output", "42"))
    ]
    turns = [TURNS[0], {"role": "assistant", "content": parts}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (document,) = read(tmp_path / "a.jsonl")
    assert document.messages is not None
    assert document.messages[1]["content"] == "It is " + format_python_call("6*7", "42")


def test_sharegpt_and_alpaca_rows(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": {"a": 1}}
    rows: list[dict[str, Any]] = [
        {
            "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
            "system": "s",
        },
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": json.dumps(call)},
                {"from": "observation", "value": "1"},
            ],
            "tools": json.dumps([{"name": "f"}]),
        },
        {"instruction": "add", "input": "1 2", "output": "3"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat, tool, alpaca = read(tmp_path / "a.jsonl")
    assert chat.messages == [{"role": "system", "content": "s"}, *TURNS]
    assert tool.tools == [{"name": "f"}]
    assert tool.messages is not None
    assert tool.messages[1]["tool_calls"] == [{"type": "function", "function": call}]
    assert tool.messages[2] == {"role": "tool", "content": "1"}
    assert alpaca.messages == [{"role": "user", "content": "add\n1 2"}, {"role": "assistant", "content": "3"}]


def test_asking_for_more_rows_than_there_are_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = _write(tmp_path, "rows.jsonl")
    with caplog.at_level(logging.WARNING, "anabatic"):
        assert len(read(path, rows=2)) == 2
        assert not caplog.text
        assert len(read(path, rows=10)) == 3
    assert "10 rows were asked for, it holds 3" in caplog.text


def test_a_file_without_permission(tmp_path: Path) -> None:
    path = _write(tmp_path, "rows.jsonl")
    path.chmod(0)
    try:
        open(path).close()
    except PermissionError:
        assert "Permission denied" in str(fails(path))
    else:
        pytest.skip("this user may read everything")


def test_the_standard_library_is_real_text() -> None:
    found = read("stdlib:")
    assert sum(len(document.text or "") for document in found) > 4_000_000
    ids = [document.id for document in found]
    assert ids == sorted(ids, key=lambda name: Path(name).parts)
    assert "stdlib:json/decoder.py" in ids
    assert not any("/test" in name or "encodings" in name or "pydoc_data" in name for name in ids)
    assert read("stdlib:", rows=3) == found[:3]


@pytest.mark.process
def test_docstrings_share_their_source_s_held_out_fate() -> None:
    found = read("stdlib:docs")
    by_id = {document.id: document.text or "" for document in found}
    assert by_id["stdlib:json/decoder.py"].startswith("module json.decoder\n\n")
    assert "JSONDecoder.raw_decode(self, s, idx=0)" in by_id["stdlib:json/decoder.py"]
    assert len(by_id) == len(found)
    assert sum(map(len, by_id.values())) > 1_000_000


def test_generated_tasks_follow_the_split() -> None:
    train = list(read_documents(DataSource("task:spelling", 20), Data()))
    held = list(read_documents(DataSource("task:spelling", 20), Data(), split="test"))
    assert len(train) == len(held) == 20
    assert train[0].id == "task:spelling:1"
    assert not {str(row.messages) for row in train} & {str(row.messages) for row in held}
