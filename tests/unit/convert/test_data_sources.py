"""Data of other programs as sources of ours: entries of a dataset_info.json, data sets of hubs, columns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from anabatic.config.loading import yaml_reader
from anabatic.convert import converter, dataset_info, peer_tables
from anabatic.data.chat import conversation_formats
from anabatic.data.readers.document import ColumnMapping, Document
from anabatic.data.readers.row_parsing import row_to_document
from anabatic.hub import dataset_name


def data_of(peer: str, *words: str) -> tuple[dict[str, Any], list[str]]:
    """Return the section `data` of the recipe, and the notes."""
    made = converter.convert_command(peer, words)
    return yaml_reader.parse_yaml(made.text, "printed").tree["data"], made.messages


def factory(folder: Path, info: dict[str, Any], **settings: Any) -> tuple[dict[str, Any], list[str]]:
    """Return what becomes of LLaMA-Factory's settings beside a dataset_info.json."""
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    given = {"model_name_or_path": "M", "stage": "sft", "dataset": ",".join(info), "dataset_dir": ".", **settings}
    (folder / "x.yaml").write_text(yaml_reader.dump_yaml(given), encoding="utf-8")
    return data_of("llamafactory", str(folder / "x.yaml"))


TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
CHAT_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
ROWS: list[tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = [
    ({}, {"instruction": "q", "input": "", "output": "a"}, {}),
    ({"columns": {"prompt": "f", "response": "r"}}, {"f": "q", "r": "a"}, {"query": "f", "response": "r"}),
    (
        {"columns": {"prompt": "instruction", "response": "output"}},
        {"instruction": "q", "input": "not read", "output": "a"},
        {"query": "instruction", "response": "output"},
    ),
    (
        {"columns": {"prompt": "f", "query": "g", "response": "r", "system": "s"}},
        {"f": "q", "g": "", "r": "a", "s": ""},
        {"instruction": "f", "input": "g", "output": "r", "system": "s"},
    ),
    ({"columns": {"prompt": "question", "response": "answer"}}, {"question": "q", "answer": "a"}, {}),
    ({"formatting": "sharegpt"}, {"conversations": TURNS}, {}),
    ({"formatting": "sharegpt", "columns": {"messages": "talk"}}, {"talk": TURNS}, {"messages": "talk"}),
    (
        {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": CHAT_TAGS},
        {"messages": CHAT},
        {},
    ),
    ({"formatting": "openai", "columns": {"messages": "talk"}}, {"talk": CHAT}, {"messages": "talk"}),
]


@pytest.mark.parametrize(("entry", "row", "columns"), ROWS)
def test_rows_of_an_entry_are_read(
    entry: dict[str, Any], row: dict[str, Any], columns: dict[str, str], tmp_path: Path
) -> None:
    """What the recipe says of columns makes a row one question and one answer."""
    data, notes = factory(tmp_path, {"mine": {"file_name": "mine.json", **entry}})
    assert data["train"] == ["mine.json"]
    assert data.get("columns", {}) == columns
    assert not any("mine:" in note for note in notes)
    read = row_to_document(row, "1", "row 1", ColumnMapping(renamed_columns=tuple(columns.items())))
    assert isinstance(read, Document)
    assert [turn["content"] for turn in read.messages or []] == ["q", "a"]


@pytest.mark.parametrize(
    ("entry", "row"),
    [
        (
            {"ranking": True, "columns": {"prompt": "f", "chosen": "good", "rejected": "bad"}},
            {"f": "q", "good": "a", "bad": "b"},
        ),
        (
            {"ranking": True, "columns": {"prompt": "instruction", "query": "input", "chosen": "c", "rejected": "r"}},
            {"instruction": "q", "input": "", "c": "a", "r": "b"},
        ),
        (
            {
                "ranking": True,
                "formatting": "sharegpt",
                "columns": {"messages": "talk", "chosen": "good", "rejected": "bad"},
            },
            {"talk": TURNS[:1], "good": TURNS[1], "bad": {"from": "gpt", "value": "b"}},
        ),
    ],
)
def test_pairs_of_an_entry_are_read(entry: dict[str, Any], row: dict[str, Any], tmp_path: Path) -> None:
    data, _ = factory(tmp_path, {"pairs": {"file_name": "pairs.json", **entry}}, stage="dpo")
    columns = tuple(data.get("columns", {}).items())
    read = row_to_document(row, "1", "row 1", ColumnMapping(renamed_columns=columns))
    assert isinstance(read, Document)
    assert read.rejected is not None
    assert [turn["content"] for turn in (read.messages or [])] == ["q", "a"]
    assert read.rejected[-1]["content"] == "b"


def test_labels_of_single_answers(tmp_path: Path) -> None:
    columns = {"prompt": "prompt", "response": "completion", "kto_tag": "good"}
    data, _ = factory(tmp_path, {"a": {"file_name": "a.json", "columns": columns}}, stage="kto")
    assert data["columns"] == {"label": "good"}


def test_text_of_an_entry(tmp_path: Path) -> None:
    data, _ = factory(tmp_path, {"a": {"file_name": "a.jsonl", "columns": {"prompt": "content"}}}, stage="pt")
    assert data["text_column"] == "content"
    assert "columns" not in data


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ({"formatting": "sharegpt", "tags": {"role_tag": "speaker", "content_tag": "text"}}, "rename these keys"),
        (
            {"formatting": "sharegpt", "tags": {"user_tag": "asker"}},
            "user_tag asker: turns of that speaker are refused",
        ),
        ({"formatting": "sharegpt", "tags": {"odd_tag": "x"}}, "tags.odd_tag: not known"),
        (
            {"columns": {"prompt": "q", "response": "r", "images": "pics"}},
            "pics: pictures are read from a column `images`",
        ),
        (
            {"columns": {"prompt": "q", "response": "r", "videos": "clips"}},
            "clips: videos are read from a column `videos`",
        ),
        ({"columns": {"prompt": "q", "response": "r", "odd": "x"}}, "columns.odd: not known"),
        ({"subset": "en"}, "subset en: files have none"),
        ({"formatting": "odd"}, "formatting odd: not known"),
        ({"odd": 1}, "odd: not known to this converter"),
        ({"script_url": "x"}, "no script is run"),
        ({"cloud_file_name": "s3://x"}, "a bucket has its rows"),
        ({"hf_hub_url": "imdb"}, "a hub needs OWNER/NAME"),
        ({"om_hub_url": "a/b"}, "openMind's hub is not read"),
        ({"hf_hub_url": "a/b", "folder": "python"}, "the whole data set is read"),
        ({"hf_hub_url": "a/b", "split": "train+test"}, "one split is read at a time"),
    ],
)
def test_what_is_not_carried_over_is_named(entry: dict[str, Any], word: str, tmp_path: Path) -> None:
    _, notes = factory(tmp_path, {"mine": {"file_name": "mine.json", **entry}})
    assert len([note for note in notes if note.startswith("left out: mine: ") and word in note]) == 1


