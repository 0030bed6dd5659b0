"""Configurations of small models of many families, by transformers' class names."""

from __future__ import annotations

from typing import Any

COMMON_CONFIG: dict[str, Any] = dict(
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
"""What they have in common."""
_SLIDING_WINDOW = dict(sliding_window=8, head_dim=8)
_LOCAL_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_ROUTED_EXPERTS = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1, first_k_dense_replace=1
)
_LATENT_ATTENTION = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4
)
_LINEAR_ATTENTION = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": dict(head_dim=8),
    "Llama": {},
    "Mistral": _SLIDING_WINDOW,
    "Glm": dict(head_dim=8),
    "Glm4": dict(head_dim=8),
    "Gemma": dict(head_dim=8),
    "Gemma2": _SLIDING_WINDOW,
    "Gemma3Text": _SLIDING_WINDOW,
    "Phi3": {},
    "Olmo2": {},
    "Granite": dict(logits_scaling=3.0),
    "Cohere": {},
    "Mixtral": _LOCAL_EXPERTS,
    "GptOss": {**_LOCAL_EXPERTS, **_SLIDING_WINDOW},
    "Qwen2Moe": dict(shared_expert_intermediate_size=32, **_MOE),
    "Qwen3Moe": dict(head_dim=8, **_MOE),
    "DeepseekV2": dict(
        n_group=2, topk_group=1, topk_method="group_limited_greedy", **_ROUTED_EXPERTS, **_LATENT_ATTENTION
    ),
    "DeepseekV3": dict(n_group=2, topk_group=1, **_ROUTED_EXPERTS, **_LATENT_ATTENTION),
    "Glm4Moe": dict(n_group=1, topk_group=1, head_dim=8, **_ROUTED_EXPERTS),
    "Qwen3Next": dict(shared_expert_intermediate_size=32, head_dim=8, **_LINEAR_ATTENTION, **_MOE),
}
"""What each has of its own."""
