"""Fingerprints of texts: a hash for equal ones, hashes of byte n-grams and a MinHash signature for similar ones.

n-grams are of UTF-8 bytes, not of words, so that Chinese and Japanese need no word segmentation: 16 bytes are about
three words of English or five Chinese characters.
"""

from __future__ import annotations

import hashlib
import unicodedata

import numpy as np

DUPLICATE_NGRAM_BYTES = 16
"""n-grams whose sets are compared for near duplicates."""
LEAK_NGRAM_BYTES = 32
"""n-grams that are looked for in training data: about six English words or ten Chinese characters."""
SIGNATURE_SIZE = 128
"""Bins of a signature. The standard deviation of the estimate is sqrt(J * (1 - J) / 128): 0.035 at J = 0.8."""

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it is invertible modulo 2**64
_BIN_BITS = np.uint64(57)  # 64 - log2(SIGNATURE_SIZE)
_BIN_STARTS = np.arange(SIGNATURE_SIZE, dtype=np.uint64) << _BIN_BITS


def normalize_text(text: str) -> str:
    """Return the text in Unicode's form NFC, with runs of white space as one blank and none around it."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def hash_text(*normalized: str) -> int:
    """Return 64 bits of the BLAKE2b hash of texts."""
    data = b"\0".join(text.encode("utf-8", "surrogatepass") for text in normalized)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def hash_ngrams(normalized: str, size: int) -> np.ndarray:
    """Return the hashes of all byte n-grams of the text in lower case: uint64 `[bytes - size + 1]`.

    A text shorter than `size` has none. A polynomial over the bytes by prefix doubling, then the finalizer of
    MurmurHash3 (https://github.com/aappleby/smhasher, `fmix64`), which makes all bits depend on all bytes.

    Args:
        normalized: as `normalize_text` returns it.
        size: bytes of an n-gram, a power of two.
    """
    hashes = np.frombuffer(normalized.casefold().encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.uint64)
    if len(hashes) < size:
        return hashes[:0]
    hashes += np.uint64(1)
    width, factor = 1, int(_BASE)
    while width < size:
        hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
        width, factor = 2 * width, factor * factor % 2**64
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        hashes ^= hashes >> np.uint64(33)
        hashes *= np.uint64(multiplier)
    return hashes ^ (hashes >> np.uint64(33))


def compute_signature(hashes: np.ndarray) -> np.ndarray:
    """Return the MinHash signature of a set of hashes: uint32 `[SIGNATURE_SIZE]`.

    One permutation hashing (Li, Owen and Zhang 2012, https://arxiv.org/abs/1208.1259): each bin of the hash's range has
    its smallest member. An empty bin takes the value of the next one that is not (Shrivastava and Li 2014,
    https://arxiv.org/abs/1406.4784).

    Raises:
        ValueError: there are no hashes.
    """
    if not len(hashes):
        raise ValueError("a signature needs at least one hash")
    ordered = np.sort(hashes)
    starts = np.searchsorted(ordered, _BIN_STARTS)
    filled = np.append(starts[1:], len(ordered)) > starts
    values = ordered[np.minimum(starts, len(ordered) - 1)]
    bins = np.flatnonzero(filled)
    donors = bins[np.searchsorted(bins, np.arange(SIGNATURE_SIZE)) % len(bins)]
    distance = (donors - np.arange(SIGNATURE_SIZE)) % SIGNATURE_SIZE
    # The distance keeps a copied value apart from the same value in its own bin.
    mixed = (values[donors] ^ (values[donors] >> np.uint64(25))) + distance.astype(np.uint64) * _BASE
    return (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32)
