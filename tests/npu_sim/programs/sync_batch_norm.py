"""torch.nn.SyncBatchNorm over the processes of torchrun: both directions against one BatchNorm on the whole batch."""

import os

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401 - registers the device

rank = int(os.environ["RANK"])
torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("hccl")
world = dist.get_world_size()
torch.manual_seed(0)
x, grad = torch.randn(4 * world, 3, 5, 5), torch.randn(4 * world, 3, 5, 5)
whole = torch.nn.BatchNorm2d(3)
torch.nn.init.normal_(whole.weight)
layer = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(whole)).npu()
own = slice(4 * rank, 4 * rank + 4)
here, there = x.clone().requires_grad_(), x[own].npu().requires_grad_()
reference = torch.nn.BatchNorm2d(3)
reference.load_state_dict({key: value.cpu() for key, value in layer[0].state_dict().items()})
expected, found = reference(here), layer(there)
expected.backward(grad)
found.backward(grad[own].npu())
weight = layer[0].weight.grad
dist.all_reduce(weight)
pairs = [
    (found, expected[own]),
    (there.grad, here.grad[own]),
    (weight, reference.weight.grad),
    (layer[0].running_mean, reference.running_mean),
    (layer[0].running_var, reference.running_var),
]
largest = max((a.cpu() - b).abs().max().item() for a, b in pairs)
print(f"rank {rank} off by {largest}\n", end="", flush=True)  # in one piece: both ranks write to the same pipe
dist.destroy_process_group()
