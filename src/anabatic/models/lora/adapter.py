"""Insert adapters into a model, save them in PEFT's format, load and merge them.

Format (PEFT 0.21, `peft/utils/save_and_load.py`): `adapter_config.json` and `adapter_model.safetensors` with the names
`base_model.model.<module>.lora_A.weight`, `.lora_B.weight`, `.lora_magnitude_vector`, and
`base_model.model.<module>.weight` of fully trained modules.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.config.sections.train_jobs import Freeze, Lora
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import did_you_mean
from anabatic.core.paths import open_atomic_folder
from anabatic.models.experts import expert_layers
from anabatic.models.lora import expert_adapter
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
from anabatic.parallel.sharded_tensors import copy_from_full, gather_full_tensor
from anabatic.plan import layer_names
from anabatic.plan.model_shape import packs_pictures


def compute_scale(lora: Lora) -> float:
    """Return the factor on the adapter's output."""
    alpha = 2.0 * lora.r if lora.alpha is None else lora.alpha
    return alpha / (math.sqrt(lora.r) if lora.use_rslora else lora.r)


def find_targets(model: nn.Module, target_modules: list[str], prefixes: tuple[str, ...] = ("",)) -> list[str]:
    """Return the names of the linear layers that match `target_modules`.

    Args:
        prefixes: how the names begin among which they are looked for.

    Raises:
        ConfigError: a name matches the end of no linear layer's name.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    linear_names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and name.startswith(prefixes)
    ]
    return layer_names.select_target_modules(linear_names, target_modules)


def insert_adapter(model: PreTrainedModel, lora: Lora, prefixes: tuple[str, ...] = ("",)) -> list[str]:
    """Freeze the model and insert an uninitialized adapter into every target layer; return their names.

    Args:
        prefixes: how the names of target layers begin.

    Raises:
        ConfigError: a target or a module to save does not exist.
    """
    modules_to_save = [_find_modules_to_save(model, end) for end in lora.modules_to_save]
    targets = find_targets(model, lora.target_modules, prefixes)
    has_expert_targets = any(map(layer_names.is_expert_target, lora.target_modules))
    experts = find_expert_targets(model, lora) if has_expert_targets else []
    model.requires_grad_(False)
    for name in targets:
        parent, _, last = name.rpartition(".")
        layer = LoraLinear(model.get_submodule(name), lora.r, compute_scale(lora), lora.dropout, lora.use_dora)  # type: ignore[arg-type]
        setattr(model.get_submodule(parent), last, layer)
    for name in experts:
        owner, _, weight = name.rpartition(".")
        expert_layers.insert_expert_adapter(model.get_submodule(owner), weight, lora.r, compute_scale(lora))
    for names in modules_to_save:
        for name in names:
            model.get_submodule(name).float().requires_grad_(True)
    return [*targets, *experts]


def find_expert_targets(model: nn.Module, lora: Lora) -> list[str]:
    """Return the names of the stacked weights of experts that get an adapter; some target names them.

    Raises:
        ConfigError: a target matches none, or the adapter has what PEFT does not know for experts.
    """
    pissa = lora.init if lora.init == "pissa" else None
    expert_adapter.require_plain_adapter({"dropout": lora.dropout, "use_dora": lora.use_dora, "init": pissa})
    return layer_names.select_expert_weights(expert_layers.list_expert_weights(model), lora.target_modules)


def quantize_frozen_layers(model: PreTrainedModel, kind: QuantizationKind) -> int:
    """Quantize the frozen linear layers of a model on the meta device, except the head; return how many."""
    prefix = find_language_prefix(model)
    linear_layers = {name: model.get_submodule(name) for name in find_targets(model, ["all-linear"], (prefix,))}
    frozen = {name: layer for name, layer in linear_layers.items() if not layer.weight.requires_grad}
    scratch = ScratchMemory()
    for name, layer in frozen.items():
        if isinstance(layer, LoraLinear):
            replace_weight(layer, layer.weight, kind, scratch)
        else:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, QuantizedLinear(layer, kind, scratch))  # type: ignore[arg-type]
    return len(frozen)


def init_adapter_weights(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Initialize the adapters of a model with loaded weights."""
    generator = torch.Generator().manual_seed(seed)
    for layer in find_lora_layers(model).values():
        layer.init_adapter(generator)
        if lora.init == "pissa":
            layer.init_pissa()
    for experts in find_expert_adapters(model).values():
        experts.init_adapter(generator)


