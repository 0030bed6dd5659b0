"""One small model under every way of parallelism, on simulated devices and on the CPU through gloo: both losses."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROWS = TensorDataset(torch.randint(0, 50, (64, 9), generator=torch.Generator().manual_seed(1)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 32, words: int = 50) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(device: str) -> Net:
    torch.manual_seed(0)
    return Net().to(device)


def batches(rank: int, world: int, pinned: bool = False) -> DataLoader:
    sampler = DistributedSampler(ROWS, world, rank, shuffle=False)
    return DataLoader(ROWS, batch_size=4, sampler=sampler, pin_memory=pinned, num_workers=1 if pinned else 0)


def train(
    model: nn.Module,
    loader: DataLoader,
    device: str,
    optimizer: torch.optim.Optimizer,
    steps: int = 4,
    clip: bool = True,
) -> list[float]:
    losses = []
    for _, (rows,) in zip(range(steps), loader, strict=False):
        rows = rows.to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        if clip:  # not for a model with plain and distributed tensors
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def adamw(model: nn.Module, **flags: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, **flags)


def ddp(rank: int, world: int, device: str) -> list[float]:
    model = DistributedDataParallel(net(device), device_ids=[rank] if device == "npu" else None)
    return train(model, batches(rank, world), device, adamw(model))


def pinned(rank: int, world: int, device: str) -> list[float]:
    model = DistributedDataParallel(net(device), device_ids=[rank] if device == "npu" else None)
    return train(model, batches(rank, world, device == "npu"), device, adamw(model))


def sharded(world: int, device: str, **options: object) -> Net:
    mesh = init_device_mesh(device, (world,))
    model = net(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2(rank: int, world: int, device: str) -> list[float]:
    model = sharded(world, device)
    return train(model, batches(rank, world), device, adamw(model))


def fsdp2_bf16(rank: int, world: int, device: str) -> list[float]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(world, device, mp_policy=policy, reshard_after_forward=False)
    return train(model, batches(rank, world), device, adamw(model))


def tensor_parallel(rank: int, world: int, device: str) -> list[float]:
    model = net(device)
    mesh = init_device_mesh(device, (world,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(model, batches(0, 1), device, adamw(model, foreach=False), clip=False)


def two_dimensions(rank: int, world: int, device: str) -> list[float]:
    """FSDP2 over pairs, tensor parallel inside a pair: two groups whose collectives overlap."""
    mesh = init_device_mesh(device, (world // 2, 2), mesh_dim_names=("data", "tensor"))
    model = net(device)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return train(model, batches(rank // 2, world // 2), device, adamw(model, foreach=False), clip=False)


def saved(rank: int, world: int, device: str, folder: str) -> list[float]:
    model = sharded(world, device)
    optimizer = adamw(model)
    losses = train(model, batches(rank, world), device, optimizer, steps=2)
    where = f"{folder}/{device}-{world}"
    parts = get_state_dict(model, optimizer)
    checkpoint.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=where)
    straight = train(model, batches(rank, world), device, optimizer, steps=2)
    model, optimizer = sharded(world, device), None
    optimizer = adamw(model)
    parts = get_state_dict(model, optimizer)
    checkpoint.load({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=where)
    set_state_dict(model, optimizer, model_state_dict=parts[0], optim_state_dict=parts[1])
    again = train(model, batches(rank, world), device, optimizer, steps=2)
    if again != straight:
        raise ValueError(f"resumed with {again}, went on with {straight}")
    return losses + straight


def losses(rank: int, world: int, names: str, folder: str) -> dict[str, list[list[float]]]:
    results = {}
    for name in names.split(","):
        words = [folder] if name == "saved" else []
        results[name] = [globals()[name](rank, world, device, *words) for device in ("npu", "cpu")]
    return results
