"""LoRA: the same numbers as PEFT's, forward, gradient and on disk."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from anabatic.config.sections.train_jobs import Lora
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.models import pretrained
from anabatic.models.lora import adapter, adapter_config
from anabatic.models.lora.linear import LoraLinear
from anabatic_testing.tiny_corpora import write_byte_tokenizer
from anabatic_testing.tiny_models import build_tiny_model

peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's own

IDS = torch.tensor([[5, 9, 33, 7, 120, 4, 4, 61]])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tok = tokenizers.load_tokenizer(write_byte_tokenizer(tmp_path / "tok"))
    torch.manual_seed(0)
    model = build_tiny_model()
    for parameter in model.parameters():  # block outputs start at zero: nothing would depend on the adapters there
        torch.nn.init.normal_(parameter, 0.0, 0.1) if parameter.dim() == 2 else None
    pretrained.save_model(model, tmp_path / "base", tok)
    return tmp_path / "base"


def plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
    return out


def shake(model: torch.nn.Module) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in adapter.find_lora_layers(model).values():
            layer.lora_B.normal_(0.0, 0.1)
            if layer.lora_magnitude is not None:
                layer.lora_magnitude.mul_(1.1)


KINDS = {
    "plain": Lora(r=4),
    "alpha": Lora(r=4, alpha=3.0, target_modules=["q_proj", "down_proj"]),
    "rslora": Lora(r=4, use_rslora=True),
    "dora": Lora(r=4, use_dora=True),
    "whole": Lora(r=4, target_modules=["v_proj"], modules_to_save=["embed_tokens"]),
    "pissa": Lora(r=4, init="pissa"),
    "pissa-wide": Lora(r=80, init="pissa"),  # more than some layers have rows or columns
    "pissa-rslora": Lora(r=4, init="pissa", use_rslora=True),
}


def put_in(model, lora: Lora, seed: int = 0) -> None:
    adapter.insert_adapter(model, lora)
    adapter.init_adapter_weights(model, lora, seed)


def read(model, folder: Path) -> Lora:
    lora = adapter.insert_saved_adapter(model, folder)
    adapter.load_adapter(model, folder)
    return lora


@pytest.mark.parametrize("kind", KINDS)
def test_peft_reads_what_we_save(base: Path, tmp_path: Path, kind: str) -> None:
    model, lora = plain(base), KINDS[kind]
    before = logits(model)
    put_in(model, lora, 3)
    assert torch.allclose(logits(model), before, atol=1e-4)  # it begins as the base model
    shake(model)
    ours = logits(model)
    assert not torch.allclose(ours, before, atol=1e-2)
    adapter.save_adapter(model, tmp_path / "saved", tokenizers.load_tokenizer(base), lora, base)
    theirs = peft.PeftModel.from_pretrained(plain(base), tmp_path / "saved")
    torch.testing.assert_close(logits(theirs), ours, atol=2e-4, rtol=1e-4)

    again = plain(base)
    read(again, tmp_path / "saved")
    torch.testing.assert_close(logits(again), ours, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(logits(adapter.merge_into_linears(again)), ours, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_we_read_what_peft_saves(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, **options)
    theirs = peft.get_peft_model(plain(base), config)
    theirs.save_pretrained(tmp_path / "peft")
    ours = plain(base)
    lora = read(ours, tmp_path / "peft")
    assert lora.r == 4 and adapter.compute_scale(lora) == (4.0 if options.get("use_rslora") else 2.0)
    torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
def test_gradients_are_pefts(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    ours = plain(base).double()
    put_in(ours, Lora(r=4, **options), 0)
    for layer in adapter.find_lora_layers(ours).values():
        layer.double()
    shake(ours)
    adapter.save_adapter(ours, tmp_path / "saved", tokenizers.load_tokenizer(base), Lora(r=4, **options), base)
    theirs = peft.PeftModel.from_pretrained(plain(base).double(), tmp_path / "saved", is_trainable=True)
    for model in (ours, theirs):
        logits(model).log_softmax(-1)[..., 3].sum().backward()
    wanted = {
        name.replace("base_model.model.", "").replace(".default", "").removesuffix(".weight"): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    found = {
        name.replace("lora_magnitude", "lora_magnitude_vector"): p.grad
        for name, p in ours.named_parameters()
        if p.requires_grad
    }
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], atol=1e-9, rtol=1e-6, check_dtype=False)


def test_nothing_wide_is_saved_for_the_backward_pass() -> None:
    """Beside the input and the weights only `x A^T`."""
    layer = LoraLinear(torch.nn.Linear(32, 48, bias=False), rank=4, scale=2.0)
    layer.init_adapter(torch.Generator())
    layer.requires_grad_(True)
    layer.weight.requires_grad_(False)
    shapes: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(10, 32, requires_grad=True))
    assert sorted(shapes) == sorted([(10, 32), (48, 32), (4, 32), (48, 4), (10, 4)])


def test_dropout_is_left_out_when_evaluating(base: Path) -> None:
    model = plain(base)
    put_in(model, Lora(r=4, dropout=0.5), 0)
    shake(model)
    model.train()
    assert not torch.equal(logits(model), logits(model))
    model.eval()
    torch.testing.assert_close(
        logits(model), logits(adapter.merge_into_linears(copy.deepcopy(model)).eval()), atol=1e-5, rtol=1e-5
    )


def test_wrong_names_and_wrong_models(base: Path, tmp_path: Path) -> None:
    model = plain(base)
    with pytest.raises(ConfigError, match='no linear layer is called "q_prj". Did you mean "q_proj"') as caught:
        put_in(model, Lora(target_modules=["q_prj"]), 0)
    assert "down_proj" in caught.value.hint
    with pytest.raises(ConfigError, match='no module is called "embed_token".'):
        put_in(model, Lora(modules_to_save=["embed_token"]), 0)
    put_in(model, Lora(r=2), 0)
    adapter.save_adapter(model, tmp_path / "saved", tokenizers.load_tokenizer(base), Lora(r=2), base)
    with pytest.raises(
        DataError, match="made for another model: this one has no linear layer model.layers.1.mlp.down_proj"
    ):
        read(build_tiny_model(depth=1), tmp_path / "saved")
    (tmp_path / "saved" / adapter_config.ADAPTER_CONFIG_FILE).write_text('{"peft_type": "IA3"}')
    with pytest.raises(DataError, match="the adapter is IA3, not LORA"):
        read(build_tiny_model(), tmp_path / "saved")
