"""What a line that begins with a slash does in `anabatic chat`: a table of functions."""

from __future__ import annotations

import json
import shlex
import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from anabatic.config.chat import Sampling
from anabatic.config.loading import validation
from anabatic.core import json_reader, log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import did_you_mean, format_size
from anabatic.core.paths import write_atomic
from anabatic.data.chat import rendering as conversations
from anabatic.data.vision.row_pictures import TAG
from anabatic.infer.dialogue import split_pictures
from anabatic.recipes.chat.conversation import ChatSession

MAX_CONVERSATION_BYTES = 16 << 20
"""Bytes of a conversation that is loaded."""


@dataclass(frozen=True)
class SlashCommand:
    """One row of the table."""

    usage: str
    help: str
    handler: Callable[[ChatSession, str], None]


def run_slash_command(chat: ChatSession, line: str) -> None:
    """Do what a line says that begins with a slash.

    Raises:
        UserError: it is no command, or cannot be done; the conversation is as it was.
        Failure: a file cannot be written.
    """
    name, _, rest = line.strip().partition(" ")
    name = SLASH_ALIASES.get(name, name)
    if name not in SLASH_COMMANDS:
        guess = did_you_mean(name, SLASH_COMMANDS)
        raise ConfigError(
            f"no command {name}.{guess}", "/help lists them; a blank before the slash makes text of the line"
        )
    SLASH_COMMANDS[name].handler(chat, rest.strip())


def _show_help(_: ChatSession, __: str) -> None:
    rows = {command.usage: command.help for command in SLASH_COMMANDS.values()}
    width = max(map(len, rows))
    log.info("\n".join(f"{usage:{width}}  {about}" for usage, about in rows.items()))
    log.info(
        'A backslash at the end of a line continues it on the next; lines between two lines of """ are one message.\n'
        "Ctrl-C stops an answer, or forgets the line. A line that begins with a space is never a command."
    )


def _set_system_message(chat: ChatSession, text: str) -> None:
    chat.dialogue.system = text or None
    chat.dialogue.clear_messages()
    if text:
        chat.append_message("system", text)
    log.info("system message set, conversation forgotten" if text else "no system message, conversation forgotten")


def _reset_conversation(chat: ChatSession, _: str) -> None:
    chat.dialogue.clear_messages()
    log.info("conversation forgotten")


def _save_conversation(chat: ChatSession, name: str) -> None:
    path = _require_file_name(name, "/save")
    if path.exists():
        raise ConfigError(f"{path} exists and is left as it is", "choose another name")
    messages, images = split_pictures(chat.dialogue.get_transcript())
    if not messages:
        raise ConfigError("there is nothing to write yet", "say something first")
    row = {"messages": messages} | ({"images": images} if images else {})
    write_atomic(path, json.dumps(row, ensure_ascii=False) + "\n", "choose another file")
    log.info(f"wrote {len(messages)} messages to {path}")


def _load_conversation(chat: ChatSession, name: str) -> None:
    path = _require_file_name(name, "/load")
    messages = read_conversation(path)
    system = [message["content"] for message in messages if message["role"] == "system"]
    chat.dialogue.system = system[0] if system else None
    chat.dialogue.messages[:] = [message for message in messages if message["role"] != "system"]
    log.info(f"{len(messages)} messages from {path} take the place of the conversation")


def read_conversation(path: Path) -> list[dict[str, Any]]:
    """Return the conversation that `/save` has written.

    Raises:
        DataError: it cannot be read, or is none of turns of text.
    """
    try:
        length = path.stat().st_size
        if not path.is_file():  # such as /dev/zero, which has no end
            raise DataError(f"{path} is no file", "give a file that /save has written")
        if length > MAX_CONVERSATION_BYTES:
            raise DataError(
                f"{path} has {format_size(length)}; at most {format_size(MAX_CONVERSATION_BYTES)} are read",
                "give a conversation",
            )
        rows = [json_reader.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give a file that /save has written") from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}", "give a file that /save has written") from error
    if len(rows) != 1 or not isinstance(rows[0], dict):
        raise DataError(f"{path} holds {len(rows)} rows, not one conversation", "give a file that /save has written")
    messages: Any = rows[0].get("messages")
    conversations.validate_conversation(messages, str(path), needs_assistant=False)
    for number, message in enumerate(messages, start=1):
        known = message["role"] in ("user", "assistant") or (message["role"] == "system" and number == 1)
        if not known or not isinstance(message.get("content"), str):
            what = f"{path}: message {number} is none of a conversation between user and assistant"
            raise DataError(what, "a system message stands first, and content is text")
    turns: list[dict[str, Any]] = [{"role": one["role"], "content": one["content"]} for one in messages]
    images = rows[0].get("images") or []
    tags = [turn["content"].count(TAG) for turn in turns]
    if images:
        if not isinstance(images, list) or len(images) != sum(tags) or not all(isinstance(one, str) for one in images):
            raise DataError(f"{path}: images are no list of {sum(tags)} paths, one for each {TAG}", "save it again")
        for turn, count in zip(turns, tags, strict=True):
            if count:
                turn["images"], images = images[:count], images[count:]
    return turns


