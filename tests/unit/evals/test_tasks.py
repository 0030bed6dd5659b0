"""A task from its file to its figures: packed and cached, against a slow reference; bad rows; long prompts; a kill."""

from __future__ import annotations

import json
import logging
import math
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from anabatic.config.evaluate import EvalJob
from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.config.task import EvalTask, TaskData
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.evals.answer_cache import AnswerCache
from anabatic.evals.local_model import LocalModel
from anabatic.evals.prefix_trees import ScoredText
from anabatic.evals.task_runner import EvalOptions, prepare_task, run_task
from anabatic.evals.tasks import registry
from anabatic.evals.tasks.dataset_files import locate_files
from anabatic.evals.tasks.graders import grade_replies
from anabatic.evals.tasks.registry import PlannedTask
from anabatic.models.pretrained import load_model
from anabatic.recipes import evaluate
from unit.evals.plain import slow as plain

CPU = DeviceConfig(type="cpu", dtype="fp32", threads=1)
ROW = {"towns": ["a", "b"], "right": 0, "land": "x"}
REPLY = {"kind": "generate", "choices": None, "answer": None}
TOWNS = ["Oslo", "Rome", "Paris", "Kairo"]
LANDS = ["Norway", "Italy", "France", "Egypt"]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def capitals(tmp_path, rows=12, **more):
    write(
        tmp_path / "capitals.jsonl",
        [{"land": LANDS[n % 4], "towns": TOWNS, "right": n % 4, "n": n} for n in range(rows)],
    )
    settings = dict(
        name="capitals",
        data=TaskData(files=["capitals.jsonl"]),
        prompt="The capital of {{ land }} is",
        choices="{{ towns }}",
        answer="{{ right }}",
    )
    return PlannedTask(EvalTask(**{**settings, **more}), tmp_path)


@pytest.fixture(scope="session")
def local(run_folder):
    folder = run_folder / "final_model"
    device = evaluate.select_device(CPU)
    return LocalModel(load_model(folder, torch.device("cpu")), tokenizers.load_tokenizer(folder), device, 512, 4)


def slow(local, context, continuation):
    """The definition: encode both together, one row, all logits."""
    ids, before = local.tokenizer.encode(context + continuation), len(local.tokenizer.encode(context))
    ids = ids[-(local.max_len + 1) :]
    scored = len(local.tokenizer.encode(context + continuation)) - before
    return plain(local._model, ScoredText(ids, scored))


@pytest.mark.parametrize("kind", ["choices", "cloze"])
def test_scores_are_those_of_one_plain_pass_for_each_choice(tmp_path, local, kind):
    cloze = dict(
        kind="cloze",
        prompt="",
        choices=None,
        contexts=["{{ towns[0] }} in", "{{ towns[right - 1] }} in"],
        continuation="{{ land }}",
        answer=1,
    )
    planned = capitals(tmp_path, **(cloze if kind == "cloze" else {}), shots=2)
    found = run_task(prepare_task(planned, EvalOptions()), local, EvalOptions(), AnswerCache(None))
    _, items, shots = prepare_task(planned, EvalOptions())
    assert shots == 2
    right = 0
    for item, record in zip(items, found.records, strict=True):
        assert item.pairs[0].context.count("\n\n") == 2
        expected = [slow(local, pair.context, pair.continuation)[0] for pair in item.pairs]
        assert record["logprobs"] == pytest.approx(expected, rel=1e-5)
        assert record["picks"]["acc"] == int(np.argmax(expected))
        lengths = [len(label) for label in item.labels]
        assert record["picks"]["acc_norm"] == int(np.argmax(np.array(expected) / lengths))
        right += record["right"]["acc"]
    assert found.main_estimate.value == right / 12 and found.main_estimate.low <= right / 12 <= found.main_estimate.high
    assert found.chance == (0.5 if kind == "cloze" else 0.25)


