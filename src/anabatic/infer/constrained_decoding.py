"""Constrained decoding: answers are one of several choices, JSON of a schema, or text that matches a regex.

The tokens that may come next are computed by llguidance (github.com/guidance-ai/llguidance), an optional library.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from anabatic.config.chat import Sampling
from anabatic.core import extras, json_reader
from anabatic.core.errors import ConfigError
from anabatic.infer.request import TokenConstraint

_JSON_WHITESPACE = r"[ \n]?"
"""Between the parts of JSON: one blank at most, or a small model writes blanks until its answer is cut."""
_MAX_BLANK_RUN = 32
"""Blanks in a row within a text of JSON; who has written so many writes no two in a row any more."""


def make_constraint(
    sampling: Sampling, tokenizer: Any, entries: int, stop_ids: frozenset[int]
) -> TokenConstraint | None:
    """Return the form that a sampling asks for, at its beginning; None: it asks for none.

    Args:
        entries: rows of logits, which may be more than the tokenizer has.
        stop_ids: tokens that may come where the answer is whole.

    Raises:
        ConfigError: the form cannot be read, or the library is not installed.
    """
    if not (sampling.choices or sampling.json_schema or sampling.regex):
        return None
    llguidance = extras.import_optional("llguidance", "constrained decoding")
    extras.import_optional("llguidance.hf", "constrained decoding")
    known = tokenizer.__dict__.get("_anabatic_forms")
    if known is None:  # reads the whole vocabulary: once for each tokenizer
        known = tokenizer.__dict__["_anabatic_forms"] = llguidance.hf.from_tokenizer(tokenizer, n_vocab=entries)
        tokenizer.__dict__["_anabatic_blanks"] = _blank_token_lengths(known, entries)
    matcher = llguidance.LLMatcher(known, _build_grammar(llguidance, sampling))
    if matcher.is_error():
        name = next(name for name in ("choices", "json_schema", "regex") if getattr(sampling, name))
        raise ConfigError(f"{name} cannot be used: {_first_error_line(matcher.get_error())}", "simplify it")
    blanks = tokenizer.__dict__["_anabatic_blanks"] if sampling.json_schema else {}
    return _GrammarMatcher(matcher, known, entries, stop_ids, blanks)


def _blank_token_lengths(tokenizer: Any, entries: int) -> dict[int, int]:
    """Return the tokens that are blanks and nothing else, and how many each holds."""
    found = {}
    for token in range(min(entries, tokenizer.vocab_size)):
        text = tokenizer.decode_bytes([token])
        if text and not text.strip():
            found[token] = len(text)
    return found


def _first_error_line(error: str) -> str:
    """Return the first line of an error; of an expression, which is shown in the lines below, also what is wrong."""
    first, *more = error.splitlines()
    wrong = next((line for line in more if line.startswith("error: ")), "")
    return f"{first.removesuffix(':')}: {wrong.removeprefix('error: ')}" if wrong else first.removesuffix(":")


def _build_grammar(library: Any, sampling: Sampling) -> str:
    matcher = library.LLMatcher
    if sampling.choices:
        alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in sampling.choices)
        return str(matcher.grammar_from_lark(f"start: {alternatives}"))
    if sampling.regex:
        return str(matcher.grammar_from_regex(sampling.regex))
    schema = json_reader.loads(sampling.json_schema or "")
    schema = {} if schema is True else schema
    options = {"overrides": {"whitespace_pattern": _JSON_WHITESPACE}} if isinstance(schema, dict) else {}
    try:
        return str(matcher.grammar_from_json_schema(schema, **options))
    except ValueError as error:  # llguidance takes integers of 64 bits at most
        raise ConfigError(f"json_schema cannot be used: {error}", "use smaller numbers") from error


class _GrammarMatcher:
    """Follows one answer.

    Args:
        blanks: tokens of blanks alone and their lengths, of which no more than a run may come; empty: any number.
    """

    def __init__(
        self, matcher: Any, tokenizer: Any, entries: int, stop_ids: frozenset[int], blanks: dict[int, int]
    ) -> None:
        self._matcher, self._num_entries, self._stop_ids = matcher, entries, stop_ids
        self._mask_words = -(-max(entries, tokenizer.vocab_size) // 32)
        self._blank_lengths, self._blank_run, self._max_blank_run = blanks, 0, _MAX_BLANK_RUN

    def allowed_tokens(self) -> Tensor:
        """Return which tokens may come next, bool `[V]` on the host."""
        mask = torch.zeros(1, self._mask_words, dtype=torch.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * 4)
        bits = (mask.view(-1, 1) >> torch.arange(32, dtype=torch.int32)) & 1
        allowed = bits.view(-1)[: self._num_entries].bool()
        if self._blank_run >= self._max_blank_run:
            fewer = allowed.clone()
            fewer[list(self._blank_lengths)] = False
            allowed = fewer if fewer.any() else allowed
        if self._matcher.is_accepting():
            allowed[[stop for stop in self._stop_ids if stop < self._num_entries]] = True
        return allowed

    def accept_token(self, token: int) -> bool:
        """Take the chosen token; return True when the answer is whole and nothing may follow."""
        if token in self._stop_ids:
            return True
        taken = self._matcher.consume_token(token)
        self._blank_run = self._blank_run + self._blank_lengths[token] if token in self._blank_lengths else 0
        if self._blank_run >= _MAX_BLANK_RUN:
            self._max_blank_run = 1
        return not taken or bool(self._matcher.is_stopped())
