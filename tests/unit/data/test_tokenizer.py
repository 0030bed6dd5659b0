"""Tokenizer training, the folder it writes, the chat template and the comparison of tokenizers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.config.sections.common import Data
from anabatic.config.tokenizer import TokenizerEvalJob, TokenizerTrainJob
from anabatic.core.errors import ConfigError, DataError, Failure
from anabatic.data.readers.document import is_held_out
from anabatic.data.readers.sources import parse_source
from anabatic.data.tokenizer import hf_folder as folder
from anabatic.data.tokenizer.bpe_training import (
    CjkPretokenizer,
    read_training_documents,
    split_into_chunks,
    train_tokenizer,
)
from anabatic.data.tokenizer.compression import SAMPLE_TEXTS, evaluate_tokenizers, load_texts
from anabatic.recipes import tokenizer_commands as recipe

VOCAB = 1000


def job(out: Path, **changes: Any) -> TokenizerTrainJob:
    options = {"vocab_size": VOCAB, "max_chars": 300_000, "data": Data(train=["stdlib:"]), **changes}
    return TokenizerTrainJob(out=str(out), **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer") / "tok"
    summary = train_tokenizer(job(out))
    assert summary["vocab_size"] == VOCAB
    assert summary["chars"] == 300_000
    return out


@pytest.fixture(scope="module")
def fast(trained: Path) -> Any:
    return folder.load_fast_tokenizer(trained)


@pytest.fixture(scope="module")
def chat(trained: Path) -> Any:
    return folder.load_tokenizer(trained)


def test_transformers_loads_the_folder_as_we_do(trained: Path, chat: Any, fast: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    # A model's config.json beside it must not make transformers build another family's tokenizer.
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    text = "def f(x):\r\n\treturn x + 12345  # naïve, 你好 🙂\n"
    for auto in (AutoTokenizer.from_pretrained(trained), AutoTokenizer.from_pretrained(tmp_path), chat):
        ids = auto(text)["input_ids"]
        assert ids == fast.encode(text).ids
        assert auto.decode(ids) == text
        assert (auto.eos_token_id, auto.pad_token_id, auto.bos_token_id) == (0, 0, None)
        assert len(auto) == VOCAB


def test_special_tokens_have_the_first_ids(chat: Any) -> None:
    assert chat.convert_tokens_to_ids(list(folder.SPECIAL_TOKENS)) == list(range(len(folder.SPECIAL_TOKENS)))
    assert folder.SPECIAL_TOKENS[0] == "<|endoftext|>"
    assert len(folder.SPECIAL_TOKENS) + 256 <= 280
    said = "<think>\nhm\n</think>\n\nyes"
    assert chat.decode(chat(said + folder.TURN_END)["input_ids"], skip_special_tokens=True) == said


def test_special_tokens_inside_documents_are_plain_text(fast: Any) -> None:
    text = "a tokenizer knows <|endoftext|> and <|im_end|>"
    ids = fast.encode(text).ids
    assert not set(ids) & {0, 1, 2}
    assert fast.decode(ids, skip_special_tokens=False) == text


@given(st.text(st.characters(codec="utf-8")))
def test_every_text_survives_encoding(fast: Any, text: str) -> None:
    assert fast.decode(fast.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I'll say it's 2024", ["I", "'ll", "Ġsay", "Ġit", "'s", "Ġ", "2", "0", "2", "4"]),
        ("x = (a+b);\n\n    y", ["x", "Ġ=", "Ġ(", "a", "+b", ");ĊĊ", "ĠĠĠ", "Ġy"]),
        ("end \r\n\nnext", ["end", "ĠčĊĊ", "next"]),
        ("a  ", ["a", "ĠĠ"]),
        ("नमस्ते", ["à¤¨à¤®à¤¸à¥įà¤¤à¥ĩ"]),
    ],
)
def test_how_text_is_split_into_words(fast: Any, text: str, words: list[str]) -> None:
    assert [word for word, _ in fast.pre_tokenizer.pre_tokenize_str(text)] == words


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "北京"}}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi <b>"},
    {"role": "assistant", "content": "  hello", "reasoning_content": "\ngreet\n"},
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL["function"]]},
    {"role": "tool", "content": "rain"},
    {"role": "tool", "content": "wind"},
    {"role": "assistant", "content": "Rain and wind."},
]


def test_the_chat_template_renders_chatml(chat: Any) -> None:
    assert chat.apply_chat_template(CONVERSATION[:3], tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi <b><|im_end|>\n"
        "<|im_start|>assistant\n<think>\ngreet\n</think>\n\nhello<|im_end|>\n"
    )
    text = chat.apply_chat_template(CONVERSATION, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in text
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "北京"}}\n</tool_call>'
    assert f"Let me see.\n{call}\n{call}<|im_end|>\n" in text
    responses = "\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nwind\n</tool_response>"
    assert f"<|im_start|>user{responses}<|im_end|>\n" in text
    assert text.endswith("Rain and wind.<|im_end|>\n<|im_start|>assistant\n")
    assert chat.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False).startswith("<|im_start|>user")


def test_the_mask_covers_exactly_what_the_assistant_says(chat: Any) -> None:
    out = chat.apply_chat_template(CONVERSATION, tools=TOOLS, return_assistant_tokens_mask=True, return_dict=True)
    ids, mask = out["input_ids"], out["assistant_masks"]
    assert (
        chat.decode([token for token, learned in zip(ids, mask, strict=True) if learned])
        == (
            "<think>\ngreet\n</think>\n\nhello<|im_end|>Let me see.\n"
            + '<tool_call>\n{"name": "weather", "arguments": {"city": "北京"}}\n</tool_call>\n' * 2
        ).removesuffix("\n")
        + "<|im_end|>Rain and wind.<|im_end|>"
    )
    assert ids == chat(chat.apply_chat_template(CONVERSATION, tools=TOOLS, tokenize=False))["input_ids"]


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=30)


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_a_prompt_is_the_beginning_of_its_conversation_in_tokens(chat: Any, turns: list[tuple[str, str]]) -> None:
    messages = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    whole = chat.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    prompt = chat.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
    ids, mask = whole["input_ids"], whole["assistant_masks"]
    assert ids[: len(prompt)] == prompt
    newline = len(chat("\n")["input_ids"])
    assert mask[len(prompt) :] == [1] * (len(ids) - len(prompt) - newline) + [0] * newline
    assert ids[-newline - 1] == folder.SPECIAL_TOKENS.index(folder.TURN_END)


def test_training_is_repeatable(trained: Path, tmp_path: Path) -> None:
    train_tokenizer(job(tmp_path / "again"))
    for file in trained.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_a_vocabulary_larger_than_the_text_supports(tmp_path: Path) -> None:
    small = Data(train=[str(tmp_path / "small.txt")], valid_fraction=0.0)
    (tmp_path / "small.txt").write_text("one two three two one " * 10)
    with pytest.raises(ConfigError) as caught:
        train_tokenizer(job(tmp_path / "out", vocab_size=5000, data=small))
    assert "vocab_size is 5,000, but 220 characters of text support 28" in str(caught.value)
    assert "use vocab_size 28" in caught.value.hint
    assert not (tmp_path / "out").exists()
    reachable = int(caught.value.hint.split()[2])
    train_tokenizer(job(tmp_path / "out", vocab_size=reachable, data=small))


def test_long_documents_are_capped_but_a_file_by_itself_is_not(tmp_path: Path) -> None:
    words = " ".join(str(index).translate(str.maketrans("0123456789", "abcdefghij")) for index in range(3000))
    (tmp_path / "a.txt").write_text(words)
    alone = train_tokenizer(
        job(
            tmp_path / "o1",
            vocab_size=300,
            max_doc_chars=100,
            data=Data(train=[f"{tmp_path}/a.txt"], valid_fraction=0.0),
        )
    )
    among = train_tokenizer(
        job(
            tmp_path / "o2",
            vocab_size=280,
            max_doc_chars=100,
            min_frequency=1,
            data=Data(train=[f"{tmp_path}/*.txt"], valid_fraction=0.0),
        )
    )
    assert (alone["chars"], alone["cut_chars"]) == (len(words), 0)
    assert (among["chars"], among["cut_chars"]) == (100, len(words) - 100)


def test_held_out_documents_are_not_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {row}"}) + "\n" for row in range(300)))
    source, data = parse_source(str(path)), Data(valid_fraction=0.2)
    ids = [document.id for document in read_training_documents(source, data)]
    assert 200 < len(ids) < 280
    assert not any(is_held_out(name, 0.2) for name in ids)
    assert len(list(read_training_documents(source, Data(valid=["x"], valid_fraction=0.2)))) == 300
    assert len(list(read_training_documents(source, Data(valid_fraction=0.0)))) == 300


def test_conversations_are_trained_on_by_what_they_say(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "zyzzyva xylophone"}, {"role": "assistant", "content": "zyzzyva"}]
    (tmp_path / "rows.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 5)
    train_tokenizer(
        job(tmp_path / "o", vocab_size=280, data=Data(train=[f"{tmp_path}/rows.jsonl"], valid_fraction=0.0))
    )
    assert len(folder.load_fast_tokenizer(tmp_path / "o").encode("zyzzyva").ids) == 1


@given(st.text(max_size=200), st.integers(1, 50))
def test_cutting_loses_nothing(text: str, longest: int) -> None:
    pieces = list(split_into_chunks(text, longest))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= longest for piece in pieces)


def test_unspaced_runs_are_cut_into_pairs_once_their_budget_is_spent() -> None:
    bounded = CjkPretokenizer(whole_chars=10)
    assert bounded("今天天气很好, a long-winded word") == "今天天气很好, a long-winded word"
    assert bounded("今天 今天天气很好") == "今天 今天\n天气\n很好"
    assert bounded("plain words") == "plain words"
    assert bounded("a" * 400) == "\n".join(["aa"] * 200)


@given(st.text(max_size=300))
def test_bounding_adds_nothing_but_line_ends(text: str) -> None:
    assert CjkPretokenizer(whole_chars=0)(text).replace("\n", "") == text.replace("\n", "")
    assert CjkPretokenizer()(text) == text


@pytest.mark.parametrize("read", [folder.load_tokenizer, folder.load_fast_tokenizer])
def test_a_missing_or_damaged_tokenizer(read: Any, tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "no such folder"), (tmp_path, "has no tokenizer.json")):
        with pytest.raises(DataError, match=words) as caught:
            read(path)
        assert "anabatic tokenizer train" in caught.value.hint
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be loaded"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"{"),
        ("special_tokens_map.json", b"[1]"),
        ("added_tokens.json", b"\xff\xfe"),
        ("chat_template.jinja", b"{{ \xff }}"),
    ],
)
def test_the_damaged_file_beside_a_tokenizer_is_named(trained: Path, tmp_path: Path, name: str, content: bytes) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    (tmp_path / "copy" / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        folder.load_tokenizer(tmp_path / "copy")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Failure, match="cannot write"):
        train_tokenizer(job(tmp_path / "file" / "out", vocab_size=300))


@pytest.mark.process
def test_encoding_does_not_import_transformers(trained: Path) -> None:
    code = (
        "import sys; from anabatic.data.tokenizer.hf_folder import load_fast_tokenizer; "
        "load_fast_tokenizer(sys.argv[1]).encode('x');"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(trained)], check=False).returncode == 0


def test_evaluation_counts_bytes_and_tokens(trained: Path, fast: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("one, 二, three\n" * 10)
    job = TokenizerEvalJob(
        tokenizers=[str(trained), str(trained / "tokenizer.json")],
        data=Data(train=[str(tmp_path / "mine.txt")]),
    )
    first, second = evaluate_tokenizers(job)
    assert first.measurements == second.measurements
    assert [item.text for item in first.measurements] == [*SAMPLE_TEXTS, str(tmp_path / "mine.txt")]
    for item, pieces in zip(first.measurements, load_texts(job.data).values(), strict=True):
        assert item.num_bytes == sum(len(piece.encode()) for piece in pieces) > 100
        assert item.num_tokens == sum(len(fast.encode(piece).ids) for piece in pieces)
        assert item.bytes_per_token == pytest.approx(item.num_bytes / item.num_tokens, abs=1e-4)
        assert item.lossless
    by_text = {item.text: item.bytes_per_token for item in first.measurements}
    assert by_text["code"] > by_text["english"] > by_text["chinese"]


def test_the_comparison_is_printed_to_stdout(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.run_tokenizer_eval(TokenizerEvalJob(tokenizers=[str(trained)] * 2))
    table = capsys.readouterr().out
    assert all(word in table for word in (*SAMPLE_TEXTS, "1,000 entries", "(+0.0 %)"))
    recipe.run_tokenizer_eval(TokenizerEvalJob(tokenizers=[str(trained)], json=True))
    (report,) = json.loads(capsys.readouterr().out)
    assert report["vocab_size"] == VOCAB
    assert [item["text"] for item in report["measurements"]] == list(SAMPLE_TEXTS)


def test_the_recipe_writes_a_folder(tmp_path: Path) -> None:
    recipe.run_tokenizer_train(job(tmp_path / "tok", vocab_size=300, max_chars=20_000))
    assert sorted(file.name for file in (tmp_path / "tok").iterdir()) == [
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
