"""Read a tokenised corpus on disk, whole or a subset of its entries, a few tokens at a time.

Layout of the folder, little-endian:

    meta.json     key, kind, dtype, totals and what was dropped, one record per shard
    NNNNN.bin     uint16 or uint32 token ids
    NNNNN.idx     int64 `docs + 1` offsets into the ids
    NNNNN.len     int32 `docs` UTF-8 bytes of each entry's learned text
    NNNNN.mask    uint8 per token, 1 = learned (conversations only)
    NNNNN.pic     pictures of the entries that have some, one entry's behind the other's; NNNNN.pix has int64 pairs:
                  an entry's first token, and where its pictures begin (rows with pictures only)

Text lies as one stream per shard: `<|endoftext|> ids... <|endoftext|> ids... <|endoftext|>`. An entry is a
range of *inputs* of that stream; the target of every input is the token behind it, so the closing
`<|endoftext|>` of a shard is no input. A document longer than `part_chars` characters is several entries, one
after the other: the last token of one part is the first input of the next, so every token of the document is
a target exactly once. A conversation is one entry: `n` stored ids give `n - 1` inputs.
"""

from __future__ import annotations

import hashlib
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anabatic.core import json_reader
from anabatic.core.errors import DataError
from anabatic.data.batching.packing import TokenSegment

SHARD_FORMAT_VERSION = 3
TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_MAX_READ_BYTES = 1 << 30
"""Bytes of one entry at most."""
_MAX_OPEN_FILES = 256
_REBUILD_HINT = "delete the folder; it is built again from the sources"


class EntryLocation(NamedTuple):
    """Location of an entry: its shard, its first token there and its number of inputs; and in which pass it is read."""

    shard: int
    offset: int
    num_inputs: int
    epoch: int = 0


