"""Several commands as one pipeline, each fed by those before it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from anabatic.convert import recipe
from anabatic.convert.draft import Draft

_MAKES = {"tokenizer train": "tokenizer", "pretrain": "model", "sft": "model", "dpo": "model", "rl": "model"}
_READS = {"tokenizer": "tokenizer", "tokenizers": "tokenizer", "model": "model", "model.path": "model"}
_VARIABLES = {
    "TEXT": "text",
    "ROWS.jsonl": "rows",
    "PAIRS.jsonl": "pairs",
    "QUESTIONS.jsonl": "questions",
    "MODEL": "model",
}
"""What stands for a missing setting -> the variable of the pipeline."""


def show(stages: list[Draft], later: list[Draft], others: list[str]) -> str:
    """Return a pipeline; `later` are commands that wait for a person."""
    names = _names(stages)
    made: dict[str, str] = {}
    variables: dict[str, None] = {}
    parts: list[str] = []
    for name, one in zip(names, stages, strict=True):
        one.settings.pop("out", None)
        _feed(one, made, variables)
        parts += ["", *(f"  # {line}" for line in recipe.wrapped(one.call.typed)), *_notes(one)]
        parts += [f"  {name}:", f"    command: {one.command}", "    job:"]
        parts += recipe.body(one, "      ") or ["      {}"]
        if one.command in _MAKES:
            made[_MAKES[one.command]] = name
    words = [f"--set {name}=..." for name in variables]
    lines = [f"# {' '.join(['anabatic run FILE', *words])}", *_after(later, made), *recipe.passed_over(others)]
    lines += ["out: runs/pipeline"]
    lines += ["vars:", *(f'  {name}: ""' for name in variables)] if variables else []
    return "\n".join([*lines, "stages:", *parts[1:]]) + "\n"


def _names(stages: list[Draft]) -> list[str]:
    names: list[str] = []
    for one in stages:
        base = one.call.row.stage or one.command.replace(" ", "_")
        name, number = base, 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return names


def _feed(one: Draft, made: dict[str, str], variables: dict[str, None]) -> None:
    """Put the stage before, or a variable, where a setting is missing; a pipeline runs on one machine."""
    if one.launch:
        told = f"start it by anabatic launch {' '.join(one.launch)} -- {one.command} -c FILE"
        one.notes.changed.append(f"{one.facts['nnodes'].shown}: a pipeline runs on one machine; on several {told}")
        one.set("device.nproc", one.number("nproc") or 1, one.facts["nnodes"].shown)
    for key, value in list(one.open.items()):
        if key in _READS and _READS[key] in made:
            one.open[key] = _like(value, f"${{{made[_READS[key]]}}}")
        else:
            word = value[0] if isinstance(value, list) else value
            name = _VARIABLES.get(word)
            if name is not None:
                variables[name] = None
                one.open[key] = _like(value, f"${{{name}}}")


def _like(value: Any, text: str) -> Any:
    return [text] if isinstance(value, list) else text


def _notes(one: Draft) -> Iterator[str]:
    for line in recipe.told(one.notes):
        yield f"  {line}"


def _after(later: list[Draft], made: dict[str, str]) -> Iterator[str]:
    for one in later:
        model = f"runs/pipeline/{made['model']}" if "model" in made else "MODEL"
        words = ["anabatic", *shlex.split(one.command), *(["-m", model] if one.command == "chat" else [model])]
        yield f"# then: {shlex.join(words)}   ({one.call.typed})"
