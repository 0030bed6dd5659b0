"""Small tokenised corpora and a tokenizer of single bytes, made in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from anabatic.data.shards.reader import ShardSet
from anabatic.data.shards.writer import DocumentCounts, EncodedEntry, ShardWriter
from anabatic.data.tokenizer import hf_folder

EOT_ID = 0


def write_byte_tokenizer(folder: Path) -> Path:
    """Write a tokenizer whose tokens are single bytes, with our special tokens and chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*hf_folder.SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(list(hf_folder.SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    hf_folder.save_tokenizer(tokenizer, folder)
    return folder


def write_text_shards(folder: Path, documents: Iterable[Sequence[int]], **options: Any) -> ShardSet:
    """Write documents of token ids as a text shard set; `options` go to `ShardWriter`."""
    entries = (EncodedEntry(list(ids), None, len(ids), True) for ids in documents)
    return write_shard_set(folder, "text", entries, **options)


def write_chat_shards(
    folder: Path, conversations: Iterable[tuple[Sequence[int], Sequence[int]]], **options: Any
) -> ShardSet:
    """Write conversations, `(ids, mask)` each, as a shard set."""
    entries = (EncodedEntry(list(ids), bytes(mask), sum(mask), True) for ids, mask in conversations)
    return write_shard_set(folder, "chat", entries, **options)


def write_shard_set(
    folder: Path, kind: str, entries: Iterable[EncodedEntry], *, dtype: str = "uint16", **options: Any
) -> ShardSet:
    """Write entries as they are."""
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, kind, dtype, EOT_ID, **options)
    for entry in entries:
        writer.append_entry(entry)
    meta: dict[str, Any] = {
        "key": folder.name,
        "source": folder.name,
        "split": "train",
        "seq_len": None,
        "part_chars": 2**15,
        "formats": {},
    }
    writer.write_meta(meta, DocumentCounts(documents=sum(shard.docs for shard in writer.shards)))
    return ShardSet.open(folder)
