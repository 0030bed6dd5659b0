"""`anabatic bench io`: a model and a checkpoint written and read as a training does, and batches of the loader.

Written is what is synced to the disk. Read is once from the page cache, and once with its pages given up before
(posix_fadvise(2), POSIX_FADV_DONTNEED: synced pages leave the cache, but the disk may have its own cache).
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

from anabatic.bench import benchmark_model as models
from anabatic.bench import environment_info, result_files, synthetic_data
from anabatic.bench.measurements import BenchMetric, BenchResult
from anabatic.config.bench import BenchIoJob
from anabatic.config.sections.common import Data
from anabatic.core.paths import RunFolder, require_space
from anabatic.core.progress import ProgressBar
from anabatic.data.batching.loader import Loader
from anabatic.data.shards import dataset_cache
from anabatic.device.device import Device, select_device
from anabatic.models.pretrained import load_model, save_model
from anabatic.parallel.world import World
from anabatic.train.checkpoint import storage

_BATCHES_PER_REPEAT = 50
"""Of a measurement."""
_ROW_TOKENS = 512
_SEQ_LEN = 1024


@dataclass
class _Stopwatch:
    """Seconds by name, the warm-up left out."""

    is_recording: bool = False
    seconds_by_name: dict[str, list[float]] = field(default_factory=dict)

    def time_call(self, name: str, call: Callable[[], Any]) -> Any:
        """Call, and keep its seconds."""
        start = time.perf_counter()
        found = call()
        seconds = time.perf_counter() - start
        if self.is_recording:
            self.seconds_by_name.setdefault(name, []).append(seconds)
        return found


def run(job: BenchIoJob) -> int:
    """Measure as the job says; return the exit code.

    Raises:
        ConfigError, DataError: the model cannot be used.
        Failure: the disk is too small, or refuses writes.
    """
    load = result_files.prepare_output(job)
    out = Path(job.out).expanduser()
    device = select_device(job.device)
    clock = _Stopwatch()
    with tempfile.TemporaryDirectory(dir=out, prefix=".bench-") as temporary:
        folder = Path(temporary)
        model, tokenizer, what = models.load_benchmark_model(job.model, job.depth, folder / "tokenizer", device)
        model_bytes = sum(one.nbytes for one in model.parameters())
        require_space(folder, 2.2 * model_bytes)
        loader = _build_loader(job, folder)
        with ProgressBar("repeats", job.warm_up + job.repeats) as bar, loader:
            for number in range(job.warm_up + job.repeats):
                clock.is_recording = number >= job.warm_up
                _measure_model_io(clock, model, tokenizer, folder / "model", device)
                _measure_checkpoint_io(clock, model, folder, device)
                tokens = clock.time_call(
                    "batches read", lambda: sum(next(loader).num_tokens for _ in range(_BATCHES_PER_REPEAT))
                )
                bar.update(number + 1)
    figures = [
        BenchMetric(name, "B/s", tuple(model_bytes / one for one in taken))
        for name, taken in clock.seconds_by_name.items()
        if name != "batches read"
    ]
    figures.append(
        BenchMetric("batches read", "tokens/s", tuple(tokens / one for one in clock.seconds_by_name["batches read"]))
    )
    where = environment_info.collect_environment(load, device.name)
    result = BenchResult(
        "io",
        f"{what}, {model_bytes / 2**20:,.0f} MiB; files in {out}",
        figures,
        asdict(job),
        where,
        notes=environment_info.caveat_notes(where),
    )
    result_files.write_results(job, result)
    return 0


def _measure_model_io(clock: _Stopwatch, model: PreTrainedModel, tokenizer: Any, folder: Path, device: Device) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    clock.time_call("model saved", lambda: save_model(model, folder, tokenizer))
    clock.time_call("model loaded", lambda: _load_and_sync(folder, device))
    _drop_page_cache(folder)
    clock.time_call("model loaded, not cached", lambda: _load_and_sync(folder, device))


def _load_and_sync(folder: Path, device: Device) -> None:
    load_model(folder, device.torch_device, device.dtype)
    device.synchronize()


def _measure_checkpoint_io(clock: _Stopwatch, model: PreTrainedModel, folder: Path, device: Device) -> None:
    """The weights alone: what a training adds are tensors of the same kind."""
    run = RunFolder(folder / "run")
    shutil.rmtree(run.root, ignore_errors=True)
    run.create_folder()
    run.config.write_text("{}\n", encoding="utf-8")
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    content = storage.CheckpointContent(tensors, device.get_rng_state(), "{}")
    storage.ignore_dcp_warnings()
    path = clock.time_call("checkpoint saved", lambda: storage.save_checkpoint(run, 1, content, World()))
    clock.time_call("checkpoint loaded", lambda: storage.read_tensors(path, tensors, World()))
    _drop_page_cache(path)
    clock.time_call("checkpoint loaded, not cached", lambda: storage.read_tensors(path, tensors, World()))


def _drop_page_cache(folder: Path) -> None:
    """Let the page cache forget the files of a folder."""
    for file in folder.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def _build_loader(job: BenchIoJob, folder: Path) -> Loader:
    """Batches of made-up conversations, as `anabatic sft` reads them."""
    tokens = synthetic_data.write_synthetic_tokenizer(folder / "words")
    rows = folder / "rows.jsonl"
    synthetic_data.write_synthetic_rows(rows, "sft", tokens, _ROW_TOKENS, 200_000)
    data = replace(Data(), train=[str(rows)], valid=["none"], cache=str(folder / "cache"))
    dataset = dataset_cache.build_dataset(str(rows), tokens, data, "train", seq_len=_SEQ_LEN)
    return Loader([(dataset, None)], seq_len=_SEQ_LEN, micro_batch_tokens=job.batch_tokens)
