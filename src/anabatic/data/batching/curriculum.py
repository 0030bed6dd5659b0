"""Levels of difficulty: the sources split by level, and the stages as positions in the stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anabatic.config.sections.common import Data
from anabatic.config.sections.train_jobs import Curriculum
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean
from anabatic.data.batching.mixture import MixtureStage
from anabatic.data.readers import sources
from anabatic.data.shards.reader import ShardSet, ShardSubset


@dataclass(frozen=True)
class DifficultyLevels:
    """The training sets by level.

    Attributes:
        names: easiest first.
        leveled_sets: the parts of every source, and the number of each one's level.
    """

    names: list[str]
    leveled_sets: list[tuple[ShardSet | ShardSubset, int]]

    def count_samples(self, level: int) -> int:
        """Conversations of a level."""
        return sum(part.num_docs for part, own in self.leveled_sets if own == level)


def count_levels(specs: Sequence[str], data: Data, field: str) -> Counter[str]:
    """Count the rows of each level; rows without one under the empty name."""
    found: Counter[str] = Counter()
    for source in sources.parse_sources(list(specs)):
        found.update(document.level for document in sources.read_documents(source, data, level_field=field))
    return found


def check_levels(found: Counter[str], settings: Curriculum) -> bool:
    """Return whether the data has levels at all; a warning names what is missing.

    Raises:
        ConfigError: some rows lack a level, have one that no stage names, or a level has no row.
    """
    names = settings.level_names()
    if not any(found[name] for name in found if name):
        log.warn(
            f'curriculum is off: none of the {sum(found.values()):,} rows has the field "{settings.field}"'
            " (name the column in curriculum.field, or make levels with curriculum.by: length or loss)"
        )
        return False
    unknown = {name: rows for name, rows in found.items() if name not in names}
    if unknown:
        description = ", ".join(
            f'"{name}" ({rows:,})' if name else f"no level ({rows:,})" for name, rows in unknown.items()
        )
        guess = next((text for name in unknown if (text := did_you_mean(name, names))), "")
        raise ConfigError(
            f"rows of levels that no stage of the curriculum names: {description}.{guess}",
            f"levels are {', '.join(names)}: name these too in curriculum.stages (0 leaves them out), or fix the rows",
        )
    empty = [name for name in names if not found[name] and any(stage.mix.get(name) for stage in settings.stages)]
    if empty:
        raise ConfigError(
            f"no row has the level {', '.join(empty)}; there are {_format_level_counts(found)}",
            "give such rows, or take the level out of curriculum.stages",
        )
    return True


def _format_level_counts(found: Counter[str]) -> str:
    return ", ".join(f"{rows:,} {name}" for name, rows in found.most_common())


def split_by_length(parts: Sequence[ShardSet], names: Sequence[str]) -> DifficultyLevels:
    """Part every source by length into levels of equal size, shortest first."""
    lengths = [
        np.concatenate([part.read_entry_lengths(shard) for shard in range(len(part.meta["shards"]))]) for part in parts
    ]
    return split_by_value(parts, lengths, names)


def split_by_value(parts: Sequence[ShardSet], values: Sequence[np.ndarray], names: Sequence[str]) -> DifficultyLevels:
    """Part every source by a number of each of its entries into levels of equal size, smallest first."""
    order = np.sort(np.concatenate(values))
    borders = [order[len(order) * level // len(names)] for level in range(1, len(names))]
    sets: list[tuple[ShardSet | ShardSubset, int]] = []
    for part, own in zip(parts, values, strict=True):
        level = np.searchsorted(borders, own, side="right")
        for number in range(len(names)):
            chosen = np.flatnonzero(level == number)
            if len(chosen):
                sets.append((ShardSubset(part, chosen, names[number]), number))
    return DifficultyLevels(list(names), sets)


def plan_stages(
    settings: Curriculum, levels: DifficultyLevels, micro_batches: int, per_step: int
) -> list[MixtureStage]:
    """Return the stages with the share of every set; a level's share is divided among its sets by their size.

    Args:
        settings: stages by share of the training.
        levels: the sets.
        micro_batches: of all ranks in the whole training.
        per_step: micro-batches of an optimizer step: a stage begins with a step.
    """
    stages: list[MixtureStage] = []
    begin = 0.0
    for stage in settings.stages:
        weights = []
        for part, level in levels.leveled_sets:
            weight = stage.mix.get(levels.names[level], 0.0)
            weights.append(weight * part.num_docs / max(1, levels.count_samples(level)))
        total = sum(weights)
        first = round(begin * micro_batches / per_step) * per_step
        stages.append(MixtureStage(first, tuple(weight / total for weight in weights)))
        begin = stage.until
    return stages


def describe_curriculum(settings: Curriculum, levels: DifficultyLevels) -> list[str]:
    """Return what is printed before the training: every stage and how many samples every level has."""
    lines = [f"curriculum: {', '.join(f'{levels.count_samples(n):,} {name}' for n, name in enumerate(levels.names))}"]
    begin = 0.0
    for stage in settings.stages:
        mix = " + ".join(f"{stage.mix.get(name, 0.0):.0%} {name}" for name in levels.names)
        lines.append(f"  {begin:.0%}-{stage.until:.0%}: {mix}")
        begin = stage.until
    return lines


def describe_drawn_samples(state: dict[str, object], levels: DifficultyLevels) -> str:
    """Return what is said at the end: how many samples of each level were drawn, and how often its rows came round."""
    lines = []
    for number, (name, samples) in enumerate(count_drawn_by_level(state, levels).items()):
        rows = levels.count_samples(number)
        lines.append(f"{samples:,} {name}" + (f" ({samples / rows:.2f} times its {rows:,} rows)" if rows else ""))
    return f"curriculum: drawn {', '.join(lines)}"


def count_drawn_by_level(state: dict[str, object], levels: DifficultyLevels) -> dict[str, int]:
    """Samples drawn so far of every level, from a loader's state."""
    counts = dict.fromkeys(levels.names, 0)
    for samples, (_, level) in zip(state["samples"], levels.leveled_sets, strict=True):  # type: ignore[call-overload]
        counts[levels.names[level]] += samples
    return counts
