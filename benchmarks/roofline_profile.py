"""Where a step's time goes, by operator: torch's profiler around steps of a side of `paired.alternate`."""

from __future__ import annotations

import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from paired import Over

WARM_UP, STEPS = 4, 10

GROUPS = ("products", "attention", "elementwise", "loss", "optimizer", "copies, casts", "Python, rest")
"""`elementwise`: norms, rotary embeddings, activations, residual sums. `Python, rest`: the time outside operators."""
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "mkldnn_linear", "dot"}
_COPIES = {
    "copy", "cat", "index_select", "index", "index_copy", "clone", "fill", "zero", "zeros", "stack", "gather",
    "embedding_dense_backward", "index_put", "_index_put_impl", "_local_scalar_dense",
}  # fmt: skip
_LOSSES = {"_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward"}
_ELEMENTWISE = {
    "mul", "add", "sub", "div", "silu", "silu_backward", "pow", "mean", "rsqrt", "neg", "addcmul", "sum", "exp", "log",
    "square", "sqrt", "linalg_vector_norm", "rms_norm", "sigmoid", "sigmoid_backward", "relu", "threshold_backward",
    "tanh", "cos", "sin", "amax", "max", "argmax", "scatter_add", "where", "clamp", "lerp", "masked_fill", "abs",
    "_softmax", "cumsum", "isfinite", "eq", "ne", "lt", "gt", "le", "ge", "bitwise_and", "logical_and", "reciprocal",
}  # fmt: skip


def group_of(name: str, parents: list[str]) -> str | None:
    """Return the group of an event by its name and what it was called from; None: it only calls others."""
    short = name.removeprefix("aten::").rstrip("_")
    if short in _PRODUCTS:
        return "products"
    if "scaled_dot_product" in name:
        return "attention"
    if any("Optimizer.step" in parent for parent in parents) or name.startswith(("aten::_fused", "aten::_foreach")):
        return "optimizer"
    if short in _LOSSES or any("CrossEntropy" in parent for parent in [name, *parents]):
        return "loss"
    if "RmsNorm" in name or "Rotary" in name or "graph" in name or short in _ELEMENTWISE:
        return "elementwise"
    return "copies, casts" if short in _COPIES else None


class _Profiling:
    """Takes the place of `paired.Turns`: some steps to warm up, some under the profiler, then the end."""

    def __init__(self, line: Connection) -> None:
        self.line, self.number = line, 0
        self.profiler: Any = None

    def begin(self, **_: Any) -> None:
        """Nothing to wait for."""

    def step(self, _: int) -> None:
        """Count a step."""
        import torch

        self.number += 1
        if self.number == WARM_UP:
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profiler.__enter__()
        elif self.number == WARM_UP + STEPS:
            self.profiler.__exit__(None, None, None)
            self.line.send(_shares(self.profiler.events()))
            raise Over


def _shares(events: Any) -> dict[str, float]:
    spent: dict[str, float] = defaultdict(float)
    first = min(event.time_range.start for event in events)
    last = max(event.time_range.end for event in events)
    for event in events:
        parents, above = [], event.cpu_parent
        while above is not None:
            parents.append(above.name)
            above = above.cpu_parent
        group = group_of(event.name, parents)
        if group is not None:
            spent[group] += event.self_cpu_time_total
    whole = last - first
    shares = {group: spent[group] / whole for group in GROUPS[:-1]}
    return {**shares, GROUPS[-1]: max(0.0, 1 - sum(shares.values()))}


def _child(work: Callable[..., None], line: Connection, arguments: tuple[Any, ...]) -> None:
    with suppress(Over):
        work(_Profiling(line), *arguments)
    line.close()
    os._exit(0)


def profile(work: Callable[..., None], arguments: tuple[Any, ...]) -> dict[str, float]:
    """Run a side by itself and return the share of its time that each group takes."""
    context = multiprocessing.get_context("spawn")
    line, other = context.Pipe()
    process = context.Process(target=_child, args=(work, other, arguments))
    process.start()
    other.close()
    try:
        shares: dict[str, float] = line.recv()
    except EOFError:
        process.join()
        raise SystemExit(f"a profiled side ended with exit code {process.exitcode}") from None
    process.join()
    return shares
