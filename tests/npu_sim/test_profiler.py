"""torch_npu.profiler on simulated devices: torch_npu's own parser reads what the simulated CANN wrote."""

from __future__ import annotations

import csv
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from npu_sim.conftest import Sim

Table = list[dict[str, str]]


def read(folder: Path, name: str) -> Table:
    """Return a table of the one profile in `folder`."""
    [path] = folder.glob(f"*_ascend_pt/ASCEND_PROFILER_OUTPUT/{name}.csv")
    return list(csv.DictReader(path.read_text().splitlines()))


def read_traces(sim: Sim) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the events of the profile, and the operators of the simulator's own trace."""
    [path] = (sim.folder / "out").glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json")
    own = json.loads((sim.folder / "own.json").read_text())["traceEvents"]
    return json.loads(path.read_text()), [event for event in own if event.get("cat") == "operator"]


@pytest.fixture
def trained(sim: Sim) -> dict[str, Any]:
    """A training, profiled at Level1; the simulator's report of it, with what the program printed."""
    flags = ["--report", "sim.json", "--trace", "own.json"]
    printed = sim.program("profiled_training.py", "Level1", "out", flags=flags)
    report = json.loads((sim.folder / "sim.json").read_text())
    return report | json.loads(printed.splitlines()[-1])


def api_of(name: str) -> str:
    """The aclnn function of an operator of this model, spelled out."""
    base = name.partition("::")[2]
    words = "".join(word.capitalize() for word in base.strip("_").split("_"))
    return {"_fused_adamw_": "aclnnApplyAdamWV2"}.get(base, f"aclnn{'Inplace' if base.endswith('_') else ''}{words}")


def test_kernels_are_those_of_the_simulator(sim: Sim, trained: dict[str, Any]) -> None:
    """Names, order, durations and counts of the two profiled steps agree with counters and trace."""
    out = sim.folder / "out"
    events, own = read_traces(sim)
    tasks = read(out, "task_time")
    durations = [round(float(row["task_time(us)"]), 3) for row in tasks]
    paper = [round(event["dur"], 3) for event in own]
    begins = [i for i in range(len(paper)) if paper[i : i + len(tasks)] == durations]
    assert begins, "the profiled tasks are no stretch of the simulator's operators"
    stretch = own[begins[-1] : begins[-1] + len(tasks)]
    named = [row["kernel_name"].rpartition("_")[0] for row in tasks]
    expected = [event["name"].partition(".")[0] for event in stretch]
    copies = [row["kernel_type"] == "MEMCPY_ASYNC" for row in tasks]
    assert all(
        api.startswith(api_of(name)) for api, name, is_copy in zip(named, expected, copies, strict=True) if not is_copy
    )
    kernels = read(out, "kernel_details")
    assert len(kernels) == len(tasks) - sum(copies) and sum(copies) == 2  # the input of each step
    steps = {row["Step Id"] for row in kernels}
    assert len(steps) == 2
    for step in steps:
        count = sum(row["Step Id"] == step for row in kernels)
        assert count + 1 == trained["steps"][2]["operators"] == trained["step"]["operators"]
    products = [row for row in kernels if row["Type"] == "MatMul"]
    assert {row["Accelerator Core"] for row in products} == {"AI_CORE"}
    assert any(row["Input Shapes"].strip('"').endswith("256,64;64,128") for row in products)
    starts = [float(row["Start Time(us)"]) for row in kernels]
    assert starts == sorted(starts)
    statistic = {row["OP Type"]: row for row in read(out, "op_statistic")}
    assert int(statistic["MatMul"]["Count"]) == len(products)
    total = sum(float(row["Duration(us)"]) for row in products)
    assert float(statistic["MatMul"]["Total Time(us)"]) == pytest.approx(total, abs=1e-2)
    api = {row["API Name"]: int(row["Count"]) for row in read(out, "api_statistic")}
    assert api["launch"] == len(tasks)


def test_the_timeline_joins_host_and_device(sim: Sim, trained: dict[str, Any]) -> None:
    out = sim.folder / "out"
    events, _ = read_traces(sim)
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"Python", "CANN", "Ascend Hardware", "Overlap Analysis", "MsprofTx"} <= set(processes.values())
    rows = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for event in events:
        assert event["ph"] in "XMsfi" and event["pid"] in processes
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in rows and float(event["ts"]) > 0 and event["dur"] >= 0
    kernels = [
        event
        for event in events
        if processes[event["pid"]] == "Ascend Hardware" and "Task Type" in event.get("args", {})
    ]
    assert len(kernels) == len(read(out, "task_time"))
    arrows = [event for event in events if event.get("cat") == "async_npu" and event["ph"] == "f"]
    assert {(event["tid"], event["ts"]) for event in arrows} == {(event["tid"], event["ts"]) for event in kernels}
    # An operator of the host has the time of its kernels.
    operators = read(out, "operator_details")
    measured = sum(float(row["Device Self Duration(us)"]) for row in operators)
    assert measured == pytest.approx(sum(event["dur"] for event in kernels), abs=1e-2)
    assert any(row["Name"] == "aten::addmm" and float(row["Device Total Duration(us)"]) > 0 for row in operators)
    # One stream, nothing overlaps: computing is the sum of the kernels.
    computing = sum(float(row["Computing"]) for row in read(out, "step_trace_time"))
    assert computing == pytest.approx(measured, abs=1e-2)
    marks = [event["name"] for event in events if event["pid"] in processes and processes[event["pid"]] == "MsprofTx"]
    assert {"step 2", "step 3", "forward"} <= set(marks) and "step 1" not in marks


