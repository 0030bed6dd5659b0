"""Tasks that come with us: each file is read, and what it makes of a row in the public format is as published."""

from __future__ import annotations

import json

import pytest

from anabatic.config.task import EvalTask, TaskGroup
from anabatic.core.errors import ConfigError
from anabatic.data.readers.raw_rows import RawRow
from anabatic.evals.item_records import compute_chance
from anabatic.evals.tasks import registry
from anabatic.evals.tasks.items import build_items

_ARC = {
    "question": "Which is warm?",
    "choices": {"text": ["ice", "fire", "snow"], "label": ["A", "B", "C"]},
    "answerKey": "B",
}
_MMLU = {"question": " Two and two? ", "subject": "high_school_sums", "choices": ["1", "2", "3", "4"], "answer": 3}
_SUM = {"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4"}
# name -> row, [(context, continuation), ...], number of the right one; None: no choices
ROWS = {
    "arc_easy": (_ARC, [("Question: Which is warm?\nAnswer:", f" {x}") for x in ("ice", "fire", "snow")], 1),
    "arc_challenge": (_ARC, [("Question: Which is warm?\nAnswer:", f" {x}") for x in ("ice", "fire", "snow")], 1),
    "hellaswag": (
        {
            "activity_label": "Baking", "ctx_a": "A man stirs [step] dough.", "ctx_b": "he THEN",
            "endings": [" [title] eats it.", "sleeps  well [x].", "c", "d"], "label": "2",
        },
        # lm_eval/tasks/hellaswag/utils.py: trimmed first, so a title at the beginning goes with the other brackets
        [("Baking: A man stirs dough. He then", f" {x}") for x in (" eats it.", "sleeps well .", "c", "d")], 2,
    ),
    "winogrande": (
        {"sentence": "Ann saw Eve, so _ waved at once.", "option1": "Ann", "option2": "Eve", "answer": "1"},
        [("Ann saw Eve, so Ann", " waved at once."), ("Ann saw Eve, so Eve", " waved at once.")], 0,
    ),
    "piqa": (
        {"goal": "Open a jar", "sol1": "twist", "sol2": "sing", "label": 0},
        [("Question: Open a jar\nAnswer:", " twist"), ("Question: Open a jar\nAnswer:", " sing")], 0,
    ),
    "boolq": (
        {"passage": "Snow is cold.", "question": "is snow cold", "answer": True},
        [("Snow is cold.\nQuestion: is snow cold?\nAnswer:", f" {x}") for x in ("no", "yes")], 1,
    ),
    "openbookqa": (
        {"question_stem": "Sun is", "choices": {"text": ["hot", "wet"], "label": ["A", "B"]}, "answerKey": "A "},
        [("Sun is", " hot"), ("Sun is", " wet")], 0,
    ),
    "copa": (
        {"premise": "It rained.", "question": "effect", "choice1": "The lawn is wet.", "choice2": "I slept.",
         "label": 0},
        [("It rained therefore", " the lawn is wet."), ("It rained therefore", " i slept.")], 0,
    ),
    "lambada": ({"text": "she opened the door"}, [("she opened the", " door")], None),
    "mmlu": (
        _MMLU,
        [
            (
                "The following are multiple choice questions (with answers) about high school sums.\n\n"
                "Two and two?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:", f" {x}",
            )
            for x in "ABCD"
        ], 3,
    ),
    "commonsense_qa": (
        {"question": "Where? ", "choices": {"text": list("vwxyz"), "label": list("ABCDE")}, "answerKey": "E"},
        [("Question: Where?\nA. v\nB. w\nC. x\nD. y\nE. z\nAnswer:", f" {x}") for x in "ABCDE"], 4,
    ),
    "sciq": (
        {"support": " Ice melts.", "question": "What melts?", "distractor1": "a", "distractor2": "b",
         "distractor3": "c", "correct_answer": "ice"},
        [("Ice melts.\nQuestion: What melts?\nAnswer:", f" {x}") for x in ("a", "b", "c", "ice")], 3,
    ),
    "truthfulqa_mc1": (
        {"question": "Moon?", "mc1_targets": {"choices": ["rock", "cheese"], "labels": [1, 0]}},
        [("Q: Moon?\nA:", " rock"), ("Q: Moon?\nA:", " cheese")], 0,
    ),
    "wikitext": ({"page": " = Wind = \n"}, [(" = Wind = \n", "")], None),
    "gsm8k": (_SUM, [("Question: 2+2?\nAnswer:", "")], None),
}  # fmt: skip
CHATS = {
    "gsm8k_chat": (_SUM, "2+2?", None),
    "arc_easy_chat": (
        _ARC,
        "Multiple Choice question: Which is warm?\n- ice=A\n- fire=B\n- snow=C\n\n"
        "Respond only with the letter of the correct answer.",
        1,
    ),
    "mmlu_chat": (
        _MMLU,
        "Multiple Choice question:  Two and two? \n- 1=A\n- 2=B\n- 3=C\n- 4=D\n\n"
        "Respond only with the letter of the correct answer.",
        3,
    ),
}


