"""Packed, fused models of many families on the device against the CPU's plain operators: prints a line for each."""

import copy
import sys
import warnings

import torch
import transformers
from families import FAMILIES

from anabatic.config.sections.train_jobs import Lora
from anabatic.data.batching.packing import Batch
from anabatic.device.ops import REFERENCE_OPS
from anabatic.models import forward, fused_ops, pretrained
from anabatic.models.linear_attention import delta_net
from anabatic.models.lora import adapter
from anabatic.models.weights_reader import iter_quantized_weights
from anabatic_testing.tiny_models import COMMON_CONFIG

warnings.filterwarnings("ignore")
NAMES = list(FAMILIES)
LENGTHS = [5, 12, 12, 1, 30]


def batch():
    borders = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    ids, labels = (torch.randint(3, 96, (borders[-1],)) for _ in range(2))
    return Batch(ids, labels, torch.cat([torch.arange(n) for n in LENGTHS]), borders, borders[-1], borders[-1])


def run(model, rows, device):
    loss = forward.compute_summed_loss(model, forward.pack_batch(rows, torch.device(device)), 1 << 12)
    loss.backward()
    return loss.item(), {name: p.grad.cpu().double() for name, p in model.named_parameters() if p.grad is not None}


def compare(name, here, there, tolerance):
    (loss, grads), (expected, reference) = there, here
    worst = max(((grads[key] - reference[key]).norm() / (reference[key].norm() + 1e-6)).item() for key in reference)
    good = grads.keys() == reference.keys() and abs(loss - expected) < tolerance * expected and worst < tolerance
    print(name, "same" if good else f"differs {loss} {expected} {worst}", flush=True)


def autocast(name, model, rows):
    """Fused and plain modules in bf16 products with fp32 weights: the same to the precision of bf16."""
    losses = []
    for choice in ("off", "auto"):
        fused_ops.apply_fused_setting(model, choice, "npu")
        with torch.autocast("npu", torch.bfloat16):
            losses.append(run(model, rows, "npu:0")[0])
    print(name, "same" if abs(losses[0] - losses[1]) < 0.02 * losses[0] else f"differs {losses}", flush=True)


def main(mode, *names):
    for name in names or NAMES:
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**COMMON_CONFIG, **FAMILIES[name]})
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 0.5, std=0.2)
        model.config._attn_implementation = pretrained.ATTENTION_NAME
        delta_net.install_delta_layers(model)
        rows = batch()
        if mode == "autocast":
            autocast(name, model.to("npu:0"), rows)
            continue
        if mode in ("lora", "nf4"):
            adapter.insert_adapter(model, Lora(r=4))
            adapter.init_adapter_weights(model, Lora(r=4), 0)
            for key, parameter in model.named_parameters():
                if key.endswith("lora_B"):
                    torch.nn.init.normal_(parameter, std=0.1)
        if mode == "nf4":
            frozen = {key: value.detach() for key, value in model.named_parameters()}
            adapter.quantize_frozen_layers(model, "nf4")
            for key, one in iter_quantized_weights(model):
                one.quantize_weight(frozen[key])
        fused = copy.deepcopy(model).to("npu:0")
        told = fused_ops.apply_fused_setting(fused, "auto", "npu")
        fused_ops.install_fused_ops(model, REFERENCE_OPS)
        compare(
            f"{name} {'grouped' if 'groups' in told else 'single'}",
            run(model, rows, "cpu"),
            run(fused, rows, "npu:0"),
            1e-3,
        )


main(*sys.argv[1:])