def test_memory_is_the_allocators_and_the_devices(sim: Sim, trained: dict[str, Any]) -> None:
    records = read(sim.folder / "out", "memory_record")
    allocated = [float(row["Total Allocated(MB)"]) for row in records if row["Component"] == "PTA"]
    assert max(allocated) == pytest.approx(trained["peak"] / 2**20, rel=0.05)  # the steps before may peak higher
    assert read(sim.folder / "out", "operator_memory")


@pytest.mark.parametrize("level", ["Level_none", "Level0", "Level2"])
def test_the_other_levels_are_parsed(sim: Sim, level: str) -> None:
    sim.program("profiled_training.py", level, "out")
    names = {path.name for path in (sim.folder / "out").rglob("*.*")}
    assert {"trace_view.json", "operator_details.csv"} <= names
    assert ("kernel_details.csv" in names) == (level != "Level_none")
    assert ("api_statistic.csv" in names) == (level == "Level2")
    if level == "Level0":
        kernels = read(sim.folder / "out", "kernel_details")
        assert {row["Type"] for row in kernels} == {"N/A"} and all(float(row["Duration(us)"]) > 0 for row in kernels)


def test_two_ranks_communicate(sim: Sim) -> None:
    code = """
    import os
    import torch, torch_npu
    import torch.distributed as dist
    own = torch_npu.profiler
    dist.init_process_group("hccl")
    rank = dist.get_rank()
    torch.npu.set_device(rank)
    layer = torch.nn.Linear(8, 8).npu()
    ddp = torch.nn.parallel.DistributedDataParallel(layer, device_ids=[rank])
    kinds = own._ExperimentalConfig(profiler_level=own.ProfilerLevel.Level1, export_type=["text", "db"])
    with own.profile(on_trace_ready=own.tensorboard_trace_handler(f"out{rank}"), experimental_config=kinds) as profiler:
        for _ in range(2):
            ddp(torch.ones(4, 8, device="npu")).sum().backward()
            profiler.step()
    dist.destroy_process_group()
    """
    file = sim.folder / "ranks.py"
    file.write_text("\n".join(line[4:] for line in code.splitlines()))
    done = sim.command("torchrun", "--nproc_per_node", "2", str(file), flags=["--npus", "2"])
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        out = sim.folder / f"out{rank}"
        kernels = read(out, "kernel_details")
        reduced = [row for row in kernels if row["Type"] == "hcom_allReduce_"]
        assert len(reduced) == 2 and {row["Device_id"] for row in kernels} == {str(rank)}
        [path] = out.rglob("communication.json")
        told = json.loads(path.read_text())
        found = told["step"]["collective"]  # without a schedule there are no numbers
        name = next(name for name in found if name.startswith(reduced[0]["Name"]))
        time = found[name]["Communication Time Info"]
        assert time["Transit Time(ms)"] == pytest.approx(float(reduced[0]["Duration(us)"]) / 1000, abs=1e-5)
        [path] = out.rglob(f"ascend_pytorch_profiler_{rank}.db")
        with sqlite3.connect(path) as database:
            text = "SELECT COUNT(*) FROM COMPUTE_TASK_INFO"
            collectives = [row["Name"] for row in kernels if row["Accelerator Core"] == "COMMUNICATION"]
            assert database.execute(text).fetchone()[0] == len(kernels) - len(collectives)
            text = "SELECT value FROM COMMUNICATION_OP JOIN STRING_IDS ON opName = id"
            assert sorted(row[0] for row in database.execute(text)) == sorted(collectives)
            assert database.execute("SELECT COUNT(*) FROM PYTORCH_API").fetchone()[0] > len(kernels)
        [path] = out.rglob("analysis.db")
        with sqlite3.connect(path) as database:
            steps = database.execute("SELECT computing, communication FROM StepTraceTime").fetchall()
        table = read(out, "step_trace_time")
        assert [row[1] for row in steps] == pytest.approx([float(row["Communication"]) for row in table], abs=1e-2)


def test_export_chrome_trace_and_a_folder_that_cannot_be_written(sim: Sim) -> None:
    sim.python(
        """
        import torch, torch_npu
        own = torch_npu.profiler
        with own.profile() as profiler:
            torch.ones(4, device="npu") + 1
        profiler.export_chrome_trace("trace.json")
        """
    )
    events = json.loads((sim.folder / "trace.json").read_text())
    assert any(event["name"].startswith("aclnnAdd") and event["ph"] == "X" for event in events)
    done = sim.command("msprof", "--application=train.sh")
    assert done.returncode == 2 and "--application is not simulated" in done.stderr


def test_ranges_of_aclnn_functions_are_seen_by_torch(sim: Sim) -> None:
    told = sim.python(
        """
        import torch, torch_npu
        x = torch.ones(4, 4, device="npu")
        with torch.autograd.profiler.profile(use_device="npu") as seen:
            x.t().contiguous(), x + x, torch.ops.aten.add.Scalar(x, 1), x.npu(), torch_npu.npu_rms_norm(x, x[0])
            x.clone().mul_(2), x / torch.ones(()), x[0, 0] - x[0, 1]
        print(sorted({event.key for event in seen.key_averages() if event.key.startswith("aclnn")}))
        """
    )
    assert told.splitlines()[-1] == (
        "['aclnnAdd', 'aclnnAdds', 'aclnnDivs', 'aclnnInplaceCopy', 'aclnnInplaceMuls', 'aclnnRmsNorm', 'aclnnSub']"
    )
