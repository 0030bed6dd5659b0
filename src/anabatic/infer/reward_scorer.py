"""Reward models in use: one number for a whole conversation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from anabatic.core.errors import ConfigError, DataError, Failure
from anabatic.data.readers.document import Message
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.data.vision.picture_batch import make_positions, read_pictures
from anabatic.data.vision.picture_tensors import PictureGrid
from anabatic.device.device import Device
from anabatic.infer.loaded_model import load_picture_reader
from anabatic.models import reward_head, rope_scaling
from anabatic.models.lora import adapter, adapter_config, merging
from anabatic.models.pretrained import (
    find_tokenizer_folder,
    is_adapter,
    load_config,
    require_engine_model,
    resolve_base_folder,
    resolve_merged_adapters,
    resolve_model_folder,
)

ScoredRow = tuple[list[int], Sequence[PictureGrid]]
"""A conversation as tokens, with its pictures."""
_MAX_BATCH_TOKENS = 8192
"""Of a forward pass, padding included; a longer conversation stands alone."""


class RewardScorer:
    """A sequence classifier with one label, with its tokenizer and chat template.

    Args:
        path: its folder, that of the run that trained it, or of an adapter that `anabatic reward` or PEFT has made.

    Raises:
        DataError: the folder is missing or damaged, or holds no sequence classifier.
        ConfigError: its model has several labels, or its tokenizer no chat template.
    """

    def __init__(self, path: str | Path, device: Device) -> None:
        folder = resolve_model_folder(path)
        require_engine_model(folder)
        adapters = resolve_merged_adapters([], folder)
        self._tokenizer = tokenizers.load_tokenizer(find_tokenizer_folder(folder, adapters))
        if not self._tokenizer.chat_template:
            raise ConfigError(f"{folder} has no chat template", "a reward model reads conversations: add one")
        model: Any = _load_model(folder, adapters)  # transformers' `to` is not typed as it is called
        self._model = model.to(device.torch_device).eval().requires_grad_(False)
        self._device = device
        self.pictures = load_picture_reader(self._model, self._tokenizer, folder)
        self.max_len: int = self._model.config.get_text_config().max_position_embeddings

    def encode_conversation(
        self, messages: Sequence[Message], pictures: Sequence[str] = (), row: str = ""
    ) -> ScoredRow:
        """Return a whole conversation as it is scored.

        Args:
            messages: with `pictures.picture_text` in place of pictures.
            pictures: paths and data URIs, in the order of the turns; of a model that sees.
            row: name of a row, in whose messages tags stand for pictures.

        Raises:
            DataError: the chat template refuses it, it is longer than the context, or a picture cannot be used.
        """
        grids: Sequence[PictureGrid] = ()
        if self.pictures is None:
            ids = tokenizers.encode_chat(self._tokenizer, list(messages), answer=False)
        else:
            measure = self.pictures.measure_row if row else self.pictures.measure_turns
            ids, grids = measure(list(messages), pictures, row or "the conversation", answer=False)
        if not 0 < len(ids) <= self.max_len:
            what = f"the conversation has {len(ids):,} tokens, the reward model reads 1 to {self.max_len:,}"
            raise DataError(what, "leave earlier turns out")
        return ids, grids

    def score_conversations(self, rows: Sequence[ScoredRow]) -> list[float]:
        """Return the number of each conversation, of `encode_conversation`; those of like length are read together.

        Raises:
            Failure: one is no number.
        """
        found = [0.0] * len(rows)
        for _ in self._run_passes(rows, found):
            pass
        return found

    def score_by_passes(self, rows: Sequence[ScoredRow]) -> Iterator[list[dict[str, float]]]:
        """Yield the same as rows in their order at the end, and none before; between two forward passes others can use
        the device.

        Raises:
            Failure: one is no number.
        """
        found = [0.0] * len(rows)
        for _ in self._run_passes(rows, found):
            yield []
        yield [{"score": score} for score in found]

    def _run_passes(self, rows: Sequence[ScoredRow], found: list[float]) -> Iterator[None]:
        """Fill `found`, some of it with each forward pass."""
        config = self._model.config.get_text_config()
        together = config.pad_token_id is not None and rope_scaling.get_length_limit(config) is None
        for chosen in _make_batches([len(ids) for ids, _ in rows], together):
            batch = [rows[at][0] for at in chosen]
            longest = max(map(len, batch))
            pad = config.pad_token_id or 0
            ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in batch])
            seen = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
            inputs = {"input_ids": ids, "attention_mask": seen, **self._read_pictures(ids, [rows[at] for at in chosen])}
            with torch.inference_mode(), self._device.autocast():
                out: Any = self._model(**{key: value.to(self._device.torch_device) for key, value in inputs.items()})
                values = out.logits[:, 0].float().tolist()
            for at, value in zip(chosen, values, strict=True):
                found[at] = value
            yield
        if broken := [value for value in found if not math.isfinite(value)]:
            what = f"the reward model's number is {broken[0]}"
            raise Failure(what, "the weights are broken, or --device.dtype is too narrow")

    def _read_pictures(self, ids: Tensor, rows: Sequence[ScoredRow]) -> dict[str, Tensor]:
        """Return what transformers' models read of conversations with pictures; frames of videos are as pictures."""
        if self.pictures is None or not any(grids for _, grids in rows):
            return {}
        rules = self.pictures.rules
        shown = [read_pictures(np.asarray(row), grids, rules) for row, grids in rows if grids]
        is_picture = torch.from_numpy(rules.find_features(ids.numpy()))
        inputs = {
            "input_ids": torch.where(is_picture, rules.image_token, ids),
            "mm_token_type_ids": is_picture.int(),
            "pixel_values": torch.cat([one.pixels for one in shown]),
            "image_grid_thw": torch.tensor([(1, *grid) for one in shown for grid in one.grids]),
        }
        if any(grid.interval for _, grids in rows for grid in grids):
            positions = torch.zeros(3, *ids.shape, dtype=torch.int64)
            for at, (row, grids) in enumerate(rows):
                positions[:, at, : len(row)] = torch.from_numpy(make_positions(np.asarray(row), grids, rules))
            inputs["position_ids"] = positions
        return inputs


