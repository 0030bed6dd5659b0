"""A small Qwen from its configuration, trained on a device: losses, gradient norms, generated words."""

import json
import sys

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM


def train(kind, device, mode="", attention="sdpa", steps=6, rows=2):
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_implementation=attention,
    )
    if kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes)).to(device)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=16, **sizes)).to(device)
    flag = {"fused": {"fused": True}, "foreach": {"foreach": True}}.get(mode, {"foreach": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **flag)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode)
    scaler = torch.amp.GradScaler(device.partition(":")[0], enabled=mode == "fp16")
    data = torch.Generator().manual_seed(1)
    losses, norms = [], []
    for _ in range(steps):
        ids = torch.randint(0, 256, (rows, 64), generator=data).to(device)
        with torch.autocast(device.partition(":")[0], dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
    model.eval()
    with torch.no_grad():
        words = model.generate(torch.tensor([[1, 2, 3]], device=device), max_new_tokens=6, do_sample=False).tolist()
    return [losses, norms, words]


if __name__ == "__main__":
    kind, mode, attention = sys.argv[1:]
    print(json.dumps([train(kind, device, mode, attention) for device in ("cpu", "npu:0")]))
