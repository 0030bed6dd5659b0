"""The weights of a Hugging Face folder, read part by part into a model: no rank ever holds more than one tensor extra.
Written file by file: rank 0 never holds more than one file.

Most models are stored under the names that they have in memory. What transformers stores otherwise (experts one by one,
say) goes through its own converters, one converted tensor at a time.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.core import json_reader, log
from anabatic.core.errors import DataError
from anabatic.models.quantized import QuantizedWeight, iter_quantized_weights
from anabatic.parallel.dtensors import TensorSlices, copy_from_full, fill_local_part, gather_full_tensor, is_sharded

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_FILE_BYTES = 4 << 30
"""A weight file is closed when the next tensor would make it larger than this."""


def is_extra_weight(name: str) -> bool:
    """True for what is no part of a language model: adapters, and the heads of classifiers and reward models."""
    return "lora_" in name or name.startswith(("classifier.", "score."))


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        DataError: it is missing, torn, or no object.
    """
    try:
        content = json_reader.read_json_file(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "copy the folder again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds {type(content).__name__}, not an object", "copy the folder again")
    return content


class WeightsReader:
    """Open weight files.

    Attributes:
        names: every stored tensor.
    """

    def __init__(self, folder: Path, files: Mapping[str, Any]) -> None:
        self.folder = folder
        self._file_of = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118 - no mapping
        self.names = sorted(self._file_of)

    def get_shape(self, name: str) -> list[int]:
        """Return a tensor's shape."""
        return list(self._file_of[name].get_slice(name).get_shape())

    def read_tensor(self, name: str, part: TensorSlices | None = None) -> Tensor:
        """Return a tensor, or the part of it alone; it comes from the disk now."""
        stored = self._file_of[name].get_slice(name)
        value: Tensor = stored[part] if part else stored[...]
        return value


@functools.cache
def _safe_open_options() -> dict[str, str]:
    """Read parts instead of mapping files, whose pages would count as every rank's memory (newer safetensors can)."""
    return {"backend": "pread"} if "backend" in inspect.signature(safe_open).parameters else {}


@contextmanager
def open_weights(folder: Path) -> Iterator[WeightsReader]:
    """Open the weight files of a model folder.

    Raises:
        DataError: a file is missing or torn.
    """
    names = [SINGLE_FILE]
    if (folder / INDEX_FILE).is_file():
        names = _list_index_files(folder / INDEX_FILE)
    missing = [name for name in names if not os.path.isfile(folder / name)]
    if missing:
        raise DataError(
            f"{folder} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing[:3])}",
            "copy the folder again; only safetensors are read",
        )
    with ExitStack() as stack:
        files = {}
        for name in names:
            try:
                files[name] = stack.enter_context(safe_open(str(folder / name), framework="pt", **_safe_open_options()))
            except Exception as error:  # safetensors raises its own class, straight from Rust
                raise DataError(f"{folder / name} is torn: {error}", "copy it again") from error
        yield WeightsReader(folder, files)


def _list_index_files(index: Path) -> list[str]:
    mapped = read_json_object(index).get("weight_map")
    names = list(mapped.values()) if isinstance(mapped, dict) else []
    if not names or not all(isinstance(name, str) and name and "/" not in name for name in names):
        raise DataError(f"{index} names no weight files beside it", "copy the folder again")
    return sorted(set(names))


def require_weight_files(folder: Path) -> None:
    """Make sure that the weight files of a folder are there and whole as far as their headings tell.

    Raises:
        DataError: one is missing or torn.
    """
    with open_weights(folder):
        pass


@dataclass
class _LoadPlan:
    """Where each parameter of a model comes from."""

    plain: dict[str, str] = field(default_factory=dict)
    """Parameter -> stored name."""
    converted: dict[str, Any] = field(default_factory=dict)
    """First parameter that a converter makes -> the converter, with its tensors still on the disk."""
    surplus: list[str] = field(default_factory=list)


def load_into_model(
    model: PreTrainedModel, folder: Path, wanted: set[str], new: Mapping[str, range] | None = None, seed: int = 0
) -> None:
    """Fill the parameters and persistent buffers `wanted` of a model, each rank its part, and its packed weights.

    Args:
        model: has memory already; sharded or not.
        wanted: names as in `named_parameters()` and `named_buffers()`, tied ones once.
        new: name of an embedding -> its rows that are drawn again, with `seed`; the folder may lack the last of them.

    Raises:
        DataError: a tensor is missing, has another shape, or cannot be read.
    """
    packed = dict(iter_quantized_weights(model))
    wanted = wanted | packed.keys()
    targets: dict[str, Tensor | QuantizedWeight] = {
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
        **packed,
    }
    tied = {name for name in model.state_dict() if name not in targets}
    with open_weights(folder) as stored:
        plan = _plan_load(model, stored, targets, tied)
        filled: set[str] = set()
        wrong: list[tuple[str, list[int], list[int]]] = []
        for name, source in plan.plain.items():
            if name in (new or {}):
                embedding = targets[name]
                assert new is not None and isinstance(embedding, Tensor)
                with _wrap_read_errors(folder, source):
                    value = _extend_embedding(stored.read_tensor(source), embedding.shape[0], new[name], seed)
                if value.shape == embedding.shape:
                    copy_from_full(embedding, value)
                    filled.add(name)
                    continue
            if stored.get_shape(source) != list(targets[name].shape):
                wrong.append((name, stored.get_shape(source), list(targets[name].shape)))
                continue
            with _wrap_read_errors(folder, source):
                _fill_target(targets[name], stored, source)
            filled.add(name)
        for first, converter in plan.converted.items():
            with _wrap_read_errors(folder, first):
                made = _convert_tensor(model, converter, first)
            for name in made.keys() & targets.keys():
                if made[name].shape != targets[name].shape:
                    wrong.append((name, list(made[name].shape), list(targets[name].shape)))
                    continue
                _assign_value(targets[name], made[name])
                filled.add(name)
    _require_complete(folder, wrong, sorted(wanted - filled), plan.surplus)
    _require_no_foreign(model, folder, plan.surplus)


