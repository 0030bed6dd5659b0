"""Bad input of every kind is an error with file, row and what to do, or is skipped and counted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from anabatic.config.sections.common import Data
from anabatic.core.errors import DataError
from anabatic.data.chat import rendering
from anabatic.data.readers import file_formats
from anabatic.data.shards import dataset_cache
from anabatic.data.tokenizer import hf_folder
from anabatic_testing.tiny_corpora import write_byte_tokenizer
from suite.rendered_rows import tokenize_conversations

GOOD = '{"instruction": "a", "output": "b"}'
USER, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def built(path: Path, tok: Path, **options: Any) -> Any:
    return dataset_cache.build_dataset(str(path), tok, Data(valid_fraction=0.0, **options), "train", seq_len=4096)


def messages(*turns: Any) -> str:
    return json.dumps({"messages": list(turns)})


BAD_ROWS = [
    ('{"instruction": "a"}', 'no column "output", which goes with "instruction"; the row has "instruction"'),
    ('{"prompt": "a"}', r'no column .*"completion" or "response", which goes with "prompt"'),
    ('{"instruction": "a", "output": null}', '"output" is empty: nothing to learn'),
    ('{"instruction": "a", "output": ""}', '"output" is empty: nothing to learn'),
    ('{"instruction": "a", "output": 5}', 'column "output" is a number'),
    ('{"instruction": "", "output": "b"}', '"instruction" and "input" are both empty'),
    ('{"messages": []}', '"messages" is empty'),
    ('{"messages": null}', '"messages" is null, not a list of turns'),
    ('{"messages": "hello"}', '"messages" is text, not a list of turns'),
    (messages(USER), "1 messages, none of them by the assistant: nothing to learn"),
    (messages(SAID, USER), "message 1 is the assistant's, but nobody has asked anything before"),
    (messages(USER, SAID, {"role": "system", "content": "x"}), "message 3 has the role 'system', but comes after"),
    (messages({"role": "assitant", "content": "x"}), "message 1 has the role 'assitant'.*Did you mean \"assistant\"?"),
    (messages({"from": "bot", "value": "x"}), "message 1 has \"from\" 'bot', not one of"),
    (messages(USER, {"role": "assistant", "content": [1]}), "message 2: content is a list, not text"),
    (messages(USER, {"role": "assistant", "content": []}), "message 2: content is a list, not text or parts of text"),
    (
        messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, SAID),
        'message 1 has a part of the type "image_url": pictures, video and sound are not supported',
    ),
    (
        messages(USER, {**SAID, "weight": 0.5}),
        "a turn of the assistant has weight 0.5, and a turn is learned wholly or",
    ),
    (messages(USER, {**SAID, "weight": 0}), "none of the assistant's 1 turns is learned"),
    (messages(USER, {**SAID, "weight": "1"}), "has weight '1'"),
    ('{"instruction": "a", "output": "b", "output": "c"}', 'the key "output" stands twice'),
    ('{"messages": [{"role": "user", "role": "assistant", "content": "c"}]}', 'the key "role" stands twice'),
    ('{"instruction": "\\ud83d", "output": "c"}', 'column "instruction" has a lone surrogate at character 0'),
    (messages(USER, {"role": "assistant", "content": "x\udc00"}), "content of message 2 has a lone surrogate at ch"),
    (messages(USER, {**SAID, "reasoning_content": "\udc00"}), "reasoning_content of message 2 has a lone surrogate"),
    (messages(USER, {**SAID, "tool_calls": [{"function": {"name": "\ud800"}}]}), "tool_calls of message 2 has a lone"),
    (
        '{"messages": [{"role": "user", "content": "a"}], "tools": [{"\\udc00": 1}]}',
        '"tools" has a lone surrogate at character 0',
    ),
    ('{"chosen": "a", "rejected": "b"}', '"chosen" is text, but no prompt'),
    ("[1, 2]", "the row is a list, not an object"),
    ("5", "the row is a number"),
    ('{"text": "x"}', "a text among conversations; a source is either"),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS)
@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_file_and_row_are_named(kind: str, row: str, words: str, tmp_path: Path, tok: Path) -> None:
    path = tmp_path / f"rows.{kind}"
    path.write_text("\n".join([GOOD, row, GOOD]) if kind == "jsonl" else f"[{GOOD},\n{row},\n{GOOD}]")
    with pytest.raises(DataError, match=rf"rows\.{kind}: (row|line) 2: .*{words}") as caught:
        built(path, tok)
    assert caught.value.hint


@pytest.mark.parametrize(("row", "words"), BAD_ROWS[:-1])
@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_or_the_row_alone_is_passed_over(kind: str, row: str, words: str, tmp_path: Path, tok: Path) -> None:
    path = tmp_path / f"rows.{kind}"
    path.write_text("\n".join([GOOD, row, GOOD]) if kind == "jsonl" else f"[{GOOD},\n{row},\n{GOOD}]")
    made = built(path, tok, on_bad_row="skip")
    assert made.num_docs == 2
    assert made.counts["bad"] + made.counts["unread"] == 1


def test_a_row_with_a_key_twice_may_end_in_a_later_block(
    tmp_path: Path, tok: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_formats, "BLOCK_BYTES", 16)
    path = tmp_path / "rows.json"
    path.write_text(f'[{GOOD}, {{"tools": [{{"a": 1, "a": 2}}], "instruction": "{"x" * 90}", "output": "y"}}, {GOOD}]')
    assert built(path, tok, on_bad_row="skip").num_docs == 2
    with pytest.raises(DataError, match=r'row 2: the key "a" stands twice'):
        built(path, tok)


TORN = [
    ("rows.json", b'[{"instruction": "a", "output": "b"}, {"instr', "row 2: broken JSON: .*; no row from there on is"),
    ("rows.json", b'[{"instruction": "a\x00", "output": "c"}]', "row 1: broken JSON: a NUL character; no row from"),
    ("rows.json", b'[{"instruction": "a", "output": "\xed\xa0\x80"}]', "row 1 or a later one: invalid UTF-8"),
    ("rows.json", b"[]", "no document: its files hold no rows"),
    ("rows.jsonl", b'{"instruction": "a\x00", "output": "c"}\n', "a binary file: NUL byte at byte 18"),
    ("rows.jsonl", b'{"instruction": ' + b"[" * 100_000 + b"\n", "line 1: broken JSON: "),
    ("rows.jsonl", b'{"instruction": ' + b"1" * 5000 + b"}\n", "line 1: broken JSON: "),
    ("rows.csv", b"query,response\na,b\nc,\n", 'row 2 \\(line 3\\): "response" is empty: nothing to learn'),
    ("rows.csv", b"query,response\na,b\n,c\n", 'row 2 \\(line 3\\): "query" is empty'),
    ("rows.csv", b"query,response\na,b\nc\n", "row 2 \\(line 3\\): 1 cells, the heading has 2"),
    ("rows.csv", b"query,response\na,b\nd,e,f\n", "row 2 \\(line 3\\): 3 cells, the heading has 2"),
    ("rows.csv", b"query,query\na,b\n", 'the column "query" stands twice in the heading'),
    ("rows.csv", b"frage,antwort\na,b\n", 'row 1 \\(line 2\\): no column "text"; the row has "frage", "antwort"'),
    ("rows.csv", b"query,response\n", "no document: its files hold no rows"),
    ("rows.csv", b'query,response\na,"b\n', "row 1 .up to line 2.: broken CSV: .*; no row from there on is read"),
    ("rows.csv", b"query,response\na,\xff\n", "row 1 or a later one: invalid UTF-8"),
    ("rows.tsv", b"query\tresponse\na\tb\nc\n", "row 2 .line 3.: 1 cells"),
]


@pytest.mark.parametrize(("name", "content", "words"), TORN)
def test_torn_and_ragged_files(name: str, content: bytes, words: str, tmp_path: Path, tok: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{re.escape(name)}: {words}") as caught:
        built(tmp_path / name, tok)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "place"), [("rows.jsonl", "line 3"), ("rows.json", "row 3"), ("rows.csv", r"row 3 \(line 4\)")]
)
def test_a_row_unlike_those_before_it(name: str, place: str, tmp_path: Path, tok: Path) -> None:
    row = '{"query": "a", "response": "b"}'
    content = {
        "rows.jsonl": f'{row}\n{row}\n{{"x": 1}}\n',
        "rows.json": f'[{row}, {row}, {{"x": 1}}]',
        "rows.csv": "query,response\na,b\na,b\n,b\n",
    }
    (tmp_path / name).write_text(content[name])
    words = '"query" is empty' if name == "rows.csv" else 'no column "query", "response", which the rows before have'
    with pytest.raises(DataError, match=rf"{re.escape(name)}: {place}: {words}") as caught:
        built(tmp_path / name, tok)
    assert "--data.on-bad-row skip" in caught.value.hint


def test_a_nul_in_a_table(tmp_path: Path, tok: Path) -> None:
    """Python 3.10's reader refuses it itself."""
    (tmp_path / "rows.csv").write_bytes(b"query,response\na\x00,b\n")
    with pytest.raises(DataError, match=r"rows\.csv: .*NUL"):
        built(tmp_path / "rows.csv", tok)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"query": [1, 2], "response": ["a", "b"]}, 'row 1: column "query" is a number'),
        ({"query": ["a", None], "response": ["a", "b"]}, 'row 2: "query" is empty'),
        ({"query": [b"a"], "response": ["a"]}, 'row 1: column "query" is bytes, not text'),
        ({"messages": ["a"]}, 'row 1: "messages" is text, not a list of turns'),
        ({"messages": [[1, 2]]}, "row 1: message 1 is a number"),
        ({"instruction": ["a"]}, 'no column "output", which goes with "instruction"; the file has "instruction"'),
        ({"x": ["a"]}, 'no column "text"; the file has "x"'),
    ],
)
def test_parquet_of_the_wrong_types(columns: dict[str, list[Any]], words: str, tmp_path: Path, tok: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=rf"rows\.parquet: {words}") as caught:
        built(tmp_path / "rows.parquet", tok)
    assert caught.value.hint


