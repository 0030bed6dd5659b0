"""Shape of the model that a config.json describes, family by family.

Keys, defaults and which block is of which kind are those of transformers 5.23 (the configuration and modeling files of
each family); tests compare the parameters with the models that it builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anabatic.core.errors import DataError
from anabatic.core.formatting import format_count
from anabatic.plan.shapes.attention_kinds import AttentionKind, DeltaAttention, LatentAttention
from anabatic.plan.shapes.config_values import FAMILY_NAMES, MAX_BLOCKS, ConfigValues
from anabatic.plan.shapes.decoder_shape import DecoderShape

_MXFP4_BITS = 4.25
"""Bits of a weight: 4, and 8 for the scale of 32 (OCP Microscaling Formats 1.0, section 5.2)."""
_FP8_BITS = 8.0 + 32 / 128**2
"""Bits of a weight: 8, and an fp32 scale for a block of 128 x 128 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""
_ATTENTION_BIAS_FAMILIES = frozenset({"qwen2", "qwen2_moe"})
"""Families whose queries, keys and values have a bias that config.json does not name (their modeling files)."""
_OUTPUT_WITHOUT_BIAS = _ATTENTION_BIAS_FAMILIES | {"glm4_moe"}
"""Families whose `attention_bias` leaves out the output projection."""
_HEAD_NORM_FAMILIES = frozenset({"qwen3", "qwen3_moe", "gemma3_text", "gemma3"})
"""Families that normalize every query and key head."""
_FOUR_NORM_FAMILIES = frozenset({"gemma2", "gemma3_text", "gemma3", "glm4"})
"""Families that also have a norm after attention and MLP."""
_TIED_FAMILIES = frozenset({"gemma", "gemma2", "gemma3_text", "gemma3", "cohere", "cohere2"})
"""Families with tied embeddings unless config.json says otherwise."""
_UNSUPPORTED_KEYS = (
    "kv_lora_rank", "linear_num_value_heads", "linear_attn_config", "state_size", "mamba_d_state", "ssm_state_size",
    "attn_layer_period", "hc_mult", "compress_ratios", "compress_rates", "index_topk",
)  # fmt: skip
"""Keys of models whose blocks are not (only) attention with queries, keys and values, in families not known here."""
_KNOWN_FAMILIES = frozenset(
    ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3")
    + ("gemma3_text", "cohere", "cohere2", "glm", "glm4", "phi3", "olmo2", "granite")
)
"""Families whose blocks match `DecoderShape` with the keys of Llama."""
_ATTENTION_TYPES = ("full_attention", "sliding_attention")
_LINEAR_TYPES = ("full_attention", "linear_attention")
_MLP_TYPES = ("dense", "sparse")


def read_shape(config: Mapping[str, Any], name: str) -> DecoderShape:
    """Return the shape that a config.json describes.

    Args:
        name: name of the file, for errors.

    Raises:
        DataError: sizes are missing or not positive numbers, or the blocks are of a kind that is not known.
    """
    model_type = str(config.get("model_type", ""))
    text_config = config.get("text_config")
    if isinstance(text_config, Mapping):
        return read_shape({**text_config, "model_type": text_config.get("model_type", model_type)}, name)
    values = ConfigValues(config, name)
    read_family = _FAMILIES.get(model_type)
    shape = _read_llama_like(values) if read_family is None else read_family(values)
    for kind, _ in shape.count_kinds():
        if kind.experts_per_token > kind.experts:
            raise DataError(
                f"{name}: a token goes to {kind.experts_per_token:,} experts of {kind.experts:,}", "check the file"
            )
    notes = _describe_checkpoint(values, shape) + _describe_refused_blocks(shape)
    return replace(shape, notes=notes)


def describe_unknown_family(config: Mapping[str, Any]) -> str:
    """Return a note about an unknown model family of a config.json; empty if the family is known."""
    text_config = config.get("text_config")
    model_type = (text_config if isinstance(text_config, Mapping) else config).get("model_type") or config.get(
        "model_type"
    )
    if isinstance(model_type, str) and (model_type in _KNOWN_FAMILIES or model_type in _FAMILIES):
        return ""
    reason = f"model_type {str(model_type)[:60]} is not known here" if model_type else "no model_type"
    return f"{reason}: taken for one like Llama"


