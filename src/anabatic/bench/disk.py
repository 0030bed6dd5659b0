"""`anabatic bench io`: a model and a checkpoint written and read as a training does, and batches of the loader.

Written is what is synced to the disk. Read is once from the page cache, and once with its pages given up before
(posix_fadvise(2), POSIX_FADV_DONTNEED: synced pages leave the cache, but the disk may have a cache of its own).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from anabatic.bench import machine, synthetic, written
from anabatic.bench import model as models
from anabatic.bench.figures import Figure, Result
from anabatic.config.bench import BenchIoJob
from anabatic.config.shared import Data
from anabatic.core.paths import RunFolder, require_space
from anabatic.data import shards
from anabatic.data.loader import Loader
from anabatic.device.device import Device, pick
from anabatic.evals.progress import Bar
from anabatic.models.hf import load_model, save_model
from anabatic.parallel.world import World
from anabatic.train import checkpoint

_BATCHES = 50
"""Of a measurement."""
_LENGTH = 512
_SEQ_LEN = 1024


@dataclass
class _Clock:
    """Seconds by name, the warm-up left out."""

    counts: bool = False
    taken: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        """Call, and keep its seconds."""
        begun = time.perf_counter()
        found = call()
        seconds = time.perf_counter() - begun
        if self.counts:
            self.taken.setdefault(name, []).append(seconds)
        return found


def run(job: BenchIoJob) -> int:
    """Measure as the job says; return the exit code.

    Raises:
        ConfigError, DataError: the model cannot be used.
        Failure: the disk is too small, or refuses writes.
    """
    load = written.begin(job)
    out = Path(job.out).expanduser()
    device = pick(job.device)
    clock = _Clock()
    with tempfile.TemporaryDirectory(dir=out, prefix=".bench-") as made:
        folder = Path(made)
        model, tokenizer, what = models.loaded(job.model, job.depth, folder / "tokenizer", device)
        held = sum(one.nbytes for one in model.parameters())
        require_space(folder, 2.2 * held)
        loader = _loader(job, folder)
        with Bar("repeats", job.warm_up + job.repeats) as bar, loader:
            for number in range(job.warm_up + job.repeats):
                clock.counts = number >= job.warm_up
                _model(clock, model, tokenizer, folder / "model", device)
                _checkpoint(clock, model, folder, device)
                tokens = clock.time("batches read", lambda: sum(next(loader).num_tokens for _ in range(_BATCHES)))
                bar.to(number + 1)
    figures = [Figure(name, "B/s", tuple(held / one for one in taken))
               for name, taken in clock.taken.items() if name != "batches read"]  # fmt: skip
    figures.append(Figure("batches read", "tokens/s", tuple(tokens / one for one in clock.taken["batches read"])))
    where = machine.facts(load, device.name)
    result = Result("io", f"{what}, {held / 2**20:,.0f} MiB; files in {out}", figures, asdict(job), where,
                    notes=machine.notes(where))  # fmt: skip
    written.finish(job, result)
    return 0


def _model(clock: _Clock, model: PreTrainedModel, tokenizer: Any, folder: Path, device: Device) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    clock.time("model saved", lambda: save_model(model, folder, tokenizer))
    clock.time("model loaded", lambda: _load(folder, device))
    _give_up(folder)
    clock.time("model loaded, not cached", lambda: _load(folder, device))


def _load(folder: Path, device: Device) -> None:
    load_model(folder, device.torch, device.dtype)
    device.synchronize()


def _checkpoint(clock: _Clock, model: PreTrainedModel, folder: Path, device: Device) -> None:
    """The weights alone: what a training adds are tensors of the same kind."""
    run = RunFolder(folder / "run")
    shutil.rmtree(run.root, ignore_errors=True)
    run.create()
    run.config.write_text("{}\n", encoding="utf-8")
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    content = checkpoint.Content(tensors, device.rng_state(), "{}")
    checkpoint.quiet()
    path = clock.time("checkpoint saved", lambda: checkpoint.save(run, 1, content, World()))
    clock.time("checkpoint loaded", lambda: checkpoint.read(path, tensors, World()))
    _give_up(path)
    clock.time("checkpoint loaded, not cached", lambda: checkpoint.read(path, tensors, World()))


def _give_up(folder: Path) -> None:
    """Let the page cache forget the files of a folder."""
    for file in folder.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def _loader(job: BenchIoJob, folder: Path) -> Loader:
    """Batches of made-up conversations, as `anabatic sft` reads them."""
    tokens = synthetic.tokenizer(folder / "words")
    rows = folder / "rows.jsonl"
    synthetic.rows(rows, "sft", tokens, _LENGTH, 200_000)
    data = replace(Data(), train=[str(rows)], valid=["none"], cache=str(folder / "cache"))
    made = shards.build(str(rows), tokens, data, "train", seq_len=_SEQ_LEN)
    return Loader([(made, None)], seq_len=_SEQ_LEN, micro_batch_tokens=job.batch_tokens)
