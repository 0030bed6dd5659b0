"""Small tokenised corpora and a tokenizer of single bytes, made in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from anabatic.data import tokenizer
from anabatic.data.shard_set import ShardSet
from anabatic.data.shard_write import Counts, Encoded, ShardWriter

EOT = 0


def byte_tokenizer(folder: Path) -> Path:
    """Write a tokenizer whose tokens are single bytes, with our special tokens and chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*tokenizer.SPECIAL, *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.add_special_tokens(list(tokenizer.SPECIAL))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer.save(made, folder)
    return folder


def text_set(folder: Path, documents: Iterable[Sequence[int]], **options: Any) -> ShardSet:
    """Write documents of token ids as a text shard set; `options` go to `ShardWriter`."""
    entries = (Encoded(list(ids), None, len(ids), True) for ids in documents)
    return write(folder, "text", entries, **options)


def chat_set(folder: Path, conversations: Iterable[tuple[Sequence[int], Sequence[int]]], **options: Any) -> ShardSet:
    """Write conversations, `(ids, mask)` each, as a shard set."""
    entries = (Encoded(list(ids), bytes(mask), sum(mask), True) for ids, mask in conversations)
    return write(folder, "chat", entries, **options)


def write(folder: Path, kind: str, entries: Iterable[Encoded], *, dtype: str = "uint16", **options: Any) -> ShardSet:
    """Write entries as they are."""
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, kind, dtype, EOT, **options)
    for entry in entries:
        writer.add(entry)
    meta: dict[str, Any] = {
        "key": folder.name,
        "source": folder.name,
        "split": "train",
        "seq_len": None,
        "part_chars": 2**15,
        "formats": {},
    }
    writer.finish(meta, Counts(documents=sum(shard.docs for shard in writer.shards)))
    return ShardSet.open(folder)
