"""Trains with torch_npu.profiler around two of five steps: `profiled_training.py LEVEL FOLDER`."""

import json
import sys

import torch
import torch_npu

own = torch_npu.profiler
level, folder = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.SiLU(), torch.nn.Linear(128, 32)).npu()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
experimental = own._ExperimentalConfig(profiler_level=getattr(own.ProfilerLevel, level), mstx=True)
with own.profile(
    activities=[own.ProfilerActivity.CPU, own.ProfilerActivity.NPU],
    schedule=own.schedule(wait=1, warmup=1, active=2, repeat=1),
    record_shapes=True,
    profile_memory=True,
    experimental_config=experimental,
    on_trace_ready=own.tensorboard_trace_handler(folder),
) as profiler:
    for number in range(5):
        torch.npu.mstx.mark(f"step {number}", torch.npu.current_stream())
        span = torch.npu.mstx.range_start("forward", torch.npu.current_stream())
        rows = torch.randn(256, 64).npu()
        loss = model(rows).square().mean()
        torch.npu.mstx.range_end(span)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        profiler.step()
print(json.dumps({"peak": torch.npu.max_memory_allocated()}))
