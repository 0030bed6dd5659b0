"""The data of a training: tokenised sources, the held-out set, levels of a curriculum; and the batches made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabatic.config.sections.common import Data
from anabatic.config.sections.train_jobs import Curriculum, LoopJob
from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.batching import curriculum
from anabatic.data.batching.curriculum import DifficultyLevels
from anabatic.data.batching.loader import Loader, WeightedSources, list_source_kinds
from anabatic.data.batching.mixture import MixtureStage
from anabatic.data.batching.validation_batches import ValidationBatches
from anabatic.data.chat.loss_mask import DEFAULT_LOSS_POLICY, LossPolicy
from anabatic.data.sequence.dataset import SequenceDataset
from anabatic.data.shards import dataset_cache
from anabatic.data.shards.builder_team import join_builder_team
from anabatic.data.shards.reader import ShardSet, ShardSubset
from anabatic.parallel.world import World
from anabatic.train.context import TrainContext
from anabatic.train.metrics.recorder import MetricsRecorder
from anabatic.train.objectives import Objective
from anabatic.train.sizing import StepSizes

if TYPE_CHECKING:
    from anabatic.data.vision.model_pictures import ModelPictures


@dataclass(frozen=True)
class TrainingData:
    """Training sources with their weights, and the held-out sets; None when nothing is held out.

    Attributes:
        levels: the sources by difficulty, with the `curriculum` that draws from them; None: there is none.
        row_kind: what rows are that are no plain text: `conversations` or `pairs`.
        heldout_fraction: the share of the training sources that is held out; None: other sources are.
    """

    train: WeightedSources
    valid: list[ShardSet] | list[SequenceDataset] | None
    levels: DifficultyLevels | None = None
    curriculum: Curriculum | None = None
    row_kind: str = "conversations"
    heldout_fraction: float | None = None

    def describe_sources(self) -> dict[str, Any]:
        """Return the fields of the event `data`: the source and the kind of what is trained on and of what is held
        out."""
        fields: dict[str, Any] = {"train": list_source_kinds([part for part, _ in self.train], self.row_kind)}
        if self.valid is not None:
            fields["heldout"] = list_source_kinds(self.valid, self.row_kind)
            if self.heldout_fraction is not None:
                fields["heldout_fraction"] = self.heldout_fraction
        return fields

    @property
    def token_sets(self) -> list[ShardSet | ShardSubset]:
        """The training sources that are text or conversations."""
        return [part for part, _ in self.train if not isinstance(part, SequenceDataset)]


def build_training_data(
    data: Data,
    tokenizer_folder: Path,
    world: World,
    seq_len: int,
    learning: LossPolicy = DEFAULT_LOSS_POLICY,
    lessons: Curriculum | None = None,
    pictures: ModelPictures | None = None,
) -> TrainingData:
    """Tokenise the sources, or take them from the cache. One process of each machine builds, the others wait and open.

    Raises:
        ConfigError, DataError: a source, a row, or the tokenizer cannot be used.
        Failure: a machine that tokenises is lost.
    """
    levels = valid = None
    with nullcontext() if world.size == 1 else join_builder_team(world, data.cache) as team:
        options: dict[str, Any] = {"seq_len": seq_len, "learning": learning, "team": team, "pictures": pictures}
        if lessons is not None and lessons.use and lessons.by != "loss":  # that one needs the model: `tune`
            levels = _split_by_level(lessons, data, tokenizer_folder, options)
        if levels is None:
            train: WeightedSources = dataset_cache.build_datasets(
                data.train, tokenizer_folder, data, "train", **options
            )
        else:
            train = [(part, None) for part, _ in levels.leveled_sets]
        if learning.too_long == "delete":
            sets = [part for part, _ in train if isinstance(part, ShardSet)]
            dataset_cache.require_few_too_long(sets, seq_len, data.long_share, learning.too_long)
        if data.valid or data.valid_fraction > 0:
            held_out = dataset_cache.build_datasets(
                data.valid or data.train, tokenizer_folder, data, "valid", **options
            )
            valid = [part for part, _ in held_out]
    if valid is not None and not any(part.num_tokens for part in valid) and not data.valid:
        rows = sum(part.counts["unlearned"] + part.counts["too_long"] for part in valid)
        reason = f"all {rows:,} rows held out are too long" if rows else "no row is held out"
        log.warn(f"{reason} at data.valid_fraction {data.valid_fraction:g}: the training has no held-out loss")
        valid = None
    if valid is not None and not any(part.num_tokens for part in valid):
        raise DataError(
            f"0 tokens of held-out data in {', '.join(part.name for part in valid)}",
            "name sources in data.valid, raise data.valid_fraction, or train without by --data.valid-fraction 0",
        )
    return TrainingData(
        train,
        valid,
        levels,
        lessons,
        row_kind="pairs" if learning.pairs else "conversations",
        heldout_fraction=None if data.valid else data.valid_fraction,
    )


def _split_by_level(
    lessons: Curriculum, data: Data, tokenizer_folder: Path, options: dict[str, Any]
) -> DifficultyLevels | None:
    """Split the sources by level; None when the rows have none."""
    names = lessons.level_names()
    if lessons.by == "length":
        parts = [
            part for part, _ in dataset_cache.build_datasets(data.train, tokenizer_folder, data, "train", **options)
        ]
        require_conversations(parts, lessons.by)
        return curriculum.split_by_length(parts, names)
    by_source = [curriculum.count_levels([spec], data, lessons.field) for spec in data.train]
    if not curriculum.check_levels(sum(by_source, Counter()), lessons):
        return None
    sets = []
    for spec, found in zip(data.train, by_source, strict=True):
        for number, name in enumerate(names):
            if found[name]:
                level = (lessons.field, name)
                sets.append(
                    (dataset_cache.build_dataset(spec, tokenizer_folder, data, "train", level=level, **options), number)
                )
    return DifficultyLevels(names, [(part, number) for part, number in sets if part.num_docs])


def require_conversations(parts: Sequence[ShardSet], by: str) -> None:
    """Make sure that rows can be distinguished.

    Raises:
        ConfigError: a source is text, whose documents flow into one another.
    """
    text = [part.name for part in parts if not part.is_chat]
    if text:
        raise ConfigError(f"a curriculum by {by} needs conversations, {text[0]} is plain text", "leave it out")


@dataclass(frozen=True)
class DatasetBatches:
    """Batches of rows that exist before the training: the `BatchSource` of every objective but rollouts."""

    context: TrainContext[LoopJob]
    data: TrainingData

    @property
    def has_heldout(self) -> bool:
        """Whether anything is held out."""
        return self.data.valid is not None

    @property
    def eot_id(self) -> int:
        """The token that begins a document."""
        return self.data.train[0][0].eot

    def describe_sources(self) -> dict[str, Any]:
        """Return the fields of the event `data`."""
        return self.data.describe_sources()

    def open_stream(
        self, objective: Objective, sizes: StepSizes, state: dict[str, Any], stopping: Callable[[], bool]
    ) -> Loader:
        """Return the micro-batches from where `state` says; they are there at once, so nothing has to be stopped."""
        data = self.context.world.data_group
        return Loader(
            self.data.train,
            seq_len=objective.seq_len,
            lay=objective.collate,
            micro_batch_tokens=sizes.micro_batch_tokens,
            rank=data.rank,
            world_size=data.size,
            seed=self.context.job.seed,
            state=state or None,
            pin_memory=self.context.device.device_row.pin_memory,
            stages=self._plan_curriculum(sizes),
            packing=self.context.job.batch.packing,
        )

    def describe_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return what a logged row says about the data: share of padding, samples per level so far, stage."""
        real, placed = state["tokens"]
        has_rows = any(part.is_chat for part, _ in self.data.train)  # text leaves no room
        padding = {"padding": 1.0 - real / placed} if has_rows else {}
        if self.data.levels is None:
            return padding
        return {
            **padding,
            "stage": state["stage"][0] + 1,
            "samples": curriculum.count_drawn_by_level(state, self.data.levels),
        }

    def make_evaluator(
        self, objective: Objective, sizes: StepSizes, metrics: MetricsRecorder
    ) -> Callable[[int], dict[str, Any]]:
        """Return what measures the held-out rows after a step; `{}`: nothing is held out."""
        if self.data.valid is None:
            return lambda step: {}
        data = self.context.world.data_group
        batches = ValidationBatches(
            self.data.valid,
            micro_batch_tokens=sizes.micro_batch_tokens,
            max_tokens=self.context.job.eval.tokens,
            rank=data.rank,
            world_size=data.size,
            seq_len=objective.seq_len,
            lay=objective.collate,
        )
        return lambda step: objective.validate(batches)

    def log_summary(self, state: dict[str, Any]) -> None:
        """Log what was drawn of each level."""
        if self.data.levels is not None and state:
            log.info(curriculum.describe_drawn_samples(state, self.data.levels))

    def _plan_curriculum(self, sizes: StepSizes) -> list[MixtureStage]:
        levels, lessons = self.data.levels, self.data.curriculum
        if levels is None or lessons is None:
            return []
        for line in curriculum.describe_curriculum(lessons, levels):
            log.info(line)
        per_step = sizes.micro_steps * self.context.world.data_group.size
        return curriculum.plan_stages(lessons, levels, sizes.steps * per_step, per_step)
