"""Adapters on a model: put them in, save them as PEFT does, load them, merge them.

Format (PEFT 0.21, `peft/utils/save_and_load.py`): `adapter_config.json` and `adapter_model.safetensors` with the names
`base_model.model.<module>.lora_A.weight`, `.lora_B.weight`, `.lora_magnitude_vector`, and
`base_model.model.<module>.weight` of modules that were trained whole.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.config.sections.tuner import Freeze, Lora
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import did_you_mean
from anabatic.core.paths import open_atomic_folder
from anabatic.models.lora.adapter_config import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    PEFT_PREFIX,
    list_adapted_layers,
    parse_lora_settings,
    read_adapter_config,
)
from anabatic.models.lora.linear import LoraLinear
from anabatic.models.quantized import QuantizationKind, QuantizedLinear, ScratchMemory, replace_weight
from anabatic.parallel.dtensors import copy_from_full, gather_full_tensor
from anabatic.plan import trainable_layers as named_layers


def compute_scale(lora: Lora) -> float:
    """Return the factor on the adapter's output."""
    alpha = 2.0 * lora.r if lora.alpha is None else lora.alpha
    return alpha / (math.sqrt(lora.r) if lora.use_rslora else lora.r)


def find_targets(model: nn.Module, wanted: list[str]) -> list[str]:
    """Return the names of the linear layers that `wanted` means.

    Raises:
        ConfigError: a name that no linear layer ends with.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    return named_layers.select_target_modules(linear, wanted)


def insert_adapter(model: PreTrainedModel, lora: Lora) -> list[str]:
    """Freeze the model and put an adapter, without numbers yet, into every target layer; return their names.

    Raises:
        ConfigError: a target or a module to save does not exist.
    """
    targets = find_targets(model, lora.target_modules)
    whole = [_find_modules_to_save(model, end) for end in lora.modules_to_save]
    model.requires_grad_(False)
    for name in targets:
        parent, _, last = name.rpartition(".")
        layer = LoraLinear(model.get_submodule(name), lora.r, compute_scale(lora), lora.dropout, lora.use_dora)  # type: ignore[arg-type]
        setattr(model.get_submodule(parent), last, layer)
    for names in whole:
        for name in names:
            model.get_submodule(name).float().requires_grad_(True)
    return targets


def quantize_frozen_layers(model: PreTrainedModel, kind: QuantizationKind) -> int:
    """Give the frozen linear layers of a model without memory, all but the head, packed weights; return how many."""
    linear = {name: model.get_submodule(name) for name in find_targets(model, ["all-linear"])}
    frozen = {name: layer for name, layer in linear.items() if not layer.weight.requires_grad}
    scratch = ScratchMemory()
    for name, layer in frozen.items():
        if isinstance(layer, LoraLinear):
            replace_weight(layer, layer.weight, kind, scratch)
        else:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, QuantizedLinear(layer, kind, scratch))  # type: ignore[arg-type]
    return len(frozen)


def init_adapter_weights(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Give the adapters of a model that holds its weights their first numbers."""
    generator = torch.Generator().manual_seed(seed)
    for layer in find_lora_layers(model).values():
        layer.init_adapter(generator)
        if lora.init == "pissa":
            layer.init_pissa()


def freeze_parameters(model: PreTrainedModel, settings: Freeze) -> None:
    """Leave the last blocks and the parameters that `settings.train` finds trainable, in fp32; freeze the rest.

    Raises:
        ConfigError: the model has fewer blocks, or an expression finds nothing.
    """
    blocks = find_blocks(model)
    named_layers.require_blocks(settings, len(blocks))
    wanted = tuple(f"{name}." for name in blocks[len(blocks) - settings.last_layers :])
    names = dict(model.named_parameters())
    chosen = {name for name in names if wanted and name.startswith(wanted)}
    for expression in named_layers.compile_freeze_patterns(settings):
        found = {name for name in names if expression.search(name)}
        if not found:
            some = ", ".join([*names][:4])
            what = f'freeze.train: no parameter matches "{expression.pattern}"'
            raise ConfigError(what, f"parameters: {some} and so on")
        chosen |= found
    for name, parameter in names.items():
        parameter.requires_grad_(name in chosen)
        if name in chosen:
            parameter.data = parameter.data.float()


