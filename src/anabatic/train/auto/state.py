"""What the starts of a training with `--auto` have come to: `auto.json` of the run folder.

A rank that runs out of memory writes there what the next start will do, and ends with the exit code that asks for one:
nobody waits for a collective that it will not join. Every rank reads the file at the start, and all take what has been
lowered most often, so they agree also where each machine has its own folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, get_args

from anabatic.config.sections.common import BatchSettings, Recompute
from anabatic.config.sections.train_jobs import LoopJob, is_auto
from anabatic.core import json_reader
from anabatic.core.errors import CheckpointError
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.parallel.collectives import all_gather_text, barrier
from anabatic.parallel.world import World
from anabatic.plan.training_setup import DIVIDING_SETTINGS, Layout, StrategyName
from anabatic.train.checkpoint.run_state import TrainProgress
from anabatic.train.checkpoint.storage import CheckpointInfo
from anabatic.train.sizing import StepSizes

AUTO_FILE = "auto.json"


@dataclass(frozen=True)
class AutoState:
    """What starts so far have come to.

    Attributes:
        lowered: times that memory ran out.
        place: devices and the job's own mesh that it was settled for.
        way: how the training is divided; None: not settled yet.
        micro, batch: tokens of a micro-batch and of a step; None: not settled yet.
        most: tokens of a micro-batch that are known to fit; larger ones are not tried.
        refused: ways that did not fit with the smallest micro-batch.
    """

    lowered: int = 0
    place: str = ""
    way: Layout | None = None
    micro: int | None = None
    batch: int | None = None
    most: int | None = None
    refused: tuple[Layout, ...] = ()

    def to_json(self) -> str:
        """Return the text of a file; a layout is a list."""
        way = None if self.way is None else list(astuple(self.way))
        return json.dumps(asdict(self) | {"way": way, "refused": [list(astuple(one)) for one in self.refused]})

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
            way, found["way"] = found["way"], None
            if way is not None:
                layout = _read_layout(way)
                found["way"] = layout if len(way) == len(astuple(layout)) else None  # an older one is chosen anew
            found["refused"] = tuple(map(_read_layout, found["refused"]))
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


def _read_layout(values: Any) -> Layout:
    """Return the layout of a list; one of an older version has no dimensions of the mesh.

    Raises:
        TypeError, ValueError: it is something else.
    """
    strategy, offload, recompute, *sizes = values
    if (
        strategy not in get_args(StrategyName)
        or not isinstance(offload, bool)
        or recompute not in get_args(Recompute)
        or len(sizes) not in (0, len(DIVIDING_SETTINGS))
        or not all(type(size) is int and size > 0 for size in sizes)
    ):
        raise ValueError(f"{values} is no strategy with offload, recomputation and the mesh")
    return Layout(strategy, offload, recompute, *sizes)


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


def save_state(job: LoopJob, state: AutoState) -> None:
    """Write down what starts have come to so far."""
    root = RunFolder(job.out).root
    root.mkdir(parents=True, exist_ok=True)
    write_atomic(root / AUTO_FILE, state.to_json())


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
        save_state(job, state)
    barrier(world)


def rescale_loader_position(progress: TrainProgress, before: int, now: int, ranks: int) -> None:
    """Count the micro-batches that the data have given anew, in place, when their size has changed."""
    if before != now and progress.loader:
        number = round(progress.loader["micro_batch"] * before / now / ranks) * ranks
        progress.loader = {**progress.loader, "micro_batch": number}
