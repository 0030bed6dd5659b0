"""Train a Qwen2 after `import verl`, which replaces its norm, MLP and rotary embedding where there is an NPU.

python verl_patches.py MODEL
"""

from __future__ import annotations

import sys

import torch
import verl
from transformers import AutoModelForCausalLM
from transformers.models.qwen2 import modeling_qwen2


def main() -> None:
    """Print the loss of six steps."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    forward = modeling_qwen2.Qwen2RMSNorm.forward
    print(f"verl {verl.__version__} on {device}: norm of {forward.__module__}.{forward.__name__}", flush=True)
    if device.type == "npu" and forward.__name__ != "rms_norm_forward_npu":
        raise RuntimeError("verl has not replaced the norm")
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = torch.Generator().manual_seed(1)
    for _ in range(6):
        tokens = torch.randint(0, 320, (2, 48), generator=source).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.7f}", flush=True)


if __name__ == "__main__":
    main()
