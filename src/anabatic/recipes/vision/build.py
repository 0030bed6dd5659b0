"""`anabatic vision build`: a small untrained model that sees, with its tokenizer and the files of its processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from anabatic.config.vision_commands import VisionBuildJob
from anabatic.core import log
from anabatic.core.formatting import format_count
from anabatic.core.paths import make_write_error, write_atomic
from anabatic.data.tokenizer import hf_folder
from anabatic.data.vision.rule_files import PREPROCESSOR_FILE

_HEAD_DIM = 32
_MERGE = 2
_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_MAX_PICTURE_TOKENS = 256
_MAX_POSITIONS = 1024
_GRID = 64
"""Learned positions of patches: 8 x 8, stretched over larger pictures."""


def run(job: VisionBuildJob) -> None:
    """Write the folder of the model.

    Raises:
        DataError: the tokenizer cannot be used.
        Failure: the folder cannot be written.
    """
    out = Path(job.out).expanduser()
    tokenizer = hf_folder.load_tokenizer(job.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [*_TOKENS]}, replace_extra_special_tokens=False)
    known = tokenizer.get_vocab()
    ids = [known[token] for token in _TOKENS]
    model = build_seeing_model(job, len(tokenizer), ids)
    unit = (_MERGE * job.patch) ** 2
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": unit, "longest_edge": _MAX_PICTURE_TOKENS * unit}, "patch_size": job.patch,
        "temporal_patch_size": 2, "merge_size": _MERGE, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    try:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    except OSError as error:
        raise make_write_error(out, error) from error
    write_atomic(out / PREPROCESSOR_FILE, json.dumps(processor, indent=2) + "\n")
    tower = sum(parameter.numel() for parameter in model.model.visual.parameters())
    log.info(f"{format_count(model.num_parameters())} parameters, {format_count(tower)} in the tower; written to {out}")


def build_seeing_model(job: VisionBuildJob, vocab_size: int, token_ids: list[int]) -> PreTrainedModel:
    """Return transformers' own model with random weights: of matrices normal, with deviation 1/sqrt(inputs).

    Args:
        token_ids: of start, end, picture and video.
    """
    text: dict[str, Any] = dict(
        vocab_size=vocab_size, hidden_size=job.width, intermediate_size=3 * job.width, num_hidden_layers=job.depth,
        num_attention_heads=job.width // _HEAD_DIM, num_key_value_heads=job.width // _HEAD_DIM, head_dim=_HEAD_DIM,
        max_position_embeddings=_MAX_POSITIONS, tie_word_embeddings=True, pad_token_id=None, bos_token_id=None,
        eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]},
    )  # fmt: skip
    tower: dict[str, Any] = dict(
        depth=job.tower_depth, hidden_size=job.tower_width, num_heads=job.tower_width // _HEAD_DIM,
        intermediate_size=4 * job.tower_width, patch_size=job.patch, temporal_patch_size=2, spatial_merge_size=_MERGE,
        out_hidden_size=job.width, in_channels=3, num_position_embeddings=_GRID,
        deepstack_visual_indexes=[job.tower_depth // 2],
    )  # fmt: skip
    start, end, picture, video = token_ids
    config = AutoConfig.for_model(
        "qwen3_vl", text_config=text, vision_config=tower, image_token_id=picture, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:  # transformers' own 0.02 is small for such widths
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model
