"""Documents to shards: reading, tokenising and writing overlap, memory is bounded by a few batches."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.paths import fsync_folder, make_write_error
from anabatic.core.progress import ProgressMeter
from anabatic.data.batching.prefetch import PrefetchIterator
from anabatic.data.readers.document import Document
from anabatic.data.shards.reader import SHARD_FORMAT_VERSION

SHARD_BYTES = 256 * 2**20
_COPY_BYTES = 2**23
CHUNK_CHARS = 2**15
"""Default length of the parts of a long document: about 8,000 tokens of English."""
_BATCH_CHARS = max(2**20, 2**16 * (os.cpu_count() or 1))
_BATCH_DOCS = 1024
TYPECODES = {"uint16": "H", "uint32": "I"}
"""Of `array`, by type of the ids."""
_SAFE_SPLIT_PATTERN = re.compile(r"\S\n(?=\S)")
CACHE_HINT = "choose another folder with --data.cache DIR or ANABATIC_CACHE"
_STALE_SECONDS = 24 * 3600


@dataclass
class DocumentCounts:
    """Counts of read and dropped documents; `num_*` of the meta file are sums over what was kept.

    `longest` are the tokens of the longest conversation that was cut, split or left out.
    """

    documents: int = 0
    held_out: int = 0
    empty: int = 0
    bad: int = 0
    unread: int = 0
    truncated: int = 0
    split: int = 0
    too_long: int = 0
    unlearned: int = 0
    longest: int = 0

    def add(self, other: Mapping[str, int]) -> None:
        """Add what another process has counted; of `longest` the larger is kept."""
        for name, count in other.items():
            own = getattr(self, name)
            setattr(self, name, max(own, count) if name == "longest" else own + count)


class TextChunk(NamedTuple):
    """A document, or a part of a long one, before it is tokenised."""

    text: str
    is_document_start: bool


class EncodedEntry(NamedTuple):
    """An entry ready to be written: ids (or their bytes), mask (conversations), UTF-8 bytes, whether it begins a
    document, its pictures."""

    ids: Any
    mask: bytes | None
    num_bytes: int
    is_document_start: bool
    pictures: bytes = b""


def split_long_text(text: str, part_chars: int) -> Iterator[str]:
    """Cut a text into parts of about `part_chars` characters that join to the text.

    A cut lies behind a newline between two characters that are not blank, where the pre-tokenizers of GPT-2,
    Llama 3 and Qwen cut as well, so that the tokens stay the same; else behind any newline; else at
    `part_chars`.
    """
    start = 0
    while len(text) - start > part_chars:
        low, high = start + part_chars // 2, start + part_chars
        cuts = list(_SAFE_SPLIT_PATTERN.finditer(text, low, high))
        end = cuts[-1].end() if cuts else text.rfind("\n", low, high) + 1
        end = end if end > start else high
        yield text[start:end]
        start = end
    yield text[start:]


def chunk_documents(documents: Iterable[Document], counts: DocumentCounts, part_chars: int) -> Iterator[TextChunk]:
    """Yield the parts of text documents; empty ones are counted and skipped.

    Raises:
        DataError: a conversation among the documents.
    """
    for document in documents:
        if document.text is None:
            raise mixed_source_error(document.location, "a conversation among texts")
        if not document.text.strip():
            counts.empty += 1
            continue
        counts.documents += 1
        for number, text in enumerate(split_long_text(document.text, part_chars)):
            yield TextChunk(text, number == 0)


def mixed_source_error(name: str, what: str) -> DataError:
    """Return the error for a source that holds both texts and conversations."""
    return DataError(f"{name}: {what}; a source is either", "put texts and conversations into two sources")


def batch_by_size(
    items: Iterable[Any], size: Callable[[Any], int], add_chars: Callable[[int], None]
) -> Iterator[list[Any]]:
    """Group items until a batch holds about a million characters (more on many cores) or 1,024 items."""
    batch: list[Any] = []
    room = _BATCH_CHARS
    for item in items:
        batch.append(item)
        room -= size(item)
        if room <= 0 or len(batch) >= _BATCH_DOCS:
            add_chars(_BATCH_CHARS - room)
            yield batch
            batch, room = [], _BATCH_CHARS
    if batch:
        add_chars(_BATCH_CHARS - room)
        yield batch


@dataclass
class _ShardTotals:
    tokens: int = 0
    docs: int = 0
    bytes: int = 0


@dataclass
class ShardWriter:
    """Append entries to shard files in `folder`.

    Attributes:
        folder: an empty folder.
        kind: `text` or `chat`.
        dtype: `uint16` or `uint32`.
        eot: id of `<|endoftext|>`.
        shard_bytes: a shard is closed at the first document that begins beyond this size.
        marks_starts: one more file, `NNNNN.start`, has a byte for each entry: whether it begins a document.
        has_pictures: two more files, `NNNNN.pic` and `NNNNN.pix`, name the pictures of entries.
    """

    folder: Path
    kind: str
    dtype: str
    eot: int
    shard_bytes: int = SHARD_BYTES
    marks_starts: bool = False
    has_pictures: bool = False
    shards: list[_ShardTotals] = field(default_factory=list)
    _files: list[BinaryIO] = field(default_factory=list)

    def append_entry(self, entry: EncodedEntry) -> None:
        """Append one entry."""
        if not self.shards or (entry.is_document_start and self._current_shard_bytes() >= self.shard_bytes):
            self._open_shard()
        shard = self.shards[-1]
        ids = array(TYPECODES[self.dtype], entry.ids)
        if entry.pictures:
            self._picture_index.extend((shard.tokens, len(self._pictures)))
            self._pictures += entry.pictures
        if self.kind == "chat":
            self._offsets.append(shard.tokens)
            self._files[1].write(entry.mask or b"")
        elif entry.is_document_start:
            self._offsets.append(shard.tokens)
            ids.insert(0, self.eot)
        else:
            # The last token of the part before is this part's first input: its target is our first token.
            self._offsets.append(shard.tokens - 1)
        self._files[0].write(ids.tobytes())
        self._lengths.append(entry.num_bytes)
        self._starts.append(entry.is_document_start)
        shard.tokens += len(ids)
        shard.docs += 1
        shard.bytes += entry.num_bytes

    def append_shard(self, folder: Path) -> None:
        """Append the entries of a folder's only shard, written with `marks_starts`: as if each came to `append_entry`.

        Raises:
            OSError: a file cannot be read.
        """
        offsets = np.fromfile(folder / "00000.idx", dtype="<i8")
        lengths = np.fromfile(folder / "00000.len", dtype="<i4")
        first_entries = np.flatnonzero(np.fromfile(folder / "00000.start", dtype=np.uint8))
        positions = offsets[first_entries]
        item_bytes = array(TYPECODES[self.dtype]).itemsize
        done = 0
        while done < len(first_entries):
            if not self.shards or self._current_shard_bytes() >= self.shard_bytes:
                self._open_shard()
            shard = self.shards[-1]
            room = -(-(self.shard_bytes - self._current_shard_bytes()) // item_bytes)
            begin = int(first_entries[done])
            done = int(np.searchsorted(positions, positions[done] + room))
            end = int(first_entries[done]) if done < len(first_entries) else len(lengths)
            start, stop = int(offsets[begin]), int(offsets[end])
            _copy_bytes(folder / "00000.bin", self._files[0], start * item_bytes, stop * item_bytes)
            if self.kind == "chat":
                _copy_bytes(folder / "00000.mask", self._files[1], start, stop)
            self._offsets.frombytes((offsets[begin:end] + (shard.tokens - start)).tobytes())
            self._lengths.frombytes(lengths[begin:end].tobytes())
            if self.has_pictures:
                self._append_pictures(folder, start, stop, shard.tokens - start)
            shard.tokens += stop - start
            shard.docs += end - begin
            shard.bytes += int(lengths[begin:end].sum(dtype=np.int64))

    def _append_pictures(self, folder: Path, start: int, stop: int, moved: int) -> None:
        """Append the pictures of tokens from `start` to `stop` of a folder's only shard, moved by so many tokens."""
        index = np.fromfile(folder / "00000.pix", dtype="<i8").reshape(-1, 2)
        names = (folder / "00000.pic").read_bytes()
        ends = [*index[1:, 1].tolist(), len(names)]
        for (token, begin), end in zip(index.tolist(), ends, strict=True):
            if start <= token < stop:
                self._picture_index.extend((token + moved, len(self._pictures)))
                self._pictures += names[begin:end]

    def write_meta(self, meta: dict[str, Any], counts: DocumentCounts) -> None:
        """Close the last shard and write `meta.json`; without it the folder is no shard set."""
        self._close_shard()
        stored = sum(shard.tokens for shard in self.shards)
        docs = sum(shard.docs for shard in self.shards)
        full = {
            **meta,
            "format": SHARD_FORMAT_VERSION,
            "kind": self.kind,
            "dtype": self.dtype,
            "eot": self.eot,
            "num_tokens": stored - docs if self.kind == "chat" else stored,
            "num_docs": docs,
            "num_bytes": sum(shard.bytes for shard in self.shards),
            "counts": asdict(counts),
            **({"pictures": True} if self.has_pictures else {}),
            "shards": [asdict(shard) for shard in self.shards],
        }
        (self.folder / "meta.json").write_text(json.dumps(full, indent=1, ensure_ascii=False), encoding="utf-8")

    def close(self) -> None:
        """Close the files of an unfinished shard."""
        for file in self._files:
            file.close()
        self._files = []

    def _current_shard_bytes(self) -> int:
        return self.shards[-1].tokens * array(TYPECODES[self.dtype]).itemsize

    def _open_shard(self) -> None:
        self._close_shard()
        names = ("bin", "mask") if self.kind == "chat" else ("bin",)
        self._files = [open(self._shard_file(name, len(self.shards)), "wb") for name in names]  # noqa: SIM115
        self.shards.append(_ShardTotals())
        self._offsets = array("q")
        self._lengths = array("i")
        self._starts = bytearray()
        self._pictures, self._picture_index = bytearray(), array("q")

    def _close_shard(self) -> None:
        if not self._files:
            return
        number = len(self.shards) - 1
        self._offsets.append(self.shards[-1].tokens)
        if self.kind == "text":
            self._files[0].write(array(TYPECODES[self.dtype], [self.eot]).tobytes())
        self.close()
        self._shard_file("idx", number).write_bytes(self._offsets.tobytes())
        self._shard_file("len", number).write_bytes(self._lengths.tobytes())
        if self.marks_starts:
            self._shard_file("start", number).write_bytes(self._starts)
        if self.has_pictures:
            self._shard_file("pic", number).write_bytes(self._pictures)
            self._shard_file("pix", number).write_bytes(self._picture_index.tobytes())

    def _shard_file(self, suffix: str, number: int) -> Path:
        return self.folder / f"{number:05d}.{suffix}"


