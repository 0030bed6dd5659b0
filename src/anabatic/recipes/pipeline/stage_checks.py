"""All stages of a pipeline, looked at before the first one runs: what is wrong with the last must not cost the time of
those before it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anabatic.core import log
from anabatic.core.errors import AnabaticError, UserError
from anabatic.core.formatting import format_size
from anabatic.plan import depth_dial, model_shape
from anabatic.plan.decoder_shape import DecoderShape
from anabatic.recipes import sequence_length
from anabatic.recipes.pipeline.stage_plan import StagePlan
from anabatic.recipes.prechecks import jobs
from anabatic.recipes.prechecks.stage_outputs import StageOutput, predict_stage_output

_OPTION = re.compile(r"--([a-z][a-z0-9.-]*)(?= |$)")
_SAVED_BYTES, _CHECKPOINT_BYTES = 4, 12
"""Bytes of a parameter in a saved model, and in a checkpoint with AdamW's two moments."""


def check_stages(
    stages: list[StagePlan], reasons: Mapping[str, str], wrong: Mapping[str, UserError]
) -> dict[str, list[AnabaticError]]:
    """Return what is wrong with the stages that are to run, by stage; nothing is loaded, and no torch.

    Args:
        reasons: stages that run.
        wrong: stages whose settings could not be read, and why.
    """
    earlier: dict[str, StageOutput] = {}
    found: dict[str, list[AnabaticError]] = {}
    for stage in stages:
        name, command = stage.name, stage.command.name
        if stage.job is None:
            found[name] = [wrong[name]]
            earlier[str(stage.output)] = StageOutput(name, command)
            continue
        errors = jobs.find_problems(command, stage.job, earlier) if name in reasons else []
        if errors:
            found[name] = [_add_stage_to_error(name, error) for error in errors]
        earlier[str(stage.output)] = predict_stage_output(name, command, stage.job, earlier)
    return found


def _add_stage_to_error(name: str, error: AnabaticError) -> AnabaticError:
    """Name the stage, and write the options of a hint as settings of it."""
    hint = _OPTION.sub(lambda match: f"stages.{name}.job.{match[1].replace('-', '_')}:", error.hint)
    return type(error)(f"stages.{name}.job: {error}", hint)


def warn_low_disk_space(out: Path, stages: list[StagePlan], reasons: Mapping[str, str]) -> None:
    """Warn where there is no room for the models and checkpoints of the stages that run, as far as sizes are known.

    It is an estimate, and room may be made while they run: a full disk ends a stage with what was saved.
    """
    params: dict[str, int] = {}
    entries: dict[str, int] = {}
    needed_bytes = 0
    for stage in stages:
        job, folder = stage.job, str(stage.output)
        if stage.command.name == "tokenizer train":
            entries[folder] = job.vocab_size
        if not stage.command.is_training:
            continue
        params[folder] = _count_trained_params(job, params, entries)
        if stage.name in reasons:
            checkpoints = (job.save.keep_last if job.save.every else 1) * _CHECKPOINT_BYTES
            needed_bytes += params[folder] * (2 * _SAVED_BYTES + checkpoints)
    place = next(one for one in (out.absolute(), *out.absolute().parents) if one.exists())
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        log.warn(
            f"the stages write about {format_size(needed_bytes)} of models and checkpoints, {place} has"
            f" {format_size(free)} free: free some space,"
            " choose another folder with --out, or keep fewer checkpoints (save.keep_last)"
        )


def _count_trained_params(job: Any, params: Mapping[str, int], entries: Mapping[str, int]) -> int:
    """Return the parameters of what a stage trains, all of them saved; 0 where they are not known, or adapters are."""
    model = sequence_length.model_name(job)
    if getattr(job, "tuner", "full") == "lora":
        return 0
    if model:
        of = next((count for folder, count in params.items() if Path(model).is_relative_to(folder)), None)
        is_local = Path(model).expanduser().is_dir() and bool(sequence_length.read_local_config(model))
        return of if of is not None else _count_folder_params(model) if is_local else 0
    vocab = entries.get(str(getattr(job, "tokenizer", "")))
    if vocab is None:
        return 0
    plan = depth_dial.derive_model_sizes(job.model, vocab)
    sizes = {name: plan.get_int(name) for name in ("width", "depth", "heads", "kv_heads", "head_dim", "intermediate")}
    width, blocks, heads, kv_heads, head_dim, inner = sizes.values()
    tied = bool(plan.values["tie_embeddings"])
    return DecoderShape(vocab, width, blocks, heads, kv_heads, head_dim, inner, is_tied=tied, head_norms=True).params


def _count_folder_params(model: str) -> int:
    try:
        return model_shape.get_named_shape(model)[0].params
    except UserError:  # a family whose sizes are not counted: nothing is claimed about its files
        return 0