def _read_llama_like(values: ConfigValues) -> DecoderShape:
    """Read a model whose blocks are attention with queries, keys and values, and a gated MLP or experts."""
    config, model_type = values.config, values.model_type
    unsupported = [key for key in _UNSUPPORTED_KEYS if config.get(key)]
    if unsupported:
        raise DataError(
            f"{values.name} describes blocks of another kind ({', '.join(unsupported)}), whose memory is not known",
            f"plan a model of the kind of {FAMILY_NAMES}",
        )
    shape = _read_attention(values, head_dim_default=128 if model_type == "qwen3" else 0)
    experts = values.read_size("num_experts", "num_local_experts", "n_routed_experts")
    dense_inner = values.read_size("intermediate_size") if experts else values.require_size("intermediate_size")
    has_shared = experts and model_type != "qwen3_moe"
    shared_inner = values.read_size("shared_expert_intermediate_size") if has_shared else 0
    shape = replace(
        shape,
        inner=dense_inner,
        head_norms=model_type in _HEAD_NORM_FAMILIES,
        norms=4 if model_type in _FOUR_NORM_FAMILIES else 2,
        experts=experts,
        experts_per_token=values.read_size("num_experts_per_tok") if experts else 0,
        expert_inner=(values.read_size("moe_intermediate_size") or dense_inner) if experts else 0,
        shared_inner=shared_inner,
        shared_gate=model_type == "qwen2_moe" and shared_inner > 0,
    )
    return _list_blocks(values, shape, _window_kinds(values, shape), _sparse_mlps(values, shape))


def _read_attention(values: ConfigValues, head_dim_default: int = 0, bias_default: bool = False) -> DecoderShape:
    """Read vocabulary, width, blocks and heads; the MLP is still empty."""
    config, model_type = values.config, values.model_type
    hidden, heads = values.require_size("hidden_size"), values.require_size("num_attention_heads")
    kv_heads = values.read_size("num_key_value_heads") or heads
    head_dim = values.read_size("head_dim", default=head_dim_default)
    if heads % kv_heads:
        values.require_multiple("num_attention_heads", "num_key_value_heads")
    if hidden % heads and not head_dim:
        values.require_multiple("hidden_size", "num_attention_heads")
    bias = bool(config.get("attention_bias", bias_default or model_type in _ATTENTION_BIAS_FAMILIES))
    if model_type == "qwen2_moe":
        bias = values.read_flag("qkv_bias", True)
    return DecoderShape(
        vocab=values.require_size("vocab_size"),
        hidden=hidden,
        layers=_require_blocks(values),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        inner=0,
        is_tied=bool(config.get("tie_word_embeddings", model_type in _TIED_FAMILIES)),
        qkv_bias=bias,
        out_bias=bias and model_type not in _OUTPUT_WITHOUT_BIAS,
        max_positions=values.read_size("max_position_embeddings", "model_max_length"),
    )


BlockChange = Callable[[DecoderShape], DecoderShape]
"""Makes the shape of a block of one kind from that of the model."""


def _list_blocks(values: ConfigValues, shape: DecoderShape, *choices: Sequence[BlockChange] | None) -> DecoderShape:
    """Return the model with a kind for each combination of `choices`, lists of a change for every block."""
    lists = [choice for choice in choices if choice is not None]
    if not lists:
        return shape
    kinds: dict[DecoderShape, int] = {}
    order = []
    for changes in zip(*lists, strict=True):
        block = shape
        for change in changes:
            block = change(block)
        order.append(kinds.setdefault(block, len(kinds)))
    if len(kinds) == 1:
        return next(iter(kinds))
    largest = max(kinds, key=lambda kind: kind.block_params)
    return replace(largest, kinds=tuple(kinds), order=tuple(order))


def _require_blocks(values: ConfigValues) -> int:
    layers = values.require_size("num_hidden_layers")
    if layers > MAX_BLOCKS:
        raise DataError(f"{values.name}: num_hidden_layers is {layers:,}, more than {MAX_BLOCKS:,}", "check the file")
    return layers


def _window_kinds(values: ConfigValues, shape: DecoderShape) -> list[BlockChange] | None:
    """Return which blocks attend in windows: those of layer_types, in older Qwens those from max_window_layers on."""
    window = values.read_size("sliding_window")
    if "layer_types" not in values.config or values.config["layer_types"] is None:
        return None
    types = values.read_names("layer_types", shape.layers, _ATTENTION_TYPES)
    assert types is not None
    if "sliding_attention" in types and not window:
        raise DataError(f"{values.name} has sliding_attention and no sliding_window", "check the file")
    return [_attend_in_window(window if kind == "sliding_attention" else 0) for kind in types]


