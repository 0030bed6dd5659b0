"""Mixtures of experts trained on the device by the fused operators, against transformers' own loop on the CPU: prints a
line for each family and routing, "same" or what differs."""

import copy
import warnings

import torch
import transformers

from anabatic.config.sections.train_jobs import Lora
from anabatic.data.batching.packing import Batch
from anabatic.device.ops import get_device_ops
from anabatic.models import forward, fused_ops, pretrained
from anabatic.models.experts.routing import RoutingRecorder, compute_router_loss, sum_routers
from anabatic.models.lora import adapter
from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS

warnings.filterwarnings("ignore")

FAMILIES = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "DeepseekV3", "Glm4Moe", "GptOss")
LENGTHS = [5, 12, 30]
TOLERANCE = 2e-4
"""Of the largest gradient of a parameter: both sides round to fp32."""


def build(name):
    torch.manual_seed(0)
    settings = {**COMMON_CONFIG, **FAMILY_CONFIGS[name]}
    if name == "GptOss":
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    config = getattr(transformers, f"{name}Config")(**settings)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 0.5, std=0.2)
    return model


def send_all_to_the_same(model):
    """Without preferences every token chooses the same experts; the others have no rows."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith((".gate", ".router")):
                for parameter in module.parameters():
                    parameter.zero_()
                if len(module.weight) == model.config.num_experts_per_tok * 2:
                    module.weight[: model.config.num_experts_per_tok] = 0.3  # without ties, which differ by device


def batch_of(lengths):
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(3, 96, (borders[-1],), generator=generator) for _ in range(2))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(ids, labels, positions, borders, borders[-1], borders[-1])


def train(model, device):
    """The loss and gradients of one packed batch, with the load-balancing loss where a softmax routes."""
    model = model.to(device).train()
    recorder = RoutingRecorder(model, 0.0, torch.device(device))
    loss = forward.compute_summed_loss(model, forward.pack_batch(batch_of(LENGTHS), torch.device(device)), 1 << 16)
    loss.backward()
    grads = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads, recorder.sums[1:].cpu()


def compare(name, make):
    here, there = make(), make()
    expected, wanted, tokens = train(here, "cpu")
    fused_ops.install_fused_ops(there, get_device_ops("npu"))
    loss, grads, counted = train(there, "npu:0")
    worst = max(((grads[key] - grad).abs().max() / (grad.abs().max() + 1e-9)).item() for key, grad in wanted.items())
    good = abs(loss - expected) <= 1e-5 * abs(expected) and grads.keys() == wanted.keys() and worst < TOLERANCE
    even = torch.equal(counted, tokens) and counted.sum() > 0
    print(name, "same" if good and even else f"differs {expected} {loss} {worst} {counted.tolist()} {tokens.tolist()}")


def packed(model):
    model = copy.deepcopy(model)
    model.config._attn_implementation = pretrained.ATTENTION_NAME
    return model


def adapted(model):
    lora = Lora(r=4, target_modules=["o_proj", "all-experts"])
    adapter.insert_adapter(model, lora)
    adapter.init_adapter_weights(model, lora, 0)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


for family in FAMILIES:
    model = build(family)
    compare(f"{family} balanced", lambda model=model: packed(model))
    uneven = copy.deepcopy(model)
    send_all_to_the_same(uneven)
    compare(f"{family} uneven", lambda model=uneven: packed(model))
    if family in ("Qwen3Moe", "GptOss"):
        compare(f"{family} adapters", lambda model=model: adapted(packed(model)))

logits = [torch.randn(24, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
mask = (torch.arange(24) < 20).float()
for name, tokens in (("whole", None), ("padded", mask)):
    results = []
    for device in ("cpu", "npu:0"):
        leaves = [layer.detach().to(device).requires_grad_() for layer in logits]
        loss = compute_router_loss(*sum_routers(leaves, 2, None if tokens is None else tokens.to(device)))
        loss.backward()
        results.append([loss.cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    good = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*results, strict=True))
    print(f"router loss {name}", "same" if good else f"differs {results}")
