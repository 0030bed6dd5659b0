"""From segments to sequences of word ids, with their classes, numbers and weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.data import tokenizer as tokenizers
from anabatic.data import word_ids
from anabatic.data.batch import IGNORE
from anabatic.data.crop import Crop
from anabatic.data.sequences import Draw, Sequences
from anabatic.data.word_ids import WordIds
from anabatic.recipes.classify_data import Base
from anabatic.trajectory.features import GROUPS as FEATURE_GROUPS
from anabatic.trajectory.features import NAMES
from anabatic.trajectory.segment import Segment
from anabatic.trajectory.words import WordSpec, group, vocabulary

GROUPS = ("h3", "class", "motion", "other")
"""Of words that may be hidden, in the order of their shares."""


def tokenizer_of(base: Base, spec: WordSpec) -> tuple[Any, int]:
    """Return the tokenizer with every word of `spec` as one entry, and how many entries it had before."""
    if base.folder is None:
        made = word_ids.make(vocabulary(spec))
        return made, len(made)
    tokenizer = tokenizers.load(base.folder)
    before = len(tokenizer)
    new = word_ids.extended(tokenizer, vocabulary(spec))
    if new:
        log.info(f"{new:,} words are new to the tokenizer of {base.folder}: one id each")
    return tokenizer, before


def sequences(
    name: str,
    rows: Sequence[Segment],
    words: WordIds,
    seq_len: int,
    draw: Draw | None = None,
    features: Sequence[str] = (),
    weights: np.ndarray | None = None,
    crop: Crop | None = None,
) -> Sequences:
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
    words.report(name)
    labels = [IGNORE if row.label is None else row.label for row in rows]
    return Sequences(name, [one[:seq_len] for one in ids], labels, numbers(rows, features), 0, draw, weights, crop)


def feature_names(groups: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the numbers of these groups."""
    return tuple(name for name in NAMES if FEATURE_GROUPS[name] in groups)


def numbers(rows: Sequence[Segment], names: Sequence[str]) -> np.ndarray | None:
    """Return these numbers of each segment, fp32 `[n, F]`, nan: not known; None: no names.

    Raises:
        DataError: a number that is not made any more, or a row without numbers.
    """
    if not names:
        return None
    missing = [name for name in names if name not in NAMES]
    if missing:
        raise DataError(f"the model reads {missing[0]}, a number that is not made any more", "train it again")
    bare = next((row for row in rows if row.features is None), None)
    if bare is not None:
        raise DataError(
            f"{bare.name}: the row has no `features`, and {len(names)} of them are read",
            "write the rows with `anabatic classify words`, or give the AIS table itself",
        )
    columns = [NAMES.index(name) for name in names]
    found = np.asarray([row.features for row in rows], dtype=np.float32).reshape(len(rows), len(NAMES))[:, columns]
    return np.where(np.isfinite(found), found, np.float32(np.nan))


def vessel_weights(rows: Sequence[Segment], kind: str) -> np.ndarray | None:
    """Return how much each segment counts, 1 on average; None: all the same.

    Args:
        kind: sqrt: 1 / sqrt of the segments of its vessel; equal: 1 / them; none.
    """
    if kind == "none":
        return None
    count = Counter(row.vessel for row in rows)
    found = np.asarray([count[row.vessel] for row in rows], dtype=np.float64) ** (-0.5 if kind == "sqrt" else -1.0)
    weights: np.ndarray = found / found.mean()
    return weights


def groups_of(words: WordIds, spec: WordSpec) -> np.ndarray:
    """Return the group of every id, its place in `GROUPS`; -1 for what is never hidden."""
    found = np.full(max(words.known.values()) + 1, -1, dtype=np.int64)
    for word in vocabulary(spec):
        name = group(word, spec.classes)
        found[words.known[word]] = GROUPS.index(name) if name in GROUPS else -1
    return found


def crop_of(least: float, words: WordIds, spec: WordSpec, seed: int) -> Crop | None:
    """Return what chooses a run of points in every pass; None: segments are read whole.

    Raises:
        ConfigError: words whose points say nothing without those before them.
    """
    if least == 1.0:
        return None
    if spec.format == "compact":
        raise ConfigError(
            f"head.crop is {least:g}, and the positions of {spec.name} are told from the point before",
            "use words of the format motion, cell or char, or --head.crop 1",
        )
    starts = np.zeros(max(words.known.values()) + 1, dtype=bool)
    first = "DT_" if spec.format == "motion" else "YEAR_"
    starts[[place for word, place in words.known.items() if word.startswith(first)]] = True
    return Crop(starts, least, seed)
