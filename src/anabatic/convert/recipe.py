"""A draft as a recipe: what is missing, YAML with comments, several commands as a pipeline."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from typing import Any

from anabatic.config import check, commands, load, yaml_file
from anabatic.convert.draft import Draft, Given, Notes

WIDTH = 110
_OPEN: dict[str, dict[str, Any]] = {
    "sft": {"model": "MODEL", "data.train": ["ROWS.jsonl"]},
    "dpo": {"model": "MODEL", "data.train": ["PAIRS.jsonl"]},
    "reward": {"model": "MODEL", "data.train": ["PAIRS.jsonl"]},
    "rl": {"model": "MODEL", "data.train": ["QUESTIONS.jsonl"]},
    "pretrain": {"tokenizer": "TOKENIZER", "data.train": ["TEXT"]},
    "tokenizer train": {"data.train": ["TEXT"]},
    "tokenizer eval": {"tokenizers": ["TOKENIZER"]},
    "eval": {"model": "MODEL", "tasks": ["task:all"]},
    "infer": {"model": "MODEL", "inputs": ["ROWS.jsonl"], "out": "answers.jsonl"},
    "chat": {"model": "MODEL"},
    "serve": {"model": ["MODEL"]},
    "merge": {"model": "MODEL", "out": "MERGED"},
    "export": {"model": "MODEL", "out": "EXPORTED"},
    "classify pretrain": {"data.train": ["ROWS.jsonl"]},
    "classify train": {"data.train": ["ROWS.jsonl"]},
    "classify predict": {"model": "MODEL", "inputs": ["ROWS.jsonl"]},
}
"""What a command cannot do without -> what stands there until its user says it."""
_INSTEAD = {
    "infer": {"model": ("ckpt_dir",)},
    "pretrain": {"tokenizer": ("model.path",)},
    "eval": {"tasks": ("data.valid",)},
}
"""A setting that is not missing where another one is given."""
_HEADS = (
    ("changed", "Means something else here:"),
    ("lost", "Without a counterpart, left out:"),
    ("unknown", "Not known to this converter, left out:"),
    ("needless", "Nothing to set for:"),
)
_SAID = {"changed": "changed", "lost": "left out", "unknown": "not known", "needless": "not needed"}


def complete(made: Draft) -> None:
    """Note the settings that are missing, and check the whole.

    Raises:
        ConfigError: values that do not go together.
    """
    instead = _INSTEAD.get(made.command, {})
    for key, value in {**made.call.row.open, **_OPEN.get(made.command, {}), **made.call.row.open}.items():
        given = {**made.settings, **made.open}
        if key not in given and not any(other in given for other in instead.get(key, ())):
            made.open[key] = value
    load.build(made.command, tree(made), f"{made.call.theirs} as `anabatic {made.command}`")


def tree(made: Draft) -> dict[str, Any]:
    """Return the settings, and what stands for missing ones, section by section."""
    values = {key: given.value for key, given in made.settings.items()} | made.open
    return _nested(values)


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return result


def show(made: Draft, others: list[str]) -> str:
    """Return a recipe of one command."""
    lines = [f"# {line}" for line in _usage(made)]
    lines += [f"# From: {part}" if not at else f"#   {part}" for at, part in enumerate(wrapped(made.call.typed))]
    lines += [*told(made.notes), *passed_over(others)]
    return "\n".join([*lines, *body(made)]) + "\n"


def _usage(made: Draft) -> list[str]:
    """How the recipe is run."""
    words = ["anabatic", *shlex.split(made.command), "-c", "FILE"]
    if made.launch:
        words = ["anabatic", "launch", *made.launch, "--", *shlex.split(made.command), "-c", "FILE"]
    return [" ".join([*made.variables, shlex.join(words)])]


def wrapped(text: str) -> list[str]:
    """Return a text as lines of a comment."""
    return textwrap.wrap(_plain(text), WIDTH - 8, break_on_hyphens=False, break_long_words=False) or [""]


def _plain(text: str) -> str:
    """Return a text that may stand in a comment: YAML has no control characters there."""
    return "".join(one if one.isprintable() else "?" for one in " ".join(text.split()))


def told(notes: Notes) -> Iterator[str]:
    """Yield the notes as comments."""
    for name, head in _HEADS:
        some = list(dict.fromkeys(getattr(notes, name)))
        if some:
            yield from ("#", f"# {head}")
        for note in some:
            for at, part in enumerate(wrapped(note)):
                yield f"#   {part}" if not at else f"#     {part}"


def passed_over(others: list[str]) -> Iterator[str]:
    """Yield the commands that belong to nothing known, as a comment."""
    if others:
        yield "#"
        for at, part in enumerate(wrapped(", ".join(dict.fromkeys(others)))[:6]):
            yield f"# {part}" if at else f"# Passed over: {part}"


def body(made: Draft, indent: str = "") -> list[str]:
    """Return the settings as YAML, each with where it comes from."""
    values: dict[str, Given] = dict(made.settings)
    for key, value in made.open.items():
        values[key] = Given(value, "fill in" if "${" not in str(value) else "")
    order = {key: at for at, (key, _) in enumerate(check.leaves(commands.get(made.command).job_class()))}
    keys = sorted(values, key=lambda key: order[key])
    lines: list[str] = []
    section = ""
    for key in keys:
        head, _, name = key.rpartition(".")
        if head != section and head:
            lines.append(f"{indent}{head}:")
        section = head
        inner = indent + ("  " if head else "")
        text = f"{inner}{name}: {yaml_file.scalar(values[key].value)}"
        origin = _plain(values[key].origin)
        lines.append(f"{text}  # {origin}"[:200] if origin else text)
    return lines


def reports(notes: Notes) -> list[str]:
    """Return the notes as lines for the terminal."""
    return [f"{_SAID[name]}: {_plain(note)}" for name, _ in _HEADS for note in dict.fromkeys(getattr(notes, name))]