def one(name, row):
    task, _ = registry.read_task(name)
    assert isinstance(task, EvalTask)
    return task, build_items(task, [RawRow(row, "rows.jsonl: line 1")], None, shots=0, limit=None, seed=0)[0]


@pytest.mark.parametrize("name", list(ROWS))
def test_what_is_asked(name):
    row, pairs, gold = ROWS[name]
    _, item = one(name, row)
    assert [(pair.context, pair.continuation) for pair in item.pairs] == pairs
    assert item.gold_index == (-1 if gold is None else gold)


@pytest.mark.parametrize("name", list(CHATS))
def test_what_is_asked_in_conversations(name):
    row, question, gold = CHATS[name]
    task, item = one(name, row)
    assert item.pairs[0].context == [{"role": "user", "content": question}]
    if gold is not None:
        assert [pair.continuation for pair in item.pairs] == [*"ABCD"[: len(item.pairs)]]
        assert item.gold_index == gold and compute_chance(task, [item]) == 0.25


def test_every_file_is_read_and_every_group_has_its_tasks():
    for name in registry.list_shipped_tasks():
        found, _ = registry.read_task(name)
        assert found.name == name and found.about
        plan = registry.plan_tasks([name])
        if isinstance(found, TaskGroup):
            assert len(plan.tasks) == len(found.tasks)
        else:
            assert found.data.hub.count("/") == 1


def test_examples_are_put_before_a_question():
    task, _ = registry.read_task("gsm8k")
    rows = [RawRow({"question": f"{n}?", "answer": f"so\n#### {n}"}, f"line {n}") for n in range(4)]
    item = build_items(task, rows[:1], rows[1:], shots=2, limit=None, seed=3)[0]
    text = item.pairs[0].context
    assert text.endswith("Question: 0?\nAnswer:") and text.count("Question:") == 3
    assert text.count("#### ") == 2 and "#### 0" not in text
    assert item == build_items(task, rows[:1], rows[1:], shots=2, limit=1, seed=3)[0]


def test_a_task_of_ten_lines(tmp_path):
    (tmp_path / "capitals.jsonl").write_text(
        json.dumps({"country": "Norway", "towns": ["Oslo", "Rome"], "right": "Oslo"}) + "\n"
    )
    (tmp_path / "capitals.yaml").write_text(
        'data: {files: [capitals.jsonl]}\nprompt: "The capital of {{ country }} is"\nchoices: "{{ towns }}"\n'
        'answer: "{{ right }}"\n'
    )
    (planned,) = registry.plan_tasks([f"{tmp_path}/capitals.yaml#5"]).tasks
    assert (planned.task.name, planned.task_folder, planned.limit) == ("capitals", tmp_path, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {files: [a.jsonl]}\nprmpt: x\n", r"mine\.yaml:2: prmpt is not a known setting.*\"prompt\""),
        ("data: {files: [a.jsonl]}\nprompt: x\n", r"mine\.yaml: choices of mine is not given"),
        ("kind: generate\nprompt: x\n", "data of mine names no rows"),
        ("data: {hub: a/b, files: [c]}\nkind: generate\nprompt: x\n", "names files and hub"),
        ("data: {files: [a]}\nkind: gen\n", r"mine\.yaml:2: kind is \"gen\""),
        ("data: {files: [a]}\nkind: generate\nprompt: x\nmetric: acc\n", "metric is acc"),
        ("data: {files: [a]}\nkind: generate\nprompt: x\nextract: regex\n", "pattern is not given"),
        ("tasks: [mine.yaml]\n", "holds itself"),
        ("tasks: []\n", "tasks of mine is empty"),
        ("tasks: [arc_esy]\n", 'Did you mean "arc_easy"'),
    ],
)  # fmt: skip
def test_broken_files(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        registry.plan_tasks([str(tmp_path / "mine.yaml")])
