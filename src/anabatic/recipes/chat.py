"""`anabatic chat`: answers to stdout as they are written, everything else to stderr."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from anabatic.config.chat import ChatJob
from anabatic.config.shared import require
from anabatic.core import log
from anabatic.core.errors import AnabaticError, UserError
from anabatic.core.jsonl import JsonlWriter
from anabatic.core.paths import RunFolder, cannot_write, write_atomic
from anabatic.core.text import count, did_you_mean, utf8
from anabatic.data import tokenizer as tokenizers
from anabatic.device.device import pick
from anabatic.infer.dialogue import Dialogue
from anabatic.infer.engine import Engine
from anabatic.infer.tool import python_tool, shown
from anabatic.models.build import count_parameters
from anabatic.models.hf import below, load_config, load_model, require_fit, resolve, tokenizer_folder

LONGEST_CONTEXT = 8192
"""Tokens of a conversation at most, whatever the model allows: the cache is allocated at once."""

HELP = """\
/help            this list
/system TEXT     set the system message and start over; without TEXT: remove it
/reset           forget the conversation
/save FILE       write the conversation to FILE, one JSON line that `anabatic sft` can learn from
/quit            leave (so does Ctrl-D); Ctrl-C stops an answer, or forgets the line
A backslash at the end of a line continues it on the next."""


def run(job: ChatJob) -> None:
    """Talk until the input ends, or say the lines of `job.prompt` and leave.

    Raises:
        ConfigError: several processes.
        DataError: the model or its tokenizer cannot be used; a line of `job.prompt` is too long.
        Failure: the conversation cannot be written to `job.out`.
    """
    require(job.device.nproc == 1, f"device.nproc is {job.device.nproc}", "chat runs in one process: leave it out")
    _tolerate_any_text()
    device = pick(job.device)
    folder = resolve(job.model)
    shares = below(job.adapter, folder)
    tokenizer = tokenizers.load(tokenizer_folder(folder, shares))
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
            _talk(chat, job.prompt)
        finally:
            chat.close()


def _talk(chat: Chat, prompt: list[str]) -> None:
    if not prompt:
        log.info("/help lists the commands")
        chat.talk(_lines())
    for line in map(utf8, prompt):
        log.info(f"> {line}")
        chat.answer(line)


class Chat:
    """Reads lines, obeys commands, writes answers."""

    def __init__(self, dialogue: Dialogue, journal: JsonlWriter | None) -> None:
        self.dialogue = dialogue
        self.journal = journal
        self.over = False
        self.commands = {
            "/help": self._help,
            "/system": self._system,
            "/reset": self._reset,
            "/save": self._save,
            "/quit": self._quit,
        }

    def talk(self, lines: Iterator[str]) -> None:
        """Handle lines until they end or `/quit`. A user's mistake is told and the talk goes on."""
        for line in lines:
            if not line.strip():
                continue
            try:
                self._command(line) if line.startswith("/") else self.answer(line)
            except UserError as error:
                sys.stdout.flush()
                log.info(error.render())
            if self.over:
                return

    def answer(self, text: str) -> None:
        """Write the answer to `text` while it is made, then its length and speed to stderr.

        Raises:
            DataError: the text is too long.
        """
        dialogue, began, stopped = self.dialogue, time.perf_counter(), False
        pieces = dialogue.say(text)
        try:
            for piece in pieces:
                sys.stdout.write(shown(piece))
                sys.stdout.flush()
        except KeyboardInterrupt:
            stopped = True
        finally:
            pieces.close()  # type: ignore[attr-defined]
        sys.stdout.write("\n")
        sys.stdout.flush()
        self._note("user", text)
        self._note("assistant", dialogue.messages[-1]["content"])
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

    def _note(self, role: str, content: str) -> None:
        if self.journal is not None:
            self.journal.write({"role": role, "content": content})

    def _command(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        if name not in self.commands:
            log.info(f"no command {name}.{did_you_mean(name, self.commands)} /help lists them")
            return
        self.commands[name](rest.strip())

    def _help(self, _: str) -> None:
        log.info(HELP)

    def _system(self, text: str) -> None:
        self.dialogue.system = text or None
        self.dialogue.forget()
        if text:
            self._note("system", text)
        log.info("system message set, conversation forgotten" if text else "no system message, conversation forgotten")

    def _reset(self, _: str) -> None:
        self.dialogue.forget()
        log.info("conversation forgotten")

    def _save(self, name: str) -> None:
        if not name:
            log.info("/save needs a file name")
            return
        path = Path(name).expanduser()
        if path.exists():
            log.info(f"{path} exists and is left as it is: choose another name")
            return
        row = json.dumps({"messages": self.dialogue.transcript()}, ensure_ascii=False)
        try:
            write_atomic(path, row + "\n")
        except AnabaticError as error:
            log.info(error.render())
            return
        log.info(f"wrote {len(self.dialogue.transcript())} messages to {path}")

    def _quit(self, _: str) -> None:
        self.over = True


def _lines() -> Iterator[str]:
    """Yield what the user types; a line that ends in a backslash goes on with the next. Ends at end of input."""
    whole: list[str] = []
    for line in _terminal_lines(whole) if _at_terminal() else sys.stdin:
        text = line.rstrip("\r\n")
        if text.endswith("\\"):
            whole.append(text[:-1])
            continue
        yield "\n".join([*whole, text])
        whole.clear()
    if whole:
        yield "\n".join(whole)


def _terminal_lines(whole: list[str]) -> Iterator[str]:
    """Yield lines typed at a terminal with line editing, until Ctrl-D; Ctrl-C forgets the line."""
    import readline  # noqa: F401 - gives `input` editing and history

    while True:
        try:
            yield input("... " if whole else "> ")
        except KeyboardInterrupt:
            whole.clear()
            sys.stdout.write("\n")
            log.info("(Ctrl-D or /quit leaves)")
        except EOFError:
            sys.stdout.write("\n")
            return


def _at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _tolerate_any_text() -> None:
    """Bytes that are no UTF-8 on stdin, and characters that stdout's encoding lacks, must not end a conversation."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


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