def _attend_in_window(window: int) -> BlockChange:
    return lambda block: replace(block, window=window)


def _sparse_mlps(values: ConfigValues, shape: DecoderShape) -> list[BlockChange] | None:
    """Return which blocks have experts by decoder_sparse_step and mlp_only_layers (Qwen2-MoE, 3-MoE, 3-Next)."""
    step, dense_layers = (
        values.read_size("decoder_sparse_step", default=1),
        values.read_block_numbers("mlp_only_layers"),
    )
    if not shape.experts or (step == 1 and not dense_layers):
        return None
    if not step:
        values.require_size("decoder_sparse_step")
    blocks = range(shape.layers)
    return [_make_dense if block in dense_layers or (block + 1) % step else _keep for block in blocks]


def _keep(block: DecoderShape) -> DecoderShape:
    return block


def _make_dense(block: DecoderShape) -> DecoderShape:
    return replace(
        block, experts=0, experts_per_token=0, expert_inner=0, shared_inner=0, shared_gate=False, expert_bias=False
    )


def _with_attention(attention: AttentionKind | None) -> BlockChange:
    return lambda block: replace(block, attention=attention)


def _read_qwen_linear(values: ConfigValues) -> DecoderShape:
    """Qwen3-Next and Qwen3.5/3.6: three blocks of the gated delta rule, one of attention with a gate."""
    is_next = values.model_type == "qwen3_next"
    is_sparse = is_next or "moe" in values.model_type
    shape = _read_attention(values, head_dim_default=256)
    layers = shape.layers
    delta = DeltaAttention(
        key_heads=values.require_size("linear_num_key_heads"),
        value_heads=values.require_size("linear_num_value_heads"),
        key_dim=values.require_size("linear_key_head_dim"),
        value_dim=values.require_size("linear_value_head_dim"),
        kernel=values.read_size("linear_conv_kernel_dim", default=4),
        layout="qkvz" if is_next else "split",
    )
    if delta.value_heads % delta.key_heads:
        values.require_multiple("linear_num_value_heads", "linear_num_key_heads")
    shape = replace(shape, gates_output=True, head_norms=True)
    if is_sparse:
        shape = replace(
            shape,
            inner=values.read_size("intermediate_size"),
            experts=values.require_size("num_experts"),
            experts_per_token=values.require_size("num_experts_per_tok"),
            expert_inner=values.require_size("moe_intermediate_size"),
            shared_inner=values.require_size("shared_expert_intermediate_size"),
            shared_gate=True,
        )
    else:
        shape = replace(shape, inner=values.require_size("intermediate_size"))
    types = values.read_names("layer_types", layers, _LINEAR_TYPES)
    if types is None:
        interval = values.read_size("full_attention_interval", default=4) or values.require_size(
            "full_attention_interval"
        )
        types = [_LINEAR_TYPES[(block + 1) % interval > 0] for block in range(layers)]
    attentions = [_with_attention(delta if kind == "linear_attention" else None) for kind in types]
    return _list_blocks(values, shape, attentions, _sparse_mlps(values, shape) if is_next else None)


def _read_latent(values: ConfigValues) -> DecoderShape:
    """DeepSeek-V2, V3, V3.2, Kimi K2, GLM-4.7-Flash and GLM-5: latent attention, the first blocks without experts."""
    shape = _read_outer_sizes(values)
    layers = shape.layers
    attention = _read_latent_attention(values)
    if values.config.get("index_topk") is None:
        return _list_blocks(values, replace(shape, attention=attention), _first_dense(values, shape))
    indexed = replace(
        attention,
        index_heads=values.require_size("index_n_heads"),
        index_dim=values.require_size("index_head_dim"),
        index_topk=values.require_size("index_topk"),
    )
    if not indexed.query_rank:
        raise DataError(f"{values.name} has index_topk and no q_lora_rank, which an indexer reads", "check the file")
    has_indexer = _indexer_blocks(values, layers)
    attentions = [_with_attention(replace(indexed, has_indexer=has)) for has in has_indexer]
    return _list_blocks(values, shape, attentions, _first_dense(values, shape))