def find_blocks(model: PreTrainedModel) -> list[str]:
    """Names of the decoder's blocks, first to last: the longest list of modules."""
    lists = [(name, len(module)) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    name, length = max(lists, key=lambda item: item[1], default=("", 0))
    return [f"{name}.{index}" for index in range(length)]


@torch.no_grad()
def restore_pissa_base(model: nn.Module, before: dict[str, Tensor]) -> None:
    """After a checkpoint was read: what `principal` froze must fit the start that the checkpoint knows.

    Args:
        before: `starts(model)` from before reading.
    """
    for name, layer in find_lora_layers(model).items():
        if layer.lora_A_start is None or layer.lora_B_start is None:
            continue
        now = layer.compute_initial_product()
        if not torch.equal(now, before[name]):  # another machine's singular vectors
            copy_from_full(layer.weight, gather_full_tensor(layer.weight) + (before[name] - now).to(layer.weight.dtype))


def get_initial_products(model: nn.Module) -> dict[str, Tensor]:
    """Layer -> the product that `principal` took out of its weight."""
    found = find_lora_layers(model).items()
    return {name: layer.compute_initial_product() for name, layer in found if layer.lora_A_start is not None}


def _find_modules_to_save(model: nn.Module, end: str) -> list[str]:
    names = [
        name
        for name, module in model.named_modules()
        if named_layers.matches_name_end(name, end) and any(True for _ in module.parameters())
    ]
    if not names:
        known = sorted({name.rsplit(".", 1)[-1] for name, _ in model.named_modules() if name})
        raise ConfigError(
            f'lora.modules_to_save: no module is called "{end}".{did_you_mean(end, known)}',
            f"modules of this model: {', '.join(name for name in known if not name.isdigit())}",
        )
    return names


def find_lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers that carry an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def collect_adapter_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of the adapter, whole, under PEFT's names; all ranks call it."""
    tensors: dict[str, Tensor] = {}
    for name, layer in find_lora_layers(model).items():
        a, b = layer.gather_delta()
        tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = a
        tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = b
        if layer.lora_magnitude is not None:
            tensors[f"{PEFT_PREFIX}{name}.lora_magnitude_vector"] = gather_full_tensor(layer.lora_magnitude)
    # A matrix that is embedding and head is written under both names: PEFT asks for both.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and "lora_" not in name:
            tensors[PEFT_PREFIX + name] = gather_full_tensor(parameter)
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: Any,
    lora: Lora,
    base: Path,
    writes: bool = True,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write an adapter folder that PEFT loads: whole or not at all. All ranks call it, the one that `writes` writes.

    Args:
        more: further keys of adapter_config.json.

    Raises:
        Failure: the disk is full or refuses writes; an older folder is untouched.
    """
    found = find_lora_layers(model)
    doubled = any(layer.lora_A_start is not None for layer in found.values())
    rank = lora.r * (2 if doubled else 1)
    scale = compute_scale(lora)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": rank,
        "lora_alpha": scale * (math.sqrt(rank) if lora.use_rslora else rank),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "target_modules": _format_target_names(model, found),
        "modules_to_save": _saved_modules(model, lora) or None,
        # PEFT from 0.18 on: without it a tied head would stay the base model's
        **({"ensure_weight_tying": True} if _is_saved_tied(model, lora) else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        **(more or {}),
    }
    tensors = collect_adapter_tensors(model)
    if not writes:
        return
    with open_atomic_folder(folder) as temporary:
        save_file(tensors, temporary / ADAPTER_WEIGHTS_FILE, metadata={"format": "pt"})
        (temporary / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tokenizer.save_pretrained(temporary)


def _format_target_names(model: PreTrainedModel, found: Iterable[str]) -> list[str]:
    """Names for adapter_config.json: ends of names, or whole ones where not every layer so called has an adapter."""
    ends = sorted({name.rsplit(".", 1)[-1] for name in found})
    called = {
        name for name, _ in model.named_modules() if any(named_layers.matches_name_end(name, end) for end in ends)
    }
    return ends if called == set(found) else sorted(found)


def _is_saved_tied(model: PreTrainedModel, lora: Lora) -> bool:
    """True when an embedding that is the head's matrix too is trained whole."""
    names = {name for end in lora.modules_to_save for name in _find_modules_to_save(model, end)}
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    tied = both[0].weight is both[1].weight
    return tied and any(model.get_submodule(name) in both for name in names)


def _saved_modules(model: PreTrainedModel, lora: Lora) -> list[str]:
    """Names for adapter_config.json: a matrix that is embedding and head goes by the embedding's name alone."""
    if not _is_saved_tied(model, lora):
        return lora.modules_to_save
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    kept = [
        end
        for end in lora.modules_to_save
        if not named_layers.matches_name_end(head, end) and not named_layers.matches_name_end(embedding, end)
    ]
    return [*kept, embedding.rsplit(".", 1)[-1]]


def insert_saved_adapter(model: PreTrainedModel, folder: Path) -> Lora:
    """Put the adapter of `folder`, without its numbers, into a base model; return its settings.

    Raises:
        DataError: the folder is damaged, or made for another model.
    """
    lora = parse_lora_settings(read_adapter_config(folder), folder)
    targets = list_adapted_layers(folder)
    there = set(find_targets(model, ["all-linear"]))
    strange = [name for name in targets if name not in there]
    if strange:
        raise DataError(
            f"{folder}: made for another model: this one has no linear layer {strange[0]}",
            "use the model that adapter_config.json names as base_model_name_or_path",
        )
    try:
        insert_adapter(model, replace(lora, target_modules=targets))
    except ConfigError as error:
        raise DataError(f"{folder}: made for another model: {error}", error.hint) from error
    return lora


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Fill the adapter that `insert_saved_adapter` has put into a model, each rank its part.

    Raises:
        DataError: the folder is damaged, or made for another model.
    """
    _fill_adapter(model, read_adapter_weights(folder), folder)


def read_adapter_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter folder under PEFT's names.

    Raises:
        DataError: they are missing or torn.
    """
    try:
        return load_file(folder / ADAPTER_WEIGHTS_FILE)
    except Exception as error:  # safetensors raises its own class, straight from Rust
        raise DataError(f"{folder / ADAPTER_WEIGHTS_FILE} cannot be read: {error}", "copy the folder again") from error


def convert_peft_name(name: str) -> str:
    """Return what a tensor of PEFT's is called in our modules."""
    ours = re.sub(r"\.(lora_[AB])\.weight$", r".\1", name.removeprefix(PEFT_PREFIX))
    ours = ours.replace(".lora_magnitude_vector", ".lora_magnitude").replace(".modules_to_save", "")
    return ours.replace(".original_module", "")


@torch.no_grad()
def _fill_adapter(model: PreTrainedModel, saved: dict[str, Tensor], folder: Path) -> None:
    own = dict(model.named_parameters(remove_duplicate=False))
    left = {name for name in own if "lora_" in name}
    for name, tensor in saved.items():
        ours = convert_peft_name(name)
        if ours not in own or own[ours].shape != tensor.shape:
            there = list(own[ours].shape) if ours in own else "not there"
            raise DataError(
                f"{folder}: made for another model: {name} has shape {list(tensor.shape)}, in this model it is {there}",
                "use the model that adapter_config.json names as base_model_name_or_path",
            )
        copy_from_full(own[ours], tensor)
        left.discard(ours)
    if left:
        raise DataError(
            f"{folder}: {len(left)} adapter weights are missing: {sorted(left)[0]}", "copy the folder again"
        )


@torch.no_grad()
def merge_into_linears(model: PreTrainedModel) -> PreTrainedModel:
    """Replace every adapted layer by one plain linear layer that does the work of both."""
    for name, layer in find_lora_layers(model).items():
        parent, _, last = name.rpartition(".")
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight, plain.bias = nn.Parameter(layer.compute_merged_weight()), layer.bias
        setattr(model.get_submodule(parent), last, plain)
    return model.requires_grad_(True)