class _FileCache:
    """Files of one folder, opened when first read; the least recently used is closed beyond a limit.

    `pread` rather than a memory map: no page of a large corpus stays in this process, and a file that
    vanishes under a running job is an error with a name, not a bus error. Reads are safe from several
    threads.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_handles: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def read_bytes(self, name: str, start: int, num_bytes: int) -> bytes:
        """Return `num_bytes` bytes from byte `start`.

        Raises:
            DataError: the file ends early or cannot be read.
        """
        if start < 0 or not 0 <= num_bytes < _MAX_READ_BYTES:  # of a damaged index: nobody has so much memory
            raise DataError(f"{self._folder / name}: {num_bytes:,} bytes from byte {start:,} are named", _REBUILD_HINT)
        try:
            with self._lock:
                handle = self._open_handles.pop(name, -1)
                if handle < 0:
                    handle = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
                self._open_handles[name] = handle
                if len(self._open_handles) > _MAX_OPEN_FILES:
                    os.close(self._open_handles.popitem(last=False)[1])
                data = os.pread(handle, num_bytes, start)
                size = start + len(data) if len(data) == num_bytes else os.fstat(handle).st_size
        except OSError as error:
            raise DataError(f"{self._folder / name}: {error.strerror or error}", _REBUILD_HINT) from error
        if len(data) != num_bytes:
            raise DataError(
                f"{self._folder / name}: ends at byte {size}, expected {start + num_bytes}",
                _REBUILD_HINT,
            )
        return data

    def close(self) -> None:
        with self._lock:
            while self._open_handles:
                os.close(self._open_handles.popitem()[1])

    def __del__(self) -> None:
        self.close()


class ShardSet:
    """Tokenised documents or conversations of one source.

    Attributes:
        path: the folder.
        name: the source as the user wrote it.
        is_chat: entries are conversations with a mask.
        num_docs: entries; a long document counts once per part.
        num_tokens: inputs of one pass over all entries.
        num_bytes: UTF-8 bytes of the learned text: all of a document, what the assistant says in a
            conversation.
        eot: id of `<|endoftext|>`.
        key: identifies the content.
        counts: what was read and what was dropped, by name.
        has_pictures: entries may have pictures.
    """

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self.name: str = meta["source"]
        self.key: str = meta["key"]
        self.is_chat: bool = meta["kind"] == "chat"
        self.num_docs: int = meta["num_docs"]
        self.num_tokens: int = meta["num_tokens"]
        self.num_bytes: int = meta["num_bytes"]
        self.eot: int = meta["eot"]
        self.counts: dict[str, int] = meta["counts"]
        self.dtype = TOKEN_DTYPES[meta["dtype"]]
        self._first_docs = [0]
        for shard in meta["shards"]:
            self._first_docs.append(self._first_docs[-1] + shard["docs"])
        self._files = _FileCache(path)
        self.has_pictures = bool(meta.get("pictures"))
        self._picture_index: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @classmethod
    def open(cls, path: str | Path) -> ShardSet:
        """Open a folder written by `build`, after comparing every file's size with `meta.json`.

        Raises:
            DataError: the folder is missing, of another format, or a file was cut short.
        """
        path = Path(path)
        try:
            meta = json_reader.read_json_file(path / "meta.json")
        except FileNotFoundError as error:
            raise DataError(f"{path}: no tokenised data here (no meta.json)", "build it first") from error
        except (OSError, ValueError) as error:
            raise DataError(f"{path / 'meta.json'}: cannot be read ({error})", _REBUILD_HINT) from error
        if not isinstance(meta, dict) or meta.get("format") != SHARD_FORMAT_VERSION:
            raise DataError(f"{path}: shards of another format, {SHARD_FORMAT_VERSION} is needed", _REBUILD_HINT)
        try:
            if meta["dtype"] not in TOKEN_DTYPES:
                raise DataError(
                    f"{path}: dtype {meta['dtype']!r}, expected one of {', '.join(TOKEN_DTYPES)}", _REBUILD_HINT
                )
            _check_numbers(path, meta)
            _check_sizes(path, meta)
            return cls(path, meta)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path / 'meta.json'}: no description of shards: {error!r}", _REBUILD_HINT) from error

    def close(self) -> None:
        """Close the files; reading opens them again."""
        self._files.close()

    def locate_entry(self, i: int, turn: int = 0) -> EntryLocation:
        """Return where entry `i` lies, read in pass `turn`."""
        shard, local = self._find_shard(i)
        data = self._files.read_bytes(f"{shard:05d}.idx", local * 8, 16)
        start = int.from_bytes(data[:8], "little")
        length = int.from_bytes(data[8:], "little") - start
        return EntryLocation(shard, start, length - int(self.is_chat), turn)

    def count_entry_bytes(self, i: int) -> int:
        """Return the UTF-8 bytes of the learned text of entry `i`."""
        shard, local = self._find_shard(i)
        return int.from_bytes(self._files.read_bytes(f"{shard:05d}.len", local * 4, 4), "little")

    def read_segment(self, entry: EntryLocation, start: int, n: int) -> TokenSegment:
        """Read `n` inputs of an entry from its token `start` on, and the token behind them."""
        size, at = self.dtype.itemsize, entry.offset + start
        data = self._files.read_bytes(f"{entry.shard:05d}.bin", at * size, (n + 1) * size)
        ids = np.frombuffer(data, dtype=self.dtype)
        if not self.is_chat:
            return TokenSegment(ids)
        mask = np.frombuffer(self._files.read_bytes(f"{entry.shard:05d}.mask", at, n + 1), dtype=np.uint8)
        return TokenSegment(ids, mask, pictures=self._read_pictures(entry) if self.has_pictures else b"")

    def _read_pictures(self, entry: EntryLocation) -> bytes:
        """Return what names the pictures of an entry; empty: it has none."""
        index = self._picture_index.get(entry.shard)
        if index is None:
            pairs = np.fromfile(self.path / f"{entry.shard:05d}.pix", dtype="<i8").reshape(-1, 2)
            size = (self.path / f"{entry.shard:05d}.pic").stat().st_size
            index = self._picture_index[entry.shard] = (pairs[:, 0], np.append(pairs[:, 1], size))
        tokens, begins = index
        at = int(np.searchsorted(tokens, entry.offset))
        if at == len(tokens) or tokens[at] != entry.offset:
            return b""
        return self._files.read_bytes(f"{entry.shard:05d}.pic", int(begins[at]), int(begins[at + 1] - begins[at]))

    def read_entry(self, i: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the stored ids of entry `i` and, for a conversation, its mask.

        Text: the inputs, `<|endoftext|> ids...` for a document's first part. Conversation: all rendered ids.
        """
        entry = self.locate_entry(i)
        piece = self.read_segment(entry, 0, entry.num_inputs)
        return (piece.ids, piece.loss_mask) if self.is_chat else (piece.ids[:-1], None)

    def read_entry_lengths(self, shard: int) -> np.ndarray:
        """Return the inputs of every entry of a shard, int64."""
        docs = self.meta["shards"][shard]["docs"]
        offsets = np.frombuffer(self._files.read_bytes(f"{shard:05d}.idx", 0, (docs + 1) * 8), dtype="<i8")
        return np.diff(offsets) - int(self.is_chat)

    def _find_shard(self, i: int) -> tuple[int, int]:
        if not 0 <= i < self.num_docs:
            raise IndexError(f"entry {i} of {self.num_docs}")
        shard = bisect_right(self._first_docs, i) - 1
        return shard, i - self._first_docs[shard]


