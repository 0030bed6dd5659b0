"""The part of a training recipe that does not depend on what is trained: data, loop, held-out loss, samples."""

from __future__ import annotations

import functools
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from anabatic.config.commands import name_of
from anabatic.config.curriculum import Curriculum
from anabatic.config.shared import Data
from anabatic.config.train import LoopJob
from anabatic.config.tuner import Lora
from anabatic.core import child, log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.paths import RunFolder
from anabatic.data import curriculum, said, shards
from anabatic.data.curriculum import Levels
from anabatic.data.learn import WHOLE, Learning
from anabatic.data.loader import Loader, Sources, ValidPass
from anabatic.data.part import Part
from anabatic.data.sequences import Sequences
from anabatic.data.shard_set import ShardSet
from anabatic.data.stream import Stage
from anabatic.device.device import Device, use_compile
from anabatic.models import adapter, fuse
from anabatic.models.build import count_parameters, flops_per_token
from anabatic.models.forward import Root
from anabatic.models.hf import save_model
from anabatic.models.packed import weights
from anabatic.models.stack import Share, record
from anabatic.monitor.window import Window
from anabatic.parallel.shard import Division, replicate
from anabatic.parallel.world import World, barrier
from anabatic.plan.depth import Plan
from anabatic.recipes import samples
from anabatic.train import auto, paper, rehearsal, run
from anabatic.train.checkpoint import Found
from anabatic.train.goal import Goal, next_token
from anabatic.train.loop import fit
from anabatic.train.metrics import Metrics
from anabatic.train.optim import Optimizer, Rates
from anabatic.train.plan import Sizes
from anabatic.train.progress import Batches, Fit, Progress
from anabatic.train.rows import row_log
from anabatic.train.step import TrainStep
from anabatic.train.watch import watching


@dataclass
class Corpus:
    """Training sources with their weights, and the held-out sets; None when nothing is held out."""

    train: Sources
    valid: list[ShardSet] | list[Sequences] | None
    levels: Levels | None = None

    @property
    def tokenised(self) -> list[ShardSet | Part]:
        """The training sources that are text or conversations."""
        return [part for part, _ in self.train if not isinstance(part, Sequences)]


def corpus(
    data: Data,
    tokenizer_folder: Path,
    world: World,
    seq_len: int,
    learning: Learning = WHOLE,
    lessons: Curriculum | None = None,
) -> Corpus:
    """Tokenise the sources, or take them from the cache. Rank 0 builds, the others wait and open.

    Raises:
        ConfigError, DataError: a source, a row, or the tokenizer cannot be used.
    """
    if not world.first:
        barrier(world)
    options: dict[str, Any] = {"seq_len": seq_len, "learning": learning}
    levels = None
    if lessons is not None and lessons.use and lessons.by != "loss":  # that one needs the model: `tune`
        levels = _levels(lessons, data, tokenizer_folder, options)
    if levels is None:
        train: Sources = shards.build_all(data.train, tokenizer_folder, data, "train", **options)
    else:
        train = [(part, None) for part, _ in levels.sets]
    if learning.too_long == "delete":
        sets = [part for part, _ in train if isinstance(part, ShardSet)]
        said.require_share(sets, seq_len, data.long_share, learning.too_long)
    valid = None
    if data.valid or data.valid_fraction > 0:
        held_out = data.valid or data.train
        valid = [part for part, _ in shards.build_all(held_out, tokenizer_folder, data, "valid", **options)]
    if world.first:
        barrier(world)
    if valid is not None and not any(part.num_tokens for part in valid) and not data.valid:
        rows = sum(part.counts["unlearned"] + part.counts["too_long"] for part in valid)
        why = f"all {rows:,} rows held out are too long" if rows else "no row is held out"
        log.warn(f"{why} at data.valid_fraction {data.valid_fraction:g}: the training has no held-out loss")
        valid = None
    if valid is not None and not any(part.num_tokens for part in valid):
        raise DataError(
            f"0 tokens of held-out data in {', '.join(part.name for part in valid)}",
            "name sources in data.valid, raise data.valid_fraction, or train without by --data.valid-fraction 0",
        )
    return Corpus(train, valid, levels)


