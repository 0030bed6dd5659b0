"""What a line that begins with a slash does in `anabatic chat`: a table of functions."""

from __future__ import annotations

import json
import shlex
import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabatic.config import check
from anabatic.config.chat import Sampling
from anabatic.core import json_text, log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.paths import write_atomic
from anabatic.core.text import did_you_mean, size
from anabatic.data import chat as conversations

if TYPE_CHECKING:
    from anabatic.recipes.chat import Chat

LARGEST_FILE = 16 << 20
"""Bytes of a conversation that is loaded."""


@dataclass(frozen=True)
class Command:
    """One row of the table."""

    usage: str
    about: str
    run: Callable[[Chat, str], None]


def obey(chat: Chat, line: str) -> None:
    """Do what a line says that begins with a slash.

    Raises:
        UserError: it is no command, or cannot be done; the conversation is as it was.
        Failure: a file cannot be written.
    """
    name, _, rest = line.strip().partition(" ")
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        guess = did_you_mean(name, COMMANDS)
        raise ConfigError(
            f"no command {name}.{guess}", "/help lists them; a blank before the slash makes text of the line"
        )
    COMMANDS[name].run(chat, rest.strip())


def _help(_: Chat, __: str) -> None:
    rows = {command.usage: command.about for command in COMMANDS.values()}
    width = max(map(len, rows))
    log.info("\n".join(f"{usage:{width}}  {about}" for usage, about in rows.items()))
    log.info(
        'A backslash at the end of a line continues it on the next; lines between two lines of """ are one message.\n'
        "Ctrl-C stops an answer, or forgets the line. A line that begins with a blank is never a command."
    )


def _system(chat: Chat, text: str) -> None:
    chat.dialogue.system = text or None
    chat.dialogue.forget()
    if text:
        chat.note("system", text)
    log.info("system message set, conversation forgotten" if text else "no system message, conversation forgotten")


def _reset(chat: Chat, _: str) -> None:
    chat.dialogue.forget()
    log.info("conversation forgotten")


def _save(chat: Chat, name: str) -> None:
    path = _file(name, "/save")
    if path.exists():
        raise ConfigError(f"{path} exists and is left as it is", "choose another name")
    messages = chat.dialogue.transcript()
    if not messages:
        raise ConfigError("there is nothing to write yet", "say something first")
    write_atomic(path, json.dumps({"messages": messages}, ensure_ascii=False) + "\n", "choose another file")
    log.info(f"wrote {len(messages)} messages to {path}")


def _load(chat: Chat, name: str) -> None:
    path = _file(name, "/load")
    messages = read(path)
    system = [message["content"] for message in messages if message["role"] == "system"]
    chat.dialogue.system = system[0] if system else None
    chat.dialogue.messages[:] = [message for message in messages if message["role"] != "system"]
    log.info(f"{len(messages)} messages from {path} take the place of the conversation")


def read(path: Path) -> list[dict[str, str]]:
    """Return the conversation that `/save` has written.

    Raises:
        DataError: it cannot be read, or is none of turns of text.
    """
    try:
        length = path.stat().st_size
        if not path.is_file():  # such as /dev/zero, which has no end
            raise DataError(f"{path} is no file", "give a file that /save has written")
        if length > LARGEST_FILE:
            raise DataError(f"{path} has {size(length)}; at most {size(LARGEST_FILE)} are read", "give a conversation")
        rows = [json_text.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give a file that /save has written") from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}", "give a file that /save has written") from error
    if len(rows) != 1 or not isinstance(rows[0], dict):
        raise DataError(f"{path} holds {len(rows)} rows, not one conversation", "give a file that /save has written")
    messages: Any = rows[0].get("messages")
    conversations.check(messages, str(path), needs_assistant=False)
    for number, message in enumerate(messages, start=1):
        known = message["role"] in ("user", "assistant") or (message["role"] == "system" and number == 1)
        if not known or not isinstance(message.get("content"), str):
            what = f"{path}: message {number} is none of a talk between user and assistant"
            raise DataError(what, "a system message stands first, and content is text")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _file(name: str, command: str) -> Path:
    if not name:
        raise ConfigError(f"{command} needs a file name", f"{command} talk.jsonl")
    return Path(name).expanduser()


def _regenerate(chat: Chat, _: str) -> None:
    chat.again()


def _params(chat: Chat, text: str) -> None:
    if text:
        chat.dialogue.sampling = changed(chat.dialogue.sampling, text)
    values = asdict(chat.dialogue.sampling)
    name = text.split()[0] if text else ""
    shown = {name: values[name]} if text else values
    width = max(map(len, shown))
    log.info("\n".join(f"{name:{width}}  {_told(value)}" for name, value in shown.items()))


def changed(sampling: Sampling, text: str) -> Sampling:
    """Return settings of which one is changed: `NAME VALUE`, for lists `NAME VALUE VALUE`; `null` empties.

    Raises:
        ConfigError: there is no such setting, or its value is wrong.
    """
    try:
        name, *words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{text}: {error}", "close the quotation mark") from error
    hints = check.hints(Sampling)
    if name not in hints:
        raise ConfigError(f"there is no {name}.{did_you_mean(name, hints)}", f"there are {', '.join(hints)}")
    value: Any = [] if words == ["null"] else [check.Text(word) for word in words]
    if typing.get_origin(hints[name]) is not list:
        if len(words) != 1:
            raise ConfigError(f"{name} needs one value, {len(words)} are given", f"/params {name} VALUE")
        value = check.Text(words[0])
    return replace(sampling, **check.section({name: value}, Sampling, check.Where()))


def _told(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(shlex.quote(str(one)) for one in value) or "null"
    return "null" if value is None else str(value)


def _exit(chat: Chat, _: str) -> None:
    chat.over = True


COMMANDS: dict[str, Command] = {
    "/help": Command("/help", "this list", _help),
    "/system": Command("/system TEXT", "set the system message and start over; without TEXT: remove it", _system),
    "/reset": Command("/reset", "forget the conversation", _reset),
    "/regenerate": Command("/regenerate", "answer the last message anew", _regenerate),
    "/params": Command("/params NAME VALUE", "show how answers are sampled, or change it", _params),
    "/save": Command("/save FILE", "write the conversation, one JSON line that `anabatic sft` can learn from", _save),
    "/load": Command("/load FILE", "go on with a conversation that /save has written", _load),
    "/exit": Command("/exit", "leave (so do /quit and Ctrl-D)", _exit),
}
ALIASES = {"/quit": "/exit"}
