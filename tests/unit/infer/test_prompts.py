"""Rows that ask: every shape, without its own answer; every broken one named with file and line."""

from __future__ import annotations

import gzip
import json

import pytest

from anabatic.core.errors import DataError
from anabatic.data.readers.document import RowIssue
from anabatic.data.readers.prompts import PromptRow, read_prompts

USER = {"role": "user", "content": "q"}
CASES = [
    ({"messages": [USER]}, [USER], None),
    ({"messages": [USER, {"role": "assistant", "content": "a"}]}, [USER], "a"),
    ({"system": "s", "messages": [USER]}, [{"role": "system", "content": "s"}, USER], None),
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [USER], "a"),
    ({"query": "q", "response": "a"}, [USER], "a"),
    (
        {"query": "q", "history": [["x", "y"]]},
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, USER],
        None,
    ),
    ({"prompt": "q"}, [USER], None),
    ({"prompt": [USER], "completion": "a"}, [USER], "a"),
    ({"question": "q", "answer": "a"}, [USER], "a"),
    ({"instruction": "q", "input": "", "output": "a"}, [USER], "a"),
    ({"instruction": "do", "input": "it"}, [{"role": "user", "content": "do\nit"}], None),
]


@pytest.mark.parametrize(("row", "turns", "label"), CASES)
def test_a_row_is_what_it_asks(tmp_path, row, turns, label):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (found,) = read_prompts([str(path)], {})
    assert isinstance(found, PromptRow)
    assert (found.messages, found.label, found.id) == (turns, label, f"{path}:1")


def test_files_of_all_kinds_and_other_names_of_columns(tmp_path):
    packed, lines = tmp_path / "a.jsonl.gz", tmp_path / "b.txt"
    packed.write_bytes(gzip.compress(b'{"wie": "q"}\n\n{"wie": "r"}\n'))
    lines.write_text("\ufeffq\n\n  r \n", encoding="utf-8")
    found = [row.text for row in read_prompts([str(packed)], {"query": "wie"})] + [
        row.text for row in read_prompts([str(lines)], {})
    ]
    assert found == ["q", "r", "q", "  r "]
    (text,) = read_prompts([_written(tmp_path, b'{"text": "once"}\n')], {})
    assert (text.messages, text.text) == (None, "once")


def _written(folder, content):
    path = folder / "c.jsonl"
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "broken JSON"),
        (b'{"query": "a", "query": "b"}', "stands twice"),
        (b"[1]", "the row is a list"),
        (b'{"other": 1}', 'nothing is asked.*the row has "other"'),
        (b'{"query": 5}', "is a number"),
        (b'{"question": "", "answer": "x"}', 'column "question" is empty: nothing is asked'),
        (b'{"messages": []}', "nothing is asked|is empty"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "no user's turn"),
        (b'{"messages": [{"role": "usr", "content": "a"}]}', "user"),
        (b'{"query": "\\ud800"}', "lone surrogate"),
        (b'{"query": "\xff"}', "invalid UTF-8"),
        (b"[" * 100_000, "broken JSON"),
    ],
)
def test_broken_rows_are_named(tmp_path, line, message):
    path = _written(tmp_path, b'{"query": "q"}\n' + line + b"\n" + b'{"query": "r"}\n')
    good, bad, after = read_prompts([path], {})
    assert isinstance(bad, RowIssue)
    assert bad.message.startswith(f"{path}: line 2: ")
    import re

    assert re.search(message, bad.message), bad.message
    assert (good.text, after.text) == ("q", "r")


def test_files_that_are_not_there_or_of_another_kind(tmp_path):
    path = _written(tmp_path, b'{"query": "q"}\n')
    with pytest.raises(DataError, match="does not exist.*c.jsonl"):
        list(read_prompts([path.replace("c.jsonl", "cc.jsonl")], {}))
    with pytest.raises(DataError, match="is a folder"):
        list(read_prompts([str(tmp_path)], {}))
    other = tmp_path / "x.pdf"
    other.write_text("a")
    with pytest.raises(DataError, match="has another format"):
        list(read_prompts([path, str(other)], {}))
    torn = tmp_path / "t.jsonl.gz"
    torn.write_bytes(gzip.compress(b'{"query": "q"}\n' * 50)[:-12])
    with pytest.raises(DataError, match="cannot be read after line"):
        list(read_prompts([str(torn)], {}))


def test_tables_and_arrays_are_read_as_lines_are(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"question": f"What is {n}+1?", "answer": str(n + 1)} for n in range(3)]
    (tmp_path / "q.json").write_text(json.dumps(rows))
    (tmp_path / "q.csv").write_text("question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "q.parquet")
    for name in ("q.json", "q.csv", "q.parquet"):
        path = str(tmp_path / name)
        found = list(read_prompts([path], {}))
        assert [(row.text, row.label) for row in found] == [(r["question"], r["answer"]) for r in rows]
        assert [row.id for row in found] == [f"{path}:{n}" for n in (1, 2, 3)]
