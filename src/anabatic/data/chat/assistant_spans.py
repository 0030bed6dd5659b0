"""What the assistant says in a rendered conversation, for chat templates that do not mark it.

Most published templates have no `{% generation %}` block. A turn is found by what changes: the conversation is
rendered once as it is and once with a probe in place of what the assistant says in that turn. Everything before the
first and behind the last difference is the template's own; what lies between is said. This holds whatever the template
does to the text (trims it, writes tool calls as JSON or XML, drops the reasoning of earlier turns).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix
from typing import Any

from anabatic.core.errors import DataError

Message = dict[str, Any]
RenderFn = Callable[[list[Message], bool], str]
"""`(messages, add_generation_prompt) -> text`; raises `DataError` when the template refuses."""
CharSpan = tuple[int, int]

PROBE = "\ue0f1\ue0f2\ue0f3"
"""Private-use characters, which no text begins or ends with."""


def find_assistant_spans(
    messages: list[Message], text: str, render: RenderFn, ends: Sequence[str], name: str
) -> list[CharSpan]:
    """Return the spans of `text` that the assistant says, the token that ends each turn included.

    Args:
        messages: the conversation.
        text: the whole conversation, rendered.
        render: the template.
        ends: special tokens, one of which may end a turn.
        name: the conversation, for messages.

    Raises:
        DataError: the template leaves out an assistant's turn.
    """
    spans: list[CharSpan] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        changed = [*messages[:number], {"role": "assistant", "content": PROBE}, *messages[number + 1 :]]
        probed = render(changed, False)
        if PROBE not in probed:
            raise DataError(
                f"{name}: the chat template leaves out message {number + 1}, by the assistant",
                "use a template that shows every turn, or mark what is learned with {% generation %}",
            )
        start = len(commonprefix((text, probed)))
        behind = _common_suffix_length(text, probed, start)
        start = min(start, _generation_prompt_length(messages[:number], text, render, start))
        stop = len(text) - behind
        spans.append((start, _include_end_token(text, stop, ends)))
    return spans


def _common_suffix_length(one: str, two: str, start: int) -> int:
    """Length of what both end with, behind `start`."""
    return len(commonprefix((one[start:][::-1], two[start:][::-1])))


def _generation_prompt_length(before: list[Message], text: str, render: RenderFn, start: int) -> int:
    """Where the model begins to speak when it answers: a probe may share the first characters with what is said."""
    try:
        header = render(before, True)
    except DataError:  # some templates refuse to speak after a system message alone
        return start
    return len(header) if text.startswith(header) else start


def _include_end_token(text: str, stop: int, ends: Sequence[str]) -> int:
    """Add the special token that directly follows, or follows one blank."""
    for blank in (0, 1):
        at = stop + blank
        if blank and not text[stop:at].isspace():
            break
        found = max((len(token) for token in ends if text.startswith(token, at)), default=0)
        if found:
            return at + found
    return stop
