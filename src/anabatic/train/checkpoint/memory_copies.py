"""Copies of the training's state in the memory of its machines, each machine's also in its neighbour's.

A step is copied into this machine's memory while the training waits; a thread then checksums and seals it and sends
it to the next machine. Tensors that every rank holds whole are kept once on each machine and not sent. The copies of a
step replace the older ones when every rank has them. After a machine was lost, the one in its place gets its part from
the neighbour, and all continue from the newest step of which every part exists somewhere. Copies in peers' memory:
Gemini (Wang et al., SOSP 2023).
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anabatic.config.sections.train_jobs import LoopJob
from anabatic.core import json_reader, log
from anabatic.core.errors import ConfigError, Failure
from anabatic.core.formatting import format_size
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.device.device import Device, get_free_host_memory
from anabatic.parallel.collectives import all_gather_text, barrier, broadcast_text
from anabatic.parallel.mesh import RankGroup
from anabatic.parallel.sharded_tensors import is_sharded, to_local
from anabatic.parallel.world import World, create_side_group
from anabatic.train.checkpoint.memory_store import (
    MEMORY_DIR_VARIABLE,
    MemoryStore,
    ShardBuffer,
    StateShard,
    copy_tensors,
    get_memory_folder,
    remove_memory_folder,
)
from anabatic.train.checkpoint.run_state import RunState
from anabatic.train.metrics.device_stats import count_local_processes

RUN_ID_FILE = ".memory-run"
"""In the run folder: which run the copies are of. A run folder that was removed or started over has another one."""
_MESSAGE_BYTES = 256 << 20
_FINAL_WAIT_SECONDS = 5.0
_RNG = "rng."
_SIDE_GROUP = ("copies in memory", "--save.memory-every 0")


@dataclass(frozen=True)
class MemoryCopy:
    """A step whose parts this rank needs are in this machine's memory: names of the parts in the store."""

    store: MemoryStore
    step: int
    own: str
    shared: str
    host: dict[str, Any]

    @property
    def path(self) -> Path:
        """Where it is, for messages."""
        return self.store.folder / self.own

    def load(self, tensors: Mapping[str, Tensor], device: Device) -> None:
        """Fill `tensors` in layout, and restore this rank's random numbers.

        Raises:
            CheckpointError: the tensors are other ones; nothing was copied.
        """
        own = self.store.read_tensors(self.own)
        found = {**self.store.read_tensors(self.shared), **own}
        with torch.no_grad():
            copy_tensors(found, {name: to_local(tensor) for name, tensor in tensors.items()}, self.path)
        states = {name.removeprefix(_RNG): value.clone() for name, value in own.items() if name.startswith(_RNG)}
        device.set_rng_state(states)


@dataclass(frozen=True)
class _RankLayout:
    """Where a rank is: machines have `local_size` ranks each, in order."""

    rank: int
    size: int
    local_size: int

    @property
    def machine(self) -> int:
        return self.rank // self.local_size

    @property
    def is_first(self) -> bool:
        """On its machine."""
        return self.rank % self.local_size == 0

    @property
    def machines(self) -> int:
        return self.size // self.local_size


def _find_rank_layout(world: World) -> _RankLayout:
    """Return the position of this rank among machines and processes.

    Raises:
        ConfigError: the machines have different numbers of processes.
    """
    local = count_local_processes()
    counts = all_gather_text(str(local), world)
    if len(set(counts)) > 1 or world.size % local:
        raise ConfigError(
            f"save.memory_every needs as many processes on every machine, here are {' and '.join(sorted(set(counts)))}",
            "start the same number on each, or set --save.memory-every 0",
        )
    return _RankLayout(world.rank, world.size, local)


def _open_store(job: LoopJob, folder: RunFolder, world: World) -> MemoryStore:
    path, text = folder.root / RUN_ID_FILE, ""
    if world.is_main_process:
        if not path.is_file():
            write_atomic(path, uuid.uuid4().hex)
        text = path.read_text(encoding="utf-8", errors="replace")
    setup = json.dumps({"world_size": world.size, "parallel": asdict(job.parallel)}, sort_keys=True)
    return MemoryStore(get_memory_folder(folder.root), broadcast_text(text, world), setup)