def test_folders_without_anything_to_read(tmp_path: Path, tok: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: no file with text, no files at all"):
        built(tmp_path / "empty", tok)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"images: no file with text, 1 other files \(\.png\)") as caught:
        built(tmp_path / "images", tok)
    assert ".jsonl" in caught.value.hint


@pytest.mark.process
def test_what_looks_bad_and_is_not(tmp_path: Path, tok: Path) -> None:
    """Emoji of several code points, surrogate pairs, an escaped NUL, a row of a megabyte, turns spelt as JSON."""
    long, family = "x" * 2**20, "👨‍👩‍👧 👋🏽"
    rows = [
        json.dumps({"instruction": "a", "output": family}),
        json.dumps({"instruction": "a", "output": family}, ensure_ascii=False),
        '{"instruction": "a\\u0000b", "output": "c"}',
        json.dumps({"instruction": "a", "output": long}),
        json.dumps({"messages": json.dumps([USER, SAID])}),
        json.dumps({"instruction": "a", "output": "b", "history": json.dumps([["c", "d"]])}),
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    made = dataset_cache.build_dataset(str(tmp_path / "rows.jsonl"), tok, Data(valid_fraction=0.0), "train")
    load = hf_folder.load_tokenizer(tok)
    said = []
    for i in range(made.num_docs):
        ids, mask = made.read_entry(i)
        assert mask is not None
        said.append(load.decode(ids[mask == 1].tolist()).replace("<|im_end|>", "|"))
    assert said == [f"{family}|", f"{family}|", "c|", f"{long}|", "b|", "d|b|"]


def test_a_tokenizer_without_end_or_padding(tmp_path: Path) -> None:
    """Padding is never learned nor seen, so any token will do; texts and conversations must end somewhere."""
    folder = write_byte_tokenizer(tmp_path / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for key in ("eos_token", "pad_token"):
        config[key] = None
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").unlink()
    (tmp_path / "rows.jsonl").write_text(GOOD)
    assert built(tmp_path / "rows.jsonl", folder).num_docs == 1  # it knows <|endoftext|>
    text = (folder / "tokenizer.json").read_text().replace("<|endoftext|>", "<|other|>")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match="tokenizer: no token that ends a text") as caught:
        built(tmp_path / "rows.jsonl", folder)
    assert "eos_token" in caught.value.hint


def test_templates_without_marks_and_without_turns(tmp_path: Path) -> None:
    """Without marks the turns are found by difference; where the template hides a turn nothing can be found."""
    folder = write_byte_tokenizer(tmp_path / "tokenizer")
    load = hf_folder.load_tokenizer(folder)
    turn, ask = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", "<|im_start|>assistant\n"
    asking = f"{{% if add_generation_prompt %}}{ask}{{% endif %}}"
    load.chat_template = f"{{% for m in messages %}}{turn}{{% endfor %}}{asking}"
    ids, mask = tokenize_conversations([[USER, SAID]], load)[0]
    assert load.decode(ids[mask == 1]) == "b<|im_end|>"
    load.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"row 7: the chat template leaves out message 2") as caught:
        rendering.render_conversations([[USER, SAID]], load, names=["row 7"])
    assert "generation" in caught.value.hint


def test_the_whole_path_is_named_where_only_the_template_can_tell(tok: Path, tmp_path: Path) -> None:
    """Of two files called alike, the one with the fault is named."""
    for name, weight in (("a", 1), ("b", 0.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text(messages(USER, {**SAID, "weight": weight}) + "\n")
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}/b/rows.jsonl: line 1: a turn of the assistant")):
        built(tmp_path, tok)


def test_the_column_of_broken_json_is_where_it_breaks(tok: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(GOOD + '\n{"instruction": "a", \n')
    with pytest.raises(DataError, match=r"line 2: broken JSON: .* at column (19|20|21|22)"):
        built(tmp_path / "rows.jsonl", tok)


def test_a_name_that_is_none_of_ours(tok: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"q": "a", "response": "b"}\n')
    with pytest.raises(DataError) as caught:
        built(tmp_path / "rows.jsonl", tok, columns={"qurey": "q"})
    assert 'none of ours is "qurey". Did you mean "query"?' in caught.value.hint
