"""A draft as a recipe: what is missing, YAML with comments, several commands as a pipeline."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from typing import Any

from anabatic.config.loading import command_table, settings, validation, yaml_reader
from anabatic.convert.recipe_draft import ConversionNotes, RecipeDraft, SettingValue

LINE_WIDTH = 110
_REQUIRED_SETTINGS: dict[str, dict[str, Any]] = {
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
_ALTERNATIVE_SETTINGS = {
    "infer": {"model": ("ckpt_dir",)},
    "pretrain": {"tokenizer": ("model.path",)},
    "eval": {"tasks": ("data.valid",)},
}
"""A setting that is not missing where another one is given."""
_NOTE_HEADINGS = (
    ("changed", "Means something else here:"),
    ("lost", "Without a counterpart, left out:"),
    ("unknown", "Not known to this converter, left out:"),
    ("needless", "Nothing to set for:"),
)
_NOTE_LABELS = {"changed": "changed", "lost": "left out", "unknown": "not known", "needless": "not needed"}


def complete_draft(draft: RecipeDraft) -> None:
    """Note the settings that are missing, and check the whole.

    Raises:
        ConfigError: values that do not go together.
    """
    instead = _ALTERNATIVE_SETTINGS.get(draft.command, {})
    for key, value in {
        **draft.call.row.open,
        **_REQUIRED_SETTINGS.get(draft.command, {}),
        **draft.call.row.open,
    }.items():
        given = {**draft.settings, **draft.placeholders}
        if key not in given and not any(other in given for other in instead.get(key, ())):
            draft.placeholders[key] = value
    settings.build_job(draft.command, draft_to_tree(draft), f"{draft.call.peer_name} as `anabatic {draft.command}`")


def draft_to_tree(draft: RecipeDraft) -> dict[str, Any]:
    """Return the settings, and what stands for missing ones, section by section."""
    values = {key: given.value for key, given in draft.settings.items()} | draft.placeholders
    return settings.nest_settings(values)


def render_recipe(draft: RecipeDraft, others: list[str]) -> str:
    """Return a recipe of one command."""
    lines = [f"# {line}" for line in _render_usage(draft)]
    lines += [
        f"# From: {part}" if not at else f"#   {part}" for at, part in enumerate(wrap_comment(draft.call.command_line))
    ]
    lines += [*render_notes(draft.notes), *render_skipped_commands(others)]
    return "\n".join([*lines, *render_settings(draft)]) + "\n"


def _render_usage(draft: RecipeDraft) -> list[str]:
    """How the recipe is run."""
    words = ["anabatic", *shlex.split(draft.command), "-c", "FILE"]
    if draft.launch_options:
        words = ["anabatic", "launch", *draft.launch_options, "--", *shlex.split(draft.command), "-c", "FILE"]
    return [" ".join([*draft.variables, shlex.join(words)])]


def wrap_comment(text: str) -> list[str]:
    """Return a text as lines of a comment."""
    return textwrap.wrap(_printable_text(text), LINE_WIDTH - 8, break_on_hyphens=False, break_long_words=False) or [""]


def _printable_text(text: str) -> str:
    """Return a text that may stand in a comment: YAML has no control characters there."""
    return "".join(one if one.isprintable() else "?" for one in " ".join(text.split()))


def render_notes(notes: ConversionNotes) -> Iterator[str]:
    """Yield the notes as comments."""
    for name, head in _NOTE_HEADINGS:
        some = list(dict.fromkeys(getattr(notes, name)))
        if some:
            yield from ("#", f"# {head}")
        for note in some:
            for at, part in enumerate(wrap_comment(note)):
                yield f"#   {part}" if not at else f"#     {part}"


def render_skipped_commands(others: list[str]) -> Iterator[str]:
    """Yield the commands that belong to nothing known, as a comment."""
    if others:
        yield "#"
        for at, part in enumerate(wrap_comment(", ".join(dict.fromkeys(others)))[:6]):
            yield f"# {part}" if at else f"# Skipped: {part}"


def render_settings(draft: RecipeDraft, indent: str = "") -> list[str]:
    """Return the settings as YAML, each with where it comes from."""
    values: dict[str, SettingValue] = dict(draft.settings)
    for key, value in draft.placeholders.items():
        values[key] = SettingValue(value, "fill in" if "${" not in str(value) else "")
    order = {
        key: at
        for at, (key, _) in enumerate(
            validation.iter_settings(command_table.COMMANDS.find_row(draft.command).import_job_class())
        )
    }
    keys = sorted(values, key=lambda key: order[key])
    lines: list[str] = []
    section = ""
    for key in keys:
        head, _, name = key.rpartition(".")
        if head != section and head:
            lines.append(f"{indent}{head}:")
        section = head
        inner = indent + ("  " if head else "")
        text = f"{inner}{name}: {yaml_reader.dump_scalar(values[key].value)}"
        origin = _printable_text(values[key].origin)
        lines.append(f"{text}  # {origin}"[:200] if origin else text)
    return lines


def format_reports(notes: ConversionNotes) -> list[str]:
    """Return the notes as lines for the terminal."""
    return [
        f"{_NOTE_LABELS[name]}: {_printable_text(note)}"
        for name, _ in _NOTE_HEADINGS
        for note in dict.fromkeys(getattr(notes, name))
    ]
