"""From segments to sequences of word ids, with their classes, numbers and weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.batching.batch import IGNORE_INDEX
from anabatic.data.sequence import word_tokenizer
from anabatic.data.sequence.crop import RandomCrop
from anabatic.data.sequence.dataset import SequenceDataset, TargetSampler
from anabatic.data.sequence.word_tokenizer import WordEncoder
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.vessels.io.vessel_splits import BaseModelInfo
from anabatic.vessels.words.kinematic_features import FEATURE_GROUPS, FEATURE_NAMES
from anabatic.vessels.words.segments import Segment
from anabatic.vessels.words.vocabulary import WordSpec, build_vocabulary, get_word_group

MASK_GROUPS = ("h3", "class", "motion", "other")
"""Of words that may be hidden, in the order of their shares."""


def build_word_tokenizer(base: BaseModelInfo, spec: WordSpec) -> tuple[Any, int]:
    """Return the tokenizer with every word of `spec` as one entry, and how many entries it had before."""
    if base.folder is None:
        made = word_tokenizer.build_word_tokenizer(build_vocabulary(spec))
        return made, len(made)
    tokenizer = tokenizers.load_tokenizer(base.folder)
    before = len(tokenizer)
    new = word_tokenizer.add_missing_words(tokenizer, build_vocabulary(spec))
    if new:
        log.info(f"{new:,} words are new to the tokenizer of {base.folder}: one id each")
    return tokenizer, before


def encode_segments(
    name: str,
    rows: Sequence[Segment],
    words: WordEncoder,
    seq_len: int,
    draw: TargetSampler | None = None,
    features: Sequence[str] = (),
    weights: np.ndarray | None = None,
    crop: RandomCrop | None = None,
) -> SequenceDataset:
    """Turn segments into ids; what is longer than `seq_len` loses its end, with a warning.

    Args:
        features: names of the numbers of a segment that are taken.
    """
    ids = [words(row.text) for row in rows]
    cut = [(row, len(one)) for row, one in zip(rows, ids, strict=True) if len(one) > seq_len]
    if cut:
        points = sum(row.points * (length - seq_len) / length for row, length in cut) / len(cut)
        log.warn(
            f"{name}: {len(cut):,} of {len(ids):,} segments are cut to {seq_len} words and lose {points:.1f} points"
            f" each; the longest has {max(length for _, length in cut):,} words: raise batch.seq_len"
        )
    words.report_unknown_words(name)
    labels = [IGNORE_INDEX if row.label is None else row.label for row in rows]
    return SequenceDataset(
        name, [one[:seq_len] for one in ids], labels, select_features(rows, features), 0, draw, weights, crop
    )


def feature_names(groups: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the numbers of these groups."""
    return tuple(name for name in FEATURE_NAMES if FEATURE_GROUPS[name] in groups)


def select_features(rows: Sequence[Segment], names: Sequence[str]) -> np.ndarray | None:
    """Return these numbers of each segment, fp32 `[n, F]`, nan: not known; None: no names.

    Raises:
        DataError: a number that is not made any more, or a row without numbers.
    """
    if not names:
        return None
    missing = [name for name in names if name not in FEATURE_NAMES]
    if missing:
        raise DataError(f"the model reads {missing[0]}, a number that is not made any more", "train it again")
    bare = next((row for row in rows if row.features is None), None)
    if bare is not None:
        raise DataError(
            f"{bare.row_description}: the row has no `features`, and {len(names)} of them are read",
            "write the rows with `anabatic classify words`, or give the AIS table itself",
        )
    columns = [FEATURE_NAMES.index(name) for name in names]
    found = np.asarray([row.features for row in rows], dtype=np.float32).reshape(len(rows), len(FEATURE_NAMES))[
        :, columns
    ]
    return np.where(np.isfinite(found), found, np.float32(np.nan))


def compute_vessel_weights(rows: Sequence[Segment], kind: str) -> np.ndarray | None:
    """Return how much each segment counts, 1 on average; None: all count equally.

    Args:
        kind: sqrt: 1 / sqrt of the segments of its vessel; equal: 1 / them; none.
    """
    if kind == "none":
        return None
    count = Counter(row.vessel for row in rows)
    found = np.asarray([count[row.vessel] for row in rows], dtype=np.float64) ** (-0.5 if kind == "sqrt" else -1.0)
    weights: np.ndarray = found / found.mean()
    return weights


def mask_group_ids(words: WordEncoder, spec: WordSpec) -> np.ndarray:
    """Return the group of every id, its place in `MASK_GROUPS`; -1 for what is never hidden."""
    found = np.full(max(words.vocab.values()) + 1, -1, dtype=np.int64)
    for word in build_vocabulary(spec):
        name = get_word_group(word, spec.classes)
        found[words.vocab[word]] = MASK_GROUPS.index(name) if name in MASK_GROUPS else -1
    return found


def make_crop(least: float, words: WordEncoder, spec: WordSpec, seed: int) -> RandomCrop | None:
    """Return what chooses a run of points in every pass; None: segments are read whole.

    Raises:
        ConfigError: words whose points say nothing without those before them.
    """
    if least == 1.0:
        return None
    if spec.format == "compact":
        raise ConfigError(
            f"head.crop is {least:g}, and the positions of {spec.spec_name} are relative to the point before",
            "use words of the format motion, cell or char, or --head.crop 1",
        )
    starts = np.zeros(max(words.vocab.values()) + 1, dtype=bool)
    first = "DT_" if spec.format == "motion" else "YEAR_"
    starts[[place for word, place in words.vocab.items() if word.startswith(first)]] = True
    return RandomCrop(starts, least, seed)
