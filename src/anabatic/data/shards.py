"""Tokenise a source once and keep it: `build` returns the cached `ShardSet` or makes it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from anabatic.config.shared import Data
from anabatic.core import affinity, log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.paths import cache_root, cannot_write, fsync_folder
from anabatic.data import said, sources, tokenizer
from anabatic.data.encoders import ChatEncoder, TextEncoder
from anabatic.data.holdout import Split, select
from anabatic.data.learn import WHOLE, Learning
from anabatic.data.pairs import PairEncoder
from anabatic.data.shard_set import FORMAT, ShardSet
from anabatic.data.shard_write import PART_CHARS, Counts, ShardWriter, parts, write_shards
from anabatic.data.sources import Document, Skips, Source

__all__ = ["ShardSet", "build", "build_all", "key_path"]

_CHAT_FILES = ("tokenizer_config.json", "chat_template.jinja")
Level = tuple[str, str]
"""(column, name of the level)."""
NO_LEVEL: Level = ("", "")
_STALE_SECONDS = 24 * 3600
_BUILT_IN = {"stdlib": "text", "docs": "text", "task": "chat", "chat": "chat"}


def build_all(
    specs: list[str],
    tokenizer_folder: Path,
    data: Data,
    split: Split,
    *,
    seq_len: int | None = None,
    learning: Learning = WHOLE,
) -> list[tuple[ShardSet, float | None]]:
    """Build every source and pair it with its weight, as `Loader` takes them.

    Raises:
        AnabaticError: as `build` and `sources.parse_all`.
    """
    made = partial(build, seq_len=seq_len, learning=learning)
    weights = [source.weight for source in sources.parse_all(specs)]
    return [(made(spec, tokenizer_folder, data, split), weight) for spec, weight in zip(specs, weights, strict=True)]


def build(
    spec: str,
    tokenizer_folder: Path,
    data: Data,
    split: Split,
    *,
    seq_len: int | None = None,
    learning: Learning = WHOLE,
    level: Level = NO_LEVEL,
) -> ShardSet:
    """Return the tokenised source, from the cache or made now.

    When `data.valid` is empty, the `valid` split of a training source is its held-out share and `train` is
    the rest; otherwise a source is taken whole. The cache key covers the files' names, sizes and times (or
    the generator), the tokenizer and every option. The folder appears under its final name when it is
    complete; of two processes that build the same one, the first to finish wins. With several ranks, rank 0
    builds while the others wait; then they call this too.

    Args:
        spec: `PATH[#ROWS][@WEIGHT]`.
        tokenizer_folder: holds `tokenizer.json`; for conversations also the chat template.
        data: column, policy for bad rows, held-out share, cache folder, threads.
        split: `train` or `valid`.
        seq_len: conversations longer than this many inputs are cut or left out and counted; long texts are
            stored in parts that are longer than it.
        learning: what is learned of a conversation, and what is done with one that is too long.
        level: take the rows of this level of difficulty alone.

    Raises:
        ConfigError: the spec cannot be read, or nothing is held out.
        DataError: the source, a row or the tokenizer cannot be used.
        Failure: the cache cannot be written.
    """
    job = _Job(spec, Path(tokenizer_folder), data, split, seq_len, learning, level)
    path = job.path
    if path.exists():
        try:
            shards = ShardSet.open(path)
        except DataError as error:
            log.warn(f"{error}; building it again")
            shutil.rmtree(path, ignore_errors=True)
        else:
            said.say(shards, cached=True)
            return shards
    with _publish(path) as folder:
        job.write(folder)
    shards = ShardSet.open(path)
    said.say(shards, cached=False)
    return shards


def key_path(
    spec: str,
    tokenizer_folder: Path,
    data: Data,
    split: Split,
    *,
    seq_len: int | None = None,
    learning: Learning = WHOLE,
) -> Path:
    """Return the folder that `build` uses for these arguments; other ranks open it after a barrier."""
    return _Job(spec, Path(tokenizer_folder), data, split, seq_len, learning, NO_LEVEL).path


class _Job:
    """One source to tokenise, under one set of options."""

    def __init__(
        self,
        spec: str,
        folder: Path,
        data: Data,
        split: Split,
        seq_len: int | None,
        learning: Learning,
        level: Level,
    ) -> None:
        self.level = level
        if split == "valid" and not data.valid and data.valid_fraction == 0.0:
            raise ConfigError(
                "data.valid is empty and data.valid_fraction is 0: nothing to validate on",
                "name held-out sources in data.valid, or hold out a share such as 0.02",
            )
        self.source: Source = sources.parse(spec)
        self.tokenizer = folder
        self.tokenizer_file = tokenizer.find(folder)
        self.data = data
        self.split: Split = split
        self.seq_len = seq_len
        self.learning = learning
        self.held_out = not data.valid and data.valid_fraction > 0.0
        self.rows: Literal["train", "test"] = "test" if split == "valid" and data.valid else "train"
        known = _BUILT_IN.get(sources.kind(self.source))
        self.is_chat = next(iter(self.read())).messages is not None if known is None else known == "chat"
        self.part_chars = max(PART_CHARS, 8 * (seq_len or 0))
        material = json.dumps(self._material(), sort_keys=True)
        self.key = hashlib.sha256(material.encode()).hexdigest()
        slug = re.sub(r"[^A-Za-z0-9.-]+", "_", self.source.path).strip("_.")[-40:] or "data"
        root = Path(data.cache).expanduser() if data.cache else cache_root()
        self.path = root / "shards" / f"{slug}-{split}-{self.key[:20]}"

    def read(self) -> Iterator[Document]:
        self.skips = Skips()  # of the last reading alone: the first rows may be read twice
        return sources.documents(self.source, self.data, split=self.rows, level_field=self.level[0], skips=self.skips)

    def _material(self) -> dict[str, Any]:
        chat = {"seq_len": self.seq_len, "learning": asdict(self.learning)}
        names = [self.tokenizer_file.name, *(_CHAT_FILES if self.is_chat else ())]
        return {
            "format": FORMAT,
            "path": self.source.path,
            "rows": [self.source.rows, self.rows],
            "content": _content(self.source),
            "tokenizer": [_digest(self.tokenizer_file.with_name(name)) for name in names],
            "level": list(self.level),
            "options": [self.data.text_column, self.data.columns, self.data.on_bad_row],
            "split": [self.split, self.data.valid_fraction] if self.held_out else "whole",
            "kind": chat if self.is_chat else {"part_chars": self.part_chars},
        }

    @affinity.everywhere()
    def write(self, folder: Path) -> None:
        """Tokenise into an empty folder, on all cores of the job: the other processes wait."""
        if self.data.workers:
            # Read once per process, when the tokenizer first runs in parallel.
            os.environ["RAYON_NUM_THREADS"] = str(self.data.workers)
        backend = tokenizer.encode_fast(self.tokenizer)
        counts = Counts()
        selected = select(self.read, self.data.valid_fraction, self.split, counts) if self.held_out else self.read()
        if self.level[0]:  # after the choice of what is held out, which must not depend on the level
            selected = (document for document in selected if document.level == self.level[1])
        told = said.Told()
        selected = told.listen(selected, counts, lambda: self.skips.count)
        dtype = "uint16" if max(backend.get_vocab().values()) < 2**16 else "uint32"
        writer = ShardWriter(folder, "chat" if self.is_chat else "text", dtype, end_of_text(backend, self.tokenizer))
        meta = {
            "key": self.key,
            "source": f"{self.source} ({self.level[1]})" if self.level[0] else str(self.source),
            "split": self.split,
            "seq_len": self.seq_len if self.is_chat else None,
            "part_chars": self.part_chars,
            "formats": told.formats,
        }
        if self.is_chat:
            write_shards(selected, _chars, self._chat_encoder(counts), writer, counts, meta)
        else:
            texts = parts(selected, counts, self.part_chars)
            write_shards(texts, lambda part: len(part.text), TextEncoder(backend), writer, counts, meta)

    def _chat_encoder(self, counts: Counts) -> ChatEncoder:
        kind = PairEncoder if self.learning.pairs else ChatEncoder
        return kind(
            tokenizer.load(self.tokenizer),
            counts,
            seq_len=self.seq_len,
            learning=self.learning,
            skip_bad=self.data.on_bad_row == "skip",
        )


def _chars(document: Document) -> int:
    return sum(len(message.get("content") or "") for message in document.messages or [])


def _content(source: Source) -> Any:
    """Return what identifies the documents: files by name, size and time, generators by their code."""
    listed = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in sources.files(source)]
    if sources.kind(source) in ("file", "folder", "glob"):
        return listed
    code = sorted(Path(__file__).parent.glob("*.py"))
    return [listed, [_digest(path) for path in code]]


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def end_of_text(backend: Any, folder: Path) -> int:
    """Return the id that separates documents: `<|endoftext|>`, or the end-of-text token that the folder
    names.

    Raises:
        DataError: there is no such token.
    """
    eot = backend.token_to_id(tokenizer.END_OF_TEXT)
    if eot is None:
        eot = tokenizer.load(folder).eos_token_id
    if eot is None:
        raise DataError(f"{folder}: no token that ends a text", 'set "eos_token" in tokenizer_config.json')
    return int(eot)


@contextmanager
def _publish(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that takes `path`'s place, unless another process was there first."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir(parents=True)
        _sweep(path)
        yield temporary
        for file in temporary.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        _rename_first(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error, "choose another folder with --data.cache DIR or ANABATIC_CACHE") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename_first(temporary: Path, path: Path) -> None:
    try:
        os.rename(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        log.debug(f"{path}: built by another process meanwhile")


def _sweep(path: Path) -> None:
    """Remove what builds of the same key left behind when they were killed more than a day ago."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
