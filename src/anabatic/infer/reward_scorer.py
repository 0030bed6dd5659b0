"""Reward models in use: one number for a whole conversation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import logging as transformers_logging

from anabatic.core.errors import ConfigError, DataError, Failure
from anabatic.data.readers.document import Message
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.device.device import Device
from anabatic.models import reward_head, rope_scaling
from anabatic.models.lora import adapter, adapter_config, merging
from anabatic.models.pretrained import (
    find_tokenizer_folder,
    is_adapter,
    load_config,
    resolve_base_folder,
    resolve_merged_adapters,
    resolve_model_folder,
)

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
        adapters = resolve_merged_adapters([], folder)
        self._tokenizer = tokenizers.load_tokenizer(find_tokenizer_folder(folder, adapters))
        if not self._tokenizer.chat_template:
            raise ConfigError(f"{folder} has no chat template", "a reward model reads conversations: add one")
        model: Any = _load_model(folder, adapters)  # transformers' `to` is not typed as it is called
        self._model = model.to(device.torch_device).eval().requires_grad_(False)
        self._device = device
        self.max_len: int = self._model.config.max_position_embeddings

    def encode_conversation(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a whole conversation.

        Raises:
            DataError: the chat template refuses it, or it is longer than the context.
        """
        ids = tokenizers.encode_chat(self._tokenizer, list(messages), answer=False)
        if not 0 < len(ids) <= self.max_len:
            what = f"the conversation has {len(ids):,} tokens, the reward model reads 1 to {self.max_len:,}"
            raise DataError(what, "leave earlier turns out")
        return ids

    def score_conversations(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the number of each conversation, given as tokens; conversations of like length are read together.

        Raises:
            Failure: one is no number.
        """
        found = [0.0] * len(rows)
        for _ in self._run_passes(rows, found):
            pass
        return found

    def score_by_passes(self, rows: Sequence[Sequence[int]]) -> Iterator[list[dict[str, float]]]:
        """Yield the same as rows in their order at the end, and none before; between two forward passes others can use
        the device.

        Raises:
            Failure: one is no number.
        """
        found = [0.0] * len(rows)
        for _ in self._run_passes(rows, found):
            yield []
        yield [{"score": score} for score in found]

    def _run_passes(self, rows: Sequence[Sequence[int]], found: list[float]) -> Iterator[None]:
        """Fill `found`, some of it with each forward pass."""
        config = self._model.config
        together = config.pad_token_id is not None and rope_scaling.get_length_limit(config) is None
        for chosen in _make_batches([len(row) for row in rows], together):
            batch = [rows[at] for at in chosen]
            longest = max(map(len, batch))
            pad = self._model.config.pad_token_id or 0
            ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in batch])
            seen = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
            with torch.inference_mode(), self._device.autocast():
                out: Any = self._model(
                    ids.to(self._device.torch_device), attention_mask=seen.to(self._device.torch_device)
                )
                values = out.logits[:, 0].float().tolist()
            for at, value in zip(chosen, values, strict=True):
                found[at] = value
            yield
        if broken := [value for value in found if not math.isfinite(value)]:
            what = f"the reward model's number is {broken[0]}"
            raise Failure(what, "the weights are broken, or --device.dtype is too narrow")


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
            model, loading_info = AutoModelForSequenceClassification.from_pretrained(
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
