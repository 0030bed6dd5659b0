"""`--auto`: the plan's proposal, a probe of the micro-batch in two refused steps, and what is done when memory runs
out.

What was settled lies in `auto.json` of the run folder. A rank that runs out of memory writes there what the next
start will do, and ends with the exit code that asks for one: nobody waits for a collective that it will not join. Every
rank reads the file at the start, and all take what has been lowered most often, so they agree also where each machine
has its own folder.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import torch

from anabatic.config.rl import RlJob
from anabatic.config.sections.common import BatchSettings, Recompute
from anabatic.config.sections.train_jobs import LoopJob, WithAuto, is_auto
from anabatic.core import json_reader, log, relaunch
from anabatic.core.errors import CheckpointError, Failure, RestartRequested
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.device.device import Device
from anabatic.device.table import Chip, DeviceRow
from anabatic.parallel.process_groups import World, all_gather_text, barrier, broadcast_text, count_machine_ranks
from anabatic.plan import output, strategy_search
from anabatic.plan.memory_estimate import estimate_peak_memory
from anabatic.plan.model_facts import ModelFacts, with_model
from anabatic.plan.strategy_search import StrategyEstimate
from anabatic.plan.training_setup import StrategyName, TrainingSetup
from anabatic.train import sizing
from anabatic.train.checkpoint.run_state import TrainProgress
from anabatic.train.checkpoint.storage import CheckpointInfo
from anabatic.train.sizing import StepSizes, find_divisor
from anabatic.train.step import TrainStep

AUTO_FILE = "auto.json"
_DEFAULT_SEGMENTS_PER_RANK = 8
"""Of each rank in a step, where the global batch is left open, as `anabatic plan` takes it."""
_OUT_OF_MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "Cannot allocate memory")
"""What torch says where its allocator for the processor gets nothing (c10/core/impl/alloc_cpu.cpp)."""
_LAYOUT_DIMENSIONS = ("pipeline", "replicate", "context", "expert", "tensor", "pipeline_chunks")
"""Settings of `parallel` that follow strategy, offload and recomputation in a `Strategy`."""
_MIN_LAYOUT_GAIN = 1.2
"""The dimensions that a job has are left where its estimate with others is not so many times as fast: the estimates of
strategies on one mesh were compared with each other more closely than those of different meshes."""
Strategy = tuple[str | bool | int, ...]
"""Strategy, offload, recomputation; the dimensions of the mesh and the chunks of a pipeline."""
SetupLister = Callable[[Any, ModelFacts, TrainingSetup, DeviceRow, int, int], Iterable[list[TrainingSetup]]]
"""`recipes.layout_search.iter_layout_setups`."""


@dataclass(frozen=True)
class AutoState:
    """What starts so far have come to.

    Attributes:
        lowered: times that memory ran out.
        place: devices and the job's own mesh that it was settled for.
        way: strategy, offload, recomputation, dimensions of the mesh; None: not settled yet.
        micro, batch: tokens of a micro-batch and of a step; None: not settled yet.
        most: tokens of a micro-batch that are known to fit; larger ones are not tried.
        refused: ways that did not fit with the smallest micro-batch.
    """

    lowered: int = 0
    place: str = ""
    way: Strategy | None = None
    micro: int | None = None
    batch: int | None = None
    most: int | None = None
    refused: tuple[Strategy, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> AutoState:
        """Return what `text` says; nothing of a file that is empty.

        Raises:
            CheckpointError: it is something else.
        """
        if not text:
            return cls()
        try:
            found = json_reader.loads(text)
            found["way"] = None if found["way"] is None else _read_strategy(found["way"])
            found["refused"] = tuple(map(_read_strategy, found["refused"]))
            numbers = (
                found["lowered"],
                *(found[name] for name in ("micro", "batch", "most") if found[name] is not None),
            )
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError(f"{numbers} are not all whole numbers")
            return cls(**found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{AUTO_FILE} cannot be read: {error}", f"remove {AUTO_FILE} from the run folder"
            ) from None


def _read_strategy(values: Any) -> Strategy:
    """Return what a file says of a way.

    Raises:
        TypeError, ValueError: it is something else.
    """
    strategy, offload, recompute, *sizes = values
    if (
        strategy not in get_args(StrategyName)
        or not isinstance(offload, bool)
        or recompute not in get_args(Recompute)
        or len(sizes) not in (0, len(_LAYOUT_DIMENSIONS))
        or not all(type(size) is int and size > 0 for size in sizes)
    ):
        raise ValueError(f"{values} is no strategy with offload, recomputation and the mesh")
    return tuple(values)


def load_state(job: LoopJob, world: World) -> AutoState | None:
    """Return what was settled, the same on every rank, which all call it; None without `auto`."""
    if not is_auto(job):
        return None
    path = RunFolder(job.out).root / AUTO_FILE
    texts = all_gather_text(path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "", world)
    return select_latest_state(texts)


def select_latest_state(texts: Iterable[str]) -> AutoState:
    """Return what the ranks' files say together: that of the start that was lowered most, and got furthest."""
    return max(
        map(AutoState.from_json, texts), key=lambda state: (state.lowered, state.way is not None, state.micro or 0)
    )


