"""The clock that stands while torch compiles."""

from __future__ import annotations

import time

import torch

from anabatic.device.compile_time import CompileClock


def test_it_stands_between_start_and_stop() -> None:
    clock = CompileClock()
    begin, wall = clock.read(), time.perf_counter()
    clock.start("what torch tells")
    time.sleep(0.05)
    standing = clock.read()
    time.sleep(0.05)
    assert abs(clock.read() - standing) < 1e-6 and clock.read_compiling() > 0.09
    clock.stop()
    clock.stop()  # without a start
    passed = clock.read() - begin
    assert abs(passed - (time.perf_counter() - wall - clock.read_compiling())) < 0.02


def test_torch_tells_of_compiling() -> None:
    clock = CompileClock()
    clock.watch_compiling()
    clock.watch_compiling()
    assert clock.read_compiling() == 0.0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        time.sleep(0.05)
        return graph

    double = torch.compile(lambda x: x * 2, backend=backend)
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    compiling = clock.read_compiling()
    assert compiling >= 0.05
    double(torch.ones(2))
    assert clock.read_compiling() == compiling
