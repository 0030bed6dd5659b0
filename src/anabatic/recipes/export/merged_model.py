"""A model with its adapters merged, as `merge` and `export` write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from anabatic.core.errors import ConfigError, DataError
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.models import classifier
from anabatic.models.lora import adapter
from anabatic.models.lora.merging import WeightedAdapter
from anabatic.models.pretrained import (
    find_tokenizer_folder,
    is_adapter,
    load_config,
    load_model,
    require_tokenizer_fits,
    resolve_base_folder,
    resolve_merged_adapters,
    resolve_model_folder,
)
from anabatic.models.vision.processor_files import copy_processor_files, find_processor_folder
from anabatic.train.checkpoint import manifest


@dataclass(frozen=True)
class MergedModel:
    """What a whole model is made of; no weight has been read yet.

    Attributes:
        named_folder: folder of the model or the adapter that was named.
        base_folder: folder with the weights.
        merged_adapters: adapters that become part of the weights first.
        config: of the base model.
    """

    named_folder: Path
    base_folder: Path
    merged_adapters: list[WeightedAdapter]
    config: PretrainedConfig

    @property
    def num_adapters(self) -> int:
        """How many adapters there are."""
        return len(self.merged_adapters) + (self.named_folder != self.base_folder)

    @property
    def sees_pictures(self) -> bool:
        """Whether the model has a tower."""
        return getattr(self.config, "vision_config", None) is not None

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the base model's files."""
        config_dtype = self.config.dtype
        return config_dtype if isinstance(config_dtype, torch.dtype) else torch.float32

    @property
    def source_folders(self) -> list[Path]:
        """Every folder that is read."""
        return [self.named_folder, self.base_folder, *(share.folder for share in self.merged_adapters)]

    def load_tokenizer(self) -> Any:
        """Load the tokenizer that counts.

        Raises:
            DataError: there is none, it is damaged, or the model has no room for it.
        """
        folder = find_tokenizer_folder(self.named_folder, self.merged_adapters)
        loaded = tokenizers.load_tokenizer(folder if (folder / "tokenizer.json").is_file() else self.base_folder)
        require_tokenizer_fits(self.config, loaded, folder)
        return loaded

    def copy_picture_files(self, folder: Path) -> None:
        """Copy the files that say how a model that sees reads pictures, with the sizes it was trained with."""
        if self.sees_pictures:
            copy_processor_files(find_processor_folder(self.named_folder, self.base_folder), folder)

    def load_merged_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """Load the weights on the CPU and merge the adapters.

        Raises:
            DataError: a file is missing or torn; a weight is no number, or too large for `dtype`.
        """
        model = load_model(self.named_folder, torch.device("cpu"), dtype, self.merged_adapters)
        merged = adapter.merge_into_linears(model)
        for name, weight in merged.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                largest = torch.finfo(dtype).max
                raise DataError(
                    f"{self.named_folder}: {name} holds numbers that are not finite in "
                    f"{str(dtype).removeprefix('torch.')},"
                    f" which ends at {largest:.5g}",
                    "use --dtype bf16 or fp32; if that does not help, the weights are broken",
                )
        return merged


def find_merged_model(model: str, adapters: Sequence[str]) -> MergedModel:
    """Find a model, its base model and its adapters.

    Raises:
        ConfigError: it is a checkpoint, or a classifier.
        DataError: something is missing or damaged.
    """
    root = Path(model).expanduser()
    if (root / manifest.MANIFEST_FILE).is_file() and not (root / "config.json").is_file():
        raise ConfigError(f"{root} is a checkpoint to continue a run", f"anabatic checkpoint export {root} -o FOLDER")
    named_folder = resolve_model_folder(model)
    if (named_folder / classifier.DESCRIPTION_FILE).is_file():
        raise ConfigError(
            f"{named_folder} is a classifier: its head is ours, and no other program knows it",
            "it is used by `anabatic classify predict` and `anabatic serve --classifier`",
        )
    adapters_to_merge = resolve_merged_adapters(adapters, named_folder)
    return MergedModel(
        named_folder,
        resolve_base_folder(named_folder) if is_adapter(named_folder) else named_folder,
        adapters_to_merge,
        load_config(named_folder),
    )
