"""Settings of a command from defaults < files left to right < flags, and back to YAML; the recipe of `config show`."""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anabatic.config.loading import command_table, common_settings, shipped_recipes, validation, yaml_reader
from anabatic.core.errors import ConfigError


def load_job(
    command: str,
    files: Sequence[str | Path] = (),
    flags: dict[str, Any] | None = None,
    namer: validation.SettingNamer | None = None,
) -> Any:
    """Return the settings of `command`.

    Args:
        command: a name of the commands table, for example `tokenizer train`.
        files: recipes, as paths or names of shipped ones; a later one overrides an earlier one key by key, lists are
            replaced whole.
        flags: nested values that override the files; those of the command line are `validation.UntypedText`.
        namer: names a value of `flags` in messages; default: by its option.

    Raises:
        ConfigError: a file cannot be read, or a value is unknown, of the wrong type or out of range.
    """
    return _merge_job(command, _list_sources(files, flags, namer))


def find_origins(
    files: Sequence[str | Path] = (),
    flags: dict[str, Any] | None = None,
    namer: validation.SettingNamer | None = None,
) -> dict[str, str]:
    """Return dotted key -> where its value comes from: `recipe: r.yaml:12` or `given: --optim.lr`.

    Args:
        files, flags, namer: as of `load_job`.
    """
    found: dict[str, str] = {}
    for tree, where in _list_sources(files, flags, namer):
        for key in flatten_settings(tree):
            place = where.format_path(tuple(key.split(".")))
            file = place.removesuffix(f": {key}")
            found[key] = f"given: {place}" if file == place else f"recipe: {file}"
    return found


def flatten_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value of nested settings; the opposite of `nest_settings`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten_settings(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


_Source = tuple[dict[str, Any], validation.SettingNamer]


def _list_sources(
    files: Sequence[str | Path], flags: dict[str, Any] | None, namer: validation.SettingNamer | None
) -> list[_Source]:
    recipes = [shipped_recipes.read_recipe(file) for file in files]
    sources = [(recipe.tree, validation.SettingNamer(recipe.format_location)) for recipe in recipes]
    return [*sources, (flags, namer or validation.OptionNamer())] if flags else sources


def parse_job(command: str, text: str, origin: str) -> Any:
    """Return the settings of `command` from the text of a recipe; `origin` names it in messages.

    Raises:
        ConfigError: as for `load_job`.
    """
    source = yaml_reader.parse_yaml(text, origin)
    return _merge_job(command, [(source.tree, validation.SettingNamer(source.format_location))])


def _merge_job(command: str, origins: list[_Source]) -> Any:
    cls = command_table.COMMANDS.find_row(command).import_job_class()
    tree: dict[str, Any] = {}
    for given, where in origins:
        tree = merge_trees(tree, validation.check_section(given, cls, where))
    try:
        return make_settings(cls, tree)
    except ConfigError as error:
        raise _locate_error(error, cls, origins) from error


def _locate_error(error: ConfigError, cls: type, origins: list[_Source]) -> ConfigError:
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
    cls = command_table.COMMANDS.find_row(command).import_job_class()
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


def nest_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"model": {"depth": 4}}` for `{"model.depth": 4}`; dictionaries of one section are joined.

    Raises:
        ConfigError: a setting is given twice, or once as a value and once as a section.
    """
    tree: dict[str, Any] = {}
    for key, value in options.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{section} is given as a value and as a section", f"give {key} inside of {section}")
        if last in node and not (isinstance(node[last], dict) and isinstance(value, dict)):
            raise ConfigError(f"{key} is given twice", "give it once")
        node[last] = merge_trees(node[last], value) if last in node else value
    return tree


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


def render_settings(tree: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Return the lines of a recipe with these values, and behind each where it comes from, if that is said.

    Args:
        origins: dotted key -> text.
    """
    return list(_iter_setting_lines(tree, origins, ()))


def _iter_setting_lines(
    tree: Mapping[str, Any], origins: Mapping[str, str], above: yaml_reader.KeyPath
) -> Iterator[str]:
    indent = "  " * len(above)
    for name, value in tree.items():
        path = (*above, name)
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:"
            yield from _iter_setting_lines(value, origins, path)
            continue
        origin = origins.get(validation.dotted_key(path))
        yield f"{indent}{name}: {yaml_reader.dump_scalar(value)}" + (f"  # {origin}" if origin else "")


def render_template(command: str) -> str:
    """Return a commented recipe for `command` that holds every default; itself valid YAML for it.

    Raises:
        ConfigError: there is no such command.
    """
    cls = command_table.COMMANDS.find_row(command).import_job_class()
    lines = _render_head(command, cls) + _render_fields(cls, default_tree(cls), "")
    return "\n".join(lines).rstrip("\n") + "\n"


def render_common_template(command: str) -> str:
    """Return `render_template` with the common settings alone, by task; all where the command has no list of them.

    Raises:
        ConfigError: there is no such command.
    """
    cls = command_table.COMMANDS.find_row(command).import_job_class()
    tasks = common_settings.get_common_settings(command)
    if not tasks:
        return render_template(command)
    lines = _render_head(command, cls)
    for task, keys in tasks.items():
        fields = _render_fields(cls, default_tree(cls), "", _nest_keys(keys))
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
    lines = _render_fields(cls, default_tree(cls), "    ")
    return [f"{indent}#   NAME:", *(f"{indent}# {line}" if line else f"{indent}#" for line in lines)]


def _render_comment(text: str, indent: str) -> list[str]:
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        if lines:
            lines.append(f"{indent}#")
        lines += [f"{indent}# {line}" for line in textwrap.wrap(paragraph, COMMENT_WIDTH - len(indent))]
    return lines
