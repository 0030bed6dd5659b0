"""Train a byte-level BPE tokenizer from any number of documents."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from anabatic.config.sections.common import Data
from anabatic.config.tokenizer import TokenizerTrainJob
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import format_count, format_duration
from anabatic.core.progress import ProgressMeter
from anabatic.data.readers.document import Document
from anabatic.data.readers.holdout import select_split
from anabatic.data.readers.sources import DataSource, parse_sources, read_documents, source_kind
from anabatic.data.tokenizer import hf_folder as folder

SPLIT_PATTERN = "|".join(
    (
        r"'(?i:[sdmt]|ll|ve|re)",  # English contractions
        r"[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+",  # a word with the space or sign before it
        r"\p{N}",  # digits one at a time: arithmetic sees the places of a number
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",  # a run of signs with the line end after it
        r"\s*[\r\n]+",  # line ends with the blank before them
        r"\s+(?!\S)",  # blanks, but the last one, which belongs to the word
        r"\s+",
    )
)
"""Pattern that splits text into words before merging (Oniguruma syntax, as in the GPT-4 family of tokenizers)."""

MIN_VOCAB_SIZE = 280
"""Minimum that `TokenizerTrainJob` accepts."""

MAX_CHUNK_CHARS = 50_000
"""Longest piece of text handed to the trainer, in characters: memory stays bounded with long documents."""


@dataclass
class _TextTotals:
    documents: int = 0
    chars: int = 0
    cut_chars: int = 0


def train_tokenizer(job: TokenizerTrainJob) -> dict[str, Any]:
    """Train on `job.data.train` and write the folder `job.out`.

    Held-out documents are left out. Weights of sources play no part: every document counts once.

    Returns:
        `vocab_size`, `read_documents`, `chars`, `cut_chars` (beyond `max_doc_chars` or `max_chars`), `seconds` and
        `out`.

    Raises:
        DataError: a source cannot be read.
        ConfigError: the text does not support `job.vocab_size` entries.
        Failure: the folder cannot be written.
    """
    _refuse_overwrite(job)
    started, tally = time.monotonic(), _TextTotals()
    tokenizer = _build_bpe_tokenizer()
    with ProgressMeter("counting words") as meter:
        pieces = _iter_training_text(job, tally, meter)
        tokenizer.train_from_iterator(pieces, trainer=_build_bpe_trainer(job))
    _check_vocab_size(job, tokenizer.get_vocab_size(), tally)
    folder.save_tokenizer(_unmark_visible_tokens(tokenizer), Path(job.out))
    if tally.cut_chars:
        log.info(f"tokenizer: {format_count(tally.cut_chars)} characters were left out (max_doc_chars, max_chars)")
    seconds = time.monotonic() - started
    log.info(
        f"tokenizer: {tokenizer.get_vocab_size():,} entries from {format_count(tally.chars)} characters in "
        f"{tally.documents:,} documents, {format_duration(seconds)}; written to {job.out}"
    )
    return {
        "vocab_size": tokenizer.get_vocab_size(),
        "documents": tally.documents,
        "chars": tally.chars,
        "cut_chars": tally.cut_chars,
        "seconds": round(seconds, 3),
        "out": str(job.out),
    }


def _refuse_overwrite(job: TokenizerTrainJob) -> None:
    """Another tokenizer under a model, or in place of one that shards were made with, would spoil both silently."""
    out = Path(job.out).expanduser()
    existing = [name for name in ("tokenizer.json", "config.json", "adapter_config.json") if (out / name).exists()]
    if existing and not job.overwrite:
        raise ConfigError(
            f"{out} holds {' and '.join(existing)} already",
            "choose another --out, or replace the tokenizer with --overwrite",
        )


def _build_bpe_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _build_bpe_trainer(job: TokenizerTrainJob) -> Any:
    return trainers.BpeTrainer(
        vocab_size=job.vocab_size,
        min_frequency=job.min_frequency,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in folder.SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def _unmark_visible_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The trainer marks all its tokens as special; those that the assistant says are not."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] not in folder.VISIBLE_SPECIAL_TOKENS
    return Tokenizer.from_str(json.dumps(state))


def _check_vocab_size(job: TokenizerTrainJob, reached: int, tally: _TextTotals) -> None:
    if reached >= job.vocab_size:
        return
    ways = ["give more text"]
    if reached >= MIN_VOCAB_SIZE:
        ways.insert(0, f"use vocab_size {reached} or less")
    else:
        ways[0] = f"give more text: this is too little for the smallest tokenizer, of {MIN_VOCAB_SIZE} entries"
    if tally.cut_chars:
        ways.append(f"raise max_doc_chars ({format_count(tally.cut_chars)} characters were cut)")
    if job.min_frequency > 1:
        ways.append("lower min_frequency")
    raise ConfigError(
        f"vocab_size is {job.vocab_size:,}, but {format_count(tally.chars)} characters of text support {reached:,} "
        f"entries (pairs seen at least {job.min_frequency} times)",
        ", or ".join(ways),
    )


def _iter_training_text(job: TokenizerTrainJob, tally: _TextTotals, meter: ProgressMeter) -> Iterator[str]:
    """Yield the text to train on, in pieces, up to `max_chars` characters."""
    bounded = CjkPretokenizer()
    for source in parse_sources(job.data.train):
        limit = None if source_kind(source) == "file" and _is_text_file(source) else job.max_doc_chars
        for document in read_training_documents(source, job.data):
            text = get_document_text(document)
            left = None if job.max_chars is None else job.max_chars - tally.chars
            kept = text[: min((n for n in (limit, left) if n is not None), default=len(text))]
            tally.documents += 1
            tally.chars += len(kept)
            tally.cut_chars += len(text) - len(kept)
            meter.add_chars(len(kept))
            yield from map(bounded, split_into_chunks(kept, MAX_CHUNK_CHARS))
            if left is not None and len(kept) >= left:
                log.info(f"tokenizer: stopped reading at max_chars = {job.max_chars:,}")
                meter.start_phase("merging pairs")
                return
    meter.start_phase("merging pairs")


def _is_text_file(source: DataSource) -> bool:
    """A text file named by itself is all there is: the cap on long documents would throw most of it away."""
    return source.path.lower().endswith((".txt", ".md", ".py"))


def read_training_documents(source: DataSource, data: Data) -> Iterator[Document]:
    """Yield what pretraining on the same source would train on: all but the held-out share."""
    fraction = 0.0 if data.valid else data.valid_fraction
    if not fraction:
        return read_documents(source, data)
    return select_split(lambda: read_documents(source, data), fraction, "train")


def get_document_text(document: Document) -> str:
    """Return the text of a document; of a conversation, what its turns say."""
    if document.text is not None:
        return document.text
    return "\n".join(turn["content"] for turn in document.messages or [] if turn["content"])


def split_into_chunks(text: str, longest: int) -> Iterator[str]:
    """Cut text into pieces of at most `longest` characters, after a line end where there is one."""
    start = 0
    while len(text) - start > longest:
        line_end = text.rfind("\n", start, start + longest)
        end = line_end + 1 if line_end > start else start + longest
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


MAX_UNSPLIT_CHARS = 5_000_000
"""Characters of unspaced runs that are kept whole: less than 2 GB in the worst case."""

LONG_WORD_CHARS = 200
"""A run of letters or digits of this length counts as unspaced in any script."""

_CJK_RANGES = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f\u1780-\u17ff"  # Burmese, Khmer
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana, Chinese characters
    "\U00020000-\U0003ffff"
)
_CJK_PATTERN = re.compile(f"[{_CJK_RANGES}]")
_CJK_RUN_PATTERN = re.compile(rf"[{_CJK_RANGES}]{{3,}}|\w{{{LONG_WORD_CHARS},}}")


class CjkPretokenizer:
    """Pass text through whole until `whole_chars` of unspaced runs have been seen, then cut the runs into pairs.

    The cut is a line end, which the tokenizer's split keeps apart from letters on both sides.
    """

    def __init__(self, whole_chars: int = MAX_UNSPLIT_CHARS) -> None:
        self.chars_left = whole_chars

    def __call__(self, text: str) -> str:
        """Return the text to train on."""
        if max(map(len, text.split()), default=0) < LONG_WORD_CHARS and not _CJK_PATTERN.search(text):
            return text  # most text by far, and much cheaper to tell than to substitute
        return _CJK_RUN_PATTERN.sub(self._split_run, text)

    def _split_run(self, match: re.Match[str]) -> str:
        run = match[0]
        self.chars_left -= len(run)
        return run if self.chars_left >= 0 else "\n".join(run[start : start + 2] for start in range(0, len(run), 2))
