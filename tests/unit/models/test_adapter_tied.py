"""An embedding that is the head's matrix too, trained whole beside an adapter: PEFT computes the same."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from anabatic.config.sections.train_jobs import Lora
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.models.lora import adapter
from anabatic_testing.tiny_corpora import write_byte_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's own


@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_peft_ties_what_was_tied(tmp_path: Path, saved: list[str]) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "base")
    model, lora = AutoModelForCausalLM.from_pretrained(tmp_path / "base"), Lora(r=2, modules_to_save=saved)
    adapter.insert_adapter(model, lora)
    adapter.init_adapter_weights(model, lora, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)
    adapter.save_adapter(
        model, tmp_path / "saved", tokenizers.load_tokenizer(write_byte_tokenizer(tmp_path)), lora, tmp_path / "base"
    )
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "saved").eval()
    ids = torch.arange(20).unsqueeze(0)
    torch.testing.assert_close(theirs(ids).logits, model.eval()(ids).logits, rtol=1e-4, atol=1e-4)
