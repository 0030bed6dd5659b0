"""Model families: a packed batch gives the loss and gradients of transformers' own rows one by one, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from anabatic.core.errors import DataError
from anabatic.data.batching.packing import Batch
from anabatic.device.ops import get_device_ops
from anabatic.models import forward, fused_ops, pretrained
from anabatic.models.linear_attention import delta_net
from anabatic_testing.random_models import iter_cached_logits
from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS

CPU = torch.device("cpu")
NORMS, GATED, ROTARY, MOE = "RMSNorms", "gated MLPs", "rotary embeddings", "expert layers"
# family: (class, what its configuration adds to that of anabatic_testing, what is fused in two layers)
_KINDS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "qwen2": ("Qwen2", {}, {NORMS: 5, GATED: 2, ROTARY: 2}),
    "qwen2-window": (
        "Qwen2",
        dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
        {NORMS: 5, GATED: 2, ROTARY: 2},
    ),
    "qwen3": ("Qwen3", {}, {NORMS: 9, GATED: 2, ROTARY: 2}),
    "llama": ("Llama", {}, {NORMS: 5, GATED: 2, ROTARY: 2}),
    "mistral": ("Mistral", {}, {NORMS: 5, GATED: 2, ROTARY: 2}),
    "glm": ("Glm", {}, {NORMS: 5, GATED: 2, ROTARY: 2}),
    "glm4": ("Glm4", {}, {NORMS: 9, GATED: 2, ROTARY: 2}),
    "gemma": ("Gemma", {}, {NORMS: 5, ROTARY: 2}),
    "gemma2": ("Gemma2", {}, {NORMS: 9, ROTARY: 2}),
    "gemma3": (
        "Gemma3Text",
        dict(query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention"]),
        {NORMS: 13, ROTARY: 2},
    ),
    "phi3": ("Phi3", dict(sliding_window=8), {NORMS: 5, GATED: 2, ROTARY: 2}),
    "olmo2": ("Olmo2", {}, {NORMS: 9, GATED: 2, ROTARY: 2}),
    "granite": ("Granite", {}, {NORMS: 5, GATED: 2, ROTARY: 2}),
    "cohere": ("Cohere", {}, {GATED: 2, ROTARY: 2}),
    "mixtral": ("Mixtral", {}, {NORMS: 5, ROTARY: 2, MOE: 2}),
    "gpt-oss": ("GptOss", {}, {NORMS: 5, MOE: 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        dict(use_sliding_window=True, sliding_window=8),
        {NORMS: 5, GATED: 2, ROTARY: 2, MOE: 2},
    ),
    "qwen3-moe": ("Qwen3Moe", {}, {NORMS: 9, ROTARY: 2, MOE: 2}),
    "deepseek-v2": (
        "DeepseekV2",
        {},
        {NORMS: 9, GATED: 2, MOE: 1},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        dict(v_head_dim=12),
        {NORMS: 9, GATED: 2, MOE: 1},
    ),
    "glm4-moe": (
        "Glm4Moe",
        {},
        {NORMS: 5, GATED: 2, ROTARY: 2, MOE: 1},
    ),
    "qwen3-next": (
        "Qwen3Next",
        dict(linear_value_head_dim=12),
        {NORMS: 7, GATED: 2, ROTARY: 1, MOE: 2},
    ),
    "qwen3.5": ("Qwen3_5Text", {}, {NORMS: 7, GATED: 2, ROTARY: 1}),
}
FAMILIES = {family: (name, {**FAMILY_CONFIGS[name], **more}, fused) for family, (name, more, fused) in _KINDS.items()}


def build(name: str, settings: dict[str, Any]) -> Any:
    """transformers' own model of the family in float64, its attention and experts in their plainest form."""
    torch.manual_seed(0)
    if name == "GptOss":
        settings = {**settings, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    config = getattr(transformers, f"{name}Config")(**{**COMMON_CONFIG, **settings})
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 0.5, std=0.2)
    return model


def packed(model: Any) -> Any:
    ours = copy.deepcopy(model)
    ours.config._attn_implementation = pretrained.ATTENTION_NAME
    delta_net.install_delta_layers(ours)
    return ours


def batch_of(lengths: list[int]) -> Batch:
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    ids, labels = (torch.randint(3, 96, (borders[-1],)) for _ in range(2))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(ids, labels, positions, borders, borders[-1], borders[-1])


