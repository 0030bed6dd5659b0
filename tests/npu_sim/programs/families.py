"""Small models of many families from their configuration, on the CPU and on the device: prints a line for each.

A line says "same" when losses, gradient norms and greedily generated tokens agree in every bit; under autocast, when
losses and norms agree within the rounding of bf16: the simulator multiplies in fp32 on a CPU without bf16.
"""

import sys
import warnings

import torch
import transformers

from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS

warnings.filterwarnings("ignore")

# Routers that sum scores are not among those compared under autocast: torch_npu sums in float32, the CPU in bfloat16.
FAMILIES = {
    name: FAMILY_CONFIGS[name]
    for name in (
        "Llama", "Mistral", "Glm", "Glm4", "Gemma2", "Gemma3Text", "Phi3", "Olmo2", "Mixtral", "GptOss", "Qwen2Moe",
        "Qwen3Moe", "DeepseekV2", "DeepseekV3", "Glm4Moe", "Qwen3Next", "Qwen3_5Text",
    )
}  # fmt: skip
EAGER = ("Gemma2", "GptOss")
"""Have no SDPA."""
ROUNDING = 2.0**-6
"""Of a loss: bf16 rounds to 2^-9, and a step adds up a few of them."""


def build(name, mode, device):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**COMMON_CONFIG, **FAMILIES[name]})
    config._attn_implementation = "eager" if name in EAGER else "sdpa"
    if mode == "classify":
        config.num_labels = 3
        return transformers.AutoModelForSequenceClassification.from_config(config).to(device)
    model = transformers.AutoModelForCausalLM.from_config(config).to(device)
    if mode == "checkpoint":
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    if mode == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    return model


def run(name, mode, device):
    model = build(name, mode, device).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    data = torch.Generator().manual_seed(1)
    numbers = []
    for _ in range(3):
        ids = torch.randint(3, 96, (2, 24), generator=data).to(device)
        mask = torch.ones_like(ids)
        mask[1, 20:] = 0
        labels = torch.tensor([1, 2], device=device) if mode == "classify" else ids
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mode == "bf16"):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        numbers += [loss.item(), torch.nn.utils.clip_grad_norm_(parameters, 1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
    if mode == "classify":
        return numbers, None
    model.eval()
    prompt = torch.tensor([[0, 5, 6, 7], [3, 4, 5, 6]], device=device)
    words = model.generate(
        input_ids=prompt, attention_mask=(prompt != 0).long(), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    return numbers, words.tolist()


def agree(mode, here, there):
    if mode != "bf16":
        return here == there
    return all(abs(one - other) <= ROUNDING * abs(one) for one, other in zip(here[0], there[0], strict=True))


if __name__ == "__main__":
    for word in sys.argv[1:]:
        mode, _, names = word.partition(":")
        for name in names.split(",") if names else FAMILIES:
            here, there = run(name, mode, "cpu"), run(name, mode, "npu:0")
            print(mode, name, "same" if agree(mode, here, there) else f"differs {here} {there}", flush=True)