def find_memory_copy(job: LoopJob, folder: RunFolder, world: World) -> MemoryCopy | None:
    """Return the newest step of which all parts are in the machines' memory; every rank calls this.

    Parts that a machine lacks are fetched from one that has them. All other copies are removed.

    Raises:
        Failure: the folder in memory cannot be used, or a part was damaged on its way.
    """
    if not job.save.memory_every:
        if world.rank % count_local_processes() == 0:
            remove_memory_folder(folder.root)
        return None
    layout = _find_rank_layout(world)
    store = _open_store(job, folder, world)
    own = store.list_whole_shards() if layout.is_first else []
    text = json.dumps([[part.key, part.step, part.name] for part in own])
    lists = [
        [StateShard(*row) for row in json_reader.loads(line)]
        for line in all_gather_text(text, world)[:: layout.local_size]
    ]
    step = _choose_step(lists, layout)
    if step is None:
        known = sorted({part.step for parts in lists for part in parts}, reverse=True)
        if known:
            log.warn(f"the copies in memory are not used: of step {known[0]} {_name_missing(lists, known[0], layout)}")
        if layout.is_first:
            store.remove_except([])
        barrier(world)
        return None
    names = [{part.key: part.name for part in parts if part.step == step} for parts in lists]
    _fetch_missing(store, names, step, layout, world)
    barrier(world)
    if layout.is_first:
        store.remove_except(names[layout.machine].values())
    barrier(world)
    mine = names[layout.machine]
    host = json_reader.loads(store.read_seal(mine["shared"])["host"])
    return MemoryCopy(store, step, mine[f"rank-{layout.rank}"], mine["shared"], host)


def _list_keys(layout: _RankLayout) -> list[str]:
    return ["shared", *(f"rank-{rank}" for rank in range(layout.size))]


def _choose_step(lists: list[list[StateShard]], layout: _RankLayout) -> int | None:
    keys: dict[int, set[str]] = {}
    for parts in lists:
        for part in parts:
            keys.setdefault(part.step, set()).add(part.key)
    wanted = set(_list_keys(layout))
    return max((step for step, found in keys.items() if found >= wanted), default=None)


def _name_missing(lists: list[list[StateShard]], step: int, layout: _RankLayout) -> str:
    found = {part.key for parts in lists for part in parts if part.step == step}
    missing = [key for key in _list_keys(layout) if key not in found]
    return f"no machine has {missing[0]}" + (f" and {len(missing) - 1} more parts" if len(missing) > 1 else "")


def _fetch_missing(
    store: MemoryStore, names: list[dict[str, str]], step: int, layout: _RankLayout, world: World
) -> None:
    """Send each machine the parts of its ranks that it lacks; `names` learns of them.

    Every rank goes through the same list in the same order, so that no two wait for each other.
    """
    lacking = []
    for machine, known in enumerate(names):
        ranks = range(machine * layout.local_size, (machine + 1) * layout.local_size)
        for key, taker in [("shared", ranks[0]), *((f"rank-{rank}", rank) for rank in ranks)]:
            if key not in known:
                lacking.append((key, machine, taker))
    if not lacking:
        return
    log.info(f"step {step}: {len(lacking)} parts come from the memory of other machines")
    held = [dict(known) for known in names]
    group = create_side_group(world, *_SIDE_GROUP)
    for key, machine, taker in lacking:
        source = next(number for number, known in enumerate(held) if key in known)
        giver = source * layout.local_size + taker % layout.local_size
        name = f"{key}.{machine if key == 'shared' else 'own'}-{step}"
        names[machine][key] = name
        if layout.rank == giver:
            sent = held[source][key]
            _exchange(group, store.read_seal(sent), store.open_shard(sent), taker, None, None)
        elif layout.rank == taker:
            _exchange(group, None, None, None, giver, (store, name))
    dist.destroy_process_group(group.process_group)


def _exchange(
    group: RankGroup,
    seal: Mapping[str, Any] | None,
    content: Tensor | None,
    to: int | None,
    source: int | None,
    target: tuple[MemoryStore, str] | None,
) -> None:
    """Send a part to rank `to` and, at the same time, receive one from rank `source` and seal it.

    Raises:
        Failure: what came does not match its checksum.
    """
    text = torch.frombuffer(bytearray(json.dumps(seal).encode()), dtype=torch.uint8) if to is not None else None
    count = torch.zeros(1, dtype=torch.int64)
    _pass_on(group, None if text is None else torch.tensor([len(text)]), to, None if source is None else count, source)
    incoming = torch.empty(int(count), dtype=torch.uint8) if source is not None else None
    _pass_on(group, text, to, incoming, source)
    if incoming is None or target is None:
        _pass_on(group, content, to, None, None)
        return
    store, name = target
    new = json_reader.loads(bytes(incoming.tolist()).decode())
    part = ShardBuffer(store.folder / f"{name}.bin", new["bytes"])
    _pass_on(group, content, to, part.bytes, source)
    if part.compute_crc32() != new["crc32"]:
        raise Failure(
            f"a copy in memory was damaged on its way from rank {source}",
            "run `anabatic doctor` on both machines; without copies: --save.memory-every 0",
        )
    store.seal(name, new)


def _pass_on(
    group: RankGroup, sent: Tensor | None, to: int | None, received: Tensor | None, source: int | None
) -> None:
    """Send and receive at the same time, in messages of limited size."""
    outgoing = list(sent.split(_MESSAGE_BYTES)) if sent is not None and len(sent) else []
    incoming = list(received.split(_MESSAGE_BYTES)) if received is not None and len(received) else []
    for number in range(max(len(outgoing), len(incoming))):
        work = []
        if number < len(outgoing):
            work.append(dist.isend(outgoing[number], to, group=group.process_group))
        if number < len(incoming):
            work.append(dist.irecv(incoming[number], source, group=group.process_group))
        for one in work:
            if one is not None:
                one.wait()


