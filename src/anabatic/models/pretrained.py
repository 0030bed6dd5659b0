"""Hugging Face folders: find, load, save."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from anabatic.config.sections.parallel import Recompute
from anabatic.core import log, run_lookup
from anabatic.core.errors import BROKEN_DATA_ERRORS, ConfigError, DataError
from anabatic.core.formatting import did_you_mean
from anabatic.core.model_format import describe_wrong_model
from anabatic.core.paths import RunFolder, open_atomic_folder
from anabatic.data.tokenizer.hf_folder import get_turn_end_id
from anabatic.device.ops import get_device_ops, list_expensive_operators
from anabatic.models import attention_interface, transformers4_names, weights_reader
from anabatic.models.fused import installer
from anabatic.models.hub import download
from anabatic.models.lora import adapter, adapter_config, merging
from anabatic.parallel.dtensors import materialize_parameters
from anabatic.parallel.process_groups import World
from anabatic.plan.supported_models import require_supported_folder


def resolve_model_folder(path: str | Path, named_hub: download.Hub | None = None, world: World | None = None) -> Path:
    """Return the model folder that `path` means: itself, that of a run folder (best or final), or a hub's `OWNER/NAME`.

    Raises:
        DataError: there is no model there, or it is of a kind that is not supported.
    """
    root = (
        download.fetch_model(str(path), named_hub, world)
        if run_lookup.is_hub_id(path, named_hub)
        else Path(path).expanduser()
    )
    run = RunFolder(root)
    for folder in (root, run.best_model, run.final_model):
        if (folder / "config.json").is_file() or (folder / adapter_config.ADAPTER_CONFIG_FILE).is_file():
            require_supported_folder(folder)
            return folder
    if not root.exists():
        raise run_lookup.make_missing_model_error(str(path))
    raise describe_wrong_model(root)


def resolve_base_folder(folder: Path, named_hub: download.Hub | None = None, world: World | None = None) -> Path:
    """Return the folder with the weights: of an adapter the model it was made for, else `folder` itself.

    Raises:
        DataError: that model is not there, or an adapter too.
    """
    if (folder / "config.json").is_file():
        return folder
    name = adapter_config.read_adapter_config(folder).get("base_model_name_or_path") or ""
    asked = named_hub or download.resolve_hub()  # a program has written the name: no slip of the pen
    if not name or not (Path(name).exists() or run_lookup.is_hub_id(name, asked)):
        raise DataError(
            f"{folder} is an adapter for {name or 'a model it does not name'}, which is not there",
            "fetch that model, and write its folder into adapter_config.json as base_model_name_or_path",
        )
    base = resolve_model_folder(name, asked, world)
    if not (base / "config.json").is_file():
        raise DataError(f"{folder} is an adapter for {base}, an adapter too", "merge that one first: `anabatic merge`")
    return base


def is_adapter(path: str | Path) -> bool:
    """True for an adapter folder, or a run folder that holds one."""
    return not (resolve_model_folder(path) / "config.json").is_file()


def resolve_merged_adapters(
    specs: Sequence[str], named: Path, named_hub: download.Hub | None = None, world: World | None = None
) -> list[merging.WeightedAdapter]:
    """Return the adapters that become part of the weights before the model `named`, itself perhaps one, is used: those
    of the list, else those that it was trained on top of.

    Raises:
        ConfigError: one of the list is no adapter, or was trained on top of others than those before it.
        DataError: one is missing or damaged.
    """
    shares: list[merging.WeightedAdapter] = []
    for spec in specs:
        path, weight = adapter_config.parse_adapter_spec(spec)
        folder = resolve_model_folder(path, named_hub, world).resolve()
        if not is_adapter(folder):
            raise adapter_config.whole_model_error(folder)
        shares = [*_require_same_record(shares, folder), merging.WeightedAdapter(folder, weight)]
    if is_adapter(named):
        shares = _require_same_record(shares, named)
    for share in shares:
        log.info(f"the adapter {share} becomes part of the weights")
    return shares


def _require_same_record(shares: list[merging.WeightedAdapter], top: Path) -> list[merging.WeightedAdapter]:
    """Return what lies below `top`."""
    known = merging.read_merged_record(top)
    for share in known:
        if not (share.folder / adapter_config.ADAPTER_CONFIG_FILE).is_file():
            what = f"{top} was trained on top of the adapter {share.folder}, which is not there"
            raise DataError(
                what,
                f"put it back, or write where it lies into {top / adapter_config.ADAPTER_CONFIG_FILE} "
                f"({merging.RECORD_KEY})",
            )
    if known and shares and shares != known:
        raise ConfigError(
            f"{top} was trained on top of {', '.join(map(str, known))}, not of {', '.join(map(str, shares))}",
            f"leave the adapters before it out: {merging.RECORD_KEY} in its {adapter_config.ADAPTER_CONFIG_FILE} names "
            f"them",
        )
    return shares or known


def find_tokenizer_folder(named: Path, shares: Sequence[merging.WeightedAdapter]) -> Path:
    """Return the folder whose tokenizer and chat template count: of the model and its adapters the topmost with one."""
    tops = [named] if is_adapter(named) else []
    folders = [*tops, *(share.folder for share in reversed(shares))]
    return next((folder for folder in folders if (folder / "tokenizer.json").is_file()), named)


def load_config(path: str | Path) -> PretrainedConfig:
    """Read the configuration of a model folder, without its weights.

    Raises:
        DataError: config.json is missing, torn or of an unknown architecture.
    """
    folder = resolve_base_folder(resolve_model_folder(path))
    kind = weights_reader.read_json_object(folder / "config.json").get("model_type")
    if kind and (not isinstance(kind, str) or kind not in CONFIG_MAPPING):
        raise DataError(
            f'{folder / "config.json"}: transformers {transformers.__version__} knows no model_type "{str(kind)[:60]}".'
            f"{did_you_mean(str(kind), CONFIG_MAPPING)}",
            "a newer transformers may know it: pip install -U transformers",
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, *BROKEN_DATA_ERRORS, StrictDataclassError) as error:
        raise DataError(f"{folder / 'config.json'}: {_first_line(error)}", "copy the folder again") from error
    return config


def load_model(
    path: str | Path,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    shares: Sequence[merging.WeightedAdapter] = (),
    quantize: Literal["none", "int8", "nf4"] = "none",
) -> PreTrainedModel:
    """Load a causal language model onto `device` with packed attention and the device's fused operators.

    An adapter folder gives the model it was made for with the adapter in it, all but the adapter frozen.

    Args:
        shares: adapters that become part of the weights first, see `resolve_merged_adapters`.
        quantize: hold the weights of the linear layers packed (`quantized.py`); the head stays as it is.

    Raises:
        ConfigError: weights are to be packed and changed by `shares`.
        DataError: the folder or a file in it is missing, torn or of an unknown architecture.
    """
    named = resolve_model_folder(path)
    folder = resolve_base_folder(named)
    model = build_meta_causal_lm(folder, dtype)
    if folder != named:
        adapter.insert_saved_adapter(model, named)
    if quantize != "none":
        if shares:
            raise ConfigError(f"quantize is {quantize}, and adapters become part of the weights", "merge them first")
        if folder == named:
            model.requires_grad_(False)
        adapter.quantize_frozen_layers(model, quantize)
    model = prepare_model(model, device)
    materialize_parameters(model, device, device)
    load_folder_weights(model, folder)
    merging.merge_adapters(model, shares)
    if folder != named:
        adapter.load_adapter(model, named)
    return model


def build_meta_causal_lm(folder: Path, dtype: torch.dtype, entries: int = 0) -> PreTrainedModel:
    """Return the model of a folder with its parameters on the meta device, tied where the configuration ties them.

    Args:
        entries: of a vocabulary that it must have room for.

    Raises:
        DataError: config.json is missing, torn, of an unknown architecture, or of a quantised model.
    """
    config = load_config(folder)
    config.vocab_size = max(config.vocab_size, entries)
    if quantised := getattr(config, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else type(quantised).__name__
        raise DataError(
            f"{folder} holds weights quantised by {method}, which are not trained or run here",
            "use the model's folder in bf16; sft --tuner lora --quantize nf4 packs it while it is read",
        )
    try:
        with init_empty_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise DataError(
            f"{folder} cannot be built: {_first_line(error)}", "is config.json that of a language model?"
        ) from error
    if (file := folder / transformers4_names.GENERATION_CONFIG_FILE).is_file():
        try:
            model.generation_config = GenerationConfig.from_dict(weights_reader.read_json_object(file))
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{file}: {_first_line(error)}", "copy the folder again") from error
    return model


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Put parameters on the meta device as they are registered; buffers, which hold computed numbers, are real.

    The idea is that of accelerate's `init_empty_weights(include_buffers=False)`.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_folder_weights(model: PreTrainedModel, folder: Path, new: range = range(0), seed: int = 0) -> None:
    """Read the weights of a folder into a model that has memory, each rank its part; adapters stay as they are.

    Args:
        new: entries of the vocabulary that the folder's tokenizer lacks: their rows are drawn again, with `seed`.

    Raises:
        DataError: a file is missing or torn, or the weights are another model's.
    """
    known = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    heads = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    rows = {name: new for name, weight in model.named_parameters() if id(weight) in heads} if new else {}
    weights_reader.load_into_model(
        model,
        folder,
        {name for name in model.state_dict() if name in known and not weights_reader.is_extra_weight(name)},
        rows,
        seed,
    )


def _first_line(error: Exception) -> str:
    """Return what an error says in one line; the reason, where its first line only announces it."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def require_tokenizer_fits(config: PretrainedConfig, tokenizer: Any, folder: Path, seq_len: int = 0) -> None:
    """Make sure that a model has room for a tokenizer's entries and for segments of `seq_len` positions.

    Raises:
        DataError: it has not.
    """
    if len(tokenizer) > config.vocab_size:
        raise DataError(
            f"the tokenizer of {folder} has {len(tokenizer)} entries, the model {config.vocab_size}",
            "use the tokenizer that the model was trained with",
        )
    require_positions(config, seq_len)


