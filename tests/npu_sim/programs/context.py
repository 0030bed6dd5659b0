"""Context parallelism on simulated devices: loss and gradients of ranks that share a batch, against one CPU process."""

import copy

import torch
import torch.distributed as dist
import transformers
from families import FAMILIES

from anabatic.config.sections.train_jobs import Lora
from anabatic.data.batching.packing import IGNORE_INDEX, Batch
from anabatic.models import forward, fused_ops, pretrained
from anabatic.models.lora import adapter
from anabatic.parallel.mesh import ContextGroup
from anabatic_testing.tiny_models import COMMON_CONFIG

LENGTHS = [5, 12, 12, 1, 30, 3]
"""63 tokens: no number of ranks divides them."""
CASES = {
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "one key head": ("Qwen2", {"num_key_value_heads": 1}),
    "window": ("Gemma2", {}),
    "latent": ("DeepseekV3", {}),
    "experts": ("Qwen3Moe", {}),
}


def batch():
    generator = torch.Generator().manual_seed(0)
    borders = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    ids, labels = (torch.randint(3, 96, (borders[-1],), generator=generator) for _ in range(2))
    labels[:4] = IGNORE_INDEX
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return Batch(ids, labels, positions, borders, int((labels != IGNORE_INDEX).sum()), borders[-1])


def build(case, lora):
    name, settings = CASES[case]
    torch.manual_seed(0)
    given = {**COMMON_CONFIG, **FAMILIES.get(name, {}), **settings}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**given))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 0.5, std=0.2)
    model.config._attn_implementation = pretrained.ATTENTION_NAME
    if lora:
        adapter.insert_adapter(model, Lora(r=4))
        adapter.init_adapter_weights(model, Lora(r=4), 0)
        for key, parameter in model.named_parameters():
            if key.endswith("lora_B"):
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def run(model, device, context):
    packed = forward.pack_batch(batch(), torch.device(device), context=context)
    loss = forward.compute_summed_loss(model, packed, 1 << 12)
    loss.backward()
    return loss.detach().reshape(1), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def differences(rank, world, cases, methods):
    """Return for each case the largest relative difference of the loss and of a gradient."""
    found = {}
    for method in methods.split(","):
        group = ContextGroup(rank, world, pieces=2 if method == "ring" else 1)
        for case in cases.split(","):
            for lora in (False, True):
                model = build(case, lora)
                there = copy.deepcopy(model).to("npu")
                fused_ops.apply_fused_setting(there, "auto", "npu")
                expected, reference = run(model, "cpu", ContextGroup())
                loss, grads = run(there, "npu", group)
                for part in (loss, *grads.values()):
                    dist.all_reduce(part)
                worst = abs(loss.item() - expected.item()) / expected.item()
                for key, value in reference.items():
                    worst = max(worst, ((grads[key].cpu() - value).norm() / (value.norm() + 1e-6)).item())
                found[f"{method}, {case}{', lora' if lora else ''}"] = worst
    return found