def _copy_bytes(path: Path, target: BinaryIO, start: int, stop: int) -> None:
    with open(path, "rb") as file:
        file.seek(start)
        while start < stop and (block := file.read(min(_COPY_BYTES, stop - start))):
            target.write(block)
            start += len(block)


@contextmanager
def _show_progress(source: str, add_chars: Callable[[int], None] | None) -> Iterator[Callable[[int], None]]:
    if add_chars is not None:
        yield add_chars
        return
    with ProgressMeter(f"tokenising {source}") as meter:
        yield meter.add_chars


def write_shards(
    items: Iterable[Any],
    size: Callable[[Any], int],
    encode: Callable[[Iterable[list[Any]]], Iterator[Iterable[EncodedEntry]]],
    writer: ShardWriter,
    counts: DocumentCounts,
    meta: dict[str, Any],
    add_chars: Callable[[int], None] | None = None,
) -> None:
    """Tokenise `items` and write them: one thread reads, one encodes, this one writes.

    Args:
        items: what `encode` understands (`TextChunk`s, or conversations).
        size: characters of an item.
        encode: tokenises batches, in order; may yield fewer entries than items (it counts what it drops).
        writer: receives the entries.
        counts: written to `meta.json`.
        meta: further values for `meta.json`.
        add_chars: receives the number of characters that were read; None: a line shows them.
    """
    try:
        with (
            _show_progress(meta["source"], add_chars) as count_chars,
            PrefetchIterator(batch_by_size(items, size, count_chars), 2, "read") as read,
            PrefetchIterator(encode(read), 1, "encode") as encoded,
        ):
            for batch in encoded:
                for entry in batch:
                    writer.append_entry(entry)
        writer.write_meta(meta, counts)
    finally:
        writer.close()


@contextmanager
def atomic_folder(path: Path, advance: Callable[[], None] | None = None) -> Iterator[Path]:
    """Yield a temporary folder that takes `path`'s place, unless another process was there first.

    `advance` is called after each file that was synced.

    Raises:
        Failure: the cache cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir(parents=True)
        _remove_stale_builds(path)
        yield temporary
        for file in temporary.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
            if advance is not None:
                advance()
        _rename_unless_exists(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        raise make_write_error(path, error, CACHE_HINT) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename_unless_exists(temporary: Path, path: Path) -> None:
    try:
        os.rename(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        log.debug(f"{path}: built by another process meanwhile")


def _remove_stale_builds(path: Path) -> None:
    """Remove what builds of the same key left behind when they were killed more than a day ago."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
