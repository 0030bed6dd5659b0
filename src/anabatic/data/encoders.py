"""What turns batches of documents into token ids for the shards, and counts what it drops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from anabatic.core.errors import DataError
from anabatic.data import chat
from anabatic.data.document import Document
from anabatic.data.learn import Learning
from anabatic.data.shard_write import Counts, Encoded, Part, mixed


class TextEncoder:
    """Parts of text through a Rust tokenizer, in parallel, without special tokens.

    A special token's name inside a text (`<|endoftext|>` in source code, say) is read as the plain characters
    it is, so that a document cannot end itself.

    Args:
        backend: a `tokenizers.Tokenizer` as `tokenizer.encode_fast` returns it.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __call__(self, batch: list[Part]) -> Iterable[Encoded]:
        """Tokenise at once; ids become Python lists when the result is read, in the reader's thread."""
        texts = [part.text for part in batch]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return _unpack(batch, encodings)


def _unpack(batch: list[Part], encodings: list[Any]) -> Iterator[Encoded]:
    for part, encoding in zip(batch, encodings, strict=True):
        yield Encoded(encoding.ids, None, len(part.text.encode("utf-8")), part.first)


class ChatEncoder:
    """Conversations through a tokenizer's chat template.

    Args:
        tokenizer: a fast tokenizer of transformers with a chat template that marks what the assistant says.
        counts: receives what is cut and dropped.
        seq_len: conversations of more inputs are treated as `learning` says; `None` cuts nothing.
        learning: what is learned.
        skip_bad: pass over malformed conversations instead of raising.
    """

    def __init__(
        self, tokenizer: Any, counts: Counts, *, seq_len: int | None, learning: Learning, skip_bad: bool
    ) -> None:
        chat.template_of(tokenizer)
        self._tokenizer = tokenizer
        self._counts = counts
        self._seq_len = seq_len
        self._learning = learning
        self._skip_bad = skip_bad

    def __call__(self, batch: list[Document]) -> list[Encoded]:
        """Render and tokenise.

        Raises:
            DataError: a malformed conversation (unless skipped), or a text among the conversations.
        """
        for document in batch:
            if document.messages is None:
                raise mixed(document.place, "a text among conversations")
        try:
            rendered = self._render(batch)
        except DataError:
            if not self._skip_bad:
                raise
            rendered = list(chain.from_iterable(self._one(document) for document in batch))
        return list(chain.from_iterable(map(self._encoded, rendered)))

    def _render(self, batch: Sequence[Document]) -> list[chat.Rendered]:
        return chat.render_full(
            [document.messages or [] for document in batch],
            self._tokenizer,
            names=[document.place for document in batch],
            tools=[document.tools for document in batch],
            turns=self._learning.turns,
        )

    def _one(self, document: Document) -> list[chat.Rendered]:
        try:
            return self._render([document])
        except DataError:
            self._counts.bad += 1
            return []

    def _encoded(self, rendered: chat.Rendered) -> list[Encoded]:
        length, counts = len(rendered.ids), self._counts
        pieces = list(self._learning.pieces(length, self._seq_len))
        cut = pieces != [(0, length)]
        if cut:
            counts.longest = max(counts.longest, length)
        everything = self._learning.turns == "all"
        kept: list[Encoded] = []
        for start, stop in pieces:
            mask = rendered.mask[start:stop] | 1 if everything else rendered.mask[start:stop]
            if mask[1:].any():
                num_bytes = rendered.num_bytes(start + (start > 0), stop, everything)  # the first is no target
                kept.append(Encoded(rendered.ids[start:stop].tolist(), mask.tobytes(), num_bytes, not kept))
        if cut and not kept:  # left out, or cut before the assistant speaks
            counts.too_long += 1
            return []
        counts.documents += 1
        counts.split += len(pieces) > 1
        counts.truncated += cut and len(pieces) == 1
        counts.unlearned += not kept
        return kept
