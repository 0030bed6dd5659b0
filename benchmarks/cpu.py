"""The facts about CPUs that the device layer stands on.

    python benchmarks/cpu.py [formats] [operators] [memory] [spin]

`formats`: matrix products in fp32 and bf16. `operators`: RMSNorm and rotary embedding with their gradients written out
against the composed forms, one thread, CPU time. `memory`: training steps with and without the C library keeping freed
blocks. `spin`: training steps with threads that wait spinning (libgomp's default) and not, on the machine as it is and
with one busy process beside.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paired import Turns, alternate, in_own_process, table
from pretrain import Task, ours, prepare, task


def best(work: Callable[[], Any], clock: Callable[[], float], times: int = 60) -> float:
    found = float("inf")
    for _ in range(times):
        start = clock()
        work()
        found = min(found, clock() - start)
    return found


def formats() -> None:
    import torch

    left, right = torch.randn(2048, 256), torch.randn(256, 768)
    clocks: tuple[tuple[int, Callable[[], float], str], ...] = (
        (torch.get_num_threads(), time.perf_counter, "wall"),
        (1, time.thread_time, "CPU time"),
    )
    for threads, clock, what in clocks:
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
            a, b = left.to(dtype), right.to(dtype)
            seconds = best(lambda a=a, b=b: a @ b, clock, 300)
            rate = 2 * 2048 * 256 * 768 / seconds / 1e9
            print(f"2048 x 256 x 768, {dtype}, {threads} threads, {what}: {rate:.0f} GFLOP/s")


def operators() -> None:
    import torch

    from anabatic.device.ops import OPS_BY_KERNEL, REFERENCE_OPS

    torch.set_num_threads(1)
    cos, sin = torch.randn(1, 1, 4096, 32), torch.randn(1, 1, 4096, 32)
    hidden, heads = torch.randn(1, 4096, 128), torch.randn(1, 4096, 4, 32)
    cases: list[tuple[str, Callable[[Any, Any], Any], Any]] = [
        (
            "RMSNorm, 4096 x 128",
            lambda ops, x: ops.rms_norm(x, torch.ones(x.shape[-1], requires_grad=True), 1e-6),
            hidden,
        ),
        ("RMSNorm, 4096 x 4 x 32", lambda ops, x: ops.rms_norm(x, torch.ones(32, requires_grad=True), 1e-6), heads),
        ("rotary, 4096 x 4 x 32", lambda ops, x: ops.rotary(x, cos, sin), heads.transpose(1, 2)),
    ]
    for name, apply, data in cases:
        data.requires_grad_()
        grad = torch.randn_like(data)
        forms = {
            form: best(lambda ops=ops, x=data, f=apply, g=grad: torch.autograd.grad(f(ops, x), x, g), time.thread_time)
            for form, ops in (("composed", REFERENCE_OPS), ("written out", OPS_BY_KERNEL["cpu"]))
        }
        ratio = forms["composed"] / forms["written out"]
        print(f"{name}: " + ", ".join(f"{form} {1e3 * t:.2f} ms" for form, t in forms.items()) + f", {ratio:.2f} x")


def _fresh_pages(turns: Turns, what: Task) -> None:
    from anabatic.device import device

    device.__dict__["_keep_freed_memory"] = lambda: None
    ours(turns, what, "muon")


def memory(what: Task) -> None:
    sides: dict[str, Any] = {"fresh pages": (_fresh_pages, (what,)), "kept": (ours, (what, "muon"))}
    table(alternate(sides, rounds=7, seconds=2.5, warm_up=4.0), "fresh pages")


def _spinning(turns: Turns, what: Task) -> None:
    os.environ.pop("GOMP_SPINCOUNT", None)  # torch, which reads it, is not loaded yet
    ours(turns, what, "muon")


def _burn() -> None:
    while True:
        pass


def spin(what: Task) -> None:
    sides: dict[str, Any] = {"default": (_spinning, (what,)), "GOMP_SPINCOUNT=1000": (ours, (what, "muon"))}
    for busy in (0, 1):
        others = [multiprocessing.get_context("spawn").Process(target=_burn, daemon=True) for _ in range(busy)]
        for other in others:
            other.start()
        print(f"{busy} busy processes beside; load before: {os.getloadavg()[0]:.1f}")
        table(alternate(sides, rounds=7, seconds=2.5, warm_up=4.0), "default")
        for other in others:
            other.terminate()


def main() -> None:
    wanted = sys.argv[1:] or ["formats", "operators", "memory", "spin"]
    if "formats" in wanted:
        in_own_process(formats)
    if "operators" in wanted:
        in_own_process(operators)
    steps = [name for name in ("memory", "spin") if name in wanted]
    if not steps:
        return
    with tempfile.TemporaryDirectory() as temporary:
        in_own_process(prepare, Path(temporary), ["demo/sources"])
        for name in steps:
            {"memory": memory, "spin": spin}[name](task(Path(temporary), "demo/sources"))


if __name__ == "__main__":
    main()
