"""`anabatic chat` at a terminal, as a person types, and its parts: messages of several lines, commands, the history."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.config.chat import Sampling
from anabatic.core.errors import ConfigError, DataError
from anabatic.infer.dialogue import Dialogue
from anabatic.infer.engine import Engine
from anabatic.models.pretrained import save_model
from anabatic.recipes.chat import conversation, session, slash_commands
from unit.infer.scripted import says

SHORT = Sampling(temperature=0.0, max_new_tokens=4)


@pytest.fixture(scope="module")
def talker(tokenizer):
    return says(tokenizer, ["a", "b", "c"], max_len=4096, endless=True)


class Terminal:
    """A program at its own terminal."""

    def __init__(self, words, env):
        self.master, inner = os.openpty()
        self.process = subprocess.Popen(
            words,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(inner)
        self.seen = ""

    def until(self, text, again=b""):
        """Read until `text` has come; return what came before it. `again` is pressed when a second brings nothing."""
        limit = time.monotonic() + 60  # a machine under load
        while text not in self.seen:
            assert time.monotonic() < limit, self.seen
            if select.select([self.master], [], [], 1)[0]:
                try:
                    self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
                except OSError:
                    pytest.fail(f"it ended: {self.seen}")
            else:
                os.write(self.master, again)
        before, _, self.seen = self.seen.partition(text)
        return before

    def close(self):
        """End the program, whatever it does."""
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def type(self, text, until):
        os.write(self.master, text.encode())
        return self.until(until)


@pytest.mark.process
def test_a_conversation_at_a_terminal(talker, tokenizer, tmp_path):
    save_model(talker, tmp_path / "model", tokenizer)
    options = ["--sampling.temperature", "0", "--sampling.max-new-tokens", "4", "--device.type", "cpu"]
    env = {**os.environ, "ANABATIC_CACHE": str(tmp_path / "cache"), "TERM": "dumb", "NO_COLOR": "1"}
    with contextlib.closing(
        Terminal([sys.executable, "-m", "anabatic", "chat", "-m", str(tmp_path / "model"), *options], env)
    ) as here:
        here.until("/help lists the commands")
        here.until("> ")
        here.type("hello\n", "abca")
        here.until("(4 tokens, ")
        here.type('"""\nfirst\nsecond\n"""\n', "... ")
        here.until("abca")
        assert 'Did you mean "/regenerate"?' in here.type("/regenrate\n", "a blank before the slash")
        here.type("/regenerate\n", "abca")
        here.type("/params max_new_tokens 4000\n", "max_new_tokens  4000")
        here.type("long\n", "abcabcabcabcabcabc")
        here.type("\x03", ", stopped)")
        here.until("> ")
        here.type("never said", "never said")
        # CPython's readline overlooks a signal between its last output and its next wait for input.
        here.until("(Ctrl-D or /exit leaves)", again=b"\x03")
        here.type("/he\t\n", "write the conversation")
        talk = tmp_path / "talk.jsonl"
        here.type(f"/save {talk}\n", "wrote 6 messages")
        here.type(f"/load {talk}\n", "6 messages from")
        os.write(here.master, b"/exit\n")
        assert here.process.wait(120) == 0
    messages = json.loads(talk.read_text())["messages"]
    assert [message["content"] for message in messages[:4]] == ["hello", "abca", "first\nsecond", "abca"]
    assert re.fullmatch("(abc)+a?b?", messages[5]["content"]) and len(messages[5]["content"]) < 4000
    history = tmp_path / "cache" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "hello" in history.read_text() and "never said" not in history.read_text()


def messages_of(text, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return list(session.read_messages(True, []))


def test_messages_of_several_lines(monkeypatch):
    text = 'one\ntwo\\\nthree\n"""\nfour\n\\\n"""\n"""\n"""\nsay """\n"""\nopen'
    assert messages_of(text, monkeypatch) == ["one", "two\nthree", "four\n\\", "", 'say """', "open"]


@given(st.lists(st.text(alphabet='a"\\ \n/é', max_size=8)))
@settings(max_examples=60)
def test_every_sign_that_is_typed_is_said(parts):
    message = session.MultilineMessage()
    said = [whole for line in "".join(parts).split("\n") if (whole := message.add_line(line)) is not None]
    text = "".join([*said, message.take_message()])
    kept = [sign for sign in "".join(parts) if sign in "aé/"]
    assert [sign for sign in text if sign in "aé/"] == kept and not message.is_incomplete


