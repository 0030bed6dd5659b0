"""What every training recipe does before and after the loop: the run folder, resuming, the models it leaves behind."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic import __version__
from anabatic.config.loading import settings
from anabatic.config.sections.train_jobs import LoopJob
from anabatic.core import log
from anabatic.core.errors import CheckpointError, ConfigError, Failure
from anabatic.core.formatting import format_count, format_duration
from anabatic.core.paths import RunFolder, fsync_folder, lock_folder, make_write_error, replace_folder, write_atomic
from anabatic.core.relaunch import RETRY_VARIABLE
from anabatic.device.device import Device, get_peak_flops
from anabatic.parallel.collectives import all_reduce_sum, barrier, broadcast_text
from anabatic.parallel.sharded_tensors import to_local
from anabatic.parallel.world import World
from anabatic.train.checkpoint import manifest, memory_copies, memory_store, storage
from anabatic.train.checkpoint.run_state import RunState, TrainProgress
from anabatic.train.guards import bad_steps
from anabatic.train.metrics.recorder import MetricsRecorder
from anabatic.train.optim.optimizer import Optimizer
from anabatic.train.report import page
from anabatic.train.step import TrainStep

_MUTABLE_SETTINGS = (
    "auto",
    "out",
    "log",
    "save",
    "eval",
    "device",
    "data.cache",
    "data.workers",
    "vision.cache_gib",
    "model.recompute",
    "recompute",
    "parallel",
    "optim.on_bad_step",
    "optim.max_rewinds",
)
"""Settings that may change between a checkpoint and the run that continues it."""


@contextmanager
def open_run_folder(job: LoopJob, device: Device, world: World) -> Iterator[RunFolder]:
    """Make the run folder, hold it for this job alone, and start this rank's log file.

    Raises:
        Failure: the folder cannot be written, or another job works in it.
    """
    is_main = world.is_main_process
    folder = RunFolder(job.out)
    folder.create_folder()
    with lock_folder(folder.root, "training run") if is_main else nullcontext():
        if is_main:
            manifest.remove_temporary_folders(folder.root)
        log.add_log_file(folder.log_path(world.rank))
        log.info(f"run folder {folder.root}")
        log.info(f"device {device.type} ({device.reasons['device']}): {device.name}")
        dtype = str(device.dtype).removeprefix("torch.")
        log.info(f"dtype {dtype} ({device.reasons['dtype']}), {device.threads} threads")
        yield folder


def find_resume_checkpoint(job: LoopJob, folder: RunFolder, world: World) -> storage.CheckpointInfo | None:
    """Return the checkpoint to continue from, or None to start at step 0.

    Raises:
        ConfigError: the recipe differs from the one that saved it, or the folder holds models and no checkpoint.
        CheckpointError: `save.resume: must` and there is none.
    """
    if job.save.resume == "never" and RETRY_VARIABLE not in os.environ:
        if world.is_main_process:
            _archive_old_run(folder)
        barrier(world)
        return None
    checkpoint = _find_newest_state(job, folder, world)
    if checkpoint is None:
        if job.save.resume == "must":
            raise CheckpointError(
                f"save.resume is must, but {folder.root} holds no whole checkpoint",
                "check the folder's name, or use --save.resume auto",
            )
        _require_no_final_model(folder)
        return None
    identity = get_job_identity(job)
    if identity.get("model.depth", 0) is None:  # left open: it is what the checkpoint has
        identity["model.depth"] = checkpoint.state.identity.get("model.depth")
    _require_same_settings(checkpoint, identity)
    return checkpoint


def _find_newest_state(job: LoopJob, folder: RunFolder, world: World) -> storage.CheckpointInfo | None:
    """Return the copy in memory, unless the disk has a newer checkpoint; then no file of the disk is read."""
    machine_memory = Path(os.environ.get(memory_store.MEMORY_DIR_VARIABLE) or memory_store.DEFAULT_MEMORY_DIR)
    has_copies = job.save.memory_every > 0 or any(machine_memory.glob(f"{memory_store.FOLDER_PREFIX}*"))
    memory = memory_copies.find_memory_copy(job, folder, world) if has_copies else None
    if memory is None:
        return storage.find_newest_checkpoint(folder, world)
    copied = storage.CheckpointInfo(memory.path, memory.step, RunState.from_json(memory.host, memory.path), memory)
    steps = [step for step, _ in manifest.list_checkpoint_folders(folder.root)]
    if int(broadcast_text(str(max(steps, default=0)), world)) <= memory.step:
        return copied
    checkpoint = storage.find_newest_checkpoint(folder, world)
    if checkpoint is None or checkpoint.step < memory.step:
        return copied
    log.info(f"the copies in memory are of step {memory.step}: {checkpoint.path} is newer")
    return checkpoint


def _require_no_final_model(folder: RunFolder) -> None:
    """Refuse to overwrite a final model whose checkpoints are gone: it is all that is left of a run."""
    if (folder.final_model / "tokenizer.json").is_file():
        raise ConfigError(
            f"{folder.final_model} is there from an earlier run, but no whole checkpoint to continue from",
            "choose another --out, or start over with --save.resume never (what is there is moved aside)",
        )
    if torn := manifest.list_checkpoint_folders(folder.root):
        log.warn(f"none of the {len(torn)} checkpoints in {folder.root} is whole: starting again at step 0")


def _archive_old_run(folder: RunFolder) -> None:
    """Move what an earlier run has left into `superseded-<time>`; its log files are continued."""
    output_paths = (
        folder.best_model,
        folder.final_model,
        folder.summary,
        folder.metrics,
        folder.events,
        folder.report,
        folder.root / bad_steps.BAD_STEPS_FILE,
        folder.root / memory_copies.RUN_ID_FILE,
        *folder.root.glob("rows-rank-*.jsonl"),
    )
    old = [path for _, path in manifest.list_checkpoint_folders(folder.root)] + [
        path for path in output_paths if path.exists()
    ]
    if not old:
        return
    archive = folder.root / f"superseded-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        archive.mkdir()
        for path in old:
            path.rename(archive / path.name)
    except OSError as error:
        raise make_write_error(archive, error) from error
    log.warn(f"save.resume is never: {len(old)} files and folders of the earlier run were moved to {archive}")


def get_job_identity(job: LoopJob) -> dict[str, Any]:
    """Return the settings that determine the numbers, flat: `optim.lr` -> value."""
    return {
        key: value
        for key, value in settings.flatten_settings(asdict(job)).items()
        if not any(key == free or key.startswith(f"{free}.") for free in _MUTABLE_SETTINGS)
    }


def _require_same_settings(checkpoint: storage.CheckpointInfo, identity: dict[str, Any]) -> None:
    before = checkpoint.state.identity
    changed = [key for key in sorted(before.keys() | identity.keys()) if before.get(key) != identity.get(key)]
    if changed:
        changes = [
            f"{key} = {_format_value(before.get(key))}, the recipe now says {_format_value(identity.get(key))}"
            for key in changed[:3]
        ]
        more = f", and {len(changed) - 3} more: {', '.join(changed[3:9])}" if len(changed) > 3 else ""
        raise ConfigError(
            f"{checkpoint.path} was saved with {'; '.join(changes)}{more}",
            "put it back to continue, choose another --out, or start over with --save.resume never",
        )


def require_same_sizes(
    checkpoint: storage.CheckpointInfo | None, sizes: Mapping[str, float], free: Collection[str] = ()
) -> None:
    """Sizes that were left open follow from the machine; another machine must not change a run silently.

    Args:
        free: names that may change.

    Raises:
        ConfigError: a size is not that of the checkpoint.
    """
    for name, value in sizes.items() if checkpoint is not None else ():
        assert checkpoint is not None
        before = checkpoint.state.sizes[name]
        if before != value and name not in free:
            raise ConfigError(
                f"{checkpoint.path} was saved with {name} = {before:g}, here it came out as {value:g}",
                f"give --{name.replace('_', '-')} {before!r} to continue, or start over with --save.resume never",
            )


def _format_value(value: Any) -> str:
    if value is None:
        return "nothing (its default)"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    return f"{value:g}" if isinstance(value, float) else str(value)


def collect_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a model that a checkpoint holds: those that are trained, tied weights once."""
    parameters = dict(model.named_parameters())  # tied ones under their first name alone
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    buffers = {name for name, _ in model.named_buffers()}
    return {
        f"model.{name}": tensor.detach()
        for name, tensor in model.state_dict().items()
        if name in trained or name in buffers
    }


