"""Bring a model whose parameters are on the meta device to where it is trained: fused, divided, with memory."""

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
    """Return the format of trained weights.

    Raises:
        ConfigError: bf16 weights on a device that multiplies in another format.
    """
    if optim.weights == "fp32":
        return torch.float32
    if device.dtype != torch.bfloat16:
        raise ConfigError(
            f"optim.weights is {optim.weights}, but matrix products are made in {device.dtype}".replace("torch.", ""),
            "add --device.dtype bf16, or keep the weights in fp32",
        )
    return torch.bfloat16


def materialize_model(model: PreTrainedModel, division: ShardingPlan, device: Device, world: World) -> ModelRoot:
    """Give a model fused operators, divide it, and give each rank memory for its part; the caller fills it."""
    partial = tensor_parallel.apply_tensor_parallel(model, world)
    root = ModelRoot(prepare_model(model, device.torch_device), world.tensor_group.size, partial)
    shard_model(root, _shard_units(model), division, device, world)
    materialize_parameters(root, division.get_state_device(device), device.torch_device)
    return root


def _shard_units(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks, and an embedding that is not the head's matrix too: the head is read where the loss is made."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    apart = [] if head.weight is embedding.weight else [embedding]
    return [*apart, *(model.get_submodule(name) for name in find_blocks(model))]