def require_positions(config: PretrainedConfig, seq_len: int) -> None:
    """Make sure that a model has room for segments of `seq_len` positions.

    Raises:
        DataError: it has not.
    """
    if seq_len > config.max_position_embeddings:
        raise DataError(
            f"batch.seq_len is {seq_len}, the model was made for {config.max_position_embeddings} positions",
            f"use --batch.seq-len {config.max_position_embeddings} or less",
        )


def prepare_model(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Give a model our attention and the fused operators of `device`, where it runs; weights may still be missing."""
    model.config._attn_implementation = attention_interface.ATTENTION_NAME
    model.config.use_cache = False
    installer.install_fused_ops(model, get_device_ops(device.type))
    return model


def enable_activation_checkpointing(model: PreTrainedModel, what: Recompute) -> None:
    """Switch activation checkpointing on: `full` keeps the inputs of blocks alone, `selective` also what is dear to
    make anew. transformers renamed the method in 5.x; the old name goes in 6."""
    if what == "none":
        return
    renamed = hasattr(model, "activation_checkpointing_enable")
    enable = model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable
    options: dict[str, Any] = {"use_reentrant": False}
    if what == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list_expensive_operators())
    enable(options)


def save_model(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: Any,
    writes: bool = True,
    also: Callable[[Path], None] | None = None,
    file_bytes: int = weights_reader.MAX_FILE_BYTES,
) -> None:
    """Write a Hugging Face folder that plain transformers loads: whole or not at all. All ranks call it, the one that
    `writes` writes; weights are gathered one by one and kept until a file is full.

    Args:
        also: writes what else belongs into the folder.
        file_bytes: a weight file is closed when the next tensor would make it larger.

    Raises:
        Failure: the disk is full or refuses writes; an older folder is untouched.
    """
    if not writes:
        weights_reader.save_weights(model, None)
        return
    with open_atomic_folder(folder) as temporary:
        weights_reader.save_weights(model, temporary, file_bytes)
        config = copy.deepcopy(model.config)
        config.use_cache = True
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.dtype = next(model.parameters()).dtype
        config.save_pretrained(temporary)
        GenerationConfig(**get_chat_token_ids(tokenizer)).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        transformers4_names.write_older_names(temporary)
        if also is not None:
            also(temporary)


def get_chat_token_ids(tokenizer: Any) -> dict[str, Any]:
    """Return the tokens that end an answer, end of text and end of turn, and the one that pads."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    turn = get_turn_end_id(tokenizer)
    if turn is not None and turn not in ends:
        ends.append(turn)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return {"eos_token_id": ends or None, "pad_token_id": pad}
