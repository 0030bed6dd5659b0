"""Counters, predicted times and the trace."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from anabatic.plan import cost_model
from anabatic_sim import chips
from npu_sim.conftest import Sim

TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).npu()
first = torch.optim.SGD(model[0].parameters(), lr=0.1)
second = torch.optim.AdamW(model[1].parameters(), lr=0.1)
data = torch.randn(32, 64)
for step in range(4):
    loss = model(data.npu()).pow(2).mean()
    loss.backward()
    first.step()
    second.step()
    first.zero_grad()
    second.zero_grad()
    print(loss.item())  # line 15
"""


@pytest.fixture(scope="module")
def reported(_built: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("report")
    Sim(folder).python(TRAIN, flags=["--report", "sim.json", "--trace", "trace.json"])
    report: dict[str, Any] = json.loads((folder / "sim.json").read_text(encoding="utf-8"))
    report["trace"] = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    return report


def test_two_optimizers_make_one_step(reported: dict[str, Any]) -> None:
    assert reported["step"]["count"] == 4
    assert len(reported["steps"]) == 4
    # Every step after the first does the same.
    assert len({step["operators"] for step in reported["steps"][1:]}) == 1


def test_operators_by_name(reported: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in reported["operators"]}
    assert rows["aten::addmm"]["calls"] == 8
    assert rows["aten::addmm"]["per_step"] == 2
    assert rows["aten::addmm"]["flops"] == 8 * 2 * 32 * 64 * 64
    assert sum(row["calls"] for row in rows.values()) == reported["devices"][0]["operators"]


def test_synchronisations_name_the_line(reported: dict[str, Any]) -> None:
    rows = {
        (Path(row["line"].rpartition(":")[0]).name, row["line"].rpartition(":")[2]): row for row in reported["syncs"]
    }
    assert rows["program.py", "15"]["count"] == 4
    assert rows["program.py", "15"]["per_step"] == 1
    assert reported["devices"][0]["d2h_calls"] == 4
    assert reported["devices"][0]["h2d_bytes"] >= 4 * 32 * 64 * 4


def test_the_prediction_follows_the_formula(reported: dict[str, Any]) -> None:
    rates = cost_model.get_chip_rates(chips.find_sim_chip("910B3").device_spec)
    row = next(row for row in reported["operators"] if row["name"] == "aten::addmm")
    one = cost_model.estimate_operator_ns(
        rates, "cube single", 2 * 32 * 64 * 64, 4 * (64 + 32 * 64 + 64 * 64 + 32 * 64)
    )
    assert row["paper_ms"] == pytest.approx(8 * one / 1e6, rel=1e-3)
    paper = reported["paper"]
    assert paper["bound"] == "host"  # tiny operators
    assert paper["step_ms"] >= reported["step"]["operators"] * cost_model.HOST_NS / 1e6 * 0.99
    assert 0 < paper["mfu"] < 0.01
    assert paper["scaling"]["efficiency"] == 1


def test_the_trace_is_a_chrome_trace(reported: dict[str, Any]) -> None:
    events = [event for event in reported["trace"]["traceEvents"] if event["ph"] == "X"]
    assert sum(1 for event in events if event["cat"] == "operator") == reported["devices"][0]["operators"]
    streams: dict[int, float] = {}
    for event in events:
        if event["cat"] == "operator":
            assert event["ts"] >= streams.get(event["tid"], 0) - 1e-3  # one after the other on a stream
            streams[event["tid"]] = event["ts"] + event["dur"]
    names = {event["args"]["name"] for event in reported["trace"]["traceEvents"] if event["ph"] == "M"}
    assert "npu:0" in names


def test_collectives_wait_for_the_slowest(sim: Sim) -> None:
    code = """
    import ctypes, os, torch, torch.distributed as dist
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024).npu())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(512, 1024, device="npu")
    for step in range(4):
        model(data).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    ctypes.PyDLL(None).exit(0)  # not Python's own end, right after a backward pass (e2e/warm.py, _leave)
    """
    file = sim.folder / "ddp.py"
    file.write_text(textwrap.dedent(code), encoding="utf-8")
    steps = {}
    for fault in ("slow@1=1", "slow@1=40"):
        flags = ["--npus", "2", "--report", "sim.json", "--fault", fault]
        done = sim.command("torchrun", "--nproc_per_node", "2", str(file), flags=flags)
        assert done.returncode == 0, done.stderr[-3000:]
        report = json.loads((sim.folder / "sim.json").read_text(encoding="utf-8"))
        row = next(row for row in report["collectives"] if row["name"] == "all_reduce")
        assert row["per_step"] == 1
        assert report["paper"]["scaling"]["devices"] == 2
        steps[fault] = report["paper"]
        assert "all_reduce" in done.stderr  # the table
    assert steps["slow@1=1"]["scaling"]["efficiency"] < 1
    assert steps["slow@1=40"]["bound"] == "slowest device"
    assert steps["slow@1=40"]["step_ms"] > 3 * steps["slow@1=1"]["step_ms"]


def test_both_sides_have_the_same_formulas(sim: Sim) -> None:
    code = """
    import ctypes, json, itertools
    library = ctypes.CDLL("libascendcl.so")
    library.sim_operator_ns.restype = library.sim_collective_ns.restype = ctypes.c_double
    d = ctypes.c_double
    operators = [library.sim_operator_ns(unit, d(3e12), d(1e8)) for unit in range(4)]
    ranks = (1, 2, 8, 16, 24, 4096)
    collectives = [
        library.sim_collective_ns(kind, d(1e8), number, ctypes.c_bool(number == 2))
        for kind in range(10)
        for number in ranks
    ]
    collectives.append(library.sim_collective_ns(0, d(1e8), 2, ctypes.c_bool(False)))
    print(json.dumps([operators, collectives]))
    """
    for chip in ("910B3", "910C", "310P"):
        operators, collectives = json.loads(sim.python(code, flags=["--chip", chip]))
        rates = cost_model.get_chip_rates(chips.find_sim_chip(chip).device_spec)
        assert operators == pytest.approx(
            [cost_model.estimate_operator_ns(rates, unit, 3e12, 1e8) for unit in cost_model.COMPUTE_UNITS]
        )
        assert collectives == pytest.approx(
            [
                cost_model.estimate_collective_ns(rates, kind, 1e8, ranks)
                for kind in cost_model.COLLECTIVES
                for ranks in (1, 2, 8, 16, 24, 4096)
            ]
            + [cost_model.estimate_collective_ns(cost_model.separate_ranks(rates, 2), "all_reduce", 1e8, 2)]
        )


def test_scores_that_a_causal_mask_hides_take_no_time(sim: Sim) -> None:
    code = """
    import torch, torch_npu
    q, k = (torch.randn(1, 2, rows, 64).half().npu().requires_grad_() for rows in (256, 512))
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
    out = torch_npu.npu_fusion_attention(q, k, k, 2, "BNSD", atten_mask=mask, sparse_mode=MODE, pre_tockens=64)
    out[0].sum().backward()
    """
    shown = {1: 256 * 512, 2: 256 * 257 / 2, 3: 256 * 256 + 256 * 257 / 2}  # nothing; top left; bottom right
    for mode, scores in shown.items():
        sim.python(code.replace("MODE", str(mode)), flags=["--report", f"{mode}.json"])
        rows = {row["name"]: row["flops"] for row in json.loads((sim.folder / f"{mode}.json").read_text())["operators"]}
        assert rows["npu::npu_fusion_attention"] == 2 * scores * 4 * 64
        assert rows["npu::npu_fusion_attention_grad"] == 2 * scores * 10 * 64


def test_a_report_that_cannot_be_written_is_told_first(sim: Sim) -> None:
    done = sim.command("python", "-c", "print('ran')", flags=["--report", "/proc/none/sim.json"])
    assert done.returncode != 0
    assert "ran" not in done.stdout
    assert "Traceback" not in done.stderr


def test_a_crash_is_reported_too(sim: Sim) -> None:
    code = "import torch, os, signal; torch.ones(3).npu().sum().item(); os.kill(os.getpid(), signal.SIGSEGV)"
    done = sim.command("python", "-c", code, flags=["--report", "sim.json"])
    assert done.returncode == -11
    left = json.loads((sim.folder / "sim.json").read_text(encoding="utf-8"))
    assert (left["exit_code"], left["signal"]) == (139, "SIGSEGV")