def _read_outer_sizes(values: ConfigValues) -> DecoderShape:
    """Read what is not attention: width, blocks, MLP and experts (DeepSeek's keys)."""
    values.refuse_other("mlp_bias", False)
    values.refuse_other("moe_layer_freq", 1)
    expert_inner = values.require_size("moe_intermediate_size")
    heads = values.require_size("num_attention_heads")
    return DecoderShape(
        vocab=values.require_size("vocab_size"),
        hidden=values.require_size("hidden_size"),
        layers=_require_blocks(values),
        heads=heads,
        kv_heads=heads,
        head_dim=values.read_size("qk_nope_head_dim") + values.read_size("qk_rope_head_dim"),
        inner=values.require_size("intermediate_size"),
        is_tied=values.read_flag("tie_word_embeddings"),
        experts=values.require_size("n_routed_experts", "num_experts", "num_local_experts"),
        experts_per_token=values.require_size("num_experts_per_tok", "num_experts_per_token"),
        expert_inner=expert_inner,
        shared_inner=expert_inner * values.read_size("n_shared_experts", "num_shared_experts"),
        max_positions=values.read_size("max_position_embeddings", "model_max_length"),
    )


def _read_latent_attention(values: ConfigValues) -> LatentAttention:
    return LatentAttention(
        heads=values.require_size("num_attention_heads"),
        query_rank=values.read_size("q_lora_rank"),
        latent_rank=values.require_size("kv_lora_rank"),
        nope_dim=values.require_size("qk_nope_head_dim"),
        rope_dim=values.read_size("qk_rope_head_dim"),
        value_dim=values.require_size("v_head_dim"),
        bias=values.read_flag("attention_bias"),
    )


def _indexer_blocks(values: ConfigValues, layers: int) -> list[bool]:
    """Return which blocks compute the indexer's choice: all of DeepSeek-V3.2; of GLM-5 those that its keys say."""
    if values.model_type != "glm_moe_dsa":
        return [True] * layers
    pattern = values.config.get("index_topk_pattern")
    if isinstance(pattern, str):
        letters = {"F": "full", "S": "shared"}
        values = ConfigValues({"indexer_types": [letters.get(letter, letter) for letter in pattern]}, values.name)
    types = values.read_names("indexer_types", layers, ("full", "shared"))
    if types is not None:
        return [kind == "full" for kind in types]
    frequency = max(values.read_size("index_topk_freq", default=1), 1)
    offset = values.read_size("index_skip_topk_offset", default=2)
    return [max(block - offset + 1, 0) % frequency == 0 for block in range(layers)]


_FIRST_DENSE = {"deepseek_v2": 0, "deepseek_v3": 3, "kimi_k2": 3, "deepseek_v32": 3, "glm_moe_dsa": 3}
"""Blocks without experts where config.json does not say how many; others: 1."""


def _first_dense(values: ConfigValues, shape: DecoderShape) -> list[BlockChange]:
    """Return which blocks have no experts: those that mlp_layer_types names, else the first."""
    layers = shape.layers
    types = values.read_names("mlp_layer_types", layers, _MLP_TYPES)
    if types is not None:
        return [_make_dense if kind == "dense" else _keep for kind in types]
    count = values.read_size("first_k_dense_replace", default=_FIRST_DENSE.get(values.model_type, 1))
    return [_make_dense if block < count else _keep for block in range(layers)]


def _read_glm_moe(values: ConfigValues) -> DecoderShape:
    """GLM-4.5, 4.6 and 4.7: attention with biases, experts of DeepSeek's kind."""
    attention = _read_attention(values)
    outer = _read_outer_sizes(values)
    shape = replace(
        attention,
        head_norms=values.read_flag("use_qk_norm"),
        **{
            key: getattr(outer, key)
            for key in ("inner", "experts", "experts_per_token", "expert_inner", "shared_inner")
        },
    )
    return _list_blocks(values, shape, _first_dense(values, shape))


def _read_gpt_oss(values: ConfigValues) -> DecoderShape:
    """gpt-oss: every other block in windows, sinks, experts with biases."""
    shape = _read_attention(values, bias_default=True)
    layers = shape.layers
    shape = replace(
        shape,
        has_sinks=True,
        inner=values.require_size("intermediate_size"),
        experts=values.require_size("num_local_experts", "num_experts"),
        experts_per_token=values.require_size("num_experts_per_tok", "experts_per_token"),
        expert_inner=values.require_size("intermediate_size"),
        expert_bias=True,
    )
    if values.config.get("layer_types") is not None:
        return _list_blocks(values, shape, _window_kinds(values, shape))
    window = values.require_size("sliding_window")
    return _list_blocks(values, shape, [_attend_in_window(0 if block % 2 else window) for block in range(layers)])


