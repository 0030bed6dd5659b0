"""Bits per byte on held-out text, beside what `gzip -9` needs for the same text."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from anabatic.data.batching.loader import list_source_kinds
from anabatic.data.batching.validation_batches import ValidationBatches
from anabatic.data.shards.reader import EntryLocation, ShardSet
from anabatic.device.device import Device
from anabatic.models.forward import ModelRoot
from anabatic.parallel.world import World
from anabatic.train.objectives import evaluate_loss

_GZIP_FORMAT = 31
"""zlib's `wbits` for a gzip header and the largest window (zlib manual, deflateInit2)."""


@dataclass(frozen=True)
class BitsPerByte:
    """Cost of the held-out text.

    The model reads every document alone, cut into segments, and pays for the end of each document as well. gzip reads
    all documents as one stream, in the order of the source, so it can look back across their borders, which favors it.

    Attributes:
        model_bits: bits per UTF-8 byte under the model.
        gzip9: the same for `gzip -9`, header and checksum included.
        loss: nats per target token.
        num_bytes: UTF-8 bytes of the text.
        num_tokens: target tokens.
        sources: source and kind of each text.
    """

    model_bits: float
    gzip9: float
    loss: float
    num_bytes: int
    num_tokens: int
    sources: list[dict[str, str]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the `measure_bits_per_byte` entry of eval.json."""
        return {
            "model": self.model_bits,
            "gzip9": self.gzip9,
            "loss": self.loss,
            "bytes": self.num_bytes,
            "tokens": self.num_tokens,
            "sources": self.sources,
            "note": "gzip -9 over the same documents as one stream; the model reads each document alone",
        }


def measure_bits_per_byte(
    model: PreTrainedModel, tokenizer: Any, batches: ValidationBatches, device: Device, world: World | None = None
) -> BitsPerByte:
    """Measure the loss over `batches` and compress the same text.

    Args:
        model: from `models.pretrained.load_model`.
        tokenizer: turns the stored tokens back into the text that gzip gets.
        batches: this process's share of one evaluation pass with `num_bytes` above 0.
        device: where the model is.
        world: processes that measure together, None: this one alone; only the first of them compresses, the others
            return 0 for gzip.
    """
    world = world or World()
    measured = evaluate_loss(ModelRoot(model), batches, device, world)
    return BitsPerByte(
        model_bits=float(measured["valid_bpb"]),
        gzip9=0.0 if world.rank else 8 * measure_gzip_size(batches, tokenizer) / batches.num_bytes,
        loss=float(measured["valid_loss"]),
        num_bytes=batches.num_bytes,
        num_tokens=int(measured["tokens"]),
        sources=list_source_kinds([shards for shards, _ in batches.entries]),
    )


def measure_gzip_size(batches: ValidationBatches, tokenizer: Any) -> int:
    """Return the bytes of the evaluated text as one `gzip -9` stream."""
    places: dict[int, int] = {}
    for shards, _ in batches.entries:
        places.setdefault(id(shards), len(places))
    stream = zlib.compressobj(9, zlib.DEFLATED, _GZIP_FORMAT)
    size = 0
    for shards, entry in sorted(batches.entries, key=lambda one: (places[id(one[0])], one[1])):
        size += len(stream.compress(decode_target_text(shards, entry, tokenizer).encode("utf-8")))
    return size + len(stream.flush())


def decode_target_text(shards: ShardSet, entry: EntryLocation, tokenizer: Any) -> str:
    """Return the text whose tokens are targets: a document, or what the assistant says in a conversation."""
    piece = shards.read_segment(entry, 0, entry.num_inputs)
    targets = piece.ids[1:]
    if piece.loss_mask is not None:
        targets = targets[piece.loss_mask[1:] != 0]
    ids = targets[targets != shards.eot].astype(np.int64).tolist()
    text: str = tokenizer.decode(
        ids, skip_special_tokens=piece.loss_mask is not None, clean_up_tokenization_spaces=False
    )
    return text
