"""Train a small transformer with DDP, FSDP2 or tensor parallelism, in the style of torch's examples.

torchrun --standalone --nproc_per_node 2 torch_parallel.py {ddp|fsdp2|tensor} [--bf16]
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, HEADS, LENGTH, STEPS = 256, 64, 4, 32, 10


class Block(nn.Module):
    """Attention and a feed-forward part, each before a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next hidden states, (batch, length, width)."""
        normed = self.norm_1(x)
        heads = [
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """Embeddings, two blocks, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits, (batch, length, vocabulary)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


TENSOR_PLAN = {
    **dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel),
    **dict.fromkeys(("output", "down"), RowwiseParallel),
}


def distribute(model: Model, strategy: str, device: torch.device, bf16: bool) -> nn.Module:
    """Return the model over all processes."""
    if strategy == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index] if device.index is not None else None)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if strategy == "tensor":
        for block in model.blocks:
            parallelize_module(block, mesh, {name: style() for name, style in TENSOR_PLAN.items()})
        return model
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def main() -> None:
    """Train ten steps and print each loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy", choices=("ddp", "fsdp2", "tensor"))
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))  # type: ignore[union-attr]
    dist.init_process_group(dist.get_default_backend_for_device(device))
    torch.manual_seed(1)
    model = distribute(Model().to(device), arguments.strategy, device, arguments.bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)  # some are DTensors
    rank = 0 if arguments.strategy == "tensor" else dist.get_rank()
    source = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY // 8, (4, LENGTH + 1), generator=source).to(device)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        if arguments.strategy != "tensor":  # only some of whose gradients are DTensors
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if dist.get_rank() == 0:
            print(f"loss {shown.item() / dist.get_world_size():.8f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
