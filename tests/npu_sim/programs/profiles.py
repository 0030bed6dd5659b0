"""Runs both profilers around a few operators: prints whether the host's operators were seen."""

from pathlib import Path

import torch
import torch_npu
from torch.profiler import ProfilerActivity, profile


def work():
    return (torch.ones(3, 3, device="npu") @ torch.ones(3, 3, device="npu")).sum().item()


with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as seen:
    work()
names = {event.key for event in seen.key_averages()}
seen.export_chrome_trace("trace.json")
print("torch.profiler", "aten::mm" in names, "aten::mm" in Path("trace.json").read_text(encoding="utf-8"))

own = torch_npu.profiler
with own.profile(
    activities=[own.ProfilerActivity.CPU, own.ProfilerActivity.NPU],
    on_trace_ready=own.tensorboard_trace_handler("profiles"),
) as seen:
    for _ in range(2):
        work()
        seen.step()
traces = [path.read_text(encoding="utf-8") for path in Path("profiles").rglob("trace_view.json")]
print("torch_npu.profiler", any("aten::mm" in trace for trace in traces))