def collect_tensors(model: PreTrainedModel, optimizer: Optimizer, step: TrainStep) -> dict[str, Tensor]:
    """Return all tensors that a checkpoint holds."""
    tensors = collect_weights(model)
    tensors.update({f"optim.{name}": tensor for name, tensor in optimizer.state_dict().items()})
    tensors.update({f"step.{name}": tensor for name, tensor in step.state_dict().items()})
    return tensors


def restore_checkpoint(
    checkpoint: storage.CheckpointInfo | None, tensors: dict[str, Tensor], device: Device, world: World
) -> TrainProgress:
    """Fill the tensors from the checkpoint and return its progress; a new `TrainProgress` without one."""
    if checkpoint is None:
        return TrainProgress()
    storage.load_checkpoint(checkpoint, tensors, device, world)
    progress = replace(checkpoint.state.progress)
    log.info(f"continuing from {checkpoint.path}: step {progress.step}, {format_count(progress.tokens)} tokens")
    return progress


def open_metrics(
    job: LoopJob, folder: RunFolder, device: Device, world: World, steps: int, checkpoint: storage.CheckpointInfo | None
) -> MetricsRecorder:
    """Write config.yaml and start the metrics; silent on ranks other than 0."""
    if not world.is_main_process:
        return MetricsRecorder.make_silent()
    write_atomic(folder.config, settings.dump_job(job))
    if checkpoint is None:
        folder.summary.unlink(missing_ok=True)  # it told of another run
    metrics = MetricsRecorder(
        folder,
        job.log,
        asdict(job),
        max_steps=steps,
        resumed_step=checkpoint.step if checkpoint else 0,
        evaluated_step=checkpoint.state.progress.evaluated if checkpoint else 0,
    )
    metrics.log_event(
        "device",
        name=device.name,
        type=device.type,
        dtype=str(device.dtype).removeprefix("torch."),
        reason=device.reasons["device"],
        threads=device.threads,
        world_size=world.size,
        torch=torch.__version__,
        python=platform.python_version(),
        anabatic=__version__,
    )
    step = checkpoint.step if checkpoint else 0
    metrics.log_event("resume" if checkpoint else "start", step=step, steps=steps)
    metrics.call_callbacks("on_start", step, folder.root, asdict(job))
    return metrics


