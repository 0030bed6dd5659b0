"""A model with its adapters merged, as `merge` and `export` write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from anabatic.core.errors import ConfigError, DataError
from anabatic.data import tokenizer as tokenizers
from anabatic.models import adapter, classifier
from anabatic.models.hf import (
    base_of,
    below,
    is_adapter,
    load_config,
    load_model,
    require_fit,
    resolve,
    tokenizer_folder,
)
from anabatic.models.stack import Share
from anabatic.train import manifest


@dataclass(frozen=True)
class Parts:
    """What a whole model is made of; no weight has been read yet.

    Attributes:
        named: folder of the model or the adapter that was named.
        base: folder with the weights.
        shares: adapters that become part of the weights first.
        config: of the base model.
    """

    named: Path
    base: Path
    shares: list[Share]
    config: PretrainedConfig

    @property
    def adapters(self) -> int:
        """How many adapters there are."""
        return len(self.shares) + (self.named != self.base)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the base model's files."""
        named = self.config.dtype
        return named if isinstance(named, torch.dtype) else torch.float32

    @property
    def folders(self) -> list[Path]:
        """Every folder that is read."""
        return [self.named, self.base, *(share.folder for share in self.shares)]

    def tokenizer(self) -> Any:
        """Load the tokenizer that counts.

        Raises:
            DataError: there is none, it is damaged, or the model has no room for it.
        """
        folder = tokenizer_folder(self.named, self.shares)
        loaded = tokenizers.load(folder if (folder / "tokenizer.json").is_file() else self.base)
        require_fit(self.config, loaded, folder)
        return loaded

    def model(self, dtype: torch.dtype) -> PreTrainedModel:
        """Load the weights on the CPU and merge the adapters.

        Raises:
            DataError: a file is missing or torn; a weight is no number, or too large for `dtype`.
        """
        model = load_model(self.named, torch.device("cpu"), dtype, self.shares)
        merged = adapter.merge(model)
        for name, weight in merged.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                largest = torch.finfo(dtype).max
                raise DataError(
                    f"{self.named}: {name} holds numbers that are not finite in {str(dtype).removeprefix('torch.')},"
                    f" which ends at {largest:.5g}",
                    "use --dtype bf16 or fp32; if that does not help, the weights are broken",
                )
        return merged


def parts_of(model: str, adapters: Sequence[str]) -> Parts:
    """Find a model, its base model and its adapters.

    Raises:
        ConfigError: it is a checkpoint, or a classifier.
        DataError: something is missing or damaged.
    """
    root = Path(model).expanduser()
    if (root / manifest.MANIFEST).is_file() and not (root / "config.json").is_file():
        raise ConfigError(f"{root} is a checkpoint to continue a run", f"anabatic checkpoint export {root} -o FOLDER")
    named = resolve(model)
    if (named / classifier.DESCRIPTION).is_file():
        raise ConfigError(
            f"{named} is a classifier: its head is ours, and no other program knows it",
            "it is used by `anabatic classify predict` and `anabatic serve --classifier`",
        )
    shares = below(adapters, named)
    return Parts(named, base_of(named) if is_adapter(named) else named, shares, load_config(named))
