"""What is said of a source: formats with their counts, what was cut or left out, also from the cache."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from anabatic.config.sections.common import Data
from anabatic.core.errors import DataError
from anabatic.data.chat.loss_mask import LossPolicy
from anabatic.data.shards import dataset_cache
from anabatic_testing.tiny_corpora import write_byte_tokenizer

ALPACA = {"instruction": "Say it", "input": "", "output": "yes"}
MESSAGES = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
ADVICE = "; raise batch.seq_len to keep more, as far as the model has positions"
PAIR = {"query": "a", "response": "b"}


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def said(spec: str, tok: Path, caplog: pytest.LogCaptureFixture, data: Data | None = None, **options: Any) -> list[str]:
    """Build a source and return the lines about it."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "anabatic"):
        dataset_cache.build_dataset(spec, tok, data or Data(valid_fraction=0.0), "train", **options)
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records if "data " in record.getMessage()]


def array(path: Path, rows: list[Any]) -> str:
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return str(path)


def test_one_line_per_source_also_from_the_cache(tmp_path: Path, tok: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = array(tmp_path / "rows.json", [ALPACA] * 1200)
    (line,) = said(spec, tok, caplog)
    assert line.startswith(f"INFO data {spec} (train): 1,200 rows as alpaca (instruction, input, output); ")
    (again,) = said(spec, tok, caplog)
    assert again == line + " (from the cache)"


def test_optional_columns_make_no_format_of_their_own(
    tmp_path: Path, tok: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [ALPACA, {"instruction": "x", "output": "y"}, {**ALPACA, "system": "Be kind."}]
    (line,) = said(array(tmp_path / "rows.json", rows), tok, caplog)
    assert "3 rows as alpaca (instruction, input, output, system);" in line


def test_mixed_formats_are_each_counted(tmp_path: Path, tok: Path, caplog: pytest.LogCaptureFixture) -> None:
    (line,) = said(array(tmp_path / "rows.json", [PAIR, *[ALPACA] * 3, MESSAGES, PAIR]), tok, caplog)
    told = "3 rows as alpaca (instruction, input, output) + 2 rows as query and response (query, response)"
    assert f"{told} + 1 rows as messages (messages);" in line


def test_renamed_columns_are_said(tmp_path: Path, tok: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rows.csv").write_text("frage,antwort\na,b\n")
    data = Data(columns={"query": "frage", "response": "antwort"}, valid_fraction=0.0)
    (line,) = said(str(tmp_path / "rows.csv"), tok, caplog, data)
    assert "1 rows as query and response (query=frage, response=antwort)" in line


def test_text_and_files(tmp_path: Path, tok: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert "2 rows as plain text (text); " in said(str(tmp_path / "rows.jsonl"), tok, caplog)[0]
    (tmp_path / "a.txt").write_text("one")
    assert "1 documents; " in said(str(tmp_path / "a.txt"), tok, caplog)[0]


def test_what_is_lost_makes_the_line_a_warning(tmp_path: Path, tok: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [ALPACA] * 8 + [{"instruction": "x" * 300, "output": "y"}, {"instruction": "x", "output": ""}]
    spec = array(tmp_path / "rows.json", rows)
    data = Data(valid_fraction=0.0, on_bad_row="skip")
    for tail in ("", " (from the cache)"):
        (line,) = [one for one in said(spec, tok, caplog, data, seq_len=100) if "WARNING data" in one]
        assert "9 rows as alpaca" in line
        assert "; 1 bad rows skipped (10.0%); 1 conversations too long and left out (10.0%)" in line
        assert line.endswith(f"; the longest has 322 tokens{ADVICE}{tail}")


def test_held_out_rows_are_counted(tmp_path: Path, tok: Path, caplog: pytest.LogCaptureFixture) -> None:
    (line,) = said(array(tmp_path / "rows.json", [ALPACA] * 100), tok, caplog, Data(valid_fraction=0.1))
    assert "90 rows as alpaca" in line and "; 10 held out" in line


def test_texts_among_conversations_are_named(tmp_path: Path, tok: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.json: row 2: a text among conversations; a source is either"):
        dataset_cache.build_dataset(
            array(tmp_path / "rows.json", [ALPACA, {"text": "x"}]), tok, Data(valid_fraction=0.0), "train"
        )
    with pytest.raises(DataError, match=r"back\.json: row 2: a conversation among texts; a source is either"):
        dataset_cache.build_dataset(
            array(tmp_path / "back.json", [{"text": "x"}, ALPACA]), tok, Data(valid_fraction=0.0), "train"
        )


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.csv", "rows.tsv", "rows.parquet", "folder"])
def test_rows_and_weights_of_every_kind_of_file(
    name: str, tmp_path: Path, tok: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"query": f"q{n}", "response": f"r{n}"} for n in range(9)]
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        path = path / "rows.jsonl"
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        mark = "," if path.suffix == ".csv" else "\t"
        path.write_text("".join(mark.join(cells) + "\n" for cells in (["query", "response"], *map(dict.values, rows))))
    else:
        lines = path.suffix == ".jsonl"
        path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    made = dataset_cache.build_datasets(
        [f"{tmp_path / name}#4@0.3", f"{tmp_path / name}#2"], tok, Data(valid_fraction=0.0), "train"
    )
    assert [(one.num_docs, weight) for one, weight in made] == [(4, 0.3), (2, None)]
    assert made[0][0].meta["formats"] == {
        "query and response": {"rows": 4, "columns": ["query", "response"]},
    }


def test_a_share_is_one_of_all_rows(tmp_path: Path, tok: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = array(tmp_path / "rows.json", [{"instruction": "x" * 300, "output": "y"}] * 3 + [ALPACA])
    (line,) = said(spec, tok, caplog, seq_len=128, learning=LossPolicy(too_long="delete"))
    assert "3 conversations too long and left out (75.0%)" in line
