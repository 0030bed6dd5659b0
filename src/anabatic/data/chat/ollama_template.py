"""A chat template of jinja's as one of Go's, which Ollama reads, where both say the same.

Found by asking the template, not by reading it: a few conversations show what stands before, between and behind turns,
and others must then come out letter by letter. What Ollama offers to templates: docs.ollama.com/template; it joins
neighbouring turns of one role, and gives no function that trims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from anabatic.core.errors import DataError
from anabatic.data.tokenizer.hf_folder import render_chat

Messages = list[dict[str, str]]
_MARKER_WORDS = ("first0word", "second1word", "third2word", "fourth3word")


@dataclass(frozen=True)
class TurnAffixes:
    """A template that is nothing but texts around the turns.

    Attributes:
        start: before a question that is the first turn; it may hold a system message of the template's own.
        start_system: before a system message; None: the template refuses one.
        after_system, after_user, after_assistant: what follows such a turn; behind the last question the answer stands.
        trims_whitespace: blanks at the ends of some turns are cut away, which Ollama's templates cannot.
    """

    start: str
    start_system: str | None
    after_system: str
    after_user: str
    after_assistant: str
    trims_whitespace: bool = False

    def render_conversation(self, messages: Messages) -> str:
        """Return what Ollama makes of a conversation, ready for an answer."""
        first = self.start_system if messages[0]["role"] == "system" else self.start
        after = {"system": self.after_system, "user": self.after_user, "assistant": self.after_assistant}
        return (first or "") + "".join(message["content"] + after[message["role"]] for message in messages)

    def to_go_template(self) -> str:
        """Return the template in Go's language."""
        start = self.start
        if self.start_system is not None and self.start_system != self.start:
            begins = '{{ if .Messages }}{{ if eq (index .Messages 0).Role "system" }}'
            start = f"{begins}{self.start_system}{{{{ else }}}}{self.start}{{{{ end }}}}{{{{ end }}}}"
        return (
            start
            + "{{ range .Messages }}{{ .Content }}"
            + '{{ if eq .Role "system" }}'
            + self.after_system
            + '{{ else if eq .Role "assistant" }}'
            + self.after_assistant
            + "{{ else }}"
            + self.after_user
            + "{{ end }}{{ end }}"
        )


def translate_chat_template(tokenizer: Any) -> tuple[TurnAffixes | None, str]:
    """Return the template of a tokenizer as texts around turns, or None with the reason why it is more than that."""
    if not tokenizer.chat_template:
        return None, "the model has no chat template"
    if "strftime_now" in str(tokenizer.chat_template):
        return None, "the chat template tells the date of the day"
    try:
        found = _probe_affixes(tokenizer)
    except ValueError as error:
        return None, str(error)
    for about, messages in _verification_conversations(found.start_system is not None):
        if _render_prompt(tokenizer, messages) != found.render_conversation(messages):
            return None, f"the chat template treats {about} in a way that Ollama's templates cannot"
    blank: Messages = [_user_message(" a \n"), _assistant_message("\n b "), _user_message(" c")]
    trims = _render_prompt(tokenizer, blank) != found.render_conversation(blank)
    try:
        return replace(_strip_bos_token(tokenizer, found), trims_whitespace=trims), ""
    except ValueError as error:
        return None, str(error)


def _probe_affixes(tokenizer: Any) -> TurnAffixes:
    """Read the texts off two conversations.

    Raises:
        ValueError: they do not stand where turns do.
    """
    first, second, third, fourth = _MARKER_WORDS
    conversation = _render_prompt(tokenizer, [_user_message(first), _assistant_message(second), _user_message(third)])
    start, after_user, after_assistant, last = _split_at_marks(conversation, (first, second, third))
    if last != after_user:
        raise ValueError("the chat template begins an answer otherwise than it repeats one")
    try:
        with_system = _render_prompt(tokenizer, [_system_message(fourth), _user_message(first)])
    except ValueError:
        turns = TurnAffixes(start, None, "", after_user, after_assistant)
    else:
        start_system, after_system, _ = _split_at_marks(with_system, (fourth, first))
        turns = TurnAffixes(start, start_system, after_system, after_user, after_assistant)
    texts = (start, turns.start_system or "", turns.after_system, after_user, after_assistant)
    if any("{{" in text or '"""' in text for text in texts):
        raise ValueError("the chat template holds signs that a Modelfile keeps for itself")
    return turns


def _strip_bos_token(tokenizer: Any, turns: TurnAffixes) -> TurnAffixes:
    """Take the token away with which texts begin: whoever reads the GGUF file puts it there itself.

    Raises:
        ValueError: the template does not begin with it, so Ollama would see it where the model has not.
    """
    bare, with_special = tokenizer("x", add_special_tokens=False)["input_ids"], tokenizer("x")["input_ids"]
    at = next((at for at in range(len(with_special)) if with_special[at : at + len(bare)] == bare), 0)
    before = tokenizer.decode(with_special[:at]) if at else ""
    starts = [turns.start] + ([turns.start_system] if turns.start_system is not None else [])
    if not before:
        return turns
    if not all(start.startswith(before) for start in starts):
        raise ValueError(f"the tokenizer begins every text with {before}, the chat template does not")
    system = None if turns.start_system is None else turns.start_system.removeprefix(before)
    return replace(turns, start=turns.start.removeprefix(before), start_system=system)


def _split_at_marks(text: str, marks: Sequence[str]) -> list[str]:
    parts = []
    for mark in marks:
        part, found, text = text.partition(mark)
        if not found or mark in text:
            raise ValueError("the chat template does not show every turn once")
        parts.append(part)
    return [*parts, text]


def _verification_conversations(system: bool) -> list[tuple[str, Messages]]:
    """Conversations that must come out alike, and what is particular to each."""
    conversation = [
        _user_message("a"),
        _assistant_message("b"),
        _user_message('c\n\nd {x} "q" <b>'),
        _assistant_message("é 你好"),
        _user_message("e"),
    ]
    found: list[tuple[str, Messages]] = [
        ("a single question", [_user_message("What?\nWhy?")]),
        ("a longer conversation", conversation),
        (
            "the thoughts in an earlier answer",
            [_user_message("a"), _assistant_message("<think>\nb\n</think>\n\nc"), _user_message("d")],
        ),
    ]
    if system:
        found += [
            ("a system message", [_system_message("Be\nshort."), _user_message("a")]),
            ("a long one", [_system_message("s"), *conversation]),
        ]
    return found


def _render_prompt(tokenizer: Any, messages: Messages) -> str:
    """Fill the template, ready for an answer.

    Raises:
        ValueError: it refuses the conversation.
    """
    try:
        return render_chat(tokenizer, messages, answer=True)
    except DataError as error:
        raise ValueError(str(error)) from error


def _user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant_message(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _system_message(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}
