"""Encode segments as sequences of word ids, with classes, features and weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.batching.packing import IGNORE_INDEX
from anabatic.data.sequence.dataset import RandomCrop, SequenceDataset, TargetSampler
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic_vessels.io.vessel_splits import BaseModelInfo
from anabatic_vessels.words import word_tokenizer
from anabatic_vessels.words.kinematic_features import FEATURE_GROUPS, FEATURE_NAMES
from anabatic_vessels.words.segments import Segment
from anabatic_vessels.words.vocabulary import WordSpec, build_vocabulary, get_word_group
from anabatic_vessels.words.word_tokenizer import WordEncoder

MASK_GROUPS = ("h3", "class", "motion", "other")
"""Groups of words that may be masked, in the order of their weights."""


def build_word_tokenizer(base: BaseModelInfo, spec: WordSpec) -> tuple[Any, int]:
    """Return the tokenizer with one entry per word of `spec`, and its number of entries before new words were added."""
    if base.folder is None:
        tokenizer = word_tokenizer.build_word_tokenizer(build_vocabulary(spec))
        return tokenizer, len(tokenizer)
    tokenizer = tokenizers.load_tokenizer(base.folder)
    num_before = len(tokenizer)
    num_new = word_tokenizer.add_missing_words(tokenizer, build_vocabulary(spec))
    if num_new:
        log.info(f"{num_new:,} words are new to the tokenizer of {base.folder}: one id each")
    return tokenizer, num_before


def encode_segments(
    name: str,
    rows: Sequence[Segment],
    encoder: WordEncoder,
    seq_len: int,
    sampler: TargetSampler | None = None,
    features: Sequence[str] = (),
    weights: np.ndarray | None = None,
    crop: RandomCrop | None = None,
) -> SequenceDataset:
    """Encode segments as ids; sequences longer than `seq_len` are truncated, with a warning.

    Args:
        features: names of the features to include.
    """
    ids = [encoder(row.text) for row in rows]
    truncated = [(row, len(sequence)) for row, sequence in zip(rows, ids, strict=True) if len(sequence) > seq_len]
    if truncated:
        points = sum(row.points * (length - seq_len) / length for row, length in truncated) / len(truncated)
        log.warn(
            f"{name}: {len(truncated):,} of {len(ids):,} segments are cut to {seq_len} words and lose"
            f" {points:.1f} points"
            f" each; the longest has {max(length for _, length in truncated):,} words: raise batch.seq_len"
        )
    encoder.report_unknown_words(name)
    labels = [IGNORE_INDEX if row.label is None else row.label for row in rows]
    return SequenceDataset(
        name,
        [sequence[:seq_len] for sequence in ids],
        labels,
        select_features(rows, features),
        0,
        sampler,
        weights,
        crop,
    )


def feature_names(groups: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the features of these groups."""
    return tuple(name for name in FEATURE_NAMES if FEATURE_GROUPS[name] in groups)


def select_features(rows: Sequence[Segment], names: Sequence[str]) -> np.ndarray | None:
    """Return the named features of each segment, fp32 `[n, F]`, nan: unknown; None: no names.

    Raises:
        DataError: a feature does not exist any more, or a row has no features.
    """
    if not names:
        return None
    missing = [name for name in names if name not in FEATURE_NAMES]
    if missing:
        raise DataError(f"the model reads {missing[0]}, a number that is not made any more", "train it again")
    incomplete = next((row for row in rows if row.features is None), None)
    if incomplete is not None:
        raise DataError(
            f"{incomplete.row_description}: the row has no `features`, and {len(names)} of them are read",
            "write the rows with `anabatic classify words`, or give the AIS table itself",
        )
    columns = [FEATURE_NAMES.index(name) for name in names]
    features = np.asarray([row.features for row in rows], dtype=np.float32).reshape(len(rows), len(FEATURE_NAMES))[
        :, columns
    ]
    return np.where(np.isfinite(features), features, np.float32(np.nan))


def compute_vessel_weights(rows: Sequence[Segment], kind: str) -> np.ndarray | None:
    """Return the weight of each segment, 1 on average; None: equal weights.

    Args:
        kind: sqrt: 1 / sqrt(number of segments of its vessel); equal: 1 / that number; none.
    """
    if kind == "none":
        return None
    counts = Counter(row.vessel for row in rows)
    raw_weights = np.asarray([counts[row.vessel] for row in rows], dtype=np.float64) ** (
        -0.5 if kind == "sqrt" else -1.0
    )
    weights: np.ndarray = raw_weights / raw_weights.mean()
    return weights


def mask_group_ids(encoder: WordEncoder, spec: WordSpec) -> np.ndarray:
    """Return the group of every id as an index of `MASK_GROUPS`; -1: never masked."""
    groups = np.full(max(encoder.vocab.values()) + 1, -1, dtype=np.int64)
    for word in build_vocabulary(spec):
        group = get_word_group(word, spec.classes)
        groups[encoder.vocab[word]] = MASK_GROUPS.index(group) if group in MASK_GROUPS else -1
    return groups


def make_crop(min_fraction: float, encoder: WordEncoder, spec: WordSpec, seed: int) -> RandomCrop | None:
    """Return the random crop of points per epoch; None: no cropping.

    Raises:
        ConfigError: the points of this format depend on those before them.
    """
    if min_fraction == 1.0:
        return None
    if spec.format == "compact":
        raise ConfigError(
            f"head.crop is {min_fraction:g}, and the positions of {spec.spec_name} are relative to the point before",
            "use words of the format motion, cell or char, or --head.crop 1",
        )
    is_start = np.zeros(max(encoder.vocab.values()) + 1, dtype=bool)
    prefix = "DT_" if spec.format == "motion" else "YEAR_"
    is_start[[token_id for word, token_id in encoder.vocab.items() if word.startswith(prefix)]] = True
    return RandomCrop(is_start, min_fraction, seed)
