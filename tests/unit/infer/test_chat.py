"""The dialogue and the `session` recipe, without a terminal."""

from __future__ import annotations

import io
import json
import logging

import pytest

from anabatic.config.chat import ChatJob, Sampling
from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.core.errors import ConfigError, DataError
from anabatic.infer.dialogue import Dialogue
from anabatic.infer.engine import Engine
from anabatic.models.pretrained import save_model
from anabatic.recipes.chat import conversation, session
from anabatic_testing.random_models import build_random_model

CPU = DeviceConfig(type="cpu", dtype="fp32", threads=1)
SHORT = Sampling(temperature=0.8, max_new_tokens=5, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("chat") / "model"
    save_model(build_random_model(len(tokenizer), max_len=200), path, tokenizer)
    return path


@pytest.fixture
def talk(folder, monkeypatch, capsys, caplog):
    """Run the recipe on typed lines; return what went to stdout and what was told."""

    def go(typed="", **settings):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="anabatic"):
            session.run(ChatJob(**{"model": str(folder), "sampling": SHORT, "device": CPU, **settings}))
        return capsys.readouterr().out, caplog.text

    return go


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def dialogue(model, tokenizer, max_len=128, sampling=SHORT, **settings):
    return Dialogue(Engine(model, tokenizer, max_batch=1, max_len=max_len), sampling, **settings)


@pytest.mark.process
def test_lines_are_answered_until_the_input_ends(talk, tmp_path):
    out, told = talk("hello\n\nhow are\\\nyou\n", out=str(tmp_path / "run"))
    said = rows(tmp_path / "run" / "chat.jsonl")
    assert [row["role"] for row in said] == ["user", "assistant"] * 2
    assert said[2]["content"] == "how are\nyou"
    assert out == said[1]["content"] + "\n" + said[3]["content"] + "\n"
    assert told.count("tok/s") == 2


@pytest.mark.process
def test_prompts_are_said_one_after_another(talk, tmp_path):
    out, told = talk("never read", prompt=["one", "two"], system="be brief", out=str(tmp_path))
    said = rows(tmp_path / "chat.jsonl")
    assert [row["role"] for row in said] == ["system", "user", "assistant", "user", "assistant"]
    assert [row["content"] for row in said[1::2]] == ["one", "two"]
    assert "> one" in told and "> two" in told
    assert out == "".join(row["content"] + "\n" for row in said[2::2])
    assert talk("", prompt=["one", "two"], system="be brief")[0] == out


@pytest.mark.process
def test_commands(talk, tmp_path):
    saved = tmp_path / "talk.jsonl"
    typed = f"/help\n/system be kind\nhello\n/save {saved}\n/reset\n/sav\n/save\n/system\n/quit\nnever\n"
    out, told = talk(typed)
    assert out.count("\n") >= 1 and "tok/s" in told
    for text in ("/reset", "system message set", "conversation forgotten", "no command /sav", "needs a file name"):
        assert text in told
    assert 'Did you mean "/save"?' in told
    assert "no system message" in told
    messages = rows(saved)[0]["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[2]["content"] + "\n" == out
    assert told.count("tok/s") == 1


@pytest.mark.process
def test_a_line_that_is_too_long_is_told_and_the_talk_goes_on(talk, tmp_path):
    out, told = talk("long " * 100 + "\nshort\n", out=str(tmp_path))
    assert "error: the message has" in told and "at most 200 fit" in told
    assert [row["content"] for row in rows(tmp_path / "chat.jsonl")][0] == "short"
    assert told.count("tok/s") == 1
    with pytest.raises(DataError, match="the message has"):
        talk(prompt=["long " * 100])


@pytest.mark.process
def test_a_file_that_cannot_be_written_is_told(talk, tmp_path):
    _, told = talk(f"hello\n/save {tmp_path}/none/file\nhello\n")
    assert "error: cannot write" in told and told.count("tok/s") == 2


def test_several_processes_are_refused(talk):
    with pytest.raises(ConfigError, match=r"device\.nproc is 2"):
        talk(device=DeviceConfig(nproc=2))


def test_the_oldest_turns_are_dropped_and_that_is_said(model, tokenizer, caplog):
    one = dialogue(model, tokenizer, max_len=100, system="sys")
    recipe = conversation.ChatSession(one, None)
    with caplog.at_level(logging.INFO, logger="anabatic"):
        for number in range(8):
            recipe.write_answer(f"question {number}")
    assert "oldest messages were dropped" in caplog.text
    transcript = one.get_transcript()
    assert transcript[0] == {"role": "system", "content": "sys"}
    assert transcript[-2]["content"] == "question 7"
    assert [message["role"] for message in transcript[1:3]] == ["user", "assistant"]
    assert len(transcript) < 17


def test_an_answer_left_early_is_remembered_as_far_as_it_was_said(model, tokenizer):
    one = dialogue(model, tokenizer, sampling=Sampling(temperature=1.0, max_new_tokens=60, seed=3))
    pieces = one.answer_message("hello")
    said = next(pieces)
    pieces.close()
    assert one.messages[-1] == {"role": "assistant", "content": said}
    assert one.request.finish_reason == "cancelled"
    assert not one.engine.is_busy
    assert "".join(one.answer_message("again")) == one.messages[-1]["content"]


def test_ctrl_c_stops_the_answer_not_the_chat(model, tokenizer, monkeypatch, caplog):
    one = dialogue(model, tokenizer, sampling=Sampling(temperature=1.0, max_new_tokens=60, seed=3))
    recipe = conversation.ChatSession(one, None)
    step, calls = one.engine.step, iter(range(100))

    def interrupted():
        if next(calls) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(one.engine, "step", interrupted)
    with caplog.at_level(logging.INFO, logger="anabatic"):
        recipe.write_answer("hello")
    assert "(5 tokens" in caplog.text and "stopped" in caplog.text
    monkeypatch.setattr(one.engine, "step", step)
    recipe.write_answer("again")
    assert len(one.messages) == 4


def test_seeds_repeat_a_conversation_but_not_an_answer(model, tokenizer):
    talks = []
    for _ in range(2):
        one = dialogue(model, tokenizer, sampling=Sampling(temperature=1.5, top_k=None, max_new_tokens=12, seed=9))
        talks.append(["".join(one.answer_message("hi")), "".join(one.answer_message("hi"))])
        one.clear_messages()
        talks[-1].append("".join(one.answer_message("hi")))
    assert talks[0] == talks[1]
    assert talks[0][0] != talks[0][2]


@pytest.mark.process
def test_without_a_template_a_line_is_continued_alone(folder, model, tokenizer, talk, tmp_path):
    import shutil

    shutil.copytree(folder, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((tmp_path / "plain" / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "plain" / "tokenizer_config.json").write_text(json.dumps(config))
    out, told = talk(
        "def f\ndef f\n", model=str(tmp_path / "plain"), sampling=Sampling(temperature=0, max_new_tokens=5)
    )
    assert "no chat template" in told
    first, second = (
        out.rstrip("\n").split("\n") if out.count("\n") == 2 else (out[: len(out) // 2], out[len(out) // 2 :])
    )
    assert first.strip("\n") == second.strip("\n")
