"""How well tokenizers compress: UTF-8 bytes per token on several kinds of text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from tokenizers import Tokenizer

from anabatic.config.shared import Data
from anabatic.config.tokenizer import TokenizerEvalJob
from anabatic.data.sources import Source, documents, parse
from anabatic.data.tokenizer import encode_fast
from anabatic.data.tokenizer_train import cut, document_text

KINDS = ("english", "chinese", "code", "maths")
"""Built-in texts, `samples/KIND.txt`, written for this purpose."""

MAX_CHARS = 2_000_000
"""Characters read of each source of the user's."""

_PIECE = 100_000


@dataclass(frozen=True)
class Measurement:
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
class Report:
    """One tokenizer on all texts."""

    tokenizer: str
    vocab_size: int
    measurements: list[Measurement]

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def texts(data: Data) -> dict[str, list[str]]:
    """Return the built-in texts and the head of every source of `data`, in pieces, by name.

    Raises:
        DataError: a source cannot be read.
    """
    samples = resources.files("anabatic.data").joinpath("samples")
    found = {name: [samples.joinpath(f"{name}.txt").read_text(encoding="utf-8")] for name in KINDS}
    for spec in (*data.train, *data.valid):
        source = parse(spec)
        found[str(source)] = _head(source, data)
    return found


def _head(source: Source, data: Data) -> list[str]:
    pieces: list[str] = []
    left = MAX_CHARS
    for document in documents(source, data):
        text = document_text(document)[:left]
        pieces.extend(cut(text, _PIECE))
        left -= len(text)
        if left <= 0:
            break
    return pieces


def measure(tokenizer: Tokenizer, name: str, pieces: list[str]) -> Measurement:
    """Encode the pieces of one text, without special tokens, and count."""
    encoded = tokenizer.encode_batch(pieces, add_special_tokens=False)
    tokens = sum(len(item.ids) for item in encoded)
    num_bytes = sum(len(piece.encode("utf-8")) for piece in pieces)
    decoded = tokenizer.decode_batch([item.ids for item in encoded], skip_special_tokens=False)
    return Measurement(name, num_bytes, tokens, round(num_bytes / max(tokens, 1), 4), decoded == pieces)


def evaluate(job: TokenizerEvalJob) -> list[Report]:
    """Measure every tokenizer of the job on every text.

    Raises:
        DataError: a tokenizer or a source cannot be read.
    """
    loaded = [(path, encode_fast(path)) for path in job.tokenizers]
    found = texts(job.data)
    return [
        Report(path, tokenizer.get_vocab_size(), [measure(tokenizer, *item) for item in found.items()])
        for path, tokenizer in loaded
    ]