def log_peak_flops(device: Device) -> float:
    """Return the peak FLOP/s that MFU refers to, and log it."""
    flops, source = get_peak_flops(device)
    if flops:
        log.info(f"MFU is measured against {flops / 1e12:.2f} TFLOP/s ({source})")
    else:
        log.info(source)
    return flops


def finish_run(
    folder: RunFolder,
    model: PreTrainedModel,
    write: Callable[[Path], None],
    metrics: MetricsRecorder,
    summary: dict[str, Any],
    device: torch.device,
    world: World,
) -> None:
    """Write final_model, best_model where no evaluation wrote one, summary.json and report.html. All ranks call it."""
    if summary["skipped"] * 2 > summary["steps"]:
        raise Failure(
            f"{summary['skipped']} of {summary['steps']} updates were skipped, their loss or gradient was not finite:"
            " no final model is written",
            "lower optim.lr and optim.matrix_lr, and start over with --save.resume never",
        )
    broken = [name for name, weight in model.named_parameters() if not bool(torch.isfinite(to_local(weight)).all())]
    if all_reduce_sum(torch.tensor(float(len(broken)), device=device), world):
        raise Failure(
            f"{len(broken)} weights are not finite, {broken[0] if broken else 'on another rank'} for one:"
            " no final model is written",
            "lower optim.lr and optim.matrix_lr, and start over with --save.resume never",
        )
    write(folder.final_model)
    if not world.is_main_process:
        return
    if summary["best_step"] is None or not (folder.best_model / "tokenizer.json").is_file():
        copy_folder_linked(folder.final_model, folder.best_model)
    if summary["skipped"]:
        log.warn(
            f"{summary['skipped']} of {summary['steps']} updates were skipped, their loss or gradient was not finite,"
            " or a spike: lower optim.lr and optim.matrix_lr"
        )
    metrics.write_summary({"finished": True, **summary})
    page.write_run_report(folder.root)
    metrics.call_callbacks("on_end", summary["steps"], summary["steps"])
    log.info(f"wrote {folder.final_model} after {summary['steps']} steps in {format_duration(summary['seconds'])}")


def copy_folder_linked(source: Path, target: Path) -> None:
    """Copy a folder, by hard links where the file system has them."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(source, temporary, copy_function=_link_or_copy)
        replace_folder(temporary, target)
        fsync_folder(target.parent)
    except OSError as error:
        raise make_write_error(target, error) from error


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


Evaluator = Callable[[int], dict[str, Any]]
