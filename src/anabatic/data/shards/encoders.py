"""Turn batches of documents into token ids for the shards, and count what is dropped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from anabatic.core.errors import DataError
from anabatic.data.chat import rendering
from anabatic.data.chat.loss_mask import LossPolicy, LossTurns
from anabatic.data.chat.preference_pairs import PICTURE_BREAK, REJECTED_BIT, require_equal_tags, split_pair_messages
from anabatic.data.readers.document import Document, Message
from anabatic.data.readers.row_use import require_good_answer
from anabatic.data.shards.writer import DocumentCounts, EncodedEntry, TextChunk, mixed_source_error
from anabatic.data.tokenizer import hf_folder

if TYPE_CHECKING:
    from anabatic.data.vision.model_pictures import ModelPictures
    from anabatic.data.vision.own_processor import ProcessorRenderer
    from anabatic.data.vision.picture_encoder import PictureRenderer

Batches = Iterable[list[Any]]
EncodedBatches = Iterator[Iterable[EncodedEntry]]


class TextEncoder:
    """Parts of text through a Rust tokenizer, in parallel, without special tokens.

    A special token's name inside a text (`<|endoftext|>` in source code, say) is read as the plain characters
    it is, so that a document cannot end itself.

    Args:
        backend: a `tokenizers.Tokenizer` as `hf_folder.load_fast_tokenizer` returns it.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __call__(self, batch: list[TextChunk]) -> Iterable[EncodedEntry]:
        """Tokenise at once; ids become Python lists when the result is read, in the reader's thread."""
        texts = [part.text for part in batch]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return _iter_encoded(batch, encodings)


def _iter_encoded(batch: list[TextChunk], encodings: list[Any]) -> Iterator[EncodedEntry]:
    for part, encoding in zip(batch, encodings, strict=True):
        yield EncodedEntry(encoding.ids, None, len(part.text.encode("utf-8")), part.is_document_start)


class ChatEncoder:
    """Conversations through a tokenizer's chat template.

    Args:
        tokenizer: a fast tokenizer of transformers with a chat template that marks what the assistant says.
        counts: receives what is cut and dropped.
        seq_len: conversations of more inputs are treated as `learning` says; `None` cuts nothing.
        learning: what is learned.
        skip_bad: pass over malformed conversations instead of raising.
        pictures: how the model wants its pictures; None: it sees none.
    """

    def __init__(
        self,
        tokenizer: Any,
        counts: DocumentCounts,
        *,
        seq_len: int | None,
        learning: LossPolicy,
        skip_bad: bool,
        pictures: ModelPictures | None = None,
    ) -> None:
        hf_folder.get_chat_template(tokenizer)
        self._tokenizer = tokenizer
        self._counts = counts
        self._seq_len = seq_len
        self._loss_policy = learning
        self._skip_bad = skip_bad
        self._pictures = None if pictures is None else self._make_renderer(pictures)

    @property
    def _room(self) -> int | None:
        """Tokens of a conversation that is not cut; None: any number."""
        return None if self._seq_len is None else self._seq_len + 1

    def _make_renderer(self, pictures: ModelPictures) -> PictureRenderer | ProcessorRenderer:
        from anabatic.data.vision.model_pictures import make_renderer

        return make_renderer(self._tokenizer, pictures, self._room)

    def __call__(self, batch: list[Document]) -> list[EncodedEntry]:
        """Render and tokenise.

        Raises:
            DataError: a malformed conversation (unless skipped), or a text among the conversations.
        """
        for document in batch:
            if document.messages is None:
                raise mixed_source_error(document.location, "a text among conversations")
        try:
            rendered = self._render_batch(batch)
        except DataError:
            if not self._skip_bad:
                raise
            rendered = list(chain.from_iterable(self._render_or_skip(document) for document in batch))
        return list(chain.from_iterable(map(self._build_entries, rendered)))

    def _render_batch(self, batch: Sequence[Document]) -> list[rendering.RenderedConversation]:
        for document in batch:
            require_good_answer(document)
        rows = [(document.messages or [], document, document.location) for document in batch]
        return self._render_conversations(rows, self._loss_policy.turns)

    def _render_conversations(
        self, rows: Sequence[tuple[list[Message], Document, str]], turns: LossTurns = "assistant"
    ) -> list[rendering.RenderedConversation]:
        """Render conversations of rows.

        Args:
            rows: turns, the row they are of, and their name in messages.
        """
        conversations, names = [row[0] for row in rows], [row[2] for row in rows]
        tools = [document.tools for _, document, _ in rows]
        if self._pictures is None:
            return rendering.render_conversations(conversations, self._tokenizer, names=names, tools=tools, turns=turns)
        pictures = [document.pictures for _, document, _ in rows]
        return self._pictures.render(conversations, pictures, names, tools, turns)

    def _render_or_skip(self, document: Document) -> list[rendering.RenderedConversation]:
        try:
            return self._render_batch([document])
        except DataError:
            self._counts.bad += 1
            return []

    def _build_entries(self, rendered: rendering.RenderedConversation) -> list[EncodedEntry]:
        length, counts = len(rendered.ids), self._counts
        pieces = list(self._loss_policy.kept_token_ranges(length, self._seq_len))
        cut = pieces != [(0, length)]
        if cut:
            counts.longest = max(counts.longest, length)
        everything = self._loss_policy.turns == "all"
        kept: list[EncodedEntry] = []
        for start, stop in pieces:
            mask = rendered.mask[start:stop] | 1 if everything else rendered.mask[start:stop]
            if everything and rendered.is_picture is not None:
                mask[rendered.is_picture[start:stop]] = 0
            if mask[1:].any():
                num_bytes = rendered.count_text_bytes(start + (start > 0), stop, everything)  # the first is no target
                entry = EncodedEntry(rendered.ids[start:stop].tolist(), mask.tobytes(), num_bytes, not kept)
                kept.append(entry._replace(pictures=rendered.pictures))  # rows with pictures are one piece
        if cut and not kept:  # left out, or cut before the assistant speaks
            counts.too_long += 1
            return []
        counts.documents += 1
        counts.split += len(pieces) > 1
        counts.truncated += cut and len(pieces) == 1
        counts.unlearned += not kept
        return kept


