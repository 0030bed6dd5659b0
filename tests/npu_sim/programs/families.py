"""Small models of many families from their configuration, on the CPU and on the device: prints a line for each.

A line says "same" when losses, gradient norms and greedily generated tokens agree in every bit.
"""

import sys
import warnings

import torch
import transformers

warnings.filterwarnings("ignore")

SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
WINDOW = dict(sliding_window=8, head_dim=8)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
ROUTED = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1, first_k_dense_replace=1
)
# Routers that sum scores are not among those compared under autocast: torch_npu sums in float32, the CPU in bfloat16.
LATENT = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4
)
FAMILIES = {
    "Llama": {},
    "Mistral": WINDOW,
    "Glm": dict(head_dim=8),
    "Glm4": dict(head_dim=8),
    "Gemma2": WINDOW,
    "Gemma3Text": WINDOW,
    "Phi3": {},
    "Olmo2": {},
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "GptOss": dict(num_local_experts=4, num_experts_per_tok=2, **WINDOW),
    "Qwen2Moe": dict(shared_expert_intermediate_size=32, **EXPERTS),
    "Qwen3Moe": dict(head_dim=8, **EXPERTS),
    "DeepseekV2": dict(n_group=2, topk_group=1, topk_method="group_limited_greedy", **ROUTED, **LATENT),
    "DeepseekV3": dict(n_group=2, topk_group=1, **ROUTED, **LATENT),
    "Glm4Moe": dict(n_group=1, topk_group=1, head_dim=8, **ROUTED),
    "Qwen3Next": dict(
        shared_expert_intermediate_size=32,
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        **EXPERTS,
    ),
}
EAGER = ("Gemma2", "GptOss")
"""Have no SDPA."""


def build(name, mode, device):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **FAMILIES[name]})
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


if __name__ == "__main__":
    for word in sys.argv[1:]:
        mode, _, names = word.partition(":")
        for name in names.split(",") if names else FAMILIES:
            here, there = run(name, mode, "cpu"), run(name, mode, "npu:0")
            print(mode, name, "same" if here == there else f"differs {here} {there}", flush=True)