def _levels(lessons: Curriculum, data: Data, tokenizer_folder: Path, options: dict[str, Any]) -> Levels | None:
    """Part the sources by level; None when the rows have none."""
    names = lessons.levels()
    if lessons.by == "length":
        parts = [part for part, _ in shards.build_all(data.train, tokenizer_folder, data, "train", **options)]
        require_chats(parts, lessons.by)
        return curriculum.by_length(parts, names)
    by_source = [curriculum.found_levels([spec], data, lessons.field) for spec in data.train]
    if not curriculum.check_levels(sum(by_source, Counter()), lessons):
        return None
    sets = []
    for spec, found in zip(data.train, by_source, strict=True):
        for number, name in enumerate(names):
            if found[name]:
                level = (lessons.field, name)
                sets.append((shards.build(spec, tokenizer_folder, data, "train", level=level, **options), number))
    return Levels(names, [(part, number) for part, number in sets if part.num_docs])


def require_chats(parts: Sequence[ShardSet], by: str) -> None:
    """Make sure that rows can be told apart.

    Raises:
        ConfigError: a source is text, whose documents flow into one another.
    """
    text = [part.name for part in parts if not part.is_chat]
    if text:
        raise ConfigError(f"a curriculum by {by} needs conversations, {text[0]} is plain text", "leave it out")


