"""The form of a command, described from its dataclass: what the page shows as fields."""

from __future__ import annotations

import dataclasses
import functools
import typing
from pathlib import Path
from typing import Any

from anabatic.config.loading import command_table, common_settings, settings, validation
from anabatic.core import json_reader

FORM_COMMANDS = (
    "sft",
    "pretrain",
    "dpo",
    "reward",
    "rl",
    "classify pretrain",
    "classify train",
    "eval",
    "tokenizer train",
    "export",
    "merge",
    "checkpoint export",
    "run",
)
"""Commands that the studio starts: they run to an end without asking."""

MODEL_KEYS = ("model", "tokenizer", "model.path", "reference")
"""Settings that name a model: the page offers those it knows."""
DATA_KEYS = ("data.train", "data.valid", "inputs")
"""Settings that name files of rows."""

_KINDS: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "text"}


_CHINESE = Path(__file__).parent / "web" / "form_zh.json"


@functools.cache
def _read_chinese_texts() -> dict[str, dict[str, str]]:
    texts: dict[str, dict[str, str]] = json_reader.loads(_CHINESE.read_text(encoding="utf-8"))
    return texts


@functools.cache
def list_commands() -> list[dict[str, Any]]:
    """Return name, one line of help, and whether it trains, of each command with a form."""
    return [
        {"name": row.name, "help": row.help, "trains": row.is_training}
        for row in map(command_table.COMMANDS.find_row, FORM_COMMANDS)
    ]


@functools.cache
def describe_form(command: str) -> dict[str, Any]:
    """Return the fields of a command.

    Returns:
        `command`, `help`, and `groups`: each with `title`, `zh` (the title in Chinese; empty: the name of a section),
        `common` (shown without "all settings") and `fields`. A field has `key` (dotted), `kind` (integer, number,
        boolean, text, choice, list, section), `item` (kind of a list's items), `choices`, `default`, `optional` (null
        is a value), `doc`, `zh` (the same in Chinese, or empty), `picks` (model, data or empty).

    Raises:
        ConfigError: there is no such command.
    """
    row = command_table.COMMANDS.find_row(command)
    cls = row.import_job_class()
    fields = {field["key"]: field for field in _describe_fields(cls, settings.default_tree(cls), "")}
    groups = []
    tasks = common_settings.get_common_settings(command)
    for title, keys in tasks.items():
        zh = _read_chinese_texts()["groups"].get(title, "")
        groups.append({"title": title, "zh": zh, "common": True, "fields": [fields.pop(key) for key in keys]})
    sections: dict[str, list[dict[str, Any]]] = {}
    for key, field in fields.items():
        sections.setdefault(key.rpartition(".")[0], []).append(field)
    for section, rest in sections.items():
        groups.append({"title": section or command, "zh": "", "common": not tasks, "fields": rest})
    return {"command": command, "help": row.help, "groups": groups}


def _describe_fields(cls: type, defaults: dict[str, Any], prefix: str) -> typing.Iterator[dict[str, Any]]:
    docs, chinese = settings.field_docs(cls), _read_chinese_texts()["fields"]
    for name, hint in validation.field_types(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _describe_fields(typing.cast(type, hint), defaults[name], f"{prefix}{name}.")
            continue
        key = prefix + name
        inner, is_optional = validation.strip_optional(hint)
        yield {
            "key": key,
            **_describe_type(inner),
            "default": defaults[name],
            "optional": is_optional,
            "doc": docs.get(name, ""),
            "zh": chinese.get(f"{settings.find_documenting_class(cls, name).__name__}.{name}", ""),
            "picks": "model" if key in MODEL_KEYS else "data" if key in DATA_KEYS else "",
        }


def _describe_type(hint: Any) -> dict[str, Any]:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return {"kind": "choice", "choices": list(typing.get_args(hint))}
    if origin is list:
        item = _describe_type(typing.get_args(hint)[0])
        if item["kind"] in ("section", "list"):
            return {"kind": "section"}
        return {"kind": "list", "item": item["kind"], **({"choices": item["choices"]} if "choices" in item else {})}
    return {"kind": _KINDS.get(hint, "section")}
