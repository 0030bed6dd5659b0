"""`anabatic config show`: a recipe with the settings of a command, their defaults and meanings."""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
import textwrap
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anabatic.config.loading import command_table, common_settings, settings, validation, yaml_reader

COMMENT_WIDTH = 100


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string literal that stands below it in the source of `cls`, or of the class it extends."""
    return {name: doc for owner in reversed(_dataclass_bases(cls)) for name, doc in _read_class_docs(owner).items()}


def find_documenting_class(cls: type, name: str) -> type:
    """Return the class that explains the field `name` of `cls`: itself, or one that it extends."""
    return next((each for each in _dataclass_bases(cls) if name in _read_class_docs(each)), cls)


def _dataclass_bases(cls: type) -> list[type]:
    return [each for each in cls.__mro__ if dataclasses.is_dataclass(each)]


def _read_class_docs(cls: type) -> dict[str, str]:
    return _parse_file_docs(str(sys.modules[cls.__module__].__file__))[cls.__name__]


@functools.cache
def _parse_file_docs(file: str) -> dict[str, dict[str, str]]:
    result: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            result[node.name] = dict(_parse_class_docs(node))
    return result


def _parse_class_docs(node: ast.ClassDef) -> typing.Iterator[tuple[str, str]]:
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        constant = below.value if isinstance(below, ast.Expr) else None
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            yield field.target.id, " ".join(constant.value.split())


def class_doc(cls: type) -> str:
    """Return the docstring of a dataclass, unwrapped into paragraphs."""
    paragraphs = textwrap.dedent("    " + (cls.__doc__ or "")).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def render_template(command: str) -> str:
    """Return a commented recipe for `command` that holds every default; itself valid YAML for it.

    Raises:
        ConfigError: there is no such command.
    """
    cls = command_table.get_command(command).import_job_class()
    lines = _render_head(command, cls) + _render_fields(cls, settings.default_tree(cls), "")
    return "\n".join(lines).rstrip("\n") + "\n"


def render_common_template(command: str) -> str:
    """Return `render_template` with the common settings alone, by task; all where the command has no list of them.

    Raises:
        ConfigError: there is no such command.
    """
    cls = command_table.get_command(command).import_job_class()
    tasks = common_settings.get_common_settings(command)
    if not tasks:
        return render_template(command)
    lines = _render_head(command, cls)
    for task, keys in tasks.items():
        fields = _render_fields(cls, settings.default_tree(cls), "", _nest_keys(keys))
        lines += [f"# ==== {task} ====", *([""] if fields[0] else []), *fields, ""]
    number = common_settings.count_further_settings(command)
    lines.append(f"# {number} more settings: anabatic config show {command} --all")
    return "\n".join(lines) + "\n"


def _render_head(command: str, cls: type) -> list[str]:
    return [f"# anabatic {command} -c FILE", "#", *_render_comment(class_doc(cls), ""), ""]


def _nest_keys(keys: Sequence[str]) -> dict[str, list[str]]:
    """`out, data.train, data.valid` -> `{"out": [], "data": ["train", "valid"]}`, sections behind the others."""
    nested: dict[str, list[str]] = {}
    for key in sorted(keys, key=lambda key: "." in key):
        first, _, rest = key.partition(".")
        nested.setdefault(first, []).extend([rest] if rest else [])
    return nested


def _render_fields(
    cls: type, values: dict[str, Any], indent: str, chosen: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Return the lines of the settings of `cls`, or of those `chosen`: name -> names inside, where it is a section."""
    lines: list[str] = []
    docs = field_docs(cls)
    hints = validation.field_types(cls)
    for name in hints if chosen is None else chosen:
        hint, value = hints[name], values[name]
        if dataclasses.is_dataclass(hint):
            section = typing.cast(type, hint)
            inside = None if chosen is None else _nest_keys(chosen[name])
            lines += ["", *_render_comment(class_doc(section), indent), f"{indent}{name}:"]
            lines += _render_fields(section, value, indent + "  ", inside)
            continue
        lines += _render_comment(_describe_setting(docs.get(name, ""), hint), indent)
        lines += _render_entry_example(hint, indent)
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            lines += [f"{indent}{name}:", *(f"{indent}  - {yaml_reader.dump_scalar(item)}" for item in value)]
        else:
            lines.append(f"{indent}{name}: {yaml_reader.dump_scalar(value)}")
    return lines


def _describe_setting(doc: str, hint: Any) -> str:
    inner, _ = validation.strip_optional(hint)
    if typing.get_origin(inner) is list:
        (inner,) = typing.get_args(inner)
    if typing.get_origin(inner) is typing.Literal:
        return f"{doc} Choices: {', '.join(typing.get_args(inner))}."
    return doc


def _render_entry_example(hint: Any, indent: str) -> list[str]:
    if typing.get_origin(hint) is not dict or not dataclasses.is_dataclass(typing.get_args(hint)[1]):
        return []
    cls = typing.get_args(hint)[1]
    lines = _render_fields(cls, settings.default_tree(cls), "    ")
    return [f"{indent}#   NAME:", *(f"{indent}# {line}" if line else f"{indent}#" for line in lines)]


def _render_comment(text: str, indent: str) -> list[str]:
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        if lines:
            lines.append(f"{indent}#")
        lines += [f"{indent}# {line}" for line in textwrap.wrap(paragraph, COMMENT_WIDTH - len(indent))]
    return lines
