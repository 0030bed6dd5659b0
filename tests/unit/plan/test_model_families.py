"""Families with other blocks than Llama's: parameters, caches, saved tensors, products against transformers' models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from anabatic.config.sections.common import ContextMethod
from anabatic.core.errors import AnabaticError, DataError
from anabatic.data.batching.packing import Batch
from anabatic.device.attention import PackedSegments
from anabatic.device.ops import get_device_ops
from anabatic.models import forward, fused_ops, pretrained
from anabatic.models.linear_attention import delta_net
from anabatic.plan import memory_estimate, model_shape, step_time
from anabatic.plan.cost_model import estimate_collective_ns, get_chip_rates
from anabatic.plan.job_rules import find_shape_problems, raise_problems
from anabatic.plan.shapes import attention_kinds, config_shape
from anabatic.plan.shapes.decoder_shape import DecoderShape
from anabatic.plan.training_setup import TrainingSetup

COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "num_key_value_heads": 4,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3, "head_dim": 16,
}  # fmt: skip
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
SPARSE: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
}  # fmt: skip
INDEXER: dict[str, Any] = {"index_n_heads": 3, "index_head_dim": 16, "index_topk": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("qwen3_moe", {**SPARSE, "mlp_only_layers": [1], "decoder_sparse_step": 2}),
    "qwen2-moe": ("qwen2_moe", SPARSE),
    "qwen3-next": ("qwen3_next", {**DELTA, **SPARSE, "mlp_only_layers": [2]}),
    "qwen3.5": ("qwen3_5_text", DELTA),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**DELTA, **SPARSE, "layer_types": ["full_attention", "linear_attention"] * 2
                                         + ["linear_attention"]}),
    "deepseek-v2": ("deepseek_v2", {**LATENT, **ROUTED, "first_k_dense_replace": 1, "n_shared_experts": 2}),
    "deepseek-v2-lite": ("deepseek_v2", {**LATENT, **ROUTED, "q_lora_rank": None}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, **ROUTED, "attention_bias": True}),
    "deepseek-v3.2": ("deepseek_v32", {**LATENT, **ROUTED, **INDEXER}),
    "glm-4.5": ("glm4_moe", {**ROUTED, "head_dim": 12, "attention_bias": True, "use_qk_norm": True}),
    "glm-4.7-flash": ("glm4_moe_lite", {**LATENT, **ROUTED}),
    "glm-5": ("glm_moe_dsa", {**LATENT, **ROUTED, **INDEXER, "index_topk_freq": 2, "first_k_dense_replace": 2}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6}),
    "kimi-linear": ("kimi_linear", {**LATENT, "q_lora_rank": None, "moe_intermediate_size": 24, "num_local_experts": 4,
                                    "num_experts_per_tok": 2, "n_shared_experts": 1, "linear_head_dim": 8,
                                    "linear_num_heads": 3, "linear_conv_kernel_dim": 4}),
}  # fmt: skip


def build(family: str, device: str = "meta", **more: Any) -> tuple[Any, DecoderShape]:
    """transformers' model of a family, and the shape from its configuration."""
    kind, settings = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**COMMON, **settings, **more})
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    return model, config_shape.read_shape(json.loads(config.to_json_string(use_diff=False)), family)


Parameters = tuple[list[int], int, set[str]]
"""Of each block, of the model, and the names of its linear layers."""


def count_planned(shape: DecoderShape) -> Parameters:
    kinds, order = shape.kinds or (shape,), shape.order or (0,) * shape.layers
    return [kinds[kind].block_params for kind in order], shape.params, {layer.name for layer in shape.linears}


def count_built(model: Any) -> Parameters:
    blocks = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model.model.layers]
    linears = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return blocks, sum(parameter.numel() for parameter in model.parameters()), linears - {"lm_head"}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_every_block_are_those_that_transformers_makes(family: str) -> None:
    model, shape = build(family)
    assert count_planned(shape) == count_built(model)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(FAMILIES)), st.data())
