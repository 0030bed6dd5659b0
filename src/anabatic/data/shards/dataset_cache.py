"""Tokenise a source once and cache it: the held-out split, the report of what was cut, and the cached `ShardSet`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anabatic.config.sections.common import Data
from anabatic.config.sections.train_jobs import PictureData
from anabatic.core import cpu_info, json_reader, log, plugins
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import format_count, format_size
from anabatic.core.paths import get_cache_root, write_atomic
from anabatic.data import builtin
from anabatic.data.chat.loss_mask import DEFAULT_LOSS_POLICY, LossPolicy, TruncationStrategy
from anabatic.data.readers import sources
from anabatic.data.readers.document import Document
from anabatic.data.readers.file_formats import get_plugin_extension
from anabatic.data.readers.holdout import Split, decide_split, select_split
from anabatic.data.readers.long_rows import LongRowCounter
from anabatic.data.readers.row_use import UnusedColumns
from anabatic.data.readers.source_parts import PartPlan, cut_source, read_part
from anabatic.data.readers.sources import DataSource, SkippedRows
from anabatic.data.shards.encoders import Encode, EncoderSettings, encode_here, load_text_tokenizer
from anabatic.data.shards.reader import SHARD_FORMAT_VERSION, ShardSet
from anabatic.data.shards.writer import (
    CHUNK_CHARS,
    DocumentCounts,
    EncodedEntry,
    ShardWriter,
    atomic_folder,
    chunk_documents,
    write_shards,
)
from anabatic.data.tokenizer import hf_folder

if TYPE_CHECKING:  # it imports torch
    from anabatic.data.shards.builder_team import BuilderTeam
    from anabatic.data.vision.model_pictures import ModelPictures

__all__ = ["ShardSet", "build_dataset", "build_datasets", "get_cache_path"]

_CHAT_FILES = ("tokenizer_config.json", "chat_template.jinja")
DifficultyLevel = tuple[str, str]
"""(column, name of the level)."""
NO_LEVEL: DifficultyLevel = ("", "")
_BUILT_IN_KINDS = {"stdlib": "text", "docs": "text", "task": "chat", "chat": "chat"}


def build_datasets(
    specs: list[str],
    tokenizer_folder: Path,
    data: Data,
    split: Split,
    *,
    seq_len: int | None = None,
    learning: LossPolicy = DEFAULT_LOSS_POLICY,
    encode: Encode = encode_here,
    team: BuilderTeam | None = None,
    pictures: ModelPictures | None = None,
) -> list[tuple[ShardSet, float | None]]:
    """Build every source and pair it with its weight, as `Loader` takes them.

    Raises:
        AnabaticError: as `build_dataset` and `sources.parse_sources`.
    """
    build = partial(build_dataset, seq_len=seq_len, learning=learning, encode=encode, team=team, pictures=pictures)
    weights = [source.weight for source in sources.parse_sources(specs)]
    return [(build(spec, tokenizer_folder, data, split), weight) for spec, weight in zip(specs, weights, strict=True)]


def build_dataset(
    spec: str,
    tokenizer_folder: Path,
    data: Data,
    split: Split,
    *,
    seq_len: int | None = None,
    learning: LossPolicy = DEFAULT_LOSS_POLICY,
    level: DifficultyLevel = NO_LEVEL,
    encode: Encode = encode_here,
    team: BuilderTeam | None = None,
    pictures: ModelPictures | None = None,
) -> ShardSet:
    """Return the tokenised source, from the cache or made now.

    When `data.valid` is empty, the `valid` split of a training source is its held-out share and `train` is
    the rest; otherwise a source is taken whole. The cache key covers the files' names, sizes and times (or
    the generator), the tokenizer and every option. The folder appears under its final name when it is
    complete; of two processes that build the same one, the first to finish wins. With several ranks, one of each
    machine builds (`builder_team`) while the others wait; then they call this too.

    Args:
        spec: `PATH[#ROWS][@WEIGHT]`.
        tokenizer_folder: holds `tokenizer.json`; for conversations also the chat template.
        data: column, policy for bad rows, held-out share, cache folder, threads.
        split: `train` or `valid`.
        seq_len: conversations longer than this many inputs are cut or left out and counted; long texts are
            stored in parts that are longer than it.
        learning: what is learned of a conversation, and what is done with one that is too long.
        level: take the rows of this level of difficulty alone.
        encode: tokenises batches: in this process, or on a cluster, with equal shards.
        team: the processes of other machines that build the same, with equal shards; None: this one builds alone.
        pictures: how the model wants its pictures; None: it sees none.

    Raises:
        ConfigError: the spec cannot be read, or nothing is held out.
        DataError: the source, a row or the tokenizer cannot be used.
        Failure: the cache cannot be written.
    """
    job = _TokenizationJob(spec, Path(tokenizer_folder), data, split, seq_len, learning, level, pictures)
    path = job.path
    if path.exists():
        try:
            shards = ShardSet.open(path)
        except DataError as error:
            log.warn(f"{error}; building it again")
            job.is_damaged = True
        else:
            log_dataset_summary(shards, cached=True)
            return shards
    if team is not None:
        team.build(job)
    else:
        if job.is_damaged:
            shutil.rmtree(path, ignore_errors=True)
        with atomic_folder(path) as folder:
            job.write_dataset(folder, encode)
    shards = ShardSet.open(path)
    log_dataset_summary(shards, cached=False)
    return shards


def get_cache_path(
    spec: str,
    tokenizer_folder: Path,
    data: Data,
    split: Split,
    *,
    seq_len: int | None = None,
    learning: LossPolicy = DEFAULT_LOSS_POLICY,
) -> Path:
    """Return the folder that `build_dataset` uses for these arguments; whether or not it is there."""
    return _TokenizationJob(spec, Path(tokenizer_folder), data, split, seq_len, learning, NO_LEVEL).path


class _TokenizationJob:
    """One source to tokenise, under one set of options."""

    def __init__(
        self,
        spec: str,
        folder: Path,
        data: Data,
        split: Split,
        seq_len: int | None,
        learning: LossPolicy,
        level: DifficultyLevel,
        pictures: ModelPictures | None = None,
    ) -> None:
        self.level = level
        self.pictures = pictures
        if split == "valid" and not data.valid and data.valid_fraction == 0.0:
            raise ConfigError(
                "data.valid is empty and data.valid_fraction is 0: nothing to validate on",
                "name held-out sources in data.valid, or hold out a share such as 0.02",
            )
        self.source: DataSource = sources.parse_source(spec)
        self.tokenizer_folder = folder
        self.tokenizer_file = hf_folder.find_tokenizer_file(folder)
        self.data = data
        if isinstance(data, PictureData):  # without a model that sees, rows with pictures are refused
            media = None if pictures is None else data.media or ""
            self.data = data if data.media == media else replace(data, media=media)
        self.split: Split = split
        self.seq_len = seq_len
        self.loss_policy = learning
        self.has_holdout = not data.valid and data.valid_fraction > 0.0
        self.task_split: Literal["train", "test"] = "test" if split == "valid" and data.valid else "train"
        known = _BUILT_IN_KINDS.get(sources.source_kind(self.source))
        self.is_chat = next(iter(self.read_documents())).messages is not None if known is None else known == "chat"
        self.part_chars = max(CHUNK_CHARS, 8 * (seq_len or 0))
        material = json.dumps(self._cache_key_material(), sort_keys=True)
        self.key = hashlib.sha256(material.encode()).hexdigest()
        self.label = f"{self.source} ({split})"
        slug = re.sub(r"[^A-Za-z0-9.-]+", "_", self.source.path).strip("_.")[-40:] or "data"
        root = Path(data.cache).expanduser() if data.cache else get_cache_root()
        self.path = root / "shards" / f"{slug}-{split}-{self.key[:20]}"
        self.is_damaged = False

    def read_documents(self) -> Iterator[Document]:
        self.skipped_rows = SkippedRows()  # of the last reading alone: the first rows may be read twice
        return sources.read_documents(
            self.source, self.data, split=self.task_split, level_field=self.level[0], skips=self.skipped_rows
        )

    def _cache_key_material(self) -> dict[str, Any]:
        chat = {"seq_len": self.seq_len, "learning": asdict(self.loss_policy)}
        names = [self.tokenizer_file.name, *(_CHAT_FILES if self.is_chat else ())]
        if self.is_chat and self.tokenizer_file.with_name(hf_folder.PROCESSOR_TEMPLATE_FILE).exists():
            names.append(hf_folder.PROCESSOR_TEMPLATE_FILE)
        return {
            "format": SHARD_FORMAT_VERSION,
            "path": _get_source_identity(self.source),
            "rows": [self.source.rows, self.task_split],
            "content": _source_fingerprint(self.source),
            **({"readers": readers} if (readers := _list_plugin_readers(self.source)) else {}),
            "tokenizer": [_hash_file(self.tokenizer_file.with_name(name)) for name in names],
            "level": list(self.level),
            "options": [self.data.text_column, self.data.columns, self.data.on_bad_row],
            **({} if self.pictures is None else {"pictures": self._describe_pictures(self.pictures)}),
            "split": [self.split, self.data.valid_fraction] if self.has_holdout else "whole",
            "kind": chat if self.is_chat else {"part_chars": self.part_chars},
        }

    def _describe_pictures(self, pictures: ModelPictures) -> list[Any]:
        from anabatic.data.vision.picture_rules import PictureRules

        rules = replace(pictures, cache=None) if isinstance(pictures, PictureRules) else pictures  # it decides nothing
        return [asdict(rules), getattr(self.data, "media", None)]

    def write_dataset(self, folder: Path, encode: Encode, add_chars: Callable[[int], None] | None = None) -> None:
        """Tokenise the whole source into an empty folder; arguments as of `write_shards`."""
        counts = DocumentCounts()
        selected = (
            select_split(self.read_documents, self.data.valid_fraction, self.split, counts)
            if self.has_holdout
            else self.read_documents()
        )
        self._write_documents(selected, self._make_writer(folder), counts, encode, add_chars)

    def plan_parts(self, readers: int, advance: Callable[[], None]) -> PartPlan:
        """Cut the source into parts that `readers` processes tokenise; a plan without parts: it is read as a whole."""
        parts = cut_source(self.source, readers, advance)
        if not parts or not self.has_holdout:
            return PartPlan(parts)
        skips = SkippedRows(quiet=True)
        rule, _ = decide_split(
            lambda: sources.read_documents(self.source, self.data, split=self.task_split, skips=skips),
            self.data.valid_fraction,
        )
        return PartPlan(parts, rule)

    def write_part(self, plan: PartPlan, number: int, folder: Path, add_chars: Callable[[int], None]) -> None:
        """Tokenise a part of the source into an empty folder; `add_chars` as of `write_shards`."""
        counts = DocumentCounts()
        self.skipped_rows = SkippedRows()
        found = 0

        def count_found() -> Iterator[Document]:
            nonlocal found
            for document in read_part(self.source, plan.parts[number], self.data, self.level[0], self.skipped_rows):
                found += 1
                yield document

        selected = count_found() if plan.rule is None else plan.rule.select(count_found(), self.split, counts)
        writer = self._make_writer(folder, shard_bytes=sys.maxsize, marks_starts=True)
        self._write_documents(selected, writer, counts, encode_here, add_chars)
        skipped = asdict(self.skipped_rows)
        write_atomic(folder / "rows.json", json.dumps({"found": found, "skipped": skipped}))

    def merge_parts(self, plan: PartPlan, parts: list[Path], folder: Path, advance: Callable[[], None]) -> None:
        """Write the shards that `write_dataset` writes from the folders of all parts; `advance` is called after each.

        Raises:
            OSError: a file of a part cannot be read.
            DataError: no part has a document.
        """
        counts, formats, skips, found = DocumentCounts(), FormatCounter(), SkippedRows(), 0
        writer = self._make_writer(folder)
        try:
            for part in parts:
                remedy = f"remove {part}: it is made again"
                meta = json_reader.read_own_object(part / "meta.json", remedy)
                rows = json_reader.read_own_object(part / "rows.json", remedy)
                try:
                    counts.add(meta["counts"])
                    formats.add(meta["formats"])
                    found += rows["found"]
                    skips.add(SkippedRows(**rows["skipped"]))
                    has_shard = bool(meta["shards"])
                except (KeyError, TypeError, AttributeError, ValueError) as error:
                    raise DataError(f"{part} is damaged: {error!r}", remedy) from error
                if has_shard:
                    writer.append_shard(part)
                advance()
            sources.report_skipped(self.source, found, skips, skips.count)
            writer.write_meta(self._describe(formats), counts)
        finally:
            writer.close()

    def _make_writer(self, folder: Path, **options: Any) -> ShardWriter:
        backend = load_text_tokenizer(self.key, str(self.tokenizer_folder))
        dtype = "uint16" if max(backend.get_vocab().values()) < 2**16 else "uint32"
        eot = get_eot_id(backend, self.tokenizer_folder)
        options["has_pictures"] = self.pictures is not None and self.is_chat
        return ShardWriter(folder, "chat" if self.is_chat else "text", dtype, eot, **options)

    def _describe(self, formats: FormatCounter) -> dict[str, Any]:
        return {
            "key": self.key,
            "source": f"{self.source} ({self.level[1]})" if self.level[0] else str(self.source),
            "split": self.split,
            "seq_len": self.seq_len if self.is_chat else None,
            "part_chars": self.part_chars,
            "formats": formats.format_counts,
        }

    @cpu_info.use_all_cores()
    def _write_documents(
        self,
        selected: Iterator[Document],
        writer: ShardWriter,
        counts: DocumentCounts,
        encode: Encode,
        add_chars: Callable[[int], None] | None,
    ) -> None:
        """Tokenise documents of the split, on all cores of the job: the other processes of the machine wait."""
        if self.data.workers:
            # Read once per process, when the tokenizer first runs in parallel.
            os.environ["RAYON_NUM_THREADS"] = str(self.data.workers)
        if self.level[0]:  # after the choice of what is held out, which must not depend on the level
            selected = (document for document in selected if document.level == self.level[1])
        format_counter = FormatCounter()
        selected = format_counter.count_documents(
            selected, counts, lambda: self.skipped_rows.count, self.loss_policy.pairs
        )
        settings = EncoderSettings(
            self.key,
            str(self.tokenizer_folder),
            self.is_chat,
            writer.dtype,
            self.seq_len,
            self.loss_policy,
            self.data.on_bad_row == "skip",
            self.pictures,
        )

        def encode_batches(batches: Iterable[list[Any]]) -> Iterator[Iterable[EncodedEntry]]:
            return encode(settings, batches, counts)

        meta = self._describe(format_counter)
        if self.is_chat:
            write_shards(selected, _count_chars, encode_batches, writer, counts, meta, add_chars)
        else:
            texts = chunk_documents(selected, counts, self.part_chars)
            write_shards(texts, lambda part: len(part.text), encode_batches, writer, counts, meta, add_chars)


def _count_chars(document: Document) -> int:
    return sum(len(message.get("content") or "") for message in document.messages or [])


def _get_source_identity(source: DataSource) -> str:
    """Return the path; of a data set of a hub without the revision, whose files the fingerprint names."""
    if sources.source_kind(source) != "hub":
        return source.path
    return str(sources.resolve_hub_source(source).name.pin(""))


def _source_fingerprint(source: DataSource) -> Any:
    """Return what identifies the documents: files by name, size and time (of a hub by checksum), generators by their
    code."""
    if sources.source_kind(source) == "hub":
        return [(file.path, file.size, file.checksum) for file in sources.resolve_hub_source(source).files]
    listed = [
        (str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sources.list_source_files(source)
    ]
    if sources.source_kind(source) in ("file", "folder", "glob"):
        return listed
    code = sorted(Path(builtin.__file__).parent.glob("*.py"))
    return [listed, [_hash_file(path) for path in code]]


def _list_plugin_readers(source: DataSource) -> list[str]:
    """Return the versions of the packages that read the files of a source, where they are not ours."""
    extensions = {get_plugin_extension(path) for path in sources.list_source_files(source)}
    return sorted(plugins.describe_plugin("anabatic.readers", extension) for extension in extensions if extension)


def _hash_file(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def get_eot_id(backend: Any, folder: Path) -> int:
    """Return the id that separates documents: `<|endoftext|>`, or the end-of-text token that the folder
    names.

    Raises:
        DataError: there is no such token.
    """
    eot = backend.token_to_id(hf_folder.END_OF_TEXT)
    if eot is None:
        eot = hf_folder.load_tokenizer(folder).eos_token_id
    if eot is None:
        raise DataError(f"{folder}: no token that ends a text", 'set "eos_token" in tokenizer_config.json')
    return int(eot)


class FormatCounter:
    """Counts the rows of each format while they are read.

    Attributes:
        format_counts: name of a format -> `rows` and the `columns` that some of them had.
    """

    def __init__(self) -> None:
        self.format_counts: dict[str, dict[str, Any]] = {}

    def count_documents(
        self, documents: Iterable[Document], counts: DocumentCounts, unread: Callable[[], int], learns_pairs: bool
    ) -> Iterator[Document]:
        """Yield `documents`; at the end `counts` receives the rows that were skipped while reading.

        Args:
            learns_pairs: both answers of a pair are learned from; else the worse one is not used.
        """
        for document in documents:
            name, columns, unused = document.row_format
            if document.rejected is not None and not learns_pairs:
                unused = (*unused, *(column for column in columns if column.startswith("rejected")))
            self._add_rows(name, 1, columns, dict.fromkeys(unused, 1))
            yield document
        counts.unread = unread()

    def add(self, counted: Mapping[str, Mapping[str, Any]]) -> None:
        """Add what another counter has found in the rows behind."""
        for name, found in counted.items():
            self._add_rows(name, found["rows"], found["columns"], found.get("unused", {}))

    def _add_rows(self, name: str, rows: int, columns: Iterable[str], unused: Mapping[str, int]) -> None:
        found = self.format_counts.get(name)
        if found is None:
            found = self.format_counts[name] = {"rows": 0, "columns": []}
        found["rows"] += rows
        found["columns"] += [column for column in columns if column not in found["columns"]]
        if unused:
            counted = found.setdefault("unused", {})
            for column, more in unused.items():
                counted[column] = counted.get(column, 0) + more


_DROP_REASONS = {
    "unread": "bad rows skipped",
    "empty": "empty documents skipped",
    "bad": "malformed conversations skipped",
    "truncated": "conversations too long and cut",
    "split": "conversations too long and split",
    "too_long": "conversations too long and left out",
    "unlearned": "conversations dropped, nothing to learn in what is left",
}


_DROP_ADVICE = {
    "unread": "data.on_bad_row: fail names the first of them",
    "bad": "data.on_bad_row: fail names the first of them",
    "truncated": "raise batch.seq_len to keep more, as far as the model has positions",
    "too_long": "raise batch.seq_len to keep more, as far as the model has positions",
}
_OTHERWISE: dict[TruncationStrategy, str] = {
    "delete": "cut them with --truncation-strategy right",
    "right": "nothing to learn is in what is kept of them: keep their ends with --truncation-strategy left",
    "left": "nothing to learn is in what is kept of them: keep their beginnings with --truncation-strategy right",
    "split": "nothing to learn is in their parts",
}
"""Other fixes for long conversations."""
_ADVICE_FRACTION = 0.05
"""Share of the rows whose loss is worth advice."""


def log_dataset_summary(shards: ShardSet, cached: bool) -> None:
    """Say in one line what a source holds, a warning where something was cut or left out."""
    kept = "conversations" if shards.is_chat else "documents"
    parts = [_describe_formats(shards.meta["formats"], kept)]
    if shards.is_chat:
        parts.append(f"{format_count(shards.num_tokens)} tokens, {format_size(shards.num_bytes)} of target text")
    else:
        parts.append(f"{format_count(shards.num_tokens)} tokens, {format_size(shards.num_bytes)} of text")
    if shards.meta["split"] == "train" and (held_out := shards.counts["held_out"]):
        parts.append(f"{held_out:,} held out")
    read = max(1, sum(shards.counts[name] for name in ("documents", "empty", "bad", "unread", "too_long")))
    lost = [f"{n:,} {words} ({n / read:.1%})" for name, words in _DROP_REASONS.items() if (n := shards.counts[name])]
    if longest := shards.counts.get("longest"):
        lost.append(f"the longest has {longest:,} tokens")
    much = [advice for name, advice in _DROP_ADVICE.items() if shards.counts[name] > _ADVICE_FRACTION * read]
    parts += lost + much[-1:]
    line = f"data {shards.name} ({shards.meta['split']}): {'; '.join(parts)}"
    if cached:
        line += " (from the cache)"
        if shards.has_pictures and shards.counts["bad"]:
            line += "; where pictures were fixed since, give --data.cache a new folder"
    (log.warn if lost else log.info)(line)
    if shards.meta["split"] == "train" or not shards.counts["held_out"]:  # what is held out of a source is like it
        _count_unused_columns(shards).warn(f"data {shards.name}")
    log.debug(f"{shards.name} lies in {shards.path}")


def require_few_too_long(
    sets: Iterable[ShardSet], seq_len: int, max_fraction: float, too_long: TruncationStrategy
) -> None:
    """Make sure that not too many conversations were left out because they are too long.

    Args:
        too_long: what was done with long ones; those that are cut before the assistant speaks are left out, too.

    Raises:
        DataError: of a source more than the share were, and more than one.
    """
    for shards in sets:
        read = sum(shards.counts[name] for name in ("documents", "empty", "bad", "unread", "too_long"))
        long = LongRowCounter(f"data {shards.name}", seq_len, max_fraction)
        long.count, long.longest_tokens = shards.counts["too_long"], shards.counts.get("longest", 0)
        if long.exceeds_limit(read):
            long.check_fraction(read, _OTHERWISE[too_long])


def _count_unused_columns(shards: ShardSet) -> UnusedColumns:
    unused = UnusedColumns()
    for found in shards.meta["formats"].values():
        for column, rows in found.get("unused", {}).items():
            unused.count_names([column], rows)
    return unused


def _describe_formats(formats: dict[str, dict[str, Any]], kept: str) -> str:
    """`1,200 rows as alpaca (instruction, input, output)`; of several formats each with its count."""
    descriptions = [
        f"{one['rows']:,} rows as {name} ({', '.join(one['columns'])})" if name else f"{one['rows']:,} {kept}"
        for name, one in sorted(formats.items(), key=lambda item: -item[1]["rows"])
    ]
    return " + ".join(descriptions) or f"0 {kept}"