def test_a_history_that_is_not_ours_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "else").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "else")
    with pytest.raises(OSError):
        session._create_private_file(tmp_path / "link")
    (tmp_path / "open").write_text("x")
    (tmp_path / "open").chmod(0o644)
    session._create_private_file(tmp_path / "open")
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def talk(talker, tokenizer):
    return conversation.ChatSession(Dialogue(Engine(talker, tokenizer, max_batch=1, max_len=256), SHORT), None)


def test_another_answer_takes_the_place_of_the_last(talk, capsys):
    with pytest.raises(DataError, match="no message to answer again"):
        slash_commands.run_slash_command(talk, "/regenerate")
    talk.write_answer("one")
    talk.write_answer("two")
    slash_commands.run_slash_command(talk, "/params max_new_tokens 6")
    slash_commands.run_slash_command(talk, "/regenerate")
    assert [message["content"] for message in talk.dialogue.messages] == ["one", "abca", "two", "abcabc"]
    assert capsys.readouterr().out.splitlines() == ["abca", "abca", "abcabc"]


def test_settings_of_the_talk():
    assert slash_commands.update_sampling(SHORT, "top_p 0.5").top_p == 0.5
    assert slash_commands.update_sampling(SHORT, "top_k null").top_k is None
    assert slash_commands.update_sampling(SHORT, r"stop 'a b' c").stop == ["a b", "c"]
    assert slash_commands.update_sampling(Sampling(stop=["x"]), "stop null").stop == []
    for wrong, words in (
        ("temprature 1", 'Did you mean "temperature"?'),
        ("temperature -1", "temperature is -1"),
        ("temperature warm", "temperature"),
        ("top_p 1 2", "needs one value, 2 are given"),
        ("top_p", "needs one value, 0 are given"),
        ("stop 'a", "No closing quotation"),
        ("json_schema {", "json_schema is no JSON"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            slash_commands.update_sampling(SHORT, wrong)


WRONG = {
    "nothing": "",
    "no JSON": "{",
    "two": '{"messages": []}\n{"messages": []}',
    "a list": "[1]",
    "no messages": "{}",
    "a ghost": '{"messages": [{"role": "ghost", "content": "x"}]}',
    "a tool": '{"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]}',
    "a late system message": '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}',
    "bytes": b"\xff\xfe",
}


@pytest.mark.parametrize("about", [*WRONG, "missing", "a folder", "/dev/zero"])
def test_a_file_that_is_no_conversation_changes_nothing(talk, tmp_path, about):
    talk.write_answer("one")
    before = list(talk.dialogue.messages)
    path = {"a folder": tmp_path, "/dev/zero": Path(about)}.get(about, tmp_path / "talk")
    if about in WRONG:
        content = WRONG[about]
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError):
        slash_commands.run_slash_command(talk, f"/load {path}")
    assert talk.dialogue.messages == before


def test_what_cannot_be_answered_is_not_remembered(talk, tmp_path):
    with pytest.raises(ConfigError, match="nothing to write"):
        slash_commands.run_slash_command(talk, f"/save {tmp_path}/talk")
    talk.write_answer("one")
    before = list(talk.dialogue.messages)
    slash_commands.run_slash_command(talk, "/params regex (")
    for line in ("two", "three"):
        with pytest.raises(ConfigError):  # the form is wrong, or the library that reads it is not there
            talk.write_answer(line)
    assert talk.dialogue.messages == before


def test_what_was_saved_is_loaded(talk, tmp_path):
    slash_commands.run_slash_command(talk, "/system Be brief.")
    talk.write_answer("one")
    slash_commands.run_slash_command(talk, f"/save {tmp_path}/talk")
    saved = talk.dialogue.get_transcript()
    slash_commands.run_slash_command(talk, "/system")
    slash_commands.run_slash_command(talk, f"/load {tmp_path}/talk")
    assert talk.dialogue.get_transcript() == saved and len(saved) == 3


def test_lines_that_only_look_like_commands(talk, monkeypatch, capsys):
    session.handle_lines(talk, messages_of("// a comment\n /system x\n/\n/quit\nnever\n", monkeypatch))
    said = [message["content"] for message in talk.dialogue.messages if message["role"] == "user"]
    assert said == ["// a comment", " /system x", "/"]
