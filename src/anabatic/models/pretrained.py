"""Resolve, load and save Hugging Face model folders."""

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
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from anabatic.config.sections.common import Recompute
from anabatic.core import log, paths
from anabatic.core.errors import BROKEN_DATA_ERRORS, ConfigError, DataError
from anabatic.core.formatting import did_you_mean
from anabatic.core.paths import RunFolder, open_atomic_folder
from anabatic.data.tokenizer.hf_folder import get_turn_end_id
from anabatic.device.attention import AttentionOptions, PackedSegments
from anabatic.device.ops import get_device_ops, list_expensive_operators
from anabatic.hub import model_download
from anabatic.models import fused_ops, weight_files, weights_reader
from anabatic.models.kv_cache import KVCache
from anabatic.models.linear_attention import delta_net
from anabatic.models.lora import adapter, adapter_config, merging
from anabatic.parallel.sharded_tensors import materialize_parameters
from anabatic.parallel.world import World
from anabatic.plan.model_format import describe_wrong_model
from anabatic.plan.model_shape import packs_pictures, require_supported_folder

_NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""For transformers, which otherwise asks at the terminal whether to run the code of a model folder."""


def resolve_model_folder(path: str | Path, hub: model_download.Hub | None = None, world: World | None = None) -> Path:
    """Return the model folder for `path`: itself, the best or final model of a run folder, or a hub's `OWNER/NAME`.

    Raises:
        DataError: there is no model, or it is not supported.
    """
    root = model_download.fetch_model(str(path), hub, world) if paths.is_hub_id(path, hub) else Path(path).expanduser()
    run = RunFolder(root)
    for folder in (root, run.best_model, run.final_model):
        if (folder / "config.json").is_file() or (folder / adapter_config.ADAPTER_CONFIG_FILE).is_file():
            require_supported_folder(folder)
            return folder
    if not root.exists():
        raise paths.make_missing_model_error(str(path))
    raise describe_wrong_model(root)


def resolve_base_folder(folder: Path, hub: model_download.Hub | None = None, world: World | None = None) -> Path:
    """Return the folder with the weights: the base model of an adapter, else `folder`.

    Raises:
        DataError: the base model is missing, or an adapter itself.
    """
    if (folder / "config.json").is_file():
        return folder
    name = adapter_config.read_adapter_config(folder).get("base_model_name_or_path") or ""
    base_hub = hub or model_download.resolve_hub()  # a program has written the name, so it is no typo
    if not name or not (Path(name).exists() or paths.is_hub_id(name, base_hub)):
        raise DataError(
            f"{folder} is an adapter for {name or 'a model it does not name'}, which is not there",
            "fetch that model, and write its folder into adapter_config.json as base_model_name_or_path",
        )
    base = resolve_model_folder(name, base_hub, world)
    if not (base / "config.json").is_file():
        raise DataError(f"{folder} is an adapter for {base}, an adapter too", "merge that one first: `anabatic merge`")
    return base


def is_adapter(path: str | Path) -> bool:
    """True for an adapter folder, or a run folder with an adapter."""
    return _holds_adapter(resolve_model_folder(path))


def _holds_adapter(folder: Path) -> bool:
    return not (folder / "config.json").is_file()


def resolve_merged_adapters(
    specs: Sequence[str], model_folder: Path, hub: model_download.Hub | None = None, world: World | None = None
) -> list[merging.WeightedAdapter]:
    """Return the adapters to merge into the weights before `model_folder`, which may be an adapter, is used: those of
    `specs`, else those that it was trained on top of.

    Raises:
        ConfigError: one of `specs` is no adapter, or was trained on top of other adapters than those before it.
        DataError: one is missing or damaged.
    """
    adapters: list[merging.WeightedAdapter] = []
    for spec in specs:
        path, weight = adapter_config.parse_adapter_spec(spec)
        if not (paths.is_hub_id(path, hub) or Path(path).expanduser().exists()):
            raise adapter_config.missing_adapter_error(path)
        folder = resolve_model_folder(path, hub, world).resolve()
        if not _holds_adapter(folder):
            raise adapter_config.whole_model_error(folder)
        adapters = [*_require_same_record(adapters, folder), merging.WeightedAdapter(folder, weight)]
    if _holds_adapter(model_folder):
        adapters = _require_same_record(adapters, model_folder)
    for weighted in adapters:
        log.info(f"the adapter {weighted} becomes part of the weights")
    return adapters


def _require_same_record(adapters: list[merging.WeightedAdapter], folder: Path) -> list[merging.WeightedAdapter]:
    """Return the adapters below `folder`; refuse `adapters` that differ from its record."""
    recorded = merging.read_merged_record(folder)
    for weighted in recorded:
        if not (weighted.folder / adapter_config.ADAPTER_CONFIG_FILE).is_file():
            message = f"{folder} was trained on top of the adapter {weighted.folder}, which is not there"
            raise DataError(
                message,
                f"put it back, or write where it lies into {folder / adapter_config.ADAPTER_CONFIG_FILE} "
                f"({merging.RECORD_KEY})",
            )
    if recorded and adapters and adapters != recorded:
        raise ConfigError(
            f"{folder} was trained on top of {', '.join(map(str, recorded))}, not of {', '.join(map(str, adapters))}",
            f"leave the adapters before it out: {merging.RECORD_KEY} in its {adapter_config.ADAPTER_CONFIG_FILE} names "
            f"them",
        )
    return adapters or recorded


def find_tokenizer_folder(model_folder: Path, adapters: Sequence[merging.WeightedAdapter]) -> Path:
    """Return the folder with the tokenizer and chat template to use: the topmost adapter with one, else the model."""
    own_folders = [model_folder] if _holds_adapter(model_folder) else []
    folders = [*own_folders, *(weighted.folder for weighted in reversed(adapters))]
    return next((folder for folder in folders if (folder / "tokenizer.json").is_file()), model_folder)


def load_config(path: str | Path) -> PretrainedConfig:
    """Read the configuration of a model, an adapter or a run, without its weights.

    Raises:
        DataError: config.json is missing, damaged or of an unknown architecture.
    """
    return read_config(resolve_base_folder(resolve_model_folder(path)))


def read_config(folder: Path) -> PretrainedConfig:
    """Read the config.json of a folder.

    Raises:
        DataError: it is missing, damaged or of an unknown architecture.
    """
    model_type = weight_files.read_json_object(folder / "config.json").get("model_type")
    if model_type and (not isinstance(model_type, str) or model_type not in CONFIG_MAPPING):
        raise DataError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} knows no model_type"
            f' "{str(model_type)[:60]}".'
            f"{did_you_mean(str(model_type), CONFIG_MAPPING)}",
            "a newer transformers may know it: pip install -U transformers",
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, **_NO_CODE)
    except (OSError, *BROKEN_DATA_ERRORS, StrictDataclassError) as error:
        raise DataError(f"{folder / 'config.json'}: {_first_line(error)}", "copy the folder again") from error
    return config


def require_engine_model(path: str | Path) -> None:
    """Make sure that the inference engine runs a model; its folder is looked at, not its weights.

    Raises:
        ConfigError: it sees pictures in a way that is not packed.
    """
    config = load_config(path)
    if getattr(config, "vision_config", None) is not None and not packs_pictures(config.to_dict()):
        raise ConfigError(
            f"{path}: {config.model_type} reads pictures in a way that is trained here, and not run by this engine",
            f"write a folder for vLLM: anabatic export {path} -o FOLDER, then vllm serve FOLDER",
        )


def load_model(
    path: str | Path,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    adapters: Sequence[merging.WeightedAdapter] = (),
    quantize: Literal["none", "int8", "nf4"] = "none",
) -> PreTrainedModel:
    """Load a causal language model onto `device` with packed attention and the device's fused operators.

    An adapter folder gives its base model with the adapter, all parameters but the adapter frozen.

    Args:
        adapters: adapters to merge into the weights first, see `resolve_merged_adapters`.
        quantize: quantize the weights of the linear layers (`quantized.py`) except the head.

    Raises:
        ConfigError: quantization and adapters to merge are combined.
        DataError: the folder or a file in it is missing, damaged or of an unknown architecture.
    """
    source = resolve_model_folder(path)
    folder = resolve_base_folder(source)
    model = build_meta_causal_lm(folder, dtype)
    if folder != source:
        adapter.insert_saved_adapter(model, source)
    if quantize != "none":
        if adapters:
            raise ConfigError(f"quantize is {quantize}, and adapters become part of the weights", "merge them first")
        if folder == source:
            model.requires_grad_(False)
        adapter.quantize_frozen_layers(model, quantize)
    model = prepare_model(model, device)
    materialize_parameters(model, device, device)
    load_folder_weights(model, folder)
    merging.merge_adapters(model, adapters)
    if folder != source:
        adapter.load_adapter(model, source)
    return model


def build_meta_causal_lm(folder: Path, dtype: torch.dtype, min_vocab_size: int = 0) -> PreTrainedModel:
    """Return the model of a folder with its parameters on the meta device, tied as in the configuration.

    Args:
        min_vocab_size: smallest size of the vocabulary.

    Raises:
        DataError: config.json is missing, damaged or of an unknown architecture.
    """
    config = read_config(folder)
    text_config = config.get_text_config()
    text_config.vocab_size = max(text_config.vocab_size, min_vocab_size)
    sees = text_config is not config and getattr(config, "vision_config", None) is not None
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    for part in (config, text_config):  # weights are dequantized while they are read, and saved so
        part.__dict__.pop("quantization_config", None)
    try:
        with init_empty_weights():
            model: PreTrainedModel = kind.from_config(config, dtype=dtype, attn_implementation="eager", **_NO_CODE)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise DataError(
            f"{folder} cannot be built: {_first_line(error)}", "is config.json that of a language model?"
        ) from error
    if (file := folder / weights_reader.GENERATION_CONFIG_FILE).is_file():
        try:
            model.generation_config = GenerationConfig.from_dict(weight_files.read_json_object(file))
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{file}: {_first_line(error)}", "copy the folder again") from error
    return model


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Put parameters on the meta device as they are registered; buffers, which hold computed values, are real.

    Same idea as accelerate's `init_empty_weights(include_buffers=False)`. Parameters without values get no random ones,
    neither by torch nor by transformers, for which they are marked: `normal_` on the meta device imports torch's
    compiler, most of a second.
    """
    register, draw_normal = nn.Module.register_parameter, nn.init.normal_
    marked: list[nn.Parameter] = []

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            param._is_hf_initialized = True  # type: ignore[attr-defined]
            marked.append(param)
        register(module, name, param)

    def draw_normal_unless_meta(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if tensor.is_meta else draw_normal(tensor, *args, **kwargs)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    nn.init.normal_ = draw_normal_unless_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        nn.init.normal_ = draw_normal
        for param in marked:
            del param._is_hf_initialized  # type: ignore[attr-defined]


def load_folder_weights(model: PreTrainedModel, folder: Path, new_rows: range = range(0), seed: int = 0) -> None:
    """Load the weights of a folder into a materialized model, each rank its part; adapters are unchanged.

    Args:
        new_rows: vocabulary entries that the folder's tokenizer lacks: their rows are initialized with `seed`.

    Raises:
        DataError: a file is missing or damaged, or the weights are of another model.
    """
    stored_names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    embedding_ids = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    rows = (
        {name: new_rows for name, weight in model.named_parameters() if id(weight) in embedding_ids} if new_rows else {}
    )
    weights_reader.load_into_model(
        model,
        folder,
        {name for name in model.state_dict() if name in stored_names and not weights_reader.is_extra_weight(name)},
        rows,
        seed,
    )


def _first_line(error: Exception) -> str:
    """Return the message of an error in one line, with the second line if the first ends with a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def require_tokenizer_fits(config: PretrainedConfig, tokenizer: Any, folder: Path) -> None:
    """Check that a model has enough embeddings for a tokenizer.

    Raises:
        DataError: it has not.
    """
    entries = config.get_text_config().vocab_size
    if len(tokenizer) > entries:
        raise DataError(
            f"the tokenizer of {folder} has {len(tokenizer)} entries, the model {entries}",
            "use the tokenizer that the model was trained with",
        )


def prepare_model(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Set packed attention and the fused operators of `device` on a model; its weights may still be missing."""
    model.config.use_cache = False
    if adapter.runs_own_forward(model):
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        return model
    model.config._attn_implementation = ATTENTION_NAME
    if getattr(model.config, "vision_config", None) is not None:
        from anabatic.models.vision.model_parts import find_tower
        from anabatic.models.vision.patch_product import install_patch_product
        from anabatic.models.vision.tower_attention import TOWER_ATTENTION

        install_patch_product(find_tower(model)[1])
        has_grids = hasattr(model.config.vision_config, "spatial_merge_size")  # tiles have one length: no borders
        model.config.vision_config._attn_implementation = TOWER_ATTENTION if has_grids else "sdpa"
    if any(delta_net.CONVOLUTION in module._modules for module in model.modules()):
        delta_net.install_delta_layers(model)
    fused_ops.install_fused_ops(model, get_device_ops(device.type))
    return model


def enable_activation_checkpointing(model: PreTrainedModel, mode: Recompute) -> None:
    """Enable activation checkpointing: `full` keeps only the inputs of blocks, `selective` also expensive results.

    transformers renamed the method in 5.x and removes the old name in 6."""
    if mode == "none":
        return
    renamed = hasattr(model, "activation_checkpointing_enable")
    enable = model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list_expensive_operators())
    enable(options)


