"""Chat templates by name and by file: the layouts of the families, what is learned of them, what is refused."""

from __future__ import annotations

import json
import shutil
import signal

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from anabatic.core.errors import ChatTemplateError, ConfigError, DataError
from anabatic.data.chat import custom_templates
from anabatic.data.tokenizer import hf_folder as tokenizers
from suite.rendered_rows import tokenize_conversations

SYSTEM, FIRST, LAST = "You are a helpful assistant", "Hi there", "   I am an assistant   "
TALK = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": FIRST},
    {"role": "user", "content": "Who are you"},
    {"role": "assistant", "content": LAST},
]
ASK = {"role": "user", "content": "Another question"}
CONTROL = (
    "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end|>",
    "<|system|>", "<|user|>", "<|assistant|>", "<start_of_turn>", "<end_of_turn>", "<｜User｜>", "<｜Assistant｜>",
    "[gMASK]", "<sop>",
)  # fmt: skip
LAYOUTS = {
    "chatml": (
        "<|im_start|>system\n§<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi there"
        "<|im_end|>\n<|im_start|>user\nWho are you<|im_end|>\n<|im_start|>assistant\n   I am an assistant   "
        "<|im_end|>\n",
        "<|im_start|>user\nAnother question<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\n§<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHello"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHi there<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nWho are you<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nI am an assistant"
        "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nAnother question<|eot_id|><|start_header_id|>assistant"
        "<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "phi3": (
        "<|system|>\n§<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\nHi there<|end|>\n<|user|>\nWho are you<|end|>\n"
        "<|assistant|>\n   I am an assistant   <|end|>\n",
        "<|user|>\nAnother question<|end|>\n<|assistant|>\n",
        "<|end|>",
    ),
    "phi4": (
        "<|im_start|>system<|im_sep|>§<|im_end|><|im_start|>user<|im_sep|>Hello<|im_end|><|im_start|>assistant"
        "<|im_sep|>Hi there<|im_end|><|im_start|>user<|im_sep|>Who are you<|im_end|><|im_start|>assistant<|im_sep|>"
        "   I am an assistant   <|im_end|>",
        "<|im_start|>user<|im_sep|>Another question<|im_end|><|im_start|>assistant<|im_sep|>",
        "<|im_end|>",
    ),
    "gemma": (
        "<s><start_of_turn>user\n§\n\nHello<end_of_turn>\n<start_of_turn>model\nHi there<end_of_turn>\n<start_of_turn>"
        "user\nWho are you<end_of_turn>\n<start_of_turn>model\nI am an assistant<end_of_turn>\n",
        "<start_of_turn>user\nAnother question<end_of_turn>\n<start_of_turn>model\n",
        "<end_of_turn>",
    ),
    "mistral": (
        "<s>[INST] §\n\nHello[/INST] Hi there</s>[INST] Who are you[/INST] I am an assistant</s>",
        "[INST] Another question[/INST]",
        "</s>",
    ),
    "llama2": (
        "<s>[INST] <<SYS>>\n§\n<</SYS>>\n\nHello [/INST] Hi there </s><s>[INST] Who are you [/INST] I am an assistant"
        " </s>",
        "<s>[INST] Another question [/INST]",
        "</s>",
    ),
    "deepseek": (
        "<s>§<｜User｜>Hello<｜Assistant｜>Hi there</s><｜User｜>Who are you<｜Assistant｜>   I am an assistant   </s>",
        "<｜User｜>Another question<｜Assistant｜>",
        "</s>",
    ),
    "glm4": (
        "[gMASK]<sop><|system|>\n§<|user|>\nHello<|assistant|>\nHi there<|user|>\nWho are you<|assistant|>\n"
        "   I am an assistant   ",
        "<|user|>\nAnother question<|assistant|>\n",
        "<|user|>",
    ),
}  # fmt: skip
LAYOUTS["qwen2.5"] = LAYOUTS["chatml"]
LAYOUTS["qwen3"] = (
    LAYOUTS["chatml"][0].replace("   I am", "<think>\n\n</think>\n\n   I am"), *LAYOUTS["chatml"][1:]
)  # fmt: skip
"""Name -> (conversation, what a further question adds, what ends an answer). Of published conversations rendered by
the families' own templates (llama.cpp, tests/test-chat-template.cpp), with `§` for the system's text."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of bytes that has every family's control tokens."""
    made = tmp_path_factory.mktemp("base") / "model"
    made.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    from tokenizers import decoders

    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(one, special=True) for one in ("<s>", "</s>", *CONTROL)])
    backend.save(str(made / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ANABATIC_CACHE", str(tmp_path / "cache"))


def _with(folder, given):
    return tokenizers.load_tokenizer(custom_templates.folder_with_template(folder, given))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_of_a_family(folder, name):
    tokenizer = _with(folder, name)
    talk, added, _ = LAYOUTS[name]
    talk = talk.replace("§", SYSTEM)
    end = "<|user|>" if name == "glm4" else ""
    assert tokenizers.render_chat(tokenizer, TALK) == talk + end
    closed = talk.replace("<think>\n\n</think>\n\n", "")  # of earlier turns no thinking is shown
    closed = closed if name != "qwen3" else closed.replace("   I am an assistant   ", LAST)
    assert tokenizers.render_chat(tokenizer, [*TALK, ASK], answer=True) == closed + added


@pytest.mark.parametrize("name", LAYOUTS)
def test_of_a_conversation_the_answers_and_their_ends_are_learned(folder, name):
    tokenizer = _with(folder, name)
    ((ids, mask),) = tokenize_conversations([TALK], tokenizer)
    learned = tokenizer.decode(ids[mask != 0])
    end = LAYOUTS[name][2]
    assert learned.count(end) == 2 and learned.endswith(end)
    assert [part.strip().removeprefix("<think>\n\n</think>").strip() for part in learned.split(end)[:2]] == [
        FIRST,
        LAST.strip(),
    ]
    assert tokenizers.get_turn_end_id(tokenizer) == tokenizer.convert_tokens_to_ids(end)


def test_tools_are_shown_and_called_or_refused_by_name(folder):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    talk = [{"role": "user", "content": "1?"}, call, {"role": "tool", "content": "2"}, {"role": "tool", "content": "3"}]
    for name in set(custom_templates.TEMPLATE_FILES.values()):
        tokenizer = _with(folder, name)
        if name in ("qwen2.5", "qwen3"):
            text = tokenizers.render_chat(tokenizer, talk, [tool])
            assert '<tools>\n{"type": "function", "function": {"name": "add"' in text
            assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n' in text
            results = "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
            assert results + "<|im_end|>\n" in text
            continue
        with pytest.raises(DataError, match="no tools"):
            tokenizers.render_chat(tokenizer, talk[:1], [tool])
        with pytest.raises(DataError, match="no calls"):
            tokenize_conversations([talk], tokenizer)


def test_marks_of_generation_count(folder, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    ((ids, mask),) = tokenize_conversations([TALK], (tokenizer := _with(folder, str(file))))
    assert tokenizer.decode(ids[mask != 0]) == f"{FIRST}</s>{LAST}</s>"


HOSTILE = {
    "broken": ("{% for m in messages %}{{ m.content }", "is broken at its line 1"),
    "an unknown tag": ("{% frobnicate %}", "is broken at its line 1"),
    "says nothing": ("Hello", "leaves out what the user says"),
    "leaves the answer out": ("{{ messages[0].content }}", "leaves out what the assistant says"),
    "refuses": ("{{ raise_exception('no') }}", "fails on a question and its answer: no"),
    "divides": ("{{ 1 / 0 }}", "division by zero"),
    "joins": ("{{ messages[0].content + 1 }}", "fails on a question"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "a long range": ("{% for i in range(1000000000) %}x{% endfor %}", "ange too big"),
    "never ends": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}"
        "{% endfor %}", "takes more than 0.2 s",
    ),
    "takes all memory": ("{{ 'x' * 3000000000 }}", "takes more than 1024 MiB"),
    "looks around": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "fails|may not do|leaves out"),
    "opens a file": ("{% include '/etc/passwd' %}", "fails"),
}  # fmt: skip


@pytest.mark.parametrize("about", HOSTILE)
def test_what_is_no_template_is_refused_with_its_reason(folder, tmp_path, monkeypatch, about):
    monkeypatch.setattr(tokenizers, "MAX_RENDER_SECONDS", 0.2)
    text, words = HOSTILE[about]
    file = tmp_path / "own.jinja"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as refused:
        custom_templates.folder_with_template(folder, str(file))
    assert str(file) in str(refused.value) and "chatml" in refused.value.hint
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


BOMB = "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}"
FOLDER_BOMBS = {
    "at once": (BOMB, "takes more than 0.2 s for a short conversation"),
    "behind an answer": ("{% if messages|length > 1 %}" + BOMB + "{% endif %}", "takes more than 0.2 s"),
    "with a system message": ("{% if messages[0].role == 'system' %}" + BOMB + "{% endif %}", "takes more than 0.2 s"),
    "with tools": ("{% if tools %}" + BOMB + "{% endif %}", "takes more than 0.2 s"),
    "when an answer is asked for": ("{% if add_generation_prompt %}" + BOMB + "{% endif %}", "takes more than 0.2 s"),
    "of memory": ("{{ 'x' * 3000000000 }}", "takes more than 1024 MiB"),
    "torn": ("{% for m in messages %}", "is damaged at its line 1"),
}  # fmt: skip


@pytest.mark.parametrize("about", FOLDER_BOMBS)
def test_the_template_of_a_folder_is_bounded_as_well(folder, tmp_path, monkeypatch, about):
    monkeypatch.setattr(tokenizers, "MAX_RENDER_SECONDS", 0.2)
    text, words = FOLDER_BOMBS[about]
    shutil.copytree(folder, tmp_path / "own")
    (tmp_path / "own" / "chat_template.jinja").write_text(text)
    with pytest.raises(DataError, match=words) as refused:
        tokenizers.load_tokenizer(tmp_path / "own")
    assert "--chat-template" in refused.value.hint
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


def test_a_conversation_without_end_is_an_error_of_its_row(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers, "MAX_RENDER_SECONDS", 0.2)
    shutil.copytree(folder, tmp_path / "own")
    template = "{% if messages[0].content == 'boom' %}" + BOMB + "{% endif %}{{ messages[0].content }}"
    (tmp_path / "own" / "chat_template.jinja").write_text(template)
    loaded = tokenizers.load_tokenizer(tmp_path / "own")
    assert tokenizers.render_chat(loaded, [{"role": "user", "content": "a"}]) == "a"
    with pytest.raises(ChatTemplateError, match="it takes more than 0.2 s of processor time"):
        tokenizers.render_chat(loaded, [{"role": "user", "content": "boom"}])


def test_names_and_files_that_are_not_there(folder, tmp_path):
    with pytest.raises(ConfigError, match='Did you mean "llama3"'):
        custom_templates.read_template("lama3")
    with pytest.raises(ConfigError, match="there is no file"):
        custom_templates.read_template(str(tmp_path / "none.jinja"))
    for name, content, words in (
        ("a", b"", "is empty"),
        ("b", b"\xff\xfe\xff", "cannot be read"),
        ("c", b"x" * (custom_templates.MAX_TEMPLATE_BYTES + 1), "more than"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            custom_templates.read_template(str(tmp_path / name))


def test_a_folder_of_a_model_gives_its_template(folder, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(custom_templates.read_template("phi4"))
    assert custom_templates.read_template(str(tmp_path)) == custom_templates.read_template("PHI4")


def test_the_template_goes_where_the_tokenizer_goes(folder, tmp_path):
    assert custom_templates.folder_with_template(folder, None) == folder
    made = custom_templates.folder_with_template(folder, "phi3")
    assert (
        made
        == custom_templates.folder_with_template(folder, "phi3")
        != custom_templates.folder_with_template(folder, "phi4")
    )
    tokenizers.load_tokenizer(made).save_pretrained(tmp_path / "saved")
    assert tokenizers.load_tokenizer(tmp_path / "saved").chat_template == custom_templates.read_template("phi3")


def test_control_tokens_that_the_tokenizer_has_not_are_told(tmp_path, caplog):
    from anabatic_testing.random_models import build_byte_tokenizer

    build_byte_tokenizer(tmp_path)
    custom_templates.folder_with_template(tmp_path, "chatml")
    assert "has no token" not in caplog.text
    custom_templates.folder_with_template(tmp_path, "llama3")
    assert "the tokenizer has no token <|start_header_id|>" in caplog.text
