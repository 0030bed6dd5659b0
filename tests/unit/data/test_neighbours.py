"""Rows as the data sets of other programs have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabatic.config.sections.common import Data
from anabatic.core.errors import DataError
from anabatic.data.chat import rendering
from anabatic.data.readers import prompts, sources
from anabatic.data.readers.document import Document, RowIssue
from anabatic.data.tokenizer import hf_folder
from anabatic_testing.tiny_corpora import write_byte_tokenizer
from unit.data.test_row_use import read, write_rows

USER, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"name": "wind", "arguments": {"place": "pier"}}
TOOL = {"name": "wind", "description": "", "parameters": {"type": "object", "properties": {}}}
WITHOUT_TOOLS = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def call_turn(role: str = "tool_call", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": json.dumps(CALL), **more}


def read_turns(tmp_path: Path, *turns: dict[str, Any]) -> list[dict[str, Any]]:
    (document,) = read(write_rows(tmp_path / "rows.jsonl", [{"messages": list(turns)}]))
    assert document.messages is not None
    return document.messages


@pytest.mark.parametrize("role", ["tool_call", "function_call"])
@pytest.mark.parametrize("result", ["tool_response", "tool", "observation"])
def test_calls_under_a_role_of_their_own(role: str, result: str, tmp_path: Path) -> None:
    found = read_turns(tmp_path, USER, call_turn(role), call_turn(role), {"role": result, "content": "5"}, SAID)
    assert [turn["role"] for turn in found] == ["user", "assistant", "tool", "assistant"]
    assert [call["function"] for call in found[1]["tool_calls"]] == [CALL, CALL] and found[1]["content"] == ""


def test_calls_join_what_the_assistant_says_before(tmp_path: Path) -> None:
    found = read_turns(tmp_path, USER, SAID, call_turn(), {"role": "tool_response", "content": "5"}, SAID)
    assert [turn["role"] for turn in found] == ["user", "assistant", "tool", "assistant"]
    assert found[1]["content"] == "a" and len(found[1]["tool_calls"]) == 1
    apart = read_turns(tmp_path, USER, SAID, call_turn(loss=False), {"role": "tool_response", "content": "5"}, SAID)
    assert [turn["role"] for turn in apart] == ["user", "assistant", "assistant", "tool", "assistant"]


def test_the_older_form_of_calls(tmp_path: Path) -> None:
    older = {"role": "assistant", "content": None, "function_call": {**CALL, "arguments": "{}"}}
    found = read_turns(tmp_path, USER, older, {"role": "function", "name": "wind", "content": "5"}, SAID)
    assert found[1]["tool_calls"][0]["function"]["name"] == "wind" and found[2]["role"] == "tool"
    assert "function_call" not in found[1]


@pytest.mark.parametrize("content", ["", "no JSON", "{}", "[]", 5, None])
def test_calls_that_are_none(content: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1: message 2: (the|a) function call"):
        read_turns(tmp_path, USER, {"role": "tool_call", "content": content})


def test_rows_that_are_lists_of_turns(tmp_path: Path) -> None:
    (document,) = read(write_rows(tmp_path / "rows.jsonl", [[USER, SAID]]))
    assert document.messages == [USER, SAID] and document.row_format.name == "messages"
    (tmp_path / "rows.json").write_text(json.dumps([[USER, SAID], [{"from": "human", "value": "q"}, SAID]]))
    assert [document.messages for document in read(str(tmp_path / "rows.json"))] == [[USER, SAID]] * 2
    for row in ([], [1], ["a"], [{"content": "a"}]):
        with pytest.raises(DataError, match="the row is a list, not an object"):
            read(write_rows(tmp_path / "rows.jsonl", [row]))


VERL: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0, "question": "1 and 1?", "answer": "It is 2."},
}


def ask(path: str, **columns: str) -> prompts.PromptRow:
    (row,) = prompts.read_prompts([path], columns)
    assert not isinstance(row, RowIssue), row.message
    return row


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_of_verl(name: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / name, [VERL])
    row = ask(path)
    assert row.messages == VERL["prompt"] and (row.answer, row.label, row.unused) == ("2", "2", ())
    assert ask(path, answer="extra_info.answer").answer == "It is 2."
    (document,) = read(path, columns={"query": "extra_info.question", "response": "extra_info.answer"})
    assert [turn["content"] for turn in document.messages or []] == ["1 and 1?", "It is 2."]
    assert document.row_format.columns == ("query=extra_info.question", "response=extra_info.answer")
    with pytest.raises(
        DataError, match=r'no column "extra_info\.reply", which data\.columns\.response names|no column'
    ):
        read(path, columns={"query": "extra_info.question", "response": "extra_info.reply"})


def test_a_text_within_a_column(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.parquet"):
        path = write_rows(tmp_path / name, [{"body": {"parts": ["one", "two"]}, "id": 1}])
        (document,) = read(path, columns={"text": "body.parts.1"})
        assert (document.text, document.row_format.unused) == ("two", ())


@pytest.mark.parametrize(
    ("more", "answer", "unused"),
    [
        ({"answer": 5, "response": "long"}, "5", ("response",)),
        ({"solution": r"\boxed{5}"}, r"\boxed{5}", ()),
        ({"ground_truth": "5", "hint": "count"}, "5", ("hint",)),
        ({"response": "5"}, "5", ()),
    ],
)
def test_which_column_is_the_answer(more: dict[str, Any], answer: str, unused: tuple[str, ...], tmp_path: Path) -> None:
    row = ask(write_rows(tmp_path / "rows.jsonl", [{"question": "q", **more}]))
    assert (row.answer, row.unused) == (answer, unused)


def test_an_answer_column_beside_the_assistants_turn(tmp_path: Path) -> None:
    row = ask(write_rows(tmp_path / "rows.jsonl", [{"messages": [USER, SAID], "solution": "5"}]))
    assert (row.messages, row.label, row.answer) == ([USER], "a", "5")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return hf_folder.load_tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


CALLING = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}


@pytest.mark.parametrize(
    ("turns", "tools", "part"),
    [
        ([USER, CALLING, {"role": "tool", "content": "5"}, SAID], [TOOL], "tools"),
        ([USER, CALLING, {"role": "tool", "content": "5"}, SAID], None, "calls of tools"),
        ([USER, {"role": "assistant", "content": "", "reasoning_content": "hm"}, USER, SAID], None, "reasoning"),
    ],
)
def test_templates_that_leave_a_part_out(turns: Any, tools: Any, part: str, tokenizer: Any) -> None:
    before = tokenizer.chat_template
    tokenizer.chat_template = WITHOUT_TOOLS
    try:
        for _ in range(2):
            with pytest.raises(DataError, match=f"row 1: the chat template shows no {part}") as caught:
                rendering.render_conversations([turns], tokenizer, ["row 1"], [tools])
        assert "--chat-template qwen2.5" in caught.value.hint
        rendering.render_conversations([[USER, SAID]], tokenizer, ["row 2"])
    finally:
        tokenizer.chat_template = before
    rendering.render_conversations([turns[-2:]], tokenizer, ["row 3"])


@pytest.mark.parametrize("case", ["b1-weight-preview", "b2-tool-call-role", "b5-nanochat-list"])
def test_cases_from_outside_are_read(case: str, shared_data: Path) -> None:
    path = shared_data / "outside_cases" / f"{case}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    found = list(sources.read_documents(sources.parse_source(str(path)), Data()))
    assert found and all(document.messages for document in found)


def test_cases_of_verl_from_outside(shared_data: Path) -> None:
    path = shared_data / "outside_cases" / "b4-verl-rows.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    rows = list(prompts.read_prompts([str(path)], {}))
    assert [row.answer for row in rows if isinstance(row, prompts.PromptRow)] == ["0", "3", "6", "9", "12", "15"]


def test_cases_of_tools_from_outside(shared_data: Path, tokenizer: Any) -> None:
    folder = shared_data / "outside_cases"
    if not (folder / "b7-template-without-tools.json").exists():
        pytest.skip(f"{folder} has no case b7")
    documents: list[Document] = read(str(folder / "b7-template-without-tools.json"))
    before = tokenizer.chat_template
    tokenizer.chat_template = (folder / "b7-template-without-tools.jinja").read_text()
    try:
        with pytest.raises(DataError, match="the chat template shows no tools"):
            rendering.render_conversations(
                [documents[0].messages or []], tokenizer, [documents[0].location], [documents[0].tools]
            )
    finally:
        tokenizer.chat_template = before
