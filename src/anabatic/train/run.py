"""What every training recipe does before and after the loop: the run folder, resuming, the models it leaves behind."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic import __version__
from anabatic.config import load
from anabatic.config.train import LoopJob
from anabatic.core import json_text, log
from anabatic.core.child import RETRY
from anabatic.core.errors import CheckpointError, ConfigError, Failure
from anabatic.core.paths import RunFolder, alone, cannot_write, fsync_folder, replace_folder, write_atomic
from anabatic.core.text import count, duration
from anabatic.device.device import Device, peak_flops
from anabatic.parallel.sharded import local
from anabatic.parallel.world import World, all_sum, barrier
from anabatic.train import bad_steps, checkpoint, manifest, report
from anabatic.train.metrics import Metrics
from anabatic.train.optim import Optimizer
from anabatic.train.progress import Progress
from anabatic.train.step import TrainStep

_FREE = ("auto", "out", "log", "save", "eval", "device", "data.cache", "data.workers", "model.recompute", "recompute",
         "parallel", "optim.on_bad_step", "optim.max_rewinds")  # fmt: skip
"""Settings that may change between a checkpoint and the run that continues it."""


@contextmanager
def open_folder(job: LoopJob, device: Device, world: World) -> Iterator[RunFolder]:
    """Make the run folder, hold it for this job alone, and start this rank's log file.

    Raises:
        Failure: the folder cannot be written, or another job works in it.
    """
    folder = RunFolder(job.out)
    folder.create()
    with alone(folder.root, "training run") if world.first else nullcontext():
        if world.first:
            manifest.sweep(folder.root)
        log.to_file(folder.log(world.rank))
        log.info(f"run folder {folder.root}")
        log.info(f"device {device.type} ({device.reasons['device']}): {device.name}")
        dtype = str(device.dtype).removeprefix("torch.")
        log.info(f"dtype {dtype} ({device.reasons['dtype']}), {device.threads} threads")
        yield folder


def find_checkpoint(job: LoopJob, folder: RunFolder, world: World) -> checkpoint.Found | None:
    """Return the checkpoint to continue from, or None to start at step 0.

    Raises:
        ConfigError: the recipe differs from the one that saved it, or the folder holds models and no checkpoint.
        CheckpointError: `save.resume: must` and there is none.
    """
    if job.save.resume == "never" and RETRY not in os.environ:
        if world.first:
            _set_aside(folder)
        barrier(world)
        return None
    found = checkpoint.newest(folder, world)
    if found is None:
        if job.save.resume == "must":
            raise CheckpointError(
                f"save.resume is must, but {folder.root} holds no whole checkpoint",
                "check the folder's name, or use --save.resume auto",
            )
        _keep_final_model(folder)
        return None
    _require_same(found, identity(job))
    return found


def _keep_final_model(folder: RunFolder) -> None:
    """A final model whose checkpoints are gone is all that is left of a run: it is not overwritten."""
    if (folder.final_model / "tokenizer.json").is_file():
        raise ConfigError(
            f"{folder.final_model} is there from an earlier run, but no whole checkpoint to continue from",
            "choose another --out, or start over with --save.resume never (what is there is moved aside)",
        )
    if torn := manifest.numbered(folder.root):
        log.warn(f"none of the {len(torn)} checkpoints in {folder.root} is whole: starting again at step 0")


def _set_aside(folder: RunFolder) -> None:
    """Move what an earlier run has left into `superseded-<time>`; its log files are continued."""
    kept = (
        folder.best_model, folder.final_model, folder.summary, folder.metrics, folder.events, folder.report,
        folder.root / bad_steps.FILE, *folder.root.glob("rows-rank-*.jsonl"),
    )  # fmt: skip
    old = [path for _, path in manifest.numbered(folder.root)] + [path for path in kept if path.exists()]
    if not old:
        return
    aside = folder.root / f"superseded-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)
    except OSError as error:
        raise cannot_write(aside, error) from error
    log.warn(f"save.resume is never: {len(old)} files and folders of the earlier run were moved to {aside}")


def identity(job: LoopJob) -> dict[str, Any]:
    """The settings that decide the numbers, flat: `optim.lr` -> value."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}.{key}" if prefix else key, item)
        elif not any(prefix == free or prefix.startswith(free + ".") for free in _FREE):
            flat[prefix] = value

    walk("", asdict(job))
    return flat


def _require_same(found: checkpoint.Found, now: dict[str, Any]) -> None:
    before = found.host.get("identity", {})
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if changed:
        told = [f"{key} = {_shown(before.get(key))}, the recipe now says {_shown(now.get(key))}" for key in changed[:3]]
        more = f", and {len(changed) - 3} more: {', '.join(changed[3:9])}" if len(changed) > 3 else ""
        raise ConfigError(
            f"{found.path} was saved with {'; '.join(told)}{more}",
            "put it back to continue, choose another --out, or start over with --save.resume never",
        )


