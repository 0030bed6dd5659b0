"""`anabatic chat`: answers to stdout as they are written, everything else to stderr."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from anabatic.config.chat import ChatJob
from anabatic.config.sections.common import require_setting
from anabatic.core import log
from anabatic.core.errors import AnabaticError, UserError
from anabatic.core.formatting import format_count, to_valid_utf8
from anabatic.core.json_lines import JsonlWriter
from anabatic.core.paths import RunFolder, make_write_error
from anabatic.data.chat import custom_templates
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.device.device import select_device
from anabatic.infer.dialogue import Dialogue
from anabatic.infer.engine import Engine
from anabatic.infer.tool_execution import open_python_tool
from anabatic.models import classifier
from anabatic.models.model_init import count_parameters
from anabatic.models.pretrained import (
    find_tokenizer_folder,
    load_config,
    load_model,
    require_tokenizer_fits,
    resolve_merged_adapters,
    resolve_model_folder,
)
from anabatic.recipes.chat import line_input, slash_commands
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
    require_setting(
        job.device.nproc == 1, f"device.nproc is {job.device.nproc}", "chat runs in one process: leave it out"
    )
    line_input.replace_undecodable_text()
    device = select_device(job.device)
    folder = resolve_model_folder(job.model)
    classifier.require_text_model(folder)
    adapters = resolve_merged_adapters(job.adapter, folder)
    tokenizer = tokenizers.load_tokenizer(
        custom_templates.folder_with_template(find_tokenizer_folder(folder, adapters), job.chat_template)
    )
    require_tokenizer_fits(load_config(folder), tokenizer, folder)
    model = load_model(folder, device.torch_device, device.dtype, adapters)
    max_len = min(model.config.max_position_embeddings, MAX_CONTEXT_TOKENS)
    system = None if job.system is None else to_valid_utf8(job.system)
    log.info(
        f"{folder}: {format_count(count_parameters(model)[0])} parameters on {device.name}, context {max_len} tokens"
    )
    with open_python_tool(job.python, job.sandbox, tokenizer) as tool:
        dialogue = Dialogue(Engine(model, tokenizer, max_batch=1, max_len=max_len, tool=tool), job.sampling, system)
        if not dialogue.has_chat_template:
            log.warn("the model has no chat template: each line is continued as plain text, nothing is remembered")
        chat = ChatSession(dialogue, _open_transcript(job.out, system))
        try:
            _run_conversation(chat, job)
        finally:
            chat.close()


def _run_conversation(chat: ChatSession, job: ChatJob) -> None:
    if not job.prompt:
        log.info("/help lists the commands")
        handle_lines(chat, line_input.read_messages(job.history, list(slash_commands.SLASH_COMMANDS)))
    for line in map(to_valid_utf8, job.prompt):
        log.info(f"> {line}")
        chat.write_answer(line)


def handle_lines(chat: ChatSession, lines: Iterator[str]) -> None:
    """Handle messages until they end or `/exit`. A mistake, or a file that cannot be written, is reported and the
    conversation goes on."""
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
            log.info(line_input.EXIT_HINT)
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
