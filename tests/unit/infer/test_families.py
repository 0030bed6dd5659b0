"""The tokens of transformers' greedy `generate`, for every shape, with shared beginnings and requests that wait."""

from __future__ import annotations

import copy
from random import Random

import pytest
import torch
import transformers

from anabatic.infer.engine import Engine
from anabatic.infer.sampling import Sampling
from anabatic.models.pretrained import prepare_model
from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama", "Mistral", "DeepseekV3", "Qwen3Next", "Qwen3_5Text"])
def test_greedy_is_transformers_generate(family, tokenizer):
    config = getattr(transformers, f"{family}Config")(
        **{
            **COMMON_CONFIG,
            **FAMILY_CONFIGS[family],
            "vocab_size": 200,
            "initializer_range": 0.3,
            "attn_implementation": "eager",
        }
    )
    torch.manual_seed(0)
    plain = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    ours = prepare_model(copy.deepcopy(plain), torch.device("cpu"))
    rng = Random(0)
    beginning = [rng.randrange(3, 200) for _ in range(20)]
    prompts = [beginning * (n % 3 > 0) + [rng.randrange(3, 200) for _ in range(rng.randint(1, 12))] for n in range(9)]
    engine = Engine(ours, tokenizer, max_batch=5, max_len=64, cache_tokens=160, step_tokens=16)
    sampling = Sampling(temperature=0.0, max_new_tokens=20)
    answers = engine.generate(prompts, sampling, [])
    assert engine.get_load().preemptions + engine.get_load().shared_tokens > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        out = plain.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answer.ids == out[0, len(prompt) :].tolist()
    assert len({tuple(answer.ids) for answer in answers}) > 4
