"""Conversations: the tokens of the template, the mask of what the assistant says."""

import pytest

from anabatic.core.errors import DataError
from anabatic.data.chat import python_tool, rendering
from anabatic.data.tokenizer import hf_folder
from anabatic_testing.tiny_corpora import write_byte_tokenizer
from suite.rendered_rows import tokenize_conversations

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CHATS = [
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello \U0001f642"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "一加二?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "三", "reasoning_content": "1+2=3"},
        {"role": "assistant", "content": "Done."},
    ],
]


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    return hf_folder.load_tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def spoken(rendered, tok):
    """The text of each run of target tokens."""
    runs, run = [], []
    for token, learned in [*zip(rendered.ids.tolist(), rendered.mask.tolist(), strict=True), (0, 0)]:
        if learned:
            run.append(token)
        elif run:
            runs.append(tok.decode(run))
            run = []
    return runs


def test_outputs_of_the_python_tool_are_not_learned(chat_tokenizer):
    """They stand in the assistant's turn. One that is never closed ends with it; the user's own changes nothing."""
    start, end = python_tool.OUTPUT_START, python_tool.OUTPUT_END
    said = f"It is {python_tool.format_python_call('6*7', '42')}. {python_tool.format_python_call('1', '')}Done"
    talk = [
        {"role": "user", "content": f"{start}3"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": f"open {start}9"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": f"shut {end}"},
    ]
    call = "<|python_start|>{}<|python_end|>".format
    runs = ["It is " + call("6*7"), ". " + call("1"), "Done<|im_end|>", "open ", f"shut {end}<|im_end|>"]
    (whole,) = rendering.render_conversations([talk], chat_tokenizer)
    assert spoken(whole, chat_tokenizer) == runs
    (last,) = rendering.render_conversations([talk[:2]], chat_tokenizer, turns="last")
    assert spoken(last, chat_tokenizer) == runs[:3]
    assert whole.count_text_bytes(0, len(whole.ids)) == len("It is 6*7. 1Doneopen shut ")


def test_render_agrees_with_the_tokenizers_own_template(chat_tokenizer):
    expected = chat_tokenizer.apply_chat_template(
        CHATS, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    for (ids, mask), reference, learned in zip(
        tokenize_conversations(CHATS, chat_tokenizer),
        expected["input_ids"],
        expected["assistant_masks"],
        strict=True,
    ):
        assert ids.tolist() == reference
        assert mask.tolist() == learned


def test_only_the_assistants_turns_are_learned_with_their_end(chat_tokenizer):
    one, two = rendering.render_conversations(CHATS, chat_tokenizer, tools=[None, [TOOL]])
    assert spoken(one, chat_tokenizer) == ["Hello \U0001f642<|im_end|>"]
    runs = spoken(two, chat_tokenizer)
    assert [run.endswith("<|im_end|>") for run in runs] == [True] * 3
    assert '"name": "add"' in runs[0] and "1+2=3" in runs[1] and runs[2] == "Done.<|im_end|>"
    assert '"parameters"' in two.text and '"parameters"' not in "".join(runs)


def test_bytes_of_what_is_said(chat_tokenizer):
    one = rendering.render_conversations(CHATS[:1], chat_tokenizer)[0]
    said = "Hello \U0001f642".encode()
    assert one.count_text_bytes(0, len(one.ids)) == len(said)
    assert one.count_text_bytes(0, len(one.ids), all_text=True) == len(b"user\nHi\nassistant\n\n") + len(said)
    assert one.count_text_bytes(0, 0) == 0
    first = int(one.mask.argmax())
    assert [one.count_text_bytes(0, first + n) for n in range(7)] == list(range(7))


def test_the_last_character_counts_when_the_template_leaves_the_end_out(chat_tokenizer):
    inner = chat_tokenizer.chat_template
    chat_tokenizer.chat_template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}.{% endfor %}"
    )
    try:
        rendered = rendering.render_conversations(
            [[{"role": "assistant", "content": "ok \U0001f642"}]], chat_tokenizer
        )[0]
    finally:
        chat_tokenizer.chat_template = inner
    assert rendered.mask.tolist() == [1] * 7 + [0]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "row 7: the conversation is empty"),
        ("hi", "row 7: the conversation is not a list"),
        (["hi"], "message 1 is str"),
        ([{"role": "usr", "content": "hi"}], "message 1 has the role 'usr'.*Did you mean \"user\""),
        ([{"content": "hi"}], "message 1 has the role None"),
        ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}], "message 2 is empty"),
        ([{"role": "user", "content": 3}], "message 1 has content of type int"),
        ([{"role": "user", "content": "hi"}], "none of them by the assistant"),
    ],
)
def test_malformed_conversations_name_the_row(chat_tokenizer, messages, words):
    with pytest.raises(DataError, match=words) as caught:
        rendering.render_conversations([messages], chat_tokenizer, names=["row 7"])
    assert str(caught.value).startswith("row 7: ")
    assert "on-bad-row" in caught.value.hint


def test_a_template_that_cannot_be_used_is_refused(chat_tokenizer):
    inner = chat_tokenizer.chat_template
    try:
        chat_tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
        with pytest.raises(DataError, match="conversation 1: the chat template leaves out message 2, by the assistant"):
            tokenize_conversations(CHATS, chat_tokenizer)
        chat_tokenizer.chat_template = None
        with pytest.raises(DataError, match="no chat template"):
            tokenize_conversations(CHATS, chat_tokenizer)
        chat_tokenizer.chat_template = "{% generation %}{{ raise_exception('no tools here') }}{% endgeneration %}"
        with pytest.raises(DataError, match="conversation 1: the chat template refuses.*no tools here"):
            tokenize_conversations(CHATS, chat_tokenizer)
    finally:
        chat_tokenizer.chat_template = inner
