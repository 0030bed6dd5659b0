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
             lambda: torch.ones(3).to("npu")):
    text = said(lambda: capture(call))
    print("captured" in text or "CAPTURE" in text.upper() or "not simulated" in text, text.partition(chr(10))[0][:90])
print(x.sum().item(), said(lambda: torch.npu.NPUGraph().replay())[:40])
graph, out = capture(lambda: x + 1)
graph.replay()
print(out.tolist())
""",
    )
    assert [line.split()[0] for line in lines[:5]] == ["True"] * 5, lines
    assert lines[5].startswith("4.0 Called NPUGraph::replay without")
    assert lines[6] == "[2.0, 2.0, 2.0, 2.0]"


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


def test_chips_without_graphs_say_so(sim: Sim) -> None:
    told = _run(sim, 'print(said(lambda: capture(lambda: torch.ones(2, device="npu"))))', "--chip", "910A")
    assert "this chip has no graphs" in " ".join(told)


def test_random_numbers_of_a_graph_are_those_of_the_same_calls_outside(sim: Sim) -> None:
    lines = _run(
        sim,
        """
x = torch.ones(64, device="npu")
def step():
    rows = torch.rand(64, device="npu"), torch.nn.functional.dropout(x, 0.5), torch.randperm(32, device="npu")
    return *rows, x.clone().normal_()
torch.npu.manual_seed(7)
eager = [torch.cat([part.float() for part in step()]) for _ in range(2)]
torch.npu.manual_seed(7)
graph, out = capture(step)
print(torch.npu.initial_seed(), torch.equal(torch.npu.get_rng_state()[:8], torch.npu.get_rng_state()[:8]))
for expected in eager:
    graph.replay()
    print(torch.equal(torch.cat([part.float() for part in out]), expected))
torch.npu.manual_seed(7)
graph.replay()
print(torch.equal(torch.cat([part.float() for part in out]), eager[0]), torch.equal(eager[0], eager[1]))
own = torch.Generator(device="npu").manual_seed(3)
expected = torch.rand(5, device="npu", generator=own)
own.manual_seed(3)
graph, drawn = capture(lambda: torch.rand(5, device="npu", generator=own))
graph.replay()
print(torch.equal(drawn, expected))
""",
    )
    assert lines == ["7 True", "True", "True", "True False", "True"]


def test_an_update_replaces_the_tasks_of_a_group_and_its_event_lets_the_graph_go_on(sim: Sim) -> None:
    lines = _run(
        sim,
        """
x, out = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
graph, event, update = torch.npu.NPUGraph(), torch.npu.ExternalEvent(), torch.npu.Stream()
with torch.npu.graph(graph):
    stream = torch.npu.current_stream()
    event.wait(stream)
    torch.npu.graph_task_group_begin(stream)
    torch.mul(x, 2, out=out)
    handle = torch.npu.graph_task_group_end(stream)
    after = out + 1
for factor in (3, 5):
    graph.replay()  # waits for the event
    print(torch.npu.current_stream().query())
    with torch.npu.stream(update):
        torch.npu.graph_task_update_begin(update, handle)
        torch.mul(x, factor, out=out)
        torch.npu.graph_task_update_end(update)
        event.record(update)
    print(out.tolist(), after.tolist())
print(said(lambda: torch.npu.graph_task_group_begin(torch.npu.current_stream()))[-200:].count("107029"))
def two():
    with torch.npu.stream(update):
        torch.npu.graph_task_update_begin(update, handle)
        x.add_(0), x.add_(0)
        torch.npu.graph_task_update_end(update)
print("another number of tasks" in said(two), x.tolist())
""",
    )
    assert lines[0:4:2] == ["False", "False"]
    assert lines[1] == "[3.0, 3.0, 3.0, 3.0] [4.0, 4.0, 4.0, 4.0]"
    assert lines[3] == "[5.0, 5.0, 5.0, 5.0] [6.0, 6.0, 6.0, 6.0]"
    assert lines[5] == "True [1.0, 1.0, 1.0, 1.0]"


def test_functions_of_the_host_run_in_a_replay_and_tensors_are_printed_then(sim: Sim) -> None:
    lines = _run(
        sim,
        """
import json, torch_npu
x = torch.zeros(2, device="npu")
def call():
    torch_npu.npu._launch_host_func(torch.npu.current_stream(), lambda words: print("host", *words), ["a", 1])
    torch.ops.npu.print_npugraph_tensor(x + 1, tensor_name="y")
    return x
torch_npu.npu._subscribe_report(torch.npu.current_stream())
graph, out = capture(call)
print("captured")
for value in (1.0, 2.0):
    x.fill_(value)
    graph.replay()
    torch.npu.synchronize()
graph.debug_dump("graph.json")
print([task["name"] for task in json.load(open("graph.json"))])
""",
    )
    assert lines[0] == "captured"
    assert lines[1:5:2] == ["host a 1"] * 2
    assert [line.partition("(")[2].partition(",")[0] for line in lines[2:5:2]] == ["[2.", "[3."]
    assert "HOST_FUNC" in lines[5] and "aten::add" in lines[5]


def test_a_graph_under_a_condition_runs_when_the_value_says_so(sim: Sim) -> None:
    lines = _run(
        sim,
        """
x, wanted = torch.ones(2, device="npu"), torch.tensor(False, device="npu")
total = torch.zeros(2, device="npu")
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    total.add_(x)
    graph.begin_capture_to_if_node(wanted)
    total.add_(x * 10)
    graph.end_capture_to_conditional_node()
    after = total + 100
print(total.tolist())
for value in (False, True, False):
    wanted.fill_(value)
    graph.replay()
    print(total.tolist(), after[0].item())
""",
    )
    assert lines == ["[0.0, 0.0]", "[1.0, 1.0] 101.0", "[12.0, 12.0] 112.0", "[13.0, 13.0] 113.0"]