def check_loss_and_gradients(ours: Any, reference: Any, batch: Batch, tolerance: float = 1e-5) -> None:
    """The loss is summed, statistics and logits are made in fp32: gradients agree to that."""
    loss = forward.compute_summed_loss(ours, forward.pack_batch(batch, CPU), 1 << 12)
    loss.backward()
    expected = torch.zeros((), dtype=torch.float64)
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        logits = reference(input_ids=batch.input_ids[None, start:end]).logits[0].double()
        expected = expected + F.cross_entropy(logits, batch.labels[start:end], reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance / 10, atol=1e-4)
    for (name, mine), theirs in zip(ours.named_parameters(), reference.named_parameters(), strict=True):
        assert (mine.grad is None) == (theirs[1].grad is None), name
        if mine.grad is not None and theirs[1].grad is not None:
            scale = theirs[1].grad.abs().max().item() + 1e-9
            torch.testing.assert_close(mine.grad / scale, theirs[1].grad / scale, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("fused", ["auto", "off"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_batch_equals_row_by_row(family: str, fused: str) -> None:
    name, settings, expected = FAMILIES[family]
    reference = build(name, settings)
    ours = packed(reference)
    if fused == "auto":
        assert dict(fused_ops.install_fused_ops(ours, get_device_ops("cpu")).fused) == expected
    lengths = [5, 12, 12, 1, 30]
    if "linear_attention" in settings.get("layer_types", ()):  # its rule is computed in fp32, in chunks of 64 tokens
        check_loss_and_gradients(ours, reference, batch_of([*lengths, 130, 1, 64]), 2e-4)
    else:
        check_loss_and_gradients(ours, reference, batch_of(lengths))


@pytest.mark.parametrize("name", ["Qwen3Next", "Qwen3_5MoeText"])
def test_blocks_of_experts_beside_linear_attention(name: str) -> None:
    """Router, experts and the shared expert with its gate, in transformers' own forward pass of whole rows.

    Its linear attention computes in fp32: its other layers alone show the blocks' rounding.
    """
    reference = build(name, {**FAMILY_CONFIGS[name], "layer_types": ["full_attention", "full_attention"]})
    ours = copy.deepcopy(reference)
    assert fused_ops.install_fused_ops(ours, get_device_ops("cpu")).fused[MOE] == 2
    ids = torch.randint(3, 96, (2, 24))
    for model in (ours, reference):
        model(input_ids=ids, labels=ids).loss.backward()
    for (part, mine), theirs in zip(ours.named_parameters(), reference.parameters(), strict=True):
        scale = theirs.grad.abs().max().item() + 1e-9
        torch.testing.assert_close(mine.grad / scale, theirs.grad / scale, rtol=0, atol=1e-5, msg=part)


@pytest.mark.parametrize("family", [family for family, (_, _, fused) in FAMILIES.items() if MOE in fused])
def test_experts_that_no_token_chooses(family: str) -> None:
    """Routers without preferences send every token to the same experts; the others have no rows and no gradient."""
    name, settings, _ = FAMILIES[family]
    reference = build(name, settings)
    with torch.no_grad():
        for part in (name for name, _ in reference.named_modules() if name.endswith((".gate", ".router"))):
            for parameter in reference.get_submodule(part).parameters():
                parameter.zero_()
    ours = packed(reference)
    fused_ops.install_fused_ops(ours, get_device_ops("cpu"))
    tolerance = 2e-4 if "linear_attention" in settings.get("layer_types", ()) else 1e-5  # its rule is in fp32
    check_loss_and_gradients(ours, reference, batch_of([5, 12, 30]), tolerance)
    layer = next(module for module in ours.modules() if type(module).__name__.endswith("Experts"))
    assert (layer.down_proj.grad.flatten(1).any(1)).sum() == ours.config.num_experts_per_tok


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "deepseek-v2", "gemma3", "glm4"])
def test_autocast_reaches_the_fused_operators(family: str) -> None:
    """bf16 products, fp32 weights and gradients: near the same model in fp32."""
    name, settings, _ = FAMILIES[family]
    plain = packed(build(name, settings)).float()
    for parameter in plain.parameters():
        parameter.data.mul_(0.5)
    low = copy.deepcopy(plain)
    fused_ops.install_fused_ops(low, get_device_ops("cpu"))
    rows = forward.pack_batch(batch_of([5, 12, 30]), CPU)
    expected = forward.compute_summed_loss(plain, rows, 1 << 12)
    with torch.autocast("cpu", torch.bfloat16):
        loss = forward.compute_summed_loss(low, rows, 1 << 12)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)
    assert {p.grad.dtype for p in low.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize(
    "family", ["mistral", "gemma2", "gpt-oss", "deepseek-v3", "qwen3-moe", "qwen3-next", "qwen3.5"]
)
def test_reading_in_pieces_equals_one_long_forward_pass(family: str) -> None:
    name, settings, _ = FAMILIES[family]
    reference = build(name, settings).float().eval()
    ours = packed(reference)
    fused_ops.install_fused_ops(ours, get_device_ops("cpu"))
    texts = [torch.randint(3, 96, (length,)).tolist() for length in (6, 23, 12)]
    for ends, logits in iter_cached_logits(ours, texts):
        for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
            expected = reference(input_ids=torch.tensor([text[:end]])).logits[0, -1].detach()
            torch.testing.assert_close(logits[row], expected, rtol=1e-3, atol=1e-3)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "other mixers": (
        "MiniMax",
        dict(layer_types=["linear_attention", "full_attention"], num_local_experts=4, num_experts_per_tok=2),
        "layers of the kind linear_attention",
    ),
    "own attention": ("Bloom", {}, "BloomForCausalLM mixes tokens in its own way"),
    "other layers": ("Lfm2", dict(layer_types=["conv", "full_attention"]), "layers of the kind conv"),
    "dropout": ("Llama", dict(attention_dropout=0.1), "drops 0.1 of its attention weights"),
    "both ways": (
        "Gemma3Text",
        dict(FAMILY_CONFIGS["Gemma3Text"], use_bidirectional_attention=True),
        "looks forward and backward",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_packing_would_get_wrong_is_refused(case: str) -> None:
    name, settings, message = REFUSED[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**COMMON_CONFIG, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.config._attn_implementation = pretrained.ATTENTION_NAME
    with pytest.raises(DataError, match=message):
        forward.compute_summed_loss(model.train(), forward.pack_batch(batch_of([5, 7]), CPU), 1 << 12)


def test_a_head_that_the_chunked_loss_does_not_know_is_refused() -> None:
    class Odd(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits.relu()
            return out

    model = Odd(transformers.LlamaConfig(**COMMON_CONFIG))
    model.config._attn_implementation = pretrained.ATTENTION_NAME
    with pytest.raises(DataError, match="Odd makes its logits in a way"):
        forward.compute_summed_loss(model, forward.pack_batch(batch_of([5]), CPU), 1 << 12)