def freeze_parameters(model: PreTrainedModel, settings: Freeze) -> None:
    """Keep the last blocks and the parameters that match `settings.train` trainable, in fp32; freeze the rest.

    Raises:
        ConfigError: the model has fewer blocks, or an expression has no match.
    """
    blocks = find_blocks(model)
    layer_names.require_blocks(settings, len(blocks))
    prefixes = tuple(f"{name}." for name in blocks[len(blocks) - settings.last_layers :])
    names = dict(model.named_parameters())
    trainable = {name for name in names if prefixes and name.startswith(prefixes)}
    for expression in layer_names.compile_freeze_patterns(settings):
        matches = {name for name in names if expression.search(name)}
        if not matches:
            examples = ", ".join([*names][:4])
            message = f'freeze.train: no parameter matches "{expression.pattern}"'
            raise ConfigError(message, f"parameters: {examples} and so on")
        trainable |= matches
    for name, parameter in names.items():
        parameter.requires_grad_(name in trainable)
        if name in trainable:
            parameter.data = parameter.data.float()


def runs_own_forward(model: nn.Module) -> bool:
    """Return whether a model sees pictures in a way that is not packed: each row goes through its own forward pass."""
    config: Any = getattr(model, "config", None)
    return getattr(config, "vision_config", None) is not None and not packs_pictures(config.to_dict())


def find_language_prefix(model: nn.Module) -> str:
    """Return how the names of the decoder begin in a model that sees: `model.language_model.`; empty for others."""
    config = getattr(model, "config", None)
    if config is None or getattr(config, "vision_config", None) is None:
        return ""
    inner = config.get_text_config()
    names = [name for name, module in model.named_modules() if name and getattr(module, "config", None) is inner]
    return f"{names[0]}." if names else ""


