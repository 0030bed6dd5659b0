"""Fully sharded training with PyTorch's FSDP2 and a distributed checkpoint, on whatever device torch finds.

torchrun --nproc_per_node 4 examples/fsdp2.py                                # CUDA, NPU, or gloo on the CPU
anabatic sim --npus 4 -- torchrun --nproc_per_node 4 examples/fsdp2.py       # four simulated NPUs
"""

import argparse
import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM


def setup():
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(rank)
        device = torch.device(torch.accelerator.current_accelerator().type, rank)
    dist.init_process_group(dist.get_default_backend_for_device(device.type))
    return device, init_device_mesh(device.type, (dist.get_world_size(),))


def build(mesh, bf16):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
    )
    model = Qwen3ForCausalLM(config)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def batches(device, steps):
    """The same global batch on any number of ranks."""
    data = torch.Generator().manual_seed(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    for _ in range(steps):
        rows = torch.randint(0, 256, (8, 32), generator=data)
        yield rows.chunk(world)[rank].to(device)


def train(model, optimizer, device, steps):
    for step, rows in enumerate(batches(device, steps), 1):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        norm = norm.full_tensor()
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item():.5f} norm {norm.item():.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--checkpoint", default="out/fsdp2")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()

    device, mesh = setup()
    model = build(mesh, args.bf16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(model, optimizer, device, args.steps)

    if dist.get_rank() == 0:
        shutil.rmtree(args.checkpoint, ignore_errors=True)
    dist.barrier()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=args.checkpoint)
    kept = [parameter.full_tensor().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=args.checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    same = all(torch.equal(a, b.full_tensor()) for a, b in zip(kept, model.parameters(), strict=True))
    if dist.get_rank() == 0:
        print(f"device {device.type} x {dist.get_world_size()}, checkpoint restored: {same}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
