"""LoRA on stacked experts: the same numbers as PEFT's target_parameters, forward, gradient, on disk and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from anabatic.config.sections.train_jobs import Lora
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.device.ops import get_device_ops
from anabatic.models import fused_ops, pretrained
from anabatic.models.lora import adapter, expert_adapter, multi_adapter
from anabatic_testing.tiny_corpora import write_byte_tokenizer
from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS, build_tiny_model

peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # PEFT's own
    pytest.mark.filterwarnings("ignore:.*merged multiple adapters:UserWarning"),
]

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 9, 33, 7, 120, 4, 4, 61, 3, 3, 8, 90]])
FAMILIES = {"Qwen3Moe": "mlp", "GptOss": "mlp", "DeepseekV3": "mlp"}
TARGETS = ["q_proj", "all-experts"]


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    settings: dict[str, Any] = {**COMMON_CONFIG, **FAMILY_CONFIGS[request.param], "vocab_size": 320}
    if request.param == "GptOss":
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    if request.param == "DeepseekV3":
        settings["q_lora_rank"] = None  # with a projection of queries called q_proj
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{request.param}Config")(**settings))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 0.5, 0.2)
    pretrained.save_model(model, folder / "base", tokenizers.load_tokenizer(write_byte_tokenizer(folder / "tok")))
    return folder / "base"


def plain(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model.config._experts_implementation = "eager"  # the grouped product of PyTorch takes no float64
    return model


def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
    return out


def adapted(folder: Path, lora: Lora) -> Any:
    model = plain(folder)
    adapter.insert_adapter(model, lora)
    adapter.init_adapter_weights(model, lora, 0)
    return model


def shake(model: Any) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(0.0, 0.3)


@pytest.mark.parametrize("targets", [TARGETS, ["all-experts"], ["q_proj", "experts.down_proj"]])
def test_peft_computes_what_we_trained(base: Path, tmp_path: Path, targets: list[str]) -> None:
    lora = Lora(r=4, target_modules=targets)
    ours = adapted(base, lora).double()
    before = logits(plain(base).double())
    torch.testing.assert_close(logits(ours), before, rtol=1e-9, atol=1e-9)  # it begins as the base model
    shake(ours)
    assert not torch.allclose(logits(ours), before, atol=1e-2)
    adapter.save_adapter(ours, tmp_path / "saved", tokenizers.load_tokenizer(base), lora, base)
    theirs = peft.PeftModel.from_pretrained(plain(base).double(), tmp_path / "saved", is_trainable=True).double()
    for model in (ours, theirs):
        logits(model).log_softmax(-1)[..., 3].sum().backward()
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-6, atol=1e-6)
    wanted = {
        name.removeprefix("base_model.model.").replace(".default", "").removesuffix(".weight"): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    experts = adapter.find_expert_adapters(ours)
    for wrapper, weight in expert_adapter.make_peft_names([*experts]).items():
        a, b = experts[weight].lora_A.grad, experts[weight].lora_B.grad
        assert a is not None and b is not None
        rank_major = torch.stack([torch.stack([*part]) for part in b.permute(1, 2, 0)]).flatten(1)
        torch.testing.assert_close(a.flatten(0, 1), wanted.pop(f"{wrapper}.lora_A"), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rank_major, wanted.pop(f"{wrapper}.lora_B"), rtol=1e-5, atol=1e-6)
    for name, grad in wanted.items():
        torch.testing.assert_close(ours.get_parameter(name).grad, grad, rtol=1e-5, atol=1e-6)


def test_the_fused_forward_the_plain_one_and_the_merged_weights_agree(base: Path) -> None:
    model = adapted(base, Lora(r=4, target_modules=TARGETS))
    shake(model)
    expected = logits(model)  # no fused operators: the experts alone have a forward of ours
    fused_ops.install_fused_ops(model, get_device_ops("cpu"))
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    fused_ops.remove_fused_ops(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    merged = adapter.merge_into_linears(model)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parameters", [["experts.gate_up_proj", "experts.down_proj"], ["experts.gate_up_proj"]])
def test_we_read_and_merge_what_peft_saves(base: Path, tmp_path: Path, parameters: list[str]) -> None:
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["o_proj"], target_parameters=parameters, init_lora_weights=False
    )
    theirs = peft.get_peft_model(plain(base), config)
    theirs.save_pretrained(tmp_path / "peft")
    expected = logits(theirs.eval()).detach()
    ours = plain(base)
    adapter.insert_saved_adapter(ours, tmp_path / "peft")
    adapter.load_adapter(ours, tmp_path / "peft")
    torch.testing.assert_close(logits(ours), expected, rtol=1e-4, atol=1e-4)
    merged = pretrained.load_model(
        base, CPU, adapters=pretrained.resolve_merged_adapters([str(tmp_path / "peft")], base)
    )
    fused_ops.remove_fused_ops(merged)
    merged.set_attn_implementation("eager")
    torch.testing.assert_close(logits(merged.eval()), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(DataError, match="adapts experts, which no request can choose"):
        multi_adapter.AdapterRegistry(plain(base)).add_adapter("a", tmp_path / "peft")
    config_file = tmp_path / "peft" / "adapter_config.json"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "target_parameters": ["gate.weight"]}))
    with pytest.raises(DataError, match=r"target_parameters is \['gate.weight'\]"):
        adapter.insert_saved_adapter(plain(base), tmp_path / "peft")


def test_what_peft_does_not_know_is_refused(base: Path) -> None:
    for options, word in (({"dropout": 0.1}, "dropout"), ({"use_dora": True}, "use_dora"), ({"init": "pissa"}, "init")):
        with pytest.raises(ConfigError, match=f"lora.{word} is .*, and experts have an adapter"):
            adapter.insert_adapter(plain(base), Lora(target_modules=TARGETS, **options))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match='"shared.experts.down_proj" matches no stacked weight'):
        adapter.insert_adapter(plain(base), Lora(target_modules=["shared.experts.down_proj"]))


def test_a_dense_model_has_no_experts() -> None:
    with pytest.raises(ConfigError, match='"all-experts" matches no stacked weight') as caught:
        adapter.insert_adapter(build_tiny_model(), Lora(target_modules=["all-linear", "all-experts"]))
    assert "leave it out" in str(caught.value.hint)