def _read_kimi_linear(values: ConfigValues) -> DecoderShape:
    """Kimi Linear: three blocks of delta attention with a decay per channel, one of latent attention."""
    # transformers ties nothing in this family, whatever the flag says (models/kimi_linear, _tied_weights_keys).
    shape = replace(_read_outer_sizes(values), is_tied=False)
    layers = shape.layers
    section = values.read_section("linear_attn_config")
    for key in ("attn_res_block_size", "routed_expert_hidden_size", "mla_use_output_gate"):  # Kimi K3
        values.refuse_other(key, False)
    section.refuse_other("use_full_rank_gate", False)
    keys: tuple[tuple[str, str, int], ...] = (
        ("num_heads", "linear_num_heads", 32),
        ("head_dim", "linear_head_dim", 128),
        ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
    )
    heads, dim, kernel = (
        section.read_size(inside) or values.read_size(outside, default=usual) for inside, outside, usual in keys
    )
    delta = DeltaAttention(heads, heads, dim, dim, kernel, "kimi")
    latent = _read_latent_attention(values)
    types = values.read_names("layer_types", layers, _LINEAR_TYPES)
    if types is None and section.config.get("full_attn_layers") is not None:
        full = section.read_block_numbers("full_attn_layers")  # counted from 1
        types = [_LINEAR_TYPES[block + 1 not in full] for block in range(layers)]
    if types is None:
        types = [_LINEAR_TYPES[not (block and block % 4 == 0)] for block in range(layers)]
    attentions = [_with_attention(delta if kind == "linear_attention" else latent) for kind in types]
    return _list_blocks(values, shape, attentions, _first_dense(values, shape))


_FAMILIES: dict[str, Callable[[ConfigValues], DecoderShape]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _read_qwen_linear),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa"), _read_latent
    ),
    "glm4_moe": _read_glm_moe,
    "gpt_oss": _read_gpt_oss,
    "kimi_linear": _read_kimi_linear,
}
"""model_type -> reader of families with other blocks than Llama's."""


def _describe_checkpoint(values: ConfigValues, shape: DecoderShape) -> tuple[str, ...]:
    """Return notes about quantized weights and about modules that are not loaded.

    transformers 5.23 builds no multi-token prediction module unless it generates with it; the numbers of parameters
    here leave it out.
    """
    notes = []
    quantization = values.read_section("quantization_config").config.get("quant_method")
    expert_params = sum(
        count * kind.experts * 3 * kind.hidden * kind.expert_inner for kind, count in shape.count_kinds()
    )
    linear_params = sum(
        count * layer.inputs * layer.outputs for kind, count in shape.count_kinds() for layer in kind.linears
    )
    if quantization == "mxfp4":
        packed = _MXFP4_BITS / 8 * expert_params + 2.0 * (shape.params - expert_params)
        notes.append(f"a checkpoint of {packed / 2**30:.1f} GiB, experts in MXFP4: trained in 16 bits")
    elif quantization == "fp8":
        fp8_params = expert_params + linear_params
        packed = _FP8_BITS / 8 * fp8_params + 2.0 * (shape.params - fp8_params)
        notes.append(f"a checkpoint of {packed / 2**30:.1f} GiB, matrices in FP8: trained in 16 bits")
    elif quantization is not None:
        notes.append(f"a checkpoint quantized by {quantization!r:.30}: trained in 16 bits")
    modules = values.read_size("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
    if modules:
        parameters = format_count(_count_prediction_params(shape))
        notes.append(f"{modules} x multi-token prediction of {parameters} parameters in the checkpoint, not loaded")
    return tuple(notes)


def _describe_refused_blocks(shape: DecoderShape) -> tuple[str, ...]:
    """Return a note if training refuses blocks of the model, as they have no attention that keeps the rows of a packed
    batch apart (`models/forward.py`)."""
    labels = {
        kind.attention.label: None
        for kind, _ in shape.count_kinds()
        if (isinstance(kind.attention, DeltaAttention) and kind.attention.layout == "kimi")
        or (isinstance(kind.attention, LatentAttention) and kind.attention.index_heads)
    }
    if not labels:
        return ()
    return (
        f"training refuses {', '.join(labels)}, in which rows of a batch would mix: sizes as transformers builds it",
    )


def _count_prediction_params(shape: DecoderShape) -> int:
    """Return the parameters of a multi-token prediction module without the shared embedding and head: a block, a
    projection of two states to one, and three norms (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""
    return shape.block_params + 2 * shape.hidden * shape.hidden + 3 * shape.hidden