def test_parameters_of_random_configurations(family: str, data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 7))
    heads = data.draw(st.sampled_from([2, 4, 6]))
    kind, settings = FAMILIES[family]
    more: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": 12 * data.draw(st.integers(1, 5)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if "kv_lora_rank" in settings else heads // 2,
        "intermediate_size": data.draw(st.integers(1, 70)),
        "vocab_size": data.draw(st.integers(3, 200)),
        "tie_word_embeddings": data.draw(st.booleans()),
        "attention_bias": data.draw(st.booleans()),
        "head_dim": settings.get("head_dim", 8),
    }
    if "kv_lora_rank" in settings:
        more |= {key: data.draw(st.integers(1, 9)) * 2 for key in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim")}
        del more["head_dim"]
    if "linear_key_head_dim" in settings:
        more["linear_num_key_heads"] = data.draw(st.sampled_from([1, 2, 4]))
        more["full_attention_interval"] = data.draw(st.integers(1, 5))
        more["layer_types"] = None
    if "moe_intermediate_size" in settings:
        more["moe_intermediate_size"] = data.draw(st.integers(1, 40))
    if "mlp_only_layers" in settings:
        more["mlp_only_layers"] = data.draw(st.lists(st.integers(0, 8), max_size=3))
    if kind.startswith(("deepseek", "glm4_moe")) and kind != "glm4_moe_lite":
        more["first_k_dense_replace"] = data.draw(st.integers(0, 8))
    if kind == "kimi_linear":
        more.pop("attention_bias")
    model, shape = build(family, **more)
    assert count_planned(shape) == count_built(model)


PUBLISHED: dict[str, tuple[float, float | None]] = {
    "Qwen/Qwen3-235B-A22B": (235.09, None),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (79.67, None),
    "deepseek-ai/DeepSeek-V2-Lite": (15.7, 2.4),
    "deepseek-ai/DeepSeek-V2": (235.7, 21.0),
    "deepseek-ai/DeepSeek-V3": (671.0, 37.0),
    "moonshotai/Kimi-K2-Instruct": (1026.4, 32.0),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": (49.1, None),
    "zai-org/GLM-4.5-Air": (106.9, 12.0),
    "openai/gpt-oss-20b": (20.91, 3.61),
    "openai/gpt-oss-120b": (116.83, 5.13),
    "zai-org/GLM-5": (744.0, 40.0),
}
"""Billions of parameters, and of a token, as the models' cards and reports say (DeepSeek: arXiv 2405.04434, 2412.19437;
Kimi K2: arXiv 2507.20534; gpt-oss: arXiv 2508.10925, table 1, which counts no embedding)."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_models_have_the_published_sizes(name: str) -> None:
    found, _ = model_shape.get_named_shape(name)
    total, active = PUBLISHED[name]
    assert found.params / 1e9 == pytest.approx(total, rel=1e-3)
    if active is not None:
        assert found.multiplying_params / 1e9 == pytest.approx(active, rel=0.07)
        assert found.multiplying_params < found.active_params < found.params


def test_checkpoints_in_four_and_eight_bits() -> None:
    """arXiv 2508.10925, table 1: 12.8 and 60.8 GiB."""
    assert "12.8 GiB, experts in MXFP4" in model_shape.get_named_shape("openai/gpt-oss-20b")[0].notes[0]
    assert "60.8 GiB, experts in MXFP4" in model_shape.get_named_shape("openai/gpt-oss-120b")[0].notes[0]
    notes = model_shape.get_named_shape("deepseek-ai/DeepSeek-V3")[0].notes
    assert "matrices in FP8" in notes[0] and "multi-token prediction of 11.6B" in notes[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_is_that_of_transformers(family: str) -> None:
    model, shape = build(family, "cpu")
    tokens = 13
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(3, 3 + tokens)[None], past_key_values=cache)
    kept = 0
    for layer in cache.layers:
        tensors = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, None)
            tensors += list(states.values()) if isinstance(states, dict) else states or []
        kept += sum(tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor))
    found = shape.measure_cache(tokens)
    assert found.elements + found.state_elements == kept


@pytest.mark.parametrize("family", FAMILIES)
def test_products_of_a_forward_pass(family: str) -> None:
    """torch counts the products of its own kernels, attention without its mask: keys that are masked count too, and
    triangular systems do not."""
    model, shape = build(family, "cpu", hidden_size=64, num_hidden_layers=4, vocab_size=64,
                         **({"layer_types": None} if family == "qwen3.5-moe" else {}))  # fmt: skip
    tokens = 128
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    expected = 2.0 * (shape.multiplying_params - shape.hidden)
    for kind, count in shape.count_kinds():
        expected -= 2.0 * count * kind.norm_params
        expected -= 2.0 * count * sum(linear.outputs for linear in kind.linears if linear.bias)
        if kind.expert_bias:
            expected -= 2.0 * count * kind.experts_per_token * (2 * kind.expert_inner + kind.hidden) + 2 * kind.experts
        expected += count * _count_dense_mixing(kind, tokens)
    assert counter.get_total_flops() / tokens == pytest.approx(expected, rel=0.01)


def _count_dense_mixing(kind: DecoderShape, tokens: int) -> float:
    """Operations of the eager layers: every query with every key; in a chunk of a delta rule without its solver."""
    attention = kind.attention
    if attention is None:
        return 4.0 * tokens * kind.heads * kind.head_dim
    if isinstance(attention, attention_kinds.LatentAttention):
        scores = 2.0 * tokens * attention.heads * (attention.query_dim + attention.value_dim)
        return scores + 2.0 * tokens * attention.index_heads * (attention.index_dim + 1) * attention.has_indexer
    assert isinstance(attention, attention_kinds.DeltaAttention)
    chunk, k, v = attention_kinds.CHUNK, attention.key_dim, attention.value_dim
    products = 2 * chunk * (2 * k + v) + 6 * k * v
    if attention.layout == "kimi":
        products = 2 * chunk * (k + 2 * v) + 6 * k * v  # the solver is a product with the inverse; scores are sums
    return float(attention.value_heads * products + 2.0 * attention.kernel * attention.conv_channels)


def measure_saved(layer: torch.nn.Module, run: Callable[[], Any]) -> int:
    """Bytes of the storages that a forward pass saves for its backward pass, without the layer's parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved.setdefault(storage.data_ptr(), (storage.nbytes(), tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(size for size, _ in saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(2, 4), (2, 6)])
@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "kimi-linear"])
def test_a_delta_rule_saves_what_is_counted(family: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Per token of a long document; the layer's input, index tables and the first state, which is zero, left out."""
    sizes: dict[str, Any] = {"linear_key_head_dim": 32, "linear_value_head_dim": 16, "mlp_only_layers": [],
                             "linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1]}  # fmt: skip
    if family == "kimi-linear":
        if dtype == torch.bfloat16 or heads != (2, 4):
            pytest.skip("one size of heads, in fp32")
        sizes = {"linear_head_dim": 32}
    model, shape = build(family, "cpu", hidden_size=64, **sizes)
    fused_ops.install_fused_ops(model, get_device_ops("cpu"))
    delta_net.install_delta_layers(model)
    layer = model.model.layers[0].to(dtype)
    mixer = layer.self_attn if family == "kimi-linear" else layer.linear_attn
    tokens, width = 1024, dtype.itemsize
    x = torch.randn(1, tokens, 64, requires_grad=True, dtype=dtype)
    kind = (shape.kinds or (shape,))[shape.order[0]]
    assert kind.attention is not None
    more = {} if family == "kimi-linear" else {"segments": PackedSegments([0, tokens], torch.device("cpu"))}
    measured = measure_saved(mixer, lambda: mixer(x, **more)) / tokens - width * 64
    assert kind.attention.count_saved_bytes(width, tokens) == pytest.approx(measured, rel=0.05)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3-next", {"linear_num_value_heads": None}, "has no linear_num_value_heads"),
    ("qwen3-next", {"linear_num_value_heads": "32"}, "linear_num_value_heads is '32'"),
    ("qwen3-next", {"linear_num_value_heads": 3}, "no multiple of linear_num_key_heads 2"),
    ("qwen3-next", {"full_attention_interval": 0}, "full_attention_interval is 0"),
    ("qwen3-next", {"mlp_only_layers": "0"}, "mlp_only_layers is '0', not a list"),
    ("qwen3.5", {"layer_types": ["linear_attention"]}, "layer_types is a list of 1, not a list of 5 names"),
    ("qwen3.5", {"layer_types": ["mamba"] * 5}, "layer_types has 'mamba', which is not planned"),
    ("qwen3.5", {"num_hidden_layers": 10**8}, "num_hidden_layers is 100,000,000, more than 10,000"),
    ("deepseek-v3", {"kv_lora_rank": None}, "has no kv_lora_rank"),
    ("deepseek-v3", {"n_routed_experts": -1}, "n_routed_experts is -1"),
    ("deepseek-v3", {"qk_nope_head_dim": 1.5}, "qk_nope_head_dim is 1.5"),
    ("deepseek-v3", {"attention_bias": "no"}, "attention_bias is 'no', not true or false"),
    ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2, and blocks of that kind are not planned"),
    ("deepseek-v3.2", {"index_head_dim": None}, "has no index_head_dim"),
    ("deepseek-v3.2", {"q_lora_rank": None}, "has index_topk and no q_lora_rank"),
    ("glm-5", {"index_topk_pattern": "FSX"}, "indexer_types is a list of 3"),
    ("glm-5", {"index_topk_pattern": "FSXFF"}, "indexer_types has 'X'"),
    ("gpt-oss", {"sliding_window": None}, "has no sliding_window"),
    ("gpt-oss", {"num_local_experts": 10**30}, "not a whole number from 1 to"),
    ("kimi-linear", {"attn_res_block_size": 12}, "attn_res_block_size is 12"),
    ("kimi-linear", {"linear_attn_config": [1]}, "linear_attn_config is [1], not an object"),
    ("kimi-linear", {"linear_attn_config": {"use_full_rank_gate": True}}, "use_full_rank_gate is True"),
]


@pytest.mark.parametrize(("family", "change", "why"), BAD)
def test_a_configuration_that_is_wrong_is_refused_by_name(
    family: str, change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    kind, settings = FAMILIES[family]
    config = {**COMMON, **settings, "model_type": kind, **change}
    if family == "qwen3-next" and "full_attention_interval" in change:
        config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError) as caught:
        model_shape.get_named_shape(str(tmp_path))
    assert why in str(caught.value) and caught.value.hint


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("deepseek_v4", {"hc_mult": 4, "head_dim": 8}), ("longcat_flash", LATENT), ("mamba2", {"state_size": 16})],
)
def test_families_of_other_blocks_are_not_taken_for_llama(kind: str, keys: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **keys, "model_type": kind}))
    with pytest.raises(DataError, match="blocks of another kind"):
        model_shape.get_named_shape(str(tmp_path))


