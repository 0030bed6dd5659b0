"""What a plan says about a model besides its sizes: what its published checkpoint holds, what is not trained here."""

from __future__ import annotations

from anabatic.core.formatting import format_count
from anabatic.plan.attention_kinds import DeltaAttention, LatentAttention
from anabatic.plan.config_values import ConfigValues
from anabatic.plan.decoder_shape import DecoderShape

MXFP4_BITS = 4.25
"""Bits of a weight: 4, and 8 for the scale of 32 (OCP Microscaling Formats 1.0, section 5.2)."""
FP8_BITS = 8.0 + 32 / 128**2
"""Bits of a weight: 8, and an fp32 scale for a block of 128 x 128 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""


def describe_checkpoint(values: ConfigValues, shape: DecoderShape) -> tuple[str, ...]:
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
        packed = MXFP4_BITS / 8 * expert_params + 2.0 * (shape.params - expert_params)
        notes.append(f"a checkpoint of {packed / 2**30:.1f} GiB, experts in MXFP4: trained in 16 bits")
    elif quantization == "fp8":
        fp8_params = expert_params + linear_params
        packed = FP8_BITS / 8 * fp8_params + 2.0 * (shape.params - fp8_params)
        notes.append(f"a checkpoint of {packed / 2**30:.1f} GiB, matrices in FP8: trained in 16 bits")
    elif quantization is not None:
        notes.append(f"a checkpoint quantized by {quantization!r:.30}: trained in 16 bits")
    modules = values.read_size("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
    if modules:
        parameters = format_count(count_prediction_params(shape))
        notes.append(f"{modules} x multi-token prediction of {parameters} parameters in the checkpoint, not loaded")
    return tuple(notes)


def describe_refused_blocks(shape: DecoderShape) -> tuple[str, ...]:
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


def count_prediction_params(shape: DecoderShape) -> int:
    """Return the parameters of a multi-token prediction module without the shared embedding and head: a block, a
    projection of two states to one, and three norms (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""
    return shape.block_params + 2 * shape.hidden * shape.hidden + 3 * shape.hidden
