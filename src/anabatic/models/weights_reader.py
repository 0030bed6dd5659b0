"""Load and save the weights of a Hugging Face folder. Loading holds at most one extra tensor per rank, saving at most
one file on rank 0.

Most weights are stored under their names in memory. Weights that transformers stores in another form, for example
separate experts, go through its converters, one converted tensor at a time.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.models.quantized import QuantizedWeight
from anabatic.models.weight_files import (
    INDEX_FILE,
    SINGLE_FILE,
    WeightsReader,
    open_weights,
    read_json_object,
    read_quantization,
)
from anabatic.parallel.sharded_tensors import (
    copy_from_full,
    fill_local_part,
    gather_full_tensor,
    is_sharded,
)
from anabatic.parallel.sharding import get_absent

MAX_FILE_BYTES = 4 << 30
"""A weight file is closed when the next tensor would make it larger than this."""


def is_extra_weight(name: str) -> bool:
    """True for weights outside the language model: adapters, and the heads of classifiers and reward models."""
    return "lora_" in name or name.startswith(("classifier.", "score."))


@dataclass
class _LoadPlan:
    """Source of each parameter of a model."""

    plain: dict[str, str] = field(default_factory=dict)
    """Parameter -> stored name."""
    converted: dict[str, Any] = field(default_factory=dict)
    """First parameter of a converter's result -> the converter, with its tensors still on the disk."""
    surplus: list[str] = field(default_factory=list)


