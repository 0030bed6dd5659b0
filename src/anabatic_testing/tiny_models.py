"""Tiny tokenizers and models built on the spot, and configurations of small models of many families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from anabatic.config.pretrain import PretrainModel
from anabatic.config.sections.common import Data
from anabatic.config.tokenizer import TokenizerTrainJob
from anabatic.data.tokenizer import bpe_training, hf_folder
from anabatic.models.model_init import build_model
from anabatic.models.pretrained import save_model
from anabatic.plan.depth_dial import derive_model_sizes

CORPUS_TEXT = "the wind moves upward along the warm slope of the hill and carries the bird with it"


def write_tiny_text(folder: Path, documents: int = 200) -> Path:
    """Write a small regular corpus of JSON lines, which a tiny model learns in a few steps; return its path."""
    path = folder / "text.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        words = CORPUS_TEXT.split()
        for number in range(documents):
            turned = words[number % len(words) :] + words[: number % len(words)]
            file.write('{"text": "' + " ".join(turned * (1 + number % 3)) + '."}\n')
    return path


def train_tiny_tokenizer(folder: Path, text: Path, vocab_size: int = 320) -> Path:
    """Train a tokenizer on `text` and return its folder."""
    out = folder / "tokenizer"
    bpe_training.train_tokenizer(TokenizerTrainJob(out=str(out), vocab_size=vocab_size, data=Data(train=[str(text)])))
    return out


def build_tiny_model(vocab_size: int = 320, depth: int = 2, seq_len: int = 64, seed: int = 0) -> PreTrainedModel:
    """Build a small Qwen3 with random weights everywhere, zero matrices included, so that gradients reach all."""
    config = PretrainModel(depth=depth, width=64, head_dim=32, kv_heads=1, tie_embeddings=False)
    model = build_model(derive_model_sizes(config, vocab_size), config, vocab_size, seq_len, torch.device("cpu"), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(0.0, 0.05, generator=generator)
    return model


def build_tiny_qwen2(**settings: Any) -> PreTrainedModel:
    """Return a Qwen2 with transformers' own random weights; `settings` are those of its configuration."""
    sizes = dict(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
    )
    return Qwen2ForCausalLM(Qwen2Config(**{**sizes, **settings}))


def save_tiny_chat_model(folder: Path, max_position_embeddings: int = 512) -> Path:
    """Save a small Qwen2 with a tokenizer and its own chat template to `folder/model`, and return that folder."""
    tokenizer = hf_folder.load_tokenizer(train_tiny_tokenizer(folder, write_tiny_text(folder)))
    with torch.random.fork_rng(devices=[]):  # the same weights whatever ran before
        torch.manual_seed(0)
        model = build_tiny_qwen2(max_position_embeddings=max_position_embeddings)
    save_model(model, folder / "model", tokenizer)
    return folder / "model"


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
    "Qwen3_5Text": dict(head_dim=8, **_LINEAR_ATTENTION),
    "Qwen3_5MoeText": dict(shared_expert_intermediate_size=32, head_dim=8, **_LINEAR_ATTENTION, **_MOE),
}
"""What each has of its own."""
