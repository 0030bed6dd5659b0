"""Parts of a conversation that a chat template does not show: a model would learn turns without what explains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anabatic.core.errors import DataError
from anabatic.data.readers.document import SKIP_HINT, Message

_PROBE = "probe7part"
"""Stands for a name or a text; no template says it by itself."""
_HINT = f"use a template that shows them: --chat-template qwen2.5 or qwen3, {SKIP_HINT}"
Tools = list[dict[str, Any]] | None
RenderFn = Callable[[list[Message], Tools], str]
"""`(messages, tools) -> text`; raises `DataError` where the template refuses."""
_shown: set[tuple[str, str]] = set()
"""(template, part) that rows have proven to be shown."""


def require_all_shown(messages: list[Message], tools: Tools, template: str, name: str, render: RenderFn) -> None:
    """Make sure that the template shows the descriptions of tools, their calls and their results.

    Each part that a row has is put in with another text until a row has proven that the template shows it.

    Raises:
        DataError: it leaves one out.
    """
    for part, found, turns, described in _list_probes(messages, tools):
        if (template, part) in _shown:
            continue
        try:
            is_shown = _PROBE in render(turns, described)
        except DataError:
            continue  # it looks at names, or at the order: what it says of the row itself counts
        if not is_shown:
            raise DataError(f"{name}: the chat template shows no {part}: {found} would be left out", _HINT)
        _shown.add((template, part))


def _list_probes(messages: list[Message], tools: Tools) -> list[tuple[str, str, list[Message], Tools]]:
    """Return (part, what the row has of it, conversation and tools with another text in its place)."""
    probes: list[tuple[str, str, list[Message], Tools]] = []
    if tools:
        probes.append(("tools", f"{len(tools)} of the row", messages, [_rename(tools[0]), *tools[1:]]))
    for number, turn in enumerate(messages):
        before, behind = messages[:number], messages[number + 1 :]
        where = f"those of message {number + 1}"
        if turn.get("tool_calls"):
            calls = [_rename(turn["tool_calls"][0]), *turn["tool_calls"][1:]]
            probes.append(("calls of tools", where, [*before, {**turn, "tool_calls": calls}, *behind], tools))
        elif turn["role"] == "tool":
            probes.append(("results of tools", where, [*before, {**turn, "content": _PROBE}, *behind], tools))
        elif turn["role"] == "assistant" and not turn.get("content") and turn.get("reasoning_content"):
            probes.append(("reasoning", where, [*before, {**turn, "reasoning_content": _PROBE}, *behind], tools))
    return probes


def _rename(described: dict[str, Any]) -> dict[str, Any]:
    """Return a tool or a call under another name."""
    if isinstance(described.get("function"), dict):
        return {**described, "function": {**described["function"], "name": _PROBE}}
    return {**described, "name": _PROBE}


def require_shown(messages: list[Message], tools: Tools, tokenizer: Any, name: str) -> None:
    """Make sure of the same for a conversation that an answer follows.

    Raises:
        DataError: the template leaves a part out.
    """
    from anabatic.data.tokenizer.hf_folder import render_chat

    def render(turns: list[Message], described: Tools) -> str:
        return render_chat(tokenizer, turns, described, answer=True)

    require_all_shown(messages, tools, str(tokenizer.chat_template), name, render)
