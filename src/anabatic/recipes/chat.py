"""`anabatic chat`: answers to stdout as they are written, everything else to stderr."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Generator, Iterator
from typing import Any

from anabatic.config.chat import ChatJob
from anabatic.config.shared import require
from anabatic.core import log
from anabatic.core.errors import AnabaticError, UserError
from anabatic.core.jsonl import JsonlWriter
from anabatic.core.paths import RunFolder, cannot_write
from anabatic.core.text import count, utf8
from anabatic.data import templates
from anabatic.data import tokenizer as tokenizers
from anabatic.device.device import pick
from anabatic.infer.dialogue import Dialogue
from anabatic.infer.engine import Engine
from anabatic.infer.tool import python_tool, shown
from anabatic.models import classifier
from anabatic.models.build import count_parameters
from anabatic.models.hf import below, load_config, load_model, require_fit, resolve, tokenizer_folder
from anabatic.recipes import chat_commands, chat_input

LONGEST_CONTEXT = 8192
"""Tokens of a conversation at most, whatever the model allows: the cache is allocated at once."""


def run(job: ChatJob) -> None:
    """Talk until the input ends, or say the lines of `job.prompt` and leave.

    Raises:
        ConfigError: several processes.
        DataError: the model or its tokenizer cannot be used; a line of `job.prompt` is too long.
        Failure: the conversation cannot be written to `job.out`.
    """
    require(job.device.nproc == 1, f"device.nproc is {job.device.nproc}", "chat runs in one process: leave it out")
    chat_input.tolerate_any_text()
    device = pick(job.device)
    folder = resolve(job.model)
    classifier.require_writer(folder)
    shares = below(job.adapter, folder)
    tokenizer = tokenizers.load(templates.folder_with(tokenizer_folder(folder, shares), job.chat_template))
    require_fit(load_config(folder), tokenizer, folder)
    model = load_model(folder, device.torch, device.dtype, shares)
    max_len = min(model.config.max_position_embeddings, LONGEST_CONTEXT)
    system = None if job.system is None else utf8(job.system)
    log.info(f"{folder}: {count(count_parameters(model)[0])} parameters on {device.name}, context {max_len} tokens")
    with python_tool(job.python, job.sandbox, tokenizer) as tool:
        dialogue = Dialogue(Engine(model, tokenizer, max_batch=1, max_len=max_len, tool=tool), job.sampling, system)
        if not dialogue.has_turns:
            log.warn("the model has no chat template: each line is continued as plain text, nothing is remembered")
        chat = Chat(dialogue, _journal(job.out, system))
        try:
            _talk(chat, job)
        finally:
            chat.close()


def _talk(chat: Chat, job: ChatJob) -> None:
    if not job.prompt:
        log.info("/help lists the commands")
        chat.talk(chat_input.lines(job.history, list(chat_commands.COMMANDS)))
    for line in map(utf8, job.prompt):
        log.info(f"> {line}")
        chat.answer(line)


class Chat:
    """Reads lines, obeys commands, writes answers."""

    def __init__(self, dialogue: Dialogue, journal: JsonlWriter | None) -> None:
        self.dialogue = dialogue
        self.journal = journal
        self.over = False

    def talk(self, lines: Iterator[str]) -> None:
        """Handle messages until they end or `/exit`. A mistake, or a file that cannot be written, is told and the talk
        goes on."""
        for line in lines:
            if not line.strip():
                continue
            is_command = re.match("/[A-Za-z]", line) is not None
            try:
                chat_commands.obey(self, line) if is_command else self.answer(line)
            except AnabaticError as error:
                if not (is_command or isinstance(error, UserError)):
                    raise
                sys.stdout.flush()
                log.info(error.render())
            except KeyboardInterrupt:  # behind an answer that was already stopped
                if not sys.stdin.isatty():
                    raise
                log.info(chat_input.LEAVES)
            if self.over:
                return

    def answer(self, text: str) -> None:
        """Write the answer to `text` while it is made, then its length and speed to stderr.

        Raises:
            DataError: the text is too long.
        """
        self._write(self.dialogue.say(text))
        self.note("user", text)
        self.note("assistant", self.dialogue.messages[-1]["content"])

    def again(self) -> None:
        """Write another answer to the last message.

        Raises:
            DataError: there is no message.
        """
        self._write(self.dialogue.say_again())
        self.note("assistant", self.dialogue.messages[-1]["content"], regenerated=True)

    def _write(self, pieces: Generator[str, None, None]) -> None:
        began, stopped = time.perf_counter(), False
        try:
            for piece in pieces:
                sys.stdout.write(shown(piece))
                sys.stdout.flush()
        except KeyboardInterrupt:
            stopped = True
        finally:
            pieces.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
        self._say_how(time.perf_counter() - began, stopped)

    def close(self) -> None:
        """Close the journal."""
        if self.journal is not None:
            self.journal.close()

    def _say_how(self, seconds: float, stopped: bool) -> None:
        request = self.dialogue.request
        if request is None:
            return
        if self.dialogue.dropped:
            log.info(
                f"(the {self.dialogue.dropped} oldest messages were dropped: "
                f"{self.dialogue.engine.max_len} tokens of context are full)"
            )
        ends = {"length": f", cut at {len(request.ids)} tokens", "cancelled": ", stopped"}
        end = ", stopped" if stopped else ends.get(request.finish_reason, "")
        log.info(f"({len(request.ids)} tokens, {len(request.ids) / max(seconds, 1e-9):.1f} tok/s{end})")

    def note(self, role: str, content: str, **more: Any) -> None:
        """Append a message to the journal, where there is one."""
        if self.journal is not None:
            self.journal.write({"role": role, "content": content, **more})


def _journal(out: str | None, system: str | None) -> JsonlWriter | None:
    if out is None:
        return None
    folder = RunFolder(out)
    folder.create()
    path = folder.root / "chat.jsonl"
    try:
        journal = JsonlWriter(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    if system:
        journal.write({"role": "system", "content": system})
    return journal
