"""Materialize a model from the meta device for training: install fused operators, shard it, allocate memory."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from anabatic.config.sections.common import Optim
from anabatic.core.errors import ConfigError
from anabatic.device.device import Device
from anabatic.models import tensor_parallel
from anabatic.models.forward import ModelRoot
from anabatic.models.lora.adapter import find_blocks
from anabatic.models.pretrained import prepare_model
from anabatic.parallel.dtensors import materialize_parameters
from anabatic.parallel.process_groups import World
from anabatic.parallel.sharding import ShardingPlan, shard_model


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
    partial = tensor_parallel.apply_tensor_parallel(model, world)
    root = ModelRoot(prepare_model(model, device.torch_device), world.tensor_group.size, partial)
    shard_model(root, _shard_units(model), plan, device, world)
    materialize_parameters(root, plan.get_state_device(device), device.torch_device)
    return root


def _shard_units(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks, and an untied embedding: a tied one is the head's matrix, which the loss reads."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings = [] if head.weight is embedding.weight else [embedding]
    return [*embeddings, *(model.get_submodule(name) for name in find_blocks(model))]
