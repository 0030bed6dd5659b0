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

from anabatic.config.loading.command_table import command_name
from anabatic.config.sections.common import Data
from anabatic.config.sections.curriculum import Curriculum
from anabatic.config.sections.train_jobs import LoopJob
from anabatic.config.sections.tuner import Lora
from anabatic.core import log, relaunch
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.paths import RunFolder
from anabatic.data.batching import curriculum
from anabatic.data.batching.curriculum import DifficultyLevels
from anabatic.data.batching.loader import Loader, ValidationBatches, WeightedSources
from anabatic.data.batching.mixture import MixtureStage
from anabatic.data.chat.loss_mask import DEFAULT_LOSS_POLICY, LossPolicy
from anabatic.data.sequence.dataset import SequenceDataset
from anabatic.data.shards import dataset_cache, dataset_summary
from anabatic.data.shards.reader import ShardSet
from anabatic.data.shards.subset import ShardSubset
from anabatic.device.device import Device, should_compile
from anabatic.models.forward import ModelRoot
from anabatic.models.fused import installer
from anabatic.models.lora import adapter
from anabatic.models.lora.merging import WeightedAdapter, make_merged_record
from anabatic.models.model_init import count_parameters, flops_per_token
from anabatic.models.pretrained import save_model
from anabatic.models.quantized import iter_quantized_weights
from anabatic.monitor.usage_window import UsageWindow
from anabatic.parallel.process_groups import World, barrier
from anabatic.parallel.sharding import ShardingPlan, wrap_ddp
from anabatic.plan.depth_dial import DerivedSizes
from anabatic.recipes.training import sample_prompts
from anabatic.train import auto_sizing, micro_batch_probe, plan_inputs, run_folder
from anabatic.train.checkpoint.storage import CheckpointInfo
from anabatic.train.loop import fit
from anabatic.train.loop_state import BatchStream, LoopContext, TrainProgress
from anabatic.train.metrics.device_stats import watch_devices
from anabatic.train.metrics.recorder import MetricsRecorder
from anabatic.train.objectives import Objective, make_next_token_objective
from anabatic.train.optim.optimizer import HeadRates, Optimizer
from anabatic.train.row_log import open_row_log
from anabatic.train.sizing import StepSizes
from anabatic.train.step import TrainStep


@dataclass
class TrainingData:
    """Training sources with their weights, and the held-out sets; None when nothing is held out."""

    train: WeightedSources
    valid: list[ShardSet] | list[SequenceDataset] | None
    levels: DifficultyLevels | None = None

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
) -> TrainingData:
    """Tokenise the sources, or take them from the cache. Rank 0 builds, the others wait and open.

    Raises:
        ConfigError, DataError: a source, a row, or the tokenizer cannot be used.
    """
    if not world.is_main_process:
        barrier(world)
    options: dict[str, Any] = {"seq_len": seq_len, "learning": learning}
    levels = None
    if lessons is not None and lessons.use and lessons.by != "loss":  # that one needs the model: `tune`
        levels = _split_by_level(lessons, data, tokenizer_folder, options)
    if levels is None:
        train: WeightedSources = dataset_cache.build_datasets(data.train, tokenizer_folder, data, "train", **options)
    else:
        train = [(part, None) for part, _ in levels.leveled_sets]
    if learning.too_long == "delete":
        sets = [part for part, _ in train if isinstance(part, ShardSet)]
        dataset_summary.require_few_too_long(sets, seq_len, data.long_share, learning.too_long)
    valid = None
    if data.valid or data.valid_fraction > 0:
        held_out = data.valid or data.train
        valid = [part for part, _ in dataset_cache.build_datasets(held_out, tokenizer_folder, data, "valid", **options)]
    if world.is_main_process:
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
    return TrainingData(train, valid, levels)


def _split_by_level(
    lessons: Curriculum, data: Data, tokenizer_folder: Path, options: dict[str, Any]
) -> DifficultyLevels | None:
    """Part the sources by level; None when the rows have none."""
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
    """Make sure that rows can be told apart.

    Raises:
        ConfigError: a source is text, whose documents flow into one another.
    """
    text = [part.name for part in parts if not part.is_chat]
    if text:
        raise ConfigError(f"a curriculum by {by} needs conversations, {text[0]} is plain text", "leave it out")