def iter_quantized_weights(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield the quantized weights with the names of the original ones."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            yield f"{name.rpartition('.')[0]}.weight", module


def load_into_model(
    model: PreTrainedModel, folder: Path, names: set[str], new_rows: Mapping[str, range] | None = None, seed: int = 0
) -> None:
    """Load the parameters and persistent buffers `names` of a model, each rank its part, and its quantized weights.

    Args:
        model: a materialized model, sharded or not.
        names: names as in `named_parameters()` and `named_buffers()`, tied ones once.
        new_rows: name of an embedding -> rows to initialize with `seed`; the folder may lack the last of them.

    Raises:
        DataError: a tensor is missing, has another shape, or cannot be read.
    """
    quantized = dict(iter_quantized_weights(model))
    names = names | quantized.keys()
    targets: dict[str, Tensor | QuantizedWeight] = {
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
        **quantized,
        **(absent := get_absent(model)),
    }
    tied = {name for name in model.state_dict() if name not in targets}
    with open_dequantizable(folder, model.dtype) as stored:
        load_plan = _plan_load(model, stored, targets, tied)
        filled: set[str] = set()
        mismatched: list[tuple[str, list[int], list[int]]] = []
        for name, source in load_plan.plain.items():
            if name in (new_rows or {}):
                embedding = targets[name]
                assert new_rows is not None and isinstance(embedding, Tensor)
                with _wrap_read_errors(folder, source):
                    value = _extend_embedding(stored.read_tensor(source), embedding.shape[0], new_rows[name], seed)
                if value.shape == embedding.shape:
                    copy_from_full(embedding, value)
                    filled.add(name)
                    continue
            if stored.get_shape(source) != list(targets[name].shape):
                mismatched.append((name, stored.get_shape(source), list(targets[name].shape)))
                continue
            if name in absent:
                continue
            with _wrap_read_errors(folder, source):
                _fill_target(targets[name], stored, source)
            filled.add(name)
        for target_name, converter in load_plan.converted.items():
            with _wrap_read_errors(folder, target_name):
                converted = _convert_tensor(model, converter, target_name)
            for name in converted.keys() & targets.keys():
                if converted[name].shape != targets[name].shape:
                    mismatched.append((name, list(converted[name].shape), list(targets[name].shape)))
                    continue
                _assign_value(targets[name], converted[name])
                filled.add(name)
    _require_complete(folder, mismatched, sorted(names - filled), load_plan.surplus)
    _require_no_foreign(model, folder, load_plan.surplus)


def open_dequantizable(folder: Path, dtype: torch.dtype) -> AbstractContextManager[WeightsReader]:
    """Open the weight files of a model folder; weights that are quantized are read in `dtype`.

    Raises:
        DataError: a file is missing or torn, or quantized in a way that is not read here.
    """
    settings = read_quantization(folder)
    if settings is None:
        return open_weights(folder)
    from anabatic.models.published_weights import open_dequantized

    return open_dequantized(folder, settings, dtype)


def _extend_embedding(value: Tensor, rows: int, new_rows: range, seed: int) -> Tensor:
    """Return an embedding of `rows` rows; `new_rows` are drawn with the mean and deviation of the rows before them."""
    trained = value[: new_rows.start].float()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.empty(len(new_rows), value.shape[1]).normal_(generator=generator)
    extended = torch.cat((value.float(), value.new_zeros(max(0, rows - len(value)), value.shape[1]).float()))
    extended[new_rows.start : new_rows.stop] = trained.mean(0) + noise * trained.std(0)
    return extended


def _fill_target(target: Tensor | QuantizedWeight, stored: WeightsReader, source: str) -> None:
    if isinstance(target, Tensor) and is_sharded(target):
        fill_local_part(target, lambda part: stored.read_tensor(source, part))
    elif isinstance(target, QuantizedWeight) and (found := stored.read_codes(source, target.kind)) is not None:
        target.take_codes(*found)
    else:
        _assign_value(target, stored.read_tensor(source))


def _assign_value(target: Tensor | QuantizedWeight, value: Tensor) -> None:
    if isinstance(target, QuantizedWeight):
        target.quantize_weight(value)
    else:
        copy_from_full(target, value)


@contextmanager
def _wrap_read_errors(folder: Path, name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # safetensors raises its own class, straight from Rust
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{folder}: {name} cannot be read: {line}", "copy the folder again") from error


def _plan_load(model: PreTrainedModel, stored: WeightsReader, targets: Mapping[str, Any], tied: set[str]) -> _LoadPlan:
    plan = _LoadPlan()
    prefix = model.base_model_prefix
    unmatched = []
    for name in stored.names:
        without_prefix, with_prefix = name.removeprefix(f"{prefix}."), f"{prefix}.{name}"
        target_name = next(
            (
                candidate
                for candidate in (name, with_prefix, without_prefix)
                if candidate in targets or candidate in tied
            ),
            None,
        )
        if target_name is None:
            unmatched.append(name)
        elif target_name in targets:
            plan.plain[target_name] = name
    if unmatched:
        _match_by_transformers(model, stored, unmatched, targets, plan)
    return plan


def _match_by_transformers(
    model: PreTrainedModel, stored: WeightsReader, unmatched: list[str], targets: Mapping[str, Any], plan: _LoadPlan
) -> None:
    """Match names unknown to the model by transformers' renamings and converters (transformers 5)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for name in sorted(unmatched, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, dict(targets))
        if renamed not in targets:
            plan.surplus.append(name)
        elif pattern is None:
            plan.plain[renamed] = name
        else:
            converter = plan.converted.setdefault(renamed, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(renamed, name, pattern, lambda name=name: stored.read_tensor(name))


def _convert_tensor(model: PreTrainedModel, converter: Any, target_name: str) -> dict[str, Tensor]:
    converted = converter.convert(target_name, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def _require_complete(
    folder: Path, mismatched: list[tuple[str, list[int], list[int]]], missing: list[str], surplus: list[str]
) -> None:
    """Require every weight of config.json with the right shape."""
    if mismatched:
        name, stored, expected = mismatched[0]
        raise DataError(
            f"{folder}: {len(mismatched)} weights do not fit config.json: {name} has shape {stored},"
            f" the configuration says {expected}",
            "weights and config.json are of different models: copy the folder again",
        )
    if missing:
        raise DataError(
            f"{folder}: {len(missing)} weights that config.json describes are missing: {', '.join(missing[:3])}",
            "the folder holds another architecture, or only a part of the model: copy it again",
        )
    if surplus:
        log.warn(f"{folder}: {len(surplus)} weights are not part of the model and not used: {', '.join(surplus[:3])}")


def _require_no_foreign(model: PreTrainedModel, folder: Path, surplus: list[str]) -> None:
    """Refuse unused weights of existing modules, such as a norm inside the attention: the architecture differs."""
    modules = {name for name, module in model.named_modules() if not isinstance(module, nn.ModuleList)}
    inside = [name for name in surplus if name.endswith((".weight", ".bias")) and name.rsplit(".", 2)[0] in modules]
    inside = [name for name in inside if name.count(".") > 1]
    if inside:
        raise DataError(
            f"{folder}: {len(inside)} weights have no place in {type(model).__name__}: {', '.join(inside[:3])}",
            "config.json (model_type, architectures) is not that of these weights: copy the folder again",
        )


def save_weights(
    model: PreTrainedModel,
    folder: Path | None,
    file_bytes: int = MAX_FILE_BYTES,
    should_skip: Callable[[str], bool] = is_extra_weight,
) -> None:
    """Write the full weights in transformers' format; with `folder` None only take part in gathering.

    Args:
        file_bytes: a file is closed when the next tensor would make it larger.
        should_skip: returns whether to skip a name.
    """
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    files: list[dict[str, Tensor]] = [{}]
    index: dict[str, int] = {}
    free_bytes = file_bytes
    for name, tensor in model.state_dict().items():
        if name not in names or should_skip(name):  # tied weights are stored once
            continue
        value = gather_full_tensor(tensor.detach())
        if folder is None:
            continue
        for stored_name, stored_value in _revert_conversion(model, name, value.cpu()).items():
            if stored_value.nbytes > free_bytes and files[-1]:
                _flush_file(folder, files, index)
                files.append({})
                free_bytes = file_bytes
            files[-1][stored_name] = stored_value.contiguous()
            free_bytes -= stored_value.nbytes
    if folder is None:
        return
    _flush_file(folder, files, index)
    _name_files(folder, len(files), index)


def _revert_conversion(model: PreTrainedModel, name: str, value: Tensor) -> dict[str, Tensor]:
    """Revert the conversions of transformers' loader, for example experts in one tensor."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    conversions = model.__dict__.setdefault(
        "_weight_conversions", get_model_conversion_mapping(model, add_legacy=False)
    )
    if not conversions:
        return {name: value}
    reverted: dict[str, Tensor] = revert_weight_conversion(model, {name: value})
    return reverted


def _flush_file(folder: Path, files: list[dict[str, Tensor]], index: dict[str, int]) -> None:
    file_number = len(files)
    save_file(files[-1], folder / f"{file_number}.part", metadata={"format": "pt"})
    index.update(dict.fromkeys(files[-1], file_number))
    files[-1] = {}


def _name_files(folder: Path, count: int, index: dict[str, int]) -> None:
    if count == 1:
        (folder / "1.part").rename(folder / SINGLE_FILE)
        return
    names = {file_number: f"model-{file_number:05d}-of-{count:05d}.safetensors" for file_number in range(1, count + 1)}
    for file_number, name in names.items():
        (folder / f"{file_number}.part").rename(folder / name)
    total = sum((folder / name).stat().st_size for name in names.values())
    content = {
        "metadata": {"total_size": total},
        "weight_map": {key: names[file_number] for key, file_number in index.items()},
    }
    (folder / INDEX_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


CONFIG_FILE, TOKENIZER_CONFIG_FILE, GENERATION_CONFIG_FILE = (
    "config.json",
    "tokenizer_config.json",
    "generation_config.json",
)
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""Class name, known to both versions, of a tokenizer that is fully described by `tokenizer.json`."""
_LOCAL_KEYS = ("is_local", "local_files_only")
"""Keys about how the tokenizer was loaded here, unrelated to the model."""


def write_older_names(folder: Path) -> None:
    """Add the older names to the files of a folder, and set the same permissions on all weight files."""
    _rewrite_json(folder / CONFIG_FILE, to_older_config)
    _rewrite_json(folder / TOKENIZER_CONFIG_FILE, to_older_tokenizer)
    mode = (folder / CONFIG_FILE).stat().st_mode & 0o777
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)  # safetensors writes files that other users cannot read


def _rewrite_json(path: Path, convert: Any) -> None:
    path.write_text(json.dumps(convert(read_json_object(path)), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def to_older_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config.json` with `torch_dtype`, `rope_theta` and `rope_scaling` in addition to their newer names."""
    older = dict(config)
    if "dtype" in older:
        older["torch_dtype"] = older["dtype"]
    rope = older.get("rope_parameters")
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        if "rope_theta" in rope:
            older["rope_theta"] = rope["rope_theta"]
        is_plain = scaling.get("rope_type", "default") == "default" and "mrope_section" not in scaling
        older["rope_scaling"] = None if is_plain else scaling
    if isinstance(text := older.get("text_config"), dict):
        older["text_config"] = to_older_config(text)
    return older


def to_older_tokenizer(config: dict[str, Any]) -> dict[str, Any]:
    """Return `tokenizer_config.json` with the older class, and the older name of further special tokens."""
    older = {key: value for key, value in config.items() if key not in _LOCAL_KEYS}
    if older.get("tokenizer_class") == "TokenizersBackend":
        older["tokenizer_class"] = _TOKENIZER_CLASS
        older.pop("backend", None)
    if isinstance(older.get("extra_special_tokens"), list):
        older["additional_special_tokens"] = older.pop("extra_special_tokens")
    return older


def embed_chat_template(folder: Path) -> None:
    """Write the chat template into `tokenizer_config.json`, too: older readers look only there."""
    template = folder / "chat_template.jinja"
    if template.is_file():
        text = template.read_text(encoding="utf-8")
        _rewrite_json(folder / TOKENIZER_CONFIG_FILE, lambda config: config | {"chat_template": text})


def merge_generation_config(folder: Path, chat_tokens: dict[str, Any]) -> dict[str, Any]:
    """Return the generation settings of a model folder merged with the tokens that end an answer.

    Args:
        folder: model folder, which may have no settings.
        chat_tokens: `eos_token_id` (a list, or None) and `pad_token_id` of the tokenizer.
    """
    settings = read_json_object(folder / GENERATION_CONFIG_FILE) if (folder / GENERATION_CONFIG_FILE).is_file() else {}
    eos = settings.get("eos_token_id")
    saved_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    eos_ids = list(dict.fromkeys([*saved_ids, *(chat_tokens["eos_token_id"] or [])]))
    settings = {
        key: value for key, value in settings.items() if key not in ("_from_model_config", "transformers_version")
    }
    pad_id = settings.get("pad_token_id")
    return settings | {
        "eos_token_id": eos_ids or None,
        "pad_token_id": chat_tokens["pad_token_id"] if pad_id is None else pad_id,
    }