@dataclass
class Training:
    """A model on its device with everything that training it needs; `go` trains it."""

    job: LoopJob
    folder: RunFolder
    device: Device
    world: World
    root: Root
    division: Division
    tokenizer: Any
    corpus: Corpus
    plan: Plan
    sizes: Sizes
    found: Found | None
    lora: Lora | None = None
    """Settings of the adapter that is trained; None: the model itself."""
    base: Path | None = None
    """Model that the adapter is for."""
    shares: Sequence[Share] = ()
    """Adapters that became part of its weights."""
    lessons: Curriculum | None = None
    chat: bool = False
    """The model answers in turns: samples are answers to a user."""
    goal: Goal | None = None
    """What is learned; None: next-token prediction."""
    rates: Rates = Rates()
    """Learning rates of a head of its own."""
    source: Callable[[dict[str, Any], Callable[[], bool]], Batches] | None = None
    """Makes the batches, from where a checkpoint left them and what tells of a wish to stop; None: a `Loader`."""
    describe: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """What a logged row says of such batches."""
    measure: Callable[[int, Metrics], dict[str, Any]] | None = None
    """Held-out metrics after a step, and once before the first; None: the held-out loss."""
    writes: Callable[[Path], None] | None = None
    """Writes a folder of the model as it is now, every rank calls it; None: a Hugging Face folder, or an adapter's."""

    @property
    def model(self) -> PreTrainedModel:
        """The model itself."""
        return self.root.model

    def go(self) -> int:
        """Train to the end and write the models; return the exit code.

        A run that SIGTERM or SIGUSR1 ended early has saved itself and returns `PREEMPTED`; Ctrl-C returns 130.

        Raises:
            Failure: memory ran out; with `auto`, `StartAgain`.
        """
        goal = self.goal or next_token(self.root, self.device, self.world, self.job.batch.length)
        sizes = None if self.source else self.sizes
        with auto.out_of_memory(self.job, self.device, self.world, goal.seq_len, sizes):
            return self._go(goal)

    def _go(self, goal: Goal) -> int:
        job = self.job
        if job.eval.patience and self.corpus.valid is None and self.measure is None:
            raise ConfigError(
                f"eval.patience is {job.eval.patience}, but nothing is held out", "name sources in data.valid"
            )
        self._samples = samples.prepare(
            job.eval.sample_prompts, self.tokenizer, self.corpus.train[0][0].eot if self.corpus.train else 0,
            job.batch.length, self.chat,
        )  # fmt: skip
        self._compile()
        optimizer = Optimizer(
            self.model, job.optim, self.sizes.lr, self.sizes.matrix_lr, self.device, self.world,
            self.division.home(self.device), self.rates,
        )  # fmt: skip
        step = TrainStep(
            replicate(self.root, self.division, self.device, self.world),
            goal.loss,
            optimizer,
            self.device,
            self.world,
            self.sizes.micro_batch_tokens,
            goal.pack,
            goal.sums,
            goal.names,
            partial=self.root.partial,
        )
        self.model.train()
        self._rehearse(goal, step)
        tensors = functools.partial(run.tensors_of, self.model, optimizer, step)
        free = ("batch.micro_batch_tokens",) if auto.state_of(job, self.world) and job.batch.packing else ()
        run.require_same_sizes(self.found, self.sizes.decisive(self.world.data), free)
        # Of dropout and of rounding: equal on every rank, or copies of weights would part. A checkpoint brings its own.
        torch.manual_seed(job.seed)
        before = adapter.starts(self.model)
        progress = run.restore(self.found, tensors(), self.device, self.world)
        adapter.begin_again(self.model, before)
        if self.found is not None:
            saved = int(self.found.host["sizes"]["batch.micro_batch_tokens"])
            auto.carried(progress, saved, self.sizes.micro_batch_tokens, self.world.data.size)
        optimizer.number = progress.step
        loader = self._batches(goal, step, progress.loader)
        with (
            loader,
            run.open_metrics(job, self.folder, self.device, self.world, self.sizes.steps, self.found) as metrics,
            watching(job.log, self.device, self.world) as watch,
            row_log(job.log, self.folder, self.world, progress.step) as rows,
        ):
            params, multiplying = count_parameters(self.model)
            metrics.event("model", params=params, multiplying=multiplying, plan=self.plan.values)
            done = fit(replace(self._fit(goal, step, loader, tensors, metrics, watch), rows=rows), progress)
            if self.corpus.levels is not None and progress.loader:
                log.info(curriculum.drawn(progress.loader, self.corpus.levels))
            if done:
                run.finish(
                    self.folder,
                    self.model,
                    self._write,
                    metrics,
                    {**self._summary(progress, params, metrics), **(watch.totals() if watch else {})},
                    self.device.torch,
                    self.world,
                )
        if done:
            return 0
        return 130 if step.stop_signal == signal.SIGINT else child.PREEMPTED

    def _rehearse(self, goal: Goal, step: TrainStep) -> None:
        """Settle the micro-batch by two steps, where the plan chose it and the run begins here."""
        state = auto.state_of(self.job, self.world)
        if state is None:
            return
        if self.found is None:
            setup = paper.of_model(self.job, self.model, self.device, self.world.data)
            loader = functools.partial(self._loader, goal, {})
            self.sizes = rehearsal.choose(
                self.job, state, setup, self.sizes, step, loader, self.device, self.world
            )  # fmt: skip
            step.nominal = float(self.sizes.micro_batch_tokens)
            self.plan.values["micro_batch_tokens"] = self.sizes.micro_batch_tokens
        auto.keep(self.job, self.sizes, self.world)

    def _batches(self, goal: Goal, step: TrainStep, state: dict[str, Any]) -> Batches:
        if self.source is not None:
            return self.source(state, lambda: step.stop_signal > 0 and self.world.size == 1)
        return self._loader(goal, state, self.sizes.micro_batch_tokens)

    def _loader(self, goal: Goal, state: dict[str, Any], tokens: int) -> Loader:
        data = self.world.data
        return Loader(
            self.corpus.train, seq_len=goal.seq_len, lay=goal.lay, micro_batch_tokens=tokens,
            rank=data.rank, world_size=data.size, seed=self.job.seed, state=state or None,
            pin_memory=self.device.row.pin_memory, stages=self._stages(), packing=self.job.batch.packing,
        )  # fmt: skip

    def _stages(self) -> list[Stage]:
        levels, lessons = self.corpus.levels, self.lessons
        if levels is None or lessons is None:
            return []
        for line in curriculum.lines(lessons, levels):
            log.info(line)
        per_step = self.sizes.micro_steps * self.world.data.size
        return curriculum.plan(lessons, levels, self.sizes.steps * per_step, per_step)

    def _of_data(self, state: dict[str, Any]) -> dict[str, Any]:
        """What a logged row says of the data: the share of padding, samples of each level so far, and the stage."""
        real, placed = state["tokens"]
        has_rows = any(part.is_chat for part, _ in self.corpus.train)  # text leaves no room
        padding = {"padding": 1.0 - real / placed} if has_rows else {}
        if self.corpus.levels is None:
            return padding
        return {**padding, "stage": state["stage"][0] + 1, "samples": curriculum.by_level(state, self.corpus.levels)}

    def _write(self, folder: Path) -> None:
        if self.writes is not None:
            self.writes(folder)
        elif self.lora is None:
            save_model(self.model, folder, self.tokenizer, self.world.first)
        else:
            assert self.base is not None
            adapter.save(
                self.model, folder, self.tokenizer, self.lora, self.base, self.world.first, record(self.shares)
            )
        barrier(self.world)

    def _compile(self) -> None:
        compiled, why = use_compile(self.job.device, self.device.row, self.sizes.steps)
        if self.world.tensor.size > 1:
            compiled, why = False, "layers that add up among processes are not compiled"
        if not self.job.batch.packing:
            compiled, why = False, "padded batches have another shape each"
        if any(weights(self.model)):
            compiled, why = False, "packed weights take turns in the same memory"
        log.info(f"torch.compile {'on' if compiled else 'off'} ({why})")
        if compiled:
            log.info(f"compiled {fuse.compile_blocks(self.model)} modules at first use")

    def _fit(
        self,
        goal: Goal,
        step: TrainStep,
        loader: Batches,
        tensors: Callable[[], dict[str, Any]],
        metrics: Metrics,
        watch: Window | None,
    ) -> Fit:
        job = self.job
        self._valid = None
        if self.corpus.valid is not None:
            data = self.world.data
            self._valid = ValidPass(
                self.corpus.valid, micro_batch_tokens=self.sizes.micro_batch_tokens, max_tokens=job.eval.tokens,
                rank=data.rank, world_size=data.size, seq_len=goal.seq_len, lay=goal.lay,
            )  # fmt: skip
        self._metrics, self._goal = metrics, goal
        sizes, context = self.sizes, job.batch.length / 2
        return Fit(
            folder=self.folder, metrics=metrics, device=self.device, world=self.world, step=step, batches=loader,
            total_steps=sizes.steps, micro_steps=sizes.micro_steps, schedule=job.schedule, save=job.save,
            optim=job.optim, eval=job.eval, log=job.log, peak_lr=sizes.lr, tensors=tensors,
            peak_matrix_lr=sizes.matrix_lr if job.optim.name == "muon" else None,
            describe=self.describe or self._of_data, identity=run.identity(job), sizes=sizes.decisive(self.world.data),
            about={"command": name_of(job), "strategy": self.division.strategy}, evaluate=self._evaluate,
            keep_best=lambda: self._write(self.folder.best_model),
            flops_per_token=flops_per_token(self.model, context, goal.logits), peak_flops=run.peak(self.device),
            watch=watch, begins=self.measure is not None,
        )  # fmt: skip

    def _evaluate(self, step: int) -> dict[str, Any]:
        row = {} if self._valid is None else self._goal.validate(self._valid)
        if self.measure is not None:
            row = self.measure(step, self._metrics)
        together = self.division.sharded or self.world.tensor.size > 1
        if self._samples is not None and (self.world.data.rank == 0 or self.division.sharded):
            self._samples.take(self.root, together, step, self._metrics)
        return row

    def _summary(self, progress: Progress, params: int, metrics: Metrics) -> dict[str, Any]:
        return {
            "steps": progress.step,
            "tokens": progress.tokens,
            "seconds": round(progress.seconds, 2),
            "tokens_per_s": progress.tokens / max(progress.seconds, 1e-9),
            "train_loss": progress.last_loss,
            **{key: progress.best.get(key) for key in ("valid_loss", "valid_perplexity", "valid_accuracy")},
            **{key: value for key, value in progress.best.items() if key.startswith("valid_")},
            "best_step": progress.best.get("step"),
            "stopped_early": progress.step < self.sizes.steps,
            "params": params,
            "skipped": progress.skipped,
            "device": self.device.name,
            "dtype": str(self.device.dtype).removeprefix("torch."),
            "world_size": self.world.size,
            "peak_memory_bytes": self.device.peak_memory(),
        }
