"""From contexts and continuations to tokens, cut as lm-evaluation-harness does (lm_eval/api/model.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anabatic.core.errors import DataError
from anabatic.data.tokenizer.hf_folder import encode_chat
from anabatic.evals.prefix_trees import ScoredText
from anabatic.evals.tasks.items import ContextPair, EvalItem

_ITEMS_PER_BATCH = 512
"""Items encoded at a time: tokens of long examples as Python's numbers would fill the memory."""


@dataclass
class EncodedTexts:
    """Texts of all pairs, in order.

    Attributes:
        texts: they.
        truncated_items: places of the items of which a text had to be cut from the left, to the model's context.
    """

    texts: list[ScoredText] = field(default_factory=list)
    truncated_items: list[int] = field(default_factory=list)


def find_prefix_token(tokenizer: Any) -> int:
    """Return the token that stands before a text that has nothing before it: the one that begins texts, else the one
    that ends them.

    Raises:
        DataError: the tokenizer has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise DataError(f"{tokenizer.name_or_path} has neither bos_token nor eos_token", "set one in tokenizer_config.json")


def encode_items(tokenizer: Any, items: Sequence[EvalItem], max_len: int, core: bool = False) -> EncodedTexts:
    """Return the texts to score, one for each pair of each item.

    Args:
        max_len: tokens that the model reads at most.
        core: cut as the CORE evaluation does: what differs between the texts of an item is scored (`_encode_core`).

    Raises:
        DataError: a continuation has no tokens.
    """
    result = EncodedTexts()
    for first in range(0, len(items), _ITEMS_PER_BATCH):
        part = items[first : first + _ITEMS_PER_BATCH]
        pairs = [pair for item in part for pair in item.pairs]
        made = iter(_encode_core(tokenizer, part) if core else _encode_pairs(tokenizer, pairs))
        for at, item in enumerate(part, start=first):
            mine = [next(made) for _ in item.pairs]
            if any(text.num_scored < 1 for text in mine):
                hint = "it is empty, or nothing but blanks: fix it"
                raise DataError(f"{item.source_location}: a continuation has no tokens", hint)
            result.truncated_items += [at] * any(len(text.tokens) - 1 > max_len for text in mine)
            result.texts += [truncate_left(text, max_len) for text in mine]
    return result


def truncate_left(text: ScoredText, max_len: int) -> ScoredText:
    """Return a text cut from the left so that the model can read all but its last token; 4 bytes a token."""
    tokens = np.array(text.tokens[-(max_len + 1) :], dtype=np.int32)
    return ScoredText(tokens, min(text.num_scored, len(tokens) - 1))


def encode_beginnings(tokenizer: Any, texts: Sequence[str]) -> dict[str, list[int]]:
    """Return the tokens of texts that begin something, by text: with those that the tokenizer puts around a text, but
    for texts that spell the first one themselves, as filled chat templates do (lm_eval/models/huggingface.py,
    tok_encode)."""
    starts = [token for token in (tokenizer.bos_token, tokenizer.eos_token) if token]
    spelt = [text for text in texts if starts and text.startswith(starts[0])]
    own = set(spelt)
    plain = _tokenize_unique(tokenizer, [text for text in texts if text not in own])
    return plain | _tokenize_unique(tokenizer, spelt, add_special_tokens=False)


def _tokenize_unique(tokenizer: Any, texts: Sequence[str], **settings: Any) -> dict[str, list[int]]:
    unique = list(dict.fromkeys(texts))
    found = tokenizer(unique, return_attention_mask=False, **settings)["input_ids"] if unique else []
    return dict(zip(unique, found, strict=True))


def _encode_pairs(tokenizer: Any, pairs: Sequence[ContextPair]) -> list[ScoredText]:
    """Blanks at the end of a context go over to the continuation; both are encoded together, and what is longer than
    the context alone is the continuation. A context of nothing but blanks is none."""
    moved = [_move_trailing_blanks(pair) for pair in pairs if isinstance(pair.context, str)]
    ids = encode_beginnings(
        tokenizer, [text for context, rest in moved if context for text in (context, context + rest)]
    )
    bare = _tokenize_unique(tokenizer, [rest for context, rest in moved if not context], add_special_tokens=False)
    chats = [pair for pair in pairs if not isinstance(pair.context, str)]
    replies = _tokenize_unique(tokenizer, [pair.continuation for pair in chats], add_special_tokens=False)
    prompts: dict[int, list[int]] = {}
    result, plain = [], iter(moved)
    for pair in pairs:
        if isinstance(pair.context, str):
            context, rest = next(plain)
            result.append(
                _join_pair(ids[context], ids[context + rest]) if context else _encode_alone(tokenizer, bare[rest])
            )
            continue
        turns = id(pair.context)
        if turns not in prompts:
            prompts[turns] = encode_chat(tokenizer, pair.context)
        reply = replies[pair.continuation]
        result.append(ScoredText([*prompts[turns], *reply], len(reply)))
    return result


def _move_trailing_blanks(pair: ContextPair) -> tuple[str, str]:
    whole = _plain_context(pair)
    context = whole.rstrip()
    return context, whole[len(context) :] + pair.continuation


def _join_pair(context: list[int], whole: list[int]) -> ScoredText:
    """The context by itself, then the tokens of the whole behind as many: where the border falls into a token, the
    model reads the context as it was asked, and the letters that this token has of the continuation count nowhere
    (lm_eval/api/model.py, _encode_pair, whose requests are both lists one after the other).

    A continuation that is wholly part of the context's last token would have no tokens, and is refused there; here the
    tokens count from where the whole is another than the context.
    """
    if len(context) < len(whole):
        return ScoredText([*context, *whole[len(context) :]], len(whole) - len(context))
    size = next((at for at, (a, b) in enumerate(zip(context, whole, strict=False)) if a != b), len(whole) - 1)
    return ScoredText(whole, len(whole) - max(1, size))


def _encode_alone(tokenizer: Any, ids: list[int]) -> ScoredText:
    first = find_prefix_token(tokenizer)
    if ids and ids[0] == first:
        return ScoredText(ids, len(ids) - 1)
    return ScoredText([first, *ids], len(ids))


def _encode_core(tokenizer: Any, items: Sequence[EvalItem]) -> list[ScoredText]:
    """The CORE evaluation encodes whole texts: of choices the tokens behind their common beginning are scored, of
    contexts their common ending, of one continuation what comes after the context's own tokens (nanochat,
    nanochat/core_eval.py)."""
    first = find_prefix_token(tokenizer)
    whole = [
        [_plain_context(pair).rstrip() if _has_single_pair(item) else "", _full_text(pair)]
        for item in items
        for pair in item.pairs
    ]
    ids = _tokenize_unique(tokenizer, [text for both in whole for text in both], add_special_tokens=False)
    result, at = [], 0
    for item in items:
        mine = [[first, *ids[text]] for _, text in whole[at : at + len(item.pairs)]]
        if _has_single_pair(item):
            before = 1 + len(ids[whole[at][0]])
            result.append(ScoredText(mine[0], len(mine[0]) - before))
        else:
            shared = _common_prefix_length([list(reversed(text)) for text in mine] if _have_same_ending(item) else mine)
            scored = [shared if _have_same_ending(item) else len(text) - shared for text in mine]
            result += [ScoredText(text, min(count, len(text) - 1)) for text, count in zip(mine, scored, strict=True)]
        at += len(item.pairs)
    return result


def _has_single_pair(item: EvalItem) -> bool:
    return len(item.pairs) == 1


def _have_same_ending(item: EvalItem) -> bool:
    return item.pairs[0].continuation == item.pairs[1].continuation


def _plain_context(pair: ContextPair) -> str:
    assert isinstance(pair.context, str)
    return pair.context


def _full_text(pair: ContextPair) -> str:
    return _plain_context(pair) + pair.continuation


def _common_prefix_length(texts: list[list[int]]) -> int:
    """Tokens with which all begin."""
    for at, tokens in enumerate(zip(*texts, strict=False)):
        if len(set(tokens)) > 1:
            return at
    return min(map(len, texts))