def save_model(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: Any,
    is_writer: bool = True,
    write_extra: Callable[[Path], None] | None = None,
    file_bytes: int = weights_reader.MAX_FILE_BYTES,
    should_skip: Callable[[str], bool] = weights_reader.is_extra_weight,
    change_config: Callable[[PretrainedConfig], None] | None = None,
) -> None:
    """Write a Hugging Face folder that plain transformers loads, atomically. All ranks call it, and the one with
    `is_writer` writes; weights are gathered one by one and kept until a file is full.

    Args:
        write_extra: writes further files of the folder.
        file_bytes: a weight file is closed when the next tensor would make it larger.
        should_skip: returns whether a weight is left out, by its name.
        change_config: changes what becomes config.json.

    Raises:
        Failure: the disk is full or refuses writes; an older folder is untouched.
    """
    if not is_writer:
        weights_reader.save_weights(model, None, should_skip=should_skip)
        return
    with open_atomic_folder(folder) as temporary:
        weights_reader.save_weights(model, temporary, file_bytes, should_skip)
        config = copy.deepcopy(model.config)
        config.use_cache = True
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.dtype = next(model.parameters()).dtype
        if change_config is not None:
            change_config(config)
        config.save_pretrained(temporary)
        GenerationConfig(**get_chat_token_ids(tokenizer)).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        weights_reader.write_older_names(temporary)
        if write_extra is not None:
            write_extra(temporary)