def find_blocks(model: PreTrainedModel) -> list[str]:
    """Return the names of the decoder's blocks in order: the longest list of modules."""
    prefix = find_language_prefix(model)
    lists = [
        (name, len(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.startswith(prefix)
    ]
    name, length = max(lists, key=lambda item: item[1], default=("", 0))
    return [f"{name}.{index}" for index in range(length)]


@torch.no_grad()
def restore_pissa_base(model: nn.Module, initial_products: dict[str, Tensor]) -> None:
    """Adjust the frozen weights of PiSSA to the initial adapter of a loaded checkpoint.

    Args:
        initial_products: `get_initial_products(model)` before loading.
    """
    for name, layer in find_lora_layers(model).items():
        if layer.lora_A_start is None or layer.lora_B_start is None:
            continue
        product = layer.compute_initial_product()
        if not torch.equal(product, initial_products[name]):  # singular vectors of another machine
            copy_from_full(
                layer.weight,
                gather_full_tensor(layer.weight) + (initial_products[name] - product).to(layer.weight.dtype),
            )


def get_initial_products(model: nn.Module) -> dict[str, Tensor]:
    """Return layer -> the product that `init_pissa` subtracted from its weight."""
    layers = find_lora_layers(model).items()
    return {name: layer.compute_initial_product() for name, layer in layers if layer.lora_A_start is not None}


def _find_modules_to_save(model: nn.Module, suffix: str) -> list[str]:
    names = [
        name
        for name, module in model.named_modules()
        if layer_names.matches_name_end(name, suffix) and any(True for _ in module.parameters())
    ]
    if not names:
        module_names = sorted({name.rsplit(".", 1)[-1] for name, _ in model.named_modules() if name})
        raise ConfigError(
            f'lora.modules_to_save: no module is called "{suffix}".{did_you_mean(suffix, module_names)}',
            f"modules of this model: {', '.join(name for name in module_names if not name.isdigit())}",
        )
    return names


def find_lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def find_expert_adapters(model: nn.Module) -> dict[str, expert_adapter.ExpertAdapter]:
    """Return the adapters of experts by the name of the weight that they add to."""
    return {
        name.removesuffix(expert_adapter.ADAPTER_SUFFIX): module
        for name, module in model.named_modules()
        if isinstance(module, expert_adapter.ExpertAdapter)
    }


def collect_adapter_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the full tensors of the adapter under PEFT's names; all ranks call it."""
    tensors: dict[str, Tensor] = {}
    for name, layer in find_lora_layers(model).items():
        if "lora_A" not in layer._parameters:  # another stage of a pipeline has it, and gives it to the writer
            continue
        a, b = layer.gather_delta()
        tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = a
        tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = b
        if layer.lora_magnitude is not None:
            tensors[f"{PEFT_PREFIX}{name}.lora_magnitude_vector"] = gather_full_tensor(layer.lora_magnitude)
    experts = find_expert_adapters(model)
    for wrapper, weight in (expert_adapter.make_peft_names([*experts]) if experts else {}).items():
        if not experts[weight]._parameters:
            continue
        a, b = experts[weight].export_tensors()
        tensors[f"{PEFT_PREFIX}{wrapper}.lora_A.weight"], tensors[f"{PEFT_PREFIX}{wrapper}.lora_B.weight"] = a, b
    # A tied matrix is written under both names: PEFT needs both.
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
    is_writer: bool = True,
    extra_config: Mapping[str, Any] | None = None,
    write_extra: Callable[[Path], None] | None = None,
) -> None:
    """Write an adapter folder that PEFT loads, atomically. All ranks call it, and the one with `is_writer` writes.

    Args:
        extra_config: further keys of adapter_config.json.
        write_extra: writes further files of the folder.

    Raises:
        Failure: the disk is full or refuses writes; an older folder is untouched.
    """
    layers = find_lora_layers(model)
    is_pissa = any(layer.lora_A_start is not None for layer in layers.values())
    rank = lora.r * (2 if is_pissa else 1)
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
        "target_modules": _format_target_names(model, layers) if layers else [],
        **_format_target_parameters(model),
        "modules_to_save": _saved_modules(model, lora) or None,
        # PEFT from 0.18 on: without it a tied head would stay the base model's
        **({"ensure_weight_tying": True} if _is_saved_tied(model, lora) else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        **(extra_config or {}),
    }
    tensors = collect_adapter_tensors(model)
    if not is_writer:
        return
    with open_atomic_folder(folder) as temporary:
        save_file(tensors, temporary / ADAPTER_WEIGHTS_FILE, metadata={"format": "pt"})
        (temporary / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tokenizer.save_pretrained(temporary)
        if write_extra is not None:
            write_extra(temporary)


def _format_target_names(model: PreTrainedModel, adapted: Iterable[str]) -> list[str]:
    """Return names for adapter_config.json: suffixes, or full names if not every matching layer has an adapter."""
    suffixes = sorted({name.rsplit(".", 1)[-1] for name in adapted})
    matches = {
        name
        for name, _ in model.named_modules()
        if any(layer_names.matches_name_end(name, suffix) for suffix in suffixes)
    }
    return suffixes if matches == set(adapted) else sorted(adapted)


def _format_target_parameters(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return the entry of adapter_config.json for experts; empty if none have adapters, which older PEFT reads too."""
    adapted = [*find_expert_adapters(model)]
    if not adapted:
        return {}
    present = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    return {"target_parameters": expert_adapter.format_target_parameters(adapted, present)}


def _is_saved_tied(model: PreTrainedModel, lora: Lora) -> bool:
    """True when a tied embedding is fully trained."""
    names = {name for suffix in lora.modules_to_save for name in _find_modules_to_save(model, suffix)}
    matrices = (model.get_input_embeddings(), model.get_output_embeddings())
    tied = matrices[0].weight is matrices[1].weight
    return tied and any(model.get_submodule(name) in matrices for name in names)


def _saved_modules(model: PreTrainedModel, lora: Lora) -> list[str]:
    """Return module names for adapter_config.json: a tied matrix has only the embedding's name."""
    if not _is_saved_tied(model, lora):
        return lora.modules_to_save
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    kept = [
        suffix
        for suffix in lora.modules_to_save
        if not layer_names.matches_name_end(head, suffix) and not layer_names.matches_name_end(embedding, suffix)
    ]
    return [*kept, embedding.rsplit(".", 1)[-1]]


def insert_saved_adapter(model: PreTrainedModel, folder: Path) -> Lora:
    """Insert the adapter of `folder`, uninitialized, into a base model; return its settings.

    Raises:
        DataError: the folder is damaged, or made for another model.
    """
    lora = parse_lora_settings(read_adapter_config(folder), folder)
    experts = find_saved_experts(model, lora)
    targets = [name for name in list_adapted_layers(folder) if name not in experts]
    linear_names = set(find_targets(model, ["all-linear"]))
    unknown = [name for name in targets if name not in linear_names]
    if unknown:
        raise DataError(
            f"{folder}: made for another model: this one has no linear layer {unknown[0]}",
            "use the model that adapter_config.json names as base_model_name_or_path",
        )
    try:
        insert_adapter(model, replace(lora, target_modules=[*targets, *experts.values()]))
    except ConfigError as error:
        raise DataError(f"{folder}: made for another model: {error}", error.hint) from error
    return lora


def find_saved_experts(model: nn.Module, lora: Lora) -> dict[str, str]:
    """Return PEFT's wrappers of the stacked weights that a saved adapter adapts, wrapper -> weight."""
    targets = [target for target in lora.target_modules if layer_names.is_expert_target(target)]
    if not targets:
        return {}
    return expert_adapter.make_peft_names(
        layer_names.select_expert_weights(expert_layers.list_expert_weights(model), targets)
    )


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights of the adapter inserted by `insert_saved_adapter`, each rank its part.

    Raises:
        DataError: the folder is damaged, or made for another model.
    """
    _fill_adapter(model, read_adapter_weights(folder), folder)


def read_adapter_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter folder under PEFT's names.

    Raises:
        DataError: they are missing or damaged.
    """
    try:
        return load_file(folder / ADAPTER_WEIGHTS_FILE)
    except Exception as error:  # safetensors raises its own class, straight from Rust
        raise DataError(f"{folder / ADAPTER_WEIGHTS_FILE} cannot be read: {error}", "copy the folder again") from error


def convert_peft_name(name: str) -> str:
    """Return the name in our modules of a tensor in PEFT's format."""
    converted = re.sub(r"\.(lora_[AB])\.weight$", r".\1", name.removeprefix(PEFT_PREFIX))
    converted = converted.replace(".lora_magnitude_vector", ".lora_magnitude").replace(".modules_to_save", "")
    return converted.replace(".original_module", "")


@torch.no_grad()
def _fill_adapter(model: PreTrainedModel, saved: dict[str, Tensor], folder: Path) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = {name for name in parameters if "lora_" in name}
    experts = find_expert_adapters(model)
    wrappers = expert_adapter.make_peft_names([*experts])
    for name, tensor in saved.items():
        target_name = convert_peft_name(name)
        owner, _, kind = target_name.rpartition(".")
        weight = wrappers.get(owner, "")
        if weight and experts[weight].import_tensor(kind, tensor):
            missing.discard(f"{weight}{expert_adapter.ADAPTER_SUFFIX}.{kind}")
            continue
        if target_name not in parameters or parameters[target_name].shape != tensor.shape:
            expected = list(parameters[target_name].shape) if target_name in parameters else "not there"
            raise DataError(
                f"{folder}: made for another model: {name} has shape {list(tensor.shape)}, in this model it is"
                f" {expected}",
                "use the model that adapter_config.json names as base_model_name_or_path",
            )
        copy_from_full(parameters[target_name], tensor)
        missing.discard(target_name)
    if missing:
        raise DataError(
            f"{folder}: {len(missing)} adapter weights are missing: {sorted(missing)[0]}", "copy the folder again"
        )


@torch.no_grad()
def merge_into_linears(model: PreTrainedModel) -> PreTrainedModel:
    """Replace every adapted layer by one linear layer with the merged weight."""
    for name, layer in find_lora_layers(model).items():
        parent, _, last = name.rpartition(".")
        merged = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        merged.weight, merged.bias = nn.Parameter(layer.compute_merged_weight()), layer.bias
        setattr(model.get_submodule(parent), last, merged)
    for name, stacked in find_expert_adapters(model).items():
        owner, _, last = name.rpartition(".")
        expert_layers.merge_expert_adapter(model.get_submodule(owner), last, stacked)
    return model.requires_grad_(True)
