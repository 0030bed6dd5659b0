"""Answers of a model that sees, one row at a time by transformers' own `generate`: `infer` on rows with pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from anabatic.config.chat import Sampling
from anabatic.config.infer import InferJob
from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.heartbeat import HEARTBEAT
from anabatic.data.chat import custom_templates
from anabatic.data.readers.document import Document, RowIssue
from anabatic.data.readers.prompts import PromptRow, read_prompts
from anabatic.data.tokenizer import hf_folder
from anabatic.data.vision.patches import make_patches
from anabatic.data.vision.picture_encoder import count_repeats, find_picture_text, measure_pictures, place_pictures
from anabatic.data.vision.picture_files import load_picture
from anabatic.data.vision.picture_rules import PictureRules, read_picture_rules
from anabatic.device.device import select_device
from anabatic.models.pretrained import (
    find_tokenizer_folder,
    get_chat_token_ids,
    load_model,
    resolve_base_folder,
    resolve_merged_adapters,
    resolve_model_folder,
)

_KNOWN_SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens", "seed")


@dataclass(frozen=True)
class _SeeingModel:
    model: PreTrainedModel
    tokenizer: Any
    rules: PictureRules
    picture_text: str


def iter_answers(job: InferJob, done: int, rank: int, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of this process's rows in their order, without the first `done`.

    Raises:
        ConfigError: a setting that is not known for such models.
        DataError: the model or a row cannot be used.
    """
    _require_known_settings(job)
    seeing = _load_model(job)
    for number, row in enumerate(read_prompts(job.inputs, job.columns, has_pictures=True)):
        if number % ranks != rank or number // ranks < done:
            continue
        HEARTBEAT.record_beat()
        if isinstance(row, RowIssue):
            yield {"row": number, "skipped": row.message}
            continue
        try:
            yield {"row": number, "id": row.id, **_answer_row(job, seeing, row, number)}
        except DataError as error:
            if job.on_bad_row == "fail":
                raise
            yield {"row": number, "skipped": str(error)}


def _require_known_settings(job: InferJob) -> None:
    unknown = [f"sampling.{one.name}" for one in fields(Sampling) if one.name not in _KNOWN_SAMPLING]
    changed = [name for name in unknown if getattr(job.sampling, name[9:]) != getattr(Sampling(), name[9:])]
    changed += ["quantize"] * (job.quantize != "none") + ["raw"] * job.raw
    if changed:
        raise ConfigError(f"{changed[0]} is not supported for models that read pictures", "leave it out")


def _load_model(job: InferJob) -> _SeeingModel:
    device = select_device(job.device)
    folder = resolve_model_folder(job.model, may_see=True)
    adapters = resolve_merged_adapters(job.adapter, folder)
    tokens = custom_templates.folder_with_template(find_tokenizer_folder(folder, adapters), job.chat_template)
    tokenizer = hf_folder.load_tokenizer(tokens)
    model = load_model(folder, device.torch_device, device.dtype, adapters, may_see=True).eval()
    model.config._attn_implementation = "sdpa"  # `generate` has no segments
    rules = read_picture_rules(resolve_base_folder(folder), model.config.to_dict())
    log.info(f"{folder} on {device.name} ({device.reasons['device']}), one row at a time")
    return _SeeingModel(model, tokenizer, rules, find_picture_text(tokenizer, rules))


def _answer_row(job: InferJob, seeing: _SeeingModel, row: PromptRow, number: int) -> dict[str, Any]:
    if row.messages is None:
        raise DataError(f"{row.location}: plain text, not a question", "give rows with messages or a prompt")
    turns = row.messages
    if job.system is not None and turns[0]["role"] not in ("system", "developer"):
        turns = [{"role": "system", "content": job.system}, *turns]
    (grids,) = measure_pictures([row.pictures], [row.location], seeing.rules)
    placed = place_pictures(Document(None, turns, row.id, pictures=row.pictures), seeing.picture_text)
    ids = np.asarray(hf_folder.encode_chat(seeing.tokenizer, placed, row.tools), dtype=np.int64)
    ids = np.repeat(ids, count_repeats(ids, grids, seeing.rules, row.location))
    patches = [make_patches(load_picture(one), seeing.rules, (rows, columns)) for one, rows, columns in grids]
    answer = _generate(job.sampling, seeing, ids, patches, [grid[1:] for grid in grids], number)
    ended = answer[-1:] and answer[-1] in _list_end_ids(seeing.tokenizer)
    text = seeing.tokenizer.decode(answer[:-1] if ended else answer, skip_special_tokens=True)
    line = {"messages": row.messages, "response": text, "finish_reason": "stop" if ended else "length"}
    line |= {"images": list(row.pictures)} if row.pictures else {}
    line |= {} if row.label is None else {"label": row.label}
    return line | {"prompt_tokens": len(ids), "response_tokens": len(answer)}


@torch.inference_mode()
def _generate(
    sampling: Sampling,
    seeing: _SeeingModel,
    ids: np.ndarray,
    patches: list[np.ndarray],
    grids: list[tuple[int, int]],
    number: int,
) -> list[int]:
    """Return the new tokens of a row."""
    model: Any = seeing.model
    tokens = torch.from_numpy(ids)[None].to(model.device)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if patches:
        inputs |= {
            "pixel_values": torch.from_numpy(np.concatenate(patches)).to(model.device),
            "image_grid_thw": torch.tensor([(1, *grid) for grid in grids], device=model.device),
            "mm_token_type_ids": (tokens == seeing.rules.image_token).int(),
        }
    draws = sampling.temperature > 0
    options: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
    }
    settings = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=draws,
        repetition_penalty=sampling.repetition_penalty,
        **(options if draws else {}),
        **get_chat_token_ids(seeing.tokenizer),
    )
    if sampling.seed is not None:
        torch.manual_seed((sampling.seed + number) % 2**63)
    found: list[int] = model.generate(**inputs, generation_config=settings)[0, len(ids) :].tolist()
    return found


def _list_end_ids(tokenizer: Any) -> list[int]:
    return get_chat_token_ids(tokenizer)["eos_token_id"] or []
