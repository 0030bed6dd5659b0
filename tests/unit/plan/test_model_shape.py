"""Shapes from config.json: the numbers of parameters are those of real models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from anabatic.config.pretrain import PretrainJob
from anabatic.config.sections.common import Data
from anabatic.core.errors import AnabaticError, DataError
from anabatic.plan import model_shape
from anabatic.plan.shapes import config_shape

PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "meta-llama/Meta-Llama-3.1-8B-Instruct": 8_030_261_248,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
}
"""As the safetensors headers of these models say."""
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
    "llama": {"attention_bias": True},
    "mistral": {},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3_text": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_models_have_the_published_number_of_parameters(name: str) -> None:
    found, source = model_shape.get_named_shape(name)
    assert found.params == PUBLISHED[name] and "published" in source


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_that_transformers_makes(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found, _ = model_shape.get_named_shape(str(tmp_path))
    assert found.params == sum(parameter.numel() for parameter in model.parameters())
    assert found.block_params == sum(parameter.numel() for parameter in model.model.layers[0].parameters())


def test_the_dial_gives_the_model_that_pretrain_builds() -> None:
    job = PretrainJob(tokenizer="nowhere", data=Data(train=["x"]))
    found, source = model_shape.get_job_shape(job)
    assert (found.layers, found.hidden, found.vocab) == (12, 768, model_shape.DEFAULT_VOCAB_SIZE)
    assert "not there yet" in source


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no JSON object"),
        ("{}", "has no hidden_size"),
        (json.dumps({**SIZES, "hidden_size": "32"}), "hidden_size is '32'"),
        (json.dumps({**SIZES, "num_hidden_layers": 0}), "num_hidden_layers is 0"),
        (json.dumps({**SIZES, "vocab_size": True}), "vocab_size is True"),
        (json.dumps({**SIZES, "kv_lora_rank": 512}), "blocks of another kind (kv_lora_rank)"),
        (
            json.dumps({**SIZES, "num_key_value_heads": 3}),
            "num_attention_heads 4 is no multiple of num_key_value_heads 3",
        ),
        (json.dumps({**SIZES, "head_dim": None, "hidden_size": 34}), "hidden_size 34 is no multiple of num_attention"),
        (json.dumps({**SIZES, "hidden_size": 10**30}), "not a whole number from 1 to 1,000,000,000"),
        pytest.param("[" * 100_000, "cannot be read", id="deep"),
    ],
)
def test_a_config_that_is_none_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError) as caught:
        model_shape.get_named_shape(str(tmp_path))
    assert why in str(caught.value) and caught.value.hint


def test_a_config_that_is_no_description_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(257 << 20)
    with pytest.raises(DataError, match=r"has 257\.0 MiB"):
        model_shape.get_named_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "told"),
    [("qwen2", ""), ("gpt9", "model_type gpt9 is not known here: taken for one like Llama"), (None, "no model_type")],
)
def test_a_family_that_is_not_known_is_named(kind: str | None, told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": kind}))
    found, source = model_shape.get_named_shape(str(tmp_path))
    assert found.layers == 3 and (told in source if told else source == str(tmp_path / "config.json"))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*SIZES, "model_type", "text_config", "num_experts", "attention_bias"]),
        st.none() | st.booleans() | st.integers(-2, 4) | st.text(max_size=3) | st.just(SIZES),
    )
)
def test_whatever_a_config_holds_it_is_a_shape_or_an_error(config: dict[str, object]) -> None:
    try:
        found = config_shape.read_shape({**SIZES, **config}, "config.json")
    except AnabaticError as error:
        assert "config.json" in str(error)
    else:
        assert found.params > 0 and found.block_params > 0