def _extend_embedding(value: Tensor, rows: int, new: range, seed: int) -> Tensor:
    """Return an embedding of `rows` rows, those of `new` with the mean and deviation of the rows before them."""
    known = value[: new.start].float()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(len(new), value.shape[1]).normal_(generator=generator)
    wide = torch.cat((value.float(), value.new_zeros(max(0, rows - len(value)), value.shape[1]).float()))
    wide[new.start : new.stop] = known.mean(0) + drawn * known.std(0)
    return wide


def _fill_target(target: Tensor | QuantizedWeight, stored: WeightsReader, source: str) -> None:
    if isinstance(target, Tensor) and is_sharded(target):
        fill_local_part(target, lambda part: stored.read_tensor(source, part))
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
    strange = []
    for name in stored.names:
        short, long = name.removeprefix(f"{prefix}."), f"{prefix}.{name}"
        known = next((each for each in (name, long, short) if each in targets or each in tied), None)
        if known is None:
            strange.append(name)
        elif known in targets:
            plan.plain[known] = name
    if strange:
        _match_by_transformers(model, stored, strange, targets, plan)
    return plan


def _match_by_transformers(
    model: PreTrainedModel, stored: WeightsReader, strange: list[str], targets: Mapping[str, Any], plan: _LoadPlan
) -> None:
    """Sort the names that the model does not know by transformers' renamings and converters (transformers 5)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for name in sorted(strange, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, dict(targets))
        if renamed not in targets:
            plan.surplus.append(name)
        elif pattern is None:
            plan.plain[renamed] = name
        else:
            converter = plan.converted.setdefault(renamed, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(renamed, name, pattern, lambda name=name: stored.read_tensor(name))


def _convert_tensor(model: PreTrainedModel, converter: Any, first: str) -> dict[str, Tensor]:
    made = converter.convert(first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _require_complete(
    folder: Path, wrong: list[tuple[str, list[int], list[int]]], missing: list[str], surplus: list[str]
) -> None:
    """Every weight that config.json describes must be there and have its shape."""
    if wrong:
        name, stored, expected = wrong[0]
        raise DataError(
            f"{folder}: {len(wrong)} weights do not fit config.json: {name} has shape {stored},"
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
    """A weight of a module that the model has, such as a norm inside its attention, belongs to another architecture."""
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
    leave: Callable[[str], bool] = is_extra_weight,
) -> None:
    """Write the weights, whole, in the format that transformers publishes; `None`: take part in gathering alone.

    Args:
        file_bytes: a file is closed when the next tensor would make it larger.
        leave: names that are not written.
    """
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    files: list[dict[str, Tensor]] = [{}]
    index: dict[str, int] = {}
    room = file_bytes
    for name, tensor in model.state_dict().items():
        if name not in names or leave(name):  # tied ones are kept once
            continue
        value = gather_full_tensor(tensor.detach())
        if folder is None:
            continue
        for told, each in _revert_conversion(model, name, value.cpu()).items():
            if each.nbytes > room and files[-1]:
                _flush_file(folder, files, index)
                files.append({})
                room = file_bytes
            files[-1][told] = each.contiguous()
            room -= each.nbytes
    if folder is None:
        return
    _flush_file(folder, files, index)
    _name_files(folder, len(files), index)


def _revert_conversion(model: PreTrainedModel, name: str, value: Tensor) -> dict[str, Tensor]:
    """Undo what transformers converts when it loads, experts in one tensor for instance."""
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
    number = len(files)
    save_file(files[-1], folder / f"{number}.part", metadata={"format": "pt"})
    index.update(dict.fromkeys(files[-1], number))
    files[-1] = {}


def _name_files(folder: Path, count: int, index: dict[str, int]) -> None:
    if count == 1:
        (folder / "1.part").rename(folder / SINGLE_FILE)
        return
    names = {number: f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)}
    for number, name in names.items():
        (folder / f"{number}.part").rename(folder / name)
    total = sum((folder / name).stat().st_size for name in names.values())
    content = {"metadata": {"total_size": total}, "weight_map": {key: names[number] for key, number in index.items()}}
    (folder / INDEX_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
