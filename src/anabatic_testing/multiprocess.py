"""Run a function in several processes that form a gloo group, as a job on several devices would."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

_PRELOADED_MODULES = (
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
)
"""Imported once by the process that ranks are forked from: a rank that starts cold imports for four seconds."""


def find_free_port() -> int:
    """Return a port that nothing listens on, outside the range from which connections get theirs.

    One of that range (ip(7), `ip_local_port_range`) may be a connection's before the caller opens it.
    """
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except OSError:  # not Linux
        first = 49152  # RFC 6335, section 6
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(min(10_000, first // 2), first)))
            return int(probe.getsockname()[1])


def spawn_ranks(function: Callable[..., None], world_size: int, *args: Any) -> None:
    """Call `function(*args)` in `world_size` processes with RANK, WORLD_SIZE and a rendezvous set.

    `function` must be importable (defined at the top of a module). An exception in any process is raised here.
    """
    context = _start_ranks(function, world_size, args)
    while not context.join():  # returns when one of them has ended
        pass


def run_mortal_ranks(function: Callable[..., None], world_size: int, *args: Any) -> list[int]:
    """Do as `spawn_ranks`, but let the other processes run when one dies; return the exit codes of all."""
    context = _start_ranks(function, world_size, args)
    for process in context.processes:
        process.join()
    return [process.exitcode for process in context.processes]


def _start_ranks(
    function: Callable[..., None], world_size: int, args: tuple[Any, ...]
) -> multiprocessing.ProcessContext:
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOADED_MODULES))
    arguments = (world_size, find_free_port(), dict(os.environ), function, args)
    with warnings.catch_warnings():
        # A test that ends all children of this process ends multiprocessing's tracker too, which is started again.
        warnings.filterwarnings("ignore", "resource_tracker: process died unexpectedly", UserWarning)
        started = multiprocessing.start_processes(
            _run_rank, arguments, nprocs=world_size, join=False, start_method="forkserver"
        )
    assert started is not None
    return started


def _run_rank(
    rank: int,
    world_size: int,
    port: int,
    environment: dict[str, str],
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()  # the server's are those of its own start
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    function(*args)
