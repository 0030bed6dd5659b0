"""JSON Schema (draft 7, what editors' YAML support reads) of the recipes of a command, from its dataclasses.

https://json-schema.org/draft-07/schema; https://github.com/redhat-developer/yaml-language-server reads it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

from anabatic.config.loading import command_table, settings, shipped_recipes, validation

DIALECT = "http://json-schema.org/draft-07/schema#"
_PLACEHOLDER = {"type": "string", "pattern": r"\$\{\w+\}"}
"""In a pipeline any value may come from `vars` or an earlier stage."""


def make_schema(command: str) -> dict[str, Any]:
    """Return the schema of the recipes of `command`. Nothing is required: a recipe may be one of several.

    Raises:
        ConfigError: there is no such command.
    """
    cls = command_table.COMMANDS.find_row(command).import_job_class()
    builder = _SchemaBuilder(allows_placeholders=command == "run")
    schema = builder.describe_section(cls, settings.default_tree(cls))
    schema |= {"$schema": DIALECT, "title": f"anabatic {command}"}
    if command == "run":
        stage = builder.definitions["PipelineStage"]
        stage["properties"]["command"]["enum"] = [name for name in command_table.COMMANDS if name != "run"]
        stage["allOf"] = [
            {
                "if": {"properties": {"command": {"const": name}}, "required": ["command"]},
                "then": {"properties": {"job": builder.refer_to_section(row.import_job_class(), name)}},
            }
            for name, row in command_table.COMMANDS.items()
            if name != "run"
        ]
    return {**schema, **({"definitions": builder.definitions} if builder.definitions else {})}


def list_schema_files() -> dict[str, Path]:
    """Return the commands that have a file in the package."""
    commands = dict.fromkeys(recipe.command for recipe in shipped_recipes.RECIPES.values())
    return {command: command_table.COMMANDS.find_row(command).schema_file for command in commands}


def write_schema_files() -> None:
    """Write every schema that is not current; the build of the package does."""
    for command, file in list_schema_files().items():
        text = render_schema(command)
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")


def render_schema(command: str) -> str:
    """Return the schema of a command as JSON text.

    Raises:
        ConfigError: there is no such command.
    """
    return json.dumps(make_schema(command), indent=1, ensure_ascii=False) + "\n"


class _SchemaBuilder:
    """Builds one document; sections that several settings share stand once, under `definitions`."""

    def __init__(self, allows_placeholders: bool) -> None:
        self.allows_placeholders = allows_placeholders
        self.definitions: dict[str, Any] = {}

    def describe_section(self, cls: type, defaults: dict[str, Any]) -> dict[str, Any]:
        docs = settings.field_docs(cls)
        properties: dict[str, Any] = {}
        for name, hint in validation.field_types(cls).items():
            if dataclasses.is_dataclass(hint):
                properties[name] = self.refer_to_section(typing.cast(type, hint))
                continue
            schema = self.describe_type(hint)
            if name in docs:
                schema = {"description": docs[name], **schema}
            if defaults[name] not in (None, "", [], {}):
                schema["default"] = defaults[name]
            properties[name] = schema
        summary = settings.class_doc(cls).split("\n\n")[0]
        return {"description": summary, "type": "object", "properties": properties, "additionalProperties": False}

    def refer_to_section(self, cls: type, name: str = "") -> dict[str, Any]:
        """Return the reference to a section. Its own defaults: a command's may differ and would need a copy each."""
        key = re.sub(r"\W+", "-", name) or cls.__name__
        if key not in self.definitions:
            self.definitions[key] = {}  # a section that holds itself ends here
            self.definitions[key] = self.describe_section(cls, settings.default_tree(cls))
        return {"$ref": f"#/definitions/{key}"}

    def describe_type(self, hint: Any) -> dict[str, Any]:
        inner, is_optional = validation.strip_optional(hint)
        schema = self._describe_value(inner)
        options = [schema]
        if is_optional:
            options.append({"type": "null"})
        if self.allows_placeholders and inner is not str and inner is not Any:
            options.append(_PLACEHOLDER)
        return schema if len(options) == 1 else {"anyOf": options}

    def _describe_value(self, hint: Any) -> dict[str, Any]:
        if hint is Any:
            return {}
        if dataclasses.is_dataclass(hint):
            return self.refer_to_section(typing.cast(type, hint))
        kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
        if kind is typing.Literal:
            return {"enum": list(arguments)}
        if kind is dict:
            values = self.describe_type(arguments[1]) if arguments else {}
            return {"type": "object", "additionalProperties": values or True}
        if kind is list:
            items = {"type": "array", "items": self.describe_type(arguments[0])}
            return {"anyOf": [items, {"type": "string"}]} if arguments[0] is str else items
        if kind is float:  # `3e-4` is text for parsers of YAML 1.1
            return {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^[-+]?[0-9._]+([eE][-+]?[0-9]+)?$"}]}
        return {"type": {int: "integer", bool: "boolean", str: "string"}[kind]}
