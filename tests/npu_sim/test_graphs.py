"""torch.npu.graph on the simulator: nothing happens in a capture, a replay is one launch on the same addresses."""

from __future__ import annotations

import json

from npu_sim.conftest import Sim

_PRELUDE = """
import torch
def said(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "ran"
def capture(call):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = call()
    return graph, out
"""


def _run(sim: Sim, body: str, *flags: str) -> list[str]:
    return sim.python(_PRELUDE + body, flags=flags).splitlines()


def test_a_capture_changes_nothing_and_a_replay_reads_what_lies_there_then(sim: Sim) -> None:
    lines = _run(
        sim,
        """
x, w = torch.ones(3, 4, device="npu"), torch.full((4, 4), 2.0, device="npu")
count, cache = torch.zeros((), device="npu"), torch.zeros(5, 4, device="npu")
slot = torch.tensor([1, 3], device="npu")
def step():
    count.add_(1)
    y = x @ w
    cache.index_copy_(0, slot, y[:2])
    halves = y.split(2, dim=1)
    best, places = y.max(dim=-1)
    return y, torch.cat([half * count for half in halves], dim=1), places, torch.zeros(2, device="npu") + best[:2]
graph, (y, scaled, places, sums) = capture(step)
print(count.item(), cache.abs().sum().item())
for value in (3.0, 5.0):
    x.fill_(value)
    x[0, 0] += 1
    graph.replay()
    print(y[0, 0].item(), y[2, 3].item(), scaled[2, 3].item(), count.item(), cache[3, 0].item(), sums.tolist())
slot.fill_(0)
graph.replay()
print(cache[0, 0].item(), count.item(), places.dtype, graph.pool() is not None)
""",
    )
    assert lines[0] == "0.0 0.0"
    assert lines[1] == "26.0 24.0 24.0 1.0 24.0 [26.0, 24.0]"
    assert lines[2] == "42.0 40.0 80.0 2.0 40.0 [42.0, 40.0]"
    assert lines[3] == "40.0 3.0 torch.int64 True"


def test_the_gradient_of_a_captured_step_is_the_eager_ones(sim: Sim) -> None:
    lines = _run(
        sim,
        """
torch.manual_seed(0)
layer = torch.nn.Linear(8, 8).to("npu")
x = torch.randn(4, 8, device="npu")
def loss():
    return torch.nn.functional.silu(layer(x)).square().mean()
loss().backward()
eager = layer.weight.grad.clone()
side = torch.npu.Stream()
layer.zero_grad()
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    loss().backward()
grad = layer.weight.grad
grad.zero_()
graph.replay()
print(torch.equal(grad, eager), bool(eager.abs().sum() > 0))
""",
    )
    assert lines == ["True True"]


def test_streams_that_wait_for_the_capture_join_it(sim: Sim) -> None:
    lines = _run(
        sim,
        """
x, side = torch.ones(4, device="npu"), torch.npu.Stream()
def call():
    start = torch.npu.Event(); start.record()
    with torch.npu.stream(side):
        start.wait()
        doubled = x * 2
        end = torch.npu.Event(); end.record()
    end.wait()
    return doubled + 1
graph, out = capture(call)
x.fill_(4)
graph.replay()
print(out.tolist(), (x * 2).tolist())
""",
    )
    assert lines == ["[9.0, 9.0, 9.0, 9.0] [8.0, 8.0, 8.0, 8.0]"]


def test_what_a_capture_does_not_allow_breaks_it(sim: Sim) -> None:
    lines = _run(
        sim,
        """
x = torch.ones(4, device="npu")
for call in (lambda: x.sum().item(), lambda: x.nonzero(), lambda: x.cpu(), lambda: torch.npu.synchronize(),
             lambda: torch.ones(3).to("npu"), lambda: torch.rand(3, device="npu")):
    text = said(lambda: capture(call))
    print("captured" in text or "CAPTURE" in text.upper() or "not simulated" in text, text.partition(chr(10))[0][:90])
print(x.sum().item(), said(lambda: torch.npu.NPUGraph().replay())[:40])
graph, out = capture(lambda: x + 1)
graph.replay()
print(out.tolist())
""",
    )
    assert [line.split()[0] for line in lines[:6]] == ["True"] * 6, lines
    assert lines[6].startswith("4.0 Called NPUGraph::replay without")
    assert lines[7] == "[2.0, 2.0, 2.0, 2.0]"


def test_memory_that_is_gone_is_an_error(sim: Sim) -> None:
    lines = _run(
        sim,
        """
big = torch.ones(1 << 22, device="npu")
graph, out = capture(lambda: big * 2)
graph.replay()
del big
torch.npu.empty_cache()
print("given back to the device" in said(graph.replay))
""",
    )
    assert lines == ["True"]


def test_a_replay_counts_as_one_launch_with_the_time_of_all(sim: Sim) -> None:
    sim.python(
        _PRELUDE
        + """
x = torch.ones(256, 256, device="npu")
def call():
    y = x
    for _ in range(10):
        y = y @ x * 0.01
    return y
graph, out = capture(call)
pinned = torch.ones(256, 256).pin_memory()
for _ in range(3):
    with torch.profiler.record_function("anabatic.step"):
        x.copy_(pinned, non_blocking=True)
        graph.replay()
""",
        flags=["--report", "sim.json"],
    )
    told = json.loads((sim.folder / "sim.json").read_text())
    rows = {row["name"]: row for row in told["operators"]}
    assert rows["aclmdlRIExecuteAsync"]["calls"] == 3 and "aten::mm" not in rows
    assert rows["aclmdlRIExecuteAsync"]["flops"] == 3 * 10 * 2 * 256**3
    assert rows["aclmdlRIExecuteAsync"]["paper_ms"] >= 3 * 20 * 0.002
    assert told["step"]["operators"] == 2 and told["step"]["syncs"] == 0


def test_chips_without_graphs_and_collectives_say_so(sim: Sim) -> None:
    told = _run(sim, 'print(said(lambda: capture(lambda: torch.ones(2, device="npu"))))', "--chip", "910A")
    assert "this chip has no graphs" in " ".join(told)
    lines = _run(
        sim,
        """
import os, torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(4, device="npu")
dist.all_reduce(x)
print(said(lambda: capture(lambda: dist.all_reduce(x)))[:300].replace(chr(10), " "))
dist.destroy_process_group()
""",
    )
    assert "not simulated" in lines[0] or "captur" in lines[0].lower(), lines
