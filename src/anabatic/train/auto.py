"""`--auto`: the plan's proposal, what the first steps said of it, and what is done when memory runs out.

What was settled lies in `auto.json` of the run folder. A rank that runs out of memory writes there what the next start
will do, and ends with the exit code that asks for one: nobody waits for a collective that it will not join. Every rank
reads the file at the start, and all take what has been lowered most often, so they agree also where each machine has a
folder of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from anabatic.config.rl import RlJob
from anabatic.config.shared import Batch
from anabatic.config.train import LoopJob, WithAuto
from anabatic.core import child, json_text, log
from anabatic.core.errors import CheckpointError, Failure, StartAgain
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.device.device import Device
from anabatic.models.hf import resolve
from anabatic.parallel.world import World, all_gather_text, barrier
from anabatic.plan import fit, known, show
from anabatic.plan.fit import Choice
from anabatic.plan.setup import Setup
from anabatic.train import paper
from anabatic.train.plan import Sizes, divisor
from anabatic.train.progress import Progress

FILE = "auto.json"
_SEGMENTS = 8
"""Of each rank in a step, where the global batch is left open, as `anabatic plan` takes it."""
_FULL = ("out of memory", "can't allocate memory", "Cannot allocate memory")
"""What torch says where its allocator for the processor gets nothing (c10/core/impl/alloc_cpu.cpp)."""
Way = tuple[str, bool, str]
"""Strategy, offload, recomputation."""


@dataclass(frozen=True)
class State:
    """What starts so far have come to.

    Attributes:
        lowered: times that memory ran out.
        place: devices it was settled for.
        way: strategy, offload, recomputation; None: not settled yet.
        micro, batch: tokens of a micro-batch and of a step; None: not settled yet.
        most: tokens of a micro-batch that are known to fit; larger ones are not tried.
        refused: ways that did not fit with the smallest micro-batch.
    """

    lowered: int = 0
    place: str = ""
    way: Way | None = None
    micro: int | None = None
    batch: int | None = None
    most: int | None = None
    refused: tuple[Way, ...] = ()

    @classmethod
    def read(cls, text: str) -> State:
        """Return what `text` says; nothing of a file that is empty.

        Raises:
            CheckpointError: it is something else.
        """
        if not text:
            return cls()
        try:
            found = json_text.loads(text)
            found["way"] = found["way"] and tuple(found["way"])
            found["refused"] = tuple(map(tuple, found["refused"]))
            return cls(**found)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{FILE} cannot be read: {error}", f"remove {FILE} from the run folder") from None


def _on(job: LoopJob) -> bool:
    return isinstance(job, WithAuto) and job.auto


def state_of(job: LoopJob, world: World) -> State | None:
    """Return what was settled, the same on every rank, which all call it; None without `auto`."""
    if not _on(job):
        return None
    path = RunFolder(job.out).root / FILE
    texts = all_gather_text(path.read_text(encoding="utf-8") if path.is_file() else "", world)
    return newest(texts)


def newest(texts: Iterable[str]) -> State:
    """Return what the ranks' files say together: that of the start that was lowered most, and got furthest."""
    return max(map(State.read, texts), key=lambda state: (state.lowered, state.way is not None, state.micro or 0))


def _write(job: LoopJob, state: State) -> None:
    root = RunFolder(job.out).root
    root.mkdir(parents=True, exist_ok=True)
    write_atomic(root / FILE, json.dumps(asdict(state)))


def begin(job: Any, device: Device, world: World) -> Any:
    """Return the job with the strategy, recomputation and offload that are proposed for these devices.

    Raises:
        Failure: every way has been tried.
    """
    if not _on(job):
        return job
    if job.save.resume == "never" and child.RETRY not in os.environ:
        (RunFolder(job.out).root / FILE).unlink(missing_ok=True)
        barrier(world)
    state = state_of(job, world) or State()
    place = f"{world.size} x {device.name}"
    if state.place != place:
        state = State(lowered=state.lowered, place=place, batch=state.batch)
    if state.way is None:
        choice = _proposal(job, state, device, world)
        state = replace(state, way=_way(choice.setup))
        log.info(f"auto: {show.way(choice.setup)} is the fastest on paper that fits, {show.gib(choice.needs)} GiB")
        if not choice.fits:
            log.warn(f"auto: on paper {show.gib(choice.room)} GiB are there: it may not fit")
        if world.first:
            _write(job, state)
        barrier(world)
    return _with_way(job, state.way)


def _proposal(job: Any, state: State, device: Device, world: World) -> Choice:
    here = _at_hand(job, world)
    setup = paper.setup_of(here, known.of_job(here)[0], device, world.data)
    chip = paper.chip_of(device, free=True)
    room = min(float(text) for text in all_gather_text(str(chip.memory_gib), world))  # the ranks' buffers are made now
    chip = replace(chip, memory_gib=room + fit.buffers(setup, chip) / 2**30)
    micro = job.batch.micro_batch_tokens
    step = job.batch.global_batch_tokens or max(_SEGMENTS * setup.least, micro or 0) * world.data.size
    tried = [one for one in fit.cut(setup, step, chip, micro) if _allowed(job, one.setup)]
    left = [one for one in tried if _way(one.setup) not in state.refused]
    failed = [one.needs for one in tried if _way(one.setup) in state.refused]
    left = [one for one in left if not failed or one.needs < min(failed)]
    if not left:
        tried_out = "; ".join(f"{way[0]}{', offload' * way[1]}, recompute {way[2]}" for way in state.refused)
        raise Failure(
            f"nothing is left to try in {show.gib(room * 2**30)} GiB of {device.name}: {tried_out} ran out of memory",
            "try adapters (--tuner lora), a shorter batch.seq_len or more devices; `anabatic plan` shows what is large",
        )
    fitting = [one for one in left if one.fits]
    return max(fitting, key=lambda one: one.tokens_per_s) if fitting else min(left, key=lambda one: one.needs)