@dataclass
class Trainer:
    """A model on its device with everything that training it needs; `train_and_save` trains it."""

    job: LoopJob
    folder: RunFolder
    device: Device
    world: World
    root: ModelRoot
    division: ShardingPlan
    tokenizer: Any
    corpus: TrainingData
    plan: DerivedSizes
    sizes: StepSizes
    resume_checkpoint: CheckpointInfo | None
    lora: Lora | None = None
    """Settings of the adapter that is trained; None: the model itself."""
    base_folder: Path | None = None
    """Model that the adapter is for."""
    merged_adapters: Sequence[WeightedAdapter] = ()
    """Adapters that became part of its weights."""
    curriculum: Curriculum | None = None
    is_chat: bool = False
    """The model answers in turns: samples are answers to a user."""
    objective: Objective | None = None
    """What is learned; None: next-token prediction."""
    rates: HeadRates = HeadRates()
    """Learning rates of a head of its own."""
    make_batches: Callable[[dict[str, Any], Callable[[], bool]], BatchStream] | None = None
    """Makes the batches, from where a checkpoint left them and what tells of a wish to stop; None: a `Loader`."""
    describe_batches: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """What a logged row says of such batches."""
    evaluate_heldout: Callable[[int, MetricsRecorder], dict[str, Any]] | None = None
    """Held-out metrics after a step, and once before the first; None: the held-out loss."""
    model_writer: Callable[[Path], None] | None = None
    """Writes a folder of the model as it is now, every rank calls it; None: a Hugging Face folder, or an adapter's."""

    @property
    def model(self) -> PreTrainedModel:
        """The model itself."""
        return self.root.model

    def train_and_save(self) -> int:
        """Train to the end and write the models; return the exit code.

        A run that SIGTERM or SIGUSR1 ended early has saved itself and returns `PREEMPTED`; Ctrl-C returns 130.

        Raises:
            Failure: memory ran out; with `auto_sizing`, `StartAgain`.
        """
        goal = self.objective or make_next_token_objective(
            self.root, self.device, self.world, self.job.batch.resolved_seq_len
        )
        sizes = None if self.make_batches else self.sizes
        with auto_sizing.handle_out_of_memory(self.job, self.device, self.world, goal.seq_len, sizes):
            return self._train_and_save(goal)

    def _train_and_save(self, goal: Objective) -> int:
        job = self.job
        if job.eval.patience and self.corpus.valid is None and self.evaluate_heldout is None:
            raise ConfigError(
                f"eval.patience is {job.eval.patience}, but nothing is held out", "name sources in data.valid"
            )
        self._samples = sample_prompts.encode_sample_prompts(
            job.eval.sample_prompts,
            self.tokenizer,
            self.corpus.train[0][0].eot if self.corpus.train else 0,
            job.batch.resolved_seq_len,
            self.is_chat,
        )
        self._compile_model()
        optimizer = Optimizer(
            self.model,
            job.optim,
            self.sizes.lr,
            self.sizes.matrix_lr,
            self.device,
            self.world,
            self.division.get_state_device(self.device),
            self.rates,
        )
        step = TrainStep(
            wrap_ddp(self.root, self.division, self.device, self.world),
            goal.loss_fn,
            optimizer,
            self.device,
            self.world,
            self.sizes.micro_batch_tokens,
            goal.pack_batch,
            goal.metric_sums,
            goal.metric_names,
            partial_params=self.root.partial_params,
        )
        self.model.train()
        self._probe_micro_batch(goal, step)
        tensors = functools.partial(run_folder.collect_tensors, self.model, optimizer, step)
        free = ("batch.micro_batch_tokens",) if auto_sizing.load_state(job, self.world) and job.batch.packing else ()
        run_folder.require_same_sizes(
            self.resume_checkpoint, self.sizes.resume_constraints(self.world.data_group), free
        )
        # Of dropout and of rounding: equal on every rank, or copies of weights would part. A checkpoint brings its own.
        torch.manual_seed(job.seed)
        before = adapter.get_initial_products(self.model)
        progress = run_folder.restore_checkpoint(self.resume_checkpoint, tensors(), self.device, self.world)
        adapter.restore_pissa_base(self.model, before)
        if self.resume_checkpoint is not None:
            saved = int(self.resume_checkpoint.host_state["sizes"]["batch.micro_batch_tokens"])
            auto_sizing.rescale_loader_position(
                progress, saved, self.sizes.micro_batch_tokens, self.world.data_group.size
            )
        optimizer.step_number = progress.step
        loader = self._open_batches(goal, step, progress.loader)
        with (
            loader,
            run_folder.open_metrics(
                job, self.folder, self.device, self.world, self.sizes.steps, self.resume_checkpoint
            ) as metrics,
            watch_devices(job.log, self.device, self.world) as watch,
            open_row_log(job.log, self.folder, self.world, progress.step) as rows,
        ):
            params, multiplying = count_parameters(self.model)
            metrics.log_event("model", params=params, multiplying=multiplying, plan=self.plan.values)
            done = fit(
                replace(self._make_loop_context(goal, step, loader, tensors, metrics, watch), row_log=rows), progress
            )
            if self.corpus.levels is not None and progress.loader:
                log.info(curriculum.describe_drawn_samples(progress.loader, self.corpus.levels))
            if done:
                run_folder.finish_run(
                    self.folder,
                    self.model,
                    self._save_model,
                    metrics,
                    {**self._build_summary(progress, params, metrics), **(watch.get_totals() if watch else {})},
                    self.device.torch_device,
                    self.world,
                )
        if done:
            return 0
        return 130 if step.stop_signal == signal.SIGINT else relaunch.EXIT_PREEMPTED

    def _probe_micro_batch(self, goal: Objective, step: TrainStep) -> None:
        """Settle the micro-batch by two steps, where the plan chose it and the run begins here."""
        state = auto_sizing.load_state(self.job, self.world)
        if state is None:
            return
        if self.resume_checkpoint is None:
            setup = plan_inputs.build_model_setup(self.job, self.model, self.device, self.world.data_group)
            loader = functools.partial(self._make_loader, goal, {})
            self.sizes = micro_batch_probe.choose_micro_batch(
                self.job, state, setup, self.sizes, step, loader, self.device, self.world
            )
            step.expected_tokens = float(self.sizes.micro_batch_tokens)
            self.plan.values["micro_batch_tokens"] = self.sizes.micro_batch_tokens
        auto_sizing.save_resolved_sizes(self.job, self.sizes, self.world)

    def _open_batches(self, goal: Objective, step: TrainStep, state: dict[str, Any]) -> BatchStream:
        if self.make_batches is not None:
            return self.make_batches(state, lambda: step.stop_signal > 0 and self.world.size == 1)
        return self._make_loader(goal, state, self.sizes.micro_batch_tokens)

    def _make_loader(self, goal: Objective, state: dict[str, Any], tokens: int) -> Loader:
        data = self.world.data_group
        return Loader(
            self.corpus.train,
            seq_len=goal.seq_len,
            lay=goal.collate,
            micro_batch_tokens=tokens,
            rank=data.rank,
            world_size=data.size,
            seed=self.job.seed,
            state=state or None,
            pin_memory=self.device.device_row.pin_memory,
            stages=self._plan_curriculum(),
            packing=self.job.batch.packing,
        )

    def _plan_curriculum(self) -> list[MixtureStage]:
        levels, lessons = self.corpus.levels, self.curriculum
        if levels is None or lessons is None:
            return []
        for line in curriculum.describe_curriculum(lessons, levels):
            log.info(line)
        per_step = self.sizes.micro_steps * self.world.data_group.size
        return curriculum.plan_stages(lessons, levels, self.sizes.steps * per_step, per_step)

    def _describe_data(self, state: dict[str, Any]) -> dict[str, Any]:
        """What a logged row says of the data: the share of padding, samples of each level so far, and the stage."""
        real, placed = state["tokens"]
        has_rows = any(part.is_chat for part, _ in self.corpus.train)  # text leaves no room
        padding = {"padding": 1.0 - real / placed} if has_rows else {}
        if self.corpus.levels is None:
            return padding
        return {
            **padding,
            "stage": state["stage"][0] + 1,
            "samples": curriculum.count_drawn_by_level(state, self.corpus.levels),
        }

    def _save_model(self, folder: Path) -> None:
        if self.model_writer is not None:
            self.model_writer(folder)
        elif self.lora is None:
            save_model(self.model, folder, self.tokenizer, self.world.is_main_process)
        else:
            assert self.base_folder is not None
            adapter.save_adapter(
                self.model,
                folder,
                self.tokenizer,
                self.lora,
                self.base_folder,
                self.world.is_main_process,
                make_merged_record(self.merged_adapters),
            )
        barrier(self.world)

    def _compile_model(self) -> None:
        compiled, why = should_compile(self.job.device, self.device.device_row, self.sizes.steps)
        if self.world.tensor_group.size > 1:
            compiled, why = False, "layers that add up among processes are not compiled"
        if not self.job.batch.packing:
            compiled, why = False, "padded batches have another shape each"
        if any(iter_quantized_weights(self.model)):
            compiled, why = False, "packed weights take turns in the same memory"
        log.info(f"torch.compile {'on' if compiled else 'off'} ({why})")
        if compiled:
            log.info(f"compiled {installer.compile_blocks(self.model)} modules at first use")

    def _make_loop_context(
        self,
        goal: Objective,
        step: TrainStep,
        loader: BatchStream,
        tensors: Callable[[], dict[str, Any]],
        metrics: MetricsRecorder,
        watch: UsageWindow | None,
    ) -> LoopContext:
        job = self.job
        self._valid = None
        if self.corpus.valid is not None:
            data = self.world.data_group
            self._valid = ValidationBatches(
                self.corpus.valid,
                micro_batch_tokens=self.sizes.micro_batch_tokens,
                max_tokens=job.eval.tokens,
                rank=data.rank,
                world_size=data.size,
                seq_len=goal.seq_len,
                lay=goal.collate,
            )
        self._metrics, self._objective = metrics, goal
        sizes, context = self.sizes, job.batch.resolved_seq_len / 2
        return LoopContext(
            folder=self.folder,
            metrics=metrics,
            device=self.device,
            world=self.world,
            train_step=step,
            batches=loader,
            total_steps=sizes.steps,
            micro_steps=sizes.micro_steps,
            schedule=job.schedule,
            save=job.save,
            optim=job.optim,
            eval=job.eval,
            log=job.log,
            peak_lr=sizes.lr,
            checkpoint_tensors=tensors,
            peak_matrix_lr=sizes.matrix_lr if job.optim.name == "muon" else None,
            describe_loader=self.describe_batches or self._describe_data,
            identity=run_folder.get_job_identity(job),
            sizes=sizes.resume_constraints(self.world.data_group),
            manifest_fields={"command": command_name(job), "strategy": self.division.strategy},
            evaluate_step=self._evaluate_and_sample,
            save_best_model=lambda: self._save_model(self.folder.best_model),
            flops_per_token=flops_per_token(self.model, context, goal.has_lm_head),
            peak_flops=run_folder.log_peak_flops(self.device),
            device_window=watch,
            should_eval_at_start=self.evaluate_heldout is not None,
        )

    def _evaluate_and_sample(self, step: int) -> dict[str, Any]:
        row = {} if self._valid is None else self._objective.validate(self._valid)
        if self.evaluate_heldout is not None:
            row = self.evaluate_heldout(step, self._metrics)
        together = self.division.is_sharded or self.world.tensor_group.size > 1
        if self._samples is not None and (self.world.data_group.rank == 0 or self.division.is_sharded):
            self._samples.log_samples(self.root, together, step, self._metrics)
        return row

    def _build_summary(self, progress: TrainProgress, params: int, metrics: MetricsRecorder) -> dict[str, Any]:
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
            "peak_memory_bytes": self.device.get_peak_memory(),
        }
