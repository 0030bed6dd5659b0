"""When a checkpoint is written: before the training goes on, or in a thread of its own meanwhile.

In the background the training waits only while tensors are copied to the host's memory, into the same memory each time
(page-locked where the device copies faster from it); a thread of each rank then writes as `checkpoint.save` does, over
a process group of its own. One checkpoint is written at a time. Snapshot first, write later: CheckFreq (Mohan et al.,
FAST 2021).
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

from anabatic.config.shared import Save
from anabatic.core import log
from anabatic.core.paths import RunFolder
from anabatic.core.text import size
from anabatic.device.device import Device, free_memory
from anabatic.parallel.sharded import like, local
from anabatic.parallel.world import Group, World, all_sum, side_group
from anabatic.train import checkpoint, manifest
from anabatic.train.watch import local_size

SMALL = 64 << 20
"""Bytes below which `auto` writes at once: little is won, and a kill in between would cost an interval."""
_LAST_SECONDS = 60.0
"""What a training that has failed waits for the checkpoint under way; without it the one before is used."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole.

    Attributes:
        seconds: from the beginning to the last sync; stall: of these the training has waited.
    """

    step: int
    path: Path
    seconds: float
    stall: float
    background: bool


class Saver:
    """Writes the checkpoints of one training. Every rank has one and calls the same methods.

    Args:
        step: of the checkpoint that the training continues from.

    Attributes:
        step: of the last checkpoint that was begun.
    """

    def __init__(self, folder: RunFolder, config: Save, device: Device, world: World, step: int = 0) -> None:
        self._folder, self._config, self._device, self._world = folder, config, device, world
        self.step = step
        self._group: Group | None = None
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._done: list[Saved] = []
        self._error: BaseException | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], host: dict[str, Any], best: int | None = None) -> None:
        """Begin to write `checkpoint-<step>`, after the one under way; `done` tells when it is whole.

        Args:
            tensors: name -> tensor, the same names on every rank.
            host: JSON-serialisable numbers, the same on every rank.
            best: step of the best evaluation, whose checkpoint is kept with `save.keep_best`.

        Raises:
            CheckpointError: too little space; nothing was written.
            Failure: the disk filled up or refuses writes; older checkpoints are untouched.
        """
        start = time.perf_counter()
        self.wait()
        checkpoint.require_space(self._folder, step, tensors)
        checkpoint.quiet()
        background = self._in_background(tensors)
        held = self._copy(tensors) if background else tensors
        about = {"saved": time.time(), "world_size": self._world.size, **host.get("about", {})}
        content = checkpoint.Content(held, self._device.rng_state(), json.dumps(host), about)
        also = {best} if best is not None and self._config.keep_best else set()
        work = (step, content, also, start, time.perf_counter() - start if background else None)
        self.step = step
        if not background:
            self._write(*work)
            return
        self._thread = threading.Thread(target=self._work, args=work, name="saver", daemon=True)
        self._thread.start()

    def done(self) -> list[Saved]:
        """Return the checkpoints that have become whole since the last call; does not wait.

        Raises:
            Failure: one could not be written.
        """
        if self._thread is not None and self._thread.is_alive():
            return []
        self.wait()
        done, self._done = self._done, []
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

    def _work(self, *work: Any) -> None:
        try:
            self._write(*work)
        except BaseException as error:  # raised where the training asks
            self._error = error

    def _write(self, step: int, content: checkpoint.Content, also: set[int], start: float, stall: float | None) -> None:
        group = self._world if stall is None or self._group is None else self._group
        path = checkpoint.save(self._folder, step, content, group)
        if group.rank == 0:
            manifest.prune(self._folder, self._config.keep_last, step, also)
        seconds = time.perf_counter() - start
        self._done.append(Saved(step, path, seconds, seconds if stall is None else stall, stall is not None))

    def _in_background(self, tensors: Mapping[str, Tensor]) -> bool:
        """Decide once, for all ranks alike, and say why."""
        if self._group is not None:
            return self._group is not self._world
        wanted, why = self._choose(tensors)
        against = all_sum(torch.tensor(float(not wanted), device=self._device.torch), self._world)
        if wanted and against:
            wanted, why = False, "another rank's machine has too little memory for a copy"
        self._group = side_group(self._world) if wanted else self._world
        log.info(f"checkpoints are written {'in the background' if wanted else 'while the training waits'} ({why})")
        return wanted

    def _choose(self, tensors: Mapping[str, Tensor]) -> tuple[bool, str]:
        if self._config.background != "auto":
            return self._config.background == "on", "asked for"
        everything = sum(tensor.nbytes for tensor in tensors.values())
        if everything < SMALL:
            return False, f"auto: {size(everything)} are little"
        copies = local_size() * sum(local(tensor).nbytes for tensor in tensors.values())
        free = free_memory()
        if free < 2 * copies:
            return False, f"auto: a copy of {size(copies)} is too much for {size(free)} of free memory"
        return True, f"auto: {size(everything)}, of which {size(copies)} are copied to this machine's memory"

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in host memory of their own, as divided as they are."""
        pinned = self._device.row.pin_memory
        held = {}
        for name, tensor in tensors.items():
            part, known = local(tensor.detach()), self._copies.get(name)
            if known is None or known.shape != part.shape or known.dtype != part.dtype:
                known = torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned)
                self._copies[name] = known
            known.copy_(part, non_blocking=True)
            held[name] = like(known, tensor)
        self._device.synchronize()
        return held

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the checkpoint under way; after a failure not for ever, other ranks may be gone."""
        if kind is None:
            self.wait()
        elif self._thread is not None and issubclass(kind, Exception):
            self._thread.join(_LAST_SECONDS)
            if self._error is not None and self._error is not error:
                log.warn(f"checkpoint-{self.step} was not saved: {self._error}")
