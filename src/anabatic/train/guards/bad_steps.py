"""What is done about bad steps (`spike_detector.py`): they are recorded with their rows, then skipped, undone, or the
end.

All ranks see the same verdicts, so all do the same. To go back is what PaLM's authors did at loss spikes (Chowdhery et
al., arXiv 2204.02311, section 5.1): on from a checkpoint before it, without its batches. It also fixes weights that a
faulty chip has destroyed, which no refused update can.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

from anabatic.core import log
from anabatic.core.errors import CheckpointError, DataError, Failure
from anabatic.core.json_reader import JsonlWriter
from anabatic.parallel.collectives import all_gather_text
from anabatic.train.checkpoint import storage
from anabatic.train.checkpoint.run_state import TrainProgress
from anabatic.train.checkpoint.saver import CheckpointSaver
from anabatic.train.context import LoopContext
from anabatic.train.guards.spike_detector import BadStep, find_data_positions

BAD_STEPS_FILE = "bad_steps.jsonl"
_MAX_LOGGED = 3
"""Bad steps of one look that are named on the terminal."""


def handle_bad_steps(loop: LoopContext, progress: TrainProgress, saver: CheckpointSaver, found: list[BadStep]) -> bool:
    """Act on bad steps; return True when the training went back. All ranks call it.

    Raises:
        DataError: there is one, and `optimizer.on_bad_step` is stop.
        Failure: it is rewind, and there were too many, or there is nothing to go back to.
    """
    _record_bad_steps(loop, found)
    if loop.job.optim.on_bad_step == "stop":
        raise DataError(
            f"step {found[0].step}: {_describe_step(found[0])}, and optim.on_bad_step is stop",
            f"its rows are in {loop.folder.root / BAD_STEPS_FILE}; --optim.on-bad-step skip continues without it",
        )
    if loop.job.optim.on_bad_step == "rewind":
        _rewind_to_checkpoint(loop, progress, saver, found)
        return True
    return False


def skip_dropped_data(loop: LoopContext, progress: TrainProgress) -> None:
    """Drop the data of steps that a rewind has found bad."""
    while progress.loader.get("micro_batch", 0) in progress.dropped:
        rows = []
        for _ in range(loop.sizes.micro_steps):
            batch = next(loop.batches)
            if batch is None:  # a wish to stop: the step itself will see it too
                return
            rows += batch.segment_origins
            progress.loader = batch.loader_state
        if loop.row_log is not None:
            loop.row_log.write(progress.step + 1, rows, dropped=True)


def _describe_step(step: BadStep) -> str:
    numbers = f"loss {step.loss:.4g}, gradient norm {step.grad_norm:.4g}"
    return f"a spike ({numbers})" if step.reason == "spike" else f"loss or gradient is not finite ({numbers})"


def _record_bad_steps(loop: LoopContext, found: list[BadStep]) -> None:
    """Write the steps with the rows of every rank into `bad_steps.jsonl`."""
    named = [_local_record(loop, step) for step in found] if loop.world.counts_batch else []
    ranks = [json.loads(text) for text in all_gather_text(json.dumps(named), loop.world)]
    for step in found[:_MAX_LOGGED]:
        log.warn(f"step {step.step}: {_describe_step(step)}; the update is not made, its rows are in {BAD_STEPS_FILE}")
    if len(found) > _MAX_LOGGED:
        log.warn(f"and {len(found) - _MAX_LOGGED} more bad steps up to step {found[-1].step}")
    for step in found:
        loop.metrics.log_event("bad_step", step=step.step, reason=step.reason, action=loop.job.optim.on_bad_step)
    if not loop.world.is_main_process:
        return
    writer = JsonlWriter(loop.folder.root / BAD_STEPS_FILE)
    for number, step in enumerate(found):
        writer.write(
            {
                "time": round(time.time(), 3),
                "step": step.step,
                "reason": step.reason,
                "loss": step.loss,
                "grad_norm": step.grad_norm,
                "action": loop.job.optim.on_bad_step,
                "ranks": [steps[number] for steps in ranks if steps],
            }
        )
    writer.close()


def _local_record(loop: LoopContext, step: BadStep) -> dict[str, Any]:
    names = loop.batches.source_names
    rows = [
        {"source": names[source], "row": row, "pass": turn, "start": start, "tokens": tokens}
        for source, row, turn, start, tokens in step.rows
    ]
    return {"rank": loop.world.rank, "finite": step.is_local_finite, "rows": rows}


def _rewind_to_checkpoint(
    loop: LoopContext, progress: TrainProgress, saver: CheckpointSaver, found: list[BadStep]
) -> None:
    first = found[0]
    if progress.rewinds >= loop.job.optim.max_rewinds:
        raise Failure(
            f"step {first.step}: {_describe_step(first)}, after {progress.rewinds} rewinds (optim.max_rewinds)",
            f"look at the rows in {loop.folder.root / BAD_STEPS_FILE}, and at the machine; or lower optim.lr",
        )
    saver.wait()
    # When the first step after a checkpoint is bad once more, with other data, the checkpoint itself is in doubt.
    doubtful = progress.rewound_to == first.step - 1
    source = storage.find_newest_checkpoint(loop.folder, loop.world, first.step - 1 if doubtful else first.step)
    if source is None:
        raise CheckpointError(
            f"step {first.step}: {_describe_step(first)}, and there is no earlier checkpoint to go back to",
            "save more often with --save.every, or continue without it by --optim.on-bad-step skip",
        )
    storage.load_checkpoint(source, loop.checkpoint_tensors(), loop.device, loop.world)
    # Steps that are all bad to the last are the weights' fault, not their data's: one is skipped, to get on.
    healed = len(found) <= progress.step - first.step
    bad = find_data_positions(found if healed else found[:1], loop.sizes.micro_steps * loop.world.data_group.size)
    restored = replace(source.state.progress)
    restored.dropped = sorted({*progress.dropped, *bad})
    restored.rewinds, restored.rewound_to = progress.rewinds + 1, source.step
    vars(progress).update(vars(restored))
    loop.train_step.optimizer.step_number = progress.step
    loop.batches.load_state_dict(progress.loader)
    loop.metrics.rewind_to(progress.step, progress.evaluated)
    if loop.row_log is not None:
        loop.row_log.rewind_to(progress.step)
    saver.step = progress.step
    loop.metrics.log_event("rewind", step=progress.step, bad_step=first.step)
    log.warn(f"back to {source.path}, passing over the data of step {first.step} (rewind {progress.rewinds})")