def _save_state(job: LoopJob, state: AutoState) -> None:
    root = RunFolder(job.out).root
    root.mkdir(parents=True, exist_ok=True)
    write_atomic(root / AUTO_FILE, json.dumps(asdict(state)))


def apply_auto_strategy(job: Any, model: ModelFacts, device: Device, world: World, list_setups: SetupLister) -> Any:
    """Return the job with the strategy, recomputation, offload and mesh that are proposed for these devices.

    Args:
        world: of the mesh that the job has.

    Raises:
        Failure: every way has been tried.
    """
    if not is_auto(job):
        return job
    if job.save.resume == "never" and relaunch.RETRY_VARIABLE not in os.environ:
        (RunFolder(job.out).root / AUTO_FILE).unlink(missing_ok=True)
        barrier(world)
    state = load_state(job, world) or AutoState()
    given = [f"{name} {size}" for name in _LAYOUT_DIMENSIONS if (size := getattr(job.parallel, name)) > 1]
    place = ", ".join([f"{world.size} x {device.name}", *given])
    if state.place != place:
        state = AutoState(lowered=state.lowered, place=place, batch=state.batch)
    if state.way is None:
        state = replace(state, way=_propose_strategy(job, model, state, device, world, list_setups))
        if world.is_main_process:
            _save_state(job, state)
        barrier(world)
    return _apply_strategy(job, state.way)


def _propose_strategy(
    job: Any, model: ModelFacts, state: AutoState, device: Device, world: World, list_setups: SetupLister
) -> Strategy:
    """Return what rank 0 proposes: processors of several machines may differ, and so may their estimates."""
    here = job if model.folder is None else with_model(job, str(model.folder))  # of a run or on a hub
    setup = sizing.build_job_setup(here, model.require_shape()[0], device, world.data_group)
    chip = sizing.get_local_chip(device, free=True)
    room = min(float(text) for text in all_gather_text(str(chip.memory_gib), world))  # the ranks' buffers are made now
    chip = replace(chip, memory_gib=room + strategy_search.estimate_buffer_bytes(setup, chip) / 2**30)
    answer: dict[str, Any] = {}
    if world.is_main_process:
        try:
            others = list_setups(here, model, setup, device.device_row, *count_machine_ranks(world))
            answer["way"] = _choose_strategy(job, state, device, chip, setup, others)
        except Failure as error:
            answer["failure"] = str(error), error.hint
    answer = json_reader.loads(broadcast_text(json.dumps(answer), world))
    if "failure" in answer:
        raise Failure(*answer["failure"])
    return tuple(answer["way"])


def _choose_strategy(
    job: Any,
    state: AutoState,
    device: Device,
    chip: Chip,
    setup: TrainingSetup,
    layouts: Iterable[list[TrainingSetup]],
) -> Strategy:
    """Return the fastest way by the estimate that fits; if none does, the one that needs least.

    Args:
        setup: the job as it is; layouts: the meshes of its devices, read where others than its own count.
    """
    micro = job.batch.micro_batch_tokens
    step = job.batch.global_batch_tokens or state.batch
    step = step or max(_DEFAULT_SEGMENTS_PER_RANK * setup.min_micro_batch, micro or 0) * setup.ranks

    def estimate_allowed(one: TrainingSetup) -> list[StrategyEstimate]:
        found = strategy_search.pick_micro_batches(one, step, chip, micro)
        return [way for way in found if _is_allowed(job, way.setup)]

    def can_share_batch(one: TrainingSetup) -> bool:
        return step % (one.ranks * (micro or one.min_micro_batch)) == 0

    tried = estimate_allowed(setup) if can_share_batch(setup) else []
    if setup.world_size > 1 and job.parallel.deepspeed is None and (device.type != "cpu" or not _find_fitting(tried)):
        others = [one for group in layouts for one in group if _get_layout(one) != _get_layout(setup)]
        tried += [way for one in others if can_share_batch(one) for way in estimate_allowed(one)]
    tried = tried or estimate_allowed(setup)
    left = [one for one in tried if _get_strategy(one.setup) not in state.refused]
    failed = [one.needed_bytes for one in tried if _get_strategy(one.setup) in state.refused]
    left = [one for one in left if not failed or one.needed_bytes < min(failed)]
    if not left:
        tried_out = "; ".join(map(_format_strategy, state.refused))
        raise Failure(
            f"no smaller setting is left to try in {output.format_gib(chip.memory_gib * 2**30)} GiB of {device.name}:"
            f" {tried_out} ran out of memory",
            "try adapters (--tuner lora), a shorter batch.seq_len or more devices; `anabatic plan` shows what is large",
        )
    choice = _pick_estimate(left, _get_layout(setup))
    log.info(
        f"auto: {output.format_strategy(choice.setup)} is the fastest by the estimate that fits, "
        f"{output.format_gib(choice.needed_bytes)} GiB"
    )
    if not choice.can_fit:
        log.warn(f"auto: by the estimate {output.format_gib(choice.available_bytes)} GiB are there: it may not fit")
    return _get_strategy(choice.setup)


