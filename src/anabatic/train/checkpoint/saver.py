"""When a checkpoint is written: before the training continues, or in its own thread meanwhile.

In the background the training waits only while tensors are copied to the host's memory, into the same memory each time
(page-locked where the device copies faster from it); a thread of each rank then writes as `storage.save_checkpoint`
does, over a process group of its own. One checkpoint is written at a time. Snapshot first, write later: CheckFreq
(Mohan et al., FAST 2021).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from anabatic.config.sections.common import Save
from anabatic.core import log
from anabatic.core.errors import CheckpointError
from anabatic.core.formatting import format_size
from anabatic.core.paths import RunFolder
from anabatic.device.device import Device, get_free_host_memory
from anabatic.parallel.collectives import all_reduce_sum
from anabatic.parallel.mesh import RankGroup
from anabatic.parallel.sharded_tensors import shard_like, to_local
from anabatic.parallel.world import World, create_side_group
from anabatic.train.checkpoint import manifest, storage
from anabatic.train.checkpoint.run_state import RunState
from anabatic.train.metrics.device_stats import count_local_processes

SMALL_CHECKPOINT_BYTES = 64 << 20
"""Bytes below which `auto` writes at once: little is won, and a kill in between would cost an interval."""
_FINAL_WAIT_SECONDS = 60.0
"""What a training that has failed waits for the checkpoint under way; without it the one before is used."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is whole.

    Attributes:
        seconds: from the beginning to the last sync; stall_seconds: of these the training has waited.
    """

    step: int
    path: Path
    seconds: float
    stall_seconds: float
    is_background: bool


class CheckpointSaver:
    """Writes the checkpoints of one training. Every rank has one and calls the same methods.

    Args:
        step: of the checkpoint that the training continues from.

    Attributes:
        step: of the last checkpoint that was begun.
    """

    def __init__(self, folder: RunFolder, config: Save, device: Device, world: World, step: int = 0) -> None:
        self._folder, self._config, self._device, self._world = folder, config, device, world
        self.step = step
        self._group: RankGroup | None = None
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._finished: list[SavedCheckpoint] = []
        self._error: BaseException | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: RunState, best: int | None = None) -> None:
        """Begin to write `checkpoint-<step>`, after the one under way; `take_finished` tells when it is whole.

        Args:
            tensors: name -> tensor, the same names on every rank.
            state: the same on every rank.
            best: step of the best evaluation, whose checkpoint is kept with `save.keep_best`.

        Raises:
            CheckpointError: too little space, or too little memory for `background: on`; nothing was written.
            Failure: the disk filled up or refuses writes; older checkpoints are untouched.
        """
        start = time.perf_counter()
        self.wait()
        storage.require_space(self._folder, step, tensors)
        storage.ignore_dcp_warnings()
        background = self._decide_background(tensors)
        held = self._copy_to_host(tensors) if background else tensors
        about = {"saved": time.time(), "world_size": self._world.size, **state.about}
        content = storage.CheckpointContent(
            held, self._device.get_rng_state(), json.dumps(state.to_json()), about, self._world.pipeline_group.size
        )
        also = {best} if best is not None and self._config.keep_best else set()
        work = (step, content, also, start, time.perf_counter() - start if background else None)
        self.step = step
        if not background:
            self._write_checkpoint(*work)
            return
        self._thread = threading.Thread(target=self._write_in_thread, args=work, name="saver", daemon=True)
        self._thread.start()

    def take_finished(self) -> list[SavedCheckpoint]:
        """Return the checkpoints that have become whole since the last call; does not wait.

        Raises:
            Failure: one could not be written.
        """
        if self._thread is not None and self._thread.is_alive():
            return []
        self.wait()
        done, self._finished = self._finished, []
        return done

    def wait(self) -> None:
        """Wait for the checkpoint under way.

        Raises:
            Failure: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write_in_thread(self, *work: Any) -> None:
        try:
            self._write_checkpoint(*work)
        except BaseException as error:  # raised where the training asks
            self._error = error

    def _write_checkpoint(
        self, step: int, content: storage.CheckpointContent, also: set[int], start: float, stall: float | None
    ) -> None:
        group = self._world if stall is None or self._group is None else self._group
        path = storage.save_checkpoint(self._folder, step, content, group)
        if group.rank == 0:
            manifest.remove_old_checkpoints(self._folder, self._config.keep_last, step, also)
        seconds = time.perf_counter() - start
        self._finished.append(
            SavedCheckpoint(step, path, seconds, seconds if stall is None else stall, stall is not None)
        )

    def _decide_background(self, tensors: Mapping[str, Tensor]) -> bool:
        """Decide once, for all ranks alike, and say why."""
        if self._group is not None:
            return self._group is not self._world
        wanted, why = self._choose_background(tensors)
        against = all_reduce_sum(torch.tensor(float(not wanted), device=self._device.torch_device), self._world)
        if wanted and against:
            wanted, why = False, "another rank's machine has too little memory for a copy"
        self._group = create_side_group(self._world) if wanted else self._world
        log.info(f"checkpoints are written {'in the background' if wanted else 'while the training waits'} ({why})")
        return wanted

    def _choose_background(self, tensors: Mapping[str, Tensor]) -> tuple[bool, str]:
        if self._config.background == "off":
            return False, "asked for"
        everything = sum(tensor.nbytes for tensor in tensors.values())
        if self._config.background != "on" and everything < SMALL_CHECKPOINT_BYTES:
            return False, f"auto: {format_size(everything)} need no copy"
        copies = count_local_processes() * sum(to_local(tensor).nbytes for tensor in tensors.values())
        free = get_free_host_memory()
        if self._config.background == "on":
            if free < copies:
                raise CheckpointError(
                    f"save.background is on, but a copy of {format_size(copies)} is too much for"
                    f" {format_size(free)} of free host memory",
                    "use --save.background auto, or start fewer processes on each machine",
                )
            return True, "asked for"
        if free < 2 * copies:
            return False, f"auto: a copy of {format_size(copies)} is too much for {format_size(free)} of free memory"
        return (
            True,
            f"auto: {format_size(everything)}, of which {format_size(copies)} are copied to this machine's memory",
        )

    @torch.no_grad()
    def _copy_to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in host memory of their own, as divided as they are."""
        pinned = self._device.device_row.pin_memory
        held = {}
        for name, tensor in tensors.items():
            part, known = to_local(tensor.detach()), self._copies.get(name)
            if known is None or known.shape != part.shape or known.dtype != part.dtype:
                known = torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned)
                self._copies[name] = known
            known.copy_(part, non_blocking=True)
            held[name] = shard_like(known, tensor)
        self._device.synchronize()
        return held

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the checkpoint under way; after a failure not for ever, other ranks may be gone."""
        if kind is None:
            self.wait()
        elif self._thread is not None and issubclass(kind, Exception):
            self._thread.join(_FINAL_WAIT_SECONDS)
            if self._error is not None and self._error is not error:
                log.warn(f"checkpoint-{self.step} was not saved: {self._error}")