def get_chat_token_ids(tokenizer: Any) -> dict[str, Any]:
    """Return the tokens that end an answer, end of text and end of turn, and the padding token."""
    eos_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    turn_end_id = get_turn_end_id(tokenizer)
    if turn_end_id is not None and turn_end_id not in eos_ids:
        eos_ids.append(turn_end_id)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return {"eos_token_id": eos_ids or None, "pad_token_id": pad_id}


ATTENTION_NAME = "anabatic"
_IGNORED_ARGUMENTS = {"position_ids", "use_cache", "output_attentions", "position_embeddings", "is_causal"}
"""Keyword arguments of layers that do not change their attention."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    segments: PackedSegments | None = None,
    request_cache: KVCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers' interface. query `[1, N, T, D]`, key `[1, K, T, D]`, value `[1, K, T, E]` ->
    `[1, T, N, E]`.

    Raises:
        DataError: the model needs a feature that packed attention does not support.
    """
    window = _get_window(module, kwargs)
    _require_supported(module, attention_mask, dropout, kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    options = AttentionOptions(scale, window, softcap, s_aux)
    device_type = value.device.type
    # Norms and rotary angles in fp32 give fp32 queries and keys; kernels need one dtype, autocast's where it is on.
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else value.dtype
    q, k, v = _flatten_heads(query, dtype), _flatten_heads(key, dtype), _flatten_heads(value, dtype)
    if request_cache is not None:
        return request_cache.compute_attention(int(module.layer_idx), q, k, v, options).unsqueeze(0), None  # type: ignore[arg-type]
    if segments is None:
        raise DataError("the packed forward pass needs segments or a cache", "call models.forward, not the model")
    segments.num_attended_layers += 1
    attention, exchange = get_device_ops(q.device.type).attention, segments.exchange
    if exchange is None:
        return attention(q, k, v, segments, options).unsqueeze(0), None
    return exchange.attend(attention, q, k, v, segments, options).unsqueeze(0), None


def _flatten_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`[1, N, T, D]` -> `[T, N, D]`."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x.squeeze(2) if x.shape[2] == 1 else x.squeeze(0).transpose(0, 1)


def _get_window(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """Return the layer's window: most models pass it; otherwise it follows from the layer type in the configuration."""
    if "sliding_window" in kwargs:
        window: int | None = kwargs.pop("sliding_window")
        return window
    config: Any = module.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None or layer_types[int(module.layer_idx)] != "sliding_attention":  # type: ignore[arg-type]
        return None
    return int(config.sliding_window)


def _require_supported(module: nn.Module, mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse features of a model that packed attention does not support."""
    name = type(module).__name__
    unknown = [key for key, value in kwargs.items() if key not in _IGNORED_ARGUMENTS and value is not None]
    if dropout:
        raise DataError(
            f"{name} drops {dropout:g} of its attention weights, which packed attention does not do",
            "set attention_dropout to 0 in the model's config.json",
        )
    if module.__dict__.get("is_causal", True) is False or kwargs.get("is_causal") is False:
        raise DataError(f"{name} looks forward and backward; packed attention is causal", "use a causal language model")
    if unknown or mask is not None:
        features = ", ".join(sorted(unknown)) or "an attention mask of its own"
        raise DataError(
            f"{name} needs {features}, which packed attention does not know", "use a model of another family"
        )


AttentionInterface.register(ATTENTION_NAME, attention_forward)