class MemoryCopies:
    """Makes the copies of one training. Every rank has one and calls the same methods; off with `memory_every` 0."""

    def __init__(self, job: LoopJob, folder: RunFolder, device: Device, world: World) -> None:
        self._job, self._folder, self._device, self._world = job, folder, device, world
        self._store: MemoryStore | None = None
        self._layout = _RankLayout(world.rank, world.size, world.size)
        self._group = RankGroup()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def is_due(self, step: int) -> bool:
        """Return whether a step is copied."""
        every = self._job.save.memory_every
        return every > 0 and step % every == 0

    def save(self, step: int, tensors: Mapping[str, Tensor], state: RunState) -> None:
        """Copy a step into this machine's memory, after the copy under way; a thread does the rest.

        Raises:
            Failure: the memory is too small, or the copy before could not be sent.
        """
        self.wait()
        layout = self._layout
        own = {name: to_local(tensor.detach()) for name, tensor in tensors.items() if is_sharded(tensor)}
        own |= {f"{_RNG}{name}": value for name, value in self._device.get_rng_state().items()}
        shared = {name: tensor.detach() for name, tensor in tensors.items() if not is_sharded(tensor)}
        store = self._store or self._start_copies(own, shared)
        layout = self._layout
        names = [f"rank-{layout.rank}.own-{step}"]
        parts = [store.write_tensors(names[0], own)]
        if layout.is_first:
            names.append(f"shared.{layout.machine}-{step}")
            parts.append(store.write_tensors(names[1], shared))
        host = json.dumps(state.to_json())
        work = (store, step, list(zip(names, parts, strict=True)), host)
        self._thread = threading.Thread(target=self._finish_in_thread, args=work, name="memory-copies", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the copy under way.

        Raises:
            Failure: it could not be made.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def discard(self) -> None:
        """Remove the copies: the training went back, and they are of a course that it has left."""
        self.wait()
        if self._store is not None and self._layout.is_first:
            self._store.remove_except([])
        barrier(self._world)

    def _start_copies(self, own: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> MemoryStore:
        """Open the store and say what it costs.

        Raises:
            Failure: the machine has too little memory.
        """
        layout = self._layout = _find_rank_layout(self._world)
        store = self._store = _open_store(self._job, self._folder, self._world)
        self._group = create_side_group(self._world, *_SIDE_GROUP)
        copies = 1 if layout.machines == 1 else 2
        each = sum(tensor.nbytes for tensor in own.values())
        kept = copies * layout.local_size * each + sum(tensor.nbytes for tensor in shared.values())
        # Of a run that continues one set is there already.
        needed = kept * (1 if any(store.folder.glob("*.json")) else 2)
        disk = os.statvfs(store.folder)
        free = min(disk.f_bavail * disk.f_frsize, get_free_host_memory())
        # Together, before anyone writes: what a rank of this machine has written would count as missing.
        if any(all_gather_text("1" if free < needed else "", self._world)):
            raise Failure(
                f"copies in memory need {format_size(needed)} more of each machine while one is made;"
                f" {format_size(free)} are free in {store.folder.parent} here",
                f"enlarge it (docker run --shm-size), give {MEMORY_DIR_VARIABLE} another folder in memory, or set"
                " --save.memory-every 0",
            )
        log.info(
            f"every {self._job.save.memory_every} steps a copy goes to {store.folder}"
            f"{' and to the next machine' if layout.machines > 1 else ''}:"
            f" {format_size(kept)} of each machine's memory, {format_size(2 * kept)} while one is made"
        )
        return store

    def _finish_in_thread(self, *work: Any) -> None:
        try:
            self._finish(*work)
        except BaseException as error:  # raised where the training asks
            self._error = error

    def _finish(
        self, store: MemoryStore, step: int, parts: list[tuple[str, tuple[ShardBuffer, dict[str, Any]]]], host: str
    ) -> None:
        layout = self._layout
        seals = [{**seal, "host": host, "crc32": part.compute_crc32()} for _, (part, seal) in parts]
        if layout.machines > 1:
            source = (layout.rank - layout.local_size) % layout.size
            held = f"rank-{source}.held-{step}"
            to = (layout.rank + layout.local_size) % layout.size
            _exchange(self._group, seals[0], parts[0][1][0].bytes, to, source, (store, held))
        for (name, _), seal in zip(parts, seals, strict=True):
            store.seal(name, seal)
        barrier(self._group)  # every rank has the new step: the one before is not needed any more
        if layout.is_first:
            store.remove_older(step)

    def __enter__(self) -> MemoryCopies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the copies after a training that has saved itself; keep them after a failure."""
        if kind is None:
            self.wait()
            if self._layout.is_first and self._job.save.memory_every:
                remove_memory_folder(self._folder.root)
        elif self._thread is not None:
            self._thread.join(_FINAL_WAIT_SECONDS)