def test_a_model_that_sees_has_a_decoder_and_a_tower(tmp_path: Path) -> None:
    text = {**COMMON, **DELTA, "model_type": "qwen3_5_text"}
    tower = {
        "depth": 2, "hidden_size": 8, "intermediate_size": 16, "patch_size": 4, "temporal_patch_size": 2,
        "spatial_merge_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
    }  # fmt: skip
    tokens = {"image_token_id": 1, "vision_start_token_id": 2, "vision_end_token_id": 3}
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": tower, **tokens}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, source = model_shape.get_named_shape(str(tmp_path))
    assert found.layers == 5 and found.tower_params > 0 and "with a tower of" in source
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_config": {"depth": 2}}))
    found, source = model_shape.get_named_shape(str(tmp_path))
    assert found.layers == 5 and found.tower_params == 0 and "whose memory and time are not planned" in source


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(list(FAMILIES)),
    st.dictionaries(
        st.sampled_from([*COMMON, *LATENT, *DELTA, *ROUTED, *SPARSE, *INDEXER, "layer_types", "mlp_layer_types"]
                        + ["linear_attn_config", "quantization_config", "num_nextn_predict_layers"]),
        st.none() | st.booleans() | st.integers(-2, 9) | st.text(max_size=3) | st.lists(st.integers(0, 2), max_size=3),
        max_size=3,
    ),
)  # fmt: skip
def test_whatever_a_family_holds_it_is_a_shape_or_an_error(family: str, change: dict[str, Any]) -> None:
    kind, settings = FAMILIES[family]
    try:
        found = config_shape.read_shape({**COMMON, **settings, "model_type": kind, **change}, "config.json")
    except AnabaticError as error:
        assert "config.json" in str(error) and error.hint
    else:
        assert found.params > 0 and found.active_params <= found.params and found.measure_cache(7).elements >= 0