def is_reward_model(path: str | Path) -> bool:
    """True for a folder of a sequence classifier of transformers, or of an adapter for one."""
    folder = resolve_model_folder(path)
    if is_adapter(folder):
        return adapter_config.read_adapter_config(folder).get("task_type") == "SEQ_CLS"
    names = load_config(folder).architectures or []
    return any(name.endswith(reward_head.CLASS_SUFFIX) for name in names)


def _load_model(folder: Path, adapters: Sequence[merging.WeightedAdapter]) -> PreTrainedModel:
    if not is_reward_model(folder):
        what = f"{folder} is no reward model: it gives no number for a conversation"
        raise DataError(what, "train one with `anabatic reward`")
    base = resolve_base_folder(folder)
    changes: dict[str, Any] = {} if base == folder else {"num_labels": 1}  # an adapter brings the head with it
    try:
        with _silence_transformers():
            model: PreTrainedModel
            model, loading_info = reward_head.find_model_class(load_config(base)).from_pretrained(
                base,
                local_files_only=True,
                output_loading_info=True,
                use_safetensors=True,
                trust_remote_code=False,
                **changes,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"{folder}: {error}", "is it the folder of a sequence classifier?") from error
    if model.config.num_labels != 1:
        raise ConfigError(f"{folder} has {model.config.num_labels} labels", "a reward model has one")
    if base == folder:
        if missing := sorted(loading_info["missing_keys"]):
            raise DataError(f"{folder}: weights are missing: {', '.join(missing[:3])}", "copy the folder again")
        return model
    if "score" not in (adapter_config.read_adapter_config(folder).get("modules_to_save") or []):
        raise DataError(f"{folder} brings no score head: modules_to_save lacks it", "copy the folder again")
    merging.merge_adapters(model, adapters)
    adapter.insert_saved_adapter(model, folder)
    adapter.load_adapter(model, folder)
    return adapter.merge_into_linears(model)


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """transformers tells of the head that the adapter fills, and of the one over the vocabulary that is not needed."""
    before, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if bars:
            transformers_logging.enable_progress_bar()


def _make_batches(lengths: Sequence[int], pads: bool) -> list[list[int]]:
    """Return places, shortest first, so that a batch with its padding has `_MAX_BATCH_TOKENS` at most; singly without
    padding."""
    batches: list[list[int]] = []
    for at in sorted(range(len(lengths)), key=lengths.__getitem__):
        if pads and batches and (len(batches[-1]) + 1) * lengths[at] <= _MAX_BATCH_TOKENS:
            batches[-1].append(at)
        else:
            batches.append([at])
    return batches