def _attach_picture(chat: ChatSession, name: str) -> None:
    if not name or "://" in name:
        raise ConfigError(f"/image needs a file name, not {name!r}", "nothing is fetched: /image picture.png")
    path = _require_file_name(name, "/image")
    chat.dialogue.attach_picture(str(path.absolute()))
    count = len(chat.dialogue.attached)
    log.info(f"{count} {'picture goes' if count == 1 else 'pictures go'} with the next message")


def _require_file_name(name: str, command: str) -> Path:
    if not name:
        raise ConfigError(f"{command} needs a file name", f"{command} talk.jsonl")
    return Path(name).expanduser()


def _regenerate_answer(chat: ChatSession, _: str) -> None:
    chat.regenerate_answer()


def _show_or_set_sampling(chat: ChatSession, text: str) -> None:
    if text:
        chat.dialogue.sampling = update_sampling(chat.dialogue.sampling, text)
    values = asdict(chat.dialogue.sampling)
    name = text.split()[0] if text else ""
    selected = {name: values[name]} if text else values
    width = max(map(len, selected))
    log.info("\n".join(f"{name:{width}}  {_format_value(value)}" for name, value in selected.items()))


def update_sampling(sampling: Sampling, text: str) -> Sampling:
    """Return settings of which one is changed: `NAME VALUE`, for lists `NAME VALUE VALUE`; `null` empties.

    Raises:
        ConfigError: there is no such setting, or its value is wrong.
    """
    try:
        name, *words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{text}: {error}", "close the quotation mark") from error
    hints = validation.field_types(Sampling)
    if name not in hints:
        raise ConfigError(f"there is no {name}.{did_you_mean(name, hints)}", f"there are {', '.join(hints)}")
    value: Any = [] if words == ["null"] else [validation.UntypedText(word) for word in words]
    if typing.get_origin(hints[name]) is not list:
        if len(words) != 1:
            raise ConfigError(f"{name} needs one value, {len(words)} are given", f"/params {name} VALUE")
        value = validation.UntypedText(words[0])
    return replace(sampling, **validation.check_section({name: value}, Sampling, validation.SettingNamer()))


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(shlex.quote(str(one)) for one in value) or "null"
    return "null" if value is None else str(value)


def _exit_chat(chat: ChatSession, _: str) -> None:
    chat.over = True


SLASH_COMMANDS: dict[str, SlashCommand] = {
    "/help": SlashCommand("/help", "this list", _show_help),
    "/system": SlashCommand(
        "/system TEXT", "set the system message and start over; without TEXT: remove it", _set_system_message
    ),
    "/reset": SlashCommand("/reset", "forget the conversation", _reset_conversation),
    "/regenerate": SlashCommand("/regenerate", "answer the last message anew", _regenerate_answer),
    "/params": SlashCommand("/params NAME VALUE", "show how answers are sampled, or change it", _show_or_set_sampling),
    "/save": SlashCommand(
        "/save FILE", "write the conversation, one JSON line that `anabatic sft` can learn from", _save_conversation
    ),
    "/load": SlashCommand("/load FILE", "continue with a conversation that /save has written", _load_conversation),
    "/image": SlashCommand(
        "/image FILE", "show a picture with the next message, to a model that sees", _attach_picture
    ),
    "/exit": SlashCommand("/exit", "leave (so do /quit and Ctrl-D)", _exit_chat),
}
SLASH_ALIASES = {"/quit": "/exit"}
