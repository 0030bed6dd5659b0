"""Settings of a command from defaults < files left to right < flags, and back to YAML."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from anabatic.config.loading import command_table, validation, yaml_reader
from anabatic.core.errors import ConfigError


def load_job(command: str, files: Sequence[str | Path] = (), flags: dict[str, Any] | None = None) -> Any:
    """Return the settings of `command`.

    Args:
        command: a name of the commands table, for example `tokenizer train`.
        files: recipes; a later one overrides an earlier one key by key, lists are replaced whole.
        flags: nested values from the command line, as `validation.UntypedText`; they override the files.

    Raises:
        ConfigError: a file cannot be read, or a value is unknown, of the wrong type or out of range.
    """
    cls = command_table.get_command(command).import_job_class()
    tree: dict[str, Any] = {}
    origins: list[tuple[dict[str, Any], validation.SettingNamer]] = []
    for file in files:
        source = yaml_reader.read_yaml(file)
        origins.append((source.tree, validation.SettingNamer(source.format_location)))
    if flags:
        origins.append((flags, validation.OptionNamer()))
    for given, where in origins:
        tree = merge_trees(tree, validation.check_section(given, cls, where))
    try:
        return make_settings(cls, tree)
    except ConfigError as error:
        raise _locate_error(error, cls, origins) from error


def _locate_error(
    error: ConfigError, cls: type, origins: list[tuple[dict[str, Any], validation.SettingNamer]]
) -> ConfigError:
    """Name the file and line, or the option, of the setting that a message about its value begins with."""
    first, _, rest = str(error).partition(" ")
    path: yaml_reader.KeyPath = tuple(first.split("."))
    if first not in dict(validation.iter_settings(cls)):
        return error
    for tree, where in reversed(origins):
        if _has_path(tree, path):
            return ConfigError(f"{where.format_path(path)} {rest}", error.hint)
    return error


def _has_path(tree: Any, path: yaml_reader.KeyPath) -> bool:
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def build_job(command: str, tree: dict[str, Any], origin: str) -> Any:
    """Return the settings of `command` from a tree of values; `origin` names it in messages.

    Raises:
        ConfigError: a value is unknown, of the wrong type or out of range.
    """
    cls = command_table.get_command(command).import_job_class()
    values = validation.check_section(tree, cls, validation.SettingNamer(f"{origin}: " if origin else ""))
    try:
        return make_settings(cls, values)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}" if origin else str(error), error.hint) from error


def merge_trees(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return `below` overridden by `above`, section by section; lists and single values are replaced."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = merge_trees(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def make_settings(cls: type, values: dict[str, Any]) -> Any:
    """Build dataclass `cls` from checked values; a section starts from the defaults of this command.

    (`sft` has another default optimizer than `pretrain`: giving `optim.lr` alone must not lose it.)
    """
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        hint = validation.field_types(cls)[field.name]
        if field.name not in values:
            continue
        value = values[field.name]
        if dataclasses.is_dataclass(hint):
            value = _override_section(typing.cast(type, hint), field_default(field), value)
        elif typing.get_origin(hint) is dict and dataclasses.is_dataclass(typing.get_args(hint)[1]):
            value = {
                name: _make_entry(typing.get_args(hint)[1], entry, f"{field.name}.{name}")
                for name, entry in value.items()
            }
        elif is_list_of_sections(hint):
            inner = typing.get_args(hint)[0]
            value = [_make_entry(inner, entry, f"{field.name}[{at}]") for at, entry in enumerate(value)]
        arguments[field.name] = value
    return cls(**arguments)


def _make_entry(cls: type, values: dict[str, Any], where: str) -> Any:
    try:
        return make_settings(cls, values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", error.hint) from error


def _override_section(cls: type, base: Any, values: dict[str, Any]) -> Any:
    arguments = {field.name: getattr(base, field.name) for field in dataclasses.fields(cls)}
    for name, value in values.items():
        hint = validation.field_types(cls)[name]
        if dataclasses.is_dataclass(hint):
            value = _override_section(typing.cast(type, hint), arguments[name], value)
        elif is_list_of_sections(hint):
            inner = typing.get_args(hint)[0]
            value = [_make_entry(inner, entry, f"{name}[{at}]") for at, entry in enumerate(value)]
        arguments[name] = value
    return cls(**arguments)


def is_list_of_sections(hint: Any) -> bool:
    """True for `list[SomeDataclass]`."""
    return typing.get_origin(hint) is list and dataclasses.is_dataclass(typing.get_args(hint)[0])


def field_default(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default value (every setting has one)."""
    if field.default_factory is not dataclasses.MISSING:
        factory: Callable[[], Any] = field.default_factory
        return factory()
    return field.default


def default_tree(cls: type) -> dict[str, Any]:
    """Return the tree of a command's default values, without the checks of a whole job."""
    tree: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        value = field_default(field)
        tree[field.name] = _to_plain(value)
    return tree


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return job_to_dict(value)
    return [_to_plain(item) for item in value] if isinstance(value, list) else value


def job_to_dict(job: Any) -> dict[str, Any]:
    """Return a job as nested dictionaries of plain values."""
    return dataclasses.asdict(job)


def dump_job(job: Any) -> str:
    """Return the resolved job as YAML; itself valid input of the command."""
    return yaml_reader.dump_yaml(job_to_dict(job))