def test_whole_texts_and_last_words(tmp_path, local):
    texts = ["the wind moves upward " * 3, "a slope", "then " * 90]
    write(tmp_path / "t.jsonl", [{"text": text} for text in texts])
    data = TaskData(files=["t.jsonl"])
    task = EvalTask(name="w", kind="perplexity", data=data, prompt="{{ text }}")
    whole = run_task(prepare_task(PlannedTask(task, tmp_path), EvalOptions()), local, EvalOptions(), AnswerCache(None))
    nats = -sum(sum(record["logprobs"]) for record in whole.records)
    size = sum(len(text.encode()) for text in texts)
    assert whole.main_estimate.value == pytest.approx(nats / math.log(2) / size)
    assert len(whole.records[2]["logprobs"]) == -(-len(local.tokenizer.encode(texts[2])) // local.max_len) > 1
    first = local.tokenizer.eos_token_id
    ids = local.tokenizer.encode(texts[1])
    assert whole.records[1]["logprobs"][0] == pytest.approx(
        plain(local._model, ScoredText([first, *ids], len(ids)))[0], 1e-5
    )
    task = EvalTask(
        name="last",
        kind="completion",
        data=data,
        prompt="{{ text.strip().rsplit(' ', 1)[0] }}",
        continuation="{{ text.strip().rsplit(' ', 1)[1] }}",
    )
    last = run_task(
        prepare_task(PlannedTask(task, tmp_path), EvalOptions(limit=2)), local, EvalOptions(), AnswerCache(None)
    )
    assert last.records[0]["logprobs"][0] == pytest.approx(
        slow(local, " ".join(texts[0].split()[:-1]), " upward")[0], rel=1e-5
    )
    assert set(last.estimates) == {"acc", "perplexity"}


def test_a_prompt_longer_than_the_context_is_cut_on_the_left_and_counted(tmp_path, local, caplog):
    planned = capitals(tmp_path, prompt="{{ 'far away ' * 40 * n }}The capital of {{ land }} is")
    with caplog.at_level(logging.WARNING, logger="anabatic"):
        found = run_task(prepare_task(planned, EvalOptions(limit=3)), local, EvalOptions(limit=3), AnswerCache(None))
    assert found.num_truncated == 2 and "2 of 3 items are longer than the context" in caplog.text
    item = prepare_task(planned, EvalOptions(limit=3)).items[2]
    assert found.records[2]["logprobs"][0] == pytest.approx(
        slow(local, item.pairs[0].context, item.pairs[0].continuation)[0], rel=1e-5
    )


def test_what_was_answered_is_not_asked_again(tmp_path, local, run_folder, capsys):
    planned = capitals(tmp_path)
    path = tmp_path / "cache" / "store.jsonl"

    def once(read=True):
        store = AnswerCache(path, read)
        found = run_task(prepare_task(planned, EvalOptions()), local, EvalOptions(), store)
        store.close()
        return found

    whole = once()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0][:-30])  # killed while it wrote
    again = once()
    assert again.num_cached == 0 and again.records == whole.records
    third = once()
    assert third.num_cached == 48 and third.records == whole.records
    assert once(read=False).num_cached == 0
    job = EvalJob(
        model=str(run_folder), tasks=["task:spelling#2"], max_new_tokens=3, out=str(tmp_path / "o"), device=CPU
    )
    known = []
    for resume in ("auto", "auto", "never"):
        job.resume = resume
        evaluate.run(job)
        known.append(json.loads((tmp_path / "o" / "eval.json").read_text())["tasks"]["spelling"]["known"])
    assert known == [0, 2, 0]


