"""`anabatic chat`: edited lines in, answers to stdout as they are written, everything else to stderr."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anabatic.config.chat import ChatJob
from anabatic.config.sections.common import require_setting
from anabatic.core import log
from anabatic.core.errors import AnabaticError, UserError
from anabatic.core.formatting import format_count, to_valid_utf8
from anabatic.core.json_reader import JsonlWriter
from anabatic.core.paths import RunFolder, get_cache_root, make_write_error
from anabatic.device.device import select_device
from anabatic.infer.dialogue import Dialogue
from anabatic.infer.engine import Engine
from anabatic.infer.loaded_model import load_model_to_ask
from anabatic.infer.tool_execution import open_python_tool
from anabatic.models.model_init import count_parameters
from anabatic.recipes.chat import slash_commands
from anabatic.recipes.chat.conversation import ChatSession

MAX_CONTEXT_TOKENS = 8192
"""Tokens of a conversation at most, whatever the model allows: the cache is allocated at once."""


def run(job: ChatJob) -> None:
    """Talk until the input ends, or say the lines of `job.prompt` and leave.

    Raises:
        ConfigError: several processes.
        DataError: the model or its tokenizer cannot be used; a line of `job.prompt` is too long.
        Failure: the conversation cannot be written to `job.out`.
    """
    replace_undecodable_text()
    with open_dialogue(job) as dialogue:
        if not dialogue.has_chat_template:
            log.warn("the model has no chat template: each line is continued as plain text, nothing is remembered")
        chat = ChatSession(dialogue, _open_transcript(job.out, dialogue.system))
        try:
            _run_conversation(chat, job)
        finally:
            chat.close()


@contextmanager
def open_dialogue(job: ChatJob) -> Iterator[Dialogue]:
    """Load the model of a job and open a conversation with it.

    Raises:
        ConfigError: several processes.
        DataError: the model or its tokenizer cannot be used.
    """
    require_setting(
        job.device.nproc == 1, f"device.nproc is {job.device.nproc}", "chat runs in one process: leave it out"
    )
    device = select_device(job.device)
    loaded = load_model_to_ask(job.model, device, job.adapter, job.chat_template)
    model = loaded.model
    max_len = min(model.config.get_text_config().max_position_embeddings, MAX_CONTEXT_TOKENS)
    system = None if job.system is None else to_valid_utf8(job.system)
    parameters = format_count(count_parameters(model)[0])
    log.info(f"{loaded.folder}: {parameters} parameters on {device.name}, context {max_len} tokens")
    with open_python_tool(job.python, job.sandbox, loaded.tokenizer) as tool:
        engine = Engine(model, loaded.tokenizer, max_batch=1, max_len=max_len, tool=tool)
        yield Dialogue(engine, job.sampling, system, pictures=loaded.pictures)


def _run_conversation(chat: ChatSession, job: ChatJob) -> None:
    if not job.prompt:
        log.info("/help lists the commands")
        handle_lines(chat, read_messages(job.history, list(slash_commands.SLASH_COMMANDS)))
    for line in map(to_valid_utf8, job.prompt):
        log.info(f"> {line}")
        chat.write_answer(line)


def handle_lines(chat: ChatSession, lines: Iterator[str]) -> None:
    """Handle messages until they end or `/exit`. A mistake, or a file that cannot be written, is reported and the
    conversation continues."""
    for line in lines:
        if not line.strip():
            continue
        is_command = re.match("/[A-Za-z]", line) is not None
        try:
            slash_commands.run_slash_command(chat, line) if is_command else chat.write_answer(line)
        except AnabaticError as error:
            if not (is_command or isinstance(error, UserError)):
                raise
            sys.stdout.flush()
            log.info(error.render())
        except KeyboardInterrupt:  # behind an answer that was already stopped
            if not sys.stdin.isatty():
                raise
            log.info(EXIT_HINT)
        if chat.over:
            return


def _open_transcript(out: str | None, system: str | None) -> JsonlWriter | None:
    if out is None:
        return None
    folder = RunFolder(out)
    folder.create_folder()
    path = folder.root / "chat.jsonl"
    try:
        journal = JsonlWriter(path)
    except OSError as error:
        raise make_write_error(path, error) from error
    if system:
        journal.write({"role": "system", "content": system})
    return journal


BLOCK_MARK = '"""'
"""A line of this alone begins and ends a message of several lines."""
MAX_HISTORY_LINES = 1000
PROMPT, CONTINUATION_PROMPT = "> ", "... "
EXIT_HINT = "(Ctrl-D or /exit leaves)"


