"""The part of a training recipe that does not depend on what is trained: resume, loop, evaluation, samples, final
model.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from anabatic.config.loading.command_package import find_command_name
from anabatic.config.loading.command_table import COMMANDS
from anabatic.config.sections.common import DerivedSizes
from anabatic.config.sections.train_jobs import LoopJob, is_auto
from anabatic.core import log, relaunch
from anabatic.core.errors import DataError
from anabatic.core.formatting import to_valid_utf8
from anabatic.data.tokenizer.hf_folder import encode_chat
from anabatic.models.forward import ModelRoot
from anabatic.models.lora import adapter
from anabatic.models.model_init import count_parameters, flops_per_token
from anabatic.parallel.sharding import reshard_weights
from anabatic.recipes.training.trained_model import TrainedModel
from anabatic.train import run_folder, sizing
from anabatic.train.auto import micro_batch_probe, out_of_memory
from anabatic.train.auto import state as auto_state
from anabatic.train.auto.state import AutoState
from anabatic.train.checkpoint.run_state import RunState, TrainProgress
from anabatic.train.context import BatchStream, LoopContext, TrainContext
from anabatic.train.loop import fit
from anabatic.train.metrics.device_stats import watch_devices
from anabatic.train.metrics.recorder import MetricsRecorder
from anabatic.train.objectives import Objective
from anabatic.train.row_log import RowLog
from anabatic.train.sizing import StepSizes
from anabatic.train.step import TrainStep

_MAX_ANSWER_TOKENS = 60
"""Tokens of an answer."""


@dataclass
class SamplePrompts:
    """Prompts, tokenised.

    Attributes:
        texts: as the user wrote them.
        prompts: their tokens.
        seq_len: tokens of prompt and answer at most.
        is_chat: the prompts are a user's turns; else beginnings of a text.
    """

    texts: list[str]
    prompts: list[list[int]]
    tokenizer: Any
    seq_len: int
    is_chat: bool

    def log_samples(self, root: ModelRoot, sharded: bool, step: int, metrics: MetricsRecorder) -> None:
        """Let the model answer each prompt, and record it; all ranks of a sharded one call this."""
        from anabatic.config.chat import Sampling
        from anabatic.infer.engine import Engine  # takes long to import, and few trainings show samples

        was_training = root.training
        root.eval()
        longest = max(map(len, self.prompts))
        engine = Engine(
            root.model,
            self.tokenizer,
            max_batch=len(self.prompts),
            max_len=min(self.seq_len, longest + _MAX_ANSWER_TOKENS + 4),
            root=root if sharded else None,
        )
        answers = engine.generate(self.prompts, Sampling(max_new_tokens=_MAX_ANSWER_TOKENS, seed=0))
        for text, answer in zip(self.texts, answers, strict=True):
            metrics.log_sample(step, text, answer.text, between="\n" if self.is_chat else "")
        reshard_weights(root)
        root.train(was_training)


def encode_sample_prompts(texts: list[str], tokenizer: Any, eot: int, seq_len: int, chat: bool) -> SamplePrompts | None:
    """Tokenise the prompts; before the training, because a wrong one must not end it. None: there are none.

    Args:
        eot: the token that begins a document.
        chat: put them through the tokenizer's chat template.

    Raises:
        DataError: a prompt is longer than a segment, or the template refuses it.
    """
    prompts = [_encode_prompt(to_valid_utf8(text), tokenizer, eot, chat) for text in texts]
    longest = max(map(len, prompts), default=0)
    if longest + 1 > seq_len:
        raise DataError(
            f"a prompt of eval.sample_prompts has {longest} tokens, batch.seq_len is {seq_len}", "use shorter prompts"
        )
    return SamplePrompts(texts, prompts, tokenizer, seq_len, chat) if prompts else None


def _encode_prompt(text: str, tokenizer: Any, eot: int, chat: bool) -> list[int]:
    if chat:
        return encode_chat(tokenizer, [{"role": "user", "content": text}])
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return [eot, *ids]


class BatchSource(Protocol):
    """Where micro-batches come from: rows that exist (`DatasetBatches`), or answers of the model itself (rollouts)."""

    @property
    def has_heldout(self) -> bool:
        """Whether anything is held out."""

    @property
    def eot_id(self) -> int:
        """The token that begins a document."""

    def describe_sources(self) -> dict[str, Any]:
        """Return the sources of training and held-out data, as fields of the event `data`."""

    def open_stream(
        self, objective: Objective, sizes: StepSizes, state: dict[str, Any], stopping: Callable[[], bool]
    ) -> BatchStream:
        """Return the micro-batches, from where a checkpoint's `state` left them; `stopping`: a signal has come."""

    def describe_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return what a logged row says about the data."""

    def make_evaluator(
        self, objective: Objective, sizes: StepSizes, metrics: MetricsRecorder
    ) -> Callable[[int], dict[str, Any]]:
        """Return what measures held-out data after a step; `{}`: there is nothing to measure."""

    def log_summary(self, state: dict[str, Any]) -> None:
        """Log at the end what was drawn."""


@dataclass(frozen=True)
class Trainer:
    """One training, put together: where it runs, the model, what it learns, its batches, its sizes.

    Attributes:
        generates: the batches are answers of the model: their size does not follow from tokens of rows, and held-out
            data are measured before the first step too.
    """

    context: TrainContext[LoopJob]
    model: TrainedModel
    objective: Objective
    batches: BatchSource
    plan: DerivedSizes
    sizes: StepSizes
    generates: bool = False

    def train_and_save(self) -> int:
        """Train to the end and write the models; return the exit code.

        A run that SIGTERM or SIGUSR1 ended early has saved itself and returns `EXIT_PREEMPTED`; Ctrl-C returns 130.

        Raises:
            Failure: memory ran out; with `--auto`, `RestartRequested`.
        """
        context = self.context
        sizes = None if self.generates else self.sizes
        try:
            return self._train_and_save()
        except out_of_memory.REFUSALS as error:
            least = self.objective.seq_len
            out_of_memory.raise_advice(error, context.job, context.device, context.world, least, sizes)
            raise

    def _train_and_save(self) -> int:
        context, model, found = self.context, self.model, self.context.resume_checkpoint
        job, device, world = context.job, context.device, context.world
        if job.eval.patience and not self.batches.has_heldout and world.rank == 0:
            log.warn(
                f"nothing of the data is held out: the training is not stopped early (eval.patience is"
                f" {job.eval.patience}), and its last model is the best one"
            )
        samples = encode_sample_prompts(
            job.eval.sample_prompts, model.tokenizer, self.batches.eot_id, context.seq_len, model.is_chat
        )
        compiled = model.compile(context, self.sizes.steps)
        step = model.make_step(context, self.objective, self.sizes)
        model.network.train()
        sizes = self._probe_micro_batch(step)
        tensors = functools.partial(run_folder.collect_tensors, model.network, step.optimizer, step)
        if found is not None and job.schedule.minutes is not None:
            sizes = replace(sizes, steps=int(found.state.sizes["schedule.max_steps"]))
        free = ("batch.micro_batch_tokens",) if is_auto(job) and job.batch.packing else ()
        run_folder.require_same_sizes(found, sizes.resume_constraints(world.data_group), free)
        # Of dropout and of rounding: equal on every rank, or copies of weights would part. A checkpoint brings its own.
        torch.manual_seed(job.seed)
        before = adapter.get_initial_products(model.network)
        progress = run_folder.restore_checkpoint(found, tensors(), device, world)
        adapter.restore_pissa_base(model.network, before)
        if found is not None:
            saved = int(found.state.sizes["batch.micro_batch_tokens"])
            auto_state.rescale_loader_position(progress, saved, sizes.micro_batch_tokens, world.data_group.size)
        step.optimizer.step_number = progress.step
        stream = self.batches.open_stream(
            self.objective, sizes, progress.loader, lambda: step.stop_signal > 0 and world.size == 1
        )
        with (
            stream,
            run_folder.open_metrics(job, context.folder, device, world, sizes.steps, found) as metrics,
            nullcontext() if device.type == "cpu" else watch_devices(job.log, device, world) as watch,
            closing(RowLog(context.folder, world, progress.step)) if job.log.rows else nullcontext() as rows,
        ):
            params, multiplying = count_parameters(model.network)
            metrics.log_event("model", params=params, multiplying=multiplying, plan=self.plan.values)
            metrics.log_event("data", **self.batches.describe_sources())
            loop = self._make_loop_context(sizes, step, stream, tensors, metrics, samples)
            loop = replace(loop, device_window=watch, row_log=rows, compiled_code=compiled)
            done = fit(loop, progress)
            self.batches.log_summary(progress.loader)
            if done:
                summary = self._build_summary(loop.sizes, progress, params)
                run_folder.finish_run(
                    context.folder,
                    model.network,
                    model.save,
                    metrics,
                    {**summary, **(watch.get_totals() if watch else {})},
                    device.torch_device,
                    world,
                )
        if done:
            return 0
        return 130 if step.stop_signal == signal.SIGINT else relaunch.EXIT_PREEMPTED

    def _probe_micro_batch(self, step: TrainStep) -> StepSizes:
        """Return the sizes; the micro-batch by two steps, where the plan chose it and the run begins here."""
        context, sizes = self.context, self.sizes
        if not is_auto(context.job):
            return sizes
        state = auto_state.load_state(context.job, context.world) or AutoState()
        if context.resume_checkpoint is None:
            setup = sizing.build_model_setup(context.job, self.model.network, context.device, context.world.data_group)

            def open_stream(tokens: int) -> BatchStream:
                tried = replace(sizes, micro_batch_tokens=tokens)
                return self.batches.open_stream(self.objective, tried, {}, lambda: False)

            sizes = micro_batch_probe.choose_micro_batch(
                context.job, state, setup, sizes, step, open_stream, context.device, context.world
            )
            step.expected_tokens = float(sizes.micro_batch_tokens)
            self.plan.values["micro_batch_tokens"] = sizes.micro_batch_tokens
        auto_state.save_resolved_sizes(context.job, sizes, context.world)
        return sizes

    def _make_loop_context(
        self,
        sizes: StepSizes,
        step: TrainStep,
        stream: BatchStream,
        tensors: Callable[[], dict[str, Any]],
        metrics: MetricsRecorder,
        samples: SamplePrompts | None,
    ) -> LoopContext:
        context, model = self.context, self.model
        evaluate = self.batches.make_evaluator(self.objective, sizes, metrics)
        has_experts = context.world.expert_group.size > 1  # which other ranks have: all generate together
        together = model.sharding.is_sharded or context.world.tensor_group.size > 1 or has_experts
        shows = context.world.gradient_group.rank == 0 or model.sharding.is_sharded or has_experts

        def evaluate_step(number: int) -> dict[str, Any]:
            row = evaluate(number)
            if samples is not None and shows:
                samples.log_samples(model.root, together, number, metrics)
            return row

        identity = run_folder.get_job_identity(context.job)
        about = {"command": find_command_name(context.job, COMMANDS.values()), "strategy": model.sharding.strategy}

        def describe_run(progress: TrainProgress, sizes: StepSizes) -> RunState:
            constraints = sizes.resume_constraints(context.world.data_group)
            return RunState(progress, identity, constraints, context.world.size, about)

        return LoopContext(
            context=context,
            sizes=sizes,
            train_step=step,
            batches=stream,
            metrics=metrics,
            run_state=describe_run,
            checkpoint_tensors=tensors,
            evaluate_step=evaluate_step,
            describe_loader=self.batches.describe_state,
            save_best_model=lambda: model.save(context.folder.best_model),
            flops_per_token=flops_per_token(model.network, context.seq_len / 2, self.objective.has_lm_head),
            peak_flops=run_folder.log_peak_flops(context.device),
            should_eval_at_start=self.generates and self.batches.has_heldout,
        )

    def _build_summary(self, sizes: StepSizes, progress: TrainProgress, params: int) -> dict[str, Any]:
        device = self.context.device
        return {
            "steps": progress.step,
            "tokens": progress.tokens,
            "seconds": round(progress.seconds, 2),
            "tokens_per_s": progress.tokens / max(progress.seconds, 1e-9),
            "train_loss": progress.last_loss,
            **{key: progress.best.get(key) for key in ("valid_loss", "valid_perplexity", "valid_accuracy")},
            **{key: value for key, value in progress.best.items() if key.startswith("valid_")},
            "best_step": progress.best.get("step"),
            "stopped_early": progress.step < sizes.steps,
            "params": params,
            "skipped": progress.skipped,
            "device": device.name,
            "dtype": str(device.dtype).removeprefix("torch."),
            "world_size": self.context.world.size,
            "peak_memory_bytes": device.get_peak_memory(),
        }
