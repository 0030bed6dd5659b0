"""What config.json tells of a model's layers before it is loaded is what the loaded model has."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from anabatic.config.sections.train_jobs import Freeze
from anabatic.core.errors import ConfigError
from anabatic.models.lora import adapter
from anabatic.models.model_init import init_empty_weights
from anabatic.plan import layer_names

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(layer_names._LINEAR_LAYERS))
def test_a_family_has_the_layers_that_are_foretold(family: str) -> None:
    config = AutoConfig.for_model(family, **SIZES)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    told = config.to_dict()
    assert sorted(layer_names.list_linear_layers(told)) == sorted(adapter.find_targets(model, ["all-linear"]))
    assert layer_names.count_blocks(told) == len(adapter.find_blocks(model)) == 3
    for wanted, message in ((["q_prj"], 'no linear layer is called "q_prj"'), (["lm_head"], "lm_head")):
        with pytest.raises(ConfigError, match=message) as early:
            layer_names.select_target_modules(layer_names.list_linear_layers(told), wanted)
        with pytest.raises(ConfigError, match=message) as late:
            adapter.find_targets(model, wanted)
        assert (str(early.value), early.value.hint) == (str(late.value), late.value.hint)
    with pytest.raises(ConfigError, match="freeze.last_layers is 4, the model has 3 blocks"):
        adapter.freeze_parameters(model, Freeze(last_layers=4))


@pytest.mark.parametrize(
    "config",
    [{}, {"model_type": "gpt2"}, {"model_type": "llama"}, {"model_type": "llama", "num_hidden_layers": "3"},
     {"model_type": "llama", "num_hidden_layers": 3, "auto_map": {"AutoModelForCausalLM": "own.Model"}}],
)  # fmt: skip
def test_what_is_not_certain_is_not_told(config: dict[str, object]) -> None:
    assert layer_names.count_blocks(config) is None and layer_names.list_linear_layers(config) == []
