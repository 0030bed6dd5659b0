"""Several commands as one pipeline, each fed by those before it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from anabatic.convert import recipe_writer
from anabatic.convert.recipe_draft import RecipeDraft

_STAGE_OUTPUTS = {"tokenizer train": "tokenizer", "pretrain": "model", "sft": "model", "dpo": "model", "rl": "model"}
_STAGE_INPUTS = {"tokenizer": "tokenizer", "tokenizers": "tokenizer", "model": "model", "model.path": "model"}
_PIPELINE_VARIABLES = {
    "TEXT": "text",
    "ROWS.jsonl": "rows",
    "PAIRS.jsonl": "pairs",
    "QUESTIONS.jsonl": "questions",
    "MODEL": "model",
}
"""What stands for a missing setting -> the variable of the pipeline."""


def render_pipeline(stages: list[RecipeDraft], later: list[RecipeDraft], others: list[str]) -> str:
    """Return a pipeline; `later` are commands that wait for a person."""
    names = _name_stages(stages)
    outputs: dict[str, str] = {}
    variables: dict[str, None] = {}
    parts: list[str] = []
    for name, one in zip(names, stages, strict=True):
        one.settings.pop("out", None)
        _fill_stage_inputs(one, outputs, variables)
        parts += [
            "",
            *(f"  # {line}" for line in recipe_writer.wrap_comment(one.call.command_line)),
            *_render_notes(one),
        ]
        parts += [f"  {name}:", f"    command: {one.command}", "    job:"]
        parts += recipe_writer.render_settings(one, "      ") or ["      {}"]
        if one.command in _STAGE_OUTPUTS:
            outputs[_STAGE_OUTPUTS[one.command]] = name
    words = [f"--set {name}=..." for name in variables]
    lines = [
        f"# {' '.join(['anabatic run FILE', *words])}",
        *_render_later_commands(later, outputs),
        *recipe_writer.render_skipped_commands(others),
    ]
    lines += ["out: runs/pipeline"]
    lines += ["vars:", *(f'  {name}: ""' for name in variables)] if variables else []
    return "\n".join([*lines, "stages:", *parts[1:]]) + "\n"


def _name_stages(stages: list[RecipeDraft]) -> list[str]:
    names: list[str] = []
    for one in stages:
        base = one.call.row.stage or one.command.replace(" ", "_")
        name, number = base, 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return names


def _fill_stage_inputs(one: RecipeDraft, outputs: dict[str, str], variables: dict[str, None]) -> None:
    """Put the stage before, or a variable, where a setting is missing; a pipeline runs on one machine."""
    if one.launch_options:
        note = f"start it by anabatic launch {' '.join(one.launch_options)} -- {one.command} -c FILE"
        one.notes.changed.append(
            f"{one.gathered['nnodes'].original_text}: a pipeline runs on one machine; on several {note}"
        )
        one.set_setting("device.nproc", one.gathered_int("nproc") or 1, one.gathered["nnodes"].original_text)
    for key, value in list(one.placeholders.items()):
        if key in _STAGE_INPUTS and _STAGE_INPUTS[key] in outputs:
            one.placeholders[key] = _match_list(value, f"${{{outputs[_STAGE_INPUTS[key]]}}}")
        else:
            word = value[0] if isinstance(value, list) else value
            name = _PIPELINE_VARIABLES.get(word)
            if name is not None:
                variables[name] = None
                one.placeholders[key] = _match_list(value, f"${{{name}}}")


def _match_list(value: Any, text: str) -> Any:
    return [text] if isinstance(value, list) else text


def _render_notes(one: RecipeDraft) -> Iterator[str]:
    for line in recipe_writer.render_notes(one.notes):
        yield f"  {line}"


def _render_later_commands(later: list[RecipeDraft], outputs: dict[str, str]) -> Iterator[str]:
    for one in later:
        model = f"runs/pipeline/{outputs['model']}" if "model" in outputs else "MODEL"
        words = ["anabatic", *shlex.split(one.command), *(["-m", model] if one.command == "chat" else [model])]
        yield f"# then: {shlex.join(words)}   ({one.call.command_line})"
