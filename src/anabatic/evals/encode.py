"""From contexts and continuations to tokens, cut as lm-evaluation-harness does (lm_eval/api/model.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anabatic.core.errors import DataError
from anabatic.data.tokenizer import chat_prompt
from anabatic.evals.items import Item, Pair
from anabatic.evals.trees import Text

_AT_ONCE = 512
"""Items encoded at a time: tokens of long examples as Python's numbers would fill the memory."""


@dataclass
class Encoded:
    """Texts of all pairs, in order.

    Attributes:
        texts: they.
        cut: places of the items of which a text had to be cut from the left, to the model's context.
    """

    texts: list[Text] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)


def prefix_token(tokenizer: Any) -> int:
    """Return the token that stands before a text that has nothing before it: the one that begins texts, else the one
    that ends them.

    Raises:
        DataError: the tokenizer has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise DataError(f"{tokenizer.name_or_path} has neither bos_token nor eos_token", "set one in tokenizer_config.json")


def encode(tokenizer: Any, items: Sequence[Item], max_len: int, core: bool = False) -> Encoded:
    """Return the texts to score, one for each pair of each item.

    Args:
        max_len: tokens that the model reads at most.
        core: cut as the CORE evaluation does: what differs between the texts of an item is scored (`_core`).

    Raises:
        DataError: a continuation has no tokens.
    """
    result = Encoded()
    for first in range(0, len(items), _AT_ONCE):
        part = items[first : first + _AT_ONCE]
        pairs = [pair for item in part for pair in item.pairs]
        made = iter(_core(tokenizer, part) if core else _pairs(tokenizer, pairs))
        for at, item in enumerate(part, start=first):
            mine = [next(made) for _ in item.pairs]
            if any(text.scored < 1 for text in mine):
                hint = "it is empty, or nothing but blanks: mend it"
                raise DataError(f"{item.place}: a continuation has no tokens", hint)
            result.cut += [at] * any(len(text.tokens) - 1 > max_len for text in mine)
            result.texts += [fit(text, max_len) for text in mine]
    return result


def fit(text: Text, max_len: int) -> Text:
    """Return a text cut from the left so that the model can read all but its last token; 4 bytes a token."""
    tokens = np.array(text.tokens[-(max_len + 1) :], dtype=np.int32)
    return Text(tokens, min(text.scored, len(tokens) - 1))


def beginnings(tokenizer: Any, texts: Sequence[str]) -> dict[str, list[int]]:
    """Return the tokens of texts that begin something, by text: with those that the tokenizer puts around a text, but
    for texts that spell the first one themselves, as filled chat templates do (lm_eval/models/huggingface.py,
    tok_encode)."""
    starts = [token for token in (tokenizer.bos_token, tokenizer.eos_token) if token]
    spelt = [text for text in texts if starts and text.startswith(starts[0])]
    own = set(spelt)
    plain = _ids(tokenizer, [text for text in texts if text not in own])
    return plain | _ids(tokenizer, spelt, add_special_tokens=False)


def _ids(tokenizer: Any, texts: Sequence[str], **settings: Any) -> dict[str, list[int]]:
    unique = list(dict.fromkeys(texts))
    found = tokenizer(unique, return_attention_mask=False, **settings)["input_ids"] if unique else []
    return dict(zip(unique, found, strict=True))


def _pairs(tokenizer: Any, pairs: Sequence[Pair]) -> list[Text]:
    """Blanks at the end of a context go over to the continuation; both are encoded together, and what is longer than
    the context alone is the continuation. A context of nothing but blanks is none."""
    moved = [_moved(pair) for pair in pairs if isinstance(pair.context, str)]
    ids = beginnings(tokenizer, [text for context, rest in moved if context for text in (context, context + rest)])
    bare = _ids(tokenizer, [rest for context, rest in moved if not context], add_special_tokens=False)
    chats = [pair for pair in pairs if not isinstance(pair.context, str)]
    replies = _ids(tokenizer, [pair.continuation for pair in chats], add_special_tokens=False)
    prompts: dict[int, list[int]] = {}
    result, plain = [], iter(moved)
    for pair in pairs:
        if isinstance(pair.context, str):
            context, rest = next(plain)
            result.append(_joined(ids[context], ids[context + rest]) if context else _alone(tokenizer, bare[rest]))
            continue
        turns = id(pair.context)
        if turns not in prompts:
            prompts[turns] = chat_prompt(tokenizer, pair.context)
        reply = replies[pair.continuation]
        result.append(Text([*prompts[turns], *reply], len(reply)))
    return result


def _moved(pair: Pair) -> tuple[str, str]:
    whole = _context(pair)
    context = whole.rstrip()
    return context, whole[len(context) :] + pair.continuation


def _joined(context: list[int], whole: list[int]) -> Text:
    """The context by itself, then the tokens of the whole behind as many: where the border falls into a token, the
    model reads the context as it was asked, and the letters that this token has of the continuation count nowhere
    (lm_eval/api/model.py, _encode_pair, whose requests are both lists one after the other).

    A continuation that is wholly part of the context's last token would have no tokens, and is refused there; here the
    tokens count from where the whole is another than the context.
    """
    if len(context) < len(whole):
        return Text([*context, *whole[len(context) :]], len(whole) - len(context))
    size = next((at for at, (a, b) in enumerate(zip(context, whole, strict=False)) if a != b), len(whole) - 1)
    return Text(whole, len(whole) - max(1, size))


def _alone(tokenizer: Any, ids: list[int]) -> Text:
    first = prefix_token(tokenizer)
    if ids and ids[0] == first:
        return Text(ids, len(ids) - 1)
    return Text([first, *ids], len(ids))


def _core(tokenizer: Any, items: Sequence[Item]) -> list[Text]:
    """The CORE evaluation encodes whole texts: of choices the tokens behind their common beginning are scored, of
    contexts their common ending, of one continuation what comes after the context's own tokens (nanochat,
    nanochat/core_eval.py)."""
    first = prefix_token(tokenizer)
    whole = [[_context(pair).rstrip() if _single(item) else "", _text(pair)] for item in items for pair in item.pairs]
    ids = _ids(tokenizer, [text for both in whole for text in both], add_special_tokens=False)
    result, at = [], 0
    for item in items:
        mine = [[first, *ids[text]] for _, text in whole[at : at + len(item.pairs)]]
        if _single(item):
            before = 1 + len(ids[whole[at][0]])
            result.append(Text(mine[0], len(mine[0]) - before))
        else:
            shared = _common([list(reversed(text)) for text in mine] if _same_ending(item) else mine)
            scored = [shared if _same_ending(item) else len(text) - shared for text in mine]
            result += [Text(text, min(count, len(text) - 1)) for text, count in zip(mine, scored, strict=True)]
        at += len(item.pairs)
    return result


def _single(item: Item) -> bool:
    return len(item.pairs) == 1


def _same_ending(item: Item) -> bool:
    return item.pairs[0].continuation == item.pairs[1].continuation


def _context(pair: Pair) -> str:
    assert isinstance(pair.context, str)
    return pair.context


def _text(pair: Pair) -> str:
    return _context(pair) + pair.continuation


def _common(texts: list[list[int]]) -> int:
    """Tokens with which all begin."""
    for at, tokens in enumerate(zip(*texts, strict=False)):
        if len(set(tokens)) > 1:
            return at
    return min(map(len, texts))
