"""Hold out documents of a source, where no held-out sources are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Literal, Protocol

from anabatic.data.readers.document import Document, hash_id, is_held_out

EXACT_SPLIT_BELOW = 200
"""Below this number of documents a hash threshold may hold out none at all, so the share is met exactly."""

MIN_TAIL_CHARS = 20
"""Ends of texts are held out in place of a whole text where together they have at least so many characters."""

_HEAD_CHARS = 2**25

Split = Literal["train", "valid"]


class HeldOutCount(Protocol):
    """Counts documents of the other side."""

    held_out: int


@dataclass(frozen=True)
class SplitRule:
    """Assignment of documents to splits.

    Attributes:
        fraction: share held out.
        chosen: ids of the documents held out, of a small source; None: the hash of an id decides (`is_held_out`).
        cuts_texts: every document gives its last `fraction` of characters.
    """

    fraction: float
    chosen: frozenset[str] | None = None
    cuts_texts: bool = False

    def select(self, documents: Iterable[Document], split: Split, counts: HeldOutCount | None) -> Iterator[Document]:
        """Yield the documents of a split; `counts` counts those of the other side."""
        for document in documents:
            if self.cuts_texts:
                yield _split_long_text(document, self.fraction, split)
                continue
            is_heldout = is_held_out(document.id, self.fraction) if self.chosen is None else document.id in self.chosen
            if is_heldout == (split == "valid"):
                yield document
            elif counts is not None:
                counts.held_out += 1


def decide_split(read: Callable[[], Iterable[Document]], fraction: float) -> tuple[SplitRule, Iterable[Document]]:
    """Read the first documents of a source; return the rule that holds for all, and all documents.

    From 200 documents on, a document is held out by the hash of its id alone (`is_held_out`). A smaller source holds
    out `fraction` of its documents, at least one, those with the smallest hashes. Long texts too few for that (fewer
    than `1 / fraction`; one file, say) each give their last `fraction` of characters.

    Args:
        read: starts reading the source from its beginning; called again when the first documents are too large to keep.
        fraction: share held out.
    """
    source = iter(read())
    head: list[Document] = []
    chars = 0
    while len(head) < EXACT_SPLIT_BELOW and chars <= _HEAD_CHARS and (document := next(source, None)) is not None:
        head.append(document)
        chars += len(document.text or "")
    ids = [(document.id, document.text is not None) for document in head]
    documents: Iterable[Document] = chain(head, source)
    if len(head) < EXACT_SPLIT_BELOW and chars > _HEAD_CHARS:
        head.clear()
        ids = [(document.id, document.text is not None) for document in islice(read(), EXACT_SPLIT_BELOW)]
        documents = read()
    too_few = 0 < len(ids) < EXACT_SPLIT_BELOW and len(ids) * fraction < 1 and all(is_text for _, is_text in ids)
    if too_few and (len(ids) < 2 or chars * fraction >= MIN_TAIL_CHARS):
        return SplitRule(fraction, cuts_texts=True), documents
    if len(ids) >= EXACT_SPLIT_BELOW:
        return SplitRule(fraction), documents
    return SplitRule(fraction, _ids_with_smallest_hashes([doc_id for doc_id, _ in ids], fraction)), documents


def select_split(
    read: Callable[[], Iterable[Document]], fraction: float, split: Split, counts: HeldOutCount | None = None
) -> Iterator[Document]:
    """Yield the documents of a split: `valid` gets `fraction` of them, `train` the others (`decide_split`).

    Args:
        read: starts reading the source from its beginning; called again when the first documents are too large to keep.
        fraction: share held out.
        split: which side to yield.
        counts: `held_out` counts the documents of the other side.
    """
    rule, documents = decide_split(read, fraction)
    yield from rule.select(documents, split, counts)


def _ids_with_smallest_hashes(ids: list[str], fraction: float) -> frozenset[str]:
    """Return the ids with the smallest hashes; none when there is just one."""
    num_heldout = 0 if len(ids) < 2 else max(1, round(len(ids) * fraction))
    return frozenset(sorted(ids, key=hash_id)[:num_heldout])


def _split_long_text(document: Document, fraction: float, split: Split) -> Document:
    text = document.text or ""
    at = len(text) - int(len(text) * fraction)
    at = text.rfind("\n", 0, at) + 1 or at
    return replace(document, text=text[at:] if split == "valid" else text[:at])