def require_same_sizes(found: checkpoint.Found | None, sizes: Mapping[str, float], free: Collection[str] = ()) -> None:
    """Sizes that were left open follow from the machine; another machine must not change a run silently.

    Args:
        free: names that may change.

    Raises:
        ConfigError: a size is not that of the checkpoint.
    """
    for name, value in sizes.items() if found is not None else ():
        assert found is not None
        before = found.host["sizes"][name]
        if before != value and name not in free:
            raise ConfigError(
                f"{found.path} was saved with {name} = {before:g}, here it came out as {value:g}",
                f"give --{name.replace('_', '-')} {before!r} to continue, or start over with --save.resume never",
            )


def _shown(value: Any) -> str:
    if value is None:
        return "nothing (its default)"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    return f"{value:g}" if isinstance(value, float) else str(value)


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a checkpoint holds of a model: what is trained, tied weights once."""
    parameters = dict(model.named_parameters())  # tied ones under their first name alone
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    buffers = {name for name, _ in model.named_buffers()}
    return {
        f"model.{name}": tensor.detach()
        for name, tensor in model.state_dict().items()
        if name in trained or name in buffers
    }


def tensors_of(model: PreTrainedModel, optimizer: Optimizer, step: TrainStep) -> dict[str, Tensor]:
    """All that a checkpoint holds."""
    tensors = weights_of(model)
    tensors.update({f"optim.{name}": tensor for name, tensor in optimizer.state().items()})
    tensors.update({f"step.{name}": tensor for name, tensor in step.state().items()})
    return tensors


def restore(found: checkpoint.Found | None, tensors: dict[str, Tensor], device: Device, world: World) -> Progress:
    """Fill the tensors from the checkpoint and return its progress; a new `Progress` without one."""
    if found is None:
        return Progress()
    checkpoint.load(found, tensors, device, world)
    progress = Progress(**found.host["progress"])
    log.info(f"continuing from {found.path}: step {progress.step}, {count(progress.tokens)} tokens")
    return progress


def open_metrics(
    job: LoopJob, folder: RunFolder, device: Device, world: World, steps: int, found: checkpoint.Found | None
) -> Metrics:
    """Write config.yaml and start the metrics; silent on ranks other than 0."""
    if not world.first:
        return Metrics.silent()
    write_atomic(folder.config, load.dump(job))
    if found is None:
        folder.summary.unlink(missing_ok=True)  # it told of another run
    metrics = Metrics(
        folder, job.log, asdict(job), max_steps=steps, resumed_step=found.step if found else 0,
        evaluated_step=found.host["progress"]["evaluated"] if found else 0,
    )  # fmt: skip
    metrics.event(
        "device", name=device.name, type=device.type, dtype=str(device.dtype).removeprefix("torch."),
        reason=device.reasons["device"], threads=device.threads, world_size=world.size, torch=torch.__version__,
        python=platform.python_version(), anabatic=__version__,
    )  # fmt: skip
    metrics.event("resume" if found else "start", step=found.step if found else 0, steps=steps)
    return metrics


def peak(device: Device) -> float:
    """The peak that MFU is measured against, said aloud."""
    flops, source = peak_flops(device)
    if flops:
        log.info(f"MFU is measured against {flops / 1e12:.2f} TFLOP/s ({source})")
    else:
        log.info(source)
    return flops


def finish(
    folder: RunFolder,
    model: PreTrainedModel,
    write: Callable[[Path], None],
    metrics: Metrics,
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
    broken = [name for name, weight in model.named_parameters() if not bool(torch.isfinite(local(weight)).all())]
    if all_sum(torch.tensor(float(len(broken)), device=device), world):
        raise Failure(
            f"{len(broken)} weights are not finite, {broken[0] if broken else 'on another rank'} for one:"
            " no final model is written",
            "lower optim.lr and optim.matrix_lr, and start over with --save.resume never",
        )
    write(folder.final_model)
    if not world.first:
        return
    if summary["best_step"] is None or not (folder.best_model / "tokenizer.json").is_file():
        link_copy(folder.final_model, folder.best_model)
    if summary["skipped"]:
        log.warn(
            f"{summary['skipped']} of {summary['steps']} updates were skipped, their loss or gradient was not finite,"
            " or a spike: lower optim.lr and optim.matrix_lr"
        )
    metrics.summary({"finished": True, **summary})
    report.write_run_report(folder.root)
    log.info(f"wrote {folder.final_model} after {summary['steps']} steps in {duration(summary['seconds'])}")


def link_copy(source: Path, target: Path) -> None:
    """Copy a folder, by hard links where the file system has them."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(source, temporary, copy_function=_link)
        replace_folder(temporary, target)
        fsync_folder(target.parent)
    except OSError as error:
        raise cannot_write(target, error) from error


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def finished(folder: RunFolder) -> bool:
    """True when the run folder's summary says that the run is complete."""
    try:
        return json_text.read(folder.summary).get("finished") is True
    except (OSError, ValueError, AttributeError):
        return False


Evaluator = Callable[[int], dict[str, Any]]