def _at_hand(job: Any, world: World) -> Any:
    """The job with its model's folder in place of a run's or of a name on a hub."""
    if isinstance(job.model, str):
        return replace(job, model=str(resolve(job.model, job.hub, world)))
    path = job.model.path
    return job if path is None else replace(job, model=replace(job.model, path=str(resolve(path))))


def _allowed(job: Any, setup: Setup) -> bool:
    """Whether a way keeps to what the job says."""
    wanted, recompute = job.parallel, getattr(job, "recompute", None) or job.model.recompute
    return (
        (wanted.strategy in ("auto", setup.strategy) or setup.strategy == "single")
        and (wanted.offload == "none" or setup.offload)
        and recompute in ("none", setup.recompute)
    )


def _way(setup: Setup) -> Way:
    return setup.strategy, setup.offload, setup.recompute


def _with_way(job: Any, way: Way | None) -> Any:
    assert way is not None
    strategy, offload, recompute = way
    parallel = replace(job.parallel, strategy=strategy, offload="cpu" if offload else "none", deepspeed=None)
    if hasattr(job, "recompute"):
        return replace(job, parallel=parallel, recompute=recompute)
    return replace(job, parallel=parallel, model=replace(job.model, recompute=recompute))


def batch_of(job: LoopJob, state: State | None) -> Batch | None:
    """Return the sizes that earlier starts have come to; None: nothing is settled."""
    if state is None or (state.micro is None and state.batch is None):
        return None
    micro, batch = job.batch.micro_batch_tokens or state.micro, job.batch.global_batch_tokens or state.batch
    return replace(job.batch, micro_batch_tokens=state.micro or micro, global_batch_tokens=batch)


def keep(job: LoopJob, sizes: Sizes, world: World, most: int | None = None) -> None:
    """Write down what a start has settled on; nothing without `auto`."""
    state = state_of(job, world)
    if state is None:
        return
    batch = sizes.micro_batch_tokens * sizes.micro_steps * world.data.size
    state = replace(state, micro=sizes.micro_batch_tokens, batch=batch, most=most or state.most)
    if world.first:
        _write(job, state)
    barrier(world)


@contextmanager
def out_of_memory(job: LoopJob, device: Device, world: World, least: int, sizes: Sizes | None = None) -> Iterator[None]:
    """Turn an allocator's refusal into an error that says what to do; with `auto`, into a start with less.

    Args:
        least: tokens of the smallest micro-batch.
        sizes: of the training; None: it has not begun, memory does not suffice for the model.

    Raises:
        StartAgain: what the next start will do is written down.
        Failure: there is no less.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(part in str(error) for part in _FULL)):
            raise
        raise _lowered(job, device, world, least, sizes, error) from error


def _lowered(
    job: LoopJob, device: Device, world: World, least: int, sizes: Sizes | None, error: BaseException
) -> Failure:
    said = " ".join(str(error).split()).rpartition("DefaultCPUAllocator: ")[2]
    what = said.partition(" (")[0].partition(". Error code")[0] or "not enough memory"
    where = what if world.size == 1 else f"rank {world.rank}, {what}"
    micro = None if sizes is None else _less(sizes, world, least)
    if not _on(job):
        return Failure(where if sizes is None else f"{where}, at {sizes.told(world.data)}", _advice(job, micro))
    path = RunFolder(job.out).root / FILE  # of this rank alone: no other answers any more
    state = State.read(path.read_text(encoding="utf-8") if path.is_file() else "")
    if micro is not None and sizes is not None:
        steps = sizes.micro_batch_tokens * sizes.micro_steps // micro
        batch = micro * steps * world.data.size
        state = replace(state, lowered=state.lowered + 1, micro=micro, most=micro, batch=batch)
        told = f"{where}, at {sizes.told(world.data)}: now {micro:,} tokens x {steps}, {batch:,} a step as before"
    elif state.way is not None:
        refused = (*state.refused, state.way)
        state = replace(state, lowered=state.lowered + 1, way=None, micro=None, most=None, refused=refused)
        told = f"{where}, with the smallest micro-batch: {refused[-1][0]}, recompute {refused[-1][2]} is given up"
    else:
        return Failure(where, _advice(job, None))
    _write(job, state)
    if (reports := child.reports()) is not None:
        (reports / child.WISH).write_text(told, encoding="utf-8")
    return StartAgain(told, f"{path} holds what comes next: the same command goes on")


def _less(sizes: Sizes, world: World, least: int) -> int | None:
    """At most half of the micro-batch, so that the global batch stays; None where that is less than a segment."""
    micro = sizes.micro_batch_tokens
    return divisor(micro * sizes.micro_steps * world.data.size, world.data.size, micro // 2, least)


def _advice(job: LoopJob, micro: int | None) -> str:
    told = "`anabatic plan -- COMMAND` shows what takes the memory"
    if isinstance(job, RlJob):
        return f"lower device_batch_size, now {job.device_batch_size}, or sampling.max_new_tokens; {told}"
    if micro is not None:
        told = f"--batch.micro-batch-tokens {micro} keeps the global batch; {told}"
    return f"--auto does what fits by itself; {told}" if isinstance(job, WithAuto) else told


def carried(progress: Progress, before: int, now: int, ranks: int) -> None:
    """Count the micro-batches that the data have given anew, in place, when their size has changed."""
    if before != now and progress.loader:
        number = round(progress.loader["micro_batch"] * before / now / ranks) * ranks
        progress.loader = {**progress.loader, "micro_batch": number}
