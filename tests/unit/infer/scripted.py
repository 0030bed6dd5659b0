"""A model that says what it is told: each token decides which comes next."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from anabatic.models.pretrained import prepare_model


def says(tokenizer, pieces, max_len=1024, endless=False):
    """Return a model that answers every conversation with these pieces, each one token and none of them twice.

    With `endless` it begins again instead of ending the answer. The blocks add nothing; embeddings tell tokens apart.
    """
    size = len(tokenizer)
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_len,
        tie_word_embeddings=False,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    ids = [tokenizer.convert_tokens_to_ids(piece) for piece in pieces]
    (start,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    chain = [start, *ids, ids[0] if endless else 2]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for before, after in zip(chain, chain[1:], strict=False):
            model.lm_head.weight[after, before] = 1.0
    return prepare_model(model.train(False), torch.device("cpu"))