class PreferencePairEncoder(ChatEncoder):
    """Pairs through a tokenizer's chat template. Learned is what the assistant says where the two differ.

    With `learning.labels` an entry may be one answer: all of it is marked as the second conversation if it is bad.
    """

    @property
    def _room(self) -> int | None:
        return None if self._seq_len is None else self._seq_len - 1 - self._loss_policy.closed

    def _render_batch(self, batch: Sequence[Document]) -> list[Any]:
        rows, kept = [], []
        for document in batch:
            sides = split_pair_messages(document, self._loss_policy.labels)
            kept.append([side is not None for side in sides])
            if document.pictures and None not in sides:
                require_equal_tags(document.location, sides[0] or [], sides[1] or [])
            for side, turns in zip(("chosen", "rejected"), sides, strict=True):
                if turns is not None:
                    rows.append((turns, document, f"{document.location} ({side})"))
        rendered = iter(self._render_conversations(rows))
        return [[next(rendered) if is_present else None for is_present in sides] for sides in kept]

    def _build_entries(self, rendered: Any) -> list[EncodedEntry]:
        counts = self._counts
        sides = [(side, mark) for side, mark in zip(rendered, (0, REJECTED_BIT), strict=True) if side is not None]
        lengths = [len(side.ids) for side, _ in sides]
        closed = self._loss_policy.closed
        pieces = [list(self._loss_policy.kept_token_ranges(length, self._room)) for length in lengths]
        if any(each != [(0, length)] for each, length in zip(pieces, lengths, strict=True)):
            counts.longest = max(counts.longest, *lengths)
        if not all(pieces):
            counts.too_long += 1
            return []
        cut = any(each != [(0, length)] for each, length in zip(pieces, lengths, strict=True))
        ids: list[int] = []
        masks: list[np.ndarray] = []
        num_bytes = 0
        for (side, mark), ((start, stop), *_) in zip(sides, pieces, strict=True):
            mask = side.mask[start:stop]
            if not mask[1:].any():
                counts.too_long += cut
                counts.documents += not cut
                counts.unlearned += not cut
                return []
            ids += side.ids[start:stop].tolist() + [int(side.ids[stop - 1])] * closed
            masks.append(np.pad(mask, (0, int(closed))) | mark)
            num_bytes += side.count_text_bytes(start + (start > 0), stop)
        counts.documents += 1
        counts.truncated += len(ids) < sum(lengths) + closed * len(sides)
        entry = EncodedEntry(ids, np.concatenate(masks).astype(np.uint8).tobytes(), num_bytes, True)
        return [
            entry._replace(
                pictures=PICTURE_BREAK.join(side.pictures if side else b"" for side in rendered).rstrip(PICTURE_BREAK)
            )
        ]


@dataclass(frozen=True)
class EncoderSettings:
    """All that decides how a batch is tokenised; a machine of a cluster makes the encoder from it.

    Attributes:
        key: of the shards; the tokenizer of a key is loaded once in a process.
        tokenizer_folder: has the same path on every machine.
        is_chat: rows are conversations, `learning` and `seq_len` say what is kept of them.
        dtype: `uint16` or `uint32`.
        pictures: how the model wants its pictures; None: it sees none.
    """

    key: str
    tokenizer_folder: str
    is_chat: bool
    dtype: str
    seq_len: int | None
    learning: LossPolicy
    skip_bad: bool
    pictures: ModelPictures | None = None

    def make_encoder(self, counts: DocumentCounts) -> Callable[[list[Any]], Iterable[EncodedEntry]]:
        """Return the encoder, which counts in `counts` what it drops."""
        if not self.is_chat:
            return TextEncoder(load_text_tokenizer(self.key, self.tokenizer_folder))
        kind: Callable[..., ChatEncoder] = PreferencePairEncoder if self.learning.pairs else ChatEncoder
        return kind(
            _load_chat_tokenizer(self.key, self.tokenizer_folder),
            counts,
            seq_len=self.seq_len,
            learning=self.learning,
            skip_bad=self.skip_bad,
            pictures=self.pictures,
        )


@functools.lru_cache(1)
def load_text_tokenizer(key: str, folder: str) -> Any:
    """Return what `hf_folder.load_fast_tokenizer` does; again at once for the same key."""
    return hf_folder.load_fast_tokenizer(folder)


@functools.lru_cache(1)
def _load_chat_tokenizer(key: str, folder: str) -> Any:
    return hf_folder.load_tokenizer(folder)


def encode_here(settings: EncoderSettings, batches: Batches, counts: DocumentCounts) -> EncodedBatches:
    """Tokenise in this process, on all its cores."""
    return map(settings.make_encoder(counts), batches)


Encode = Callable[[EncoderSettings, Batches, DocumentCounts], EncodedBatches]
"""`encode_here`, or `RayEncoding.encode`."""
