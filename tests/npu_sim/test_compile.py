"""torch.compile in a simulation: graphs are captured and replayed, inductor says that it is not simulated."""

from __future__ import annotations

from npu_sim.conftest import Sim

_PROGRAM = """
import torch
def call(x, w):
    return torch.nn.functional.silu(x @ w).sum(-1)
x, w = torch.randn(4, 8, device="npu"), torch.randn(8, 8, device="npu")
"""


def test_backends_of_torch_compile(sim: Sim) -> None:
    lines = sim.python(
        _PROGRAM
        + """
for backend in ("eager", "aot_eager", "npugraphs"):
    torch._dynamo.reset()
    compiled = torch.compile(call, backend=backend)
    right = []
    for factor in (1, 2, 3, 4):  # npugraphs: warms up, captures, replays
        scaled = x * factor
        expected = call(scaled, w).cpu()
        right.append(torch.allclose(compiled(scaled, w).cpu(), expected))
    print(backend, all(right))
torch._dynamo.reset()
try:
    torch.compile(call)(x, w)
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[-1 if "NotImpl" not in str(error) else 0])
    print("inductor backend is not simulated for the NPU" in str(error), "TORCHDYNAMO_SUPPRESS_ERRORS=1" in str(error))
torch._dynamo.reset()
torch._dynamo.config.suppress_errors = True
print(torch.equal(torch.compile(call)(x, w), call(x, w)))
print(torch.allclose(torch.compile(call, backend="aot_eager")(x.cpu(), w.cpu()), call(x.cpu(), w.cpu())))
"""
    ).splitlines()
    assert lines[:3] == ["eager True", "aot_eager True", "npugraphs True"]
    assert lines[-3:] == ["True True", "True", "True"]


def test_graphed_callables_and_reused_inputs(sim: Sim) -> None:
    lines = sim.python(
        """
import torch
torch.manual_seed(0)
layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 8)).npu()
plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 8)).npu()
plain.load_state_dict(layer.state_dict())
graphed = torch.npu.make_graphed_callables(layer, (torch.randn(4, 8, device="npu"),))
for step in range(3):
    x = torch.randn(4, 8, device="npu")
    layer.zero_grad(); plain.zero_grad()
    graphed(x).square().sum().backward()
    plain(x).square().sum().backward()
    same = [torch.allclose(a.grad, b.grad) for a, b in zip(layer.parameters(), plain.parameters())]
    print(torch.allclose(graphed(x), plain(x)), all(same))

# A block of the pool that a later operator of the graph reuses holds an input until the first replay has read it.
pool = torch.npu.graph_pool_handle()
warm = torch.npu.NPUGraph()
with torch.npu.graph(warm, pool=pool):
    kept = torch.zeros(1000, device="npu")
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph, pool=pool):
    first = torch.arange(1000.0, device="npu") + 1
    total = first.sum()
    del first
    other = torch.full((1000,), 5.0, device="npu")
graph.replay()
print(total.item(), other.sum().item())
"""
    ).splitlines()
    assert lines == ["True True"] * 3 + ["500500.0 5000.0"]