HUB = {"hf_hub_url": "a/b", "ms_hub_url": "c/d"}


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        (HUB, "hf:a/b:train"),
        ({"ms_hub_url": "c/d"}, "ms:c/d:train"),
        ({**HUB, "subset": "en", "split": "test"}, "hf:a/b/en:test"),
        ({**HUB, "split": "train[:100]"}, "hf:a/b:train#100"),
        ({**HUB, "num_samples": 7}, "hf:a/b:train#7"),
    ],
)
def test_entries_of_hubs(entry: dict[str, Any], source: str, tmp_path: Path) -> None:
    data, _ = factory(tmp_path, {"mine": entry})
    assert data["train"] == [source]
    assert dataset_name.split_spec(source)


def test_modelscope_where_a_variable_says_so(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": HUB}))
    command = f"USE_MODELSCOPE_HUB=1 llamafactory-cli train model_name_or_path=M dataset=mine dataset_dir={tmp_path}"
    assert data_of("llamafactory", command)[0]["train"] == ["ms:c/d:train"]


def test_counts_of_the_list_and_of_the_settings(tmp_path: Path) -> None:
    info = {"few": {"file_name": "a.json", "num_samples": 5}, "many": {"file_name": "b.json"}}
    data, _ = factory(tmp_path, info, max_samples=9)
    assert data["train"] == ["a.json#5", "b.json#9"]


def test_held_out_names_of_the_list(tmp_path: Path) -> None:
    columns = {"prompt": "f", "response": "r"}
    info = {"mine": {"file_name": "mine.json", "columns": columns}, "test": {"file_name": "t.json", "columns": columns}}
    data, notes = factory(tmp_path, info, dataset="mine", eval_dataset="test")
    assert (data["train"], data["valid"]) == (["mine.json"], ["t.json"])
    assert not any("columns" in note for note in notes)


def test_columns_of_several_data_sets(tmp_path: Path) -> None:
    info = {
        "a": {"file_name": "a.json", "columns": {"prompt": "f", "response": "r"}},
        "b": {"file_name": "b.json"},
    }
    data, notes = factory(tmp_path, info)
    assert data["columns"] == {"query": "f", "response": "r"}
    told = [note for note in notes if note.startswith("left out: columns of b (names of their own)")]
    assert len(told) == 1
    assert "rows of b are refused" in told[0]


def test_shares_of_data_sets(tmp_path: Path) -> None:
    info = {"a": {"file_name": "a.json"}, "b": {"file_name": "b.json"}}
    data, notes = factory(tmp_path, info, interleave_probs="0.3,0.7", mix_strategy="interleave_under")
    assert data["train"] == ["a.json@0.3", "b.json@0.7"]
    assert any("shares of the tokens, not of the rows" in note for note in notes)
    data, notes = factory(tmp_path, info, interleave_probs="0.3")
    assert data["train"] == ["a.json", "b.json"]
    assert any(note.startswith("left out: interleave_probs: ") for note in notes)


def test_names_of_factory_s_own_list() -> None:
    data, _ = data_of("llamafactory", "llamafactory-cli train dataset=firefly model_name_or_path=M")
    assert data["train"] == ["hf:YeungNLP/firefly-train-1.1M:train"]
    assert data["columns"] == {"query": "input", "response": "target"}
    data, notes = data_of("llamafactory", "llamafactory-cli train dataset=identity model_name_or_path=M")
    assert any(note.startswith("changed: identity: a name of a list") for note in notes)


@pytest.mark.parametrize(
    ("typed", "sources"),
    [
        ("a/b", ["ms:a/b:train"]),
        ("a/b#500", ["ms:a/b:train#500"]),
        ("a/b:default#500", ["ms:a/b:train#500"]),
        ("a/b:en/zh#500", ["ms:a/b/en:train#250", "ms:a/b/zh:train#250"]),
        ("HF::a/b:en", ["hf:a/b/en:train"]),
        ("ms::a/b --use_hf true", ["ms:a/b:train"]),
        ("a/b#9 --use_hf true", ["hf:a/b:train#9"]),
        ("a/b --use_hf false", ["ms:a/b:train"]),
        ("rows.jsonl#500 a/b", ["rows.jsonl#500", "ms:a/b:train"]),
        ("./a/b", ["./a/b"]),
        ("code-alpaca-en#3", ["ms:wyj123456/code_alpaca_en:train#3"]),
    ],
)
def test_data_sets_of_swift(typed: str, sources: list[str]) -> None:
    data, notes = data_of("swift", f"swift sft --model M --dataset {typed}")
    assert data["train"] == sources
    for source in sources:
        assert not source.startswith(("hf:", "ms:")) or dataset_name.split_spec(source)
    if "a/b" in typed and not typed.startswith("."):
        assert len([note for note in notes if "no file here, so a data set of" in note]) == 1


def test_a_folder_that_is_here_is_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert data_of("swift", "swift sft --model M --dataset a/b#5")[0]["train"] == ["a/b#5"]


def test_paths_of_own_scripts_are_no_names_of_a_hub() -> None:
    words = "torchrun train.py --model_name_or_path M"
    assert data_of("deepspeed", f"{words} --dataset_name a/b")[0]["train"] == ["hf:a/b:train"]
    data, notes = data_of("deepspeed", f"{words} --data_path a/b")
    assert data["train"] == ["a/b"]
    assert any("changed: a/b: a name of a list or hub" in note for note in notes)


def test_columns_of_swift() -> None:
    line = "swift sft --model M --dataset a.jsonl --columns"
    data, _ = data_of("swift", f"""{line} '{{"text1": "query", "text2": "response", "system": "system"}}'""")
    assert data["columns"] == {"query": "text1", "response": "text2"}
    for typed in ("'[1]'", "'{torn'", """'{"a": 1}'"""):
        with pytest.raises(converter.ConfigError, match="--columns"):
            converter.convert_command("swift", [f"{line} {typed}"])


def test_placeholders_of_self_cognition_are_told() -> None:
    line = "swift sft --model M --model_name Robin --model_author Lab --dataset"
    _, notes = data_of("swift", f"{line} swift/self-cognition#50")
    told = [note for note in notes if "{{NAME}}" in note]
    assert len(told) == 1
    assert told[0].startswith("left out: --model_name Robin, --model_author Lab")
    _, notes = data_of("swift", f"{line} a.jsonl")
    assert any(note.startswith("not needed: --model_name Robin, --model_author Lab") for note in notes)


@pytest.mark.parametrize("peer", ["swift", "llamafactory"])
def test_lists_of_data_sets_are_whole(peer: str) -> None:
    for name, entry in peer_tables.load_tables(peer).datasets.items():
        for hub in ("hf", "ms"):
            found = dataset_info.read_entry(name, entry, "", hub)
            assert found.sources, name
            assert not [problem for problem in found.problems if not problem.startswith("folder")], name
            assert all(dataset_name.split_spec(source) for source in found.sources)


def test_speakers_are_those_that_rows_may_have() -> None:
    """The table beside what the readers of rows take; calls and results may be added there."""
    for tag, words in dataset_info.SPEAKERS["from"].items():
        for word in words:
            role = conversation_formats.SHAREGPT_ROLES[word]
            assert role == {"user_tag": "user", "system_tag": "system", "observation_tag": "tool"}.get(tag, "assistant")
    assert {word for words in dataset_info.SPEAKERS["role"].values() for word in words} <= set(
        conversation_formats.ROLES
    )


def test_columns_of_the_sample(shared_data: Path, tmp_path: Path) -> None:
    samples = shared_data / "outside_cases"
    if not (samples / "c1-columns.yaml").is_file():
        pytest.skip("shared/data/outside_cases is not beside the checkout")
    shutil.copy(samples / "c1-columns.yaml", tmp_path / "x.yaml")
    shutil.copy(samples / "c1-columns.info.json", tmp_path / "dataset_info.json")
    shutil.copy(samples / "c1-columns.mapped.json", tmp_path / "mapped.json")
    data, _ = data_of("llamafactory", str(tmp_path / "x.yaml"))
    assert data["columns"] == {"query": "frage", "response": "antwort"}
    columns = ColumnMapping(renamed_columns=tuple(data["columns"].items()))
    for row in json.loads((tmp_path / "mapped.json").read_text(encoding="utf-8")):
        assert isinstance(row_to_document(row, "1", "row 1", columns), Document)
