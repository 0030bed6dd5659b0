"""Bring a model whose parameters are on the meta device to where it is trained: fused, divided, with memory."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from anabatic.config.shared import Optim
from anabatic.core.errors import ConfigError
from anabatic.device.device import Device
from anabatic.models import tensor
from anabatic.models.adapter import blocks_of
from anabatic.models.forward import Root
from anabatic.models.hf import prepare
from anabatic.parallel.shard import Division, shard
from anabatic.parallel.sharded import materialise
from anabatic.parallel.world import World


def format_of(optim: Optim, device: Device) -> torch.dtype:
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


def place(model: PreTrainedModel, division: Division, device: Device, world: World) -> Root:
    """Give a model fused operators, divide it, and give each rank memory for its part; the caller fills it."""
    partial = tensor.apply(model, world)
    root = Root(prepare(model, device.torch), world.tensor.size, partial)
    shard(root, _units(model), division, device, world)
    materialise(root, division.home(device), device.torch)
    return root


def _units(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks, and an embedding that is not the head's matrix too: the head is read where the loss is made."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    apart = [] if head.weight is embedding.weight else [embedding]
    return [*apart, *(model.get_submodule(name) for name in blocks_of(model))]