SETUPS = st.builds(
    TrainingSetup,
    st.sampled_from(["Qwen3-Next-80B-A3B", "DeepSeek-V3.2", "gpt-oss-20b", "Kimi-Linear-48B-A3B", "GLM-4.5-Air"]).map(
        lambda name: model_shape.get_named_shape(name)[0]
    ),
    strategy=st.sampled_from(["ddp", "zero2", "zero3"]),
    ranks=st.sampled_from([2, 8, 64]),
    tuner=st.sampled_from(["full", "lora", "freeze"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    micro_tokens=st.sampled_from([2048, 8192]),
    muon=st.booleans(),
    weights=st.sampled_from(["fp32", "bf16_kahan"]),
)


@settings(max_examples=60, deadline=None)
@given(SETUPS)
def test_sums_over_kinds_are_consistent(setup: TrainingSetup) -> None:
    """Parameters by kind add up, memory grows with tokens, time is positive, and a model of equal blocks is planned the
    same whether its blocks are listed or not."""
    assert setup.params == setup.shape.params  # one tensor rank
    assert 0 < setup.trained_params <= setup.params
    peak = memory_estimate.estimate_peak_memory(setup)
    assert all(size >= 0 for size in peak.parts.values())
    more = memory_estimate.estimate_peak_memory(replace(setup, micro_tokens=16_384))
    assert more.total >= peak.total
    chip = model_chip()
    time = step_time.estimate_step_time(setup, get_chip_rates(chip))
    assert 0 < time.update < time.compute and 0 <= time.exposed_collectives <= time.collectives * (1 + 1e-12)


def model_chip() -> Any:
    from anabatic.device.table import find_chip

    chip = find_chip("Ascend910B3")
    assert chip is not None
    return chip


def test_listed_blocks_of_one_kind_are_planned_like_equal_ones() -> None:
    plain, _ = model_shape.get_named_shape("Qwen/Qwen3-8B")
    block = replace(plain, notes=())
    listed = replace(plain, kinds=(block,), order=(0,) * plain.layers)
    rates = get_chip_rates(model_chip())
    for more in ({}, {"tuner": "lora"}, {"tuner": "freeze"}, {"strategy": "zero3", "ranks": 8, "recompute": "full"}):
        first, second = (TrainingSetup(shape, **more) for shape in (plain, listed))  # type: ignore[arg-type]
        assert memory_estimate.estimate_peak_memory(first).parts == memory_estimate.estimate_peak_memory(second).parts
        assert step_time.estimate_step_time(first, rates) == step_time.estimate_step_time(second, rates)


def test_attention_that_tensor_ranks_do_not_divide_is_refused() -> None:
    shape, _ = model_shape.get_named_shape("deepseek-ai/DeepSeek-V3")
    with pytest.raises(AnabaticError, match="latent attention is not divided among tensor ranks"):
        raise_problems(find_shape_problems(shape, tensor=2))


@pytest.mark.parametrize("layout", ["qkvz", "split"])
def test_tensor_ranks_divide_linear_attention(layout: Any) -> None:
    """Half of the heads: half of the work and of what is kept; with one projection of all, its channels travel."""
    shape, rates = model_shape.get_named_shape("Qwen3-Next-80B-A3B")[0], get_chip_rates(model_chip())
    delta = next(kind for kind, _ in shape.count_kinds() if isinstance(kind.attention, attention_kinds.DeltaAttention))
    assert isinstance(delta.attention, attention_kinds.DeltaAttention)
    delta = replace(delta, attention=replace(delta.attention, layout=layout))
    raise_problems(find_shape_problems(shape, tensor=2))
    with pytest.raises(AnabaticError, match="16 key heads of linear attention"):
        raise_problems(find_shape_problems(shape, tensor=32))
    one, two = (TrainingSetup(delta, tensor=ranks, micro_tokens=2048) for ranks in (1, 2))
    halves = [memory_estimate.estimate_activations(setup).attention for setup in (two, one)]
    assert halves[0] == pytest.approx(halves[1] / 2)
    size = 2 * 2048 * delta.hidden
    expected = 4 * delta.layers * estimate_collective_ns(rates, "all_reduce", size, 2)
    if layout == "split":
        assert isinstance(delta.attention, attention_kinds.DeltaAttention)
        channels = delta.attention.conv_channels
        expected += 2 * delta.layers * estimate_collective_ns(rates, "all_to_all", 2 * 2048 * channels / 2, 2)
    assert step_time.estimate_step_time(two, rates).collectives == pytest.approx(expected / 1e9)


def test_heads_of_kimi_are_not_divided() -> None:
    shape, _ = model_shape.get_named_shape("Kimi-Linear-48B-A3B")
    with pytest.raises(AnabaticError, match="Kimi delta attention is not divided among tensor ranks"):
        raise_problems(find_shape_problems(shape, tensor=2))


def test_a_window_shows_its_keys() -> None:
    """Counted one by one: query i of s sees min(i, w) keys, half of the last one, as the whole square is halved."""
    for length, window in ((512, 128), (128, 128), (100, 7)):
        seen = sum(min(i, window) for i in range(length)) / length
        assert attention_kinds.count_attended(length, window) == pytest.approx(seen, abs=1)
    assert attention_kinds.count_attended(512) == 256


@pytest.mark.parametrize(
    ("name", "method", "why"),
    [
        ("Kimi-Linear-48B-A3B", "ring", "Kimi delta attention"),
        ("DeepSeek-V3", "ring", "no latent attention with values of 128 elements and keys of 192"),
        ("gpt-oss-20b", "ring", "no attention in windows of 128 tokens"),
    ],
)
def test_attention_that_context_ranks_do_not_divide_is_refused(name: str, method: ContextMethod, why: str) -> None:
    shape = model_shape.get_named_shape(name)[0]
    found = list(find_shape_problems(shape, context=2, context_method=method, seq_len=2048))
    assert all("parallel.context" in str(error) and error.hint for error in found)
    assert any(why in str(error) for error in found)
    assert list(find_shape_problems(shape)) == []


@pytest.mark.parametrize(
    ("name", "context", "method", "message", "hint"),
    [
        (
            "Qwen3-Next-80B-A3B",
            64,
            "ring",
            "64, which does not divide the model's 32 value heads",
            "use 1 or 2 or 4 or 8 or 16 or 32",
        ),
        (
            "Qwen3-Next-80B-A3B",
            3,
            "ulysses",
            "3, which does not divide the model's 16 attention heads and 32 value heads",
            "use 1 or 2 or 4 or 8 or 16",
        ),
        (
            "Qwen3-Next-80B-A3B",
            32,
            "ulysses",
            "does not divide the model's 16 attention heads",
            "use 1 or 2 or 4 or 8 or 16, or",
        ),
    ],
)
def test_heads_of_linear_attention_that_context_ranks_do_not_divide(
    name: str, context: int, method: ContextMethod, message: str, hint: str
) -> None:
    shape = model_shape.get_named_shape(name)[0]
    with pytest.raises(AnabaticError) as caught:
        raise_problems(find_shape_problems(shape, context=context, context_method=method))
    assert message in str(caught.value) and (caught.value.hint or "").startswith(hint)
    raise_problems(find_shape_problems(shape, context=32, context_method="ring"))


def test_copies_of_key_heads_take_memory_and_time() -> None:
    """16 key heads on 32 ranks are computed as 32."""
    shape, rates = model_shape.get_named_shape("Qwen3-Next-80B-A3B")[0], get_chip_rates(model_chip())
    common: dict[str, Any] = {"context": 32, "context_method": "ring", "micro_tokens": 32 * 2048}
    delta = next(kind for kind, _ in shape.count_kinds() if isinstance(kind.attention, attention_kinds.DeltaAttention))
    once, double = (replace(delta, attention=replace(delta.attention, key_heads=heads)) for heads in (16, 32))
    first, second = (TrainingSetup(kind, **common) for kind in (once, double))
    assert memory_estimate.estimate_activations(first) == memory_estimate.estimate_activations(second)
    plain = TrainingSetup(once, micro_tokens=2048)
    assert memory_estimate.estimate_activations(first).attention > memory_estimate.estimate_activations(plain).attention
    found = [step_time.estimate_step_time(setup, rates) for setup in (first, plain)]
    assert found[0].compute > found[1].compute and found[0].collectives > 0 == found[1].collectives


@pytest.mark.parametrize("name", ["DeepSeek-V3", "gpt-oss-20b", "GLM-4.5-Air", "Qwen3-Next-80B-A3B"])
def test_context_ranks_divide_the_tokens_of_every_kind_of_block(name: str) -> None:
    """Ranks that share a batch compute what ranks with a batch each do, and exchange heads of all blocks besides."""
    shape, rates = model_shape.get_named_shape(name)[0], get_chip_rates(model_chip())
    shared = TrainingSetup(shape, strategy="zero3", ranks=2, context=4, micro_tokens=4 * 2048, recompute="full")
    alone = TrainingSetup(shape, strategy="zero3", ranks=8, micro_tokens=2048, recompute="full")
    assert list(find_shape_problems(shape, context=4, seq_len=2048)) == []
    first, second = (step_time.estimate_step_time(setup, rates) for setup in (shared, alone))
    assert first.compute == pytest.approx(second.compute) and first.tokens == second.tokens
    expected = 0.0
    for kind, count in shape.count_kinds():
        latent = kind.attention
        values = latent.value_dim if isinstance(latent, attention_kinds.LatentAttention) else kind.head_dim
        sent = kind.heads * kind.head_dim + max(4, kind.kv_heads) * (kind.head_dim + values)  # a multiple of 4 ranks
        sizes = [sent, kind.heads * values]
        if isinstance(latent, attention_kinds.DeltaAttention):  # queries, keys, values, two gates of a head
            inputs = 2 * latent.key_heads * latent.key_dim + latent.value_heads * (latent.value_dim + 2)
            sizes = [inputs, latent.value_heads * latent.value_dim]
        calls = [estimate_collective_ns(rates, "all_to_all", 2 * 2048 * size, 4) for size in sizes]
        expected += 3 * count * sum(calls) / 1e9  # forward, recomputed, backward
    assert first.collectives - second.collectives == pytest.approx(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_says_which_blocks_training_refuses(family: str) -> None:
    """A packed forward pass of transformers' model on the CPU, against the notes of its shape."""
    model, shape = build(family, "cpu")
    model.config._attn_implementation = pretrained.ATTENTION_NAME
    delta_net.install_delta_layers(model)
    borders = [0, 3, 8]
    ids, positions = torch.arange(3, 11), torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    packed = forward.pack_batch(Batch(ids, ids, positions, borders, 8, 8), torch.device("cpu"))
    if any("training refuses" in note for note in shape.notes):
        with pytest.raises(DataError, match="rows of a batch would mix"):
            forward.compute_hidden_states(model, packed)
    else:
        assert forward.compute_hidden_states(model, packed).shape == (8, 32)
