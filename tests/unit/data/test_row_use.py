"""What was not used of rows is said; what would be learned by mistake is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from anabatic.config.sections.common import Data
from anabatic.core.errors import DataError
from anabatic.data.chat.loss_mask import LossPolicy
from anabatic.data.readers import row_use, sources
from anabatic.data.readers.document import Document
from anabatic.data.readers.row_parsing import read_label
from anabatic.data.shards import dataset_cache
from anabatic_testing.tiny_corpora import write_byte_tokenizer

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write_rows(path: Path, rows: list[Any]) -> str:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        heading = list(rows[0])
        cells = [heading, *([str(row[name]) for name in heading] for row in rows)]
        path.write_text("".join(",".join(f'"{cell}"' for cell in line) + "\n" for line in cells))
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(spec: str, **options: Any) -> list[Document]:
    return list(sources.read_documents(sources.parse_source(spec), Data(**options)))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
@pytest.mark.parametrize(
    ("row", "unused"),
    [
        ({"query": "a", "response": "b", "context": "c", "id": "7", "source_url": "x"}, ("context",)),
        ({"text": "a", "instruction": "b", "output": "c", "url": "u", "token_count": "5"}, ("instruction", "output")),
        ({"instruction": "a", "output": "b", "thought": "", "score": "5"}, ("score",)),
        ({"query": "a", "response": "b", "label": "true"}, ()),
        ({"query": "a", "response": "b", "label": "4"}, ("label",)),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "0.5"}, ("margin",)),
    ],
)
def test_columns_that_nothing_reads(name: str, row: dict[str, str], unused: tuple[str, ...], tmp_path: Path) -> None:
    if name.endswith("parquet") and "thought" in row:
        row = {**row, "thought": None}  # type: ignore[dict-item]
    (document,) = read(write_rows(tmp_path / name, [row]))
    assert document.row_format.unused == unused


def test_keys_of_turns_that_no_template_reads(tmp_path: Path) -> None:
    turns = [TURNS[0], {**TURNS[1], "emotion": "glad", "timestamp": 5, "mood": None}]
    (document,) = read(write_rows(tmp_path / "rows.jsonl", [{"messages": turns}]))
    assert document.row_format.unused == ("messages[].emotion",)


@pytest.mark.parametrize(
    "name", ["id", "Unnamed: 0", "__index_level_0__", "conversation_id", "language_score", "URL", ""]
)
def test_metadata(name: str) -> None:
    assert row_use.is_metadata(name)


@pytest.mark.parametrize("name", ["label", "score", "context", "image_url", "reference_answer", "weight", "title"])
def test_no_metadata(name: str) -> None:
    assert not row_use.is_metadata(name)


def test_a_training_says_it_once_with_counts(tmp_path: Path, tok: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"messages": TURNS, "score": 1}] * 60 + [{"messages": TURNS, "score": 1, "context": "c", "id": 1}] * 40
    spec = write_rows(tmp_path / "rows.jsonl", rows)
    data = Data(train=[spec], valid_fraction=0.1)
    for _ in ("built", "from the cache"):
        caplog.clear()
        with caplog.at_level(logging.INFO, "anabatic"):
            for split in ("train", "valid"):
                dataset_cache.build_dataset(spec, tok, data, split)  # type: ignore[arg-type]
        (line,) = [one.getMessage() for one in caplog.records if "not used" in one.getMessage()]
        assert line.startswith(f'data {spec}: columns that were not used: "score" (90 rows), "context" (3')


def test_the_worse_answer_of_a_pair_is_not_used_by_sft(
    tmp_path: Path, tok: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3)
    for pairs in (False, True):
        caplog.clear()
        dataset_cache.build_dataset(spec, tok, Data(valid_fraction=0), "train", learning=LossPolicy(pairs=pairs))
        assert ('not used: "rejected" (3 rows)' in caplog.text) is not pairs


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({"label": True}, True),
        ({"kto_tag": False}, False),
        ({"kto_tag": "False"}, False),
        ({"kto_tag": 0}, False),
        ({"label": 0}, None),
        ({"label": "good"}, None),
        ({"label": None, "kto_tag": "true"}, True),
        ({"kto_tag": []}, None),
    ],
)
def test_labels(row: dict[str, Any], label: bool | None) -> None:
    assert read_label(row) is label


@pytest.mark.parametrize("key", ["kto_tag", "label"])
def test_bad_answers_are_not_learned(key: str, tmp_path: Path, tok: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"messages": TURNS, key: True}, {"messages": TURNS, key: False}, {"messages": TURNS, key: True}]
    spec = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"rows\.jsonl: line 2: the answer is marked as a bad one") as caught:
        dataset_cache.build_dataset(spec, tok, Data(valid_fraction=0), "train")
    assert "--loss-type kto" in caught.value.hint
    made = dataset_cache.build_dataset(spec, tok, Data(valid_fraction=0, on_bad_row="skip"), "train")
    assert made.num_docs == 2 and made.counts["bad"] == 1


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ("我是{{NAME}}，由{{AUTHOR}}训练。", "{{NAME}} and {{AUTHOR}}"),
        ("<think>\n\n</think>\n\nI am {{name}}.", "{{name}}"),
        ("I was made by {{ author }}.", "{{ author }}"),
    ],
)
def test_names_that_were_never_put_in(answer: str, names: str, tmp_path: Path) -> None:
    spec = write_rows(tmp_path / "rows.jsonl", [{"query": "Who?", "response": answer}, {"query": "a", "response": "b"}])
    with pytest.raises(DataError) as caught:
        read(spec)
    assert f"line 1: the row says {names}, which" in str(caught.value) and "sed -e 's/{{" in caught.value.hint
    assert len(read(spec, on_bad_row="skip")) == 1


@pytest.mark.parametrize(
    "answer",
    [
        "Write `{{name}}`.",
        "<b>{{name}}</b>",
        "Dear {{name}}, on {{date}} we",
        "{% if a %}{{ name }}{% endif %}",
        "{name}",
    ],
)
def test_texts_about_templates_are_read(answer: str, tmp_path: Path) -> None:
    assert len(read(write_rows(tmp_path / "rows.jsonl", [{"query": "Show", "response": answer}]))) == 1
    asked = {"query": "Fill in this template: Dear {{name}}", "response": "Dear {{name}}, hello"}
    assert len(read(write_rows(tmp_path / "asked.jsonl", [asked]))) == 1
