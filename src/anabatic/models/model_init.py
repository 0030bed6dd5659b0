"""Build a new model and initialize its weights, or materialize one from the meta device; `plan/depth_dial.py` computes
its sizes.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from anabatic.config.pretrain import PretrainModel as ModelConfig
from anabatic.config.sections.common import DerivedSizes, Optim
from anabatic.core.errors import ConfigError
from anabatic.device.device import Device
from anabatic.models import division
from anabatic.models.experts.expert_layers import iter_expert_layers, iter_experts_of_all
from anabatic.models.forward import ModelRoot
from anabatic.models.lora.adapter import find_blocks
from anabatic.models.pretrained import init_empty_weights, prepare_model
from anabatic.models.weights_reader import iter_quantized_weights
from anabatic.parallel.sharded_tensors import copy_from_full, materialize_parameters, to_local
from anabatic.parallel.sharding import ShardingPlan, divides_model, named_parameters_of_all, shard_model
from anabatic.parallel.world import World


def build_meta_qwen3(plan: DerivedSizes, model: ModelConfig, vocab_size: int, seq_len: int) -> PreTrainedModel:
    """Return the model with its parameters on the meta device.

    The architecture is Qwen3 (QK-norm, grouped-query attention, RoPE, SwiGLU), so plain transformers, vLLM and
    llama.cpp load the result.
    """
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=plan.get_int("width"),
        num_hidden_layers=plan.get_int("depth"),
        num_attention_heads=plan.get_int("heads"),
        num_key_value_heads=plan.get_int("kv_heads"),
        head_dim=plan.get_int("head_dim"),
        intermediate_size=plan.get_int("intermediate"),
        max_position_embeddings=seq_len,
        tie_word_embeddings=bool(plan.values["tie_embeddings"]),
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,  # a pad id would zero the gradient of its embedding, and 0 is a real token here
    )
    with init_empty_weights():
        return Qwen3ForCausalLM(config)


def build_model(
    plan: DerivedSizes, model: ModelConfig, vocab_size: int, seq_len: int, device: torch.device, seed: int
) -> PreTrainedModel:
    """Return a new model with initial weights on one device."""
    built = prepare_model(build_meta_qwen3(plan, model, vocab_size, seq_len), device)
    materialize_parameters(built, device, device)
    init_weights(built, seed)
    return built


@torch.no_grad()
def init_weights(model: PreTrainedModel, seed: int) -> None:
    """Initialize the weights of a materialized `build_meta_qwen3` model, each rank its part.

    Matrices are normal with deviation 1/sqrt(width), block outputs and an untied head zero. Tied embeddings are small
    (GPT-2's 0.02): otherwise the head would initially predict the token that it has just read. Zero outputs make every
    block the identity at the start, which allows a high learning rate from the first step (muP, arXiv 2203.03466,
    section on output layers). Drawn on the CPU, so that all devices start with equal weights.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config

    def draw_normal(weight: torch.Tensor, deviation: float) -> None:
        copy_from_full(weight, torch.empty(weight.shape).normal_(0.0, deviation, generator=generator))

    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            draw_normal(module.weight, 0.02 if config.tie_word_embeddings else 1.0)
        elif isinstance(module, nn.Linear):
            if name == "lm_head" and config.tie_word_embeddings:
                continue  # the embedding
            if name.endswith(("o_proj", "down_proj", "lm_head")):
                to_local(module.weight).zero_()
            else:
                draw_normal(module.weight, module.in_features**-0.5)
        elif name.endswith("norm"):
            to_local(module.weight).fill_(1.0)  # type: ignore[arg-type]


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return (all parameters, those in matrix products: without the input embedding; a tied matrix counts as head)."""
    total = sum(p.numel() for _, p in named_parameters_of_all(model)) + sum(
        weight.shape.numel() for _, weight in iter_quantized_weights(model)
    )
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    tied = model.get_output_embeddings().weight is embedding  # type: ignore[operator]
    return total, total if tied else total - embedding.numel()


def has_experts(model: PreTrainedModel) -> bool:
    """Return whether a model's configuration names experts; layers of stacked experts are in no other one."""
    return getattr(model.config, "num_experts_per_tok", None) is not None


def count_idle_parameters(model: PreTrainedModel) -> dict[str, int]:
    """Return the parameters of stacked experts, and of their adapters, that one token does not use, by name."""
    idle: dict[str, int] = {}
    if not has_experts(model):
        return idle
    parameters = dict(named_parameters_of_all(model))
    for name, layer in iter_experts_of_all(model):
        share = 1 - int(model.config.num_experts_per_tok) / int(layer.num_experts)
        own = {path: parameter for path, parameter in parameters.items() if path.startswith(f"{name}.")}
        idle |= {path: round(parameter.numel() * share) for path, parameter in own.items()}
    return idle


def flops_per_token(model: PreTrainedModel, mean_context: float, logits: bool = True) -> float:
    """Return the training operations per token: 6 per parameter in matrix products, 4 per frozen one, which needs no
    gradient, and 12 x layers x width x mean attended length. Of stacked experts those count that a token uses.

    Args:
        logits: the LM head is used.

    Source: PaLM (arXiv 2204.02311), appendix B, with the attended length instead of the full sequence.
    """
    config = model.config.get_text_config()
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    unused = [weight for weight in (embedding, head) if not (logits and weight is head)]
    idle = count_idle_parameters(model)
    parameters = dict(named_parameters_of_all(model))
    trained = sum(p.numel() for p in parameters.values() if p.requires_grad and not any(p is one for one in unused))
    trained -= sum(idle[name] for name, p in parameters.items() if name in idle and p.requires_grad)
    active = count_parameters(model)[1] - sum(idle.values()) - (0 if logits else head.numel())
    return 4.0 * active + 2.0 * trained + 12.0 * config.num_hidden_layers * width * mean_context


def resolve_weight_dtype(optim: Optim, device: Device) -> torch.dtype:
    """Return the dtype of trained weights.

    Raises:
        ConfigError: bf16 weights on a device that computes in another dtype.
    """
    if optim.weights == "fp32":
        return torch.float32
    if device.dtype != torch.bfloat16:
        raise ConfigError(
            f"optim.weights is {optim.weights}, but matrix products are made in {device.dtype}".replace("torch.", ""),
            "add --device.dtype bf16, or keep the weights in fp32",
        )
    return torch.bfloat16


def materialize_model(model: PreTrainedModel, plan: ShardingPlan, device: Device, world: World) -> ModelRoot:
    """Install fused operators, shard a model, and allocate each rank's part; the caller fills it."""
    whole: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    partial, experts = division.divide_model(model, world) if divides_model(world) else whole
    root = ModelRoot(prepare_model(model, device.torch_device), world.tensor_group.size, partial, experts)
    layers = [layer for _, layer in iter_expert_layers(model)] if experts else []
    shard_model(root, _shard_units(model), plan, device, world, layers)
    materialize_parameters(root, plan.get_state_device(device), device.torch_device)
    return root


def _shard_units(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks, and an untied embedding: a tied one is the head's matrix, which the loss reads.

    Those of other stages of a pipeline have no parameters and are left out.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings = [] if head.weight is embedding.weight else [embedding]
    units = [*embeddings, *(model.get_submodule(name) for name in find_blocks(model))]
    return [unit for unit in units if next(unit.parameters(), None) is not None]