def _pick_estimate(estimates: Sequence[StrategyEstimate], layout: tuple[int, ...]) -> StrategyEstimate:
    """Return the fastest that fits, with the `layout` of the job unless another is clearly faster; if none fits, the
    smallest."""
    fitting = _find_fitting(estimates)
    if not fitting:
        return min(estimates, key=lambda one: one.needed_bytes)
    fastest = max(fitting, key=lambda one: one.tokens_per_s)
    kept = [one for one in fitting if _get_layout(one.setup) == layout]
    as_it_is = max(kept, key=lambda one: one.tokens_per_s, default=fastest)
    return fastest if fastest.tokens_per_s > _MIN_LAYOUT_GAIN * as_it_is.tokens_per_s else as_it_is


def _find_fitting(estimates: Iterable[StrategyEstimate]) -> list[StrategyEstimate]:
    return [one for one in estimates if one.can_fit]


def _is_allowed(job: Any, setup: TrainingSetup) -> bool:
    """Whether a way keeps to what the job says."""
    wanted, recompute = job.parallel, getattr(job, "recompute", None) or job.model.recompute
    return (
        (wanted.strategy in ("auto", setup.strategy) or setup.strategy == "single")
        and (wanted.offload == "none" or setup.offload)
        and recompute in ("none", setup.recompute)
    )


def _get_layout(setup: TrainingSetup) -> tuple[int, ...]:
    return tuple(getattr(setup, name) for name in _LAYOUT_DIMENSIONS)


def _get_strategy(setup: TrainingSetup) -> Strategy:
    return setup.strategy, setup.offload, setup.recompute, *_get_layout(setup)


def _format_strategy(way: Strategy) -> str:
    strategy, offload, recompute, *sizes = way
    layout = [f"{name} {size}" for name, size in zip(_LAYOUT_DIMENSIONS, sizes, strict=False) if size != 1]
    return ", ".join([f"{strategy}{', offload' if offload else ''}", *layout, f"recompute {recompute}"])


def _apply_strategy(job: Any, way: Strategy | None) -> Any:
    assert way is not None
    strategy, offload, recompute, *sizes = way
    layout: dict[str, Any] = dict(zip(_LAYOUT_DIMENSIONS, sizes, strict=False))  # of an older start there are none
    offloaded = "cpu" if offload else "none"
    parallel = replace(job.parallel, strategy=strategy, offload=offloaded, deepspeed=None, **layout)
    if hasattr(job, "recompute"):
        return replace(job, parallel=parallel, recompute=recompute)
    return replace(job, parallel=parallel, model=replace(job.model, recompute=recompute))


def get_resolved_batch(
    job: LoopJob, state: AutoState | None, checkpoint: CheckpointInfo | None = None
) -> BatchSettings | None:
    """Return the sizes that earlier starts have come to; None: nothing is settled.

    With `schedule.minutes` they are those of the checkpoint: the estimate that they came from changes with the clock
    of a processor.
    """
    if job.schedule.minutes is not None and checkpoint is not None:
        sizes = checkpoint.state.sizes
        return replace(
            job.batch,
            micro_batch_tokens=int(sizes["batch.micro_batch_tokens"]),
            global_batch_tokens=int(sizes["batch.global_batch_tokens"]),
        )
    if state is None or (state.micro is None and state.batch is None):
        return None
    micro, batch = job.batch.micro_batch_tokens or state.micro, job.batch.global_batch_tokens or state.batch
    return replace(job.batch, micro_batch_tokens=state.micro or micro, global_batch_tokens=batch)


