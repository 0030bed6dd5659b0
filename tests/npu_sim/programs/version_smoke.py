"""What every torch must be able to do on simulated NPUs, on two ranks; prints `name True` for each part.

scripts/sim_versions.py runs it, and fused.py, with each torch that has a torch_npu; needs nothing but torch.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("hccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.npu.set_device(rank)
device = f"npu:{rank}"


def say(name: str, good: bool) -> None:
    """Print whether a part worked on all ranks."""
    flag = torch.tensor(float(good), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    if rank == 0:
        print(name, bool(flag.item()), flush=True)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32)]
    return nn.Sequential(*layers)


def train(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


torch.manual_seed(1)
ids, targets = torch.randint(0, 32, (4, 8)), torch.randint(0, 32, (4, 8))
reference = make_model()
expected = train(reference, ids, targets)

# One device has the whole batch.
alone = make_model().to(device)
say(
    "training step",
    torch.allclose(torch.tensor(train(alone, ids.to(device), targets.to(device))), torch.tensor(expected), atol=1e-4),
)

# Each rank has its half; DDP averages.
half = slice(rank * 2, rank * 2 + 2)
model = nn.parallel.DistributedDataParallel(make_model().to(device))
losses = torch.tensor(train(model, ids[half].to(device), targets[half].to(device)), device=device)
dist.all_reduce(losses, dist.ReduceOp.AVG)
say("ddp", torch.allclose(losses.cpu(), torch.tensor(expected), atol=1e-4))

with torch.autocast("npu", dtype=torch.bfloat16):
    loss = alone(ids.to(device)).float().logsumexp(-1).sum()
loss.backward()
say("autocast", all(bool(one.grad.isfinite().all()) for one in alone.parameters()))

mine = torch.arange(4.0, device=device) + 10 * rank
gathered = torch.empty(8, device=device)
dist.all_gather_into_tensor(gathered, mine)
say("all_gather", gathered.tolist() == [0, 1, 2, 3, 10, 11, 12, 13])
scattered = torch.empty(2, device=device)
dist.reduce_scatter_tensor(scattered, mine)
say("reduce_scatter", scattered.tolist() == [[10, 12], [14, 16]][rank])
exchanged = torch.empty(4, device=device)
dist.all_to_all_single(exchanged, mine)
say("all_to_all", exchanged.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]][rank])
dist.broadcast(mine, 1)
say("broadcast", mine.tolist() == [10, 11, 12, 13])
if rank == 0:
    dist.send(mine * 2, 1)
else:
    dist.recv(mine, 0)
say("send and receive", mine.tolist() == ([10, 11, 12, 13] if rank == 0 else [20, 22, 24, 26]))

stream = torch.npu.Stream()
event = torch.npu.Event(enable_timing=True)
with torch.npu.stream(stream):
    product = torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    event.record()
torch.npu.current_stream().wait_event(event)
say("streams", product.sum().item() == 64**3)
query = torch.randn(1, 2, 8, 16, device=device)
attended = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
wanted = nn.functional.scaled_dot_product_attention(query.cpu(), query.cpu(), query.cpu(), is_causal=True)
say("attention", torch.allclose(attended.cpu(), wanted, atol=1e-5))
say("memory", 0 < torch.npu.memory_allocated() <= torch.npu.max_memory_allocated())
path = f"/dev/shm/version-smoke-{os.getppid()}.pt"
if rank == 0:
    torch.save({"model": alone.state_dict()}, path)
dist.barrier()
# On Python 3.11, torch_npu 2.7.1 pickles a tensor's format as a call of getattr, which weights_only refuses anywhere.
weights_only = (sys.version_info[:2], torch.__version__[:4]) != ((3, 11), "2.7.")
loaded = torch.load(path, map_location=device, weights_only=weights_only)["model"]
say("checkpoint", all(torch.equal(value, alone.state_dict()[name]) for name, value in loaded.items()) or rank == 1)
dist.barrier()
if rank == 0:
    os.unlink(path)
dist.destroy_process_group()
