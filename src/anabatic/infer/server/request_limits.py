"""Limit the cost of a request before its tokens are counted: rows, texts, bytes. Each bound is found in a moment.

Lists are counted before their rows are read one by one. The bounds of the server that reads the request stand in
`CURRENT_LIMITS`: validation of a body has no other way to know them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from anabatic.config.serve import ServerLimits
from anabatic.infer.server.api_errors import ApiError

CURRENT_LIMITS: ContextVar[ServerLimits | None] = ContextVar("limits", default=None)
"""Of the server that reads a request; None: nothing is bounded."""
MAX_STOP_CHARS = 4096
"""Characters of a text that ends an answer."""
MAX_LOGIT_BIASES = 1024
RESERVED_TEMPLATE_VARIABLES = frozenset({
    "add_generation_prompt", "bos_token", "chat_template", "continue_final_message", "conversation", "documents",
    "eos_token", "kwargs", "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict",
    "return_tensors", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip
"""Words of a template, and of who fills it in, that clients may not set."""
_BYTES_PER_OTHER_VALUE = 2
"""Bytes of a value that is no text: `{}`, `[]`, a digit and its comma."""
MAX_GRAMMAR_BYTES = 256 << 10
"""Bytes of an expression or a schema."""


def limit_messages(given: Any) -> Any:
    """Refuse more messages than the server reads, before each of them is read; several conversations count together."""
    limits = CURRENT_LIMITS.get()
    if limits is not None and isinstance(given, list):
        count = sum(len(row) if isinstance(row, list) else 1 for row in given)
        if count > limits.messages:
            raise ValueError(f"{count} messages are given; this server reads at most {limits.messages}")
    return given


def limit_prompts(given: Any) -> Any:
    """Refuse more prompts than the server answers, before each of them is read. A list of numbers is one prompt."""
    limits = CURRENT_LIMITS.get()
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    if limits is not None and several and len(given) > limits.answers:
        raise ValueError(f"{len(given)} answers are asked for; at most {limits.answers} at once")
    return given


def limit_biases(given: Any) -> Any:
    """Refuse biases of very many tokens before each of them is read."""
    if isinstance(given, dict) and len(given) > MAX_LOGIT_BIASES:
        raise ValueError(f"{len(given)} tokens have a bias; at most {MAX_LOGIT_BIASES} may")
    return given


def require_few_choices(choices: list[str], limits: ServerLimits) -> None:
    """Refuse an answer that is one of very many texts.

    Raises:
        ApiError: 400.
    """
    if len(choices) > limits.choices:
        message = f"choice has {len(choices)} texts; this server reads at most {limits.choices}"
        raise ApiError(400, message, "structured_outputs")
    require_short_grammar("".join(choices), "choice")


def require_short_grammar(text: str, name: str, param: str = "structured_outputs") -> None:
    """Refuse an expression or a schema that is very long.

    Raises:
        ApiError: 400.
    """
    size = _utf8_length(text)
    if size > MAX_GRAMMAR_BYTES:
        raise ApiError(400, f"{name} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are read", param)


def require_fits_context(texts: Iterable[Any], max_len: int, limits: ServerLimits, param: str) -> None:
    """Refuse texts that cannot fit into a context, by their bytes: tokens need not be counted for that.

    Args:
        texts: of one prompt; what is no text (messages, schemas) counts with all texts in it, and two bytes or more for
            each other value: a template writes `{}` and `0` too.
        max_len: tokens of the context.

    Raises:
        ApiError: 400.
    """
    max_bytes = max_len * limits.bytes_per_token
    size = sum(map(_count_bytes, texts))
    if size > max_bytes:
        about = f"{max_bytes} bytes at most, limits.bytes_per_token for each of its {max_len} tokens"
        message = f"the texts have {size} bytes; a context of this model takes {about}"
        raise ApiError(400, message, param, "context_length_exceeded")


def _count_bytes(value: Any) -> int:
    """Return the bytes of all texts in a value, its keys included, and those of what else is in it."""
    total, rest = 0, [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            total += _utf8_length(one)
        elif isinstance(one, dict) and one:
            rest += [*one, *one.values()]
        elif isinstance(one, (list, tuple)) and one:
            rest += one
        else:
            total += _BYTES_PER_OTHER_VALUE + (
                one.bit_length() // 4 if isinstance(one, int) else 0
            )  # digits of a number, about
    return total


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