def read_messages(history: bool, words: Sequence[str]) -> Iterator[str]:
    """Yield what the user types, message by message, until the input ends.

    Args:
        history: keep the lines for the next time, at a terminal.
        words: commands that the tabulator completes.
    """
    message = MultilineMessage()
    for line in _read_terminal_lines(message, history, words) if _is_interactive() else sys.stdin:
        if (text := message.add_line(line)) is not None:
            yield text
    if message.is_incomplete:
        yield message.take_message()


def replace_undecodable_text() -> None:
    """Bytes that are no UTF-8 on stdin, and characters that stdout's encoding lacks, must not end a conversation."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


class MultilineMessage:
    """Lines that belong together: a backslash at the end continues a line on the next, and a block has its marks."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._block = False

    @property
    def is_incomplete(self) -> bool:
        """True when further lines are awaited."""
        return self._block or bool(self._parts)

    def add_line(self, line: str) -> str | None:
        """Take a line; return the message when it is whole."""
        text = line.rstrip("\r\n")
        mark = text.strip() == BLOCK_MARK
        if mark and (self._block or not self._parts):
            self._block = not self._block
            return None if self._block else self.take_message()
        if self._block:
            self._parts.append(text)
            return None
        goes_on = text.endswith("\\")
        self._parts.append(text[:-1] if goes_on else text)
        return None if goes_on else self.take_message()

    def take_message(self) -> str:
        """Return the message as far as it was typed, and begin anew."""
        text = "\n".join(self._parts)
        self.clear_lines()
        return text

    def clear_lines(self) -> None:
        """Begin anew."""
        self._parts.clear()
        self._block = False


def _read_terminal_lines(message: MultilineMessage, history: bool, words: Sequence[str]) -> Iterator[str]:
    """Yield lines typed at a terminal until Ctrl-D; Ctrl-C forgets what was typed of a message."""
    import readline

    readline.set_completer_delims(" \t\n")
    readline.set_completer(_make_completer(readline, words))
    readline.parse_and_bind("tab: complete")
    known = _LineHistory(readline) if history else None
    try:
        while True:
            try:
                yield input(CONTINUATION_PROMPT if message.is_incomplete else PROMPT)
            except KeyboardInterrupt:
                message.clear_lines()
                sys.stdout.write("\n")
                log.info(EXIT_HINT)
            except EOFError:
                sys.stdout.write("\n")
                return
    finally:
        if known is not None:
            known.save_history()


def _make_completer(readline: Any, words: Sequence[str]) -> Any:
    """Return readline's function that completes commands at the beginning of a line."""

    def complete_command(text: str, state: int) -> str | None:
        if readline.get_begidx() or not text.startswith("/"):
            return None
        fitting = [f"{word} " for word in words if word.startswith(text)]
        return fitting[state] if state < len(fitting) else None

    return complete_command


class _LineHistory:
    """readline's history in a file."""

    def __init__(self, readline: Any) -> None:
        self._readline = readline
        path = get_cache_root() / "chat_history"
        self._path: Path | None = path
        try:
            _create_private_file(path)
            readline.read_history_file(path)
        except (OSError, ValueError) as error:  # ValueError: it is no text
            log.warn(f"{path} is no history and is not used: {error}")
            self._path = None
        readline.set_history_length(MAX_HISTORY_LINES)

    def save_history(self) -> None:
        """Write what was typed; a history that cannot be written is reported, and costs nothing else."""
        if self._path is None:
            return
        try:
            self._readline.write_history_file(self._path)
            self._path.chmod(0o600)
        except OSError as error:
            log.warn(f"{self._path} cannot be written: {error.strerror}")


def _create_private_file(path: Path) -> None:
    """Make sure that a file is there, and that it is its owner's alone.

    Raises:
        OSError: it cannot be, for example because it is a link or somebody else's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(handle, 0o600)
    finally:
        os.close(handle)