def test_the_same_rows_from_every_format(tmp_path):
    rows = [{"land": land, "towns": json.dumps(TOWNS), "right": str(n)} for n, land in enumerate(LANDS)]
    write(tmp_path / "r.jsonl", rows)
    (tmp_path / "r.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    import csv

    with open(tmp_path / "r.csv", "w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    made = []
    for name in ("r.jsonl", "r.json", "r.csv", "r.parquet"):
        task = EvalTask(
            name="x", data=TaskData(files=[name]), prompt="{{ land }}:", choices=TOWNS, answer="{{ right }}", shots=1
        )
        _, items, _ = prepare_task(PlannedTask(task, tmp_path), EvalOptions())
        made.append([(item.pairs, item.gold_index) for item in items])
    assert made[0] == made[1] == made[2] == made[3] and [gold for _, gold in made[0]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([{"land": "x"}], {}, r"capitals\.jsonl: line 1: choices of capitals: 'towns' is undefined; the row has .land"),
        ([{"towns": ["a"], "right": 0, "land": "x"}], {}, "line 1: choices of capitals is .* not a list of two"),
        ([{"towns": ["a", ""], "right": 0, "land": "x"}], {}, "number 2 in choices of capitals is empty"),
        ([{**ROW, "right": 2}], {}, "answer of capitals is 2, and there are 2 choices"),
        ([{**ROW, "right": "c d"}], {}, "answer of capitals is 'c d'"),
        ([ROW], {"shots": 3}, "3 examples before a question, and has 0 rows"),
        ([{**ROW, "right": 0.5}], {}, "answer of capitals is 0.5"),
        ([{**ROW, "right": math.nan}], {}, "the row has the number nan"),
        ([{**ROW, "towns": ["a", ["b"]]}], {}, r"choices of capitals holds \['b'\], which is no text"),
        ([ROW] * 3, {"shots": 3, "shots_data": TaskData(files=["capitals.jsonl"])}, "and has 2 rows for them"),
        ([ROW], {"keep": "{{ false }}"}, "none of 1 rows is kept"),
        ([{**ROW, "land": 3}], {"prompt": "{{ land.upper() }}"}, "line 1: prompt of capitals"),
        ([ROW], {"prompt": "{{ land"}, "prompt of capitals is no template"),
        ([{"land": "x"}], {"prompt": "{{ land.__class__ }}"}, "line 1: prompt of capitals"),
        ([[1]], {}, "line 1: the row is"),
        ([ROW], {"answer": "right"}, 'answer of capitals is the constant "right" for every row'),
        ([ROW], {"prompt": "{{ land | regex_replace('(') }}"}, "line 1: prompt of capitals cannot be made"),
        ([ROW], {"prompt": "{{ 'a' * 10 ** 12 }}"}, "line 1: prompt of capitals cannot be made"),
        ([{**ROW, "land": "\ud83d"}], {}, "line 1: the row has a lone surrogate"),
        ([{**ROW, "land": ""}], {**REPLY, "answer": "{{ land }}"}, "is '', nothing but blanks and marks"),
        ([ROW], {**REPLY, "answer": "{{ land }}", "check": "number"}, "is 'x', and check: number compares numbers"),
        (
            [ROW],
            {**REPLY, "check": "python", "program": "{{ wanted }}", "tests": "f()"},
            "program of capitals: 'wanted' is undefined",
        ),
        ([ROW], {**REPLY, "check": "instructions"}, "the row has no 'instruction_id_list'"),
        ([{"instruction_id_list": 3, "kwargs": []}], {**REPLY, "check": "instructions", "prompt": "x"}, "not lists"),
        ([{"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{}]}],
         {**REPLY, "check": "instructions", "prompt": "x"}, "lacks a setting"),
    ],
)  # fmt: skip
def test_bad_rows(tmp_path, rows, more, message):
    planned = capitals(tmp_path, **more)
    write(tmp_path / "capitals.jsonl", rows)
    with pytest.raises((DataError, ConfigError), match=message):
        prepare_task(planned, EvalOptions())


def test_a_column_of_any_name_is_read_from_row(tmp_path):
    planned = capitals(
        tmp_path, prompt="{{ row['The land'] }}", choices="{{ ['a', 'b', row['The land']] }}", answer="{{ row.self }}"
    )
    write(tmp_path / "capitals.jsonl", [{"The land": "Norway", "self": 1.0}])
    (item,) = prepare_task(planned, EvalOptions()).items
    assert item.question == "Norway" and item.labels == ["a", "b", "Norway"] and item.gold_index == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: generate\nprompt: x\n", "answer of mine is not given, and check: equal compares with it"),
        ("kind: generate\nprompt: x\nanswer: x\nextract: regex\npattern: '(('\n", r"pattern '\(\(': missing"),
        ("kind: generate\nprompt: x\nanswer: x\ncheck: generated\n", "the rows of mine are not"),
        ("kind: generate\nprompt: x\nanswer: x\nmax_new_tokens: 0\n", "max_new_tokens is 0"),
        ("kind: generate\nprompt: x\nanswer: x\nstop: ['']\n", "a text of stop is empty"),
        ("kind: perplexity\nprompt: x\nshots: 2\n", "whole texts have no examples"),
        ("kind: completion\nprompt: x\ncontinuation: y\nchat: true\n", "not asked in conversations"),
        ("kind: perplexity\nprompt: x\nname: |\n  a\n  b\n", "use letters in one line"),
        ("prompt: x\nchoices: [a, b]\nanswer: 0\nkeep: right == 1\n", 'keep of mine is "right == 1" for every row'),
        ("prompt: x\nchoices: [a, b]\nanswer: 0\nshots_data: {split: train}\n", "data.files or data.task have none"),
        ("tasks: [core]\n", "holds core, which has its own figure"),
        ("tasks: [whole.yaml, 'task:spelling']\n", "is a mean of bits_per_byte, exact, which is no figure"),
        ("tasks: [whole.yaml]\naggregate: centred\n", "measure bits_per_byte: that has no baseline"),
    ],
)
def test_bad_task_files(tmp_path, text, message):
    data = "" if text.startswith("tasks") else "data: {files: [rows.jsonl]}\n"
    (tmp_path / "mine.yaml").write_text(data + text)
    (tmp_path / "whole.yaml").write_text("kind: perplexity\nprompt: x\ndata: {files: [rows.jsonl]}\n")
    with pytest.raises(ConfigError) as caught:
        registry.plan_tasks([str(tmp_path / "mine.yaml")])
    assert re.search(message, f"{caught.value} {caught.value.hint}")


def test_a_torn_file_is_named_with_its_line(tmp_path):
    planned = capitals(tmp_path)
    with open(tmp_path / "capitals.jsonl", "a") as file:
        file.write('{"land": ')
    with pytest.raises(DataError, match=r"capitals\.jsonl: line 13: broken JSON"):
        prepare_task(planned, EvalOptions())


@pytest.mark.parametrize(
    "layout",
    [
        "o/d/part/test/0.jsonl",
        "o--d/part/test/00000.jsonl",
        "d/part/test-00000-of-1.jsonl",
        "d/test.jsonl",
        "d_test.jsonl",
    ]
    + ["other.jsonl"],
)
def test_data_sets_of_the_hub_in_a_folder(tmp_path, layout):
    (tmp_path / layout).parent.mkdir(parents=True, exist_ok=True)
    write(tmp_path / layout, [{"a": 1}])
    data = TaskData(hub="o/d", config="part", split="test", also=["other.jsonl"])
    assert locate_files(data, "x", None, tmp_path) == [tmp_path / layout]
    with pytest.raises(DataError, match=r"o/d \(part train\) is not in"):
        locate_files(TaskData(hub="o/d", config="part", split="train"), "x", None, tmp_path)
    wrong = TaskData(files=[layout], sha256={(tmp_path / layout).name: "0" * 64})
    with pytest.raises(DataError, match="has the checksum"):
        locate_files(wrong, "x", None, tmp_path)


def test_without_network_a_data_set_is_asked_for_clearly():
    with pytest.raises(DataError, match="x: .*o/d") as caught:
        locate_files(TaskData(hub="o/d"), "x", None, None)
    assert "HF_HUB_OFFLINE" in caught.value.hint and "--tasks-from" in caught.value.hint


def test_mmlu_takes_examples_of_the_same_subject(tmp_path):
    folder = tmp_path / "cais" / "mmlu" / "all"
    folder.mkdir(parents=True)
    rows = [
        {"question": f"{s}{n}", "subject": s, "choices": list("wxyz"), "answer": n % 4} for s in "ab" for n in range(6)
    ]
    for split in ("dev", "test"):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    (planned,) = registry.plan_tasks(["mmlu"]).tasks
    _, items, shots = prepare_task(planned, EvalOptions(dataset_folder=tmp_path, limit=4))
    assert shots == 5 and [item.group for item in items] == ["a", "a", "b", "b"]
    for item in items:
        asked = [
            line for line in item.pairs[0].context.splitlines() if line[:2] in {f"{item.group}{n}" for n in range(6)}
        ]
        assert asked[:5] == [f"{item.group}{n}" for n in range(5)]


def test_empty_replies_are_wrong_and_counted(tmp_path):
    task = EvalTask(
        name="q",
        kind="generate",
        data=TaskData(files=["capitals.jsonl"]),
        prompt="{{ land }}?",
        answer="{{ towns[right] }}",
    )
    planned = capitals(tmp_path)
    _, items, _ = prepare_task(PlannedTask(task, planned.task_folder), EvalOptions(limit=3))
    records = grade_replies(task, items, ["", "  \n", items[2].answer])
    assert [record["right"]["exact"] for record in records] == [False, False, True]