def _check_numbers(path: Path, meta: dict[str, Any]) -> None:
    """Counts are whole numbers, and the shards' make up the whole."""
    counted = [meta[name] for name in ("num_docs", "num_tokens", "num_bytes", "eot")]
    counted += [shard[name] for shard in meta["shards"] for name in ("docs", "tokens")]
    wrong = next((one for one in counted if type(one) is not int or not 0 <= one < 2**62), None)
    docs = sum(shard["docs"] for shard in meta["shards"]) if wrong is None else 0
    if wrong is not None or docs != meta["num_docs"] or not isinstance(meta["counts"], dict):
        what = f"{docs} documents in the shards, {meta['num_docs']!r:.40} in all" if wrong is None else f"{wrong!r:.40}"
        raise DataError(f"{path / 'meta.json'}: a number is wrong: {what}", _REBUILD_HINT)


def _check_sizes(path: Path, meta: dict[str, Any]) -> None:
    chat = meta["kind"] == "chat"
    for number, shard in enumerate(meta["shards"]):
        stored = shard["tokens"] + (0 if chat else 1)
        expected = {
            "bin": stored * TOKEN_DTYPES[meta["dtype"]].itemsize,
            "idx": (shard["docs"] + 1) * 8,
            "len": shard["docs"] * 4,
        }
        if chat:
            expected["mask"] = stored
        for suffix, size in expected.items():
            file = path / f"{number:05d}.{suffix}"
            found = file.stat().st_size if file.exists() else 0
            if found != size:
                raise DataError(f"{file}: {found} bytes, meta.json says {size} (dtype {meta['dtype']})", _REBUILD_HINT)


class ShardSubset:
    """The entries `chosen` (their numbers, ascending) of a set of conversations; reads like a `ShardSet`."""

    def __init__(self, shard_set: ShardSet, chosen: np.ndarray, name: str) -> None:
        lengths = np.concatenate(
            [shard_set.read_entry_lengths(shard) for shard in range(len(shard_set.meta["shards"]))]
        )
        self._parent, self._entry_indices = shard_set, chosen
        self._entry_lengths = lengths[chosen]
        self.name = f"{shard_set.name} ({name})"
        self.key = hashlib.sha256(shard_set.key.encode() + chosen.tobytes()).hexdigest()
        self.is_chat, self.eot = shard_set.is_chat, shard_set.eot
        self.num_docs = len(chosen)
        self.num_tokens = int(self._entry_lengths.sum())
        self.counts = shard_set.counts
        self.meta: dict[str, Any] = {**shard_set.meta, "shards": [{"docs": self.num_docs}]}

    def locate_entry(self, i: int, turn: int = 0) -> EntryLocation:
        """Return where entry `i` lies, read in pass `turn`."""
        return self._parent.locate_entry(int(self._entry_indices[i]), turn)

    def read_entry_lengths(self, shard: int) -> np.ndarray:
        """Return the inputs of every entry, int64."""
        return self._entry_lengths

    def read_segment(self, entry: EntryLocation, start: int, n: int) -> TokenSegment:
        """Read `n` inputs of an entry."""
        return self._parent.read_segment(entry, start, n)
