"""What once ended in a traceback, each by itself; and what would fill the memory."""

from __future__ import annotations

import gzip
import io
import json
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.config.loading import settings as settings_module
from anabatic.config.loading import yaml_reader
from anabatic.config.sections.common import Data
from anabatic.core import json_reader
from anabatic.core.errors import MAX_MESSAGE_CHARS, ConfigError, DataError
from anabatic.data.readers import sources
from anabatic.data.readers.document import ColumnMapping, RowIssue
from anabatic.data.readers.file_formats import get_reader
from anabatic.data.readers.row_parsing import row_to_document
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io.track import BadRowPolicy
from anabatic_vessels.io.track_collection import open_tracks
from fuzz.engine import zstd
from fuzz.rows_readers import ROWS, parquet
from fuzz.vessel_readers import checksum, sentences


def made(row: Any) -> object:
    """What comes of a row."""
    return row_to_document(row, "a:1", "a.jsonl: line 1", ColumnMapping("text", ()))


@pytest.mark.parametrize("cut", ["B4", "1", "B5NJ;PP00", "15M67FC000G?"])
def test_a_sentence_that_is_cut_with_a_right_sum(cut: str, tmp_path: Path) -> None:
    pytest.importorskip("pyais")
    path = tmp_path / "a.nmea"
    path.write_text(sentences().decode() + "1577837900 " + checksum(f"AIVDM,1,1,,B,{cut},0*") + "\n")
    with pytest.raises(DataError, match="line 31: "), open_tracks([path], TrackSettings(), BadRowPolicy()) as found:
        list(found)
    bad = BadRowPolicy(True)
    with open_tracks([path], TrackSettings(on_bad_row="skip"), bad) as found:
        assert sum(len(track.lat) for track in found)
    assert bad.counts["rows that cannot be read"] == 1 and "line 31" in bad.examples[0]


@pytest.mark.parametrize("speaker", [["human"], {"a": 1}, None, 7, float("nan")])
def test_a_speaker_that_is_no_text(speaker: Any) -> None:
    for key in ("from", "role"):
        found = made({"conversations": [{key: speaker, "value": "a", "content": "a"}]})
        assert isinstance(found, RowIssue) and "message 1 has" in found.message and len(found.message) < 400


@pytest.mark.parametrize("depth", [101, 600, 5000])
@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ('{"a":', "}")])
def test_nesting_ends_somewhere(opened: str, closed: str, depth: int, tmp_path: Path) -> None:
    deep = opened * depth + "1" + closed * depth
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        json_reader.loads(deep)
    good = json.dumps(ROWS[1])
    rows = [
        good[:-1] + f', "tools": {json.dumps("[" + deep + "]")}}}',
        json.dumps({"messages": "[" + deep + "]"}),
        '{"messages": [{"role": "user", "content": "q", "extra": '
        + deep
        + '}, {"role": "assistant", "content": "a"}]}',
        '{"conversations": [{"from": "function_call", "value": ' + json.dumps(deep) + "}]}",
    ]
    for number, row in enumerate(rows):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(f"{good}\n{row}\n", encoding="utf-8")
        with pytest.raises(DataError, match=r"jsonl: line 2: "):
            list(sources.read_documents(sources.parse_source(str(path)), Data(train=[str(path)])))


def test_what_is_not_deep_is_read() -> None:
    assert json_reader.loads("[" * 100 + "]" * 100)
    wide = [{"a": [1, {"b": "[" * 500}]}] * 300
    assert json_reader.loads(json.dumps(wide)) == wide


def test_a_parquet_file_whose_schema_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet().replace(b"messages", b"mess\xff\xfees"))
    reader = get_reader(path)
    assert reader is not None
    (found,) = reader(path, "a", ColumnMapping("text", ()))
    assert isinstance(found, RowIssue) and "cannot be read as Parquet after row 0" in found.message


def test_a_parquet_file_with_a_column_twice(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.Table.from_arrays([["a"], ["b"]], names=["text", "text"]), tmp_path / "a.parquet"
    )
    with pytest.raises(DataError, match='the column "text" stands twice'):
        list(sources.read_documents(sources.parse_source(str(tmp_path)), Data(train=[str(tmp_path)])))


@pytest.mark.parametrize("digits", ["0x" + "f" * 60_000, "9" * 60_000, "0o" + "7" * 400, "1_" * 400 + "1"])
def test_a_number_of_thousands_of_digits(digits: str) -> None:
    with pytest.raises(ConfigError, match=r"^a\.yaml:1: .* cannot be read as int$"):
        yaml_reader.parse_yaml(f"seed: {digits}", "a.yaml")
    with pytest.raises(ConfigError):
        settings_module.load_job("sft", [], {"seed": digits})


def test_a_message_stays_short() -> None:
    error = ConfigError("x" * 100_000 + " is no number")
    assert len(str(error)) < MAX_MESSAGE_CHARS and str(error).endswith("is no number")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst", "csv.gz"])
def test_a_bomb_does_not_fill_the_memory(ending: str, tmp_path: Path) -> None:
    """A quarter of a gigabyte without a line end, in a few hundred kilobytes."""
    path = tmp_path / f"a.{ending}"
    piece = b"a" * (1 << 20)
    if ending.endswith("gz"):
        raw = io.BytesIO()
        with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1) as file:
            for _ in range(256):
                file.write(piece)
        path.write_bytes(raw.getvalue())
    else:
        path.write_bytes(zstd(piece * 256))
    before = _peak()
    with pytest.raises(DataError):
        if ending.startswith("csv"):
            with open_tracks([path], TrackSettings(), BadRowPolicy()) as found:
                list(found)
        else:
            list(sources.read_documents(sources.parse_source(str(path)), Data(train=[str(path)])))
    assert _peak() - before < 250 << 20


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800")
KEYS = st.sampled_from([*{key for row in ROWS for key in row}, "role", "content", "from", "value", "name", "type"])
VALUES = st.recursive(
    SCALARS | st.sampled_from(["user", "assistant", "system", "human", "gpt", "function_call", "[]", "[1", "{}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=300, derandomize=True, database=None)
@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_rows_of_any_shape(row: dict[str, Any]) -> None:
    made(row)


@settings(max_examples=150, derandomize=True, database=None)
@given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12))
def test_recipes_of_any_shape(tree: Any) -> None:
    for text in (json.dumps(tree), json.dumps({"optim": tree, "data": {"train": tree}})):
        try:
            source = yaml_reader.parse_yaml(text, "a.yaml")
            settings_module.build_job("sft", source.tree, "a.yaml")
        except ConfigError as error:
            assert str(error).startswith("a.yaml")
