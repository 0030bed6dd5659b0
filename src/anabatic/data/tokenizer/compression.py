"""Measure the compression of tokenizers: UTF-8 bytes per token on several kinds of text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from tokenizers import Tokenizer

from anabatic.config.sections.common import Data
from anabatic.config.tokenizer import TokenizerEvalJob
from anabatic.data.readers.sources import DataSource, parse_source, read_documents
from anabatic.data.tokenizer.bpe_training import get_document_text, split_into_chunks
from anabatic.data.tokenizer.hf_folder import load_fast_tokenizer

SAMPLE_TEXTS = ("english", "chinese", "code", "maths")
"""Built-in texts, `samples/KIND.txt`, written for this purpose."""

MAX_CHARS = 2_000_000
"""Characters read of each source of the user's."""

_CHUNK_CHARS = 100_000


@dataclass(frozen=True)
class CompressionMeasurement:
    """One tokenizer on one text.

    Attributes:
        bytes_per_token: UTF-8 bytes of the text per token; more is better for the same vocabulary.
        lossless: the tokens decode to the very same text.
    """

    text: str
    num_bytes: int
    num_tokens: int
    bytes_per_token: float
    lossless: bool


@dataclass(frozen=True)
class CompressionReport:
    """One tokenizer on all texts."""

    tokenizer: str
    vocab_size: int
    measurements: list[CompressionMeasurement]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def load_texts(data: Data) -> dict[str, list[str]]:
    """Return the built-in texts and the head of every source of `data`, in pieces, by name.

    Raises:
        DataError: a source cannot be read.
    """
    samples = resources.files("anabatic.data").joinpath("samples")
    found = {name: [samples.joinpath(f"{name}.txt").read_text(encoding="utf-8")] for name in SAMPLE_TEXTS}
    for spec in (*data.train, *data.valid):
        source = parse_source(spec)
        found[str(source)] = _read_source_head(source, data)
    return found


def _read_source_head(source: DataSource, data: Data) -> list[str]:
    pieces: list[str] = []
    left = MAX_CHARS
    for document in read_documents(source, data):
        text = get_document_text(document)[:left]
        pieces.extend(split_into_chunks(text, _CHUNK_CHARS))
        left -= len(text)
        if left <= 0:
            break
    return pieces


def measure_compression(tokenizer: Tokenizer, name: str, pieces: list[str]) -> CompressionMeasurement:
    """Encode the pieces of one text, without special tokens, and count."""
    encoded = tokenizer.encode_batch(pieces, add_special_tokens=False)
    tokens = sum(len(item.ids) for item in encoded)
    num_bytes = sum(len(piece.encode("utf-8")) for piece in pieces)
    decoded = tokenizer.decode_batch([item.ids for item in encoded], skip_special_tokens=False)
    return CompressionMeasurement(name, num_bytes, tokens, round(num_bytes / max(tokens, 1), 4), decoded == pieces)


def evaluate_tokenizers(job: TokenizerEvalJob) -> list[CompressionReport]:
    """Measure every tokenizer of the job on every text.

    Raises:
        DataError: a tokenizer or a source cannot be read.
    """
    loaded = [(path, load_fast_tokenizer(path)) for path in job.tokenizers]
    found = load_texts(job.data)
    return [
        CompressionReport(
            path, tokenizer.get_vocab_size(), [measure_compression(tokenizer, *item) for item in found.items()]
        )
        for path, tokenizer in loaded
    ]
