"""Adapters made elsewhere: what their configuration says is read, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from anabatic.core.errors import DataError
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.models import pretrained
from anabatic.models.lora import adapter, adapter_config
from anabatic_testing.tiny_corpora import write_byte_tokenizer
from anabatic_testing.tiny_models import build_tiny_model

GOOD = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
IDS = torch.tensor([[5, 9, 33, 7, 120, 4, 4, 61]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": None}, "is damaged"),
        ({"r": "many"}, "is damaged: invalid literal"),
        ({"r": 0}, "is damaged: lora.r is 0"),
        ({"lora_alpha": "much"}, "is damaged: could not convert"),
        ({"target_modules": 3}, "is damaged"),
        ({"rank_pattern": {"q_proj": 8}}, "ranks differ from layer to layer"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is pissa_niter_16: the adapter fits a base model"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is olora"),
        ({"use_qalora": True}, "use_qalora is set, which is not done here"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is set"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        adapter_config.parse_lora_settings({**GOOD, **changes}, tmp_path)
    assert adapter_config.ADAPTER_CONFIG_FILE in str(caught.value) and caught.value.hint


def test_a_key_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="adapter_config.json lacks 'lora_alpha'"):
        adapter_config.parse_lora_settings({key: value for key, value in GOOD.items() if key != "lora_alpha"}, tmp_path)


def test_values_that_change_nothing_are_read(tmp_path: Path) -> None:
    some = {"init_lora_weights": "gaussian", "use_qalora": False, "rank_pattern": {}, "layer_replication": None}
    assert adapter_config.parse_lora_settings({**GOOD, **some}, tmp_path).alpha == 8


@pytest.mark.parametrize("text", ["{}", "[]", '{"r": 8}'])
def test_a_file_that_is_no_adapters(tmp_path: Path, text: str) -> None:
    (tmp_path / adapter_config.ADAPTER_CONFIG_FILE).write_text(text)
    with pytest.raises(DataError, match="adapter_config.json says no peft_type"):
        adapter_config.read_adapter_config(tmp_path)


def test_a_file_without_adapters(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="adapter_model.safetensors is missing"):
        adapter_config.list_adapted_layers(tmp_path)
    save_file({"weight": torch.zeros(2)}, tmp_path / adapter_config.ADAPTER_WEIGHTS_FILE)
    with pytest.raises(DataError, match="holds no adapter: 1 tensors"):
        adapter_config.list_adapted_layers(tmp_path)
    (tmp_path / adapter_config.ADAPTER_WEIGHTS_FILE).write_bytes(b"\x10")
    with pytest.raises(DataError, match="cannot be read"):
        adapter_config.list_adapted_layers(tmp_path)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's own
@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": r".*layers\.1\..*(q_proj|down_proj)"},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
    ],
)
def test_an_expression_and_a_part_of_the_blocks(tmp_path: Path, targets: dict[str, Any]) -> None:
    """ms-swift saves an expression; the layers are those that have tensors, there and back."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    tok = tokenizers.load_tokenizer(write_byte_tokenizer(tmp_path / "tok"))
    pretrained.save_model(build_tiny_model(), tmp_path / "base", tok)

    def fresh() -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()

    def logits(model: Any) -> torch.Tensor:
        out: torch.Tensor = model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
        return out

    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **targets)
    theirs = peft.get_peft_model(fresh(), config).eval()
    theirs.save_pretrained(tmp_path / "peft")
    wanted = logits(theirs)

    ours = fresh()
    lora = adapter.insert_saved_adapter(ours, tmp_path / "peft")
    adapter.load_adapter(ours, tmp_path / "peft")
    assert not torch.allclose(wanted, logits(fresh()), atol=1e-3)
    torch.testing.assert_close(logits(ours), wanted, atol=1e-5, rtol=1e-5)

    adapter.save_adapter(ours, tmp_path / "saved", tok, lora, tmp_path / "base")
    named = json.loads((tmp_path / "saved" / adapter_config.ADAPTER_CONFIG_FILE).read_text())["target_modules"]
    assert len(named) == 2 and all(name.startswith("model.layers.1.") for name in named)
    again = peft.PeftModel.from_pretrained(fresh(), tmp_path / "saved").eval()
    torch.testing.assert_close(logits(again), wanted, atol=1e-5, rtol=1e-5)
