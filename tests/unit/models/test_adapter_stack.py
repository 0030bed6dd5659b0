"""Several adapters in one model: PEFT's numbers, whatever the order, the weights and what they lie on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from anabatic.config.sections.train_jobs import Lora
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.models import pretrained
from anabatic.models.lora import adapter, adapter_config, merging
from anabatic_testing.tiny_corpora import write_byte_tokenizer
from anabatic_testing.tiny_models import build_tiny_model

peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # PEFT's own
    pytest.mark.filterwarnings("ignore:.*merged multiple adapters:UserWarning"),
]

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 9, 33, 7, 120, 4, 4, 61]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stack")
    torch.manual_seed(0)
    model = build_tiny_model()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1) if parameter.dim() == 2 else None
    pretrained.save_model(model, folder / "base", tokenizers.load_tokenizer(write_byte_tokenizer(folder / "tok")))
    return folder / "base"


def plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def logits(model: Any) -> torch.Tensor:
    model.eval().set_attn_implementation("sdpa")
    out: torch.Tensor = model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
    return out.detach()


def made(base: Path, folder: Path, seed: int, **options: Any) -> Path:
    """An adapter of PEFT's with random numbers."""
    torch.manual_seed(seed)
    options = {"target_modules": "all-linear", **options}
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **options)
    peft.get_peft_model(plain(base), config).save_pretrained(folder)
    return folder


def ours(base: Path, *specs: str, named: Path | None = None) -> torch.Tensor:
    top = base if named is None else named
    return logits(pretrained.load_model(top, CPU, adapters=pretrained.resolve_merged_adapters(specs, top)))


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"target_modules": ["q_proj", "up_proj"]}),
    "rslora": ({"use_rslora": True}, {}),
    "dora on top": ({}, {"use_dora": True}),
    "dora below": ({"use_dora": True}, {}),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_one_after_the_other_as_peft_merges(base: Path, tmp_path: Path, kind: str) -> None:
    first, second = (made(base, tmp_path / str(n), n, **options) for n, options in enumerate(OPTIONS[kind]))
    theirs = peft.PeftModel.from_pretrained(plain(base), first, adapter_name="first").merge_and_unload()
    theirs = peft.PeftModel.from_pretrained(theirs, second, adapter_name="second").merge_and_unload()
    torch.testing.assert_close(ours(base, str(first), str(second)), logits(theirs), atol=1e-4, rtol=1e-4)
    # the second as the model, the first below it
    torch.testing.assert_close(ours(base, str(first), named=second), logits(theirs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, 0.25), (1.0, -1.0)])
def test_weights_are_pefts(base: Path, tmp_path: Path, weights: tuple[float, float]) -> None:
    folders = [made(base, tmp_path / str(n), n) for n in range(2)]
    theirs = peft.PeftModel.from_pretrained(plain(base), folders[0], adapter_name="0")
    theirs.load_adapter(folders[1], adapter_name="1")
    theirs.add_weighted_adapter(["0", "1"], list(weights), "both", combination_type="cat")
    theirs.set_adapter("both")
    found = ours(base, *(f"{folder}@{weight:g}" for folder, weight in zip(folders, weights, strict=True)))
    torch.testing.assert_close(found, logits(theirs), atol=1e-4, rtol=1e-4)


def test_an_adapter_on_an_adapter_knows_what_it_lies_on(base: Path, tmp_path: Path) -> None:
    first, tok = made(base, tmp_path / "first", 0), tokenizers.load_tokenizer(base)
    shares = pretrained.resolve_merged_adapters([f"{first}@0.5"], base)
    model, lora = pretrained.load_model(base, CPU, adapters=shares), Lora(r=2)
    adapter.insert_adapter(model, lora)
    adapter.init_adapter_weights(model, lora, 0)
    torch.manual_seed(1)
    for layer in adapter.find_lora_layers(model).values():
        torch.nn.init.normal_(layer.lora_B, 0.0, 0.1)
    second = tmp_path / "second"
    adapter.save_adapter(model, second, tok, lora, base, extra_config=merging.make_merged_record(shares))
    wanted = logits(model)
    torch.testing.assert_close(ours(base, named=second), wanted)  # found by itself
    torch.testing.assert_close(ours(base, str(second)), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours(base, f"{first}@0.5", named=second), wanted)
    merged = adapter.merge_into_linears(
        pretrained.load_model(second, CPU, adapters=pretrained.resolve_merged_adapters([], second))
    )
    torch.testing.assert_close(logits(merged), wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="was trained on top of .*first@0.5, not of .*first$"):
        pretrained.resolve_merged_adapters([str(first)], second)
    first.rename(tmp_path / "gone")
    with pytest.raises(DataError, match="trained on top of the adapter .*first, which is not there"):
        pretrained.resolve_merged_adapters([], second)


def test_what_cannot_be_joined(base: Path, tmp_path: Path) -> None:
    whole = made(base, tmp_path / "whole", 0, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    again = made(base, tmp_path / "again", 1, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    dora = made(base, tmp_path / "dora", 2, use_dora=True)
    with pytest.raises(ConfigError, match=r"again replaces model.embed_tokens.weight, which .*whole changed"):
        ours(base, str(whole), str(again))
    with pytest.raises(ConfigError, match="DoRA has no part"):
        ours(base, f"{dora}@0.5")
    with pytest.raises(ConfigError, match="trained whole has no part"):
        ours(base, f"{whole}@2")
    with pytest.raises(ConfigError, match="is a whole model, no adapter"):
        ours(base, str(base))
    with pytest.raises(DataError, match="does not exist"):
        ours(base, str(tmp_path / "nothing"))
    pretrained.save_model(build_tiny_model(depth=1), tmp_path / "small", tokenizers.load_tokenizer(base))
    with pytest.raises(DataError, match="made for another model"):
        ours(tmp_path / "small", str(dora))


@pytest.mark.parametrize("spec", ["a@", "a@b", "a@0", "a@1.2.3", "a@nan", "a@inf", "", "  "])
def test_weights_that_are_none(spec: str) -> None:
    with pytest.raises(ConfigError, match="is no weight|name is empty"):
        adapter_config.parse_adapter_spec(spec)


def test_a_folder_with_an_at_sign(tmp_path: Path) -> None:
    (tmp_path / "run@2").mkdir()
    assert adapter_config.parse_adapter_spec(f"{tmp_path}/run@2") == (f"{tmp_path}/run@2", 1.0)
    assert adapter_config.parse_adapter_spec(f"{tmp_path}/run@2@-0.5") == (f"{tmp_path}/run@2", -0.5)
    assert adapter_config.parse_adapter_spec("owner@home/name") == ("owner@home/name", 1.0)


def test_a_damaged_record(base: Path, tmp_path: Path) -> None:
    folder = made(base, tmp_path / "one", 0)
    config = json.loads((folder / adapter_config.ADAPTER_CONFIG_FILE).read_text())
    (folder / adapter_config.ADAPTER_CONFIG_FILE).write_text(json.dumps({**config, merging.RECORD_KEY: [{"path": 3}]}))
    with pytest.raises(DataError, match="merged_adapters is damaged"):
        pretrained.resolve_merged_adapters([], folder)
