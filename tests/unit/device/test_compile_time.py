"""The clock that stands while torch compiles."""

from __future__ import annotations

import time

import torch

from anabatic.device.compile_time import CompileClock


def test_it_stands_between_start_and_stop() -> None:
    now = [10.0]
    clock = CompileClock(lambda: now[0])
    assert clock.read() == 10.0 and clock.read_compiling() == 0.0
    now[0] = 12.0
    clock.start("what torch tells")
    now[0] = 13.0
    clock.start()  # one inside it
    now[0] = 14.0
    clock.stop()
    now[0] = 15.0
    assert clock.read() == 12.0 and clock.read_compiling() == 3.0
    clock.stop()
    clock.stop()  # without a start
    now[0] = 16.0
    assert clock.read() == 13.0 and clock.read_compiling() == 3.0


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