def save_resolved_sizes(job: LoopJob, sizes: StepSizes, world: World, most: int | None = None) -> None:
    """Write down what a start has settled on; nothing without `auto`."""
    state = load_state(job, world)
    if state is None:
        return
    batch = sizes.micro_batch_tokens * sizes.micro_steps * world.data_group.size
    state = replace(state, micro=sizes.micro_batch_tokens, batch=batch, most=most or state.most)
    if world.is_main_process:
        _save_state(job, state)
    barrier(world)


@contextmanager
def handle_out_of_memory(
    job: LoopJob, device: Device, world: World, least: int, sizes: StepSizes | None = None
) -> Iterator[None]:
    """Turn an allocator's refusal into an error that says what to do; with `auto`, into a start with less.

    Args:
        least: tokens of the smallest micro-batch.
        sizes: of the training; None: it has not begun, memory does not suffice for the model.

    Raises:
        RestartRequested: what the next start will do is written down.
        Failure: there is no less.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (
            isinstance(error, (torch.OutOfMemoryError, MemoryError))
            or any(part in str(error) for part in _OUT_OF_MEMORY_MESSAGES)
        ):
            raise
        raise _plan_retry(job, device, world, least, sizes, error) from error


def _plan_retry(
    job: LoopJob, device: Device, world: World, least: int, sizes: StepSizes | None, error: BaseException
) -> Failure:
    said = " ".join(str(error).split()).rpartition("DefaultCPUAllocator: ")[2]
    what = said.partition(" (")[0].partition(". Error code")[0] or "not enough memory"
    where = what if world.size == 1 else f"rank {world.rank}, {what}"
    micro = None if sizes is None else _shrink_micro_batch(sizes, world, least)
    if not is_auto(job):
        return Failure(
            where if sizes is None else f"{where}, at {sizes.format_sizes(world.data_group)}", _suggest_fix(job, micro)
        )
    path = RunFolder(job.out).root / AUTO_FILE  # of this rank alone: no other answers any more
    state = AutoState.from_json(path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "")
    if micro is not None and sizes is not None:
        steps = sizes.micro_batch_tokens * sizes.micro_steps // micro
        batch = micro * steps * world.data_group.size
        state = replace(state, lowered=state.lowered + 1, micro=micro, most=micro, batch=batch)
        told = (
            f"{where}, at {sizes.format_sizes(world.data_group)}: now {micro:,} tokens x {steps}, {batch:,} "
            f"a step as before"
        )
    elif state.way is not None:
        refused: tuple[Strategy, ...] = (*state.refused, state.way)
        state = replace(state, lowered=state.lowered + 1, way=None, micro=None, most=None, refused=refused)
        when = "before the first step" if sizes is None else "with the smallest micro-batch"
        told = f"{where}, {when}: {_format_strategy(refused[-1])} is given up"
    else:
        return Failure(where, _suggest_fix(job, None))
    _save_state(job, state)
    if (reports := relaunch.get_reports_folder()) is not None:
        (reports / relaunch.RESTART_FILE).write_text(told, encoding="utf-8")
    return RestartRequested(told, f"{path} holds what comes next: the same command continues")


def _shrink_micro_batch(sizes: StepSizes, world: World, least: int) -> int | None:
    """At most half of the micro-batch, so that the global batch stays; None where that is less than a segment."""
    micro = sizes.micro_batch_tokens
    return find_divisor(micro * sizes.micro_steps * world.data_group.size, world.data_group.size, micro // 2, least)


def _suggest_fix(job: LoopJob, micro: int | None) -> str:
    told = "`anabatic plan -- COMMAND` shows what takes the memory"
    if isinstance(job, RlJob):
        return f"lower device_batch_size, now {job.device_batch_size}, or sampling.max_new_tokens; {told}"
    if micro is not None:
        told = f"--batch.micro-batch-tokens {micro} keeps the global batch; {told}"
    return f"--auto does what fits by itself; {told}" if isinstance(job, WithAuto) else told


def rescale_loader_position(progress: TrainProgress, before: int, now: int, ranks: int) -> None:
    """Count the micro-batches that the data have given anew, in place, when their size has changed."""
    if before != now and progress.loader:
        number = round(progress.loader["micro_batch"] * before / now / ranks) * ranks
        progress.loader = {**progress.loader, "micro_batch": number}


_MIN_SPEEDUP = 1.03
"""A larger micro-batch that is not 3 % faster is not worth its memory."""
_MAX_MICRO_BATCHES = 2
"""Micro-batches of a rehearsed step at most, for each chunk of a pipeline: from the second on gradients are added."""


@dataclass(frozen=True)
class MicroBatchTrial:
    """What two steps took: bytes of the busiest device at its peak, tokens a second of all ranks."""

    sizes: StepSizes
    peak_bytes: int
    tokens_per_s: float


def choose_micro_batch(
    job: LoopJob,
    state: AutoState,
    setup: TrainingSetup | None,
    sizes: StepSizes,
    step: TrainStep,
    batches: Callable[[int], AbstractContextManager[Any]],
    device: Device,
    world: World,
) -> StepSizes:
    """Try the micro-batch of `sizes`, and larger ones while they fit and pay; return the fastest.

    Of a pipeline none is larger: the fewer micro-batches a step has, the longer its stages wait.

    Args:
        setup: what the plan counts by; None: nothing larger is tried.
        batches: makes the data of a micro-batch's size, to be closed.

    Raises:
        RestartRequested: memory ran out.
    """
    tries: list[MicroBatchTrial] = []
    wanted: StepSizes | None = sizes
    least = sizes.micro_batch_tokens if setup is None else setup.min_micro_batch
    while wanted is not None:
        with (
            handle_out_of_memory(job, device, world, least, wanted),
            batches(wanted.micro_batch_tokens) as data,
        ):
            tries.append(_measure_steps(step, data, wanted, device, world))
        _log_trial(tries[-1], setup, device, world)
        slower = len(tries) > 1 and tries[-1].tokens_per_s < _MIN_SPEEDUP * tries[-2].tokens_per_s
        fixed = job.batch.micro_batch_tokens is not None or world.pipeline_group.size > 1
        wanted = None if slower or fixed or setup is None else _double_micro_batch(tries[-1], setup, state, device)
    return max(tries, key=lambda one: one.tokens_per_s).sizes


def _measure_steps(step: TrainStep, data: Any, sizes: StepSizes, device: Device, world: World) -> MicroBatchTrial:
    stages = world.pipeline_group.size * world.pipeline_chunks  # as many micro-batches may be kept for the way back
    passes = min(_MAX_MICRO_BATCHES * stages, sizes.micro_steps)
    device.reset_peak_memory()
    seconds = 0.0
    for _ in range(2):  # the first one also makes what the second finds
        device.synchronize()
        begun = time.perf_counter()
        step.probe_step(data, passes)
        device.synchronize()
        seconds = time.perf_counter() - begun
    told = [text.split() for text in all_gather_text(f"{device.get_peak_memory()} {seconds}", world)]
    slowest = max(float(taken) for _, taken in told)
    tokens = passes * sizes.micro_batch_tokens * world.data_group.size
    return MicroBatchTrial(sizes, max(int(peak) for peak, _ in told), tokens / slowest)


def _double_micro_batch(
    last: MicroBatchTrial, setup: TrainingSetup, state: AutoState, device: Device
) -> StepSizes | None:
    """Twice the micro-batch, where the plan's count, corrected by what was measured, says that it fits."""
    sizes, chip = last.sizes, sizing.get_local_chip(device)
    micro = 2 * sizes.micro_batch_tokens
    if (
        sizes.micro_steps % 2
        or micro > strategy_search.get_max_tokens(chip)
        or (state.most is not None and micro > state.most)
    ):
        return None
    now, then = (
        estimate_peak_memory(_with_micro_batch(setup, one, sizes)).total for one in (sizes.micro_batch_tokens, micro)
    )
    expected = then if device.type in ("cpu", "mps") else then * max(1.0, last.peak_bytes / now)
    if expected * (1 + strategy_search.FRAGMENTATION) + strategy_search.estimate_buffer_bytes(
        setup, chip
    ) > strategy_search.get_available_bytes(chip):
        return None
    return replace(sizes, micro_batch_tokens=micro, micro_steps=sizes.micro_steps // 2)


def _with_micro_batch(setup: TrainingSetup, micro: int, sizes: StepSizes) -> TrainingSetup:
    steps = max(1, sizes.micro_batch_tokens * sizes.micro_steps // micro)
    return replace(setup, micro_tokens=micro, micro_steps=steps)


def _log_trial(one: MicroBatchTrial, setup: TrainingSetup | None, device: Device, world: World) -> None:
    paper_says = ""
    if setup is not None and device.type not in ("cpu", "mps"):
        planned = estimate_peak_memory(_with_micro_batch(setup, one.sizes.micro_batch_tokens, one.sizes)).total
        paper_says = f"; estimated {planned / 2**30:.3g}"
    log.info(
        f"auto: two steps with {one.sizes.format_sizes(world.data_group)}: {one.tokens_per_s:,.0f} tokens/s,"
        f" peak {one.peak_bytes / 2**30:.3g} of {device.get_total_memory() / 2**30:.3g} GiB{paper_says}"
    )
